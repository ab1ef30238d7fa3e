// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package autonomy

import (
	"context"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

// The API takes pods with as many tolerations as go into a request. They must not keep
// the controller or admission busy for minutes: this ends in time only if the work grows
// with their number and not with its square.
func TestManyTolerations(t *testing.T) {
	many := slices.Repeat([]corev1.Toleration{tolerating(corev1.TaintNodeUnreachable, seconds(1)), tolerating("example.com/x", seconds(1))}, 30_000)
	began := time.Now()
	raised, changed := raise(many, nil)
	tolerations := restore(raised, changed)
	if d := time.Since(began); d > 15*time.Second {
		t.Errorf("to raise and put back %d tolerations takes %v", len(many), d)
	}
	if d := cmp.Diff(many[:4], tolerations[:4]); d != "" || len(tolerations) != len(many)+1 {
		t.Errorf("put back are %d tolerations, want %d and one more (-want +got):\n%s", len(tolerations), len(many), d)
	}
}

// A pod whose annotations are full is created as it is: with one more it would be refused.
func TestHandleOfFullAnnotations(t *testing.T) {
	pool := poolNamed("edge")
	pool.Annotations = map[string]string{Annotation: "true"}
	w := newWorld(t, pool)
	for _, tc := range []struct {
		name    string
		size    int
		patched bool
	}{
		{"room is left", apivalidation.TotalAnnotationSizeLimitB - 1000, true},
		{"full", apivalidation.TotalAnnotationSizeLimitB - 10, false},
	} {
		pod := podWith(both(seconds(300)))
		pod.Spec.NodeName, pod.Spec.NodeSelector = "", map[string]string{nodepool.PoolLabel: "edge"}
		pod.Annotations = map[string]string{"example.com/a": strings.Repeat("x", tc.size-len("example.com/a"))}
		got, response := handle(t, w, pod)
		all := map[string]string{}
		for key, value := range got["metadata"].(map[string]any)["annotations"].(map[string]any) {
			all[key] = value.(string)
		}
		if err := apivalidation.ValidateAnnotationsSize(all); err != nil {
			t.Errorf("%s: the pod would be refused: %v", tc.name, err)
		}
		if patched := len(response.Patches) > 0; patched != tc.patched {
			t.Errorf("%s: patched: %v, want %v", tc.name, patched, tc.patched)
		}
	}
}

// What the API server will refuse for ever is not asked for again and again.
func TestReconcileOfARefusedPod(t *testing.T) {
	node := nodeIn("")
	node.Annotations = map[string]string{Annotation: "true"}
	w := newWorld(t, node, podWith(both(seconds(300))))
	w.refuse = apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, "p", field.ErrorList{field.TooLong(field.NewPath("metadata", "annotations"), "", 1)})
	got, err := w.Reconcile(t.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Name: "n1"}})
	if err != nil || got.RequeueAfter != 0 || w.patches != 1 {
		t.Errorf("Reconcile = %v, %v with %d patches, want no second try", got, err, w.patches)
	}
}

// The longest duration that there is does not turn into one below 0.
func TestLongestDuration(t *testing.T) {
	if got := *during(math.MaxInt64).seconds; got != 9223372037 {
		t.Errorf("during(%v) = %d s, want 9223372037", time.Duration(math.MaxInt64), got)
	}
}

// A NodePool that is deleted and made anew, with the same mistake, is told of anew.
func TestComplaintOfPoolMadeAnew(t *testing.T) {
	pool := poolNamed("edge")
	pool.Annotations = map[string]string{Annotation: "perhaps"}
	w := newWorld(t, nodeIn("edge"), pool)
	w.reconcile("n1")
	if err := w.Delete(t.Context(), pool.DeepCopy()); err != nil {
		t.Fatal(err)
	}
	w.reconcile("n1")
	if len(w.said) != 0 {
		t.Errorf("of a NodePool that is gone %v is remembered", w.said)
	}
	pool.ResourceVersion = ""
	if err := w.Create(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	w.reconcile("n1")
	if len(w.events.Events) != 2 {
		t.Errorf("there were %d Events, want 2", len(w.events.Events))
	}
}

// removable is informers that tells what is removed.
type removable struct {
	informers
	removed *[]string
}

func (c removable) RemoveInformer(_ context.Context, o client.Object) error {
	*c.removed = append(*c.removed, o.GetObjectKind().GroupVersionKind().Version)
	return nil
}

// The CRD is replaced by one with other versions, goes, and comes back: what is followed is
// what is served, and while nothing is, nothing is forgotten.
func TestLookAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var served atomic.Value
		served.Store("v1alpha1")
		var found, removed []string
		p := &poolReader{
			cache: removable{removed: &removed},
			resources: func(_ context.Context, version string) (*metav1.APIResourceList, error) {
				if version != "apps.openyurt.io/"+served.Load().(string) {
					return nil, apierrors.NewNotFound(schema.GroupResource{}, version)
				}
				return &metav1.APIResourceList{APIResources: []metav1.APIResource{{Name: "nodepools"}}}, nil
			},
			found: func(o *metav1.PartialObjectMetadata) error {
				found = append(found, o.GroupVersionKind().Version)
				return nil
			},
		}
		done := make(chan error)
		go func() { done <- p.Start(ctx) }()
		for _, step := range []struct{ served, follows string }{{"v1alpha1", "v1alpha1"}, {"v1beta2", "v1beta2"}, {"none", "v1beta2"}, {"v1beta2", "v1beta2"}, {"v1beta1", "v1beta1"}} {
			synctest.Wait()
			served.Store(step.served)
			pause(2 * lookAgain)
			synctest.Wait()
			if got := p.kind.Load().Version; got != step.follows {
				t.Errorf("with %s served, %s is followed, want %s", step.served, got, step.follows)
			}
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Start = %v, want nil", err)
		}
		if d := cmp.Diff([]string{"v1alpha1", "v1beta2", "v1beta1"}, found); d != "" {
			t.Errorf("found (-want +got):\n%s", d)
		}
		if d := cmp.Diff([]string{"v1alpha1", "v1beta2"}, removed); d != "" {
			t.Errorf("removed (-want +got):\n%s", d)
		}
	})
}
