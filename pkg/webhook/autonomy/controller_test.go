// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package autonomy

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

var poolKind = schema.GroupVersionKind{Group: nodepool.Group, Version: "v1beta2", Kind: "NodePool"}

// informers is a cache that reads from a client.
type informers struct {
	cache.Cache
	reader client.Reader
	err    error // of GetInformer
}

func (c informers) Get(ctx context.Context, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
	return c.reader.Get(ctx, key, o, opts...)
}

func (c informers) GetInformer(context.Context, client.Object, ...cache.InformerGetOption) (cache.Informer, error) {
	return nil, c.err
}

// A world is a reconciler with the objects that it sees.
type world struct {
	*testing.T
	client.Client
	*reconciler
	registry *prometheus.Registry
	events   *events.FakeRecorder
	patches  int
	refuse   error  // of the next patch
	before   func() // the next patch
}

func newWorld(t *testing.T, objects ...client.Object) *world {
	t.Helper()
	scheme := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	metav1.AddToGroupVersion(scheme, poolKind.GroupVersion())
	scheme.AddKnownTypeWithName(poolKind, &metav1.PartialObjectMetadata{})
	w := &world{T: t, registry: prometheus.NewPedanticRegistry(), events: events.NewFakeRecorder(10)}
	w.Client = fake.NewClientBuilder().WithScheme(scheme).WithObjects(objects...).
		WithIndex(&corev1.Pod{}, nodeIndex, func(o client.Object) []string { return []string{o.(*corev1.Pod).Spec.NodeName} }).
		WithInterceptorFuncs(interceptor.Funcs{Patch: func(ctx context.Context, c client.WithWatch, o client.Object, p client.Patch, opts ...client.PatchOption) error {
			w.patches++
			if before := w.before; before != nil {
				w.before = nil
				before()
			}
			if err := w.refuse; err != nil {
				w.refuse = nil
				return err
			}
			return c.Patch(ctx, o, p, opts...)
		}}).Build()
	m, err := newMetrics(w.registry)
	if err != nil {
		t.Fatal(err)
	}
	pools := &poolReader{cache: informers{reader: w.Client}}
	pools.kind.Store(&poolKind)
	pools.looked.Store(true)
	w.reconciler = &reconciler{
		client: w.Client, pools: pools, recorder: w.events, metrics: m, writes: rate.NewLimiter(rate.Inf, 1),
		freed: map[types.UID]time.Time{}, said: map[string]string{},
	}
	return w
}

func (w *world) reconcile(node string) reconcile.Result {
	w.Helper()
	result, err := w.Reconcile(w.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Name: node}})
	if err != nil {
		w.Errorf("Reconcile(%s) = %v, want no error", node, err)
	}
	return result
}

// wants compares a pod's tolerations.
func (w *world) wants(when string, want []corev1.Toleration) {
	w.Helper()
	var pod corev1.Pod
	if err := w.Get(w.Context(), client.ObjectKey{Namespace: "a", Name: "p"}, &pod); err != nil {
		w.Fatal(err)
	}
	if d := cmp.Diff(want, pod.Spec.Tolerations); d != "" {
		w.Errorf("%s: tolerations (-want +got):\n%s", when, d)
	}
}

// annotate sets an annotation, or removes it if value is "".
func (w *world) annotate(o client.Object, key, value string) {
	w.Helper()
	if err := w.Get(w.Context(), client.ObjectKeyFromObject(o), o); err != nil {
		w.Fatal(err)
	}
	all := o.GetAnnotations()
	if all == nil {
		all = map[string]string{}
	}
	if all[key] = value; value == "" {
		delete(all, key)
	}
	o.SetAnnotations(all)
	if err := w.Update(w.Context(), o); err != nil {
		w.Fatal(err)
	}
}

func nodeIn(pool string, taints ...string) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{nodepool.PoolLabel: pool}}}
	for _, key := range taints {
		n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: key, Effect: corev1.TaintEffectNoExecute})
	}
	return n
}

func poolNamed(name string) *metav1.PartialObjectMetadata {
	p := partial(poolKind)
	p.Name = name
	return p
}

// TestReconcile puts annotations on and off a node and its pool.
func TestReconcile(t *testing.T) {
	node, pool, pod := nodeIn("edge"), poolNamed("edge"), podWith(both(seconds(300)))
	w := newWorld(t, node, pool, pod)
	w.reconcile("n1")
	w.wants("without annotation", both(seconds(300)))
	w.annotate(pool, Annotation, "true")
	w.reconcile("n1")
	w.wants("pool: true", both(nil))
	w.annotate(node, Annotation, "15m")
	w.reconcile("n1")
	w.wants("pool: true, node: 15m", both(seconds(900)))
	w.annotate(node, Annotation, "false")
	w.reconcile("n1")
	w.wants("pool: true, node: false", both(seconds(300)))
	w.annotate(node, Annotation, "")
	w.reconcile("n1")
	w.wants("pool: true again", both(nil))
	w.annotate(pod, Annotation, "false")
	w.reconcile("n1")
	w.wants("pod: false", both(seconds(300)))
	w.annotate(pod, Annotation, "true") // which is not for a pod to say
	w.reconcile("n1")
	w.wants("pod: true", both(nil))
	w.annotate(pool, Annotation, "")
	w.reconcile("n1")
	w.wants("nowhere", both(seconds(300)))
	if w.patches != 7 {
		t.Errorf("there were %d patches, want 7", w.patches)
	}
	w.reconcile("n1")
	if w.patches != 7 {
		t.Errorf("%d patches changed nothing", w.patches-7)
	}
	var last corev1.Pod
	if err := w.Get(t.Context(), client.ObjectKeyFromObject(pod), &last); err != nil || last.Annotations[OriginalAnnotation] != "" {
		t.Errorf("the record is left: %v, %v", last.Annotations, err)
	}
}

func TestReconcileLeavesAlone(t *testing.T) {
	now := metav1.Now()
	for name, edit := range map[string]func(*corev1.Pod){
		"mirror":      func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"} },
		"terminating": func(p *corev1.Pod) { p.DeletionTimestamp, p.Finalizers = &now, []string{"x/y"} },
		"failed":      func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed },
		"elsewhere":   func(p *corev1.Pod) { p.Spec.NodeName = "n2" },
	} {
		t.Run(name, func(t *testing.T) {
			node, pod := nodeIn(""), podWith(both(seconds(300)))
			node.Annotations = map[string]string{Annotation: "true"}
			edit(pod)
			w := newWorld(t, node, pod)
			w.reconcile("n1")
			w.wants(name, both(seconds(300)))
		})
	}
}

// TestReconcileKnowsNothingYet: before anybody has looked for NodePools, nothing is put back.
func TestReconcileKnowsNothingYet(t *testing.T) {
	pod := podWith(nil)
	tolerations, record := plan(podWith(both(seconds(300))), forever)
	w := newWorld(t, nodeIn("edge"), poolNamed("edge"), with(pod, tolerations, record))
	w.pools.looked.Store(false)
	if got := w.reconcile("n1"); got.RequeueAfter != afterUnknown || w.patches > 0 {
		t.Errorf("Reconcile = %v with %d patches, want to be asked again after %v without any", got, w.patches, afterUnknown)
	}
	w.pools.looked.Store(true)
	w.pools.kind.Store(nil) // there are none
	w.reconcile("n1")
	w.wants("without NodePools", both(seconds(300)))
}

func TestReconcileErrors(t *testing.T) {
	node := nodeIn("")
	node.Annotations = map[string]string{Annotation: "true"}
	gr := schema.GroupResource{Resource: "pods"}
	for _, tc := range []struct {
		name  string
		err   error
		after time.Duration
		fails bool
	}{
		{"conflict", apierrors.NewConflict(gr, "p", errors.New("changed")), afterConflict, false},
		{"gone", apierrors.NewNotFound(gr, "p"), 0, false},
		{"refused", apierrors.NewForbidden(gr, "p", errors.New("no")), 0, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			other := podWith(both(seconds(300)))
			other.Name, other.UID = "q", "v"
			w := newWorld(t, node.DeepCopy(), podWith(both(seconds(300))), other)
			w.refuse = tc.err
			got, err := w.Reconcile(t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Name: "n1"}})
			if got.RequeueAfter != tc.after || (err != nil) != tc.fails || w.patches != 2 {
				t.Errorf("Reconcile = %v, %v, with %d patches, want after %v, an error: %v, 2 patches", got, err, w.patches, tc.after, tc.fails)
			}
			w.reconcile("n1")
			w.wants("at the next try", both(nil))
		})
	}
}

// TestReconcileKeepsOthersChanges: somebody else adds a toleration in between.
func TestReconcileKeepsOthersChanges(t *testing.T) {
	node, pod := nodeIn(""), podWith(both(seconds(300)))
	node.Annotations = map[string]string{Annotation: "true"}
	w := newWorld(t, node, pod)
	other := tolerating("example.com/x", seconds(1))
	w.before = func() {
		if err := w.Get(t.Context(), client.ObjectKeyFromObject(pod), pod); err != nil {
			t.Fatal(err)
		}
		pod.Spec.Tolerations = append(pod.Spec.Tolerations, other)
		if err := w.Update(t.Context(), pod); err != nil {
			t.Fatal(err)
		}
	}
	if got := w.reconcile("n1"); got.RequeueAfter != afterConflict {
		t.Errorf("Reconcile = %v, want to be asked again after %v", got, afterConflict)
	}
	w.reconcile("n1")
	w.wants("after somebody else's change", append(both(nil), other))
}

// TestReconcileOfCutNode: from one number of seconds to another a pod of a node that is cut
// goes by way of none, and stays there for a while.
func TestReconcileOfCutNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		node, pod := nodeIn("", corev1.TaintNodeUnreachable), podWith(both(seconds(300)))
		node.Annotations = map[string]string{Annotation: "15m"}
		w := newWorld(t, node, pod)
		for _, step := range []struct {
			value string
			want  int64
		}{{"15m", 900}, {"", 300}} {
			w.annotate(node, Annotation, step.value)
			if got := w.reconcile("n1"); got.RequeueAfter != takeIn {
				t.Errorf("Reconcile = %v, want to be asked again after %v", got, takeIn)
			}
			w.wants("at once", both(nil))
			pause(takeIn / 2)
			if got := w.reconcile("n1"); got.RequeueAfter != takeIn/2 {
				t.Errorf("Reconcile = %v, want to be asked again after %v", got, takeIn/2)
			}
			w.wants("after half of the time", both(nil))
			pause(takeIn)
			w.reconcile("n1")
			w.wants("after the time", both(seconds(step.want)))
		}
		w.annotate(node, Annotation, "true")
		w.reconcile("n1")
		w.wants("for ever, which needs no detour", both(nil))
	})
}

// pause waits in the time of the bubble.
func pause(d time.Duration) { <-time.After(d) }

func TestComplaints(t *testing.T) {
	node, pool := nodeIn("edge"), poolNamed("edge")
	pool.Annotations = map[string]string{Annotation: "perhaps"}
	w := newWorld(t, node, pool, podWith(both(seconds(300))))
	said := func(want string) {
		t.Helper()
		select {
		case got := <-w.events.Events:
			if want == "" || !strings.Contains(got, want) || !strings.HasPrefix(got, "Warning InvalidAutonomy") {
				t.Errorf("an Event says %q, want %q", got, want)
			}
		default:
			if want != "" {
				t.Errorf("no Event says %q", want)
			}
		}
	}
	w.reconcile("n1")
	said("perhaps")
	w.reconcile("n1")
	said("")
	w.wants("a value that means nothing", both(seconds(300)))
	w.annotate(node, openYurtDurationAnnotation, "soon")
	w.reconcile("n1")
	said("soon")
	w.annotate(pool, Annotation, "true")
	w.reconcile("n1")
	said("")
	w.wants("the pool says true", both(nil))
	w.annotate(pool, Annotation, "perhaps")
	w.reconcile("n1")
	said("perhaps")
	for kind, want := range map[string]float64{kindNode: 1, kindNodePool: 2} {
		if got := testutil.ToFloat64(w.metrics.invalid.WithLabelValues(kind)); got != want {
			t.Errorf("edgehub_autonomy_invalid_annotations_total{kind=%q} = %v, want %v", kind, got, want)
		}
	}
}

func TestMetrics(t *testing.T) {
	node := nodeIn("")
	node.Annotations = map[string]string{Annotation: "true"}
	out := podWith(both(nil))
	out.Name, out.UID, out.Annotations = "q", "v", map[string]string{Annotation: "false"}
	w := newWorld(t, node, podWith(both(seconds(300))), out)
	check := func(forever, limited, tolerated, restored int) {
		t.Helper()
		text := fmt.Sprintf(`
# HELP edgehub_autonomy_changes_total Changes to the tolerations of bound pods: tolerated, restored, or failed.
# TYPE edgehub_autonomy_changes_total counter
edgehub_autonomy_changes_total{change="failed"} 0
edgehub_autonomy_changes_total{change="restored"} %d
edgehub_autonomy_changes_total{change="tolerated"} %d
# HELP edgehub_autonomy_pods Pods that stay on their node while it is cut because the node or its pool says so, by for how long: forever or limited.
# TYPE edgehub_autonomy_pods gauge
edgehub_autonomy_pods{tolerance="forever"} %d
edgehub_autonomy_pods{tolerance="limited"} %d
`, restored, tolerated, forever, limited)
		if err := testutil.GatherAndCompare(w.registry, strings.NewReader(text), "edgehub_autonomy_changes_total", "edgehub_autonomy_pods"); err != nil {
			t.Error(err)
		}
	}
	w.reconcile("n1")
	check(1, 0, 1, 0)
	w.annotate(node, Annotation, "1h")
	w.reconcile("n1")
	check(0, 1, 2, 0)
	w.annotate(node, Annotation, "")
	w.reconcile("n1")
	check(0, 0, 2, 1)
	w.annotate(node, Annotation, "true")
	w.reconcile("n1")
	if err := w.Delete(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	w.reconcile("n1")
	check(0, 0, 3, 1)
	if problems, err := testutil.GatherAndLint(w.registry); err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
}

// TestNodesOf wants the nodes first that are cut.
func TestNodesOf(t *testing.T) {
	var objects []client.Object
	for name, taints := range map[string][]string{"a": nil, "b": {corev1.TaintNodeNotReady}, "c": nil, "d": {corev1.TaintNodeUnreachable}, "e": {"example.com/x"}} {
		n := nodeIn("edge", taints...)
		n.Name = name
		objects = append(objects, n)
	}
	other := nodeIn("cloud")
	other.Name = "f"
	w := newWorld(t, append(objects, other)...)
	var got []string
	for _, r := range w.nodesOf(t.Context(), poolNamed("edge")) {
		got = append(got, r.Name)
	}
	if d := cmp.Diff([]string{"b", "d", "a", "c", "e"}, got); d != "" {
		t.Errorf("nodesOf (-want +got):\n%s", d)
	}
}

func TestChanges(t *testing.T) {
	nodeEdits := map[string]func(*corev1.Node){
		"pool":       func(n *corev1.Node) { n.Labels[nodepool.PoolLabel] = "other" },
		"annotation": func(n *corev1.Node) { n.Annotations = map[string]string{Annotation: ""} },
		"flag":       func(n *corev1.Node) { n.Annotations = map[string]string{openYurtAnnotation: "true"} },
		"duration":   func(n *corev1.Node) { n.Annotations = map[string]string{openYurtDurationAnnotation: "0"} },
		"-status":    func(n *corev1.Node) { n.Status.Phase = corev1.NodeRunning },
		"-other":     func(n *corev1.Node) { n.Annotations = map[string]string{"x": "y"} },
	}
	for name, edit := range nodeEdits {
		before, after := nodeIn("edge"), nodeIn("edge")
		edit(after)
		if got, want := nodeChanges.Update(event.TypedUpdateEvent[*corev1.Node]{ObjectOld: before, ObjectNew: after}), name[0] != '-'; got != want {
			t.Errorf("nodeChanges(%s) = %v, want %v", name, got, want)
		}
	}
	podEdits := map[string]func(*corev1.Pod){
		"node":        func(p *corev1.Pod) { p.Spec.NodeName = "n2" },
		"tolerations": func(p *corev1.Pod) { p.Spec.Tolerations = both(nil) },
		"opt out":     func(p *corev1.Pod) { p.Annotations = map[string]string{Annotation: "false"} },
		"record":      func(p *corev1.Pod) { p.Annotations = map[string]string{OriginalAnnotation: "[]"} },
		"end":         func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed },
		"-running":    func(p *corev1.Pod) { p.Status.Phase = corev1.PodRunning },
	}
	for name, edit := range podEdits {
		before, after := podWith(both(seconds(1))), podWith(both(seconds(1)))
		edit(after)
		if got, want := podChanges.Update(event.TypedUpdateEvent[*corev1.Pod]{ObjectOld: before, ObjectNew: after}), name[0] != '-'; got != want {
			t.Errorf("podChanges(%s) = %v, want %v", name, got, want)
		}
	}
}
