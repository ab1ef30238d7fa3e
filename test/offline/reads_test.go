// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package offline

import (
	"net/http"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/edgehub/edgehub/test/rig"
)

// A question is an ask of somebody.
type question struct {
	caller *caller
	ask    ask
}

const (
	configMapsA = "/api/v1/namespaces/a/configmaps"
	configMapsB = "/api/v1/namespaces/b/configmaps"
	table       = rig.JSON + ";as=Table;v=v1;g=meta.k8s.io," + rig.JSON
)

// readable are questions that are asked online.
func (w *world) readable() (all []question) {
	for _, accept := range []string{rig.JSON, rig.Protobuf} {
		for _, path := range []string{
			"/api/v1/pods?fieldSelector=spec.nodeName%3Dn1", "/api/v1/namespaces/a/pods/p",
			"/api/v1/namespaces/a/secrets/o-0", configMapsA + "/o-0", "/api/v1/services",
		} {
			all = append(all, question{w.node, ask{path: path, accept: accept}})
		}
		for _, path := range []string{configMapsA, configMapsA + "?labelSelector=n%3D1", configMapsA + "?limit=500", configMapsA + "/o-0"} {
			all = append(all, question{w.callers[alice], ask{path: path, accept: accept}})
		}
		for _, path := range []string{"/api/v1/namespaces", "/api/v1/namespaces/a/pods/p/status"} {
			all = append(all, question{w.callers[operator], ask{path: path, accept: accept}})
		}
	}
	return append(all,
		question{w.callers[alice], ask{path: configMapsA, accept: table}},
		question{w.callers[alice], ask{path: configMapsA, accept: rig.MetadataProtobuf}},
		question{w.callers[operator], ask{path: "/apis/example.com/v1/namespaces/b/widgets"}},
		question{w.callers[operator], ask{path: "/apis/example.com/v1/namespaces/b/widgets/w"}},
	)
}

// unreadable are questions that nothing which was asked online can answer.
func (w *world) unreadable() []question {
	return []question{
		{w.node, ask{path: "/api/v1/namespaces/a/secrets/o-1"}},
		{w.node, ask{path: "/api/v1/namespaces/a/pods/none"}},
		{w.node, ask{path: "/api/v1/persistentvolumes"}},
		// The list is recorded, but nothing vouches that it was up to date at the end.
		{w.callers[alice], ask{path: configMapsA + "/none"}},
		{w.callers[alice], ask{path: configMapsB}},
		{w.callers[alice], ask{path: configMapsB + "/o-0"}},
		{w.callers[alice], ask{path: "/api/v1/configmaps"}},
		{w.callers[nobody], ask{path: configMapsA}},
		{w.callers[nobody], ask{path: configMapsA + "/o-0"}},
		{w.callers[operator], ask{path: "/api/v1/nodes/none"}},
		{w.callers[operator], ask{path: "/api/v1/namespaces/none"}},
		{w.callers[operator], ask{path: "/api/v1/namespaces/a/events"}},
		{w.callers[operator], ask{path: "/apis/example.com/v1/namespaces/b/widgets/none"}},
		{w.callers[carol], ask{path: configMapsA + "/none"}}, // a live copy, of some only
		{w.stranger, ask{path: "/api/v1/nodes/" + otherNode}},
		{w.stranger, ask{path: "/api/v1/pods?fieldSelector=spec.nodeName%3D" + otherNode}},
	}
}

// getAndList fails without the record (503 in place of what was said online), and
// without the rule that only a complete copy which was live until the cut may say
// 404: a pod's ConfigMap that is "not there" is taken for deleted.
func (w *world) getAndList() row {
	given := map[int]answer{}
	return row{
		name: "get and list",
		online: func() {
			for i, q := range w.readable() {
				given[i] = w.same(q.caller, q.ask)
				if given[i].status != http.StatusOK {
					w.T.Errorf("%s: %v online = %v, want 200", q.caller.name, q.ask, given[i])
				}
			}
			w.same(w.callers[nobody], ask{path: configMapsA})
			w.watch(w.callers[carol].through, configMapsB, rig.JSON).sync(w)
			w.watch(w.callers[carol].through, configMapsA+"?labelSelector=n%3D1", rig.JSON).sync(w)
		},
		offline: func() {
			for i, q := range w.readable() {
				if got := w.replayed(q.caller, q.ask, http.StatusOK); !got.is(given[i]) && !got.lists(given[i]) {
					w.T.Errorf("%s: %v offline is\n%v\nonline it was\n%v", q.caller.name, q.ask, got, given[i])
				}
			}
			for _, q := range w.unreadable() {
				w.refused(q.caller, q.ask)
			}
			w.replayed(w.callers[carol], ask{path: configMapsB + "/o-0"}, http.StatusOK)
			if none := (ask{path: configMapsB + "/none"}); w.restarts == 0 {
				if got := w.ask(w.callers[carol], none, http.StatusNotFound); got.reason() != metav1.StatusReasonNotFound {
					w.T.Errorf("%v = %v, want the reason NotFound", none, got)
				}
			} else {
				w.refused(w.callers[carol], none) // what was live before the kill may have changed before the cut
			}
		},
		healed: func() {
			for i, q := range w.readable() {
				given[i] = w.same(q.caller, q.ask)
			}
		},
	}
}

// discovery fails without the record of whole answers: kubectl and every client
// with a RESTMapper ask for these before anything else.
func (w *world) discovery() row {
	paths := []ask{
		{path: "/version"}, {path: "/api"}, {path: "/apis"}, {path: "/api/v1"}, {path: "/apis/apps/v1"},
		{path: "/apis", accept: rig.JSON + ";g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList," + rig.JSON},
		{path: "/openapi/v3"}, {path: "/openapi/v3/apis/apps/v1"}, {path: "/openapi/v3/api/v1", accept: "application/com.github.proto-openapi.spec.v3@v1.0+protobuf"},
		{path: "/openapi/v2", accept: "application/com.github.proto-openapi.spec.v2@v1.0+protobuf"},
	}
	unknown := []ask{{path: "/apis/batch/v1"}, {path: "/openapi/v3/apis/batch/v1"}, {path: "/metrics"}, {path: "/healthz"}, {path: "/logs/"}}
	given := map[string]answer{}
	key := func(c *caller, a ask) string { return c.name + a.path + a.accept }
	who := map[*caller][]ask{w.node: paths, w.callers[alice]: paths[:3]}
	return row{
		name: "discovery",
		online: func() {
			for c, asks := range who {
				for _, a := range asks {
					given[key(c, a)] = w.same(c, a)
				}
			}
		},
		offline: func() {
			for c, asks := range who {
				for _, a := range asks {
					want := given[key(c, a)]
					if got := w.replayed(c, a, http.StatusOK); !got.is(want) {
						w.T.Errorf("%s: %v offline = %v, online it was %v", c.name, a, got, want)
					}
					if tag := want.header.Get("ETag"); tag != "" {
						a.header = http.Header{"If-None-Match": {tag}}
						w.replayed(c, a, http.StatusNotModified)
					}
				}
				for _, a := range unknown {
					w.refused(c, a)
				}
			}
			w.refused(w.callers[carol], ask{path: "/apis"}) // others' records are not hers
		},
		healed: func() {
			for _, a := range paths {
				w.same(w.node, a)
			}
		},
	}
}

// watches fails if the hub ends watches when the link goes (clients would list, and
// be refused), or does not go on where they were when it is back.
func (w *world) watches() row {
	const widgets = "/apis/example.com/v1/namespaces/a/widgets"
	var ofWidgets, ofConfigMap *watch
	both := func(f func(*watch)) { f(ofWidgets); f(ofConfigMap) }
	var changed []int64 // resourceVersions of the widget
	change := func() {
		w.moved["widgets.example.com a/w"] = true
		changed = append(changed, w.recolor())
	}
	return row{
		name: "watch",
		online: func() {
			ofWidgets = w.watch(w.callers[operator].through, widgets, rig.JSON)
			ofConfigMap = w.watch(w.node.through, configMapsA+"?fieldSelector=metadata.name%3Do-0", rig.Protobuf) // as kubelet does
			both(func(x *watch) { x.sync(w) })
			change()
			ofWidgets.wants(w, changed)
		},
		offline: func() {
			if w.restarts > 0 {
				both(func(x *watch) { x.ended(w); x.again(w) })
			}
			change()
			both(func(x *watch) { x.silent(w) })
		},
		healed: func() {
			change()
			ofWidgets.wants(w, changed)
			both(func(x *watch) { x.silent(w) })
			w.noLists(operator, widgets)
			w.noLists(rig.NodeUser, configMapsA)
		},
	}
}

// recolor changes the widget at the API server, and returns its resourceVersion.
func (w *world) recolor() int64 {
	w.T.Helper()
	c, err := dynamic.NewForConfig(w.ControlPlane.AdminConfig())
	w.Must(err)
	patch := []byte(`{"spec":{"color":"` + time.Now().Format(time.RFC3339Nano) + `"}}`)
	o, err := c.Resource(rig.Widgets).Namespace("a").Patch(w.T.Context(), "w", types.MergePatchType, patch, metav1.PatchOptions{})
	w.Must(err)
	b, err := o.MarshalJSON()
	w.Must(err)
	m, err := rig.ReadMeta(b, false)
	w.Must(err)
	return m.ResourceVersion
}
