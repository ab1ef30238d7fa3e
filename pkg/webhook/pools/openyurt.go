// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"context"
	"sync"
	"sync/atomic"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// signs are the objects by any of which OpenYurt's yurt-manager is known. The names of the
// webhook configurations are in its program, that of the Deployment is in its chart. In
// another namespace than kube-system the Deployment does not count: whoever may make
// one anywhere could keep labels from nodes.
var signs = []struct {
	schema.GroupVersionResource
	namespace, name string
}{
	{schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}, metav1.NamespaceSystem, "yurt-manager"},
	{schema.GroupVersionResource{Group: "admissionregistration.k8s.io", Version: "v1", Resource: "mutatingwebhookconfigurations"}, "", "yurt-manager-mutating-webhook-configuration"},
	{schema.GroupVersionResource{Group: "admissionregistration.k8s.io", Version: "v1", Resource: "validatingwebhookconfigurations"}, "", "yurt-manager-validating-webhook-configuration"},
}

// A yurtManager knows whether OpenYurt's yurt-manager is there.
type yurtManager struct {
	informers []cache.SharedIndexInformer // in the order of signs
	changed   func(context.Context)       // is called when it has come or gone
	isAbsent  atomic.Bool
}

func newYurtManager(client metadata.Interface, changed func(context.Context)) *yurtManager {
	y := &yurtManager{changed: changed}
	for _, s := range signs {
		only := func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("metadata.name", s.name).String()
		}
		y.informers = append(y.informers, metadatainformer.NewFilteredMetadataInformer(client, s.GroupVersionResource, s.namespace, 0, cache.Indexers{}, only).Informer())
	}
	return y
}

// absent reports whether yurt-manager is known not to be there.
func (y *yurtManager) absent() bool { return y.isAbsent.Load() }

// run returns when ctx ends.
func (y *yurtManager) run(ctx context.Context) error {
	poke := make(chan struct{}, 1)
	look := func(any) {
		select {
		case poke <- struct{}{}:
		default:
		}
	}
	var running sync.WaitGroup
	defer running.Wait()
	synced := []cache.InformerSynced{}
	for _, informer := range y.informers {
		if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: look, DeleteFunc: look}); err != nil {
			return err
		}
		synced = append(synced, informer.HasSynced)
		running.Go(func() { informer.RunWithContext(ctx) })
	}
	if !cache.WaitForCacheSync(ctx.Done(), synced...) {
		return nil
	}
	for first := true; ; first = false {
		found := y.found()
		if absent := len(found) == 0; first || absent != y.absent() {
			y.isAbsent.Store(absent)
			klog.FromContext(ctx).Info("Looked for OpenYurt's yurt-manager: labels of nodes and the status of NodePools are left to it if it is there", "found", found)
			y.changed(ctx)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-poke:
		}
	}
}

// found returns the signs that there are.
func (y *yurtManager) found() []string {
	found := []string{}
	for i, informer := range y.informers {
		for _, key := range informer.GetStore().ListKeys() {
			found = append(found, signs[i].Resource+" "+key)
		}
	}
	return found
}
