// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package exclude

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2/ktesting"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/edgehub/edgehub/test/admission/cases"
)

// cluster answers lists of Nodes.
type cluster func(context.Context, labels.Selector) ([]corev1.Node, error)

func (cluster) Get(context.Context, client.ObjectKey, client.Object, ...client.GetOption) error {
	return errors.ErrUnsupported
}

func (c cluster) List(ctx context.Context, list client.ObjectList, opts ...client.ListOption) error {
	o := client.ListOptions{}
	o.ApplyOptions(opts)
	items, err := c(ctx, o.LabelSelector)
	list.(*corev1.NodeList).Items = items
	return err
}

// someNodes are in the pools that their labels say.
func someNodes(nodes ...map[string]string) cluster {
	return func(_ context.Context, s labels.Selector) (found []corev1.Node, err error) {
		for _, l := range nodes {
			if s.Matches(labels.Set(l)) {
				found = append(found, corev1.Node{ObjectMeta: metav1.ObjectMeta{Labels: l}})
			}
		}
		return found, nil
	}
}

func newHandler(t *testing.T, c cluster) (*handler, *prometheus.Registry) {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	m, err := newMetrics(r)
	if err != nil {
		t.Fatal(err)
	}
	return &handler{metrics: m, nodes: c}, r
}

func podRequest(pool string, dryRun bool) admission.Request {
	r := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
		Operation: admissionv1.Create, Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"}, DryRun: &dryRun,
	}}
	r.Object.Raw = []byte(`{"metadata":{"annotations":{"` + cases.Annotation + `":"true"}},"spec":{"nodeSelector":{"` + cases.PoolLabel + `":"` + pool + `"}}}`)
	return r
}

func TestHandle(t *testing.T) {
	host := map[string]string{cases.PoolLabel: "p", cases.Label: "true"}
	plain := map[string]string{cases.PoolLabel: "p"}
	contradiction := []string{cases.Warnings["pool-selector"]}
	for _, c := range []struct {
		name  string
		nodes cluster
		want  []string
	}{
		{"a pool of host-network nodes", someNodes(host, host), contradiction},
		{"a pool of other nodes", someNodes(plain), nil},
		{"a pool of both", someNodes(host, plain), nil},
		{"a pool of another name", someNodes(map[string]string{cases.PoolLabel: "q", cases.Label: "true"}), nil},
		{"a pool without nodes", someNodes(), nil},
		{"no answer", func(context.Context, labels.Selector) ([]corev1.Node, error) { return nil, errors.New("no") }, nil},
		{"an answer too late", func(ctx context.Context, _ labels.Selector) ([]corev1.Node, error) {
			<-ctx.Done() // the handler's own limit
			return nil, ctx.Err()
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				_, ctx := ktesting.NewTestContext(t)
				h, _ := newHandler(t, c.nodes)
				before := time.Now()
				got := h.Handle(ctx, podRequest("p", false))
				if !got.Allowed || len(got.Patches) != 1 {
					t.Errorf("Handle() = allowed %v, %d patches, want true and 1", got.Allowed, len(got.Patches))
				}
				if diff := cmp.Diff(c.want, got.Warnings); diff != "" {
					t.Errorf("warnings (-want +got):\n%s", diff)
				}
				if took := time.Since(before); took > time.Second {
					t.Errorf("Handle() took %v, want at most 1s", took)
				}
			})
		})
	}
}

func TestHandleAllowsWhatItCannotRead(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	h, _ := newHandler(t, someNodes())
	r := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
		Operation: admissionv1.Create, Resource: metav1.GroupVersionResource{Group: kruiseGroup, Version: "v1beta1", Resource: "daemonsets"},
		Object: runtime.RawExtension{Raw: []byte(`{"spec":{"template":{"spec":{"nodeSelector":7}}}}`)},
	}}
	got := h.Handle(ctx, r)
	if diff := cmp.Diff([]string{cases.Warnings["unreadable"]}, got.Warnings); diff != "" || !got.Allowed || len(got.Patches) > 0 {
		t.Errorf("Handle() = allowed %v, %d patches, warnings (-want +got):\n%s", got.Allowed, len(got.Patches), diff)
	}
}

// TestMetrics: each injection and warning counts once, in a dry run none does, and the
// answer is the same.
func TestMetrics(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	h, registry := newHandler(t, someNodes(map[string]string{cases.PoolLabel: "p", cases.Label: "true"}))
	for range 2 {
		counted, dry := h.Handle(ctx, podRequest("p", false)), h.Handle(ctx, podRequest("p", true))
		if diff := cmp.Diff(counted, dry); diff != "" {
			t.Errorf("a dry run differs (-real +dry):\n%s", diff)
		}
	}
	daemonSet := admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
		Operation: admissionv1.Create, Resource: metav1.GroupVersionResource{Group: kruiseGroup, Version: "v1beta1", Resource: "daemonsets"},
		Object: runtime.RawExtension{Raw: []byte(`{"spec":{"template":{"metadata":{"annotations":{"` + cases.Annotation + `":"true"}},"spec":{}}}}`)},
	}}
	h.Handle(ctx, daemonSet)
	for _, c := range []struct {
		name string
		got  float64
		want float64
	}{
		{"injections of pods", testutil.ToFloat64(h.metrics.injections.WithLabelValues("pods")), 2},
		{"injections of OpenKruise's DaemonSets", testutil.ToFloat64(h.metrics.injections.WithLabelValues("daemonsets.apps.kruise.io")), 1},
		{"warnings", testutil.ToFloat64(h.metrics.warnings.WithLabelValues("pool-selector")), 2},
	} {
		if c.got != c.want {
			t.Errorf("%s = %v, want %v", c.name, c.got, c.want)
		}
	}
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("GatherAndLint() = %v, %v", problems, err)
	}
}
