// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metadatafake "k8s.io/client-go/metadata/fake"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

// A strictWriter refuses, as the API server does, a node with a label that is none.
type strictWriter struct{ *bench }

func (w strictWriter) Patch(ctx context.Context, o client.Object, p client.Patch, opts ...client.PatchOption) error {
	for key := range o.GetLabels() {
		if strings.Contains(key, " ") {
			return errors.New("invalid label")
		}
	}
	return w.bench.Patch(ctx, o, p, opts...)
}

// What the API server refuses of a pool must not keep the label from its nodes, which
// keeps pods off.
func TestInvalidAttributesDoNotKeepTheLabelAway(t *testing.T) {
	is := newNode("n", "p", true)
	is.ResourceVersion = "1"
	b := newBench(t, is)
	b.writer = strictWriter{b}
	p := newPool("p", true)
	p.Spec.Labels = map[string]string{"no label": "x"}
	b.facts.setPool(p)
	b.look(t, request{node: "n"})
	if got := b.node.Labels[nodepool.HostNetworkLabel]; got != nodepool.True {
		t.Errorf("the label of a node whose pool has an invalid attribute = %q, want true", got)
	}
	if _, err := b.Reconcile(t.Context(), request{node: "n"}); err == nil {
		t.Error("Reconcile() with an invalid attribute = no error, want one: nobody is told")
	}
}

// A node may write its own annotations and choose its pool, but neither its taints nor
// labels of node-restriction.kubernetes.io: the controller must not do it for it.
func TestNodeGetsNothingThatItMayNotTake(t *testing.T) {
	const secret = "tenant.node-restriction.kubernetes.io/a"
	unreachable := corev1.Taint{Key: corev1.TaintNodeOutOfService, Value: "x", Effect: corev1.TaintEffectNoExecute}
	forged := map[string]string{appliedAnnotation: `{"labels":{"` + secret + `":"b"},"taints":[{"key":"node.kubernetes.io/out-of-service","value":"x","effect":"NoExecute"}]}`}
	if got, _ := plan(node(map[string]string{secret: "b"}, forged, unreachable), nil); got != nil {
		t.Errorf("plan() of a node that says that its pool gave all to it = %v, want nothing to do", got)
	}
	giving := newPool("p", false)
	giving.Spec.attributes = attributes{
		Labels: map[string]string{secret: "a", "node-restriction.kubernetes.io/x": "y", "l": "1"},
		Taints: []corev1.Taint{unreachable, {Key: "node.cloudprovider.kubernetes.io/uninitialized", Effect: corev1.TaintEffectNoSchedule}},
	}
	got, _ := plan(node(nil, nil), giving)
	if d := cmp.Diff(node(map[string]string{"l": "1"}, map[string]string{appliedAnnotation: `{"labels":{"l":"1"}}`}), got); d != "" {
		t.Errorf("plan() with a pool that gives what no node may take (-want +got):\n%s", d)
	}
	if again, _ := plan(got, giving); again != nil {
		t.Errorf("plan() of what it returned = %v, want nothing to do", again)
	}
}

// A tenant's Deployment that is called like yurt-manager changes nothing.
func TestTenantsYurtManager(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheme := metadatafake.NewTestScheme()
		if err := metav1.AddMetaToScheme(scheme); err != nil {
			t.Fatal(err)
		}
		c := metadatafake.NewSimpleMetadataClient(scheme)
		y := newYurtManager(c, func(context.Context) {})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- y.run(ctx) }()
		for _, tc := range []struct {
			namespace string
			absent    bool
		}{{"tenant", true}, {"kube-system", false}} {
			deployments := c.Resource(signs[0].GroupVersionResource).Namespace(tc.namespace)
			_, err := deployments.(metadatafake.MetadataClient).CreateFake(&metav1.PartialObjectMetadata{
				ObjectMeta: metav1.ObjectMeta{Name: "yurt-manager", Namespace: tc.namespace}}, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			<-time.After(time.Second)
			synctest.Wait()
			if got := y.absent(); got != tc.absent {
				t.Errorf("absent() with a Deployment yurt-manager in %s = %v, want %v", tc.namespace, got, tc.absent)
			}
		}
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run() = %v, want nil", err)
		}
	})
}

// A NodePool that is deleted and made anew between two looks gets its own status, and a
// node that names it is looked at again.
func TestPoolMadeAnew(t *testing.T) {
	b := newBench(t, newNode("n", "p", true))
	b.facts.setNode(b.node)
	b.facts.setPool(newPool("p", false))
	b.look(t, request{pool: "p"})
	b.time = b.time.Add(reportPeriod)
	anew := newPool("p", false)
	anew.UID, anew.ResourceVersion = "another", "9"
	if got := sorted(append(b.facts.removePool("p"), b.facts.setPool(anew)...)); !strings.Contains(got, "node n") {
		t.Errorf("a NodePool made anew asks for %s, want the node too", got)
	}
	b.look(t, request{pool: "p"})
	if len(b.statuses) != 2 || !strings.Contains(b.statuses[1], `"resourceVersion":"9"`) {
		t.Errorf("statuses of a NodePool made anew: %q, want one of the new", b.statuses)
	}
}

// Whatever a node's annotation says, a second look finds nothing to do.
func FuzzApplied(f *testing.F) {
	for _, s := range []string{`{"labels":{"l":"1"}}`, `{"taints":[{"key":"t","effect":"NoSchedule"},{"key":"t","effect":"NoSchedule"}]}`, `[`, `null`, `{"annotations":{"nodepool.openyurt.io/previous-attributes":"x"}}`, strings.Repeat("[", 20000)} {
		f.Add(s)
	}
	giving := newPool("p", true)
	giving.Spec.attributes = attributes{Labels: map[string]string{"l": "1"}, Taints: []corev1.Taint{{Key: "t", Effect: corev1.TaintEffectNoSchedule}}}
	f.Fuzz(func(t *testing.T, text string) {
		for _, pool := range []*nodePool{nil, giving, newPool("q", true)} {
			is := node(map[string]string{"l": "1"}, map[string]string{appliedAnnotation: text}, corev1.Taint{Key: "t", Effect: corev1.TaintEffectNoSchedule})
			looks := 0
			for ; is != nil && looks < 4; looks++ {
				is, _ = plan(is, pool)
			}
			if is != nil {
				t.Errorf("plan() with %q finds something to do after %d looks", text, looks)
			}
		}
	})
}
