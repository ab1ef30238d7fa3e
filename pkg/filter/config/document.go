// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

// Limits of a document. They are far above what anybody writes by hand, and keep what a
// document can cost far below what would disturb a small node.
const (
	maxBytes    = 256 << 10
	maxValues   = 50_000 // aliases counted as what they stand for
	maxDepth    = 32
	maxItems    = 1000 // of one list
	maxProblems = 100  // that are told
	maxQuoted   = 64   // bytes of a value in a message
)

// A document is YAML that is being read, and what is wrong with it.
type document struct {
	name               string
	problems, warnings problems
}

type problem struct {
	line int
	text string
}

type problems []problem

// lines are in the order of lines.
func (ps problems) lines(name string) (out []string) {
	slices.SortStableFunc(ps, func(a, b problem) int { return cmp.Compare(a.line, b.line) })
	for i, p := range ps {
		if i == maxProblems {
			return append(out, fmt.Sprintf("%s:%d: and %d more", name, p.line, len(ps)-i))
		}
		out = append(out, fmt.Sprintf("%s:%d: %s", name, p.line, p.text))
	}
	return out
}

func (ps problems) join(name string) error {
	var errs []error
	for _, line := range ps.lines(name) {
		errs = append(errs, errors.New(line))
	}
	return errors.Join(errs...)
}

// A value is a node that is no alias, and where it is. The zero one is absent; it reads
// as nothing.
type value struct {
	*yaml.Node
	field string // filters[0].name
}

func (d *document) fail(v value, format string, args ...any) {
	d.problems = append(d.problems, v.problem(format, args...))
}

func (d *document) warn(v value, format string, args ...any) {
	d.warnings = append(d.warnings, v.problem(format, args...))
}

func (v value) problem(format string, args ...any) problem {
	text := fmt.Sprintf(format, args...)
	if v.field != "" {
		text = v.field + ": " + text
	}
	return problem{line: max(v.Line, 1), text: text}
}

func (v value) at(n *yaml.Node, field string) value {
	if n.Kind == yaml.AliasNode {
		n = n.Alias // which is none itself
	}
	return value{n, strings.TrimPrefix(v.field+field, ".")}
}

// read returns the root of the one document that b is.
func (d *document) read(b []byte) (root value, ok bool) {
	before := len(d.problems)
	line := func(n int) value { return value{Node: &yaml.Node{Line: n}} }
	if len(b) > maxBytes {
		d.fail(line(1), "is larger than %d bytes", maxBytes)
		return root, false
	}
	if at := notText(b); at >= 0 {
		d.fail(line(lineOf(b, at)), "is not text in UTF-8")
		return root, false
	}
	var docs [2]yaml.Node
	for i, err := range decode(b, &docs[0], &docs[1]) {
		switch {
		case errors.Is(err, io.EOF) && i == 0:
			d.fail(line(1), "is empty")
		case errors.Is(err, io.EOF):
		case err != nil:
			n, text := syntaxError(b, err)
			d.fail(line(n), "is not YAML: %s", text)
		case i == 1:
			d.fail(line(docs[1].Line), "has a second document, which may not be")
		case docs[0].Content[0].ShortTag() == "!!null":
			d.fail(line(docs[0].Line), "is empty")
		default:
			root = value{Node: docs[0].Content[0]}
		}
	}
	if root.Node != nil {
		left := maxValues
		switch err := count(root.Node, maxDepth, &left); {
		case errors.Is(err, errDeep):
			d.fail(root, "is nested deeper than %d levels, or contains itself", maxDepth)
		case err != nil:
			d.fail(root, "has more than %d values, counting those that aliases stand for", maxValues)
		}
	}
	return root, len(d.problems) == before
}

// decode reads documents into nodes until one fails.
func decode(b []byte, nodes ...*yaml.Node) (errs []error) {
	// The parser panics on what its authors have not thought of.
	defer func() {
		if r := recover(); r != nil {
			errs = append(errs, fmt.Errorf("%v", r))
		}
	}()
	decoder := yaml.NewDecoder(bytes.NewReader(b))
	for _, n := range nodes {
		err := decoder.Decode(n)
		if errs = append(errs, err); err != nil {
			break
		}
	}
	return errs
}

var (
	errDeep      = errors.New("too deep")
	errMany      = errors.New("too many")
	yamlLine     = regexp.MustCompile(`^line (\d+): `)
	unknownAlias = regexp.MustCompile(`^unknown anchor '(.*)' referenced`)
)

// count visits n as if aliases were written out.
func count(n *yaml.Node, depth int, left *int) error {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if *left--; *left < 0 {
		return errMany
	}
	if depth == 0 {
		return errDeep
	}
	for _, child := range n.Content {
		if err := count(child, depth-1, left); err != nil {
			return err
		}
	}
	return nil
}

// syntaxError takes the line out of what the YAML parser says, which has it nowhere else.
func syntaxError(b []byte, err error) (line int, text string) {
	text = strings.TrimPrefix(err.Error(), "yaml: ")
	if m := yamlLine.FindStringSubmatch(text); m != nil {
		line, _ = strconv.Atoi(m[1])
		return line, text[len(m[0]):]
	}
	if m := unknownAlias.FindStringSubmatch(text); m != nil {
		return lineOf(b, max(0, bytes.Index(b, []byte("*"+m[1])))), text
	}
	return 1, text
}

func lineOf(b []byte, at int) int { return 1 + bytes.Count(b[:at], []byte("\n")) }

// notText is where b is no text, -1 if it is.
func notText(b []byte) int {
	for i := 0; i < len(b); {
		r, size := utf8.DecodeRune(b[i:])
		if r == utf8.RuneError && size == 1 || unicode.IsControl(r) && !strings.ContainsRune("\t\n\r\u0085", r) {
			return i
		}
		i += size
	}
	return -1
}

// fields are those of a mapping that are known, by name; nil if v is none.
func (d *document) fields(v value, known ...string) map[string]value {
	if v.Kind != yaml.MappingNode {
		d.fail(v, "want fields, got %s", kind(v.Node))
		return nil
	}
	fields := make(map[string]value, len(known))
	lines := map[string]int{}
	for i := 0; i+1 < len(v.Content); i += 2 {
		key := v.at(v.Content[i], "")
		if key.Kind != yaml.ScalarNode || key.ShortTag() != "!!str" {
			what := "got " + kind(key.Node)
			if key.Kind == yaml.ScalarNode {
				what = "got " + short(key.Value)
			}
			d.fail(key, "want the name of a field, %s", what)
			continue
		}
		name := key.Value
		place := value{key.Node, v.at(key.Node, "."+plain(name)).field}
		if first, twice := lines[name]; twice {
			d.fail(place, "is given twice, first in line %d", first)
			continue
		}
		lines[name] = key.Line
		if !slices.Contains(known, name) {
			d.fail(place, "unknown field%s", suggestion(name, known))
			continue
		}
		fields[name] = v.at(v.Content[i+1], "."+name)
	}
	return fields
}

// require reports whether v, a field of parent, is there.
func (d *document) require(parent, v value, field string) bool {
	if v.Node == nil && parent.Kind == yaml.MappingNode {
		d.fail(parent.at(parent.Node, "."+field), "is missing")
	}
	return v.Node != nil
}

func (d *document) list(v value) []value {
	if v.Node == nil {
		return nil
	}
	if v.Kind != yaml.SequenceNode {
		d.fail(v, "want a list, got %s", kind(v.Node))
		return nil
	}
	if len(v.Content) > maxItems {
		d.fail(v, "has %d elements, more than %d", len(v.Content), maxItems)
		return nil
	}
	items := make([]value, len(v.Content))
	for i, n := range v.Content {
		items[i] = v.at(n, "["+strconv.Itoa(i)+"]")
	}
	return items
}

// notEmpty is for lists where nobody could say whether an empty one means all or nothing.
func (d *document) notEmpty(v value) {
	if v.Node != nil && v.Kind == yaml.SequenceNode && len(v.Content) == 0 {
		d.fail(v, "is an empty list: leave it out, or name something")
	}
}

// text returns "" only if v is absent or has been reported.
func (d *document) text(v value) string {
	if v.Node == nil {
		return ""
	}
	switch {
	case v.Kind == yaml.ScalarNode && v.ShortTag() == "!!str":
		if v.Value == "" {
			d.fail(v, "must not be empty")
		}
		return v.Value
	case v.Kind == yaml.ScalarNode && v.ShortTag() != "!!null":
		d.fail(v, "want a string, got %s: put it in quotes", plain(v.Value))
	default:
		d.fail(v, "want a string, got %s", kind(v.Node))
	}
	return ""
}

func (d *document) flag(v value) bool {
	if v.Node == nil {
		return false
	}
	if v.Kind == yaml.ScalarNode && v.ShortTag() == "!!bool" {
		switch v.Value {
		case "true", "True", "TRUE":
			return true
		case "false", "False", "FALSE":
			return false
		}
	}
	what := kind(v.Node)
	if v.Kind == yaml.ScalarNode && v.ShortTag() != "!!null" {
		what = short(v.Value)
	}
	d.fail(v, "want true or false, got %s", what)
	return false
}

// unique reports whether a name is new.
func (d *document) unique(v value, name string, seen map[string]int) bool {
	first, twice := seen[name]
	if twice {
		d.fail(v, "%s is listed twice, first in line %d", short(name), first)
	} else {
		seen[name] = v.Line
	}
	return !twice
}
