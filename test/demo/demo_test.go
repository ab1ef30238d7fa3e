// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/klog/v2/textlogger"
)

// logLine is what klog makes of a line of the access log.
func logLine(message string, values ...any) string {
	var b bytes.Buffer
	logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&b)))
	logger.Info(message, values...)
	return strings.TrimSpace(b.String())
}

func TestParseAnswer(t *testing.T) {
	values := []any{"verb", "list", "resource", "pods", "namespace", "a", "name", "", "user", "o l g a", "client", `k"=`, "source", "replay",
		"code", "200", "duration", 1500 * time.Microsecond}
	want := answer{verb: "list", resource: "pods", namespace: "a", user: "o l g a", client: `k"=`, source: "replay", code: "200", took: 1500 * time.Microsecond}
	streaming := want
	streaming.streaming = true
	for _, tc := range []struct {
		name, line string
		want       answer
		ok         bool
	}{
		{"answered", logLine("Answered", values...), want, true},
		{"streaming", logLine("Streaming", values...), streaming, true},
		{"another message", logLine("Starting", values...), answer{}, false},
		{"no values", logLine("Answered"), answer{}, false},
		{"not klog", "panic: x", answer{}, false},
		{"a value that is not quoted", `I] "Answered" verb=get`, answer{}, false},
		{"the end is missing", `I] "Answered" verb="get" code="20`, answer{}, false},
		{"empty", "", answer{}, false},
	} {
		got, ok := parseAnswer(tc.line)
		if ok != tc.ok {
			t.Errorf("%s: parseAnswer(%q) = %v, want %v", tc.name, tc.line, ok, tc.ok)
		}
		if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(answer{})); ok && diff != "" {
			t.Errorf("%s: parseAnswer(%q) (-want +got):\n%s", tc.name, tc.line, diff)
		}
	}
}

func TestCondense(t *testing.T) {
	get := func(name, source string, took time.Duration) answer {
		return answer{verb: "get", resource: "pods", namespace: "a", name: name, client: "hollow-kubelet", source: source, code: "200", took: took}
	}
	watch := answer{verb: "watch", resource: "nodes", name: "n", source: "feed", code: "200"}
	begun := watch
	begun.streaming = true
	got := condense([]answer{get("x", "upstream", 2), get("y", "replay", 1), begun, get("z", "upstream", 3), get("x", "upstream", 1), watch})
	want := []feedLine{
		{answer: get("x", "upstream", 2), names: []string{"a/x", "a/z"}, count: 3, most: 3},
		{answer: get("y", "replay", 1), names: []string{"a/y"}, count: 1, most: 1},
		{answer: begun, names: []string{"n"}, count: 1},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(answer{}, feedLine{})); diff != "" {
		t.Errorf("condense (-want +got):\n%s", diff)
	}
	f := &feed{screen: &screen{}}
	for i, want := range []string{
		"kubelet           get    pods a/x, … (2)" + strings.Repeat(" ", 36) + " → upstream 200         0 ms  × 3",
		"kubelet           get    pods a/y" + strings.Repeat(" ", 43) + " → replay   200         0 ms",
		"?                 watch  nodes n" + strings.Repeat(" ", 44) + " → feed     200         0 ms",
	} {
		if diff := cmp.Diff(want, f.render(got[i])); diff != "" {
			t.Errorf("render (-want +got):\n%s", diff)
		}
	}
}

func TestLineReaderOfAFileThatGrows(t *testing.T) {
	var file bytes.Buffer
	l := lineReader{r: bufio.NewReader(&file)}
	file.WriteString("one\ntw")
	for _, want := range []string{"one", ""} {
		got, err := l.next()
		if got != want || (want == "") != errors.Is(err, io.EOF) {
			t.Errorf("next() = %q, %v, want %q", got, err, want)
		}
	}
	file.WriteString("o\n")
	if got, err := l.next(); got != "two" || err != nil {
		t.Errorf("next() = %q, %v, want two", got, err)
	}
}

func TestAsksForHistory(t *testing.T) {
	for uri, want := range map[string]bool{
		"/api/v1/nodes?fieldSelector=metadata.name%3Dedge-1&limit=1": true,
		"/api/v1/nodes?limit=10":                                     false,
		"/api/v1/nodes?limit=1&continue=x":                           false,
		"/api/v1/nodes":                                              false,
		"/api/v1/pods?limit=1":                                       false,
		"/api/v1/nodes?fieldSelector=metadata.name%3Dlimit=1":        false,
	} {
		if got := asksForHistory(auditv1.Event{RequestURI: uri}); got != want {
			t.Errorf("asksForHistory(%q) = %v, want %v", uri, got, want)
		}
	}
}

func TestChecks(t *testing.T) {
	out, err := os.Create(t.TempDir() + "/out")
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	s := newScreen(out)
	if s.color {
		t.Error("a file is shown in colours")
	}
	c := &checks{screen: s}
	if c.held() {
		t.Error("held() without a check = true, want false")
	}
	c.add(true, "short", "1", "%d", 1)
	if !c.held() {
		t.Error("held() with a check that holds = false, want true")
	}
	c.add(false, "rather long", "≤ 10 s", "11 s")
	if c.held() {
		t.Error("held() with a check that does not hold = true, want false")
	}
	want := "    check        expected  seen\n  ✓ short        1         1\n  ✗ rather long  ≤ 10 s    11 s\n"
	if diff := cmp.Diff(want, c.table()); diff != "" {
		t.Errorf("table() (-want +got):\n%s", diff)
	}
}
