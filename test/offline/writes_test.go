// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package offline

import (
	"bytes"
	"cmp"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/rig"
)

const (
	coreEvents = "/api/v1/namespaces/a/events"
	newEvents  = "/apis/events.k8s.io/v1/namespaces/a/events"
)

var aboutPod = corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: "a", Name: "p"}

func coreEvent(name string, count int32) *corev1.Event {
	now := metav1.Now()
	return &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "a"}, InvolvedObject: aboutPod, Type: corev1.EventTypeNormal, Reason: "Tested",
		FirstTimestamp: now, LastTimestamp: now, Count: count, Source: corev1.EventSource{Component: "kubelet", Host: rig.NodeName},
	}
}

func newEvent(name string, count int32) *eventsv1.Event {
	now := metav1.NowMicro()
	e := &eventsv1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "a"}, Regarding: aboutPod, Type: corev1.EventTypeNormal, Reason: "Tested", Action: "Testing",
		EventTime: now, ReportingController: "edgehub.test/offline", ReportingInstance: rig.NodeName,
	}
	if count > 1 {
		e.Series = &eventsv1.EventSeries{Count: count, LastObservedTime: now}
	}
	return e
}

// An eventForm is a group and an encoding.
type eventForm struct{ path, media string }

var eventForms = []eventForm{{coreEvents, rig.JSON}, {newEvents, rig.Protobuf}, {coreEvents, rig.Protobuf}, {newEvents, rig.JSON}}

// create makes an ask of an Event that has happened so many times, whose text says so.
func (f eventForm) create(name string, count int32) ask {
	if f.path == newEvents {
		e := newEvent(name, count)
		e.Note = told(name, count)
		return create(f.path, f.media, e)
	}
	e := coreEvent(name, count)
	e.Message = told(name, count)
	return create(f.path, f.media, e)
}

func told(name string, count int32) string { return fmt.Sprintf("%s, %d times", name, count) }

// eventsOf are the Events of namespace a at the API server whose names begin
// so, in the order in which they were created there; none may have changed since.
func eventsOf(r *rig.Rig, prefix string) (all []corev1.Event) {
	r.T.Helper()
	list, err := r.ControlPlane.Client.CoreV1().Events("a").List(r.T.Context(), metav1.ListOptions{})
	r.Must(err)
	for _, e := range list.Items {
		if strings.HasPrefix(e.Name, prefix) {
			all = append(all, e)
		}
	}
	slices.SortFunc(all, func(a, b corev1.Event) int { return cmp.Compare(resourceVersion(a), resourceVersion(b)) })
	return all
}

func resourceVersion(e corev1.Event) int64 {
	n, err := strconv.ParseInt(e.ResourceVersion, 10, 64)
	if err != nil {
		panic(err) // the API server's own
	}
	return n
}

func namesOf(events []corev1.Event) (names []string) {
	for _, e := range events {
		names = append(names, e.Name)
	}
	return names
}

// eventCreate fails without the outbox: what happened while the link was cut is
// never told. It also fails if others' Events are kept, or dry runs are.
func (w *world) eventCreate() row {
	var kept []string
	return row{
		name: "Event create",
		online: func() {
			for i, f := range eventForms {
				a := f.create(fmt.Sprint("online-", i), 1)
				got := w.ask(w.node, a, http.StatusCreated)
				if o, err := rig.ReadMeta(itemOf(got.body), f.media == rig.Protobuf); err != nil || o.ResourceVersion == 0 {
					w.T.Errorf("%v = %v, want the API server's object: %v", a, got, err)
				}
				w.sameVerdict(w.node, a)
				w.sameVerdict(w.callers[nobody], a)
			}
		},
		offline: func() {
			kept = nil
			for i, f := range eventForms {
				name := fmt.Sprintf("cut-%d-%d", w.restarts, i)
				a := f.create(name, 1)
				if got := w.replayed(w.node, a, http.StatusCreated); !bytes.Equal(got.body, a.body) {
					w.T.Errorf("%v = %v, want the body as it was written", a, got)
				}
				kept = append(kept, name)
				other := f.create("never-"+name, 1)
				for _, c := range []string{operator, alice, nobody} {
					w.refused(w.callers[c], other)
				}
				w.refused(w.node, other.with("dryRun=All"))
				elsewhere := other
				elsewhere.path = strings.Replace(other.path, "/a/", "/b/", 1)
				w.refused(w.node, elsewhere) // the body says a
				w.refused(w.node, ask{method: http.MethodPut, path: f.path + "/" + name, contentType: f.media, body: a.body})
				for _, method := range []string{http.MethodGet, http.MethodDelete} {
					w.refused(w.node, ask{method: method, path: f.path + "/" + name})
				}
				w.refused(w.callers[operator], ask{path: f.path})
			}
			unnamed := coreEvent("", 1)
			unnamed.GenerateName = fmt.Sprintf("cut-%d-named-", w.restarts)
			name := decode[corev1.Event](w.replayed(w.node, create(coreEvents, rig.Protobuf, unnamed), http.StatusCreated).body).Name
			if rest, ok := strings.CutPrefix(name, unnamed.GenerateName); !ok || rest == "" {
				w.T.Errorf("the Event is called %q, want %q and more", name, unnamed.GenerateName)
			}
			kept = append(kept, name)
		},
		healed: func() {
			if got := namesOf(eventsOf(w.Rig, fmt.Sprintf("cut-%d-", w.restarts))); !slices.Equal(got, kept) {
				w.T.Errorf("the API server has the Events %q, want %q", got, kept)
			}
			if got := namesOf(eventsOf(w.Rig, "never-")); len(got) > 0 {
				w.T.Errorf("the API server has the Events %q, want none of them", got)
			}
		},
	}
}

// itemOf is an object without the envelope of its encoding.
func itemOf(body []byte) []byte {
	raw, ok := bytes.CutPrefix(body, []byte("k8s\x00"))
	if !ok {
		return body
	}
	var u runtime.Unknown
	if err := u.Unmarshal(raw); err != nil {
		return nil
	}
	return u.Raw
}

// eventPatch fails without the rule event_patch: client-go drops an Event whose patch
// gets 503, and creates one whose patch gets 404.
func (w *world) eventPatch() row {
	body := []byte(`{"count":2}`)
	kinds := []types.PatchType{types.StrategicMergePatchType, types.MergePatchType}
	paths := []string{coreEvents + "/patched", newEvents + "/patched", coreEvents + "/none"}
	return row{
		name: "Event patch",
		online: func() {
			w.ask(w.node, create(coreEvents, rig.JSON, coreEvent("patched", 1)), http.StatusCreated)
			for _, path := range paths {
				w.sameVerdict(w.node, patch(path, types.StrategicMergePatchType, []byte(`{"metadata":{"labels":{"x":"y"}}}`)))
			}
		},
		offline: func() {
			for _, kind := range kinds {
				for _, path := range paths {
					if got := w.ask(w.node, patch(path, kind, body), http.StatusNotFound); got.reason() != metav1.StatusReasonNotFound {
						w.T.Errorf("PATCH %s = %v, want the reason NotFound", path, got)
					}
					w.refused(w.callers[operator], patch(path, kind, body))
					w.refused(w.callers[nobody], patch(path, kind, body))
					w.refused(w.node, patch(path, kind, body).with("dryRun=All"))
				}
			}
		},
		healed: func() {
			got := decode[corev1.Event](w.ask(w.node, patch(paths[0], types.StrategicMergePatchType, body), http.StatusOK).body)
			if got.Count != 2 || got.Labels["x"] != "y" {
				w.T.Errorf("the Event patched after the cut is %+v", got)
			}
		},
	}
}

// otherWrites fails if anything pretends to succeed that cannot be done now, or is
// kept for later; what of it reaches the API server shows afterwards.
func (w *world) otherWrites() row {
	who := []*caller{w.node, w.callers[operator], w.callers[nobody]}
	return row{
		name: "other writes",
		online: func() {
			for _, c := range who {
				for _, a := range writes {
					w.sameVerdict(c, a.with("dryRun=All"))
				}
			}
		},
		offline: func() {
			for _, c := range who {
				for _, a := range writes {
					w.refused(c, a)
					w.refused(c, a.with("dryRun=All"))
				}
			}
		},
	}
}

// conversations fails if an upgrade, or a stream that only a live API server can
// carry, is answered with anything but a whole Status, or not at all.
func (w *world) conversations() row {
	asks := conversationAsks()
	http1 := func(c *caller) *caller {
		one := func(config *rest.Config) *rig.Endpoint {
			config = rest.CopyConfig(config)
			config.NextProtos = []string{"http/1.1"}
			return w.Direct(config)
		}
		return &caller{name: c.name, direct: one(c.config), through: one(w.Hub.Through(c.config))}
	}
	who := []*caller{w.node, w.callers[operator], http1(w.node), http1(w.callers[operator])}
	return row{
		name: "conversations",
		online: func() {
			for i, c := range who {
				for _, a := range asks {
					if i >= 2 || a.header == nil { // only HTTP/1.1 has upgrades
						w.sameVerdict(c, a)
					}
				}
			}
		},
		offline: func() {
			for i, c := range who {
				for _, a := range asks {
					if i >= 2 || a.header == nil {
						w.refused(c, a)
					}
				}
			}
		},
	}
}

// conversationAsks are all of them, plain and as upgrades.
func conversationAsks() (all []ask) {
	spdy := http.Header{"Connection": {"Upgrade"}, "Upgrade": {"SPDY/3.1"}, "X-Stream-Protocol-Version": {"v4.channel.k8s.io"}}
	websocket := http.Header{
		"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"dGhlIHNhbXBsZSBub25jZQ=="},
		"Sec-Websocket-Protocol": {"v5.channel.k8s.io"},
	}
	const pod = "/api/v1/namespaces/a/pods/p/"
	for _, path := range []string{pod + "exec?command=true&stdout=true", pod + "attach?stdout=true", pod + "portforward?ports=80"} {
		all = append(all, ask{method: http.MethodPost, path: path}, ask{path: path}, ask{method: http.MethodPost, path: path, header: spdy}, ask{path: path, header: websocket})
	}
	for _, path := range []string{
		pod + "proxy/", pod + "proxy/a/b?c=d", "/api/v1/namespaces/a/services/none:80/proxy/", "/api/v1/nodes/n1/proxy/metrics",
	} {
		all = append(all, ask{path: path}, ask{method: http.MethodPost, path: path, body: []byte("{}")}, ask{path: path, header: websocket})
	}
	return append(all, ask{path: pod + "log"}, ask{path: pod + "log?follow=true&container=c"}, ask{path: "/api/v1/nodes/n1/proxy/logs/"})
}
