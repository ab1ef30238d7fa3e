// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package conformance compares edgehub with the API server behind it: the same
// requests, directly and through the hub, get the same status codes and the same
// objects with the same bytes; and, with the link cut and the hub restarted, the
// same objects again for everything that was asked for online.
package conformance

import (
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
	"k8s.io/client-go/dynamic"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	processPatience = 2 * time.Minute

	admin    = "conformance-admin"
	pb       = rig.Protobuf
	js       = rig.JSON
	metaPB   = rig.MetadataProtobuf
	metaJS   = rig.MetadataJSON
	metaBeta = pb + ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1beta1"
	tableJS  = js + ";as=Table;v=v1;g=meta.k8s.io," + js + ";as=Table;v=v1beta1;g=meta.k8s.io," + js
)

// A pair is the API server, with things in it, and a hub in front of it.
type pair struct {
	*rig.Rig
	direct, through *endpoint
}

func newPair(t *testing.T) *pair {
	t.Helper()
	p := &pair{Rig: rig.New(t, []controlplane.StaticUser{{Name: admin, Groups: []string{"system:masters"}}})}
	fill(p.Rig)
	process.Run(t, p.Hub)
	var err error
	p.direct, err = newEndpoint("direct", p.ControlPlane.TokenConfig(admin))
	p.Must(err)
	p.through, err = newEndpoint("edgehub", p.Hub.Through(p.ControlPlane.TokenConfig(admin)))
	p.Must(err)
	return p
}

// fill makes objects of built-in kinds and of a custom resource.
func fill(r *rig.Rig) {
	r.T.Helper()
	ctx, client := r.T.Context(), r.ControlPlane.Client
	for _, ns := range []string{"a", "b"} {
		for i := range 10 {
			meta := metav1.ObjectMeta{Name: fmt.Sprintf("o-%02d", i), Namespace: ns, Labels: map[string]string{"parity": []string{"even", "odd"}[i%2], "n": fmt.Sprint(i)}}
			_, err := client.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{"text": "<tag> & \"quotes\" ünïcode \u2028"}}, metav1.CreateOptions{})
			r.Must(err)
			_, err = client.CoreV1().Secrets(ns).Create(ctx, &corev1.Secret{ObjectMeta: meta, Type: corev1.SecretType([]string{"Opaque", "example.com/odd"}[i%2]), StringData: map[string]string{"password": "hunter2"}}, metav1.CreateOptions{})
			r.Must(err)
			_, err = client.CoreV1().Pods(ns).Create(ctx, &corev1.Pod{ObjectMeta: meta, Spec: corev1.PodSpec{
				NodeName: fmt.Sprintf("n%d", i%3), Containers: []corev1.Container{{Name: "c", Image: "example.invalid/none:1"}},
			}}, metav1.CreateOptions{})
			r.Must(err)
			_, err = client.CoreV1().Services(ns).Create(ctx, &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{})
			r.Must(err)
			_, err = client.DiscoveryV1().EndpointSlices(ns).Create(ctx, &discoveryv1.EndpointSlice{ObjectMeta: meta, AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.2.3"}}}}, metav1.CreateOptions{})
			r.Must(err)
		}
	}
	for _, name := range []string{"n0", "n2"} { // beside the hub's own
		_, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		r.Must(err)
	}
	custom, err := dynamic.NewForConfig(r.ControlPlane.AdminConfig())
	r.Must(err)
	for i := range 6 {
		w := map[string]any{
			"aaa": "sorts before apiVersion", "apiVersion": "example.com/v1", "kind": "Widget",
			"metadata": map[string]any{"name": fmt.Sprintf("w-%d", i), "namespace": "a", "labels": map[string]any{"n": fmt.Sprint(i)}},
			"spec":     map[string]any{"color": []string{"red", "blue"}[i%2]},
		}
		if i%2 == 0 {
			delete(w, "aaa")
		}
		_, err := custom.Resource(rig.Widgets).Namespace("a").Create(ctx, &unstructured.Unstructured{Object: w}, metav1.CreateOptions{})
		r.Must(err)
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
func (p *pair) compare(q question) (answer, bool) {
	p.T.Helper()
	want, _, _, err := p.direct.ask(p.T.Context(), q.path, q.accept)
	if err != nil {
		p.T.Errorf("direct %s (%s): %v", q.path, q.accept, err)
		return want, false
	}
	got, _, _, err := p.through.ask(p.T.Context(), q.path, q.accept)
	if err != nil {
		p.T.Errorf("edgehub %s (%s): %v", q.path, q.accept, err)
		return want, false
	}
	if d := cmp.Diff(want, got); d != "" {
		p.T.Errorf("%s (%s) differs through edgehub (-direct +edgehub):\n%s", q.path, q.accept, d)
		return want, false
	}
	return want, true
}

func TestConformance(t *testing.T) {
	p := newPair(t)
	recorded := map[question]answer{}
	t.Run("lists", func(t *testing.T) {
		p.T = t
		for _, q := range lists() {
			if a, ok := p.compare(q); ok && a.Status == http.StatusOK {
				recorded[q] = a
			}
		}
	})
	t.Run("others", func(t *testing.T) {
		p.T = t
		for _, q := range others() {
			if a, ok := p.compare(q); ok && a.Status == http.StatusOK {
				recorded[q] = a
			}
		}
	})
	t.Run("refusals", func(t *testing.T) {
		p.T = t
		list, err := p.ControlPlane.Client.CoreV1().ConfigMaps("").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var g errgroup.Group // a resourceVersion that is too new is waited for
		g.SetLimit(16)
		for _, q := range errs(list.ResourceVersion) {
			g.Go(func() error { p.compare(q); return nil })
		}
		if err := g.Wait(); err != nil {
			t.Error(err)
		}
	})
	t.Run("pages", func(t *testing.T) { p.T = t; p.pages() })
	t.Run("watches", func(t *testing.T) { p.T = t; p.watches() })
	if len(recorded) < 150 {
		t.Fatalf("only %d answers were recorded", len(recorded))
	}
	t.Run("offline", func(t *testing.T) { p.T = t; p.offline(recorded) })
}

// pages reads whole lists page by page, with every page size, and compares.
func (p *pair) pages() {
	for _, accept := range []string{js, pb + "," + js, metaPB} {
		for _, path := range []string{"/api/v1/configmaps", "/apis/example.com/v1/widgets"} {
			for _, limit := range []string{"1", "7", "500"} {
				want, got := p.page(p.direct, path, accept, limit), p.page(p.through, path, accept, limit)
				if d := cmp.Diff(want, got); d != "" || len(want) < 6 {
					p.T.Errorf("%s (%s) by pages of %s differs, %d items:\n%s", path, accept, limit, len(want), d)
				}
			}
		}
	}
}

func (p *pair) page(e *endpoint, path, accept, limit string) (items []string) {
	p.T.Helper()
	token := ""
	for {
		a, _, body, err := e.ask(p.T.Context(), path+"?limit="+limit+"&continue="+url.QueryEscape(token), accept)
		if err != nil || a.Status != http.StatusOK {
			p.T.Fatalf("%s %s: %v, %+v", e.name, path, err, a)
		}
		items = append(items, a.Items...)
		if !a.Continued {
			return items
		}
		l, err := rig.ReadList(body)
		if err != nil {
			p.T.Fatal(err)
		}
		token = l.Continue
	}
}

// watches compares what watches begin with, and the events of a few changes.
func (p *pair) watches() {
	list, err := p.ControlPlane.Client.CoreV1().ConfigMaps("a").List(p.T.Context(), metav1.ListOptions{})
	if err != nil {
		p.T.Fatal(err)
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
				g.Go(func() error { return p.compareWatch(path+"?watch=1"+opts, accept) })
			}
		}
	}
	g.Go(func() error { return p.compareWatch("/api/v1/watch/namespaces/a/configmaps?timeoutSeconds=1", js) })
	if err := g.Wait(); err != nil {
		p.T.Error(err)
	}
}

func (p *pair) compareWatch(path, accept string) error {
	want, err := p.direct.follow(p.T.Context(), path, accept, 0)
	if err != nil {
		return fmt.Errorf("direct %s: %w", path, err)
	}
	got, err := p.through.follow(p.T.Context(), path, accept, 0)
	if err != nil {
		return fmt.Errorf("edgehub %s: %w", path, err)
	}
	if d := cmp.Diff(want, got); d != "" {
		p.T.Errorf("%s (%s) differs through edgehub (-direct +edgehub):\n%s", path, accept, d)
	}
	return nil
}

// offline cuts the link, kills the hub, starts it again and asks everything once
// more.
func (p *pair) offline(recorded map[question]answer) {
	start := time.Now()
	p.Link.Cut()
	// What was answered a moment ago is on disk within a second; an orderly stop
	// writes at once. (The SIGKILL tests are about the former.)
	if err := p.Hub.Stop(); err != nil {
		p.T.Fatal(err)
	}
	if err := p.Hub.Start(p.T.Context()); err != nil {
		p.T.Fatal(err)
	}
	for q, want := range recorded {
		got, header, _, err := p.through.ask(p.T.Context(), q.path, q.accept)
		if err != nil {
			p.T.Errorf("%s (%s): %v", q.path, q.accept, err)
			continue
		}
		if d := cmp.Diff(want, got); d != "" {
			p.T.Errorf("%s (%s) differs offline (-online +offline):\n%s", q.path, q.accept, d)
		}
		if !strings.HasPrefix(header.Get("Warning"), "110 ") {
			p.T.Errorf("%s: Warning = %q, want 110", q.path, header.Get("Warning"))
		}
	}
	for _, path := range []string{"/api/v1/namespaces/b/secrets", "/api/v1/namespaces/b/secrets/none", "/api/v1/persistentvolumes", "/api/v1/namespaces/a/configmaps/none", "/apis/apps/v1/deployments"} {
		if a, _, _, err := p.through.ask(p.T.Context(), path, js); err != nil || a.Status != http.StatusServiceUnavailable {
			// secrets of b are within type=Opaque only: not all of them are known
			p.T.Errorf("%s offline = %d, %v, want 503", path, a.Status, err)
		}
	}
	p.narrower()
	p.T.Logf("%d answers replayed after a restart offline, in %v", len(recorded), time.Since(start))
}

// narrower asks offline for less than what was recorded: right, or 503.
func (p *pair) narrower() {
	for path, want := range map[string]int{
		"/api/v1/namespaces/b/configmaps":                               11, // with kube-root-ca.crt
		"/api/v1/namespaces/b/configmaps?labelSelector=n=7":             1,
		"/api/v1/namespaces/a/pods?fieldSelector=spec.nodeName=n2":      3,
		"/api/v1/pods?fieldSelector=spec.nodeName=n0,status.phase=none": 0,
		"/api/v1/namespaces/a/pods?fieldSelector=spec.none=x":           -1,
		"/apis/example.com/v1/widgets?labelSelector=n=4":                1,
	} {
		for _, accept := range []string{js, pb + "," + js} {
			a, _, _, err := p.through.ask(p.T.Context(), path, accept)
			switch {
			case err != nil:
				p.T.Errorf("%s: %v", path, err)
			case want < 0 && a.Status != http.StatusServiceUnavailable:
				p.T.Errorf("%s = %d, want 503", path, a.Status)
			case want >= 0 && (a.Status != http.StatusOK || len(a.Items) != want):
				p.T.Errorf("%s (%s) = %d with %d items, want %d items: %s", path, accept, a.Status, len(a.Items), want, a.Body)
			}
		}
	}
}
