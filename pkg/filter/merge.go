// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
)

// mergeProto makes the change from was to is in whole, which is was and what the Go type
// has no field for. Where nothing is unknown, the change is all there is; where something
// is, it is in a message, whose fields are gone through one by one.
func mergeProto(whole, was, is []byte) ([]byte, error) {
	if bytes.Equal(was, is) {
		return whole, nil
	}
	if bytes.Equal(whole, was) {
		return is, nil
	}
	fields, err := protoFields(whole)
	if err != nil {
		return nil, err
	}
	old, err := protoFields(was)
	if err != nil {
		return nil, err
	}
	changed, err := protoFields(is)
	if err != nil {
		return nil, err
	}
	var numbers []protowire.Number
	for _, of := range []map[protowire.Number][]protoField{fields, changed} {
		for n := range of {
			numbers = append(numbers, n)
		}
	}
	slices.Sort(numbers)
	var out []byte
	for _, n := range slices.Compact(numbers) {
		merged, err := mergeRepeated(fields[n], old[n], changed[n], mergeProtoField)
		if err != nil {
			return nil, err
		}
		for _, f := range merged {
			out = append(append(out, f.tag...), f.value...)
		}
	}
	return out, nil
}

// A protoField is one field of a message as it is on the wire.
type protoField struct {
	tag, value []byte // the value of a length-delimited one with its length
	bytes      []byte // and without
}

func (f protoField) equal(g protoField) bool {
	return bytes.Equal(f.tag, g.tag) && bytes.Equal(f.value, g.value)
}

func protoFields(b []byte) (map[protowire.Number][]protoField, error) {
	fields := map[protowire.Number][]protoField{}
	for len(b) > 0 {
		n, t, tag := protowire.ConsumeTag(b)
		if tag < 0 {
			return nil, protowire.ParseError(tag)
		}
		value := protowire.ConsumeFieldValue(n, t, b[tag:])
		if value < 0 {
			return nil, protowire.ParseError(value)
		}
		f := protoField{tag: b[:tag], value: b[tag : tag+value]}
		if t == protowire.BytesType {
			f.bytes, _ = protowire.ConsumeBytes(f.value)
		}
		fields[n] = append(fields[n], f)
		b = b[tag+value:]
	}
	return fields, nil
}

// identity is the first field, which is what the API tells the elements of its lists and
// the entries of its maps apart by: a name, an address, a key.
func (f protoField) identity() string {
	n, t, tag := protowire.ConsumeTag(f.bytes)
	if tag < 0 || n != 1 || t != protowire.BytesType {
		return ""
	}
	first, _ := protowire.ConsumeBytes(f.bytes[tag:])
	return string(first)
}

func mergeProtoField(whole, was, is protoField) (protoField, error) {
	if was.equal(is) {
		return whole, nil
	}
	if whole.bytes == nil || was.bytes == nil || is.bytes == nil {
		return is, nil
	}
	merged, err := mergeProto(whole.bytes, was.bytes, is.bytes)
	if err != nil {
		return is, nil //nolint:nilerr // a text, which was not spelt as the Go type spells it: a quantity
	}
	return protoField{tag: is.tag, value: protowire.AppendBytes(nil, merged), bytes: merged}, nil
}

// An element of a list.
type element[T any] interface {
	equal(T) bool
	// identity tells it from other elements, also when it has changed; "" if nothing does.
	identity() string
}

// mergeRepeated makes the change from was to is in a list.
func mergeRepeated[T element[T]](whole, was, is []T, merge func(whole, was, is T) (T, error)) ([]T, error) {
	if len(whole) != len(was) {
		if slices.EqualFunc(was, is, T.equal) {
			return whole, nil
		}
		return is, nil // a default that one side spells out
	}
	out := make([]T, len(is))
	for i, at := range pair(was, is) {
		if at < 0 {
			out[i] = is[i]
			continue
		}
		var err error
		if out[i], err = merge(whole[at], was[at], is[i]); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// pair finds for each element of is what it was, -1 if it is new: the one that is equal,
// else the one with the same identity, else, where as many are there as were, the one in
// the same place.
func pair[T element[T]](was, is []T) []int {
	places := map[string][]int{}
	for at, v := range was {
		places[v.identity()] = append(places[v.identity()], at)
	}
	pairs := slices.Repeat([]int{-1}, len(is))
	taken := make([]bool, len(was))
	take := func(i, at int, ok bool) bool {
		if ok = ok && pairs[i] < 0 && !taken[at]; ok {
			pairs[i], taken[at] = at, true
		}
		return ok
	}
	for i := range min(len(is), len(was)) {
		take(i, i, was[i].equal(is[i]))
	}
	for _, same := range []func(v, old T) bool{func(v, old T) bool { return old.equal(v) }, func(v, _ T) bool { return v.identity() != "" }} {
		for i, v := range is {
			for _, at := range places[v.identity()] {
				if pairs[i] >= 0 || take(i, at, same(v, was[at])) {
					break
				}
			}
		}
	}
	for i := range is {
		take(i, min(i, max(len(was)-1, 0)), len(is) == len(was))
	}
	return pairs
}

// mergeJSON does for JSON what mergeProto does for protobuf.
func mergeJSON(whole, was, is []byte) ([]byte, error) {
	if bytes.Equal(whole, was) {
		return is, nil // as from an API server of this age
	}
	var values [3]jsonValue
	for i, b := range [][]byte{whole, was, is} {
		d := json.NewDecoder(bytes.NewReader(b))
		d.UseNumber() // as it is written
		if err := d.Decode(&values[i].v); err != nil {
			return nil, err
		}
	}
	merged, err := mergeJSONValue(values[0], values[1], values[2])
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	e := json.NewEncoder(&out)
	e.SetEscapeHTML(false)
	err = e.Encode(merged.v)
	return bytes.TrimSuffix(out.Bytes(), []byte("\n")), err
}

type jsonValue struct{ v any }

func (a jsonValue) equal(b jsonValue) bool { return reflect.DeepEqual(a.v, b.v) }

// identities are the members that are the first fields of what is in lists in protobuf.
var identities = []string{"name", "addresses", "ip", "key", "type", "manager"}

func (a jsonValue) identity() string {
	switch v := a.v.(type) {
	case string:
		return v
	case json.Number:
		return v.String()
	case []any:
		if len(v) > 0 {
			return jsonValue{v[0]}.identity()
		}
	case map[string]any:
		for _, key := range identities {
			if w, ok := v[key]; ok {
				return jsonValue{w}.identity()
			}
		}
	}
	return ""
}

func mergeJSONValue(whole, was, is jsonValue) (jsonValue, error) {
	if was.equal(is) {
		return whole, nil
	}
	switch w := whole.v.(type) {
	case map[string]any:
		old, wasMap := was.v.(map[string]any)
		changed, isMap := is.v.(map[string]any)
		if wasMap && isMap {
			return jsonValue{mergeJSONObject(w, old, changed)}, nil
		}
	case []any:
		old, wasList := was.v.([]any)
		changed, isList := is.v.([]any)
		if wasList && isList {
			merged, err := mergeRepeated(jsonValues(w), jsonValues(old), jsonValues(changed), mergeJSONValue)
			list := make([]any, len(merged))
			for i, m := range merged {
				list[i] = m.v
			}
			return jsonValue{list}, err
		}
	}
	return is, nil
}

func mergeJSONObject(whole, was, is map[string]any) map[string]any {
	for key := range was {
		if _, ok := is[key]; !ok {
			delete(whole, key)
		}
	}
	for key, v := range is {
		old, had := was[key]
		w, has := whole[key]
		switch {
		case had && reflect.DeepEqual(old, v): // nor does it matter whether a default is spelt out
		case had && has:
			merged, _ := mergeJSONValue(jsonValue{w}, jsonValue{old}, jsonValue{v}) // it does not fail
			whole[key] = merged.v
		default:
			whole[key] = v
		}
	}
	return whole
}

func jsonValues(list []any) []jsonValue {
	values := make([]jsonValue, len(list))
	for i, v := range list {
		values[i].v = v
	}
	return values
}
