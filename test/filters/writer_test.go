// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/edgehub/edgehub/test/rig"
)

const names = 10 // of a writer, in each of two namespaces

var (
	kinds = map[string]string{"configmaps": "ConfigMap", "services": "Service", "widgets": "Widget"}
	gvrs  = map[string]schema.GroupVersionResource{"configmaps": configMapsGVR, "services": servicesGVR, "widgets": rig.Widgets}
)

// A writer creates, changes and deletes objects of one resource, straight at the API
// server.
type writer struct {
	client   dynamic.NamespaceableResourceInterface
	resource string
	rng      *rand.Rand
}

func newWriter(s *stage, resource string, seed uint64) *writer {
	return &writer{client: s.dynamic.Resource(gvrs[resource]), resource: resource, rng: rand.New(rand.NewPCG(seed, 1))}
}

// content is what a write sets: what rules go by, and something that is new each time.
func (w *writer) content() map[string]any {
	o := map[string]any{}
	put(o, pick(w.rng, colors), "metadata", "labels", "color")
	put(o, pick(w.rng, []string{"even", "odd"}), "metadata", "labels", "parity")
	put(o, strconv.FormatUint(w.rng.Uint64(), 36), "metadata", "labels", "n")
	size := 20 + w.rng.IntN(400)
	if w.rng.IntN(20) == 0 {
		size = 12000
	}
	put(o, strings.Repeat("text <&> ünïcode ", size/17), notes[w.resource]...)
	level := w.rng.IntN(5)
	if w.resource == "widgets" {
		put(o, level, levels[w.resource]...)
	} else {
		put(o, strconv.Itoa(level), levels[w.resource]...)
	}
	if w.resource == "services" {
		put(o, pick(w.rng, []string{"LoadBalancer", "ClusterIP"}), "spec", "type")
		put(o, pick(w.rng, []string{"true", "false"}), "metadata", "annotations", "svc.openyurt.io/discard")
	}
	return o
}

// create makes an object.
func (w *writer) create(ctx context.Context, namespace, name string) error {
	content := w.content()
	put(content, gvrs[w.resource].GroupVersion().String(), "apiVersion")
	put(content, kinds[w.resource], "kind")
	put(content, name, "metadata", "name")
	if w.resource == "services" {
		put(content, []any{map[string]any{"port": 80}}, "spec", "ports")
	}
	b, err := json.Marshal(content)
	if err != nil {
		return err
	}
	o := &unstructured.Unstructured{}
	if err := o.UnmarshalJSON(b); err != nil {
		return err
	}
	_, err = w.client.Namespace(namespace).Create(ctx, o, metav1.CreateOptions{})
	return err
}

// update changes an object and returns its resourceVersion.
func (w *writer) update(ctx context.Context, namespace, name string) (int64, error) {
	patch, err := json.Marshal(w.content())
	if err != nil {
		return 0, err
	}
	o, err := w.client.Namespace(namespace).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(o.GetResourceVersion(), 10, 64)
}

// step does one thing to one object: creates it, changes it, takes it away, or puts another
// one under its name.
func (w *writer) step(ctx context.Context) error {
	namespace, name := pick(w.rng, []string{"a", "b"}), fmt.Sprintf("o-%02d", w.rng.IntN(names))
	dice := w.rng.IntN(10)
	if dice < 3 {
		if err := only(w.client.Namespace(namespace).Delete(ctx, name, metav1.DeleteOptions{})); err != nil || dice < 2 {
			return err
		}
	}
	if dice < 5 {
		return only(w.create(ctx, namespace, name))
	}
	_, err := w.update(ctx, namespace, name)
	if apierrors.IsNotFound(err) {
		err = w.create(ctx, namespace, name)
	}
	return only(err)
}

// only lets pass what is the state of the object.
func only(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}
