// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// A check is something that the demo claims, and what was seen of it.
type check struct {
	name, expected, seen string
	ok                   bool
}

// checks are what has been checked so far.
type checks struct {
	screen *screen
	done   []check
}

// add keeps a check and tells it.
func (c *checks) add(ok bool, name, expected, seenFormat string, args ...any) {
	one := check{name: name, expected: expected, seen: fmt.Sprintf(seenFormat, args...), ok: ok}
	c.done = append(c.done, one)
	c.screen.flush()
	c.screen.line(c.mark(ok) + " " + name + ": " + one.seen)
}

func (c *checks) mark(ok bool) string {
	if ok {
		return c.screen.paint(green, "✓")
	}
	return c.screen.paint(red, "✗")
}

// held says whether there were checks, and all of them held.
func (c *checks) held() bool {
	for _, one := range c.done {
		if !one.ok {
			return false
		}
	}
	return len(c.done) > 0
}

// table is all checks, aligned.
func (c *checks) table() string {
	rows := append([]check{{name: "check", expected: "expected", seen: "seen"}}, c.done...)
	var name, expected int
	for _, r := range rows {
		name, expected = max(name, utf8.RuneCountInString(r.name)), max(expected, utf8.RuneCountInString(r.expected))
	}
	var b strings.Builder
	for i, r := range rows {
		mark := " "
		if i > 0 {
			mark = c.mark(r.ok)
		}
		row := pad(r.name, name) + "  " + pad(r.expected, expected) + "  " + firstLine(r.seen)
		if i == 0 {
			row = c.screen.paint(bold, row)
		}
		fmt.Fprintf(&b, "  %s %s\n", mark, row)
	}
	return b.String()
}

// pad makes text as wide as width.
func pad(text string, width int) string {
	return text + strings.Repeat(" ", max(0, width-utf8.RuneCountInString(text)))
}
