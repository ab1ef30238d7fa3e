// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

func newNode(name, pool string, ready bool) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), Labels: map[string]string{}}}
	if pool != "" {
		n.Labels[nodepool.PoolLabel] = pool
	}
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionTrue}, {Type: corev1.NodeReady, Status: status}}
	return n
}

// newPod makes a pod of what the words in traits say: excluded, hostNetwork, ended, or
// port=N.
func newPod(name, node string, traits ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name}, Spec: corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c"}}}}
	for _, trait := range traits {
		var port int32
		switch {
		case trait == "excluded":
			p.Annotations = map[string]string{nodepool.ExcludeAnnotation: "true"}
		case trait == "hostNetwork":
			p.Spec.HostNetwork = true
		case trait == "ended":
			p.Status.Phase = corev1.PodSucceeded
		default:
			if _, err := fmt.Sscanf(trait, "port=%d", &port); err != nil {
				panic(err)
			}
			p.Spec.Containers[0].Ports = append(p.Spec.Containers[0].Ports, corev1.ContainerPort{ContainerPort: port, HostPort: port})
		}
	}
	return p
}

func newPool(name string, hostNetwork bool) *nodePool {
	p := &nodePool{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), Generation: 1, ResourceVersion: "1"}}
	p.APIVersion = "apps.openyurt.io/v1beta2"
	p.Spec.HostNetwork = hostNetwork
	return p
}

// sorted returns requests as words.
func sorted(requests []request) string {
	var words []string
	for _, r := range requests {
		switch {
		case r.node != "":
			words = append(words, "node "+r.node)
		case r.pool != "":
			words = append(words, "pool "+r.pool)
		}
	}
	slices.Sort(words)
	return strings.Join(words, ", ")
}

// Each event asks for a look at what it changes, and for no more.
func TestFactsRequests(t *testing.T) {
	f := newFacts()
	for _, step := range []struct {
		name string
		do   func() []request
		want string
	}{
		{"a node of a pool that is not there yet", func() []request { return f.setNode(newNode("n1", "p", true)) }, "pool p"},
		{"the same node again", func() []request { return f.setNode(newNode("n1", "p", true)) }, ""},
		{"a node that is in none", func() []request { return f.setNode(newNode("n2", "", true)) }, ""},
		{"a pool comes, with a node", func() []request { return f.setPool(newPool("p", true)) }, "node n1, pool p"},
		{"only its status changes", func() []request {
			p := newPool("p", true)
			p.Status.ReadyNodeNum = 1
			return f.setPool(p)
		}, "pool p"},
		{"its labels change", func() []request {
			p := newPool("p", true)
			p.Spec.Labels = map[string]string{"a": "b"}
			return f.setPool(p)
		}, "node n1, pool p"},
		{"it was replaced", func() []request {
			p := newPool("p", true)
			p.Spec.Labels, p.UID = map[string]string{"a": "b"}, "another"
			return f.setPool(p)
		}, "node n1, pool p"},
		{"it is no host-network pool any more", func() []request { return f.setPool(newPool("p", false)) }, "node n1, pool p"},
		{"it is, by its annotation", func() []request {
			p := newPool("p", false)
			p.Annotations = map[string]string{nodepool.HostNetworkLabel: "True"}
			return f.setPool(p)
		}, "node n1, pool p"},
		{"a node that is not ready any more", func() []request { return f.setNode(newNode("n1", "p", false)) }, "pool p"},
		{"a node moves", func() []request { return f.setNode(newNode("n1", "q", false)) }, "pool p, pool q"},
		{"a node leaves", func() []request { return f.setNode(newNode("n1", "", false)) }, "pool q"},
		{"a node joins", func() []request { return f.setNode(newNode("n1", "p", true)) }, "pool p"},
		{"a pod on no node", func() []request { return f.setPod(nil, newPod("a", "")) }, ""},
		{"a pod on a node of no pool", func() []request { return f.setPod(nil, newPod("b", "n2")) }, ""},
		{"a pod on a node", func() []request { return f.setPod(newPod("a", ""), newPod("a", "n1")) }, "pool p"},
		{"the pod changes in what does not matter", func() []request {
			p := newPod("a", "n1")
			p.Status.Phase = corev1.PodRunning
			return f.setPod(newPod("a", "n1"), p)
		}, ""},
		{"the pod gets the annotation", func() []request { return f.setPod(newPod("a", "n1"), newPod("a", "n1", "excluded")) }, "pool p"},
		{"a pod of its name, on another node", func() []request { return f.setPod(newPod("a", "n1", "excluded"), newPod("a", "n2")) }, "pool p"},
		{"the pod on the other node is gone", func() []request { return f.setPod(newPod("a", "n2"), nil) }, ""},
		{"a pod with ports", func() []request { return f.setPod(nil, newPod("c", "n1", "port=80")) }, "pool p"},
		{"the pod ends", func() []request { return f.setPod(newPod("c", "n1", "port=80"), newPod("c", "n1", "ended")) }, "pool p"},
		{"the pod that has ended goes", func() []request { return f.setPod(newPod("c", "n1", "ended"), nil) }, ""},
		{"all", f.all, "node n1, node n2, pool p"},
		{"the pool goes", func() []request { return f.removePool("p") }, "node n1, pool p"},
		{"a node goes", func() []request { return f.removeNode("n1") }, "pool p"},
		{"nobody tells of pools", func() []request { f.setPool(newPool("r", true)); return f.forget() }, "pool r"},
	} {
		if got := sorted(step.do()); got != step.want {
			t.Errorf("%s: requests %q, want %q", step.name, got, step.want)
		}
	}
	f.removeNode("n2")
	f.setPod(newPod("b", "n2"), nil)
	if len(f.nodes)+len(f.poolOf)+len(f.pods)+len(f.pools)+len(f.found) != 0 {
		t.Errorf("after all has gone there are nodes %v, pools of nodes %v, pods %v, pools %v and findings %v", f.nodes, f.poolOf, f.pods, f.pools, f.found)
	}
}

// A report is of what there is when it is made.
func TestReport(t *testing.T) {
	f := newFacts()
	f.know()
	for _, p := range []*nodePool{newPool("host", true), newPool("pods", false)} {
		f.setPool(p)
	}
	for i, pool := range []string{"host", "host", "host", "pods", ""} {
		f.setNode(newNode(fmt.Sprintf("n%d", 4-i), pool, i != 1))
	}
	for _, p := range []*corev1.Pod{
		newPod("excluded", "n4", "excluded", "hostNetwork"), newPod("both", "n3", "excluded"), newPod("none", "n2", "hostNetwork"),
		newPod("ended", "n4", "excluded", "ended"), newPod("waiting", "", "excluded"), newPod("elsewhere", "n1", "excluded"), newPod("nowhere", "n0", "excluded"),
		newPod("x", "n2", "hostNetwork", "port=80"), newPod("y", "n2", "hostNetwork", "port=80"), newPod("other-node", "n3", "hostNetwork", "port=80"),
		newPod("u", "n1", "port=81"), newPod("v", "n1", "port=81"),
	} {
		f.setPod(nil, p)
	}
	for _, tc := range []struct {
		pool string
		want report
	}{
		{"host", report{
			nodes: []string{"n2", "n3", "n4"}, ready: 2,
			findings: findings{finding{2, []string{"a/both", "a/excluded"}}, finding{1, []string{"a/both"}}, finding{1, []string{"a/x and a/y, TCP port 80 on n2"}}},
		}},
		{"pods", report{nodes: []string{"n1"}, ready: 1, findings: findings{conflicts: finding{1, []string{"a/u and a/v, TCP port 81 on n1"}}}}},
		{"none", report{}},
	} {
		_, got := f.report(tc.pool)
		if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(report{}, findings{}, finding{})); diff != "" {
			t.Errorf("report(%s) (-want +got):\n%s", tc.pool, diff)
		}
	}
	for _, step := range []struct {
		name    string
		was, is *corev1.Pod
		want    findings
	}{
		{"two go", newPod("both", "n3", "excluded"), nil, findings{excluded: finding{1, []string{"a/excluded"}}}},
		{"one comes", nil, newPod("b", "n4"), findings{finding{1, []string{"a/excluded"}}, finding{1, []string{"a/b"}}, finding{}}},
	} {
		f.setPod(step.was, step.is)
		f.setPod(newPod("x", "n2", "hostNetwork", "port=80"), nil)
		_, got := f.report("host")
		if diff := cmp.Diff(step.want, got.findings, cmp.AllowUnexported(findings{}, finding{}), cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%s: report(host) (-want +got):\n%s", step.name, diff)
		}
	}
	f.forget()
	if p, _ := f.report("host"); p != nil {
		t.Errorf("report of a pool of which nobody tells = %v, want none", p)
	}
}

// Of many there are those that come first, and conflicts have an end.
func TestReportIsBounded(t *testing.T) {
	f := newFacts()
	f.know()
	f.setPool(newPool("p", true))
	f.setNode(newNode("n", "p", true))
	for i := range 100 {
		f.setPod(nil, newPod(fmt.Sprintf("p%02d", (i*37)%100), "n", "excluded", "port=80"))
	}
	_, got := f.report("p")
	first := finding{100, []string{"a/p00", "a/p01", "a/p02", "a/p03", "a/p04"}}
	for name, is := range map[string]finding{"excluded": got.excluded, "withoutHostNetwork": got.withoutHostNetwork} {
		if diff := cmp.Diff(first, is, cmp.AllowUnexported(finding{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	if got.conflicts.count != maxConflicts || len(got.conflicts.examples) != maxExamples {
		t.Errorf("conflicts = %+v, want %d and %d examples", got.conflicts, maxConflicts, maxExamples)
	}
}

// BenchmarkReport makes the report of a pool of 5,000 nodes with 50,000 pods, of which
// one has changed since the last report.
func BenchmarkReport(b *testing.B) {
	f := manyFacts()
	f.report("p")
	b.ReportAllocs()
	for b.Loop() {
		f.setPod(newPod("p7-1", "n7", "hostNetwork"), newPod("p7-1", "n7", "excluded"))
		f.setPod(newPod("p7-1", "n7", "excluded"), newPod("p7-1", "n7", "hostNetwork"))
		if _, r := f.report("p"); len(r.nodes) != 5000 || r.excluded.count != 5000 {
			b.Fatalf("%d nodes, %d excluded pods", len(r.nodes), r.excluded.count)
		}
	}
}

// BenchmarkSetPod tells of a change of one of 50,000 pods.
func BenchmarkSetPod(b *testing.B) {
	f := manyFacts()
	was, is := newPod("p7-1", "n7", "hostNetwork"), newPod("p7-1", "n7", "excluded")
	b.ReportAllocs()
	for b.Loop() {
		if len(f.setPod(was, is)) != 1 || len(f.setPod(is, was)) != 1 {
			b.Fatal("no change")
		}
	}
}

func manyFacts() *facts {
	f := newFacts()
	f.know()
	f.setPool(newPool("p", true))
	for i := range 5000 {
		node := fmt.Sprintf("n%d", i)
		f.setNode(newNode(node, "p", true))
		for j := range 10 {
			traits := []string{"hostNetwork", fmt.Sprintf("port=%d", 80+j)}
			if j == 0 {
				traits = append(traits, "excluded")
			}
			f.setPod(nil, newPod(fmt.Sprintf("p%d-%d", i, j), node, traits...))
		}
	}
	return f
}
