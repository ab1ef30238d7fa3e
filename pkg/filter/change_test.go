// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// changes are the ways in which what a client is shown can become another.
var changes = []struct {
	name   string
	change func(r *rig, d *dependency)
}{
	{"dependency", func(_ *rig, d *dependency) { d.set("green", nil) }},
	{"disabled", func(r *rig, _ *dependency) { r.use([]Rule{{Name: "pool", Disabled: true}}) }},
	{"other clients", func(r *rig, _ *dependency) { r.use([]Rule{{Name: "pool", Clients: []Client{{User: "x"}}}}) }},
	{"one more", func(r *rig, _ *dependency) { r.use(nil, entry(marking("m"), false)) }},
	{"disabled long ago", func(r *rig, _ *dependency) {
		r.use([]Rule{{Name: "pool", Disabled: true}})
		for range 10 {
			r.use([]Rule{{Name: "pool", Disabled: true}})
		}
	}},
}

// TestChangeEndsWatches: connected ones are told, those that were not connected are
// refused, and who has listed since goes on.
func TestChangeEndsWatches(t *testing.T) {
	for _, tc := range changes {
		for _, f := range forms {
			t.Run(tc.name+"/"+f.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newServer(t)
					s.set("a", "green")
					s.set("b", "red")
					d := newDependency("red")
					r := newRig(t, s, entry(withholding(d), true))
					stop := r.run(t)
					defer stop()
					other := ask{form: f, program: "other"}
					query := r.listed(f)
					r.answer(ask{form: f, verb: "list", program: "other"})
					w := r.mustWatch(ask{form: f, query: query})
					synctest.Wait()
					tc.change(r, d)
					w.want(gone, "EOF")
					w.body.Close()
					other.query = query
					if _, code := r.watch(other); code != http.StatusGone {
						t.Errorf("who was not connected is answered %d, want 410", code)
					}
					if _, code := r.watch(ask{form: f, query: query}); code != http.StatusGone {
						t.Errorf("who was told is answered %d without a list, want 410", code)
					}
					if again := r.listed(f); again != query {
						t.Fatal("the resourceVersion has changed, and the test with it")
					}
					w = r.mustWatch(ask{form: f, query: query})
					w.body.Close()
					r.accounts(t)
					if n := s.watches(); n != 0 {
						t.Errorf("%d watches go on", n)
					}
				})
			})
		}
	}
}

// run runs the Chain until stop.
func (r *rig) run(t testing.TB) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run() = %v, want nil", err)
		}
	}
}

// TestUnfilteredEndCleanly when a filter comes in force for them.
func TestUnfilteredEndCleanly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		s.set("a", "red")
		f := forms[0]
		r := newRig(t, s)
		stop := r.run(t)
		defer stop()
		w := r.mustWatch(ask{form: f, query: at(11)})
		untouched := r.mustWatch(ask{form: f, query: at(11), user: "other"})
		e := entry(dropping("red"), true)
		e.Clients = []Client{{User: "kubelet"}}
		r.use(nil, e)
		w.want("EOF")
		w.body.Close()
		if _, code := r.watch(ask{form: f, query: at(11)}); code != http.StatusGone {
			t.Errorf("watch goes on with what no filter has seen: %d, want 410", code)
		}
		r.mustWatch(ask{form: f, query: r.listed(f)}).body.Close()
		s.set("b", "red")
		untouched.want("ADDED b red 12")
		untouched.body.Close()
		r.accounts(t)
		if n := len(r.watches); n != 0 {
			t.Errorf("%d watches are tracked after the last one was closed", n)
		}
	})
}

// TestSameResourceVersionOfTwo: of two clients that cannot be told apart one has listed
// before a change and one after it, at the same resourceVersion. Neither goes on with what
// the other holds, and both do in the end.
func TestSameResourceVersionOfTwo(t *testing.T) {
	for _, tc := range append(changes, struct {
		name   string
		change func(r *rig, d *dependency)
	}{"put in force", nil}) {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newServer(t)
				s.set("a", "red")
				f := forms[0]
				d := newDependency("red")
				var r *rig
				query := at(11)
				if tc.change != nil {
					r = newRig(t, s, entry(withholding(d), true))
					r.listed(f) // both have
					r.listed(f)
					tc.change(r, d)
				} else {
					r = newRig(t, s)
					a, b := r.mustWatch(ask{form: f, query: query}), r.mustWatch(ask{form: f, query: query})
					r.use(nil, entry(withholding(d), true))
					r.expireWatches()
					a.want("EOF")
					b.want("EOF")
					a.body.Close()
					b.body.Close()
				}
				r.listed(f) // one of them
				if _, code := r.watch(ask{form: f, query: query}); code != http.StatusGone {
					t.Fatalf("watch of one of the two answered %d, want 410", code)
				}
				<-time.After(claimAge + time.Second)
				r.listed(f)
				r.mustWatch(ask{form: f, query: query}).body.Close()
				r.accounts(t)
			})
		})
	}
}

// TestChangeDuringAList: what was judged by both cannot be gone on from.
func TestChangeDuringAList(t *testing.T) {
	s := newServer(t)
	s.set("a", "red")
	s.set("b", "red")
	d := newDependency("red")
	pool := withholding(d)
	inner := pool.apply
	pool.apply = func(o *Object) (Verdict, error) {
		if ok, _ := o.Is("shop", "b"); ok && d.get() == "red" {
			defer d.set("green", nil)
		}
		return inner(o)
	}
	r := newRig(t, s, entry(pool, true))
	if _, code := r.watch(ask{form: forms[0], query: r.listed(forms[0])}); code != http.StatusGone {
		t.Errorf("watch after a list in which the filters changed answered %d, want 410", code)
	}
	r.mustWatch(ask{form: forms[0], query: r.listed(forms[0])}).body.Close()
	r.accounts(t)
}

// TestTableClientOfAFormerFilter: who prefers a form that filters cannot read got JSON
// while one was in force, and holds what that showed.
func TestTableClientOfAFormerFilter(t *testing.T) {
	s := newServer(t)
	s.set("a", "red")
	r := newRig(t, s, entry(dropping("red"), true))
	metadata := ask{form: forms[0], accept: "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io,application/json"}
	list := metadata
	list.verb = "list"
	r.answer(list)
	r.use([]Rule{{Name: "drop", Disabled: true}})
	metadata.query = at(11)
	if _, code := r.watch(metadata); code != http.StatusGone {
		t.Errorf("watch answered %d, want 410", code)
	}
	r.answer(list)
	if w, code := r.watch(metadata); code != http.StatusOK {
		t.Errorf("watch after a list answered %d, want 200", code)
	} else {
		w.body.Close()
	}
}

// TestTwoWatchesOfOneView: who resumes beside a live watch goes on from a whole state of
// it, never from the middle of an event.
func TestTwoWatchesOfOneView(t *testing.T) {
	s := newServer(t)
	f := forms[0]
	r := newRig(t, s, entry(wild, true))
	for i := range 20 {
		s.set(fmt.Sprint("n", i), "green")
	}
	query := r.listed(f)
	live := r.mustWatch(ask{form: f, query: query})
	for i := range 20 {
		s.set(fmt.Sprint("n", i), []string{"", "red", "blue"}[i%3])
		live.next()
		rv := 31 + i
		w := r.mustWatch(ask{form: f, query: at(rv)})
		w.body.Close()
		r.accounts(t)
	}
	live.body.Close()
	r.accounts(t)
}

// TestLimitsOfViews: what there is no room for is refused.
func TestLimitsOfViews(t *testing.T) {
	s := newServer(t)
	s.set("a", "green")
	f := forms[0]
	r := newRig(t, s, entry(wild, true))
	first := r.listed(f)
	for i := range maxViewsEach {
		s.set("a", []string{"blue", "green"}[i%2])
		r.listed(f)
	}
	if _, code := r.watch(ask{form: f, query: first}); code != http.StatusGone {
		t.Errorf("watch from the first of %d lists answered %d, want 410", maxViewsEach+1, code)
	}
	r.mustWatch(ask{form: f, query: at(12)}).body.Close()
	r.accounts(t)

	// Live ones stay, whatever comes.
	live := r.mustWatch(ask{form: f, query: r.listed(f)})
	for i := range maxViews + 10 {
		r.answer(ask{form: f, verb: "list", user: fmt.Sprint(i)})
		if r.sessions.n > maxViews+1 {
			t.Fatalf("%d views, want at most %d", r.sessions.n, maxViews)
		}
	}
	r.accounts(t)
	s.set("a", "red")
	if got := live.next(); !strings.HasPrefix(got, "DELETED a") {
		t.Errorf("watch = %q, want DELETED", got)
	}
	live.body.Close()
	// All can be forgotten, and then nothing is counted.
	r.sessions.mu.Lock()
	for _, list := range r.sessions.byKey {
		for _, v := range list {
			r.sessions.forget(v)
		}
	}
	if r.sessions.n != 0 || r.sessions.bytes != 0 {
		t.Errorf("%d views of %d bytes after all were forgotten, want 0, 0", r.sessions.n, r.sessions.bytes)
	}
	r.sessions.mu.Unlock()
}

// TestForgottenViewTakesNoRoom: a Read beside a Close may come after the view is gone.
func TestForgottenViewTakesNoRoom(t *testing.T) {
	r := newRig(t, newServer(t), entry(wild, true))
	v := &view{sessions: r.sessions, held: map[string][]byte{}}
	r.sessions.n++
	v.hold("a", []byte("abc"), "7")
	r.sessions.mu.Lock()
	r.sessions.forget(v)
	r.sessions.mu.Unlock()
	v.hold("b", []byte("abc"), "8")
	if r.sessions.bytes != 0 || r.sessions.n != 0 {
		t.Errorf("sessions count %d bytes, %d views after the last was forgotten, want 0, 0", r.sessions.bytes, r.sessions.n)
	}
}

// TestRoomForObjects: beyond maxHeldBytes clients list again instead of being told that
// an object is gone.
func TestRoomForObjects(t *testing.T) {
	s := newServer(t)
	s.set("a", "green")
	f := forms[0]
	r := newRig(t, s, entry(wild, true))
	r.sessions.bytes = maxHeldBytes
	w := r.mustWatch(ask{form: f, query: r.listed(f)})
	s.set("a", "blue")
	w.want("MODIFIED a blue 12 seen")
	s.set("a", "red")
	w.want(gone, "EOF")
	w.body.Close()
	if r.sessions.bytes != maxHeldBytes {
		t.Errorf("%d bytes are counted, want %d", r.sessions.bytes, maxHeldBytes)
	}
}

// TestRotatedTokenResumes: another credential of the same user is the same client, another
// pod of the same service account is not.
func TestRotatedTokenResumes(t *testing.T) {
	s := newServer(t)
	r := newRig(t, s, entry(wild, true))
	as := func(a ask, extra map[string][]string) *http.Request {
		req := a.request(t.Context())
		return req.WithContext(request.WithUser(req.Context(), &user.DefaultInfo{Name: "kubelet", Extra: extra}))
	}
	resp, err := r.RoundTrip(as(ask{form: forms[0], verb: "list"}, map[string][]string{user.CredentialIDKey: {"JTI=1"}, "pod": {"a"}}))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	for _, tc := range []struct {
		pod  string
		want bool
	}{{"b", false}, {"a", true}} {
		extra := map[string][]string{user.CredentialIDKey: {"JTI=2"}, "pod": {tc.pod}}
		resp, err := r.RoundTrip(as(ask{form: forms[0], verb: "watch", query: at(10)}, extra))
		if (err == nil) != tc.want {
			t.Errorf("watch with a rotated token in pod %s = %v, want accepted: %t", tc.pod, err, tc.want)
		}
		if err == nil {
			resp.Body.Close()
		}
		if len(extra) != 2 {
			t.Error("the user was changed")
		}
	}
}

// TestFormerAfterARestart: what was in force before one may be what a client still holds,
// however long it had been in force, and through a second restart.
func TestFormerAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		s.set("a", "red")
		f := forms[0]
		var kept []byte
		start := func(off bool) *rig {
			var former []Former
			if kept != nil {
				if err := json.Unmarshal(kept, &former); err != nil {
					t.Fatal(err)
				}
			}
			e := entry(dropping("red"), true)
			e.Default = false
			c, err := New(Config{Next: s, Entries: []Entry{e}, Former: former, Remember: func(f []Former) {
				var err error
				if kept, err = json.Marshal(f); err != nil {
					t.Error(err)
				}
			}})
			if err != nil {
				t.Fatal(err)
			}
			r := &rig{Chain: c, t: t}
			r.use([]Rule{{Name: "drop", Disabled: off}})
			return r
		}
		start(false)
		<-time.After(3 * formerAge)
		for range 3 {
			r := start(true)
			if _, code := r.watch(ask{form: f, query: at(11)}); code != http.StatusGone {
				t.Errorf("watch that began before the restart answered %d, want 410", code)
			}
			r.mustWatch(ask{form: f, query: r.listed(f)}).body.Close()
		}
		<-time.After(formerAge + time.Hour)
		r := start(true)
		r.use([]Rule{{Name: "drop", Disabled: true}})
		w := r.mustWatch(ask{form: f, query: at(11)})
		w.body.Close()
	})
}

// TestFrameOfOldFilters: what was judged when the filters changed is not sent any more.
func TestFrameOfOldFilters(t *testing.T) {
	s := newServer(t)
	d := newDependency("red")
	pool := withholding(d)
	inner := pool.apply
	var r *rig
	pool.apply = func(o *Object) (Verdict, error) {
		defer func() {
			d.set("green", nil)
			r.expireWatches()
		}()
		return inner(o)
	}
	r = newRig(t, s, entry(pool, true))
	w := r.mustWatch(ask{form: forms[0], query: watchList})
	w.want("BOOKMARK 10")
	s.set("a", "green")
	w.want(gone, "EOF")
	w.body.Close()
	r.accounts(t)
}

// TestWhoIsToldGoesOn after a list at once, at the resourceVersion at which it was told,
// whether the server has noticed that the old watch is over or not.
func TestWhoIsToldGoesOn(t *testing.T) {
	for _, closed := range []bool{false, true} {
		s := newServer(t)
		d := newDependency("red")
		r := newRig(t, s, entry(withholding(d), true))
		w := r.mustWatch(ask{form: forms[0], query: r.listed(forms[0])})
		d.set("green", nil)
		r.expireWatches()
		w.want(gone, "EOF")
		if closed {
			w.body.Close()
		}
		r.mustWatch(ask{form: forms[0], query: r.listed(forms[0])}).body.Close()
		w.body.Close()
		r.accounts(t)
	}
}

// TestOneIsToldAndOneIsNot: of two that have listed one has not come back yet when the
// filters change, and could be who comes then.
func TestOneIsToldAndOneIsNot(t *testing.T) {
	s := newServer(t)
	d := newDependency("red")
	r := newRig(t, s, entry(withholding(d), true))
	r.listed(forms[0])
	w := r.mustWatch(ask{form: forms[0], query: r.listed(forms[0])})
	d.set("green", nil)
	r.expireWatches()
	w.want(gone, "EOF")
	w.body.Close()
	if _, code := r.watch(ask{form: forms[0], query: r.listed(forms[0])}); code != http.StatusGone {
		t.Errorf("watch of one of the two answered %d, want 410", code)
	}
	r.accounts(t)
}

// TestWhoseClaim: where either of two clients may have come back, the other one is still
// waited for.
func TestWhoseClaim(t *testing.T) {
	s := newServer(t)
	d := newDependency("red")
	f := forms[0]
	r := newRig(t, s, entry(withholding(d), true))
	refused := func(query string) {
		t.Helper()
		if _, code := r.watch(ask{form: f, query: query}); code != http.StatusGone {
			t.Errorf("watch?%s answered %d, want 410", query, code)
		}
	}
	one := r.listed(f)
	s.set("a", "blue")
	two := r.listed(f)
	w := r.mustWatch(ask{form: f, query: one})
	w.want("ADDED a blue 11")
	s.set("b", "blue")
	w.want("ADDED b blue 12")
	w.body.Close()
	d.set("blue", nil)
	refused(two)
	three := r.listed(f)
	refused(at(12)) // one, or three
	refused(three)
	r.accounts(t)
}
