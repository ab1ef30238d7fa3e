// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// The tests read the wire by themselves: what they compare must not have gone
// through the code that they test.

// A List is an answer to a list, each item as its bytes.
type List struct {
	Kind            string
	ResourceVersion int64
	Continue        string
	Items           [][]byte
	Protobuf        bool
}

// ReadList reads the body of a list.
func ReadList(body []byte) (List, error) {
	if raw, ok := bytes.CutPrefix(body, []byte("k8s\x00")); ok {
		return readProtobufList(raw)
	}
	var l struct {
		Kind     string
		Metadata struct{ ResourceVersion, Continue string }
		Items    []json.RawMessage
	}
	if err := json.Unmarshal(body, &l); err != nil {
		return List{}, err
	}
	if l.Items == nil {
		return List{}, fmt.Errorf("%s is not a list", l.Kind)
	}
	rv, err := strconv.ParseInt(l.Metadata.ResourceVersion, 10, 64)
	out := List{Kind: l.Kind, ResourceVersion: rv, Continue: l.Metadata.Continue}
	for _, i := range l.Items {
		out.Items = append(out.Items, i)
	}
	return out, err
}

func readProtobufList(raw []byte) (List, error) {
	kind, object, err := readUnknown(raw)
	if err != nil {
		return List{}, err
	}
	if !strings.HasSuffix(kind, "List") {
		return List{}, fmt.Errorf("%s is not a list", kind)
	}
	l := List{Kind: kind, Protobuf: true}
	err = Fields(object, func(n protowire.Number, v []byte) error {
		switch n {
		case 1: // ListMeta
			return Fields(v, func(n protowire.Number, v []byte) (err error) {
				switch n {
				case 2:
					l.ResourceVersion, err = strconv.ParseInt(string(v), 10, 64)
				case 3:
					l.Continue = string(v)
				}
				return err
			})
		case 2:
			l.Items = append(l.Items, v)
		}
		return nil
	})
	return l, err
}

// readUnknown reads runtime.Unknown: the kind and the object.
func readUnknown(raw []byte) (kind string, object []byte, err error) {
	err = Fields(raw, func(n protowire.Number, v []byte) error {
		switch n {
		case 1: // TypeMeta
			return Fields(v, func(n protowire.Number, v []byte) error {
				if n == 2 {
					kind = string(v)
				}
				return nil
			})
		case 2:
			object = v
		}
		return nil
	})
	return kind, object, err
}

// Fields calls f with the length-delimited fields of a protobuf message.
func Fields(b []byte, f func(protowire.Number, []byte) error) error {
	for len(b) > 0 {
		n, t, w := protowire.ConsumeTag(b)
		if w < 0 {
			return protowire.ParseError(w)
		}
		b = b[w:]
		if t == protowire.BytesType {
			v, w := protowire.ConsumeBytes(b)
			if w < 0 {
				return protowire.ParseError(w)
			}
			if err := f(n, v); err != nil {
				return err
			}
			b = b[w:]
			continue
		}
		if w = protowire.ConsumeFieldValue(n, t, b); w < 0 {
			return protowire.ParseError(w)
		}
		b = b[w:]
	}
	return nil
}

// A Meta is what the tests want to know of an object.
type Meta struct {
	Key             string // namespace/name
	ResourceVersion int64
	Labels          map[string]string
}

// An Event is a frame of a watch.
type Event struct {
	Type   string // ADDED, MODIFIED, DELETED, BOOKMARK, ERROR
	Meta   Meta
	Item   []byte // the object as a list has it
	Synced bool   // a bookmark after the initial events
	Code   int    // of ERROR
}

var errFrame = errors.New("malformed frame")

// ReadMeta reads an item of a list. An item of a built-in kind has no kind of its
// own.
func ReadMeta(item []byte, protobuf bool) (m Meta, err error) {
	var namespace, name, rv string
	if !protobuf {
		var o struct {
			Metadata struct {
				Namespace, Name, ResourceVersion string
				Labels                           map[string]string
			}
		}
		if err := json.Unmarshal(item, &o); err != nil {
			return m, err
		}
		namespace, name, rv, m.Labels = o.Metadata.Namespace, o.Metadata.Name, o.Metadata.ResourceVersion, o.Metadata.Labels
	} else if err := Fields(item, func(n protowire.Number, v []byte) error {
		if n != 1 {
			return nil
		}
		return Fields(v, func(n protowire.Number, v []byte) error {
			switch n {
			case 1:
				name = string(v)
			case 3:
				namespace = string(v)
			case 6:
				rv = string(v)
			case 11:
				return m.label(v)
			}
			return nil
		})
	}); err != nil {
		return m, err
	}
	m.Key = namespace + "/" + name
	m.ResourceVersion, err = strconv.ParseInt(rv, 10, 64)
	return m, err
}

// label reads an entry of a map of strings.
func (m *Meta) label(entry []byte) error {
	var k, v string
	err := Fields(entry, func(n protowire.Number, b []byte) error {
		if n == 1 {
			k = string(b)
		} else {
			v = string(b)
		}
		return nil
	})
	if m.Labels == nil {
		m.Labels = map[string]string{}
	}
	m.Labels[k] = v
	return err
}

// Timeless returns an item without its resourceVersion: a deletion changes that,
// and nothing else.
func Timeless(item []byte, protobuf bool) (string, error) {
	if !protobuf {
		m, err := ReadMeta(item, false)
		return strings.Replace(string(item), fmt.Sprintf(`"resourceVersion":"%d"`, m.ResourceVersion), `"resourceVersion":""`, 1), err
	}
	return without(item, 1, 6)
}

// without returns a message without the fields at the path given, one number a
// level.
func without(b []byte, path ...protowire.Number) (string, error) {
	var out []byte
	for len(b) > 0 {
		n, t, w := protowire.ConsumeField(b)
		if w < 0 {
			return "", protowire.ParseError(w)
		}
		field := b[:w]
		b = b[w:]
		switch {
		case n != path[0]:
			out = append(out, field...)
		case len(path) > 1 && t == protowire.BytesType:
			v, _ := protowire.ConsumeBytes(field[protowire.SizeTag(n):])
			inner, err := without(v, path[1:]...)
			if err != nil {
				return "", err
			}
			out = protowire.AppendString(protowire.AppendTag(out, n, t), inner)
		}
	}
	return string(out), nil
}

// Frames returns a reader of the frames of a watch.
func Frames(r io.Reader, contentType string) func() (Event, error) {
	if strings.Contains(contentType, "protobuf") {
		return func() (Event, error) { return protobufFrame(r) }
	}
	d := json.NewDecoder(r)
	return func() (Event, error) {
		var f struct {
			Type   string
			Object json.RawMessage
		}
		if err := d.Decode(&f); err != nil {
			return Event{}, err
		}
		return jsonEvent(f.Type, f.Object)
	}
}

func jsonEvent(kind string, object []byte) (Event, error) {
	e := Event{Type: kind, Item: object}
	if kind == "ERROR" {
		var s struct{ Code int }
		err := json.Unmarshal(object, &s)
		e.Code = s.Code
		return e, err
	}
	e.Synced = kind == "BOOKMARK" && bytes.Contains(object, []byte("k8s.io/initial-events-end"))
	// Built-in kinds begin with kind and apiVersion, which list items do not have.
	if rest, ok := bytes.CutPrefix(object, []byte(`{"kind":"`)); ok {
		_, rest, ok = bytes.Cut(rest, []byte(`","apiVersion":"`))
		if !ok {
			return e, errFrame
		}
		if _, rest, ok = bytes.Cut(rest, []byte(`",`)); !ok {
			return e, errFrame
		}
		e.Item = append([]byte("{"), rest...)
	}
	var err error
	e.Meta, err = ReadMeta(e.Item, false)
	return e, err
}

func protobufFrame(r io.Reader) (e Event, err error) {
	var n [4]byte
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return e, err
	}
	b := make([]byte, binary.BigEndian.Uint32(n[:]))
	if _, err := io.ReadFull(r, b); err != nil {
		return e, err
	}
	var object []byte
	if err := Fields(b, func(n protowire.Number, v []byte) error {
		switch n {
		case 1:
			e.Type = string(v)
		case 2: // RawExtension
			return Fields(v, func(_ protowire.Number, v []byte) error { object = v; return nil })
		}
		return nil
	}); err != nil {
		return e, err
	}
	raw, ok := bytes.CutPrefix(object, []byte("k8s\x00"))
	if !ok {
		return e, errFrame
	}
	if _, e.Item, err = readUnknown(raw); err != nil {
		return e, err
	}
	if e.Type == "ERROR" {
		e.Code, err = statusCode(e.Item)
		return e, err
	}
	e.Synced = e.Type == "BOOKMARK" && bytes.Contains(e.Item, []byte("k8s.io/initial-events-end"))
	e.Meta, err = ReadMeta(e.Item, true)
	return e, err
}

// statusCode reads metav1.Status, field 6.
func statusCode(b []byte) (int, error) {
	for len(b) > 0 {
		n, t, w := protowire.ConsumeTag(b)
		if w < 0 {
			return 0, protowire.ParseError(w)
		}
		b = b[w:]
		if n == 6 && t == protowire.VarintType {
			v, w := protowire.ConsumeVarint(b)
			if w < 0 {
				return 0, protowire.ParseError(w)
			}
			return int(v), nil
		}
		if w = protowire.ConsumeFieldValue(n, t, b); w < 0 {
			return 0, protowire.ParseError(w)
		}
		b = b[w:]
	}
	return 0, nil
}
