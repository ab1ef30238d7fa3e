// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package feeds

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"testing"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// A state is what a view shows at a resourceVersion.
type state struct {
	rv    int64
	items map[string][]byte
}

// stateOf lists a view directly.
func stateOf(ctx context.Context, e *rig.Endpoint, v *view) (state, error) {
	l, status, err := e.List(ctx, v.path, v.accept)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("status %d", status)
	}
	if err != nil {
		return state{}, fmt.Errorf("list %v: %w", v, err)
	}
	s := state{rv: l.ResourceVersion, items: map[string][]byte{}}
	for _, item := range l.Items {
		m, err := rig.ReadMeta(item, l.Protobuf)
		if err != nil {
			return s, err
		}
		s.items[m.Key] = item
	}
	return s, nil
}

// A change is an event that is wanted. Of a deletion the resourceVersion is not
// known beforehand.
type change struct {
	kind, key string
	rv        int64
	item      []byte
}

// difference is what a watcher of before is to be told of after.
func difference(v *view, before, after state) (changed []change, gone map[string][]byte, err error) {
	for key, item := range after.items {
		old, held := before.items[key]
		if held && bytes.Equal(old, item) {
			continue
		}
		m, err := rig.ReadMeta(item, v.protobuf())
		if err != nil {
			return nil, nil, err
		}
		kind := "ADDED"
		if held {
			kind = "MODIFIED"
		}
		changed = append(changed, change{kind, key, m.ResourceVersion, item})
	}
	slices.SortFunc(changed, func(a, b change) int { return cmp.Compare(a.rv, b.rv) })
	gone = map[string][]byte{}
	for key, item := range before.items {
		if after.items[key] == nil {
			gone[key] = item
		}
	}
	return changed, gone, nil
}

// upheaval changes everything that can change: updates, deletions, objects put
// under the name of others, in and out of the selector, there and back.
func upheaval(ctx context.Context, w *writer, from int) error {
	var errs []error
	note := func(_ int64, err error) { errs = append(errs, err) }
	for _, ns := range []string{"a", "b"} {
		name := func(i int) string { return fmt.Sprintf("o-%02d", from+i) }
		note(w.update(ctx, ns, name(0), "even"))                                                                        // maybe into the selector
		note(w.update(ctx, ns, name(1), "odd"))                                                                         // maybe out of it
		errs = append(errs, w.delete(ctx, ns, name(2)))                                                                 // gone
		errs = append(errs, w.delete(ctx, ns, name(3)), w.create(ctx, ns, name(3), "even"))                             // another
		errs = append(errs, w.delete(ctx, ns, name(4)), w.create(ctx, ns, name(4), "odd"))                              // another
		errs = append(errs, w.create(ctx, ns, fmt.Sprintf("new-%02d", from), "even"))                                   // new
		errs = append(errs, w.create(ctx, ns, "brief", "even"), w.delete(ctx, ns, "brief"))                             // nobody will know
		note(w.update(ctx, ns, name(5), "odd"))                                                                         // out
		note(w.update(ctx, ns, name(5), "even"))                                                                        // and in
		note(w.update(ctx, ns, name(6), "even"))                                                                        // in
		note(w.update(ctx, ns, name(6), "odd"))                                                                         // and out
		errs = append(errs, w.create(ctx, ns, fmt.Sprintf("new-%02d-odd", from), "odd"))                                // new
		errs = append(errs, w.delete(ctx, ns, name(7)), w.create(ctx, ns, name(7), "even"), w.delete(ctx, ns, name(7))) // gone twice
	}
	return errors.Join(errs...)
}

// podViews are of a kind whose changes the hub may keep in memory for minutes:
// labels are no new generation.
func podViews() []*view {
	return []*view{
		{name: "pods, protobuf, node", path: "/api/v1/pods", accept: rig.Protobuf, resource: "pods", byNode: true},
		{name: "pods, selector, JSON, token", path: "/api/v1/pods?" + even, accept: rig.JSON, resource: "pods"},
	}
}

// aftermath changes what upheaval has changed before the restart.
func aftermath(ctx context.Context, w *writer) error {
	var errs []error
	for _, ns := range []string{"a", "b"} {
		_, err := w.update(ctx, ns, "o-00", "odd")
		errs = append(errs, err, w.delete(ctx, ns, "o-03"), w.create(ctx, ns, "o-02", "even"))
		_, err = w.update(ctx, ns, "new-08", "odd")
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// TestExpired has the API server forget its history while the link is cut: it is
// started again after changes, and then there are more. Watchers are told exactly
// what is different, in the order of a list that the hub makes; nobody lists.
func TestExpired(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	ctx := t.Context()
	process.Run(t, r.Hub)
	r.WaitLink(true)
	writers := []*writer{newWriter(r, configMapsGVR, 1), newWriter(r, rig.Widgets, 2), newWriter(r, podsGVR, 3)}
	for _, w := range writers {
		for i := range 20 {
			for _, ns := range []string{"a", "b"} {
				r.Must(w.create(ctx, ns, fmt.Sprintf("o-%02d", i), []string{"even", "odd"}[i%2]))
			}
		}
	}
	ways := through(r)
	direct := r.Direct(r.ControlPlane.TokenConfig(writerUser))
	var recorders []*recorder
	for _, v := range append(views(), podViews()...) {
		rec, err := record(ctx, ways.of(v), v)
		r.Must(err)
		recorders = append(recorders, rec)
	}
	// What comes now of pods stays in memory for a while.
	r.Settle()
	for _, w := range writers { // so that they have followed something
		r.Must(upheavalSeen(ctx, w, recorders))
	}
	r.WaitFeeds()

	r.Offline()
	before := map[*recorder]state{}
	for _, rec := range recorders {
		var err error
		before[rec], err = stateOf(ctx, direct, rec.view)
		r.Must(err)
		rec.cut()
	}
	for _, w := range writers {
		r.Must(upheaval(ctx, w, 0))
		r.Must(upheaval(ctx, w, 8))
	}
	r.RestartAPIServer(true)
	wantGone(r, direct, before)
	for _, w := range writers {
		r.Must(aftermath(ctx, w))
	}
	r.Online()
	for _, rec := range recorders {
		r.Must(rec.wantDifference(ctx, direct, before[rec]))
	}
	t.Logf("%d watchers were told the difference", len(recorders))
	for _, w := range writers {
		for _, rec := range recorders {
			rec.cut()
		}
		r.Must(upheavalSeen(ctx, w, recorders))
	}
}

// upheavalSeen makes a change that the watchers of a resource are told of, and
// waits for it: the first thing that they hear, and no more than that.
func upheavalSeen(ctx context.Context, w *writer, recorders []*recorder) error {
	rvs := map[string]int64{}
	for _, key := range []string{"b/o-19", "a/o-03"} {
		ns, name := key[:1], key[2:]
		err := w.create(ctx, ns, name, "even")
		if err := only(err); err != nil {
			return err
		}
		if rvs[key], err = w.update(ctx, ns, name, "even"); err != nil {
			return err
		}
	}
	for _, rec := range recorders {
		if rec.view.resource != w.gvr.Resource {
			continue
		}
		key := "a/o-03" // all views hold it
		err := process.Poll(ctx, fmt.Sprintf("%v is told of %s at %d", rec.view, key, rvs[key]), func(context.Context) error {
			events, err := rec.seen()
			if err != nil {
				return err
			}
			for _, e := range events {
				if e.Meta.Key == key && e.Meta.ResourceVersion == rvs[key] {
					return nil
				}
				if e.Type != "BOOKMARK" && e.Meta.Key != key && e.Meta.Key != "b/o-19" {
					return fmt.Errorf("it was told of %s %s at %d", e.Type, e.Meta.Key, e.Meta.ResourceVersion)
				}
			}
			return errors.New("it is not")
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// wantGone makes sure that the history is gone: a direct watch from before is told
// so.
func wantGone(r *rig.Rig, direct *rig.Endpoint, before map[*recorder]state) {
	r.T.Helper()
	for rec, s := range before {
		path := rig.With(rec.view.path, fmt.Sprintf("watch=1&timeoutSeconds=5&resourceVersion=%d", s.rv))
		// A custom resource is served a moment later.
		r.Must(process.Poll(r.T.Context(), "a direct watch of "+rec.view.name+" is refused with 410", func(ctx context.Context) error {
			resp, err := direct.Get(ctx, path, rig.WatchAccept(rec.view.accept))
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				return gone(resp.StatusCode, "status")
			}
			ev, err := rig.Frames(resp.Body, resp.Header.Get("Content-Type"))()
			if err != nil {
				return err
			}
			return gone(ev.Code, ev.Type)
		}))
	}
}

func gone(code int, what string) error {
	if code == http.StatusGone {
		return nil
	}
	return fmt.Errorf("it begins with %s %d", what, code)
}

// wantDifference waits for the bookmark after the difference and judges all that
// came until then.
func (r *recorder) wantDifference(ctx context.Context, direct *rig.Endpoint, before state) error {
	var got []rig.Event
	err := process.Poll(ctx, r.view.name+" has a bookmark after the difference", func(context.Context) error {
		events, err := r.seen()
		if err != nil {
			return err
		}
		i := slices.IndexFunc(events, func(e rig.Event) bool { return e.Type == "BOOKMARK" && e.Meta.ResourceVersion > before.rv })
		if i < 0 {
			return fmt.Errorf("%d events", len(events))
		}
		got = events[:i+1]
		for _, e := range events[i+1:] {
			if e.Type != "BOOKMARK" {
				return fmt.Errorf("%s %s at %d comes after the bookmark", e.Type, e.Meta.Key, e.Meta.ResourceVersion)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	after, err := stateOf(ctx, direct, r.view)
	if err != nil {
		return err
	}
	changed, gone, err := difference(r.view, before, after)
	if err != nil {
		return err
	}
	if err := r.judge(got, changed, gone, after.rv); err != nil {
		return fmt.Errorf("%v from %d to %d: %w\ngot %s", r.view, before.rv, after.rv, err, outline(got))
	}
	return nil
}

func outline(events []rig.Event) (s string) {
	for _, e := range events {
		s += fmt.Sprintf("%s %s %d; ", e.Type, e.Meta.Key, e.Meta.ResourceVersion)
	}
	return s
}

func (r *recorder) judge(got []rig.Event, changed []change, gone map[string][]byte, last int64) error {
	if want := len(changed) + len(gone) + 1; len(got) != want {
		return fmt.Errorf("%d events, want %d: %d changes, %d deletions, a bookmark", len(got), want, len(changed), len(gone))
	}
	for i, want := range changed {
		if e := got[i]; e.Type != want.kind || e.Meta.Key != want.key || e.Meta.ResourceVersion != want.rv || !bytes.Equal(e.Item, want.item) {
			return fmt.Errorf("event %d is %s %s at %d %q, want %s %s at %d %q", i, e.Type, e.Meta.Key, e.Meta.ResourceVersion, e.Item, want.kind, want.key, want.rv, want.item)
		}
	}
	bookmark := got[len(got)-1].Meta.ResourceVersion
	for _, e := range got[len(changed) : len(got)-1] {
		old, ok := gone[e.Meta.Key]
		if e.Type != "DELETED" || !ok {
			return fmt.Errorf("%s %s where deletions are due", e.Type, e.Meta.Key)
		}
		delete(gone, e.Meta.Key)
		is, err := rig.Timeless(e.Item, r.view.protobuf())
		if err != nil {
			return err
		}
		was, err := rig.Timeless(old, r.view.protobuf())
		if err != nil {
			return err
		}
		if is != was {
			return fmt.Errorf("DELETED %s carries %q, want %q", e.Meta.Key, is, was)
		}
		if e.Meta.ResourceVersion != bookmark {
			return fmt.Errorf("DELETED %s at %d, want the list's, which the bookmark has: %d", e.Meta.Key, e.Meta.ResourceVersion, bookmark)
		}
	}
	if n := len(changed); bookmark > last || n > 0 && bookmark < changed[n-1].rv {
		return fmt.Errorf("a bookmark at %d, want one between the last change and %d", bookmark, last)
	}
	return nil
}
