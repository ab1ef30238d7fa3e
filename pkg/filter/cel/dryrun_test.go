// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cel

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/edgehub/edgehub/pkg/filter"
)

func compileAll(t *testing.T, rules *Rules, all ...Rule) []filter.Filter {
	t.Helper()
	var filters []filter.Filter
	for _, r := range all {
		f, err := rules.New(r)
		if err != nil {
			t.Fatal(err)
		}
		filters = append(filters, f)
	}
	return filters
}

func TestDryRun(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	rules := NewRules(Config{Registerer: reg})
	all := []Rule{
		{Name: "drop", Match: "object.kind == 'Pod'", Drop: true, DryRun: true},
		{Name: "set", Match: "true", Set: set("metadata.labels.a", "'1'"), DryRun: true},
		{Name: "fails", Match: "object.spec.zone == 1", Drop: true, DryRun: true},
		{Name: "in-force", Match: "true", Drop: true},
	}
	filters := compileAll(t, rules, all...)
	rules.Use(filters)
	for _, text := range []string{pod, widget} {
		for _, o := range objects(t, text) {
			before, _ := o.Encode()
			for i, f := range filters {
				want := filter.Keep
				if !all[i].DryRun {
					want = filter.Drop
				}
				if got, err := f.Apply(t.Context(), o); got != want || err != nil {
					t.Errorf("%s: Apply(%s) = %s, %v, want %s", f.Name(), encoding(o), got, err, want)
				}
			}
			if after, _ := o.Encode(); !bytes.Equal(before, after) {
				t.Errorf("dry runs changed the object in %s", encoding(o))
			}
		}
	}
	want := []Would{{Rule: "drop", Drop: 2, Keep: 1}, {Rule: "set", Keep: 2, Change: 1}, {Rule: "fails", Error: 3}}
	if diff := cmp.Diff(want, rules.Report()); diff != "" {
		t.Errorf("Report() (-want +got):\n%s", diff)
	}
	for _, w := range want {
		checkSeries(t, reg, w)
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("GatherAndLint() = %v, %v", problems, err)
	}
}

// checkSeries wants the series of a rule, and twelve altogether.
func checkSeries(t *testing.T, reg prometheus.Gatherer, w Would) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, m := range families[0].GetMetric() {
		if m.GetLabel()[0].GetValue() == w.Rule {
			got[m.GetLabel()[1].GetValue()] = m.GetCounter().GetValue()
		}
	}
	want := map[string]float64{"keep": float64(w.Keep), "change": float64(w.Change), "drop": float64(w.Drop), "error": float64(w.Error)}
	if diff := cmp.Diff(want, got); families[0].GetName() != "edgehub_filter_cel_would_total" || diff != "" {
		t.Errorf("%s{rule=%s} (-want +got):\n%s", families[0].GetName(), w.Rule, diff)
	}
}

// A rule that is gone has no series, one that is the same goes on counting.
func TestUse(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	rules := NewRules(Config{Registerer: reg})
	a := Rule{Name: "a", Match: "true", Drop: true, DryRun: true}
	b := Rule{Name: "b", Match: "true", Set: set("spec.a", "1"), DryRun: true}
	apply := func(filters []filter.Filter) {
		t.Helper()
		for _, f := range filters {
			if _, err := f.Apply(t.Context(), objects(t, widget)[0]); err != nil {
				t.Fatal(err)
			}
		}
	}
	check := func(want ...Would) {
		t.Helper()
		if diff := cmp.Diff(want, rules.Report()); diff != "" {
			t.Errorf("Report() (-want +got):\n%s", diff)
		}
		if got, err := testutil.GatherAndCount(reg); err != nil || got != 4*len(want) {
			t.Errorf("there are %d series (%v), want %d", got, err, 4*len(want))
		}
	}
	first := compileAll(t, rules, a, b)
	apply(first)
	check()
	rules.Use(first)
	apply(first)
	check(Would{Rule: "a", Drop: 2}, Would{Rule: "b", Change: 2})

	other := a
	other.Match = "false"
	second := compileAll(t, rules, b, other)
	check(Would{Rule: "a", Drop: 2}, Would{Rule: "b", Change: 2})
	rules.Use(append(second, second...))
	apply(second)
	apply(first[:1]) // of a request that has not ended
	check(Would{Rule: "b", Change: 3}, Would{Rule: "a", Keep: 1})

	rules.Use(nil)
	check()
}

func TestUseIsBounded(t *testing.T) {
	rules := NewRules(Config{})
	var filters []filter.Filter
	for i := range MaxRules + 1 {
		filters = append(filters, compileAll(t, rules, Rule{Name: fmt.Sprint("a", i), Match: "true", Drop: true, DryRun: true})...)
	}
	rules.Use(filters)
	if got := len(rules.Report()); got != MaxRules {
		t.Errorf("Report() has %d rules, want %d", got, MaxRules)
	}
}

// The pool's filters are counted, too.
func TestUseOfDependents(t *testing.T) {
	rules := NewRules(Config{Pool: poolStub{}})
	rules.Use(compileAll(t, rules, Rule{Name: "a", Match: "node.pool == 'a'", Drop: true, DryRun: true}))
	if diff := cmp.Diff([]Would{{Rule: "a"}}, rules.Report()); diff != "" {
		t.Errorf("Report() (-want +got):\n%s", diff)
	}
}

func TestDryRunLogs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		apply := func(verbosity, times int, rule Rule) []string {
			log.Reset()
			rule.Name, rule.DryRun = "a", true
			ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log), textlogger.Verbosity(verbosity))))
			f := newFilter(t, rule)
			for range times {
				if _, err := f.Apply(ctx, objects(t, secret)[0]); err != nil {
					t.Fatal(err)
				}
				<-time.After(time.Millisecond)
			}
			return slices.Collect(strings.Lines(log.String()))
		}
		drop := Rule{Match: `object.data.k != ""`, Drop: true}
		lines := apply(2, 1, drop)
		if len(lines) != 1 || !strings.Contains(lines[0], `filter="cel/a" kind="Secret" object="ns/s" verdict="drop"`) {
			t.Errorf("the log is %q, want one line with the object and drop", lines)
		}
		if lines := apply(2, 1, Rule{Match: `int(object.data.k) == 1`, Drop: true}); len(lines) != 1 || strings.Contains(lines[0], "aHVudGVyMg") || !strings.Contains(lines[0], "type conversion error") {
			t.Errorf("the log is %q, want one line that says why and no value", lines)
		}
		if lines := apply(1, 1, drop); len(lines) != 0 {
			t.Errorf("the log is %q, want nothing at level 1", lines)
		}
		if lines := apply(2, 1, Rule{Match: "false", Drop: true}); len(lines) != 0 {
			t.Errorf("the log is %q, want nothing of objects that the rule is not for", lines)
		}
		if lines := apply(2, 1001, drop); len(lines) < logsBurst || len(lines) > logsBurst+logsPerSecond {
			t.Errorf("the log has %d lines after a second, want %d", len(lines), logsBurst+logsPerSecond)
		}
	})
}
