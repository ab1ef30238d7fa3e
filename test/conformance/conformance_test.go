// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package conformance compares edgehub with the API server behind it: the same
// requests, directly and through the hub, get the same status codes and the same
// objects with the same bytes; and, with the link cut and the hub restarted, the
// same objects again for everything that was asked for online.
package conformance

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
)

const (
	processPatience = 2 * time.Minute

	admin    = "conformance-admin"
	nobody   = "conformance-nobody"
	pb       = "application/vnd.kubernetes.protobuf"
	js       = "application/json"
	metaPB   = pb + ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
	metaJS   = js + ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
	metaBeta = pb + ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1beta1"
	tableJS  = js + ";as=Table;v=v1;g=meta.k8s.io," + js + ";as=Table;v=v1beta1;g=meta.k8s.io," + js
)

// A rig is a control plane with things in it, and a hub in front of it.
type rig struct {
	t       *testing.T
	cp      *controlplane.ControlPlane
	link    *link.Link
	hub     *node.Hub
	direct  *endpoint
	through *endpoint
}

func newRig(t *testing.T) *rig {
	t.Helper()
	ctx := t.Context()
	cp := controlplane.New(t, controlplane.Config{Audit: true, Users: []controlplane.StaticUser{
		{Name: admin, Groups: []string{"system:masters"}}, {Name: nobody},
	}})
	fill(t, cp)
	l, err := link.New(ctx, cp.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	cert, key, err := cp.NodeCredentials("n1")
	if err != nil {
		t.Fatal(err)
	}
	hub, err := node.NewHub(ctx, node.HubConfig{ServerURLs: []string{l.URL()}, ServerCAFile: cp.CAFile(), CertFile: cert, KeyFile: key})
	if err != nil {
		t.Fatal(err)
	}
	process.Run(t, hub)
	r := &rig{t: t, cp: cp, link: l, hub: hub}
	if r.direct, err = newEndpoint("direct", cp.TokenConfig(admin)); err != nil {
		t.Fatal(err)
	}
	if r.through, err = newEndpoint("edgehub", hub.Through(cp.TokenConfig(admin))); err != nil {
		t.Fatal(err)
	}
	return r
}

// fill makes objects of built-in kinds and of a custom resource.
func fill(t *testing.T, cp *controlplane.ControlPlane) {
	t.Helper()
	ctx := t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, ns := range []string{"a", "b"} {
		must(cp.CreateNamespace(ctx, ns))
		for i := range 10 {
			meta := metav1.ObjectMeta{Name: fmt.Sprintf("o-%02d", i), Namespace: ns, Labels: map[string]string{"parity": []string{"even", "odd"}[i%2], "n": fmt.Sprint(i)}}
			_, err := cp.Client.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{"text": "<tag> & \"quotes\" ünïcode \u2028"}}, metav1.CreateOptions{})
			must(err)
			_, err = cp.Client.CoreV1().Secrets(ns).Create(ctx, &corev1.Secret{ObjectMeta: meta, Type: corev1.SecretType([]string{"Opaque", "example.com/odd"}[i%2]), StringData: map[string]string{"password": "hunter2"}}, metav1.CreateOptions{})
			must(err)
			_, err = cp.Client.CoreV1().Pods(ns).Create(ctx, &corev1.Pod{ObjectMeta: meta, Spec: corev1.PodSpec{
				NodeName: fmt.Sprintf("n%d", i%3), Containers: []corev1.Container{{Name: "c", Image: "example.invalid/none:1"}},
			}}, metav1.CreateOptions{})
			must(err)
			_, err = cp.Client.CoreV1().Services(ns).Create(ctx, &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
			must(err)
			_, err = cp.Client.DiscoveryV1().EndpointSlices(ns).Create(ctx, &discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.2.3"}}}}, metav1.CreateOptions{})
			must(err)
		}
	}
	for i := range 3 {
		_, err := cp.Client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("n%d", i)}}, metav1.CreateOptions{})
		must(err)
	}
	fillCustom(t, cp)
}

var (
	crds    = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	widgets = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
)

func fillCustom(t *testing.T, cp *controlplane.ControlPlane) {
	t.Helper()
	ctx := t.Context()
	c, err := dynamic.NewForConfig(cp.AdminConfig())
	if err != nil {
		t.Fatal(err)
	}
	crd := map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": "widgets.example.com"},
		"spec": map[string]any{
			"group": "example.com", "scope": "Namespaced",
			"names": map[string]any{"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
			"versions": []any{map[string]any{
				"name": "v1", "served": true, "storage": true,
				"selectableFields": []any{map[string]any{"jsonPath": ".spec.color"}},
				"schema": map[string]any{"openAPIV3Schema": map[string]any{
					"type": "object", "x-kubernetes-preserve-unknown-fields": true,
					"properties": map[string]any{"spec": map[string]any{"type": "object", "properties": map[string]any{
						"color": map[string]any{"type": "string"},
					}}},
				}},
			}},
		},
	}
	if _, err := c.Resource(crds).Create(ctx, &unstructured.Unstructured{Object: crd}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for i := range 6 {
		w := map[string]any{
			"aaa": "sorts before apiVersion", "apiVersion": "example.com/v1", "kind": "Widget",
			"metadata": map[string]any{"name": fmt.Sprintf("w-%d", i), "namespace": "a", "labels": map[string]any{"n": fmt.Sprint(i)}},
			"spec":     map[string]any{"color": []string{"red", "blue"}[i%2]},
		}
		if i%2 == 0 {
			delete(w, "aaa")
		}
		err := process.Poll(ctx, "custom resource is served", func(ctx context.Context) error {
			_, err := c.Resource(widgets).Namespace("a").Create(ctx, &unstructured.Unstructured{Object: w}, metav1.CreateOptions{})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// A question is a GET with its Accept.
type question struct {
	path, accept string
}

var resources = []string{
	"/api/v1/configmaps", "/api/v1/namespaces/a/configmaps", "/api/v1/namespaces/a/secrets", "/api/v1/pods", "/api/v1/namespaces/b/pods",
	"/api/v1/services", "/api/v1/nodes", "/api/v1/namespaces", "/apis/discovery.k8s.io/v1/endpointslices", "/apis/example.com/v1/widgets",
	"/apis/example.com/v1/namespaces/a/widgets", "/apis/rbac.authorization.k8s.io/v1/clusterroles", "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
}

var accepts = []string{"", js, pb + "," + js, metaPB + "," + metaJS + "," + js, metaJS, metaBeta + "," + js, tableJS, "application/yaml", "application/cbor," + js}

// lists are the questions for whole states.
func lists() (q []question) {
	for _, r := range resources {
		for _, a := range accepts {
			q = append(q, question{path: r, accept: a})
		}
	}
	for _, a := range []string{js, pb + "," + js, metaPB + "," + metaJS + "," + js} {
		for _, sel := range []string{
			"labelSelector=parity=even", "labelSelector=n%20in%20(1,2,3)", "labelSelector=parity!=odd", "labelSelector=!nothing",
			"fieldSelector=metadata.name=o-03", "fieldSelector=metadata.namespace=a", "fieldSelector=metadata.name!=o-03",
			"labelSelector=parity=odd&fieldSelector=metadata.name=o-03",
		} {
			q = append(q, question{path: "/api/v1/configmaps?" + sel, accept: a}, question{path: "/api/v1/namespaces/b/pods?" + sel, accept: a})
		}
		q = append(q, question{path: "/api/v1/pods?fieldSelector=spec.nodeName=n1", accept: a}, question{path: "/api/v1/pods?fieldSelector=status.phase=Pending", accept: a},
			question{path: "/api/v1/secrets?fieldSelector=type=Opaque", accept: a}, question{path: "/apis/example.com/v1/widgets?fieldSelector=spec.color=red", accept: a},
			question{path: "/api/v1/nodes?fieldSelector=spec.unschedulable=false", accept: a})
	}
	return q
}

// others are what is not a whole state.
func others() (q []question) {
	for _, a := range accepts {
		for _, p := range []string{
			"/api/v1/namespaces/a/configmaps/o-01", "/api/v1/namespaces/a/secrets/o-01", "/api/v1/namespaces/a/pods/o-01", "/api/v1/namespaces/a", "/api/v1/nodes/n1",
			"/apis/example.com/v1/namespaces/a/widgets/w-1", "/api/v1/namespaces/a/pods/o-01/status",
		} {
			q = append(q, question{path: p, accept: strings.ReplaceAll(a, "PartialObjectMetadataList", "PartialObjectMetadata")})
		}
	}
	for _, p := range []string{"/version", "/api", "/apis", "/api/v1", "/apis/apps/v1", "/apis/example.com/v1", "/openapi/v3", "/openapi/v3/api/v1", "/openapi/v2"} {
		q = append(q, question{path: p, accept: js})
	}
	for _, p := range []string{"/api", "/apis"} {
		q = append(q, question{path: p, accept: js + ";g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList," + js})
	}
	q = append(q, question{path: "/openapi/v2", accept: "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"})
	return q
}

// errs are questions that the API server refuses, and reads that no state can be
// made of.
func errs(rv string) (q []question) {
	for _, p := range []string{
		"/api/v1/namespaces/a/configmaps/none", "/api/v1/nothing", "/apis/nothing.example.com/v1/x", "/api/v1/configmaps?labelSelector=)(", "/api/v1/pods?fieldSelector=spec.none=1",
		"/api/v1/configmaps?resourceVersion=abc", "/api/v1/configmaps?limit=-1", "/api/v1/configmaps?continue=abc", "/api/v1/configmaps?resourceVersionMatch=Exact",
		"/api/v1/configmaps?resourceVersion=0&resourceVersionMatch=Exact", "/api/v1/configmaps?resourceVersionMatch=Bogus&resourceVersion=1",
		"/api/v1/configmaps?watch=1&sendInitialEvents=true", "/api/v1/configmaps?watch=1&resourceVersion=abc", "/api/v1/configmaps?watch=1&sendInitialEvents=true&resourceVersionMatch=Exact&resourceVersion=1",
		"/api/v1/configmaps?sendInitialEvents=true&resourceVersionMatch=NotOlderThan", "/api/v1/configmaps?timeoutSeconds=x",
		"/api/v1/configmaps?resourceVersion=0", "/api/v1/configmaps?resourceVersion=0&limit=3", "/api/v1/configmaps?limit=500", "/api/v1/configmaps?pretty=true&limit=1",
		"/api/v1/configmaps?resourceVersion=" + rv, "/api/v1/configmaps?resourceVersion=" + rv + "&resourceVersionMatch=Exact", "/api/v1/configmaps?resourceVersion=" + rv + "&resourceVersionMatch=NotOlderThan",
		"/api/v1/configmaps?resourceVersion=99999999", "/api/v1/configmaps?resourceVersion=99999999&resourceVersionMatch=Exact", "/api/v1/configmaps?resourceVersion=1&resourceVersionMatch=Exact",
		"/api/v1/namespaces/a/configmaps/o-01?resourceVersion=0", "/api/v1/namespaces/a/configmaps/o-01?resourceVersion=99999999",
	} {
		q = append(q, question{path: p, accept: js}, question{path: p, accept: pb + "," + js})
	}
	return append(q, question{path: "/api/v1/configmaps", accept: "application/x-nothing"}, question{path: "/apis/example.com/v1/widgets", accept: pb})
}

// compare asks both and compares the answers.
func (r *rig) compare(q question) (answer, bool) {
	r.t.Helper()
	want, _, _, err := r.direct.ask(r.t.Context(), q.path, q.accept)
	if err != nil {
		r.t.Errorf("direct %s (%s): %v", q.path, q.accept, err)
		return want, false
	}
	got, _, _, err := r.through.ask(r.t.Context(), q.path, q.accept)
	if err != nil {
		r.t.Errorf("edgehub %s (%s): %v", q.path, q.accept, err)
		return want, false
	}
	if d := cmp.Diff(want, got); d != "" {
		r.t.Errorf("%s (%s) differs through edgehub (-direct +edgehub):\n%s", q.path, q.accept, d)
		return want, false
	}
	return want, true
}

func TestConformance(t *testing.T) {
	r := newRig(t)
	recorded := map[question]answer{}
	t.Run("lists", func(t *testing.T) {
		r.t = t
		for _, q := range lists() {
			if a, ok := r.compare(q); ok && a.Status == http.StatusOK {
				recorded[q] = a
			}
		}
	})
	t.Run("others", func(t *testing.T) {
		r.t = t
		for _, q := range others() {
			if a, ok := r.compare(q); ok && a.Status == http.StatusOK {
				recorded[q] = a
			}
		}
	})
	t.Run("refusals", func(t *testing.T) {
		r.t = t
		list, err := r.cp.Client.CoreV1().ConfigMaps("").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var g errgroup.Group // a resourceVersion that is too new is waited for
		g.SetLimit(16)
		for _, q := range errs(list.ResourceVersion) {
			g.Go(func() error { r.compare(q); return nil })
		}
		if err := g.Wait(); err != nil {
			t.Error(err)
		}
	})
	t.Run("pages", func(t *testing.T) { r.t = t; r.pages() })
	t.Run("watches", func(t *testing.T) { r.t = t; r.watches() })
	if len(recorded) < 150 {
		t.Fatalf("only %d answers were recorded", len(recorded))
	}
	t.Run("offline", func(t *testing.T) { r.t = t; r.offline(recorded) })
}

// pages reads whole lists page by page, with every page size, and compares.
func (r *rig) pages() {
	for _, accept := range []string{js, pb + "," + js, metaPB} {
		for _, path := range []string{"/api/v1/configmaps", "/apis/example.com/v1/widgets"} {
			for _, limit := range []string{"1", "7", "500"} {
				want, got := r.page(r.direct, path, accept, limit), r.page(r.through, path, accept, limit)
				if d := cmp.Diff(want, got); d != "" || len(want) < 6 {
					r.t.Errorf("%s (%s) by pages of %s differs, %d items:\n%s", path, accept, limit, len(want), d)
				}
			}
		}
	}
}

func (r *rig) page(e *endpoint, path, accept, limit string) (items []string) {
	r.t.Helper()
	token := ""
	for {
		a, _, body, err := e.ask(r.t.Context(), path+"?limit="+limit+"&continue="+url.QueryEscape(token), accept)
		if err != nil || a.Status != http.StatusOK {
			r.t.Fatalf("%s %s: %v, %+v", e.name, path, err, a)
		}
		items = append(items, a.Items...)
		if !a.Continued {
			return items
		}
		if token, err = continueToken(body); err != nil {
			r.t.Fatal(err)
		}
	}
}

// watches compares what watches begin with, and the events of a few changes.
func (r *rig) watches() {
	list, err := r.cp.Client.CoreV1().ConfigMaps("a").List(r.t.Context(), metav1.ListOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	rv := list.ResourceVersion
	initial := "&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"
	var g errgroup.Group // most of the time goes by waiting for time-outs of 1 s
	g.SetLimit(16)
	for _, accept := range []string{js, pb + "," + js, metaPB + "," + metaJS, metaJS} {
		accept = strings.ReplaceAll(accept, "MetadataList", "Metadata")
		for _, path := range []string{"/api/v1/namespaces/a/configmaps", "/apis/example.com/v1/widgets", "/api/v1/namespaces/none/configmaps"} {
			for _, opts := range []string{
				initial + "&allowWatchBookmarks=true", initial + "&allowWatchBookmarks=true&resourceVersion=0", initial + "&allowWatchBookmarks=true&resourceVersion=" + rv,
				initial + "&timeoutSeconds=1", "&timeoutSeconds=1", "&timeoutSeconds=1&resourceVersion=0", "&timeoutSeconds=1&resourceVersion=" + rv, "&timeoutSeconds=1&resourceVersion=1",
				"&timeoutSeconds=1&allowWatchBookmarks=true&labelSelector=n=1", initial + "&allowWatchBookmarks=true&fieldSelector=metadata.name=o-02",
			} {
				g.Go(func() error { return r.compareWatch(path+"?watch=1"+opts, accept) })
			}
		}
	}
	g.Go(func() error { return r.compareWatch("/api/v1/watch/namespaces/a/configmaps?timeoutSeconds=1", js) })
	if err := g.Wait(); err != nil {
		r.t.Error(err)
	}
}

func (r *rig) compareWatch(path, accept string) error {
	want, err := r.direct.follow(r.t.Context(), path, accept, 0)
	if err != nil {
		return fmt.Errorf("direct %s: %w", path, err)
	}
	got, err := r.through.follow(r.t.Context(), path, accept, 0)
	if err != nil {
		return fmt.Errorf("edgehub %s: %w", path, err)
	}
	if d := cmp.Diff(want, got); d != "" {
		r.t.Errorf("%s (%s) differs through edgehub (-direct +edgehub):\n%s", path, accept, d)
	}
	return nil
}

// offline cuts the link, kills the hub, starts it again and asks everything once
// more.
func (r *rig) offline(recorded map[question]answer) {
	start := time.Now()
	r.link.Cut()
	// What was answered a moment ago is on disk within a second; an orderly stop
	// writes at once. (The SIGKILL tests are about the former.)
	if err := r.hub.Stop(); err != nil {
		r.t.Fatal(err)
	}
	if err := r.hub.Start(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	for q, want := range recorded {
		got, header, _, err := r.through.ask(r.t.Context(), q.path, q.accept)
		if err != nil {
			r.t.Errorf("%s (%s): %v", q.path, q.accept, err)
			continue
		}
		if d := cmp.Diff(want, got); d != "" {
			r.t.Errorf("%s (%s) differs offline (-online +offline):\n%s", q.path, q.accept, d)
		}
		if !strings.HasPrefix(header.Get("Warning"), "110 ") {
			r.t.Errorf("%s: Warning = %q, want 110", q.path, header.Get("Warning"))
		}
	}
	for _, p := range []string{"/api/v1/namespaces/b/secrets", "/api/v1/namespaces/b/secrets/none", "/api/v1/persistentvolumes", "/api/v1/namespaces/a/configmaps/none", "/apis/apps/v1/deployments"} {
		if a, _, _, err := r.through.ask(r.t.Context(), p, js); err != nil || a.Status != http.StatusServiceUnavailable {
			// secrets of b are within type=Opaque only: not all of them are known
			r.t.Errorf("%s offline = %d, %v, want 503", p, a.Status, err)
		}
	}
	r.narrower()
	r.t.Logf("%d answers replayed after a restart offline, in %v", len(recorded), time.Since(start))
}

// narrower asks offline for less than what was recorded: right, or 503.
func (r *rig) narrower() {
	for path, want := range map[string]int{
		"/api/v1/namespaces/b/configmaps":                               11, // with kube-root-ca.crt
		"/api/v1/namespaces/b/configmaps?labelSelector=n=7":             1,
		"/api/v1/namespaces/a/pods?fieldSelector=spec.nodeName=n2":      3,
		"/api/v1/pods?fieldSelector=spec.nodeName=n0,status.phase=none": 0,
		"/api/v1/namespaces/a/pods?fieldSelector=spec.none=x":           -1,
		"/apis/example.com/v1/widgets?labelSelector=n=4":                1,
	} {
		for _, accept := range []string{js, pb + "," + js} {
			a, _, _, err := r.through.ask(r.t.Context(), path, accept)
			switch {
			case err != nil:
				r.t.Errorf("%s: %v", path, err)
			case want < 0 && a.Status != http.StatusServiceUnavailable:
				r.t.Errorf("%s = %d, want 503", path, a.Status)
			case want >= 0 && (a.Status != http.StatusOK || len(a.Items) != want):
				r.t.Errorf("%s (%s) = %d with %d items, want %d items: %s", path, accept, a.Status, len(a.Items), want, a.Body)
			}
		}
	}
}
