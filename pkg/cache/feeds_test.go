// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
)

const mapsOfA = "/api/v1/namespaces/a/configmaps"

func shareMaps(c *Config) { c.Shared = []schema.GroupResource{{Resource: "configmaps"}} }

// watchesOf returns how many watches of ConfigMaps have been asked for upstream.
func (f *fakeServer) watchesOf() (n int) {
	for _, r := range f.seen() {
		if strings.Contains(r, "configmaps") && strings.Contains(r, "watch=") {
			n++
		}
	}
	return n
}

// An etcd that is restored to an older state: no watch goes on where it was, no
// watcher hangs, and what is cached is what was restored.
func TestHistoryIsSetBack(t *testing.T) {
	for _, cut := range []bool{true, false} {
		t.Run(fmt.Sprintf("cut=%t", cut), func(t *testing.T) {
			server := newFakeServer()
			server.put("configmaps/a/one", "1")
			server.put("secrets/a/quiet", "q")
			restore := server.backup()
			server.put("configmaps/a/one", "1b")
			server.put("configmaps/a/two", "2")
			server.put("secrets/a/loud", "l")
			h := startHub(t, t.TempDir(), server)
			h.guard.patience = time.Millisecond
			h.body(nodeUser, mapsOfA+"/two") // recorded by itself
			one, two := h.watchAs(nodeUser, allMaps+watchList), h.watchAs(alice, "/api/v1/namespaces/a/secrets"+watchList)
			one.want("ADDED a/one=1b@103", "ADDED a/two=2@104", "SYNCED @105")
			two.want("ADDED a/loud=l@105", "ADDED a/quiet=q@102", "SYNCED @105")
			if cut {
				server.setDown(true)
			}
			restore()
			server.setDown(false)
			for _, w := range []*watchClient{one, two} {
				if got := nextWithin(t, w); got != "ERROR 410" {
					t.Fatalf("after the reset: %s, want ERROR 410", got)
				}
			}
			one = h.watchAs(nodeUser, allMaps+watchList)
			one.want("ADDED a/one=1@101", "SYNCED @102")
			h.watchAs(alice, "/api/v1/namespaces/a/secrets"+watchList).want("ADDED a/quiet=q@102", "SYNCED @102")
			server.put("configmaps/a/three", "3")
			one.want("ADDED a/three=3@103")
			server.setDown(true)
			h.refusedGet(http.StatusNotFound, nodeUser, mapsOfA+"/two")
		})
	}
}

// Who comes from the history that was reset is told so, and not left waiting.
func TestClientOfAnotherHistory(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server)
	h.watchAs(nodeUser, allMaps+watchList).want("ADDED a/one=1@101", "SYNCED @101")
	h.refusedGet(http.StatusGone, nodeUser, allMaps+"?watch=true&resourceVersion=900")
}

func TestSharedFeed(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.readers = map[string]bool{"alice": true, "bob": true}
	dir := t.TempDir()
	h := startHub(t, dir, server, shareMaps)
	a := h.watchAs(alice, allMaps+watchList)
	a.want("ADDED a/one=1@101", "SYNCED @101")
	if got := texts(t, h.body(bob, allMaps+"?resourceVersion=0")); len(got) != 1 {
		t.Errorf("bob's list = %v, want one object", got)
	}
	b := h.watchAs(bob, allMaps+"?watch=true&allowWatchBookmarks=true&resourceVersion=101")
	server.put("configmaps/b/two", "2")
	for _, w := range []*watchClient{a, b} {
		w.want("ADDED b/two=2@102")
	}
	if got := server.seen(); len(got) != 1 {
		t.Errorf("upstream was asked %q, want one watch", got)
	}
	server.mu.Lock()
	server.readers["bob"] = false
	server.mu.Unlock()
	h.shares.mu.Lock()
	for a := range h.shares.allowed {
		h.shares.allowed[a] = time.Now().Add(-reviewAge)
	}
	h.shares.mu.Unlock()
	h.shares.reviewOpen(t.Context())
	if got := nextWithin(t, b); got != "end: EOF" {
		t.Errorf("bob, who lost the right: %s, want the end", got)
	}
	server.put("configmaps/b/three", "3")
	a.want("ADDED b/three=3@103")
	server.setDown(true)
	eventually(t, "the link is known to be down", func() bool { return !h.cfg.Upstream.Up() })
	h.refusedGet(http.StatusServiceUnavailable, bob, allMaps)
	h.refusedGet(http.StatusServiceUnavailable, &user.DefaultInfo{Name: "carol"}, allMaps)
	if got := texts(t, h.body(alice, allMaps)); len(got) != 3 {
		t.Errorf("alice's list offline = %v, want three objects", got)
	}
	h.stop()
	h = startHub(t, dir, server, shareMaps)
	if got := texts(t, h.body(alice, allMaps)); len(got) != 3 {
		t.Errorf("alice's list offline after a restart = %v, want three objects", got)
	}
	if got := texts(t, "{\"items\":["+h.body(alice, "/api/v1/namespaces/b/configmaps/two")+"]}"); len(got) != 1 {
		t.Errorf("alice's get offline = %v", got)
	}
	h.refusedGet(http.StatusServiceUnavailable, bob, allMaps)
}

// A 403 ends a guest's right at once.
func TestForbiddenGuest(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.readers = map[string]bool{"alice": true, "bob": true}
	h := startHub(t, t.TempDir(), server, shareMaps)
	a, b := h.watchAs(alice, allMaps+watchList), h.watchAs(bob, allMaps+watchList)
	for _, w := range []*watchClient{a, b} {
		w.want("ADDED a/one=1@101", "SYNCED @101")
	}
	server.mu.Lock()
	server.readers["bob"] = false
	server.refuse = func(req *http.Request) int {
		if req.Header.Get("Authorization") == "Bearer bob" {
			return http.StatusForbidden
		}
		return 0
	}
	server.mu.Unlock()
	if resp, err := h.do(t.Context(), bob, mapsOfA+"/one"); err != nil || resp.StatusCode != http.StatusForbidden {
		t.Fatalf("bob's get: %v, %v, want 403", resp, err)
	}
	if got := nextWithin(t, b); got != "end: EOF" {
		t.Errorf("bob's watch after a 403: %s, want the end", got)
	}
	server.setDown(true)
	h.refusedGet(http.StatusServiceUnavailable, bob, allMaps)
	h.body(alice, allMaps)
}

// Where the node may not read, everybody has a feed of its own.
func TestNodeMayNotRead(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.readers = map[string]bool{"alice": true}
	server.refuse = func(req *http.Request) int {
		if req.Header.Get("Authorization") == "" && strings.Contains(req.URL.Path, "configmaps") {
			return http.StatusForbidden
		}
		return 0
	}
	h := startHub(t, t.TempDir(), server, shareMaps)
	w := h.watchAs(alice, allMaps+watchList)
	w.want("ADDED a/one=1@101", "SYNCED @101")
	if got := texts(t, h.body(alice, allMaps+"?resourceVersion=0")); len(got) != 1 {
		t.Errorf("list = %v, want one object", got)
	}
}

// A watch of one namespace or name is served by the user's live feed of more.
func TestNarrowerWatchJoins(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.put("configmaps/b/two", "2")
	h := startHub(t, t.TempDir(), server)
	h.watchAs(alice, allMaps+watchList).want("ADDED a/one=1@101", "ADDED b/two=2@102", "SYNCED @102")
	ns := h.watchAs(alice, mapsOfA+watchList)
	ns.want("ADDED a/one=1@101", "SYNCED @102")
	name := h.watchAs(alice, allMaps+watchList+"&fieldSelector=metadata.name%3Dtwo")
	name.want("ADDED b/two=2@102", "SYNCED @102")
	server.put("configmaps/b/two", "2b")
	name.want("MODIFIED b/two=2b@103")
	server.del("configmaps/a/one")
	ns.want("DELETED a/one=1@104")
	ns.close()
	server.put("configmaps/a/four", "4")
	h.watchAs(alice, mapsOfA+"?watch=true&resourceVersion=103").want("DELETED a/one=1@104", "ADDED a/four=4@105")
	if n := server.watchesOf(); n != 1 {
		t.Errorf("%d watches upstream, want 1: %q", n, server.seen())
	}
}

// What may be as old as a live feed does not go to the API server.
func TestLiveFeedAnswers(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.put("configmaps/b/two", "2")
	h := startHub(t, t.TempDir(), server)
	w := h.watchAs(alice, allMaps+watchList)
	w.want("ADDED a/one=1@101", "ADDED b/two=2@102", "SYNCED @102")
	server.put("configmaps/b/two", "2b")
	w.want("MODIFIED b/two=2b@103")
	for path, want := range map[string]string{
		allMaps + "?resourceVersion=0":                                     "[a/one=1 b/two=2b]",
		"/api/v1/namespaces/b/configmaps?resourceVersion=0":                "[b/two=2b]",
		allMaps + "?resourceVersion=0&labelSelector=text%3D1":              "[a/one=1]",
		allMaps + "?resourceVersion=103&resourceVersionMatch=NotOlderThan": "[a/one=1 b/two=2b]",
		allMaps + "?resourceVersion=0&fieldSelector=metadata.name%3Dtwo":   "[b/two=2b]",
	} {
		if got := fmt.Sprint(texts(t, h.body(alice, path))); got != want {
			t.Errorf("%s = %s, want %s", path, got, want)
		}
	}
	if got := texts(t, `{"items":[`+h.body(alice, "/api/v1/namespaces/b/configmaps/two?resourceVersion=0")+"]}"); fmt.Sprint(got) != "[b/two=2b]" {
		t.Errorf("get = %s", got)
	}
	if got := server.seen(); len(got) != 1 {
		t.Errorf("upstream was asked %q, want one watch", got)
	}
	h.body(alice, "/api/v1/namespaces/b/configmaps/two")
	h.body(alice, allMaps)
	if got := server.seen(); len(got) != 3 {
		t.Errorf("upstream was asked %q, want a get and a list in addition", got)
	}
}

// A feed goes on with the credential of a request that is still open.
func TestFeedChangesCredential(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server)
	first, err := h.with(alice, "token-1", allMaps+watchList)
	if err != nil {
		t.Fatal(err)
	}
	second, err := h.with(alice, "token-2", allMaps+watchList)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Body.Close()
	first.Body.Close()
	eventually(t, "the feed is back with the other token", func() bool {
		server.mu.Lock()
		defer server.mu.Unlock()
		return server.tokens[len(server.tokens)-1] == "token-2"
	})
	for _, l := range h.allLogs() {
		l.mu.RLock()
		for _, s := range l.scopes {
			if s.feed != nil && len(s.feed.holders) != 1 {
				t.Errorf("the feed knows %d credentials, want the one that is in use", len(s.feed.holders))
			}
		}
		l.mu.RUnlock()
	}
}

// A watcher that never reads is ended when it is too far behind, gives its memory
// back, and holds up nobody.
func TestWatcherThatNeverReads(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server)
	quick, slow := h.watchAs(alice, allMaps+watchList), h.watchAs(alice, allMaps+watchList)
	for _, w := range []*watchClient{quick, slow} {
		w.want("ADDED a/one=1@101", "SYNCED @101")
	}
	text := strings.Repeat("x", 100<<10)
	for i := range 100 {
		server.put("configmaps/a/one", text)
		if got := quick.next(); !strings.HasPrefix(got, "MODIFIED a/one=xxx") {
			t.Fatalf("event %d = %.40s", i, got)
		}
	}
	l := theScope(t, h).log
	l.mu.RLock()
	for w := range theScope(t, h).watchers {
		w.queue.mu.Lock()
		if w.queue.bytes > maxQueueBytes {
			t.Errorf("%d bytes are queued, want at most %d", w.queue.bytes, maxQueueBytes)
		}
		w.queue.mu.Unlock()
	}
	l.mu.RUnlock()
	end := ""
	for end = slow.next(); strings.HasPrefix(end, "MODIFIED"); end = slow.next() {
	}
	if end != "end: EOF" {
		t.Errorf("slow watcher: %.60s, want the end", end)
	}
}

// Never older than what the user was shown: here by a watch of another scope.
func TestListIsNotOlderThanAWatch(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server)
	const none = "&fieldSelector=metadata.name%3Dnone"
	h.watchAs(alice, allMaps+watchList+none).want("SYNCED @101") // and stays where it is
	ns := h.watchAs(alice, mapsOfA+watchList)
	ns.want("ADDED a/one=1@101", "SYNCED @101")
	server.put("configmaps/a/one", "2")
	ns.want("MODIFIED a/one=2@102")
	before := len(server.seen())
	h.body(alice, allMaps+"?resourceVersion=0"+none)
	if len(server.seen()) == before {
		t.Error("the list was answered from a scope that is older than what the user has seen")
	}
}

// A WatchList goes upstream where it has to be as consistent as a list.
func TestStrictInitialList(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.StrictInitialList = true })
	for n := range 3 {
		h.watchAs(alice, allMaps+watchList).want("ADDED a/one=1@101", "SYNCED @101")
		eventually(t, "another watch upstream", func() bool { return server.watchesOf() >= n+2 }) // one is the feed's
	}
	server.setDown(true)
	h.watchAs(alice, allMaps+watchList).want("ADDED a/one=1@101", "SYNCED @101")
}

// Without a feed that would notice, a consistent list does.
func TestListAfterAReset(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	restore := server.backup()
	server.put("configmaps/a/two", "2")
	h := startHub(t, t.TempDir(), server)
	h.body(alice, allMaps)
	restore()
	for range 2 { // the first finds it out
		if got := texts(t, h.body(alice, allMaps)); len(got) != 1 {
			t.Errorf("list = %v, want one object", got)
		}
	}
	server.setDown(true)
	if got := texts(t, h.body(alice, allMaps)); len(got) != 1 {
		t.Errorf("list offline = %v, want what was restored", got)
	}
}

// A list that takes any state asks for none that is older than what was shown.
func TestAnyIsNotOlderThanShown(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server)
	h.body(alice, allMaps)
	h.body(alice, allMaps+"?resourceVersion=0&limit=500")
	h.body(alice, mapsOfA+"/one?resourceVersion=0")
	want := "GET /api/v1/configmaps, GET /api/v1/configmaps?resourceVersion=101&resourceVersionMatch=NotOlderThan, GET /api/v1/namespaces/a/configmaps/one?resourceVersion=101"
	if got := strings.Join(server.seen(), ", "); got != want {
		t.Errorf("upstream was asked %s, want %s", got, want)
	}
}

// A watch that the API server serves itself goes on from the feed when the link is cut.
func TestPassingWatchThroughACut(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.StrictInitialList = true })
	w := h.watchAs(alice, allMaps+watchList)
	w.want("ADDED a/one=1@101", "SYNCED @101")
	go server.put("configmaps/a/one", "2") // the fake waits for who reads
	w.want("MODIFIED a/one=2@102")
	eventually(t, "the feed has seen it, too", func() bool {
		s := theScope(t, h)
		s.log.mu.RLock()
		defer s.log.mu.RUnlock()
		return s.rv == "102"
	})
	server.setDown(true)
	server.put("configmaps/a/one", "3")
	server.setDown(false)
	w.want("MODIFIED a/one=3@103")
}

// A list is on record when its client has the last byte of it, and so the watch that
// follows joins the feed that it opens.
func TestListThenWatch(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	up := &intercept{fakeServer: server, answer: func(req *http.Request) *http.Response {
		resp, err := server.RoundTrip(req)
		if err == nil && req.URL.Query().Get("watch") == "" {
			body, _ := io.ReadAll(resp.Body)
			resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
		}
		return resp
	}}
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.Upstream = up })
	resp, err := h.do(t.Context(), alice, allMaps)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(resp.Body, make([]byte, resp.ContentLength)); err != nil {
		t.Fatal(err)
	}
	w := h.watchAs(alice, allMaps+"?watch=true&resourceVersion=101")
	server.put("configmaps/a/two", "2")
	w.want("ADDED a/two=2@102")
	if n := server.watchesOf(); n != 1 {
		t.Errorf("%d watches upstream, want the feed's: %q", n, server.seen())
	}
}

// The first sync has overtaken the list: the watch that goes on from the list is told
// the difference by the feed all the same.
func TestWatchFromAnOvertakenList(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/gone", "1")
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server)
	list, err := h.do(t.Context(), alice, allMaps) // at 102, and read later
	if err != nil {
		t.Fatal(err)
	}
	server.put("configmaps/a/one", "2")
	server.put("configmaps/a/two", "1")
	h.watchAs(alice, allMaps+watchList).want("ADDED a/gone=1@101", "ADDED a/one=2@103", "ADDED a/two=1@104", "SYNCED @104")
	server.del("configmaps/a/gone")
	eventually(t, "the feed has seen it", func() bool {
		s := theScope(t, h)
		s.log.mu.RLock()
		defer s.log.mu.RUnlock()
		return s.rv == "105"
	})
	io.Copy(io.Discard, list.Body)
	h.watchAs(alice, allMaps+"?watch=true&resourceVersion=102").want("MODIFIED a/one=2@103", "ADDED a/two=1@104", "DELETED a/gone=1@105")
	if n := server.watchesOf(); n != 1 {
		t.Errorf("%d watches upstream, want the feed's: %q", n, server.seen())
	}
}

// A reflector whose watch was ended by a reset lists from where it was.
func TestListAheadOfAReset(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	restore := server.backup()
	server.put("configmaps/a/one", "2")
	h := startHub(t, t.TempDir(), server)
	h.guard.patience = time.Millisecond
	w := h.watchAs(alice, allMaps+watchList)
	w.want("ADDED a/one=2@102", "SYNCED @102")
	restore()
	if got := nextWithin(t, w); got != "ERROR 410" {
		t.Fatalf("after the reset: %s", got)
	}
	h.refusedGet(http.StatusGone, alice, allMaps+"?resourceVersion=102")
}

// What came and went while a client was away, it is not told.
func TestCameAndWent(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server)
	w := h.watchAs(nodeUser, allMaps+watchList)
	w.want("ADDED a/one=1@101", "SYNCED @101")
	server.put("configmaps/a/two", "1")
	server.del("configmaps/a/two")
	w.want("ADDED a/two=1@102", "DELETED a/two=1@103")
	server.put("configmaps/a/three", "1")
	w.want("ADDED a/three=1@104")
	h.watchAs(nodeUser, allMaps+"?watch=true&resourceVersion=101").want("ADDED a/three=1@104")
}
