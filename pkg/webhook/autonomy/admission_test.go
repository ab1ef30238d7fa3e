// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package autonomy

import (
	"context"
	"encoding/json"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

func TestOnlyPool(t *testing.T) {
	in := func(values ...string) corev1.NodeSelectorRequirement {
		return corev1.NodeSelectorRequirement{Key: nodepool.PoolLabel, Operator: corev1.NodeSelectorOpIn, Values: values}
	}
	term := func(all ...corev1.NodeSelectorRequirement) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchExpressions: all}
	}
	other := corev1.NodeSelectorRequirement{Key: "x", Operator: corev1.NodeSelectorOpIn, Values: []string{"edge"}}
	notIn := corev1.NodeSelectorRequirement{Key: nodepool.PoolLabel, Operator: corev1.NodeSelectorOpNotIn, Values: []string{"edge"}}
	for _, tc := range []struct {
		name     string
		selector string
		terms    []corev1.NodeSelectorTerm
		want     string
	}{
		{"nothing", "", nil, ""},
		{"selector", "edge", nil, "edge"},
		{"one term", "", []corev1.NodeSelectorTerm{term(in("edge"))}, "edge"},
		{"with another requirement", "", []corev1.NodeSelectorTerm{term(other, in("edge"))}, "edge"},
		{"several pools", "", []corev1.NodeSelectorTerm{term(in("edge", "cloud"))}, ""},
		{"several, of which one is left", "", []corev1.NodeSelectorTerm{term(in("edge", "cloud"), in("edge", "x"))}, "edge"},
		{"none is left", "", []corev1.NodeSelectorTerm{term(in("edge"), in("cloud"))}, ""},
		{"terms agree", "", []corev1.NodeSelectorTerm{term(in("edge")), term(other, in("edge"))}, "edge"},
		{"terms differ", "", []corev1.NodeSelectorTerm{term(in("edge")), term(in("cloud"))}, ""},
		{"a term for any pool", "", []corev1.NodeSelectorTerm{term(in("edge")), term(other)}, ""},
		{"an empty term matches nothing", "", []corev1.NodeSelectorTerm{term(in("edge")), {}}, "edge"},
		{"not in", "", []corev1.NodeSelectorTerm{term(notIn)}, ""},
		{"selector and term agree", "edge", []corev1.NodeSelectorTerm{term(in("edge", "cloud"))}, "edge"},
		{"selector and term differ", "edge", []corev1.NodeSelectorTerm{term(in("cloud"))}, ""},
		{"selector and a term for any pool", "edge", []corev1.NodeSelectorTerm{term(other)}, "edge"},
	} {
		spec := corev1.PodSpec{}
		if tc.selector != "" {
			spec.NodeSelector = map[string]string{nodepool.PoolLabel: tc.selector}
		}
		if tc.terms != nil {
			spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: tc.terms}}}
		}
		if got := onlyPool(&spec); got != tc.want {
			t.Errorf("onlyPool(%s) = %q, want %q", tc.name, got, tc.want)
		}
	}
}

// handle creates a pod and returns it as it is after admission.
func handle(t *testing.T, w *world, pod any, edit ...func(*admission.Request)) (map[string]any, admission.Response) {
	t.Helper()
	raw, err := json.Marshal(pod)
	if err != nil {
		t.Fatal(err)
	}
	h := &podHandler{nodes: w.Client, pools: w.pools, decoder: admission.NewDecoder(w.Scheme())}
	r := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
		Operation: admissionv1.Create, Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"}, Object: runtime.RawExtension{Raw: raw},
	}}
	for _, e := range edit {
		e(&r)
	}
	response := h.Handle(t.Context(), r)
	if !response.Allowed {
		t.Errorf("a pod is refused: %v", response.Result)
	}
	if err := response.Complete(r); err != nil {
		t.Fatal(err)
	}
	if len(response.Patch) > 0 {
		p, err := jsonpatch.DecodePatch(response.Patch)
		if err != nil {
			t.Fatal(err)
		}
		if raw, err = p.Apply(raw); err != nil {
			t.Fatal(err)
		}
	}
	var got map[string]any
	if err := json.Unmarshal(raw, &got); err != nil {
		t.Fatal(err)
	}
	return got, response
}

func tolerationsOf(t *testing.T, pod map[string]any) []corev1.Toleration {
	t.Helper()
	var typed corev1.Pod
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(pod, &typed); err != nil {
		t.Fatal(err)
	}
	return typed.Spec.Tolerations
}

func TestHandle(t *testing.T) {
	pool, node, refusing := poolNamed("edge"), nodeIn("edge"), nodeIn("edge")
	pool.Annotations = map[string]string{Annotation: "true"}
	refusing.Name, refusing.Annotations = "n2", map[string]string{Annotation: "false"}
	w := newWorld(t, pool, node, refusing)
	pod := func(edit func(*corev1.Pod)) *corev1.Pod {
		p := podWith(both(seconds(300)))
		p.Spec.NodeName = ""
		edit(p)
		return p
	}
	selects := func(pool string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{nodepool.PoolLabel: pool} }
	}
	on := func(node string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Spec.NodeName = node } }
	for _, tc := range []struct {
		name string
		pod  *corev1.Pod
		want []corev1.Toleration
	}{
		{"anywhere", pod(func(*corev1.Pod) {}), both(seconds(300))},
		{"selects the pool", pod(selects("edge")), both(nil)},
		{"selects another pool", pod(selects("cloud")), both(seconds(300))},
		{"on a node of the pool", pod(on("n1")), both(nil)},
		{"on a node that does not want it", pod(on("n2")), both(seconds(300))},
		{"on a node that there is not", pod(on("n9")), both(seconds(300))},
		{"opts out", pod(func(p *corev1.Pod) { selects("edge")(p); p.Annotations = map[string]string{Annotation: "false"} }), both(seconds(300))},
		{"mirror", pod(func(p *corev1.Pod) {
			on("n1")(p)
			p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
		}), both(seconds(300))},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, response := handle(t, w, tc.pod)
			if d := cmp.Diff(tc.want, tolerationsOf(t, got)); d != "" {
				t.Errorf("Handle: tolerations (-want +got):\n%s", d)
			}
			if changed := !cmp.Equal(tc.want, tc.pod.Spec.Tolerations); (len(response.Patches) > 0) != changed {
				t.Errorf("Handle patches %v", response.Patches)
			}
			if _, again := handle(t, w, got); len(again.Patches) > 0 {
				t.Errorf("Handle of what it has made patches %v", again.Patches)
			}
		})
	}
	t.Run("copied from a node of the pool", func(t *testing.T) {
		tolerations, record := plan(podWith(both(seconds(300))), forever)
		got, _ := handle(t, w, with(pod(on("n2")), tolerations, record))
		if d := cmp.Diff(both(seconds(300)), tolerationsOf(t, got)); d != "" {
			t.Errorf("Handle: tolerations (-want +got):\n%s", d)
		}
	})
	t.Run("update", func(t *testing.T) {
		if _, r := handle(t, w, pod(selects("edge")), func(r *admission.Request) { r.Operation = admissionv1.Update }); len(r.Patches) > 0 {
			t.Errorf("Handle patches %v", r.Patches)
		}
	})
}

func TestHandleOfNoPod(t *testing.T) {
	if _, r := handle(t, newWorld(t), map[string]any{"spec": "x"}); len(r.Patches) > 0 {
		t.Errorf("Handle patches %v", r.Patches)
	}
}

// TestHandleKeepsUnknownFields: this program may be older than the API server.
func TestHandleKeepsUnknownFields(t *testing.T) {
	pool := poolNamed("edge")
	pool.Annotations = map[string]string{Annotation: "true"}
	pod := map[string]any{
		"metadata": map[string]any{"name": "p", "annotations": map[string]any{"a": "b"}, "later": "x"},
		"spec":     map[string]any{"nodeSelector": map[string]any{nodepool.PoolLabel: "edge"}, "later": map[string]any{"y": "z"}},
	}
	got, _ := handle(t, newWorld(t, pool), pod)
	if d := cmp.Diff(both(nil), tolerationsOf(t, got)); d != "" {
		t.Errorf("Handle: tolerations (-want +got):\n%s", d)
	}
	delete(got["spec"].(map[string]any), "tolerations")
	delete(got["metadata"].(map[string]any)["annotations"].(map[string]any), OriginalAnnotation)
	if d := cmp.Diff(pod, got); d != "" {
		t.Errorf("Handle changed something else (-before +after):\n%s", d)
	}
}

// TestLook takes the newest version of NodePool that is served, once one is.
func TestLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var served atomic.Pointer[map[string][]string]
		served.Store(&map[string][]string{})
		found := make(chan string, 2)
		p := &poolReader{
			cache: informers{},
			resources: func(_ context.Context, version string) (*metav1.APIResourceList, error) {
				names, ok := (*served.Load())[version]
				if !ok {
					return nil, apierrors.NewNotFound(schema.GroupResource{}, version)
				}
				var list metav1.APIResourceList
				for _, n := range names {
					list.APIResources = append(list.APIResources, metav1.APIResource{Name: n})
				}
				return &list, nil
			},
			found: func(o *metav1.PartialObjectMetadata) error { found <- o.GroupVersionKind().Version; return nil },
		}
		if _, err := p.get(ctx, "edge"); !errors.Is(err, errNotKnown) {
			t.Errorf("get before anybody has looked = %v, want %v", err, errNotKnown)
		}
		done := make(chan error)
		go func() { done <- p.Start(ctx) }()
		synctest.Wait()
		if pool, err := p.get(ctx, "edge"); pool != nil || err != nil {
			t.Errorf("get without NodePools = %v, %v, want none", pool, err)
		}
		served.Store(&map[string][]string{
			"apps.openyurt.io/v1beta2": {"yurtappsets"}, "apps.openyurt.io/v1beta1": {"nodepools"}, "apps.openyurt.io/v1alpha1": {"nodepools"},
		})
		if got := <-found; got != "v1beta1" {
			t.Errorf("look takes %s, want v1beta1", got)
		}
		synctest.Wait()
		if p.kind.Load() == nil {
			t.Error("look keeps no kind")
		}
		cancel()
		if err := <-done; err != nil || len(found) > 0 {
			t.Errorf("Start = %v, and found %d times more, want nil and not", err, len(found))
		}
	})
}
