// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package feeds shows what the watch cache promises to those who watch, with the
// real program between a real API server and real clients: cuts of every kind go
// unnoticed, many watchers cost one watch upstream, a 410 is a difference and no
// new list, and a slow client is nobody else's problem.
//
// EDGEHUB_FLAPS is how often the link is cut, EDGEHUB_STEPS how long the random
// test is, EDGEHUB_SEED makes its decisions (not its timing) again.
package feeds

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	writerUser = "feeds-writer" // may do everything, directly
	agentUser  = "feeds-agent"  // a token user who reads through the hub

	configMaps = "/api/v1/configmaps"
	secrets    = "/api/v1/secrets"
	widgets    = "/apis/example.com/v1/widgets"
	inA        = "/api/v1/namespaces/a/configmaps"
	even       = "labelSelector=parity%3Deven"
)

// users are those of most tests.
func users(more ...string) []controlplane.StaticUser {
	all := []controlplane.StaticUser{{Name: writerUser, Groups: []string{"system:masters"}}, {Name: agentUser}}
	for _, name := range more {
		all = append(all, controlplane.StaticUser{Name: name})
	}
	return all
}

// newRig starts a control plane in which the node and a token user may read what
// the tests write. The hub is not started.
func newRig(t *testing.T, more ...string) *rig.Rig {
	t.Helper()
	r := rig.New(t, users(more...), "-v=4")
	for _, who := range []string{rig.NodeUser, agentUser} {
		r.Grant("", rig.User(who), "configmaps", "secrets", "pods", "widgets")
	}
	return r
}

// wholeStates returns those of the hub's own requests that ask for a whole state:
// lists, and watches with initial events. Its looks at the history (limit=1) are
// none.
func wholeStates(events []auditv1.Event) (whole []auditv1.Event) {
	for _, e := range ownRequests(events) {
		if e.Verb == "list" && !strings.Contains(e.RequestURI, "limit=1&") && !strings.HasSuffix(e.RequestURI, "limit=1") ||
			strings.Contains(e.RequestURI, "sendInitialEvents=true") {
			whole = append(whole, e)
		}
	}
	return whole
}

// ownRequests returns the hub's own requests for resources that the tests watch.
func ownRequests(events []auditv1.Event) (own []auditv1.Event) {
	for _, e := range events {
		if strings.HasPrefix(e.UserAgent, "edgehub") && e.ObjectRef != nil && e.ObjectRef.Resource != "nodes" && !strings.HasSuffix(e.ObjectRef.APIGroup, "authentication.k8s.io") &&
			!strings.HasSuffix(e.ObjectRef.APIGroup, "authorization.k8s.io") {
			own = append(own, e)
		}
	}
	return own
}

// A view is what somebody watches, in one form.
type view struct {
	name     string
	path     string // with its selector
	accept   string
	resource string // configmaps or widgets
	match    func(key string, labels map[string]string) bool
	byNode   bool
}

func (v *view) protobuf() bool { return strings.HasPrefix(v.accept, rig.Protobuf) }

// form names the representation.
func (v *view) form() string {
	switch {
	case v.accept == rig.MetadataProtobuf:
		return v.resource + " metadata"
	case v.protobuf():
		return v.resource + " protobuf"
	}
	return v.resource + " json"
}

func (v *view) String() string { return v.name }

func everything(string, map[string]string) bool { return true }
func isEven(_ string, labels map[string]string) bool {
	return labels["parity"] == "even"
}
func inNamespaceA(key string, _ map[string]string) bool { return strings.HasPrefix(key, "a/") }
func isNamed(key string, _ map[string]string) bool      { return key == "a/o-03" }

// views are scopes of every shape, in every representation, for both kinds of
// users.
func views() []*view {
	return []*view{
		{name: "whole, protobuf, node", path: configMaps, accept: rig.Protobuf, resource: "configmaps", match: everything, byNode: true},
		{name: "whole, JSON, token", path: configMaps, accept: rig.JSON, resource: "configmaps", match: everything},
		{name: "whole, metadata, node", path: configMaps, accept: rig.MetadataProtobuf, resource: "configmaps", match: everything, byNode: true},
		{name: "selector, protobuf, token", path: configMaps + "?" + even, accept: rig.Protobuf, resource: "configmaps", match: isEven},
		{name: "selector, JSON, node", path: configMaps + "?" + even, accept: rig.JSON, resource: "configmaps", match: isEven, byNode: true},
		{name: "selector, metadata, token", path: configMaps + "?" + even, accept: rig.MetadataProtobuf, resource: "configmaps", match: isEven},
		{name: "namespace, protobuf, node", path: inA, accept: rig.Protobuf, resource: "configmaps", match: inNamespaceA, byNode: true},
		{name: "name, JSON, token", path: inA + "?fieldSelector=metadata.name%3Do-03", accept: rig.JSON, resource: "configmaps", match: isNamed},
		{name: "custom, JSON, node", path: widgets, accept: rig.JSON, resource: "widgets", match: everything, byNode: true},
		{name: "custom selector, JSON, token", path: widgets + "?" + even, accept: rig.JSON, resource: "widgets", match: isEven},
	}
}

// endpoints are the ways through the hub.
type endpoints struct{ node, agent *rig.Endpoint }

func through(r *rig.Rig) endpoints {
	return endpoints{node: r.Through(r.Node), agent: r.Through(r.ControlPlane.TokenConfig(agentUser))}
}

func (e endpoints) of(v *view) *rig.Endpoint {
	if v.byNode {
		return e.node
	}
	return e.agent
}

// credential is a client configuration through the hub.
func credential(r *rig.Rig, byNode bool) *rest.Config {
	if byNode {
		return r.Hub.Through(r.Node)
	}
	return r.Hub.Through(r.ControlPlane.TokenConfig(agentUser))
}

// A recorder keeps every frame of one watch.
type recorder struct {
	view *view

	mu     sync.Mutex
	synced bool
	events []rig.Event // after the initial ones
	err    error       // how the watch ended
}

// errEnded is how a watch ends that ends in order.
var errEnded = errors.New("the watch has ended")

// record opens a watch with initial events and keeps what comes until it ends. It
// returns when the initial events are over.
func record(ctx context.Context, e *rig.Endpoint, v *view) (*recorder, error) {
	rec := &recorder{view: v}
	resp, err := e.Get(ctx, rig.With(v.path, rig.WatchList), rig.WatchAccept(v.accept))
	if err != nil {
		return nil, fmt.Errorf("%v: %w", v, err)
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		return nil, fmt.Errorf("%v: %s", v, resp.Status)
	}
	next := rig.Frames(resp.Body, resp.Header.Get("Content-Type"))
	go func() {
		defer resp.Body.Close()
		for {
			ev, err := next()
			rec.take(ev, err)
			if err != nil {
				return
			}
		}
	}()
	return rec, process.Poll(ctx, v.name+" has its initial events", func(context.Context) error {
		rec.mu.Lock()
		defer rec.mu.Unlock()
		if rec.err == nil && !rec.synced {
			return errors.New("not yet")
		}
		return rec.err
	})
}

func (r *recorder) take(ev rig.Event, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case err != nil:
		r.err = fmt.Errorf("%w: %w", errEnded, err)
	case r.synced:
		r.events = append(r.events, ev)
	default:
		r.synced = ev.Synced
	}
}

// cut forgets what has come so far.
func (r *recorder) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = nil
}

// seen returns what has come, and how the watch has ended.
func (r *recorder) seen() ([]rig.Event, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.events), r.err
}
