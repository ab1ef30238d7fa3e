// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"

	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

// intercept puts a test between the cache and the fake API server.
type intercept struct {
	*fakeServer
	answer func(*http.Request) *http.Response                 // nil: the fake's
	later  atomic.Pointer[func(*http.Request) *http.Response] // in its place, once set
}

func (i *intercept) RoundTrip(req *http.Request) (*http.Response, error) {
	if i.Up() {
		answer := i.answer
		if later := i.later.Load(); later != nil {
			answer = *later
		}
		if resp := answer(req); resp != nil {
			return resp, nil
		}
	}
	return i.fakeServer.RoundTrip(req)
}

// stream answers a watch with what is written to the pipe.
func stream(req *http.Request) (*http.Response, *io.PipeWriter) {
	r, w := io.Pipe()
	resp := fakeAnswer(req, http.StatusOK, "")
	resp.Body = r
	go func() {
		<-req.Context().Done()
		w.CloseWithError(req.Context().Err())
	}()
	return resp, w
}

func frame(kind, key string, rv int, text string) string {
	return fmt.Sprintf("{\"type\":%q,\"object\":%s}\n", kind, fakeJSON(key, fakeObject{rv: rv, text: text}, true))
}

func endOfInitial(rv int) string {
	return fmt.Sprintf(`{"type":"BOOKMARK","object":{"kind":"ConfigMap","apiVersion":"v1","metadata":{"resourceVersion":"%d","annotations":{"k8s.io/initial-events-end":"true"}}}}`+"\n", rv)
}

// within fails the test when do takes longer than a few seconds.
func within(t *testing.T, what string, do func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); do() }()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Fatalf("not within 5 s: %s", what)
	}
}

// nextWithin is next with a deadline.
func nextWithin(t *testing.T, w *watchClient) string {
	t.Helper()
	got := make(chan string, 1)
	go func() { got <- w.next() }()
	select {
	case s := <-got:
		return s
	case <-time.After(3 * time.Second):
		return "nothing"
	}
}

func (h *hub) with(u user.Info, token, path string) (*http.Response, error) {
	h.t.Helper()
	req := httptest.NewRequestWithContext(h.t.Context(), http.MethodGet, path, nil)
	req.Header.Set("Authorization", "Bearer "+token)
	info, err := fakeResolver.NewRequestInfo(req)
	if err != nil {
		h.t.Fatal(err)
	}
	return h.RoundTrip(req.WithContext(request.WithUser(request.WithRequestInfo(req.Context(), info), u)))
}

func everything(*log) bool { return true }

func theScope(t *testing.T, h *hub) (found *scope) {
	t.Helper()
	for _, l := range h.allLogs() {
		l.mu.RLock()
		for _, s := range l.scopes {
			found = s
		}
		l.mu.RUnlock()
	}
	if found == nil {
		t.Fatal("no scope")
	}
	return found
}

// A list that passes by while the first sync of a feed is under way moves the
// scope beyond what the watchers of that sync were given; the events between are
// then dropped as known, and those watchers never see them.
func TestListOvertakesFirstSync(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "old") // 101
	pipes := make(chan *io.PipeWriter, 9)
	up := &intercept{fakeServer: server, answer: func(req *http.Request) *http.Response {
		if req.URL.Query().Get("watch") == "" {
			return nil
		}
		resp, w := stream(req)
		pipes <- w
		return resp
	}}
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.Upstream = up })
	go func() { // opens the feed
		if resp, err := h.do(t.Context(), alice, allMaps+watchList); err == nil {
			<-t.Context().Done()
			resp.Body.Close()
		}
	}()
	pipe := <-pipes
	io.WriteString(pipe, frame("ADDED", "configmaps/a/one", 101, "old"))
	eventually(t, "the first object is staged", func() bool {
		return h.count(func(s *scope) int {
			return btoi(s.feed != nil && s.feed.staging != nil && len(s.feed.staging.list) > 0)
		}) == 1
	})
	w := h.watchAs(alice, allMaps+watchList)
	w.want("ADDED a/one=old@101")
	server.put("configmaps/a/one", "new") // 102
	h.body(alice, allMaps)                // at 102
	go io.WriteString(pipe, endOfInitial(101)+frame("MODIFIED", "configmaps/a/one", 102, "new"))
	if got := nextWithin(t, w); got != "SYNCED @101" {
		if !strings.HasPrefix(got, "end") && !strings.HasPrefix(got, "ERROR") {
			t.Errorf("after the initial events = %s", got)
		}
		return // it asks again
	}
	if got := nextWithin(t, w); got != "MODIFIED a/one=new@102" && !strings.HasPrefix(got, "end") && !strings.HasPrefix(got, "ERROR") {
		t.Errorf("after the sync at 101 = %s, want MODIFIED a/one=new@102", got)
	}
}

// Between the initial events and their bookmark a server may send live events
// (client-go's reflector handles all three kinds there).
func TestDeletedBeforeTheBookmark(t *testing.T) {
	server := newFakeServer()
	up := &intercept{fakeServer: server, answer: func(req *http.Request) *http.Response {
		if req.URL.Query().Get("watch") == "" {
			return nil
		}
		resp, w := stream(req)
		go io.WriteString(w, frame("ADDED", "configmaps/a/one", 101, "1")+frame("ADDED", "configmaps/a/two", 102, "2")+
			frame("DELETED", "configmaps/a/one", 103, "1")+frame("MODIFIED", "configmaps/a/two", 104, "2b")+endOfInitial(104))
		return resp
	}}
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.Upstream = up })
	w := h.watchAs(alice, allMaps+watchList)
	held := map[string]string{}
	for {
		e := w.next()
		if strings.HasPrefix(e, "SYNCED") || strings.HasPrefix(e, "end") {
			break
		}
		kind, what, _ := strings.Cut(e, " ")
		name, _, _ := strings.Cut(what, "=")
		if held[name] = what; kind == "DELETED" {
			delete(held, name)
		}
	}
	want := map[string]string{"a/two": "a/two=2b@104"}
	if d := cmp.Diff(want, held); d != "" {
		t.Errorf("state that the first watcher was given (-want +got):\n%s", d)
	}
	if got := texts(t, h.body(alice, allMaps+"?resourceVersion=0")); !cmp.Equal(got, []string{"a/two=2b"}) {
		t.Errorf("list from the feed = %v, want a/two=2b alone", got)
	}
}

// The hub is killed before it has flushed; the client has seen more than the hub
// remembers, the history is gone, and what the client has seen is deleted.
func TestClientAheadOfARelist(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1") // 101
	key := t.TempDir() + "/key"
	fs := memfs.New()
	h := coldHub(t, fs, server, key)
	w := h.watchAs(nodeUser, allMaps+watchList)
	w.want("ADDED a/one=1@101", "SYNCED @101")
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	server.put("configmaps/a/ghost", "g") // 102
	w.want("ADDED a/ghost=g@102")
	server.setDown(true)
	h2 := reopen(t, fs.Kill(), server, key)
	w2 := h2.watchAs(nodeUser, allMaps+"?watch=1&allowWatchBookmarks=true&resourceVersion=102")
	server.del("configmaps/a/ghost")     // 103
	server.put("configmaps/a/three", "") // 104
	server.forget()
	server.setDown(false)
	for {
		switch got := nextWithin(t, w2); {
		case strings.HasPrefix(got, "DELETED a/ghost"), strings.HasPrefix(got, "ERROR 410"):
			return
		case strings.HasPrefix(got, "BOOKMARK"), got == "nothing", strings.HasPrefix(got, "end"):
			t.Fatalf("%s: the client is at 104 and was never told that a/ghost is gone", got)
		}
	}
}

// A big batch fails in the middle, after the scope was cleared on disk. The next
// flush says that the scope is complete, and clears what the first part wrote.
func TestHalfWrittenScopeIsShort(t *testing.T) {
	for n := 1; n < 14; n++ {
		halfWritten(t, n)
	}
}

func halfWritten(t *testing.T, good int) {
	server := newFakeServer()
	server.put("configmaps/a/m0", "small")
	key := t.TempDir() + "/key"
	fs := memfs.New()
	h := coldHub(t, fs, server, key)
	h.body(alice, allMaps)
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	theScope(t, h).damagedRead(journal.ErrDamaged) // what a checksum that fails does
	for i := range 4 {
		server.put(fmt.Sprintf("configmaps/a/m%d", i), strings.Repeat("x", 600<<10))
	}
	h.body(alice, allMaps)
	syncs := 0
	fs.SetFault(func(op memfs.Op) error {
		if op.Name == "write" {
			syncs++
		}
		if syncs > good {
			return syscall.ENOSPC
		}
		return nil
	})
	if err := h.flushAll(everything); err == nil {
		return
	}
	fs.SetFault(nil)
	l := theScope(t, h).log
	l.mu.Lock()
	l.touch(true)
	l.mu.Unlock()
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	server.setDown(true)
	h.stop()
	h2 := reopen(t, fs.Kill(), server, key)
	resp, err := h2.do(t.Context(), alice, allMaps)
	if err != nil {
		return // an error is not short
	}
	b, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil {
		return
	}
	if got := len(texts(t, string(b))); got != 4 {
		t.Errorf("disk full after %d writes, then not: list after a restart has %d objects, want 4", good, got)
	}
}
