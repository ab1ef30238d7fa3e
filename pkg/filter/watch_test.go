// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/watch"
)

const (
	watchList = "allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan"
	gone      = "ERROR 410"
)

func at(rv int) string { return fmt.Sprintf("allowWatchBookmarks=true&resourceVersion=%d", rv) }

// listed lists, and returns where the client may go on.
func (r *rig) listed(f form) string {
	r.t.Helper()
	code, body, _ := r.answer(ask{form: f, verb: "list"})
	if code != http.StatusOK {
		r.t.Fatalf("list answered %d", code)
	}
	_, list := decodeList(r.t, f.rep, body)
	return "allowWatchBookmarks=true&resourceVersion=" + list.ResourceVersion
}

// TestWatchByEvents: what an event is for a client that is shown no red objects.
func TestWatchByEvents(t *testing.T) {
	for _, f := range forms {
		for _, begin := range []string{"list", "watchlist", "zero", "nothing", "watchlist from", "true in other words"} {
			t.Run(f.name+"/"+begin, func(t *testing.T) {
				s := newServer(t)
				s.set("seen", "green")
				s.set("hidden", "red")
				r := newRig(t, s, entry(wild, true))
				query := map[string]string{"watchlist": watchList, "zero": "allowWatchBookmarks=true&resourceVersion=0", "nothing": "allowWatchBookmarks=true", "watchlist from": watchList + "&resourceVersion=11", "true in other words": "allowWatchBookmarks=true&sendInitialEvents=1&resourceVersion=11"}[begin]
				if begin == "list" {
					query = r.listed(f)
				}
				w := r.mustWatch(ask{form: f, query: query})
				defer w.body.Close()
				if begin != "list" {
					w.want("ADDED seen green 11", "BOOKMARK 12")
				}
				s.set("hidden", "green")
				w.want("ADDED hidden green 13")
				s.set("hidden", "blue")
				w.want("MODIFIED hidden blue 14 seen")
				s.set("hidden", "red")
				w.want("DELETED hidden blue 15 seen") // as the client held it
				s.set("hidden", "")
				s.set("new", "red")
				s.set("new", "")
				s.set("seen", "")
				w.want("DELETED seen green 19")
				s.bookmark(true)
				w.want("BOOKMARK 20")
				s.set("seen", "blue")
				w.want("ADDED seen blue 21 seen")
				s.set("seen", "")
				w.want("DELETED seen blue 22 seen")
				r.accounts(t)
			})
		}
	}
}

// TestWatchKeepsBytes: where nothing is changed the stream is the server's.
func TestWatchKeepsBytes(t *testing.T) {
	for _, f := range forms {
		s := newServer(t)
		s.chunk = 3
		r := newRig(t, s, entry(wild, true))
		resp, err := r.RoundTrip(ask{form: f, verb: "watch", query: watchList}.request(t.Context()))
		if err != nil {
			t.Fatal(err)
		}
		shape, _ := thing{}.encode(t, f)
		want := shape.AppendBookmark(nil, "10", true)
		for i := range 5 {
			o := thing{name: fmt.Sprint(i), color: "green", rv: s.set(fmt.Sprint(i), "green")}
			shape, bare := o.encode(t, f)
			want = shape.AppendFrame(want, watch.Added, bare)
		}
		s.bookmark(true)
		want = shape.AppendBookmark(want, "16", false)
		got := make([]byte, len(want))
		if _, err := io.ReadFull(resp.Body, got); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: watch = %q, %v, want %q", f.name, got, err, want)
		}
		resp.Body.Close()
		if n := s.watches(); n != 0 {
			t.Errorf("%d watches go on after Close()", n)
		}
	}
}

// TestErrorEventsPass and end the watch.
func TestErrorEventsPass(t *testing.T) {
	const event = `{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"m","reason":"Expired","code":410}}` + "\n"
	r := newRig(t, roundTrip(func(req *http.Request) (*http.Response, error) {
		return respond(req, 200, "application/json", io.NopCloser(strings.NewReader(event+"junk"))), nil
	}), entry(wild, true))
	if _, got, _ := r.answer(ask{form: forms[0], verb: "watch"}); string(got) != event {
		t.Errorf("watch = %q, want %q", got, event)
	}
	if n := r.metric("objects", "wild", "error"); n != 0 {
		t.Errorf("filters were asked of an ERROR event")
	}
}

// TestResume: where a watch may begin.
func TestResume(t *testing.T) {
	for _, withholds := range []bool{true, false} {
		s := newServer(t)
		s.set("a", "green")
		f := forms[0]
		r := newRig(t, s, entry(wild, withholds))
		refused := func(name string, a ask) {
			t.Helper()
			if a.resource.Resource == "" {
				a.form = f
			}
			if _, code := r.watch(a); code != http.StatusGone {
				t.Errorf("%s (withholds %t): watch answered %d, want 410", name, withholds, code)
			}
			r.accounts(t)
		}
		refused("nothing was shown", ask{query: at(11)})
		first := r.listed(f)
		refused("before the list", ask{query: at(10)})
		refused("after the list", ask{query: at(12)})
		refused("other user", ask{query: first, user: "other"})
		refused("other program", ask{query: first, program: "other"})
		refused("other selector", ask{query: first + "&labelSelector=a"})
		refused("other field selector", ask{query: first + "&fieldSelector=a"})
		refused("other resource", ask{form: forms[2], query: first})
		refused("junk", ask{query: "resourceVersion=abc"})

		w := r.mustWatch(ask{form: f, query: first})
		s.set("b", "green")
		w.want("ADDED b green 12")
		s.set("b", "blue")
		w.want("MODIFIED b blue 13 seen")
		w.body.Close()
		s.set("b", "green")
		s.set("a", "")
		again := ask{form: f, query: at(13), path: "/api/v1/watch/namespaces/shop/services"}
		w = r.mustWatch(again)
		w.want("MODIFIED b green 14", "DELETED a green 15")
		s.breakOff()
		w.want("unexpected EOF")
		w.body.Close()
		// In the other encoding what the client holds is known, but not its bytes.
		proto := ask{form: forms[1], query: at(15)}
		w = r.mustWatch(proto)
		s.set("b", "blue")
		w.want("MODIFIED b blue 16 seen")
		if withholds {
			s.set("b", "red")
			w.want("DELETED b blue 17 seen")
		}
		w.body.Close()
		r.accounts(t)
	}
}

// TestResumeWithoutBytes: who holds an object whose bytes are not remembered in the form
// of its watch lists again when it is to lose it.
func TestResumeWithoutBytes(t *testing.T) {
	s := newServer(t)
	s.set("a", "green")
	r := newRig(t, s, entry(wild, true))
	query := r.listed(forms[0])
	w := r.mustWatch(ask{form: forms[1], query: query})
	s.set("a", "red")
	w.want(gone, "EOF")
	w.body.Close()
	if n := r.metric("expired", "room"); n != 1 {
		t.Errorf("edgehub_filter_expired_total{room} = %v, want 1", n)
	}
	// Another one of the same kind still holds it, and learns that it is gone.
	w = r.mustWatch(ask{form: forms[0], query: query})
	w.want("DELETED a green 12")
	w.body.Close()
	// Nor does a watch that ended so forget that its client holds it.
	r.sessions.mu.Lock()
	for key, list := range r.sessions.byKey {
		if !list[0].rep.Protobuf {
			for _, v := range list {
				r.sessions.forget(v)
			}
			delete(r.sessions.byKey, key)
		}
	}
	r.sessions.mu.Unlock()
	w = r.mustWatch(ask{form: forms[1], query: query})
	w.want(gone, "EOF")
	w.body.Close()
	r.accounts(t)
}

// TestResumeDuringInitialEvents: resourceVersions of initial events are no place to go on
// from, since nobody knows what was still to come; later ones are.
func TestResumeDuringInitialEvents(t *testing.T) {
	for _, withholds := range []bool{true, false} {
		for _, query := range []string{"", "resourceVersion=0", "allowWatchBookmarks=true", watchList} {
			s := newServer(t)
			s.set("a", "green")
			f := forms[0]
			r := newRig(t, s, entry(wild, withholds))
			w := r.mustWatch(ask{form: f, query: query})
			w.want("ADDED a green 11")
			if query != "" && query != "resourceVersion=0" {
				// The bookmark is not read.
				if _, code := r.watch(ask{form: f, query: at(11)}); code != 410 {
					t.Errorf("watch?%s resumed before its bookmark answered %d, want 410", query, code)
				}
				w.want("BOOKMARK 11")
				w.body.Close()
				r.mustWatch(ask{form: f, query: at(11)}).body.Close()
				continue
			}
			if _, code := r.watch(ask{form: f, query: at(11)}); code != 410 {
				t.Errorf("watch?%s resumed during initial events answered %d, want 410", query, code)
			}
			s.set("a", "blue")
			w.want("MODIFIED a blue 12 seen")
			w.body.Close()
			w = r.mustWatch(ask{form: f, query: at(12)})
			s.set("a", "")
			w.want("DELETED a blue 13 seen")
			w.body.Close()
			r.accounts(t)
		}
	}
}
