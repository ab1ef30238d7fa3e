// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cel

import (
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	maxPath  = 1_000 // bytes
	maxSteps = 32
)

// A step is a key of a map, or the index of an element of a list if key is empty.
type step struct {
	key   string
	index int
}

// immutable is what the object is known by, which clients and the cache would lose, and
// what is not seen.
var immutable = [][]step{
	{{key: "apiVersion"}}, {{key: "kind"}}, inMetadata("name"), inMetadata("namespace"), inMetadata("uid"), inMetadata("resourceVersion"), inMetadata("managedFields"),
}

func inMetadata(key string) []step { return []step{{key: "metadata"}, {key: key}} }

var (
	fieldName = regexp.MustCompile(`^[A-Za-z_$][A-Za-z0-9_$-]*`)
	indexText = regexp.MustCompile(`^[0-9]{1,6}`)
)

// parsePath reads a.b["c"].d[0]. Keys are in double quotes, with escapes as in Go, or in
// single ones, without.
func parsePath(text string) ([]step, error) {
	if len(text) > maxPath {
		return nil, fmt.Errorf("%d bytes are more than %d", len(text), maxPath)
	}
	var path []step
	for rest := text; rest != "" || path == nil; {
		s, left, err := parseStep(rest, len(path) == 0)
		if err != nil {
			return nil, fmt.Errorf("1:%d: %w", len(text)-len(left)+1, err)
		}
		path = append(path, s)
		rest = left
	}
	if len(path) > maxSteps {
		return nil, fmt.Errorf("%d steps are more than %d", len(path), maxSteps)
	}
	for _, p := range immutable {
		if n := min(len(p), len(path)); slices.Equal(p[:n], path[:n]) {
			return nil, errors.New("apiVersion, kind, metadata.name, namespace, uid, resourceVersion and managedFields cannot be set")
		}
	}
	return path, nil
}

// parseStep returns the first step and what is left of the text, which begins with what is
// wrong if there is an error.
func parseStep(text string, first bool) (s step, left string, err error) {
	inBrackets, ok := strings.CutPrefix(text, "[")
	if !ok || first {
		name := text
		if !first {
			if name, ok = strings.CutPrefix(text, "."); !ok {
				return s, text, errors.New("neither . nor [")
			}
		}
		s.key = fieldName.FindString(name)
		if s.key == "" {
			return s, name, errors.New("no field name")
		}
		return s, name[len(s.key):], nil
	}
	if n := indexText.FindString(inBrackets); n != "" {
		s.index, _ = strconv.Atoi(n) // it is that short
		left = inBrackets[len(n):]
	} else if s.key, left, err = parseQuoted(inBrackets); err != nil {
		return s, inBrackets, err
	}
	left, ok = strings.CutPrefix(left, "]")
	if !ok {
		return s, left, errors.New("no ]")
	}
	return s, left, nil
}

func parseQuoted(text string) (key, left string, err error) {
	switch {
	case strings.HasPrefix(text, `"`):
		quoted, err := strconv.QuotedPrefix(text)
		if err != nil {
			return "", "", errors.New("the quotes do not end")
		}
		left = text[len(quoted):]
		if key, err = strconv.Unquote(quoted); err != nil {
			return "", "", errors.New("the quotes do not end")
		}
	case strings.HasPrefix(text, "'"):
		var ok bool
		if key, left, ok = strings.Cut(text[1:], "'"); !ok {
			return "", "", errors.New("the quotes do not end")
		}
	default:
		return "", "", errors.New(`neither an index nor a key in quotes`)
	}
	if key == "" {
		return "", "", errors.New("the key is empty")
	}
	return key, left, nil
}

// put returns node with value at the path; nil removes it. What does not lie on the path is
// shared with node, which is not changed.
func put(node any, path []step, value any) (any, error) {
	if len(path) == 0 {
		return value, nil
	}
	s, rest := path[0], path[1:]
	if s.key == "" {
		return putElement(node, s.index, rest, value)
	}
	m, ok := node.(map[string]any)
	if !ok && node != nil {
		return nil, fmt.Errorf("%s lies in what is no map", s.key)
	}
	child, there := m[s.key]
	if value == nil && !there {
		return node, nil
	}
	child, err := put(child, rest, value)
	if err != nil {
		return nil, err
	}
	out := maps.Clone(m)
	if out == nil {
		out = map[string]any{}
	}
	out[s.key] = child
	if value == nil && len(rest) == 0 {
		delete(out, s.key)
	}
	return out, nil
}

func putElement(node any, index int, rest []step, value any) (any, error) {
	list, ok := node.([]any)
	if !ok || index >= len(list) {
		return nil, fmt.Errorf("there is no element %d", index)
	}
	if value == nil && len(rest) == 0 {
		return nil, fmt.Errorf("element %d cannot be removed; set the list", index)
	}
	child, err := put(list[index], rest, value)
	if err != nil {
		return nil, err
	}
	out := slices.Clone(list)
	out[index] = child
	return out, nil
}
