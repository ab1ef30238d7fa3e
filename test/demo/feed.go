// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// An answer is a line of the hub's access log.
type answer struct {
	streaming                                             bool // a stream's answer has begun
	verb, resource, namespace, name, client, user, source string
	code                                                  string
	took                                                  time.Duration
}

// parseAnswer reads a line of the hub's log, in klog's text format:
//
//	I1121 10:00:00.000000  1 metrics.go:1] "Answered" verb="get" ... duration="1.5ms"
func parseAnswer(line string) (a answer, ok bool) {
	_, rest, ok := strings.Cut(line, "] ")
	if !ok {
		return a, false
	}
	rest, a.streaming = strings.CutPrefix(rest, "\"Streaming\" ")
	if !a.streaming {
		if rest, ok = strings.CutPrefix(rest, "\"Answered\" "); !ok {
			return a, false
		}
	}
	for rest = strings.TrimSpace(rest); rest != ""; rest = strings.TrimSpace(rest) {
		key, value, found := strings.Cut(rest, "=")
		if !found {
			return a, false
		}
		quoted, err := strconv.QuotedPrefix(value)
		if err != nil {
			return a, false
		}
		rest = value[len(quoted):]
		if value, err = strconv.Unquote(quoted); err != nil {
			return a, false
		}
		a.set(key, value)
	}
	return a, a.verb != "" && a.code != ""
}

func (a *answer) set(key, value string) {
	switch key {
	case "verb":
		a.verb = value
	case "resource":
		a.resource = value
	case "namespace":
		a.namespace = value
	case "name":
		a.name = value
	case "client":
		a.client = value
	case "user":
		a.user = value
	case "source":
		a.source = value
	case "code":
		a.code = value
	case "duration":
		a.took, _ = time.ParseDuration(value) // 0 if it is not one
	}
}

// who is the client as people call it.
func (a answer) who() string {
	switch {
	case a.client == "hollow-kubelet": // as kubemark calls itself
		return "kubelet"
	case a.client == "kubectl" && a.user != "":
		return "kubectl (" + a.user + ")"
	case a.client == "":
		return "?"
	}
	return a.client
}

// kind is what is the same in answers that are shown as one line.
func (a answer) kind() string {
	return strings.Join([]string{a.who(), a.verb, a.resource, a.source, a.code}, "\x00")
}

// feedPeriod is how long answers are gathered before they are shown, so that
// those of a kind are one line.
const feedPeriod = 500 * time.Millisecond

// A feed follows the hub's log and shows it.
type feed struct {
	screen *screen

	mu      sync.Mutex // guards all below
	lines   lineReader
	answers []answer // all of them
}

// run follows the log until ctx ends.
func (f *feed) run(ctx context.Context) error {
	tick := time.NewTicker(feedPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return f.show()
		case <-tick.C:
		}
		if err := f.show(); err != nil {
			return err
		}
	}
}

// show shows what is new.
func (f *feed) show() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var fresh []answer
	for {
		line, err := f.lines.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if a, ok := parseAnswer(line); ok {
			fresh = append(fresh, a)
		}
	}
	f.answers = append(f.answers, fresh...)
	for _, line := range condense(fresh) {
		f.screen.line(f.render(line))
	}
	return nil
}

// A lineReader gives whole lines of a file that is being written.
type lineReader struct {
	r    *bufio.Reader
	part string
}

func (l *lineReader) next() (string, error) {
	s, err := l.r.ReadString('\n')
	l.part += s
	if err != nil {
		return "", err
	}
	line := l.part
	l.part = ""
	return strings.TrimSuffix(line, "\n"), nil
}

// since returns the answers from the n-th on, and how many there are.
func (f *feed) since(n int) ([]answer, int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.answers[n:]), len(f.answers)
}

// A feedLine is answers of one kind.
type feedLine struct {
	answer
	names []string
	count int
	most  time.Duration
}

// condense gathers answers of a kind, in the order of their first one. The end of
// a watch that had been answered is no news.
func condense(answers []answer) []feedLine {
	var lines []feedLine
	index := map[string]int{}
	for _, a := range answers {
		if a.verb == "watch" && !a.streaming {
			continue
		}
		i, ok := index[a.kind()]
		if !ok {
			i = len(lines)
			index[a.kind()] = i
			lines = append(lines, feedLine{answer: a})
		}
		l := &lines[i]
		l.count++
		l.most = max(l.most, a.took)
		if name := a.object(); name != "" && !slices.Contains(l.names, name) {
			l.names = append(l.names, name)
		}
	}
	return lines
}

// object is the namespace and the name, as far as there are any.
func (a answer) object() string {
	switch {
	case a.namespace == "":
		return a.name
	case a.name == "":
		return a.namespace + "/"
	}
	return a.namespace + "/" + a.name
}

func (f *feed) render(l feedLine) string {
	what := pad(l.verb, 7) + l.resource
	switch len(l.names) {
	case 0:
	case 1:
		what += " " + l.names[0]
	default:
		what += fmt.Sprintf(" %s, … (%d)", l.names[0], len(l.names))
	}
	const width = 58
	if runes := []rune(what); len(runes) > width {
		what = string(runes[:width-1]) + "…"
	}
	times := ""
	if l.count > 1 {
		times = fmt.Sprintf("  × %d", l.count)
	}
	return pad(l.who(), 18) + pad(what, width) + " → " + f.screen.paint(sourceColor(l.source), pad(l.source, 8)) + " " +
		f.screen.paint(codeColor(l.code), pad(l.code, 7)) + fmt.Sprintf("%6.0f ms", float64(l.most)/float64(time.Millisecond)) + times
}

func sourceColor(source string) string {
	switch source {
	case "upstream":
		return green
	case "feed":
		return cyan
	case "replay":
		return yellow
	}
	return magenta
}

func codeColor(code string) string {
	if strings.HasPrefix(code, "2") || code == "101" {
		return ""
	}
	return red
}
