// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"bytes"

	"google.golang.org/protobuf/encoding/protowire"
)

// An Identity says which version of which object something is. Its fields alias
// the bytes of the object.
type Identity struct {
	Namespace, Name, ResourceVersion []byte
}

// PeekIdentity reads the identity from the first bytes of a bare object or, where
// wire is set, of one as a GET or a watch frame has it. It allocates nothing, looks
// at nothing behind the resourceVersion and checks nothing that it does not need: it
// is for those who have this very version already. It is false where the bytes do
// not reach that far or are not what an API server writes: then see [ReadMeta].
func PeekIdentity(rep Representation, b []byte, wire bool) (Identity, bool) {
	if !rep.Protobuf {
		return peekJSON(b)
	}
	if wire {
		var ok bool
		if b, ok = peekUnknown(b); !ok {
			return Identity{}, false
		}
	}
	num, b, ok := peekField(b)
	if !ok || num != objectMeta {
		return Identity{}, false
	}
	return peekProto(b)
}

// peekUnknown returns the beginning of the object in k8s\0 + runtime.Unknown.
func peekUnknown(b []byte) ([]byte, bool) {
	b, ok := bytes.CutPrefix(b, protoMagic)
	if !ok {
		return nil, false
	}
	num, typ, n := protowire.ConsumeTag(b)
	if n < 0 || num != unknownTypeMeta || typ != protowire.BytesType {
		return nil, false
	}
	_, size := protowire.ConsumeBytes(b[n:])
	if size < 0 {
		return nil, false
	}
	num, b, ok = peekField(b[n+size:])
	return b, ok && num == unknownRaw
}

// peekField returns what there is of a length-delimited field.
func peekField(b []byte) (protowire.Number, []byte, bool) {
	num, typ, n := protowire.ConsumeTag(b)
	if n < 0 || typ != protowire.BytesType {
		return 0, nil, false
	}
	size, k := protowire.ConsumeVarint(b[n:])
	if k < 0 {
		return 0, nil, false
	}
	b = b[n+k:]
	return num, b[:min(size, uint64(len(b)))], true
}

func peekProto(b []byte) (id Identity, ok bool) {
	for len(b) > 0 {
		num, typ, n := protowire.ConsumeTag(b)
		if n < 0 || typ != protowire.BytesType {
			return Identity{}, false // the API server has none of these before the resourceVersion
		}
		val, size := protowire.ConsumeBytes(b[n:])
		if size < 0 {
			return Identity{}, false
		}
		b = b[n+size:]
		switch num {
		case metaName:
			id.Name = val
		case metaNamespace:
			id.Namespace = val
		case metaResourceVersion:
			id.ResourceVersion = val
			return id, len(id.Name) > 0
		}
	}
	return Identity{}, false
}

// peekJSON relies on what Go structs and sorted keys have in common: in metadata the
// name and the namespace come before the resourceVersion.
func peekJSON(b []byte) (id Identity, ok bool) {
	o := jsonObject{b: b}
	for {
		if more, err := o.nextKey(); err != nil || !more {
			return Identity{}, false
		}
		if string(o.key) == "metadata" {
			break
		}
		if o.take() != nil {
			return Identity{}, false
		}
	}
	m := jsonObject{b: b, i: o.at, nested: true}
	for {
		if more, err := m.next(); err != nil || !more {
			return Identity{}, false
		}
		var field *[]byte
		switch string(m.key) {
		case "name":
			field = &id.Name
		case "namespace":
			field = &id.Namespace
		case "resourceVersion":
			field = &id.ResourceVersion
		default:
			continue
		}
		if v := m.value; len(v) < 2 || v[0] != '"' || !plainJSON(v[1:len(v)-1]) {
			return Identity{}, false
		}
		if *field = m.value[1 : len(m.value)-1]; id.ResourceVersion != nil {
			return id, len(id.Name) > 0
		}
	}
}
