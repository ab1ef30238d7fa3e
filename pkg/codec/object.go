// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"fmt"
	"strings"
)

// Shape is what all objects of one list share on the wire. It is comparable.
//
// The bytes of an object without its shape are called bare. In protobuf that is
// the message without the k8s\0 envelope; in the JSON of built-in kinds and of
// PartialObjectMetadata the object without its leading kind and apiVersion; in
// the JSON of custom resources the object as it is on the wire.
type Shape struct {
	Representation
	// APIVersion and Kind are those of the objects, for example v1 and Pod.
	APIVersion, Kind string
	// ListKind is the kind of a list of them, for example PodList. [DecodeObject]
	// sets the name that follows from Kind, which a custom resource may have
	// changed; [ListDecoder] reports the real one. Empty for a Status.
	ListKind string
	// Unstructured marks the JSON of custom resources: keys sorted, kind and
	// apiVersion a part of the bare object and of list items.
	Unstructured bool
}

const emptyJSONObject = "{}"

// DecodeObject takes apart the body of a GET or the object of a watch frame.
// bare may alias wire, which is not changed. A Status is decoded too, whatever
// the representation, with Kind "Status"; look at Kind before anything is stored.
// The grammar of JSON is checked whole, a protobuf message is not looked into.
// Errors are ErrMalformed; that includes objects of another representation than rep.
func DecodeObject(rep Representation, wire []byte) (shape Shape, bare []byte, err error) {
	shape.Representation = rep
	if rep.Protobuf {
		shape.APIVersion, shape.Kind, bare, err = readUnknown(wire)
	} else {
		shape.APIVersion, shape.Kind, bare, shape.Unstructured, err = stripJSON(wire)
	}
	if err == nil {
		err = shape.check()
	}
	if err != nil {
		return Shape{}, nil, fmt.Errorf("decode object as %s: %w", rep, err)
	}
	if shape.Kind != kindStatus || shape.APIVersion != "v1" {
		shape.ListKind = shape.Kind + "List"
	}
	return shape, bare, nil
}

// check refuses whole objects where partial ones were expected, and the reverse.
func (s Shape) check() error {
	if s.Kind == kindStatus && s.APIVersion == "v1" {
		return nil
	}
	partial := s.Kind == kindPartial && strings.HasPrefix(s.APIVersion, metaGroup+"/")
	want := s.Partial != ""
	if partial != want || want && (s.APIVersion != metaGroup+"/"+s.Partial || s.Unstructured) {
		return fmt.Errorf("unexpected %s %s: %w", s.APIVersion, s.Kind, ErrMalformed)
	}
	return nil
}

// stripJSON checks a JSON object and takes kind and apiVersion off its head. If
// they are not there in this order, it is the JSON of a custom resource.
func stripJSON(wire []byte) (apiVersion, kind string, bare []byte, unstructured bool, err error) {
	var seen uint
	o := newJSONObject(wire)
	members, head := 0, 0 // head: how many of the first two are what they should be
	rest := -1            // offset of the third member
	for {
		ok, err := o.next()
		if err != nil {
			return "", "", nil, false, err
		}
		if !ok {
			break
		}
		switch string(o.key) {
		case "kind":
			err = once(&seen, 0, "kind")
			if err == nil {
				kind, err = jsonString(o.key, o.value)
			}
			if members == 0 {
				head++
			}
		case "apiVersion":
			err = once(&seen, 1, "apiVersion")
			if err == nil {
				apiVersion, err = jsonString(o.key, o.value)
			}
			if members == 1 {
				head++
			}
		}
		if err != nil {
			return "", "", nil, false, err
		}
		if members++; members == 3 {
			rest = o.start
		}
	}
	if kind == "" || apiVersion == "" {
		return "", "", nil, false, fmt.Errorf("object without kind or apiVersion: %w", ErrMalformed)
	}
	switch {
	case head != 2:
		return apiVersion, kind, trimJSON(wire), true, nil
	case rest < 0:
		return apiVersion, kind, []byte(emptyJSONObject), false, nil
	}
	bare = make([]byte, 0, 1+o.i-rest)
	return apiVersion, kind, append(append(bare, '{'), wire[rest:o.i]...), false, nil
}

func trimJSON(b []byte) []byte {
	for len(b) > 0 && isSpace(b[0]) {
		b = b[1:]
	}
	for len(b) > 0 && isSpace(b[len(b)-1]) {
		b = b[:len(b)-1]
	}
	return b
}

// AppendObject appends the object as the body of a GET: for what kube-apiserver
// sent, the very bytes that it sent.
func (s Shape) AppendObject(dst, bare []byte) []byte {
	if s.Protobuf {
		return s.appendWire(dst, bare)
	}
	return append(s.appendWire(dst, bare), '\n')
}

// ObjectLen is the number of bytes that AppendObject appends.
func (s Shape) ObjectLen(bareLen int) int {
	if s.Protobuf {
		return s.wireLen(bareLen)
	}
	return s.wireLen(bareLen) + 1
}

// appendWire appends the object with its type, as it stands in a watch frame.
func (s Shape) appendWire(dst, bare []byte) []byte {
	switch {
	case s.Protobuf:
		dst = appendUnknownHead(dst, s.APIVersion, s.Kind, len(bare))
		dst = append(dst, bare...)
		return append(dst, unknownEnd...)
	case s.Unstructured:
		return append(dst, bare...)
	}
	dst = append(dst, `{"kind":`...)
	dst = appendJSONString(dst, s.Kind)
	dst = append(dst, `,"apiVersion":`...)
	dst = appendJSONString(dst, s.APIVersion)
	if len(bare) <= len(emptyJSONObject) {
		return append(dst, '}')
	}
	dst = append(dst, ',')
	return append(dst, bare[1:]...)
}

func (s Shape) wireLen(bareLen int) int {
	switch {
	case s.Protobuf:
		return unknownLen(s.APIVersion, s.Kind, bareLen)
	case s.Unstructured:
		return bareLen
	}
	n := len(`{"kind":`) + jsonStringLen(s.Kind) + len(`,"apiVersion":`) + jsonStringLen(s.APIVersion)
	if bareLen <= len(emptyJSONObject) {
		return n + 1
	}
	return n + bareLen
}
