// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"fmt"
	"strings"
)

// The states of a jsonList. Those up to jsonClosed are between tokens.
const (
	jsonOpen       = iota // {
	jsonFirstKey          // a key or }
	jsonWantKey           // a key
	jsonColon             // :
	jsonMember            // the value of a member
	jsonNextMember        // , or }
	jsonFirstItem         // an item or ]
	jsonWantItem          // an item
	jsonNextItem          // , or ]
	jsonClosed            // white space only
	jsonInKey
	jsonInValue // of a member that is of interest
	jsonSkip    // of another member
	jsonInItem
)

// The members of a list that matter, as bits of jsonList.seen.
const (
	jsonKind = iota
	jsonAPIVersion
	jsonMetadata
	jsonItems
)

var jsonListMembers = map[string]uint{
	"kind": jsonKind, "apiVersion": jsonAPIVersion, "metadata": jsonMetadata, "items": jsonItems,
}

// jsonList is the parser for JSON: the members of one object, and the elements
// of its member items.
type jsonList struct {
	d          *ListDecoder
	state      int
	sc         jsonScanner
	member     uint // whose value comes
	seen       uint
	apiVersion string // of the list
	kind       string
	typed      bool // kind stands before apiVersion: a Go struct wrote it
}

func (l *jsonList) step(p []byte) (int, error) {
	switch {
	case l.state > jsonSkip:
		return l.token(p, l.item)
	case l.state == jsonSkip:
		n, done, err := l.sc.scan(p)
		if done {
			l.state = jsonNextMember
		}
		return n, err
	case l.state == jsonInValue:
		return l.token(p, l.value)
	case l.state == jsonInKey:
		return l.token(p, l.key)
	case isSpace(p[0]):
		return 1, nil
	}
	return l.between(p[0])
}

// token gathers one JSON value and hands it to use.
func (l *jsonList) token(p []byte, use func([]byte) error) (int, error) {
	d := l.d
	n, done, err := l.sc.scan(p)
	if err != nil {
		return n, err
	}
	if len(d.buf)+n > d.max {
		return n, ErrTooLarge
	}
	if !done {
		d.buf = append(d.buf, p[:n]...)
		return n, nil
	}
	val := p[:n]
	if len(d.buf) > 0 {
		d.buf = append(d.buf, val...)
		val = d.buf
	}
	err = use(val)
	d.release()
	return n, err
}

// between handles the byte c, no white space, between tokens. It returns 0 if c
// is the first byte of a token.
func (l *jsonList) between(c byte) (int, error) {
	begin := func(state int) (int, error) {
		l.state = state
		l.sc.reset()
		return 0, nil
	}
	switch l.state {
	case jsonOpen:
		if c == '{' {
			l.state = jsonFirstKey
			return 1, nil
		}
	case jsonFirstKey, jsonWantKey:
		if c == '"' {
			return begin(jsonInKey)
		}
		if c == '}' && l.state == jsonFirstKey {
			l.state = jsonClosed
			return 1, nil
		}
	case jsonColon:
		if c == ':' {
			l.state = jsonMember
			return 1, nil
		}
	case jsonMember:
		switch {
		case l.member > jsonItems:
			return begin(jsonSkip)
		case l.member != jsonItems || c == 'n':
			return begin(jsonInValue)
		case c == '[':
			l.state = jsonFirstItem
			return 1, l.settle()
		}
		return 0, fmt.Errorf("items is no array: %w", ErrNotList)
	case jsonNextMember:
		return l.separator(c, '}', jsonWantKey, jsonClosed)
	case jsonFirstItem, jsonWantItem:
		if c == '{' {
			return begin(jsonInItem)
		}
		if c == ']' && l.state == jsonFirstItem {
			l.state = jsonNextMember
			return 1, nil
		}
	case jsonNextItem:
		return l.separator(c, ']', jsonWantItem, jsonNextMember)
	}
	return 0, l.sc.unexpected(c)
}

// separator handles the byte behind a member or item.
func (l *jsonList) separator(c, end byte, more, ended int) (int, error) {
	switch c {
	case ',':
		l.state = more
	case end:
		l.state = ended
	default:
		return 0, l.sc.unexpected(c)
	}
	return 1, nil
}

func (l *jsonList) key(literal []byte) error {
	key, err := unquoteJSON(literal)
	if err != nil {
		return err
	}
	l.state = jsonColon
	member, ok := jsonListMembers[key]
	if !ok {
		l.member = jsonItems + 1
		return nil
	}
	l.member = member
	return once(&l.seen, member, key)
}

func (l *jsonList) value(val []byte) (err error) {
	l.state = jsonNextMember
	switch l.member {
	case jsonKind:
		l.kind, err = jsonString([]byte("kind"), val)
		l.typed = l.seen&(1<<jsonAPIVersion) == 0
		if err == nil && (l.kind == kindStatus || l.kind == kindTable) {
			err = fmt.Errorf("a %s: %w", l.kind, ErrNotList)
		}
	case jsonAPIVersion:
		l.apiVersion, err = jsonString([]byte("apiVersion"), val)
	case jsonMetadata:
		err = l.metadata(val)
	case jsonItems: // null
		err = l.settle()
	}
	return err
}

// metadata reads the ListMeta.
func (l *jsonList) metadata(val []byte) error {
	if isNull(val) {
		return nil
	}
	list := &l.d.list
	var seen uint
	for o := newJSONObject(val); ; {
		ok, err := o.next()
		if err != nil || !ok {
			return err
		}
		switch string(o.key) {
		case "resourceVersion":
			if err = once(&seen, 0, "resourceVersion"); err == nil {
				list.ResourceVersion, err = jsonString(o.key, o.value)
			}
		case "continue":
			if err = once(&seen, 1, "continue"); err == nil {
				list.Continue, err = jsonString(o.key, o.value)
			}
		case "remainingItemCount":
			if err = once(&seen, 2, "remainingItemCount"); err == nil && !isNull(o.value) {
				var n int64
				n, err = jsonInt(o.key, o.value)
				list.RemainingItemCount = &n
			}
		case "shardInfo":
			list.Sharded = list.Sharded || !isNull(o.value)
		case "name", "uid":
			err = fmt.Errorf("metadata of an object: %w", ErrNotList)
		}
		if err != nil {
			return err
		}
	}
}

// settle decides on the shape of the items when the first could come.
func (l *jsonList) settle() error {
	shape := &l.d.list.Shape
	switch {
	case l.apiVersion == "":
		return fmt.Errorf("items before apiVersion: %w", ErrMalformed)
	case l.typed:
		return l.d.setType(l.apiVersion, l.kind)
	case shape.Partial != "":
		return fmt.Errorf("no %s: %w", kindPartialList, ErrMalformed)
	}
	shape.APIVersion, shape.Unstructured = l.apiVersion, true
	return nil
}

// item handles one complete element of items.
func (l *jsonList) item(val []byte) error {
	l.state = jsonNextItem
	shape := &l.d.list.Shape
	switch {
	case shape.Unstructured:
		apiVersion, kind, _, unstructured, err := stripJSON(val)
		if err != nil {
			return err
		}
		if apiVersion != shape.APIVersion || kind != shape.Kind && shape.Kind != "" || !unstructured {
			return fmt.Errorf("item %s %s in a list of %s %s: %w", apiVersion, kind, shape.APIVersion, shape.Kind, ErrMalformed)
		}
		shape.Kind = kind
		return l.d.item(*shape, val)
	case shape.Partial != "":
		apiVersion, kind, bare, unstructured, err := stripJSON(val)
		if err != nil {
			return err
		}
		if apiVersion != shape.APIVersion || kind != shape.Kind || unstructured {
			return fmt.Errorf("item %s %s in a list of %s: %w", apiVersion, kind, shape.Kind, ErrMalformed)
		}
		return l.d.item(*shape, bare)
	}
	// A Go struct with a type begins with it.
	first := val[1:]
	for isSpace(first[0]) {
		first = first[1:]
	}
	switch head, _, _ := strings.Cut(string(first[:min(len(first), 16)]), ":"); head {
	case `"kind"`, `"apiVersion"`:
		return fmt.Errorf("item of a %s with a type of its own: %w", shape.ListKind, ErrMalformed)
	}
	if first[0] == '}' {
		val = []byte(emptyJSONObject)
	}
	return l.d.item(*shape, val)
}

func (l *jsonList) complete() error {
	const whole = 1<<jsonKind | 1<<jsonAPIVersion | 1<<jsonItems
	switch {
	case l.state != jsonClosed:
		return fmt.Errorf("list ends early: %w", ErrMalformed)
	case l.seen&(1<<jsonItems) == 0:
		return fmt.Errorf("%s %s has no items: %w", l.apiVersion, l.kind, ErrNotList)
	case l.seen&whole != whole || l.kind == "":
		return fmt.Errorf("list without kind: %w", ErrMalformed)
	}
	shape := &l.d.list.Shape
	if shape.Unstructured {
		shape.ListKind = l.kind
		if shape.Kind == "" {
			shape.Kind = strings.TrimSuffix(l.kind, "List")
		}
	}
	return shape.check()
}
