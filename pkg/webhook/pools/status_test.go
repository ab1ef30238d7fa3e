// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

func TestStatusOf(t *testing.T) {
	before, now := metav1.NewTime(time.Unix(1000, 0)), metav1.NewTime(time.Unix(2000, 0))
	condition := func(kind string, status metav1.ConditionStatus, at metav1.Time, reason, message string) metav1.Condition {
		return metav1.Condition{Type: kind, Status: status, ObservedGeneration: 1, LastTransitionTime: at, Reason: reason, Message: message}
	}
	noConflicts := condition(HostPortConflicts, "False", now, "NoneFound", "There are no conflicts of host ports.")
	for _, tc := range []struct {
		name   string
		pool   *nodePool
		was    []metav1.Condition
		report report
		want   status
	}{
		{"no host-network pool, empty", newPool("p", false), nil, report{}, status{Conditions: []metav1.Condition{
			condition(ExcludedPodsRunning, "False", now, "NoHostNetworkPool", "This is no host-network pool."),
			condition(PodsWithoutHostNetwork, "False", now, "NoHostNetworkPool", "This is no host-network pool."),
			noConflicts,
		}}},
		{"found", newPool("p", true), nil,
			report{nodes: []string{"a", "b", "c"}, ready: 1, findings: findings{excluded: finding{1, []string{"a/x"}}, withoutHostNetwork: finding{7, []string{"a/1", "a/2", "a/3", "a/4", "a/5"}}}},
			status{ReadyNodeNum: 1, UnreadyNodeNum: 2, Nodes: []string{"a", "b", "c"}, Conditions: []metav1.Condition{
				condition(ExcludedPodsRunning, "True", now, "Found", "1 pods that are to stay off host-network pools: a/x."),
				condition(PodsWithoutHostNetwork, "True", now, "Found", "7 pods without the host network, and so without any: a/1; a/2; a/3; a/4; a/5; and 2 more."),
				noConflicts,
			}}},
		{"others stay, and times of what has not changed", newPool("p", true), []metav1.Condition{
			condition("LeaderReady", "True", before, "Elected", ""),
			condition(HostPortConflicts, "True", before, "Found", "Others."),
			condition(ExcludedPodsRunning, "True", before, "Found", "Others."),
		}, report{findings: findings{conflicts: finding{1000, []string{"a and b"}}}}, status{Conditions: []metav1.Condition{
			condition("LeaderReady", "True", before, "Elected", ""),
			condition(HostPortConflicts, "True", before, "Found", "1000 conflicts of host ports: a and b; and 999 more."),
			condition(ExcludedPodsRunning, "False", now, "NoneFound", "There are no pods that are to stay off host-network pools."),
			condition(PodsWithoutHostNetwork, "False", now, "NoneFound", "There are no pods without the host network, and so without any."),
		}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.pool.Status.Conditions = tc.was
			if diff := cmp.Diff(tc.want, statusOf(tc.pool, tc.report, now)); diff != "" {
				t.Errorf("statusOf() (-want +got):\n%s", diff)
			}
		})
	}
}

// A status is written when it changes, and at most once in reportPeriod.
func TestStatusIsWritten(t *testing.T) {
	b := newBench(t, nil)
	p := request{pool: "p"}
	want := func(step string, statuses int) {
		t.Helper()
		if len(b.statuses) != statuses {
			t.Fatalf("%s: %d statuses were written, want %d: %q", step, len(b.statuses), statuses, b.statuses)
		}
	}
	// keep makes the pool have what was written.
	keep := func() {
		t.Helper()
		is := newPool("p", true)
		is.Status = b.reports.written["p"].got
		b.facts.setPool(is)
	}
	b.look(t, p)
	want("no such pool", 0)
	b.facts.setPool(newPool("p", true))
	b.facts.setNode(newNode("n1", "p", true))
	b.look(t, p)
	want("a pool", 1)
	if !strings.HasPrefix(b.statuses[0], `{"metadata":{"resourceVersion":"1"},"status":{"conditions":[`) || !strings.HasSuffix(b.statuses[0], `"nodes":["n1"],"readyNodeNum":1,"unreadyNodeNum":0}}`) {
		t.Errorf("wrote %s", b.statuses[0])
	}
	keep()
	b.facts.setNode(newNode("n1", "p", false))
	b.time = b.time.Add(reportPeriod - time.Second)
	if got := b.look(t, p); got.RequeueAfter != time.Second {
		t.Errorf("a look is asked for in %v, want 1s", got.RequeueAfter)
	}
	want("too early", 1)
	b.time = b.time.Add(time.Second)
	b.look(t, p)
	want("a node is not ready", 2)
	if want := `{"metadata":{"resourceVersion":"1"},"status":{"readyNodeNum":0,"unreadyNodeNum":1}}`; b.statuses[1] != want {
		t.Errorf("wrote %s, want %s", b.statuses[1], want)
	}

	b = newBench(t, nil)
	b.facts.setPool(newPool("p", true))
	b.look(t, p)
	keep()
	for _, step := range []string{"nothing has changed", "nor has it now"} {
		b.time = b.time.Add(reportPeriod)
		b.look(t, p)
		want(step, 1)
	}
	b.inactive = true
	b.facts.setNode(newNode("n1", "p", true))
	b.time = b.time.Add(reportPeriod)
	b.look(t, p)
	want("somebody else writes", 1)
	b.inactive = false
	b.refuse = apierrors.NewConflict(schema.GroupResource{Resource: "nodepools"}, "p", errors.New("changed"))
	b.time = b.time.Add(reportPeriod)
	if got := b.look(t, p); got.RequeueAfter != reportPeriod {
		t.Errorf("after a conflict a look is asked for in %v, want %v", got.RequeueAfter, reportPeriod)
	}
	want("conflict", 2)
	b.time = b.time.Add(reportPeriod)
	b.look(t, p)
	want("again", 3)
	b.facts.forget()
	b.look(t, p)
	if len(b.reports.next)+len(b.reports.written) != 0 {
		t.Errorf("of a pool that is gone it is remembered: %v, %v", b.reports.next, b.reports.written)
	}
}

// Of a version without conditions, or with fewer fields of them, nothing is written again
// and again.
func TestStatusIsPruned(t *testing.T) {
	for _, tc := range []struct {
		name  string
		prune func(*status)
	}{
		{"no conditions", func(s *status) { s.Conditions = nil }},
		{"no observedGeneration", func(s *status) {
			for i := range s.Conditions {
				s.Conditions[i].ObservedGeneration = 0
			}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := newBench(t, nil)
			b.has = func(p *nodePool) *nodePool { tc.prune(&p.Status); b.facts.setPool(p); return p }
			b.facts.setPool(newPool("p", true))
			for range 3 {
				b.look(t, request{pool: "p"})
				b.time = b.time.Add(reportPeriod)
			}
			if len(b.statuses) != 1 {
				t.Errorf("the status was written %d times, want once", len(b.statuses))
			}
			b.facts.setNode(newNode("n", "p", true))
			b.look(t, request{pool: "p"})
			b.time = b.time.Add(reportPeriod)
			changed := newPool("p", true) // by somebody else
			b.facts.setPool(changed)
			b.look(t, request{pool: "p"})
			if len(b.statuses) != 3 {
				t.Errorf("the status was written %d times, want once more for each change", len(b.statuses))
			}
		})
	}
}

func TestMetrics(t *testing.T) {
	registry := prometheus.NewPedanticRegistry()
	b := newBench(t, nil)
	m, err := newMetrics(registry)
	if err != nil {
		t.Fatal(err)
	}
	m.active = func() bool { return true }
	b.metrics = m
	b.facts.setPool(newPool("p", true))
	b.facts.setPool(newPool("q", false))
	b.facts.setNode(newNode("n1", "p", true))
	b.facts.setNode(newNode("n2", "p", false))
	b.facts.setPod(nil, newPod("a", "n1", "excluded", "hostNetwork", "port=80"))
	b.facts.setPod(nil, newPod("b", "n1", "port=80"))
	b.look(t, request{pool: "p"})
	b.look(t, request{pool: "q"})
	want := func(lines ...string) {
		t.Helper()
		got, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		var is []string
		for _, f := range got {
			for _, metric := range f.GetMetric() {
				if f.GetName() == "edgehub_pool_label_drift_total" {
					continue
				}
				line := f.GetName()
				for _, l := range metric.GetLabel() {
					line += " " + l.GetValue()
				}
				is = append(is, fmt.Sprintf("%s = %v", line, metric.GetGauge().GetValue()))
			}
		}
		if diff := cmp.Diff(lines, is); diff != "" {
			t.Errorf("metrics (-want +got):\n%s", diff)
		}
	}
	want("edgehub_pool_excluded_pods p = 1", "edgehub_pool_excluded_pods q = 0",
		"edgehub_pool_host_port_conflicts p = 1", "edgehub_pool_host_port_conflicts q = 0",
		"edgehub_pool_nodes p false = 1", "edgehub_pool_nodes p true = 1", "edgehub_pool_nodes q false = 0", "edgehub_pool_nodes q true = 0",
		"edgehub_pool_pods_without_host_network p = 1", "edgehub_pool_pods_without_host_network q = 0",
		"edgehub_pool_writing = 1")
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("GatherAndLint() = %v, %v, want no problems", problems, err)
	}
	b.facts.removePool("p")
	b.look(t, request{pool: "p"})
	m.active = func() bool { return false }
	want("edgehub_pool_excluded_pods q = 0", "edgehub_pool_host_port_conflicts q = 0", "edgehub_pool_nodes q false = 0", "edgehub_pool_nodes q true = 0",
		"edgehub_pool_pods_without_host_network q = 0", "edgehub_pool_writing = 0")
}
