// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"encoding/base64"
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
	"k8s.io/client-go/dynamic"
)

const (
	writePeriod    = 30 * time.Millisecond // of each writer
	namesPerWriter = 40
	sentinel       = "sentinel"
)

// A writer creates, changes and deletes objects of one resource, straight at the
// API server. It is the only one that does.
type writer struct {
	client   dynamic.Interface
	gvr      schema.GroupVersionResource
	rng      *rand.Rand
	objects  map[string]*unstructured.Unstructured // by namespace/name
	sentinel *unstructured.Unstructured
	writes   atomic.Int64
}

func newWriter(client dynamic.Interface, gvr schema.GroupVersionResource, seed uint64) *writer {
	return &writer{client: client, gvr: gvr, rng: rand.New(rand.NewPCG(seed, 1)), objects: map[string]*unstructured.Unstructured{}}
}

// object makes a new object.
func (w *writer) object(namespace, name string) *unstructured.Unstructured {
	o := &unstructured.Unstructured{Object: map[string]any{"metadata": map[string]any{"namespace": namespace, "name": name}}}
	o.SetAPIVersion(w.gvr.GroupVersion().String())
	switch w.gvr.Resource {
	case "configmaps":
		o.SetKind("ConfigMap")
	case "secrets":
		o.SetKind("Secret")
	case "pods":
		o.SetKind("Pod")
		node := fmt.Sprintf("n%d", w.rng.IntN(2))
		o.SetLabels(map[string]string{"node": node})
		o.Object["spec"] = map[string]any{"nodeName": node, "terminationGracePeriodSeconds": int64(0), "containers": []any{map[string]any{"name": "c", "image": "example.invalid/none:1"}}}
	default:
		o.SetKind("Widget")
	}
	w.change(o)
	return o
}

// change changes something that is not status, the label that selectors look at
// included.
func (w *writer) change(o *unstructured.Unstructured) {
	labels := o.GetLabels()
	if labels == nil {
		labels = map[string]string{}
	}
	labels["parity"] = []string{"even", "odd"}[w.rng.IntN(2)]
	labels["n"] = strconv.Itoa(w.rng.IntN(1000000))
	o.SetLabels(labels)
	size := 20 + w.rng.IntN(1000)
	if w.rng.IntN(20) == 0 {
		size = 20000
	}
	text := strings.Repeat("text <&> ünïcode ", size/17)
	switch w.gvr.Resource {
	case "configmaps":
		o.Object["data"] = map[string]any{"text": text}
	case "secrets":
		o.Object["data"] = map[string]any{"password": base64.StdEncoding.EncodeToString([]byte(text))}
	case "widgets":
		o.Object["spec"] = map[string]any{"text": text, "zero": int64(0), "empty": map[string]any{}}
	}
}

// step does one thing to one object.
func (w *writer) step(ctx context.Context) error {
	namespace, name := []string{"a", "b"}[w.rng.IntN(2)], fmt.Sprintf("o-%02d", w.rng.IntN(namesPerWriter/2))
	c := w.client.Resource(w.gvr).Namespace(namespace)
	key := namespace + "/" + name
	w.writes.Add(1)
	o := w.objects[key]
	switch dice := w.rng.IntN(10); {
	case o == nil:
		o, err := c.Create(ctx, w.object(namespace, name), metav1.CreateOptions{})
		w.objects[key] = o
		return err
	case dice < 3:
		delete(w.objects, key)
		return c.Delete(ctx, name, metav1.DeleteOptions{})
	case dice < 6 && w.gvr.Resource == "pods":
		o = o.DeepCopy()
		o.Object["status"] = map[string]any{"phase": []string{"Pending", "Running"}[w.rng.IntN(2)], "message": fmt.Sprint(w.rng.IntN(1000000))}
		o, err := c.UpdateStatus(ctx, o, metav1.UpdateOptions{})
		w.objects[key] = o
		return err
	default:
		o = o.DeepCopy()
		w.change(o)
		o, err := c.Update(ctx, o, metav1.UpdateOptions{})
		w.objects[key] = o
		return err
	}
}

// run writes until ctx ends.
func (w *writer) run(ctx context.Context) error {
	tick := time.NewTicker(writePeriod)
	defer tick.Stop()
	for {
		err := w.step(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("write %s: %w", w.gvr.Resource, err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// mark changes an object that nobody else does, and returns the resourceVersion
// of that.
func (w *writer) mark(ctx context.Context) (int64, error) {
	c := w.client.Resource(w.gvr).Namespace("b")
	var err error
	if w.sentinel == nil {
		o := &unstructured.Unstructured{Object: w.objectOf(sentinel)}
		w.sentinel, err = c.Create(ctx, o, metav1.CreateOptions{})
	} else {
		annotations := w.sentinel.GetAnnotations()
		if annotations == nil {
			annotations = map[string]string{}
		}
		annotations["mark"] = w.sentinel.GetResourceVersion()
		w.sentinel.SetAnnotations(annotations)
		w.sentinel, err = c.Update(ctx, w.sentinel, metav1.UpdateOptions{})
	}
	if err != nil {
		return 0, err
	}
	if w.sentinel.GetResourceVersion() == "" {
		return 0, apierrors.NewInternalError(fmt.Errorf("%s without a resourceVersion", sentinel))
	}
	return strconv.ParseInt(w.sentinel.GetResourceVersion(), 10, 64)
}

// objectOf is object without dice, for the goroutine that marks.
func (w *writer) objectOf(name string) map[string]any {
	quiet := &writer{gvr: w.gvr, rng: rand.New(rand.NewPCG(1, 1))}
	return quiet.object("b", name).Object
}
