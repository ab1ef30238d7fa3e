// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	metadatafake "k8s.io/client-go/metadata/fake"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

// An api is which versions of NodePool the API server has.
type api struct {
	mu       sync.Mutex
	versions []string
	err      error
}

func (a *api) set(err error, versions ...string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.versions, a.err = versions, err
}

func (a *api) resources(_ context.Context, groupVersion string) (*metav1.APIResourceList, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.err != nil {
		return nil, a.err
	}
	list := &metav1.APIResourceList{GroupVersion: groupVersion, APIResources: []metav1.APIResource{{Name: "yurtappsets"}}}
	if slices.Contains(a.versions, groupVersion) {
		list.APIResources = append(list.APIResources, metav1.APIResource{Name: nodepool.Resource})
	} else if len(a.versions) == 0 || groupVersion == "apps.openyurt.io/v1alpha1" {
		return nil, apierrors.NewNotFound(schema.GroupResource{}, "")
	}
	return list, nil
}

// NodePools are waited for, followed in their newest version, and forgotten.
func TestFollower(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		kinds := map[schema.GroupVersionResource]string{}
		for _, version := range nodepool.Versions() {
			kinds[resourceOf(version)] = "NodePoolList"
		}
		client := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), kinds)
		ctx, cancel := context.WithCancel(t.Context())
		create := func(version, name string, hostNetwork any) {
			u := &unstructured.Unstructured{Object: map[string]any{
				"apiVersion": "apps.openyurt.io/" + version, "kind": "NodePool", "metadata": map[string]any{"name": name}, "spec": map[string]any{"hostNetwork": hostNetwork},
			}}
			if _, err := client.Resource(resourceOf(version)).Create(ctx, u, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		create("v1beta1", "old", true)
		create("v1beta2", "new", true)
		create("v1beta2", "odd", "true")

		var mu sync.Mutex
		var told []request
		apis := &api{}
		f := &follower{client: client, resources: apis.resources, facts: newFacts(), period: lookPeriod, tell: func(_ context.Context, r []request) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, r...)
		}}
		f.facts.setNode(newNode("n", "new", true))
		ended := make(chan error)
		go func() { ended <- f.run(ctx) }()
		want := func(step string, known bool, pools, requests string) {
			t.Helper()
			<-time.After(2 * lookPeriod)
			synctest.Wait()
			mu.Lock()
			slices.SortFunc(told, func(a, b request) int { return len(a.node) - len(b.node) })
			got := sorted(slices.Compact(told))
			told = nil
			mu.Unlock()
			var names []request
			f.facts.mu.Lock()
			for name := range f.facts.pools {
				names = append(names, request{pool: name})
			}
			is := f.facts.known
			f.facts.mu.Unlock()
			if is != known || sorted(names) != pools || got != requests {
				t.Errorf("%s: known %v, pools %q, told of %q, want %v, %q, %q", step, is, sorted(names), got, known, pools, requests)
			}
		}
		want("none", false, "", "")
		apis.set(nil, "apps.openyurt.io/v1beta1")
		want("v1beta1", true, "pool old", "node n, pool old")
		apis.set(errors.New("no"))
		want("not reached", true, "pool old", "")
		apis.set(nil, "apps.openyurt.io/v1beta1", "apps.openyurt.io/v1beta2")
		want("v1beta2", true, "pool new", "node n, pool new, pool old")
		create("v1beta2", "later", false)
		want("a pool comes", true, "pool later, pool new", "pool later")
		if err := client.Resource(resourceOf("v1beta2")).Delete(ctx, "new", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		want("a pool goes", true, "pool later", "node n, pool new")
		apis.set(nil)
		want("none any more", false, "", "pool later")
		apis.set(nil, "apps.openyurt.io/v1beta2")
		want("v1beta2 again", true, "pool later", "node n, pool later")
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run() = %v, want nil", err)
		}
	})
}

// yurt-manager is there as long as any of its signs is, and until that is known nobody
// says that it is not.
func TestYurtManager(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		scheme := metadatafake.NewTestScheme()
		if err := metav1.AddMetaToScheme(scheme); err != nil {
			t.Fatal(err)
		}
		client := metadatafake.NewSimpleMetadataClient(scheme)
		ctx, cancel := context.WithCancel(t.Context())
		changes := 0
		y := newYurtManager(client, func(context.Context) { changes++ })
		if y.absent() {
			t.Error("absent() before anything was asked = true, want false")
		}
		ended := make(chan error)
		go func() { ended <- y.run(ctx) }()
		want := func(step string, absent bool, n int) {
			t.Helper()
			<-time.After(time.Second)
			synctest.Wait()
			if y.absent() != absent || changes != n {
				t.Errorf("%s: absent() = %v after %d changes, want %v after %d", step, y.absent(), changes, absent, n)
			}
		}
		set := func(sign int, there bool) {
			t.Helper()
			resource, namespace := client.Resource(signs[sign].GroupVersionResource), signs[sign].namespace
			var err error
			if there {
				_, err = resource.Namespace(namespace).(metadatafake.MetadataClient).CreateFake(&metav1.PartialObjectMetadata{
					ObjectMeta: metav1.ObjectMeta{Name: signs[sign].name, Namespace: namespace}}, metav1.CreateOptions{})
			} else {
				err = resource.Namespace(namespace).Delete(ctx, signs[sign].name, metav1.DeleteOptions{})
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		want("nothing there", true, 1)
		for i := range signs {
			set(i, true)
			want(signs[i].name, false, 2*i+2)
			set(i, false)
			want(signs[i].name+" is gone", true, 2*i+3)
		}
		set(0, true)
		set(1, true)
		want("two", false, 8)
		set(0, false)
		want("one", false, 8)
		set(1, false)
		want("none", true, 9)
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run() = %v, want nil", err)
		}
	})
}
