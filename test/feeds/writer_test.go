// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package feeds

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/edgehub/edgehub/test/rig"
)

const names = 20 // of a writer, in each of two namespaces

var (
	configMapsGVR = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	secretsGVR    = schema.GroupVersionResource{Version: "v1", Resource: "secrets"}
	podsGVR       = schema.GroupVersionResource{Version: "v1", Resource: "pods"}
)

// A writer creates, changes and deletes objects of one resource, straight at the
// API server. It holds no state, so that an API server that dies with a request is
// no problem: what is there is changed, what is not is made.
type writer struct {
	client dynamic.Interface
	gvr    schema.GroupVersionResource
	rng    *rand.Rand
	writes atomic.Int64
	failed atomic.Int64
}

func newWriter(r *rig.Rig, gvr schema.GroupVersionResource, seed uint64) *writer {
	r.T.Helper()
	config := r.ControlPlane.TokenConfig(writerUser)
	config.Timeout = 10 * time.Second
	c, err := dynamic.NewForConfig(config)
	r.Must(err)
	return &writer{client: c, gvr: gvr, rng: rand.New(rand.NewPCG(seed, 1))}
}

var kinds = map[string]string{"configmaps": "ConfigMap", "secrets": "Secret", "pods": "Pod", "widgets": "Widget"}

// content is what a write sets: the label that selectors look at, and something
// that is new each time.
func (w *writer) content(parity string) map[string]any {
	n := strconv.FormatUint(w.rng.Uint64(), 36)
	o := map[string]any{"metadata": map[string]any{"labels": map[string]any{"parity": parity, "n": n}}}
	size := 20 + w.rng.IntN(600)
	if w.rng.IntN(20) == 0 {
		size = 12000
	}
	text := strings.Repeat("text <&> ünïcode ", size/17)
	switch w.gvr.Resource {
	case "configmaps":
		o["data"] = map[string]any{"text": text}
	case "secrets":
		o["data"] = map[string]any{"password": base64.StdEncoding.EncodeToString([]byte(text))}
	case "widgets":
		o["spec"] = map[string]any{"text": text, "zero": int64(0), "empty": map[string]any{}}
	}
	return o
}

func (w *writer) parity() string { return []string{"even", "odd"}[w.rng.IntN(2)] }

// create makes an object.
func (w *writer) create(ctx context.Context, namespace, name, parity string) error {
	o := &unstructured.Unstructured{Object: w.content(parity)}
	o.SetAPIVersion(w.gvr.GroupVersion().String())
	o.SetKind(kinds[w.gvr.Resource])
	o.SetNamespace(namespace)
	o.SetName(name)
	if w.gvr.Resource == "pods" {
		o.Object["spec"] = map[string]any{"terminationGracePeriodSeconds": int64(0), "containers": []any{map[string]any{"name": "c", "image": "example.invalid/none:1"}}}
	}
	_, err := w.client.Resource(w.gvr).Namespace(namespace).Create(ctx, o, metav1.CreateOptions{})
	return err
}

// update changes an object and returns its resourceVersion.
func (w *writer) update(ctx context.Context, namespace, name, parity string) (int64, error) {
	patch, err := json.Marshal(w.content(parity))
	if err != nil {
		return 0, err
	}
	o, err := w.client.Resource(w.gvr).Namespace(namespace).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(o.GetResourceVersion(), 10, 64)
}

func (w *writer) delete(ctx context.Context, namespace, name string) error {
	now := int64(0)
	return w.client.Resource(w.gvr).Namespace(namespace).Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: &now})
}

// step does one thing to one object: creates it, changes it, takes it away, or
// puts another one under its name.
func (w *writer) step(ctx context.Context) error {
	namespace, name := []string{"a", "b"}[w.rng.IntN(2)], fmt.Sprintf("o-%02d", w.rng.IntN(names))
	w.writes.Add(1)
	switch dice := w.rng.IntN(10); {
	case dice < 2:
		return only(w.delete(ctx, namespace, name))
	case dice < 3:
		if err := only(w.delete(ctx, namespace, name)); err != nil {
			return err
		}
		return only(w.create(ctx, namespace, name, w.parity()))
	case dice < 5:
		return only(w.create(ctx, namespace, name, w.parity()))
	}
	_, err := w.update(ctx, namespace, name, w.parity())
	if apierrors.IsNotFound(err) {
		err = w.create(ctx, namespace, name, w.parity())
	}
	return only(err)
}

// only lets pass what is not the state of the object.
func only(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}

// run writes until ctx ends. What fails while there is no API server is counted.
func (w *writer) run(ctx context.Context, period time.Duration) error {
	tick := time.NewTicker(period)
	defer tick.Stop()
	for {
		if err := w.step(ctx); err != nil {
			w.failed.Add(1)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}
