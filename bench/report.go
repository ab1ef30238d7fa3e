// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/edgehub/edgehub/test/controlplane"
)

// A result is one line of the table. Target is what the project aims at; nil: the
// line only tells.
type result struct {
	Name   string  `json:"name"`
	Value  float64 `json:"value"`
	Unit   string  `json:"unit"`
	Target *limit  `json:"target"`
	AtMost bool    `json:"at_most"`
	Met    bool    `json:"met"` // true without a target
	Versus string  `json:"versus"`
}

// A limit is the least or the most that a value should be; in JSON its number.
type limit struct {
	bound float64
	most  bool
}

func atMost(v float64) *limit  { return &limit{v, true} }
func atLeast(v float64) *limit { return &limit{v, false} }

// MarshalJSON writes the number alone.
func (l *limit) MarshalJSON() ([]byte, error) { return json.Marshal(l.bound) }

func (l *limit) met(v float64) bool {
	if l == nil {
		return true
	}
	return l.most && v <= l.bound || !l.most && v >= l.bound
}

// A table collects the results.
type table struct {
	machine string
	results []result
}

func (b *bench) add(r result) {
	r.Met = r.Target.met(r.Value)
	r.AtMost = r.Target != nil && r.Target.most
	b.table.results = append(b.table.results, r)
	say("%s: %s %s %s (%s)", r.Name, number(r.Value), r.Unit, r.verdict(), r.Versus)
}

func (r *result) target() string {
	if r.Target == nil {
		return ""
	}
	sign := "≥ "
	if r.Target.most {
		sign = "≤ "
	}
	return sign + number(r.Target.bound) + " " + r.Unit
}

func (r *result) verdict() string {
	switch {
	case r.Target == nil:
		return ""
	case r.Met:
		return "met"
	}
	return "MISSED"
}

// number has three digits that count, and no exponent.
func number(v float64) string {
	switch a := max(v, -v); {
	case a == 0 || a >= 100:
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 1:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

// report prints the table and writes it in its two other forms.
func (t *table) report(docs bool) error {
	root, err := controlplane.Root()
	if err != nil {
		return err
	}
	out := filepath.Join(root, "bench", "out")
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	results, err := json.MarshalIndent(t.results, "", "  ")
	if err != nil {
		return err
	}
	markdown := t.markdown()
	err = errors.Join(t.print(os.Stdout),
		os.WriteFile(filepath.Join(out, "results.json"), append(results, '\n'), 0o644),
		os.WriteFile(filepath.Join(out, "table.md"), markdown, 0o644))
	if docs && err == nil {
		err = replaceTable(filepath.Join(root, "docs", "BENCHMARKS.md"), markdown)
	}
	return err
}

func (t *table) print(to io.Writer) error {
	w := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "what\tvalue\ttarget\t\tversus")
	for _, r := range t.results {
		fmt.Fprintf(w, "%s\t%s %s\t%s\t%s\t%s\n", r.Name, number(r.Value), r.Unit, r.target(), r.verdict(), r.Versus)
	}
	return w.Flush()
}

func (t *table) markdown() []byte {
	var w bytes.Buffer
	fmt.Fprintf(&w, "%s\n\n| what | value | target | | versus |\n|---|---|---|---|---|\n", t.machine)
	for _, r := range t.results {
		fmt.Fprintf(&w, "| %s | %s %s | %s | %s | %s |\n", r.Name, number(r.Value), r.Unit, r.target(), strings.Replace(r.verdict(), "MISSED", "**MISSED**", 1), r.Versus)
	}
	return w.Bytes()
}

// The table in the document is between these lines.
const tableBegins, tableEnds = "<!-- table -->\n", "<!-- /table -->\n"

func replaceTable(path string, with []byte) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, ok := bytes.Cut(text, []byte(tableBegins))
	_, after, ok2 := bytes.Cut(rest, []byte(tableEnds))
	if !ok || !ok2 {
		return fmt.Errorf("%s has no %q and %q", path, tableBegins, tableEnds)
	}
	return os.WriteFile(path, bytes.Join([][]byte{before, []byte(tableBegins), with, []byte(tableEnds), after}, nil), 0o644)
}

// machine says in a line what this was measured on, and whether something else ran
// there.
func machine() string {
	var model, memory, load string
	for line := range lines("/proc/cpuinfo") {
		if k, v, _ := strings.Cut(line, ":"); strings.TrimSpace(k) == "model name" {
			model = strings.TrimSpace(v)
		}
	}
	for line := range lines("/proc/meminfo") {
		var kb int
		if n, _ := fmt.Sscanf(line, "MemTotal: %d kB", &kb); n == 1 {
			memory = fmt.Sprintf("%d GiB", (kb+1<<19)>>20)
		}
	}
	for line := range lines("/proc/loadavg") {
		load, _, _ = strings.Cut(line, " ")
	}
	return fmt.Sprintf("%s, %d × %s, %s, %s; load average before the run %s.",
		time.Now().UTC().Format(time.DateOnly), runtime.NumCPU(), model, memory, runtime.Version(), load)
}
