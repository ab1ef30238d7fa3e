// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

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

// A list is an answer to a list, each item as its bytes.
type list struct {
	kind     string
	rv       int64
	next     string // continue token
	items    [][]byte
	protobuf bool
}

func readList(body []byte) (list, error) {
	if raw, ok := bytes.CutPrefix(body, []byte("k8s\x00")); ok {
		return readProtobufList(raw)
	}
	var l struct {
		Kind     string
		Metadata struct{ ResourceVersion, Continue string }
		Items    []json.RawMessage
	}
	if err := json.Unmarshal(body, &l); err != nil {
		return list{}, err
	}
	if l.Items == nil {
		return list{}, fmt.Errorf("%s is not a list", l.Kind)
	}
	rv, err := strconv.ParseInt(l.Metadata.ResourceVersion, 10, 64)
	out := list{kind: l.Kind, rv: rv, next: l.Metadata.Continue}
	for _, i := range l.Items {
		out.items = append(out.items, i)
	}
	return out, err
}

func readProtobufList(raw []byte) (list, error) {
	kind, object, err := readUnknown(raw)
	if err != nil {
		return list{}, err
	}
	if !strings.HasSuffix(kind, "List") {
		return list{}, fmt.Errorf("%s is not a list", kind)
	}
	l := list{kind: kind, protobuf: true}
	err = fields(object, func(n protowire.Number, v []byte) error {
		switch n {
		case 1: // ListMeta
			return fields(v, func(n protowire.Number, v []byte) (err error) {
				switch n {
				case 2:
					l.rv, err = strconv.ParseInt(string(v), 10, 64)
				case 3:
					l.next = string(v)
				}
				return err
			})
		case 2:
			l.items = append(l.items, v)
		}
		return nil
	})
	return l, err
}

// readUnknown reads runtime.Unknown: the kind and the object.
func readUnknown(raw []byte) (kind string, object []byte, err error) {
	err = fields(raw, func(n protowire.Number, v []byte) error {
		switch n {
		case 1: // TypeMeta
			return fields(v, func(n protowire.Number, v []byte) error {
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

// fields calls f with the length-delimited fields of a message.
func fields(b []byte, f func(protowire.Number, []byte) error) error {
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

// A meta is what the tests want to know of an object.
type meta struct {
	key    string // namespace/name
	rv     int64
	labels map[string]string
}

// An event is a frame of a watch.
type event struct {
	kind   string // ADDED, MODIFIED, DELETED, BOOKMARK, ERROR
	meta   meta
	item   []byte // the object as a list has it
	synced bool   // a bookmark after the initial events
	code   int    // of ERROR
}

var errFrame = errors.New("malformed frame")

// readMeta reads an item of a list. An item of a built-in kind has no kind of its
// own.
func readMeta(item []byte, protobuf bool) (m meta, err error) {
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
		namespace, name, rv, m.labels = o.Metadata.Namespace, o.Metadata.Name, o.Metadata.ResourceVersion, o.Metadata.Labels
	} else if err := fields(item, func(n protowire.Number, v []byte) error {
		if n != 1 {
			return nil
		}
		return fields(v, func(n protowire.Number, v []byte) error {
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
	m.key = namespace + "/" + name
	m.rv, err = strconv.ParseInt(rv, 10, 64)
	return m, err
}

// label reads an entry of a map of strings.
func (m *meta) label(entry []byte) error {
	var k, v string
	err := fields(entry, func(n protowire.Number, b []byte) error {
		if n == 1 {
			k = string(b)
		} else {
			v = string(b)
		}
		return nil
	})
	if m.labels == nil {
		m.labels = map[string]string{}
	}
	m.labels[k] = v
	return err
}

// frames returns a reader of the frames of a watch.
func frames(r io.Reader, contentType string) func() (event, error) {
	if strings.Contains(contentType, "protobuf") {
		return func() (event, error) { return protobufFrame(r) }
	}
	d := json.NewDecoder(r)
	return func() (event, error) {
		var f struct {
			Type   string
			Object json.RawMessage
		}
		if err := d.Decode(&f); err != nil {
			return event{}, err
		}
		return jsonEvent(f.Type, f.Object)
	}
}

func jsonEvent(kind string, object []byte) (event, error) {
	e := event{kind: kind, item: object}
	if kind == "ERROR" {
		var s struct{ Code int }
		err := json.Unmarshal(object, &s)
		e.code = s.Code
		return e, err
	}
	e.synced = kind == "BOOKMARK" && bytes.Contains(object, []byte("k8s.io/initial-events-end"))
	// Built-in kinds begin with kind and apiVersion, which list items do not have.
	if rest, ok := bytes.CutPrefix(object, []byte(`{"kind":"`)); ok {
		_, rest, ok = bytes.Cut(rest, []byte(`","apiVersion":"`))
		if !ok {
			return e, errFrame
		}
		if _, rest, ok = bytes.Cut(rest, []byte(`",`)); !ok {
			return e, errFrame
		}
		e.item = append([]byte("{"), rest...)
	}
	var err error
	e.meta, err = readMeta(e.item, false)
	return e, err
}

func protobufFrame(r io.Reader) (e event, err error) {
	var n [4]byte
	if _, err := io.ReadFull(r, n[:]); err != nil {
		return e, err
	}
	b := make([]byte, binary.BigEndian.Uint32(n[:]))
	if _, err := io.ReadFull(r, b); err != nil {
		return e, err
	}
	var object []byte
	if err := fields(b, func(n protowire.Number, v []byte) error {
		switch n {
		case 1:
			e.kind = string(v)
		case 2: // RawExtension
			return fields(v, func(_ protowire.Number, v []byte) error { object = v; return nil })
		}
		return nil
	}); err != nil {
		return e, err
	}
	raw, ok := bytes.CutPrefix(object, []byte("k8s\x00"))
	if !ok {
		return e, errFrame
	}
	if _, e.item, err = readUnknown(raw); err != nil {
		return e, err
	}
	if e.kind == "ERROR" {
		e.code, err = statusCode(e.item)
		return e, err
	}
	e.synced = e.kind == "BOOKMARK" && bytes.Contains(e.item, []byte("k8s.io/initial-events-end"))
	e.meta, err = readMeta(e.item, true)
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
