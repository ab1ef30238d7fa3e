// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/features"
	featuretesting "k8s.io/client-go/features/testing"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/metadata/metadatainformer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// A kind of reflector: how a client-go informer is made from a configuration.
type reflector struct {
	name string
	make func(c *rest.Config, tweak func(*metav1.ListOptions)) (map[string]cache.SharedIndexInformer, error)
}

func typed(contentType string) reflector {
	return reflector{"typed " + contentType, func(c *rest.Config, tweak func(*metav1.ListOptions)) (map[string]cache.SharedIndexInformer, error) {
		c.ContentType, c.AcceptContentTypes = contentType, contentType
		if contentType == pb {
			c.AcceptContentTypes = pb + "," + js
		}
		client, err := kubernetes.NewForConfig(c)
		if err != nil {
			return nil, err
		}
		f := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTweakListOptions(tweak))
		return map[string]cache.SharedIndexInformer{
			"configmaps": f.Core().V1().ConfigMaps().Informer(), "secrets": f.Core().V1().Secrets().Informer(), "pods": f.Core().V1().Pods().Informer(),
			"services": f.Core().V1().Services().Informer(), "endpointslices": f.Discovery().V1().EndpointSlices().Informer(),
		}, nil
	}}
}

var untyped = map[string]schema.GroupVersionResource{
	"configmaps": {Version: "v1", Resource: "configmaps"}, "widgets": rig.Widgets, "pods": {Version: "v1", Resource: "pods"},
}

var reflectors = []reflector{
	typed(pb), typed(js),
	{"dynamic", func(c *rest.Config, tweak func(*metav1.ListOptions)) (map[string]cache.SharedIndexInformer, error) {
		client, err := dynamic.NewForConfig(c)
		if err != nil {
			return nil, err
		}
		f := dynamicinformer.NewFilteredDynamicSharedInformerFactory(client, 0, "", tweak)
		m := map[string]cache.SharedIndexInformer{}
		for name, gvr := range untyped {
			m[name] = f.ForResource(gvr).Informer()
		}
		return m, nil
	}},
	{"metadata", func(c *rest.Config, tweak func(*metav1.ListOptions)) (map[string]cache.SharedIndexInformer, error) {
		client, err := metadata.NewForConfig(c)
		if err != nil {
			return nil, err
		}
		f := metadatainformer.NewFilteredSharedInformerFactory(client, 0, "", tweak)
		m := map[string]cache.SharedIndexInformer{}
		for name, gvr := range untyped {
			m[name] = f.ForResource(gvr).Informer()
		}
		return m, nil
	}},
}

// contents returns the objects of a synced informer, as JSON by key.
func contents(i cache.SharedIndexInformer) (map[string]string, error) {
	m := map[string]string{}
	for _, o := range i.GetStore().List() {
		acc, err := meta.Accessor(o)
		if err != nil {
			return nil, err
		}
		b, err := json.Marshal(o)
		if err != nil {
			return nil, err
		}
		m[acc.GetNamespace()+"/"+acc.GetName()] = string(b)
	}
	return m, nil
}

// run starts informers and waits until they are synced.
func run(ctx context.Context, set map[string]cache.SharedIndexInformer) error {
	for _, i := range set {
		go i.RunWithContext(ctx)
	}
	for name, i := range set {
		if err := process.Poll(ctx, "informer of "+name+" is synced", process.Until(i.HasSynced)); err != nil {
			return err
		}
	}
	return nil
}

// same waits until both sets of informers hold the same, and the first one the
// pod that was changed last.
func same(ctx context.Context, t testing.TB, changed string, direct, through map[string]cache.SharedIndexInformer) {
	t.Helper()
	err := process.Poll(ctx, "the direct informer has the changed pod at "+changed, func(context.Context) error {
		pods, err := contents(direct["pods"])
		if err == nil && changed != "" && !strings.Contains(pods["b/o-04"], fmt.Sprintf("%q", changed)) {
			err = fmt.Errorf("it has %s", pods["b/o-04"])
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for name := range direct {
		err := process.Poll(ctx, name+" are the same directly and through edgehub", func(context.Context) error {
			want, err := contents(direct[name])
			if err != nil {
				return err
			}
			got, err := contents(through[name])
			if err != nil {
				return err
			}
			if d := cmp.Diff(want, got); d != "" || len(want) == 0 {
				return fmt.Errorf("%d objects, (-direct +edgehub):\n%s", len(want), d)
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
	}
}
func TestReflectors(t *testing.T) {
	p := newPair(t)
	for _, watchList := range []bool{true, false} {
		for _, kind := range reflectors {
			t.Run(fmt.Sprintf("%s, WatchList %v", kind.name, watchList), func(t *testing.T) {
				featuretesting.SetFeatureDuringTest(t, features.WatchListClient, watchList)
				p.T = t
				p.reflect(kind)
			})
		}
	}
}

// reflect runs informers online, through a cut, against a hub that was restarted
// offline, and after the link is back.
func (p *pair) reflect(kind reflector) {
	t := p.T
	ctx, cancel := context.WithTimeout(t.Context(), processPatience)
	defer cancel()
	all := func(*metav1.ListOptions) {}
	direct, err := kind.make(p.ControlPlane.TokenConfig(admin), all)
	if err != nil {
		t.Fatal(err)
	}
	through, err := kind.make(p.Hub.Through(p.ControlPlane.TokenConfig(admin)), all)
	if err != nil {
		t.Fatal(err)
	}
	for _, set := range []map[string]cache.SharedIndexInformer{direct, through} {
		if err := run(ctx, set); err != nil {
			t.Fatal(err)
		}
	}
	same(ctx, t, "", direct, through)
	same(ctx, t, change(t, p.ControlPlane), direct, through)

	p.Link.Cut()
	changed := change(t, p.ControlPlane)
	if err := p.Link.Heal(); err != nil {
		t.Fatal(err)
	}
	same(ctx, t, changed, direct, through)

	// Informers that start while the link is cut and the hub is new.
	p.Link.Cut()
	if err := p.Hub.Stop(); err != nil {
		t.Fatal(err)
	}
	if err := p.Hub.Start(ctx); err != nil {
		t.Fatal(err)
	}
	late, err := kind.make(p.Hub.Through(p.ControlPlane.TokenConfig(admin)), all)
	if err != nil {
		t.Fatal(err)
	}
	if err := run(ctx, late); err != nil {
		t.Fatalf("offline, after a restart of edgehub: %v", err)
	}
	same(ctx, t, changed, direct, late)
	changed = change(t, p.ControlPlane)
	if err := p.Link.Heal(); err != nil {
		t.Fatal(err)
	}
	same(ctx, t, changed, direct, late)
	same(ctx, t, changed, direct, through)
}

// change creates, changes and deletes some objects, last a pod, and returns the
// pod's resourceVersion.
func change(t testing.TB, cp *controlplane.ControlPlane) string {
	t.Helper()
	ctx := t.Context()
	maps := cp.Client.CoreV1().ConfigMaps("a")
	m, err := maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "new-"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	m.Data = map[string]string{"changed": "yes"}
	if _, err := maps.Update(ctx, m, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	list, err := maps.List(ctx, metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range list.Items {
		if m.GenerateName != "" {
			if err := maps.Delete(ctx, m.Name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			break
		}
	}
	pods := cp.Client.CoreV1().Pods("b")
	pod, err := pods.Get(ctx, "o-04", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	pod.Status.Message += "!"
	pod, err = pods.UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return pod.ResourceVersion
}
