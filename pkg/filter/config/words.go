// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"regexp"
	"strings"

	"go.yaml.in/yaml/v3"
)

// kind says what a node is to somebody who has written something else.
func kind(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "fields"
	case yaml.SequenceNode:
		return "a list"
	}
	switch n.ShortTag() {
	case "!!null":
		return "nothing"
	case "!!str":
		return "a string"
	case "!!bool":
		return "true or false"
	case "!!int", "!!float":
		return "a number"
	}
	return short(n.Value)
}

// short is s in quotes, and not more than a message can bear.
func short(s string) string {
	if len(s) > maxQuoted {
		return fmt.Sprintf("%q…", strings.ToValidUTF8(s[:maxQuoted], ""))
	}
	return fmt.Sprintf("%q", s)
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9_.:+-]{1,64}$`)

// plain is s without quotes if it can be told from the message without them.
func plain(s string) string {
	if plainWord.MatchString(s) {
		return s
	}
	return short(s)
}

// suggestion ends a message about a word that nobody knows.
func suggestion(word string, known []string) string {
	best, least := "", len(word)/2+1
	if len(word) > maxQuoted {
		least = 0
	}
	for _, k := range known {
		if d := distance(word, k, least); d < least {
			best, least = k, d
		}
	}
	switch {
	case best != "":
		return fmt.Sprintf(", did you mean %q?", best)
	case len(known) == 0:
		return ""
	}
	return ", known are " + strings.Join(known, ", ")
}

// distance is how many bytes must be put in, taken out or replaced to make b of a; it
// may be any number ≥ most where it is not less.
func distance(a, b string, most int) int {
	if len(a)-len(b) >= most || len(b)-len(a) >= most {
		return most
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}
