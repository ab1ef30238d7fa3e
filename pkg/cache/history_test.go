// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

// The first sync compares its end with the scope's resourceVersion after the API
// server has answered; a LIST that was recorded meanwhile looks like a reset.
func TestListDuringConnectIsNoReset(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	var h *hub
	var once sync.Once
	up := &intercept{fakeServer: server}
	up.answer = func(req *http.Request) (resp *http.Response) {
		if req.URL.Query().Get("sendInitialEvents") != "true" {
			return nil
		}
		once.Do(func() {
			resp, _ = server.RoundTrip(req) // the state at 101, on its way
			server.put("secrets/x/other", "2")
			h.body(alice, allMaps) // complete at 102 before the feed has its answer
		})
		return resp
	}
	h = startHub(t, t.TempDir(), server, func(c *Config) { c.Upstream = up })
	w := h.watchAs(alice, allMaps+watchList)
	for range 2 {
		w.next()
	}
	if got := testutil.ToFloat64(h.metrics.historyResets); got != 0 {
		t.Errorf("%v resets of the history, want none", got)
	}
}

// The guard compares its read with what is on record of Nodes after the read; an
// update of the Node that is recorded meanwhile looks like a reset, of everything.
func TestNodeUpdateDuringGuardIsNoReset(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.put("nodes//n1", "n")
	var h *hub
	up := &intercept{fakeServer: server}
	up.answer = func(req *http.Request) *http.Response {
		if req.URL.Path != "/api/v1/nodes" {
			return nil
		}
		resp, _ := server.RoundTrip(req)
		server.put("nodes//n1", "heartbeat")
		server.put("configmaps/a/two", "2")
		h.body(nodeUser, "/api/v1/nodes/n1")
		h.body(alice, mapsOfA+"/two")
		return resp
	}
	h = startHub(t, t.TempDir(), server, func(c *Config) { c.Upstream = up })
	h.body(alice, mapsOfA+"/one")
	if _, err := h.guard.now(t.Context()); err != nil {
		t.Fatal(err)
	}
	server.setDown(true)
	h.body(alice, mapsOfA+"/one")
}

// A client's resourceVersion, whatever it is, counts as shown to the user; from then
// on lists at resourceVersion=0 ask the API server for it and get 504. A guest of a
// shared feed does that to the node.
func TestToldIsNotTheClientsWord(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.readers = map[string]bool{"alice": true}
	h := startHub(t, t.TempDir(), server, shareMaps)
	h.watchAs(alice, allMaps+watchList).want("ADDED a/one=1@101", "SYNCED @101")
	server.setDown(true)
	h.watchAs(alice, allMaps+"?watch=true&resourceVersion=900000000")
	server.setDown(false)
	if _, err := h.do(t.Context(), nodeUser, mapsOfA+"/two?resourceVersion=0"); err != nil {
		t.Fatal(err)
	}
	for _, r := range server.seen() {
		if strings.Contains(r, "900000000") {
			t.Errorf("the node asks %s", r)
		}
	}
}

// An API server of an extension that answers metadata-only requests in JSON: the watch
// asks again and again, without a pause, for as long as the client waits.
func TestPartialJSONDoesNotLoop(t *testing.T) {
	server := newFakeServer()
	h := startHub(t, t.TempDir(), server)
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	req := httptest.NewRequestWithContext(ctx, http.MethodGet, allMaps+watchList, nil)
	req.Header.Set("Authorization", "Bearer alice")
	req.Header.Set("Accept", "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1")
	info, err := fakeResolver.NewRequestInfo(req)
	if err != nil {
		t.Fatal(err)
	}
	if resp, err := h.RoundTrip(req.WithContext(request.WithUser(request.WithRequestInfo(ctx, info), alice))); err == nil {
		resp.Body.Close()
	}
	if n := len(server.seen()); n > 10 {
		t.Errorf("%d requests in a second, for one watch", n)
	}
}

// More than 512 deletions at once: the oldest tombstones give way before they are
// written, and a log that is written anew leaves their bytes behind, which events in
// a queue still need. Reading them ends the whole scope.
func TestManyDeletionsAndRewrite(t *testing.T) {
	server := newFakeServer()
	for i := range maxTombstones + 100 {
		server.put(fmt.Sprintf("configmaps/a/o%04d", i), "1")
	}
	h := coldHub(t, memfs.New(), server, t.TempDir()+"/key")
	defer h.stop()
	w := h.watchAs(alice, allMaps+watchList)
	for range maxTombstones + 101 {
		w.next()
	}
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	s := theScope(t, h)
	s.log.mu.Lock()
	if err := s.replace(s.shape, "5000", map[string]*object{}); err != nil {
		t.Fatal(err)
	}
	s.log.rewriteSoon()
	s.log.mu.Unlock()
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	for range maxTombstones + 100 {
		got := w.next()
		if got == "end: EOF" {
			break // too late for what the state has forgotten: it asks again
		}
		if !strings.HasPrefix(got, "DELETED") {
			t.Fatalf("next event = %s, want a deletion, or the end", got)
		}
	}
}

// The sync for API servers without WatchList does not remember where it began, so a
// reset that only it could find is not found: the old state is live, and silent.
func TestListSyncFindsReset(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	restore := server.backup()
	server.put("configmaps/a/two", "2")
	var mu sync.Mutex
	broken := 0
	server.refuse = func(req *http.Request) int {
		mu.Lock()
		defer mu.Unlock()
		switch q := req.URL.Query(); {
		case q.Get("sendInitialEvents") == "true":
			return http.StatusUnprocessableEntity
		case broken == 1 && q.Get("watch") == "true":
			broken = 2
			return http.StatusGone
		case broken == 2 && !strings.Contains(req.URL.Path, "nodes"):
			return http.StatusInternalServerError
		}
		return 0
	}
	h := startHub(t, t.TempDir(), server)
	w := h.watchAs(alice, allMaps+"?watch=true")
	w.want("ADDED a/one=1@101", "ADDED a/two=2@102")
	set := func(n int) { mu.Lock(); broken = n; mu.Unlock() }
	set(1)
	server.setDown(true)
	server.setDown(false)
	eventually(t, "the history is too old", func() bool { mu.Lock(); defer mu.Unlock(); return broken == 2 })
	restore()
	set(0)
	n := len(server.seen())
	eventually(t, "the feed watches again", func() bool {
		seen := server.seen()[n:]
		return len(seen) > 0 && strings.Contains(seen[len(seen)-1], "&watch=true") && !strings.Contains(seen[len(seen)-1], "sendInitial")
	})
	if got := nextWithin(t, w); got != "ERROR 410" {
		t.Errorf("after the reset: %s, want ERROR 410; asked %q", got, server.seen()[n:])
	}
}

// A LIST of the old history whose client reads it to the end after the reset becomes
// the state again: what the new history says up to there is dropped.
func TestListFromBeforeReset(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	restore := server.backup()
	for range 9 {
		server.put("configmaps/a/one", "old")
	}
	h := startHub(t, t.TempDir(), server)
	h.guard.patience = time.Millisecond
	w := h.watchAs(alice, allMaps+watchList)
	w.want("ADDED a/one=old@110", "SYNCED @110")
	slow, err := h.do(t.Context(), alice, allMaps)
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Body.Close()
	restore()
	if got := nextWithin(t, w); got != "ERROR 410" {
		t.Fatalf("after the reset: %s", got)
	}
	w = h.watchAs(alice, allMaps+watchList)
	w.want("ADDED a/one=1@101", "SYNCED @101")
	io.Copy(io.Discard, slow.Body)
	server.put("configmaps/a/one", "new")
	if got := nextWithin(t, w); got != "MODIFIED a/one=new@102" {
		t.Errorf("next event = %s, want what is new", got)
	}
}

// A file that cannot be opened for a moment (EMFILE) is taken for damage: offline the
// scope is thrown away, on disk too, with nobody to fetch it from.
func TestOpenErrorIsNoDamage(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	fs := memfs.New()
	h := coldHub(t, fs, server, t.TempDir()+"/key")
	defer h.stop()
	h.body(alice, allMaps)
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	server.setDown(true)
	fs.SetFault(func(op memfs.Op) error {
		if op.Name == "open" {
			return syscall.EMFILE
		}
		return nil
	})
	if resp, err := h.do(t.Context(), alice, allMaps); err == nil {
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	fs.SetFault(nil)
	h.body(alice, allMaps)
}

// The events of a first sync are read from wherever their objects lie; once such an
// object was written, replaced, and the log written anew, a watcher that is still
// reading fails, and takes that for damage: the scope ends, for everybody.
func TestSlowFirstWatcherAndRewrite(t *testing.T) {
	server := newFakeServer()
	const n = 500
	for i := range n {
		server.put(fmt.Sprintf("configmaps/a/o%04d", i), "1")
	}
	h := coldHub(t, memfs.New(), server, t.TempDir()+"/key")
	defer h.stop()
	slow := h.watchAs(alice, allMaps+watchList)
	slow.want("ADDED a/o0000=1@101")
	s := theScope(t, h)
	rv := func() string { s.log.mu.RLock(); defer s.log.mu.RUnlock(); return s.rv }
	eventually(t, "the sync is over", func() bool { return rv() == fmt.Sprint(100+n) })
	quick := h.watchAs(alice, allMaps+"?watch=true&resourceVersion="+rv())
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	server.put(fmt.Sprintf("configmaps/a/o%04d", n-1), "2")
	quick.want(fmt.Sprintf("MODIFIED a/o%04d=2@%d", n-1, 101+n))
	s.log.mu.Lock()
	s.log.rewriteSoon()
	s.log.mu.Unlock()
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	for range n - 1 {
		got := slow.next()
		if got == "end: EOF" {
			break // too late for what was replaced: it asks again
		}
		if !strings.HasPrefix(got, "ADDED") {
			t.Errorf("next event = %s, want the state, or the end", got)
			break
		}
	}
	server.put("configmaps/a/more", "3")
	if got := nextWithin(t, quick); !strings.HasPrefix(got, "ADDED a/more=3") {
		t.Errorf("the other watcher: %s", got)
	}
}

// A live feed without objects answers a field selector that the API server refuses
// with 400: an empty list says that there is nothing.
func TestUnknownFieldIsRefused(t *testing.T) {
	server := newFakeServer()
	h := startHub(t, t.TempDir(), server)
	h.watchAs(alice, allMaps+watchList).want("SYNCED @100")
	resp, err := h.do(t.Context(), alice, allMaps+"?resourceVersion=0&fieldSelector=spec.bogus%3Dx")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got := resp.Header.Get(SourceHeader); got != sourceUpstream {
		t.Errorf("answered by %s, want the API server's word", got)
	}
}

// Pages and gets that began in the old history end after the reset: what they say is
// recorded, and stays, because it is newer than all that the new history has.
func TestPagesAndGetsFromBeforeReset(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.put("configmaps/a/two", "1")
	restore := server.backup()
	for range 8 {
		server.put("configmaps/a/one", "old")
	}
	h := startHub(t, t.TempDir(), server)
	h.guard.patience = time.Millisecond
	w := h.watchAs(nodeUser, "/api/v1/secrets"+watchList)
	w.want("SYNCED @110")
	h.body(alice, allMaps+"?limit=1")
	get, err := h.do(t.Context(), alice, mapsOfA+"/one")
	if err != nil {
		t.Fatal(err)
	}
	defer get.Body.Close()
	restore()
	if got := nextWithin(t, w); got != "ERROR 410" {
		t.Fatalf("after the reset: %s", got)
	}
	io.Copy(io.Discard, get.Body)
	for range 8 {
		server.put("configmaps/a/two", "new")
	}
	h.body(alice, allMaps+"?limit=1&continue=1")
	h.body(alice, mapsOfA+"/one")
	server.setDown(true)
	if got := h.body(alice, mapsOfA+"/one"); strings.Contains(got, "old") {
		t.Errorf("get offline = %s", got)
	}
	if resp, err := h.do(t.Context(), alice, allMaps); err == nil {
		b, _ := io.ReadAll(resp.Body)
		t.Errorf("list offline = %v, half of it of the old history", texts(t, string(b)))
	}
}

// What a list found deleted is all at the list's resourceVersion. Only the last 512 are
// kept, and who resumes there after the first few is told these and no others: what is
// between stays with the client for ever.
func TestManyDeletionsResumed(t *testing.T) {
	server := newFakeServer()
	const n = maxTombstones + 100
	left := map[string]bool{}
	for i := range n {
		name := fmt.Sprintf("a/o%04d", i)
		server.put("configmaps/"+name, "1")
		left[name] = true
	}
	h := startHub(t, t.TempDir(), server)
	w := h.watchAs(alice, allMaps+watchList)
	for range n + 1 {
		w.next()
	}
	server.setDown(true) // who resumes is not sent upstream
	s := theScope(t, h)
	s.log.mu.Lock()
	if err := s.replace(s.shape, "5000", map[string]*object{}); err != nil {
		t.Fatal(err)
	}
	s.log.mu.Unlock()
	told := func(w *watchClient) {
		name, _, _ := strings.Cut(strings.TrimPrefix(w.next(), "DELETED "), "=")
		delete(left, name)
	}
	for range 10 {
		told(w)
	}
	w.close()
	resp, err := h.do(t.Context(), alice, allMaps+"?watch=true&resourceVersion=5000")
	if err != nil {
		return // 410: it lists
	}
	w = &watchClient{t: t, d: json.NewDecoder(resp.Body), cancel: func() {}, body: resp.Body}
	defer w.close()
	for range maxTombstones {
		told(w)
	}
	if len(left) > 0 {
		t.Errorf("%d deletions are never told", len(left))
	}
}

// An object that was changed at the very resourceVersion of a list comes before what the
// list found deleted, at the same one: who was cut between the two and resumes there is
// never told the deletion, if it is a single one.
func TestChangeAndDeletionAtOnce(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/gone", "1")
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server)
	w := h.watchAs(nodeUser, allMaps+watchList)
	w.want("ADDED a/gone=1@101", "ADDED a/one=1@102", "SYNCED @102")
	server.setDown(true)
	server.del("configmaps/a/gone")      // 103
	server.put("configmaps/a/one", "1b") // 104
	server.forget()
	server.setDown(false)
	w.want("MODIFIED a/one=1b@104")
	w.close() // before it has read on
	eventually(t, "the sync is over", func() bool {
		s := theScope(t, h)
		s.log.mu.RLock()
		defer s.log.mu.RUnlock()
		return s.rv == "104" && s.feed != nil && s.feed.live
	})
	w = h.watchAs(nodeUser, allMaps+"?watch=true&resourceVersion=104")
	if got := nextWithin(t, w); got != "DELETED a/gone=1@104" {
		t.Errorf("next event = %s, want the deletion", got)
	}
}

// A user's last watch ends, and the next one begins before the feed has noticed: it
// joins a feed that is over, and ends at once without a word.
func TestWatchAfterTheLast(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server)
	short := 0
	w := h.watchAs(alice, allMaps+watchList)
	w.want("ADDED a/one=1@101", "SYNCED @101")
	for range 200 {
		w.close()
		ctx, cancel := context.WithCancel(t.Context())
		resp, err := h.do(ctx, alice, allMaps+"?watch=true&resourceVersion=101")
		if err != nil {
			t.Fatal(err)
		}
		long := time.AfterFunc(20*time.Millisecond, cancel) // that is long for a watch that is over
		if _, err := resp.Body.Read(make([]byte, 100)); err == io.EOF {
			short++
		}
		long.Stop()
		cancel()
		resp.Body.Close()
		w = h.watchAs(alice, allMaps+"?watch=true&resourceVersion=101")
	}
	if short > 0 {
		t.Errorf("%d of 200 watches ended at once", short)
	}
}
