// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"fmt"
	"hash/fnv"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
)

// Meta is what a cache needs to know of an object.
type Meta struct {
	Namespace, Name, UID, ResourceVersion string
	Generation                            int64
	// DeletionTimestamp is set if the object has one.
	DeletionTimestamp bool
}

// ReadMeta reads the metadata of a bare object. The object is not decoded, but its
// grammar is checked: in JSON all of it, in protobuf that of the outermost message
// and of ObjectMeta. What is absent or null is zero. An error is ErrMalformed: values
// of the wrong type, and members or messages that occur twice, which readers would
// understand in different ways. A Status has a ListMeta in this place: check
// [Shape].Kind before.
func ReadMeta(rep Representation, bare []byte) (Meta, error) {
	var meta Meta
	var err error
	if rep.Protobuf {
		err = meta.readProto(bare)
	} else {
		err = meta.readJSON(bare)
	}
	if err != nil {
		return Meta{}, fmt.Errorf("read metadata of %s object: %w", rep, err)
	}
	return meta, nil
}

func (m *Meta) readJSON(bare []byte) error {
	var seen uint
	for o := newJSONObject(bare); ; {
		ok, err := o.nextKey()
		if err != nil || !ok {
			return err
		}
		if string(o.key) != "metadata" || bare[o.at] == 'n' {
			if err = o.take(); err != nil {
				return err
			}
		}
		if string(o.key) != "metadata" {
			continue
		}
		if err = once(&seen, 0, o.key); err != nil {
			return err
		}
		if bare[o.at] == 'n' {
			continue
		}
		inner := o.descend()
		if err = m.readJSONMetadata(inner); err != nil {
			return err
		}
		o.resume(inner)
	}
}

func (m *Meta) readJSONMetadata(o *jsonObject) error {
	var seen uint
	for {
		ok, err := o.next()
		if err != nil || !ok {
			return err
		}
		var bit uint
		var field *string
		switch string(o.key) {
		case "name":
			bit, field = 0, &m.Name
		case "namespace":
			bit, field = 1, &m.Namespace
		case "uid":
			bit, field = 2, &m.UID
		case "resourceVersion":
			bit, field = 3, &m.ResourceVersion
		case "generation":
			bit = 4
			m.Generation, err = jsonInt(o.key, o.value)
		case "deletionTimestamp":
			bit = 5
			m.DeletionTimestamp, err = jsonTime(o.key, o.value)
		default:
			continue
		}
		if field != nil {
			*field, err = jsonString(o.key, o.value)
		}
		if err == nil {
			err = once(&seen, bit, o.key)
		}
		if err != nil {
			return err
		}
	}
}

// jsonTime reports whether the value is a time; null is none.
func jsonTime(key, value []byte) (bool, error) {
	s, err := jsonString(key, value)
	if err != nil || isNull(value) {
		return false, err
	}
	if _, err := time.Parse(time.RFC3339, s); err != nil {
		return false, fmt.Errorf("JSON member %q: %w: %w", key, err, ErrMalformed)
	}
	return true, nil
}

// jsonMetadataOf finds the member metadata of an object, and its offset. The value
// is nil if it is absent or null.
func jsonMetadataOf(bare []byte) (value []byte, at int, err error) {
	var seen uint
	for o := newJSONObject(bare); ; {
		ok, err := o.next()
		if err != nil {
			return nil, 0, err
		}
		if !ok {
			return value, at, nil
		}
		if string(o.key) != "metadata" {
			continue
		}
		if err := once(&seen, 0, "metadata"); err != nil {
			return nil, 0, err
		}
		if !isNull(o.value) {
			value, at = o.value, o.at
		}
	}
}

func (m *Meta) readProto(bare []byte) error {
	field, err := protoOnce(bare, objectMeta)
	if err != nil || field == nil {
		return err
	}
	for f := newProtoMessage(field.bytes); ; {
		ok, err := f.next()
		if err != nil || !ok {
			return err
		}
		switch f.num { // the last of several scalars counts, by the rules of protobuf
		case metaName:
			m.Name, err = f.text()
		case metaNamespace:
			m.Namespace, err = f.text()
		case metaUID:
			m.UID, err = f.text()
		case metaResourceVersion:
			m.ResourceVersion, err = f.text()
		case metaGeneration:
			m.Generation, err = f.number()
		case metaDeletionTimestamp:
			_, err = f.data()
			m.DeletionTimestamp = true
		}
		if err != nil {
			return err
		}
	}
}

// ReadAnnotation reads one annotation of a bare object and reports whether it is
// there. Errors are those of [ReadMeta].
func ReadAnnotation(rep Representation, bare []byte, key string) (string, bool, error) {
	var value string
	var found bool
	err := eachOfMap(rep, bare, "annotations", metaAnnotations, func(k []byte, v func() (string, error)) (err error) {
		if string(k) != key {
			return nil
		}
		if found && !rep.Protobuf {
			return fmt.Errorf("JSON member %q occurs twice: %w", key, ErrMalformed)
		}
		found = true
		value, err = v()
		return err
	})
	if err != nil {
		return "", false, fmt.Errorf("read annotation of %s object: %w", rep, err)
	}
	return value, found, nil
}

// HashLabels tells labels from others, whatever their order and encoding: equal ones have
// the same hash. It is the same in every process. Errors are those of [ReadMeta].
func HashLabels(rep Representation, bare []byte) (uint64, error) {
	var sum uint64
	err := eachOfMap(rep, bare, "labels", metaLabels, func(k []byte, v func() (string, error)) error {
		value, err := v()
		h := fnv.New64a()
		h.Write(k)
		h.Write([]byte{0})
		h.Write([]byte(value))
		sum += h.Sum64()
		return err
	})
	if err != nil {
		return 0, fmt.Errorf("read labels of %s object: %w", rep, err)
	}
	return sum, nil
}

// eachOfMap calls do for each entry of a map of strings in the metadata, in order.
// k is valid during the call only. Wrong types are errors also of entries that do
// does not look at.
func eachOfMap(rep Representation, bare []byte, name string, num protowire.Number, do func(k []byte, v func() (string, error)) error) error {
	if rep.Protobuf {
		return eachOfProtoMap(bare, num, do)
	}
	metadata, _, err := jsonMetadataOf(bare)
	if err != nil || metadata == nil {
		return err
	}
	var seen uint
	for o := newJSONObject(metadata); ; {
		ok, err := o.next()
		if err != nil || !ok {
			return err
		}
		if string(o.key) != name {
			continue
		}
		if err := once(&seen, 0, name); err != nil {
			return err
		}
		if isNull(o.value) {
			continue
		}
		if err := eachOfJSONMap(o.value, do); err != nil {
			return err
		}
	}
}

func eachOfJSONMap(object []byte, do func(k []byte, v func() (string, error)) error) error {
	o := newJSONObject(object)
	value := func() (string, error) { return jsonString(o.key, o.value) }
	for {
		ok, err := o.next()
		if err != nil || !ok {
			return err
		}
		if o.value[0] != '"' && !isNull(o.value) {
			return fmt.Errorf("JSON member %q is no string: %w", o.key, ErrMalformed)
		}
		if err := do(o.key, value); err != nil {
			return err
		}
	}
}

func eachOfProtoMap(bare []byte, num protowire.Number, do func(k []byte, v func() (string, error)) error) error {
	field, err := protoOnce(bare, objectMeta)
	if err != nil || field == nil {
		return err
	}
	var k, v []byte
	value := func() (string, error) { return string(v), nil }
	for f := newProtoMessage(field.bytes); ; {
		ok, err := f.next()
		if err != nil || !ok {
			return err
		}
		if f.num != num {
			continue
		}
		entry, err := f.data()
		if err != nil {
			return err
		}
		if k, v, err = readMapEntry(entry); err != nil {
			return err
		}
		if err := do(k, value); err != nil {
			return err
		}
	}
}

func readMapEntry(entry []byte) (k, v []byte, err error) {
	for m := newProtoMessage(entry); ; {
		ok, err := m.next()
		if err != nil || !ok {
			return k, v, err
		}
		switch m.num {
		case mapKey:
			k, err = m.data()
		case mapValue:
			v, err = m.data()
		}
		if err != nil {
			return nil, nil, err
		}
	}
}

// SetResourceVersion returns a copy of a bare object with another resourceVersion;
// everything else stays as it is, byte for byte. A resourceVersion that is absent
// is added; an object without metadata is an error, as is what [ReadMeta] refuses
// and a resourceVersion that occurs twice.
func SetResourceVersion(rep Representation, bare []byte, resourceVersion string) ([]byte, error) {
	set := setJSONResourceVersion
	if rep.Protobuf {
		set = setProtoResourceVersion
	}
	out, err := set(bare, resourceVersion)
	if err != nil {
		return nil, fmt.Errorf("set resourceVersion of %s object: %w", rep, err)
	}
	return out, nil
}

// beforeResourceVersion are the members of a metadata object behind which a Go
// struct has its resourceVersion.
var beforeResourceVersion = map[string]bool{
	"name": true, "generateName": true, "namespace": true, "selfLink": true, "uid": true,
}

func setJSONResourceVersion(bare []byte, resourceVersion string) ([]byte, error) {
	metadata, at, err := jsonMetadataOf(bare)
	if err != nil {
		return nil, err
	}
	if metadata == nil {
		return nil, fmt.Errorf("object without metadata: %w", ErrMalformed)
	}
	var seen uint
	from, to := 0, 0 // what is replaced, as offsets in metadata
	behind, members := 0, 0
	o := newJSONObject(metadata)
	for {
		ok, err := o.next()
		if err != nil {
			return nil, err
		}
		if !ok {
			break
		}
		members++
		if beforeResourceVersion[string(o.key)] {
			behind = o.i
		}
		if string(o.key) == "resourceVersion" {
			if err := once(&seen, 0, "resourceVersion"); err != nil {
				return nil, err
			}
			from, to = o.at, o.i
		}
	}
	out := make([]byte, 0, len(bare)+len(resourceVersion)+len(`,"resourceVersion":"",`))
	switch {
	case seen != 0:
		out = append(out, bare[:at+from]...)
		out = appendJSONString(out, resourceVersion)
	case behind > 0:
		from, to = behind, behind
		out = append(append(out, bare[:at+from]...), `,"resourceVersion":`...)
		out = appendJSONString(out, resourceVersion)
	default:
		from, to = 1, 1
		out = append(append(out, bare[:at+from]...), `"resourceVersion":`...)
		out = appendJSONString(out, resourceVersion)
		if members > 0 {
			out = append(out, ',')
		}
	}
	return append(out, bare[at+to:]...), nil
}

func setProtoResourceVersion(bare []byte, resourceVersion string) ([]byte, error) {
	field, err := protoOnce(bare, objectMeta)
	if err != nil {
		return nil, err
	}
	if field == nil {
		return nil, fmt.Errorf("object without metadata: %w", ErrMalformed)
	}
	inner := field.bytes
	from, to, found := len(inner), len(inner), false
	for f := newProtoMessage(inner); ; {
		ok, err := f.next()
		if err != nil {
			return nil, err
		}
		if !ok {
			break
		}
		switch {
		case f.num == metaResourceVersion:
			if _, err := f.data(); err != nil {
				return nil, err
			}
			if found {
				return nil, fmt.Errorf("protobuf field %d occurs twice: %w", f.num, ErrMalformed)
			}
			from, to, found = f.start, f.i, true
		case f.num > metaResourceVersion && !found && from == len(inner):
			from, to = f.start, f.start
		}
	}
	innerLen := from + protoFieldLen(len(resourceVersion)) + len(inner) - to
	out := make([]byte, 0, field.start+protoFieldLen(innerLen)+len(bare)-field.i)
	out = append(out, bare[:field.start]...)
	out = appendProtoHead(out, objectMeta, innerLen)
	out = append(out, inner[:from]...)
	out = appendProtoString(out, metaResourceVersion, resourceVersion)
	out = append(out, inner[to:]...)
	return append(out, bare[field.i:]...), nil
}
