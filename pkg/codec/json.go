// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"encoding/json"
	"fmt"
	"strconv"
	"unicode/utf8"
)

// jsonObject walks the members of one JSON object in memory, in order. Its
// grammar is checked as far as it has been walked; next returns false with a nil
// error only if nothing but white space follows the object.
type jsonObject struct {
	b []byte
	i int // offset behind what has been read

	// The member that next found.
	key   []byte // without quotes, escapes resolved
	value []byte
	at    int // offset of value in b
	start int // offset of the key's quote in b

	begun  bool
	nested bool // something may follow the object
	sc     jsonScanner
}

func newJSONObject(b []byte) *jsonObject { return &jsonObject{b: b} }

// next moves to the next member.
func (o *jsonObject) next() (bool, error) {
	ok, err := o.nextKey()
	if err != nil || !ok {
		return false, err
	}
	return true, o.take()
}

// nextKey moves to the value of the next member, which the caller must take or
// descend into before it goes on.
func (o *jsonObject) nextKey() (bool, error) {
	c, err := o.token()
	if err != nil {
		return false, err
	}
	first := !o.begun && c == '{'
	switch {
	case first, o.begun && c == ',':
		o.begun = true
		o.i++
		if c, err = o.token(); err != nil {
			return false, err
		}
		if c == '}' && first {
			return false, o.end()
		}
	case o.begun && c == '}':
		return false, o.end()
	default:
		return false, o.sc.unexpected(c)
	}
	return true, o.readKey(c)
}

// readKey reads a key, whose first byte is c, and the colon.
func (o *jsonObject) readKey(c byte) (err error) {
	if c != '"' {
		return o.sc.unexpected(c)
	}
	o.start = o.i
	literal, err := o.scan()
	if err != nil {
		return err
	}
	o.key = literal[1 : len(literal)-1]
	if !plainJSON(o.key) {
		key, err := unquoteJSON(literal)
		if err != nil {
			return err
		}
		o.key = []byte(key)
	}
	if c, err = o.token(); err != nil {
		return err
	}
	if c != ':' {
		return o.sc.unexpected(c)
	}
	o.i++
	_, err = o.token()
	o.at = o.i
	return err
}

// take reads the value at which nextKey stopped.
func (o *jsonObject) take() (err error) {
	o.value, err = o.scan()
	return err
}

// descend walks the value at which nextKey stopped, which must be an object. When
// that has been walked to its end, resume goes on behind it.
func (o *jsonObject) descend() *jsonObject { return &jsonObject{b: o.b, i: o.at, nested: true} }

func (o *jsonObject) resume(inner *jsonObject) { o.i = inner.i }

// scan takes one value, whose first byte is at o.i.
func (o *jsonObject) scan() ([]byte, error) {
	from := o.i
	if o.b[from] == '"' { // nearly always a string without escapes
		if end := from + 1 + plainRun(o.b[from+1:]); end < len(o.b) && o.b[end] == '"' {
			o.i = end + 1
			return o.b[from:o.i], nil
		}
	}
	o.sc.reset()
	n, done, err := o.sc.scan(o.b[from:])
	if err != nil {
		return nil, err
	}
	if !done {
		return nil, errTruncatedJSON
	}
	o.i += n
	return o.b[from:o.i], nil
}

// token skips white space and returns the byte behind it.
func (o *jsonObject) token() (byte, error) {
	for ; o.i < len(o.b); o.i++ {
		if c := o.b[o.i]; !isSpace(c) {
			return c, nil
		}
	}
	return 0, errTruncatedJSON
}

func (o *jsonObject) end() error {
	o.i++
	for i := o.i; i < len(o.b) && !o.nested; i++ {
		if !isSpace(o.b[i]) {
			return fmt.Errorf("bytes after the JSON object: %w", ErrMalformed)
		}
	}
	return nil
}

var errTruncatedJSON = fmt.Errorf("JSON ends early: %w", ErrMalformed)

// once sets bit in seen, and is an error if it is set: the second member with one
// name would be the one that a client believes.
func once[Key string | []byte](seen *uint, bit uint, key Key) error {
	if *seen&(1<<bit) != 0 {
		return fmt.Errorf("JSON member %q occurs twice: %w", key, ErrMalformed)
	}
	*seen |= 1 << bit
	return nil
}

// plainJSON reports whether the inside of a string literal stands for itself.
func plainJSON(s []byte) bool {
	for _, c := range s {
		if c == '\\' || c >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// unquoteJSON decodes a string literal. Bytes that are no UTF-8 become U+FFFD, as
// for every Go client.
func unquoteJSON(literal []byte) (string, error) {
	if inner := literal[1 : len(literal)-1]; plainJSON(inner) {
		return string(inner), nil
	}
	var s string
	if err := json.Unmarshal(literal, &s); err != nil {
		return "", fmt.Errorf("JSON string: %w: %w", err, ErrMalformed)
	}
	return s, nil
}

// jsonString decodes a value that must be a string or null, which is "".
func jsonString(key, value []byte) (string, error) {
	switch {
	case value[0] == '"':
		return unquoteJSON(value)
	case isNull(value):
		return "", nil
	}
	return "", fmt.Errorf("JSON member %q is no string: %w", key, ErrMalformed)
}

// jsonInt decodes a value that must be an integer or null, which is 0.
func jsonInt(key, value []byte) (int64, error) {
	if isNull(value) {
		return 0, nil
	}
	n, err := strconv.ParseInt(string(value), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("JSON member %q is no integer: %w", key, ErrMalformed)
	}
	return n, nil
}

func isNull(value []byte) bool { return string(value) == "null" }

// appendJSONString writes s as encoding/json does, with <, > and & escaped.
func appendJSONString(dst []byte, s string) []byte {
	if plainOutput(s) {
		dst = append(dst, '"')
		dst = append(dst, s...)
		return append(dst, '"')
	}
	literal, err := json.Marshal(s)
	if err != nil {
		panic(err) // a string can always be encoded
	}
	return append(dst, literal...)
}

func jsonStringLen(s string) int {
	if plainOutput(s) {
		return len(s) + 2
	}
	return len(appendJSONString(nil, s))
}

func plainOutput(s string) bool {
	for i := range len(s) {
		switch c := s[i]; {
		case c < 0x20, c >= utf8.RuneSelf-1, c == '"', c == '\\', c == '<', c == '>', c == '&':
			return false
		}
	}
	return true
}
