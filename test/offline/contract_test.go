// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package offline

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"

	"github.com/edgehub/edgehub/test/rig"
)

// A row is one of docs/offline.md. Its parts keep to themselves what they are
// about, so that each row can be run alone.
type row struct {
	name    string
	online  func() // what the API server says is what comes
	offline func() // run twice: by the hub that saw the cut, and by one that started in it
	healed  func() // after each of them; nil: nothing
}

// TestOfflineContract goes through docs/offline.md: each row with the link up, with
// the link cut, with the link back, and once more with the hub killed and started
// while it is cut. Every time that the link is back the API server must hold what
// it held before, and the node's Events.
//
// Run one row by its name, TestOfflineContract/own_Lease.
func TestOfflineContract(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	rows := []row{
		w.getAndList(), w.discovery(), w.ownNodeCreate(), w.ownNodePatchStatus(), w.ownLease(), w.ownCSINode(),
		w.tokenRequest(), w.tokenReview(), w.selfSubjectReview(), w.eventCreate(), w.eventPatch(), w.otherWrites(), w.conversations(),
		w.watches(), // last: its watches are to have heard nothing while all the others ran
	}
	w.run(rows, "online", func(r row) func() { return r.online })
	w.WaitFeeds()
	for _, restart := range []bool{false, true} {
		suffix := ""
		if restart {
			suffix = " after a restart"
			w.Settle()
		}
		before, since := w.snapshot(), time.Now()
		w.cut()
		if restart {
			w.restart()
		}
		w.run(rows, "offline"+suffix, func(r row) func() { return r.offline })
		w.heal()
		w.part("other writes sent"+suffix, func() { w.nothingSent(before, since) })
		w.run(rows, "healed"+suffix, func(r row) func() { return r.healed })
	}
	for _, r := range []*rig.Rig{w.Rig, w.other} {
		if n, err := r.Hub.Metric(t.Context(), "edgehub_proxy_panics_total"); err != nil || n != 0 {
			t.Errorf("edgehub_proxy_panics_total = %v, %v, want 0", n, err)
		}
	}
}

// run runs a part of each row.
func (w *world) run(rows []row, phase string, of func(row) func()) {
	for _, r := range rows {
		if f := of(r); f != nil {
			w.part(r.name+" "+phase, f)
		}
	}
}

// part is a subtest of the world's test.
func (w *world) part(name string, f func()) {
	t := w.t
	t.Run(name, func(t *testing.T) {
		w.T, w.other.T = t, t
		f()
	})
	w.T, w.other.T = t, t
}

// A snapshot is the resourceVersion of every object that the API server holds, but
// for Events and what it keeps about itself.
type snapshot map[string]string

func (w *world) snapshot() snapshot {
	w.T.Helper()
	config := w.ControlPlane.AdminConfig()
	d, err := discovery.NewDiscoveryClientForConfig(config)
	w.Must(err)
	lists, err := d.ServerPreferredResources()
	w.Must(err)
	client, err := metadata.NewForConfig(config)
	w.Must(err)
	all := snapshot{}
	for _, l := range lists {
		gv, err := schema.ParseGroupVersion(l.GroupVersion)
		w.Must(err)
		for _, r := range l.APIResources {
			if !slices.Contains(r.Verbs, "list") || r.Name == "events" || r.Name == "componentstatuses" {
				continue
			}
			objects, err := client.Resource(gv.WithResource(r.Name)).List(w.T.Context(), metav1.ListOptions{})
			w.Must(err)
			for _, o := range objects.Items {
				if o.Namespace != "kube-system" || r.Name != "leases" {
					all[fmt.Sprintf("%s.%s %s/%s", r.Name, gv.Group, o.Namespace, o.Name)] = string(o.UID) + " " + o.ResourceVersion
				}
			}
		}
	}
	return all
}

// nothingSent wants the API server to hold what it held, and the hubs to have asked
// for no write but those of Events since the time given. It would fail if anything
// that was acknowledged locally (a Lease, a Node's status), or refused, were kept
// and sent later.
func (w *world) nothingSent(before snapshot, since time.Time) {
	after := w.snapshot()
	both := maps.Clone(before)
	maps.Copy(both, after)
	for name := range both {
		if before[name] != after[name] && !w.moved[name] {
			w.T.Errorf("%s: uid and resourceVersion %q before the cut, %q after it", name, before[name], after[name])
		}
	}
	if len(before) < 100 {
		w.T.Errorf("the API server holds %d objects only", len(before))
	}
	events, err := w.ControlPlane.Requests(since)
	w.Must(err)
	ours := map[string]bool{}
	for name := range w.callers {
		ours[name] = true
	}
	seen := 0
	for _, e := range events {
		if !ours[e.User.Username] && !strings.HasPrefix(e.UserAgent, "edgehub") {
			continue
		}
		seen++
		if isWrite(e) && !isEventCreate(e) {
			w.T.Errorf("%s of %s as %s, sent after the cut", e.Verb, e.RequestURI, e.User.Username)
		}
	}
	if seen == 0 {
		w.T.Errorf("none of %d requests after the cut is a hub's", len(events))
	}
}

func isWrite(e auditv1.Event) bool {
	switch e.Verb {
	case "get", "list", "watch":
		return false
	}
	// By which the hub finds out who somebody is.
	return e.ObjectRef == nil || e.ObjectRef.Resource != "selfsubjectreviews"
}

func isEventCreate(e auditv1.Event) bool {
	return e.Verb == "create" && e.ObjectRef != nil && e.ObjectRef.Resource == "events" && e.User.Username == rig.NodeUser
}

// noLists wants that since the link is back a user has fetched nothing anew of what is
// at path: no list, and no watch that begins with the state.
func (w *world) noLists(user, path string) {
	w.T.Helper()
	events, err := w.ControlPlane.Requests(w.healedAt)
	w.Must(err)
	resumed := 0
	for _, e := range events {
		requested, parameters, _ := strings.Cut(e.RequestURI, "?")
		switch {
		case requested != path || e.User.Username != user:
		case e.Verb == "list" || strings.Contains(parameters, "sendInitialEvents=true") || !strings.Contains(parameters, "resourceVersion="):
			w.T.Errorf("%s %s of %s since the link is back, want nothing fetched anew", e.Verb, e.RequestURI, e.User.Username)
		case e.Verb == "watch":
			resumed++
		}
	}
	if resumed == 0 {
		w.T.Errorf("no watch of %s by %s was resumed since the link is back", path, user)
	}
}

// polled is a condition that has an error in place of false.
func polled(f func(context.Context) bool, format string, args ...any) func(context.Context) error {
	return func(ctx context.Context) error {
		if f(ctx) {
			return nil
		}
		return fmt.Errorf(format, args...)
	}
}
