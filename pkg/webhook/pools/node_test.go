// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

const hostNetworkLabel = nodepool.HostNetworkLabel

func TestPlan(t *testing.T) {
	type m = map[string]string
	taint := func(key, value string) corev1.Taint {
		return corev1.Taint{Key: key, Value: value, Effect: corev1.TaintEffectNoSchedule}
	}
	host, plain := newPool("p", true), newPool("p", false)
	annotated := newPool("p", false)
	annotated.Annotations = m{hostNetworkLabel: "TRUE"}
	giving := newPool("p", false)
	giving.Spec.attributes = attributes{Labels: m{"l": "1"}, Annotations: m{"a": "1"}, Taints: []corev1.Taint{taint("t", "1")}}
	const applied = `{"labels":{"l":"1"},"annotations":{"a":"1"},"taints":[{"key":"t","value":"1","effect":"NoSchedule"}]}`
	reserving := newPool("p", true)
	reserving.Spec.attributes = attributes{Labels: m{hostNetworkLabel: "false", nodepool.PoolLabel: "x", nodepool.DesiredPoolLabel: "x", "l": "1"}, Annotations: m{appliedAnnotation: "x"}}

	for _, tc := range []struct {
		name        string
		labels      m
		annotations m
		taints      []corev1.Taint
		pool        *nodePool
		want        *corev1.Node // nil: nothing to do
		drift       nodepool.Drift
	}{
		{"in none", m{"x": "y"}, nil, nil, nil, nil, ""},
		{"in a pool, nothing to do", m{"x": "y"}, nil, nil, plain, nil, ""},
		{"label is missing", m{"x": "y"}, nil, nil, host, node(m{"x": "y", hostNetworkLabel: "true"}, nil), nodepool.LabelMissing},
		{"no labels at all", nil, nil, nil, host, node(m{hostNetworkLabel: "true"}, nil), nodepool.LabelMissing},
		{"label is there", m{hostNetworkLabel: "true"}, nil, nil, host, nil, ""},
		{"label is there, by annotation", m{hostNetworkLabel: "true"}, nil, nil, annotated, nil, ""},
		{"label is missing, by annotation", nil, nil, nil, annotated, node(m{hostNetworkLabel: "true"}, nil), nodepool.LabelMissing},
		{"label is False", m{hostNetworkLabel: "false"}, nil, nil, host, node(m{hostNetworkLabel: "true"}, nil), nodepool.LabelNotTrue},
		{"label is left over", m{hostNetworkLabel: "true", "x": "y"}, nil, nil, plain, node(m{"x": "y"}, nil), nodepool.LabelLeftOver},
		{"label is left over in no pool", m{hostNetworkLabel: "true"}, nil, nil, nil, node(nil, nil), nodepool.LabelLeftOver},
		{"a label that does not count may stay", m{hostNetworkLabel: "false"}, nil, nil, plain, nil, ""},
		{"attributes", m{"l": "0"}, m{"b": "1"}, []corev1.Taint{taint("u", ""), taint("t", "0")}, giving,
			node(m{"l": "1"}, m{"a": "1", "b": "1", appliedAnnotation: applied}, taint("u", ""), taint("t", "1")), ""},
		{"attributes are applied", m{"l": "1"}, m{appliedAnnotation: applied}, nil, giving, nil, ""},
		{"what was changed since stays", m{"l": "2"}, m{appliedAnnotation: applied}, nil, giving, nil, ""},
		{"another has nothing to give", m{"l": "1", "x": "y"}, m{"a": "1", "b": "1", appliedAnnotation: applied}, []corev1.Taint{taint("t", "1"), taint("u", "")}, plain,
			node(m{"x": "y"}, m{"b": "1"}, taint("u", "")), ""},
		{"left the pool", m{"l": "1"}, m{"a": "1", appliedAnnotation: applied}, []corev1.Taint{taint("t", "1")}, nil, node(nil, nil), ""},
		{"left the pool, what was changed since stays", m{"l": "2"}, m{"a": "2", appliedAnnotation: applied}, []corev1.Taint{taint("t", "2")}, nil,
			node(m{"l": "2"}, m{"a": "2"}, taint("t", "2")), ""},
		{"left the pool, of what there is nothing left", nil, m{appliedAnnotation: applied}, nil, nil, node(nil, nil), ""},
		{"nothing was applied", m{"l": "1"}, m{appliedAnnotation: `{}`}, nil, plain, nil, ""},
		{"what was applied cannot be read", m{"l": "1"}, m{appliedAnnotation: `[`}, nil, plain, nil, ""},
		{"reserved names", m{hostNetworkLabel: "true"}, nil, nil, reserving, node(m{hostNetworkLabel: "true", "l": "1"}, m{appliedAnnotation: `{"labels":{"l":"1"}}`}), ""},
		{"what is reserved was not applied", m{nodepool.PoolLabel: "x"}, m{appliedAnnotation: `{"labels":{"apps.openyurt.io/nodepool":"x"}}`}, nil, nil, nil, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			is := node(tc.labels, tc.annotations, tc.taints...)
			before := is.DeepCopy()
			got, drift := plan(is, tc.pool)
			if diff := cmp.Diff(tc.want, got, cmpopts.EquateEmpty()); diff != "" || drift != tc.drift {
				t.Errorf("plan() = drift %q, want %q, (-want +got):\n%s", drift, tc.drift, diff)
			}
			if diff := cmp.Diff(before, is); diff != "" {
				t.Errorf("plan() changed the node that it was given (-want +got):\n%s", diff)
			}
			if got == nil {
				return
			}
			if again, drift := plan(got, tc.pool); again != nil || drift != "" {
				t.Errorf("plan() of what it returned = %v, %q, want nothing to do", again, drift)
			}
		})
	}
}

func node(labels, annotations map[string]string, taints ...corev1.Taint) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: maps.Clone(labels), Annotations: maps.Clone(annotations)}, Spec: corev1.NodeSpec{Taints: taints}}
}

// A bench is a reconciler over fakes. As a client it has one node.
type bench struct {
	*reconciler
	client.Client
	node     *corev1.Node
	events   *events.FakeRecorder
	inactive bool
	refuse   error    // of the next patch
	patches  []string // of the node
	statuses []string // patches of pools
	has      func(*nodePool) *nodePool
	time     time.Time
}

func (b *bench) Get(_ context.Context, key client.ObjectKey, o client.Object, _ ...client.GetOption) error {
	if b.node == nil || key.Name != b.node.Name {
		return apierrors.NewNotFound(schema.GroupResource{Resource: "nodes"}, key.Name)
	}
	b.node.DeepCopyInto(o.(*corev1.Node))
	return nil
}

func (b *bench) Patch(_ context.Context, o client.Object, p client.Patch, _ ...client.PatchOption) error {
	text, err := p.Data(o)
	if err != nil {
		return err
	}
	b.patches = append(b.patches, string(text))
	if err := b.refuse; err != nil {
		b.refuse = nil
		return err
	}
	b.node = o.DeepCopyObject().(*corev1.Node)
	b.node.ResourceVersion += "0"
	return nil
}

func newBench(t *testing.T, node *corev1.Node) *bench {
	t.Helper()
	b := &bench{node: node, events: events.NewFakeRecorder(10), time: time.Unix(1_000_000, 0)}
	m, err := newMetrics(prometheus.NewPedanticRegistry())
	if err != nil {
		t.Fatal(err)
	}
	b.reconciler = &reconciler{
		facts: newFacts(), metrics: m, active: func() bool { return !b.inactive }, now: func() time.Time { return b.time },
		nodes: b, writer: b, events: b.events,
		writeStatus: func(_ context.Context, p *nodePool, patch []byte) (*nodePool, error) {
			b.statuses = append(b.statuses, string(patch))
			if err := b.refuse; err != nil {
				b.refuse = nil
				return nil, err
			}
			var body struct{ Status status }
			if err := json.Unmarshal(patch, &body); err != nil {
				return nil, err
			}
			is := *p
			is.Status = body.Status
			return b.has(&is), nil
		},
	}
	b.has = func(p *nodePool) *nodePool { return p }
	b.facts.know()
	return b
}

// event returns the next Event, "" if there is none.
func (b *bench) event() string {
	select {
	case e := <-b.events.Events:
		return e
	default:
		return ""
	}
}

func (b *bench) look(t *testing.T, q request) reconcile.Result {
	t.Helper()
	result, err := b.Reconcile(t.Context(), q)
	if err != nil {
		t.Fatalf("Reconcile(%v) = %v", q, err)
	}
	return result
}

// A patch of a node touches its one label, and holds only for the version that it is
// about; what was found is told once.
func TestNodeIsPatched(t *testing.T) {
	is := newNode("n", "p", true)
	is.ResourceVersion = "1"
	b := newBench(t, is)
	n := request{node: "n"}
	want := func(step string, patches int, event string, drift nodepool.Drift, count float64) {
		t.Helper()
		if got := b.event(); len(b.patches) != patches || got != event {
			t.Errorf("%s: %d patches and Event %q, want %d and %q", step, len(b.patches), got, patches, event)
		}
		if got := testutil.ToFloat64(b.metrics.drift.WithLabelValues(string(drift))); got != count {
			t.Errorf("%s: %s counted %v times, want %v", step, drift, got, count)
		}
	}
	const missing = "Warning PoolMissing The node's label apps.openyurt.io/nodepool names the NodePool p, which does not exist; the label nodepool.openyurt.io/hostnetwork stays as it is"
	b.look(t, n)
	want("the pool does not exist", 0, missing, nodepool.PoolMissing, 1)
	b.look(t, n)
	want("it still does not", 0, "", nodepool.PoolMissing, 1)

	b.facts.setPool(newPool("p", true))
	b.inactive = true
	b.look(t, n)
	want("somebody else writes", 0, "", nodepool.LabelMissing, 0)
	b.inactive = false
	b.refuse = apierrors.NewConflict(schema.GroupResource{Resource: "nodes"}, "n", errors.New("changed"))
	if got := b.look(t, n); got.RequeueAfter != conflictDelay {
		t.Errorf("after a conflict a look is asked for in %v, want %v", got.RequeueAfter, conflictDelay)
	}
	want("conflict", 1, "", nodepool.LabelMissing, 0)
	b.look(t, n)
	want("the pool exists", 2, "Normal LabelMissing The node is in the host-network pool p; its label nodepool.openyurt.io/hostnetwork was set to true", nodepool.LabelMissing, 1)
	if want := `{"metadata":{"labels":{"nodepool.openyurt.io/hostnetwork":"true"},"resourceVersion":"1"}}`; b.patches[1] != want {
		t.Errorf("patch %s, want %s", b.patches[1], want)
	}
	b.look(t, n)
	want("nothing to do", 2, "", nodepool.LabelMissing, 1)

	b.facts.setPool(newPool("p", false))
	b.look(t, n)
	want("no host-network pool", 3, "Normal LabelLeftOver The node is in no host-network pool; its label nodepool.openyurt.io/hostnetwork was removed", nodepool.LabelLeftOver, 1)
	if want := `{"metadata":{"labels":{"nodepool.openyurt.io/hostnetwork":null},"resourceVersion":"10"}}`; b.patches[2] != want {
		t.Errorf("patch %s, want %s", b.patches[2], want)
	}
	b.facts.removePool("p")
	b.look(t, n)
	want("the pool is gone", 3, missing, nodepool.PoolMissing, 2)

	b.look(t, request{node: "gone"})
	b.facts.forget()
	b.look(t, n)
	want("nobody tells of pools", 3, "", nodepool.PoolMissing, 2)

	b.facts.know()
	b.facts.setPool(newPool("p", true))
	b.refuse = errors.New("no")
	if _, err := b.Reconcile(t.Context(), n); err == nil {
		t.Error("Reconcile() of a node that cannot be patched = no error, want one")
	}
}
