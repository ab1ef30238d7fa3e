// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bufio"
	"errors"
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
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

// What could not be written is tried again by itself.
func TestFailedFlushIsTriedAgain(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	fs := memfs.New()
	h := coldHub(t, fs, server, t.TempDir()+"/key")
	h.body(alice, allMaps)
	fs.SetFault(func(op memfs.Op) error { return syscall.ENOSPC })
	if err := h.flushAll(everything); err == nil {
		t.Fatal("flush = nil, want an error")
	}
	fs.SetFault(nil)
	if _, ok := h.nextFlush(); !ok {
		t.Error("nothing wants to be flushed after a flush that failed: it is neither tried again nor written at the end")
	}
}

// Between the swap of the segments by Rewrite and settle a reader has the new
// segments and the old refs.
func TestReadDuringRewrite(t *testing.T) {
	server := newFakeServer()
	for i := range 4 {
		server.put(fmt.Sprintf("configmaps/a/m%d", i), "x")
	}
	fs := memfs.New()
	h := coldHub(t, fs, server, t.TempDir()+"/key")
	h.body(alice, allMaps)
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	server.setDown(true)
	l := theScope(t, h).log
	l.mu.Lock()
	l.rewriteSoon()
	l.mu.Unlock()
	var failed error
	fs.SetFault(func(op memfs.Op) error {
		if op.Name == "readdir" { // for what is left of older segments: the swap is done
			func() {
				// The file system is busy here, so a good read would wait for ever.
				s := theScope(t, h)
				l.mu.Lock()
				w := s.listing().bodies()
				l.mu.Unlock()
				done := make(chan error, 1)
				go func() {
					_, err := w.read()
					w.close()
					w.listing.close()
					done <- err
				}()
				select {
				case err := <-done:
					failed = errors.Join(failed, err)
				case <-time.After(200 * time.Millisecond):
				}
			}()
		}
		return nil
	})
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	if failed != nil {
		t.Errorf("read of a scope while its log is written anew: %v; a list would end here and expire the scope", failed)
	}
}

// The pages of a list share objects with the scope. The scope is evicted between
// two pages, and the log is written anew.
func TestStagedRefsAfterRewrite(t *testing.T) {
	server := newFakeServer()
	for i := range 4 {
		server.put(fmt.Sprintf("configmaps/a/m%d", i), "x")
	}
	fs := memfs.New()
	h := coldHub(t, fs, server, t.TempDir()+"/key")
	h.body(alice, allMaps)
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	h.body(alice, allMaps+"?limit=2")
	if !h.evictOne(true) {
		t.Fatal("nothing to evict")
	}
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	h.body(alice, allMaps+"?limit=2&continue=2")
	for range 3 {
		err := h.flushAll(everything)
		if err != nil {
			t.Errorf("flush = %v; this log is never written again", err)
		}
		l := theScope(t, h).log
		l.mu.Lock()
		l.touch(true)
		l.mu.Unlock()
	}
	server.setDown(true)
	if resp, err := h.do(t.Context(), alice, allMaps); err == nil {
		if _, err := io.ReadAll(resp.Body); err != nil {
			t.Errorf("list = %v", err)
		}
		resp.Body.Close()
	}
}

// The same, but the log is not written anew: the new scope has the objects of the
// old one, its first flush fails, and they are never written.
func TestSharedObjectsAfterFailedFlush(t *testing.T) {
	server := newFakeServer()
	for i := range 4 {
		server.put(fmt.Sprintf("configmaps/a/m%d", i), "x")
	}
	fs := memfs.New()
	key := t.TempDir() + "/key"
	h := coldHub(t, fs, server, key)
	h.body(alice, allMaps)
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	h.body(alice, allMaps+"?limit=2")
	s := theScope(t, h)
	s.log.mu.Lock()
	s.log.drop(s) // as after a 403 to another request
	s.log.mu.Unlock()
	h.body(alice, allMaps+"?limit=2&continue=2")
	fs.SetFault(func(memfs.Op) error { return syscall.ENOSPC })
	if err := h.flushAll(everything); err == nil {
		t.Fatal("flush = nil, want an error")
	}
	fs.SetFault(nil)
	s.log.mu.Lock()
	s.log.touch(true)
	s.log.mu.Unlock()
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	h.stop()
	server.setDown(true)
	h = reopen(t, fs.Kill(), server, key)
	resp, err := h.do(t.Context(), alice, allMaps)
	if err != nil {
		return
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err == nil && len(texts(t, string(b))) != 4 {
		t.Errorf("list after a restart = %v, want 4 objects", texts(t, string(b)))
	}
}

// A watch that waits for a first sync is served with its first object, and then by
// the batch, not at its end (or after 20 s by a watch of its own).
func TestFirstSyncIsStreamed(t *testing.T) {
	server := newFakeServer()
	pipes := make(chan *io.PipeWriter, 9)
	up := &intercept{fakeServer: server, answer: func(req *http.Request) *http.Response {
		resp, w := stream(req)
		pipes <- w
		return resp
	}}
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.Upstream = up })
	first := make(chan struct{})
	go func() {
		pipe := <-pipes
		<-time.After(50 * time.Millisecond) // the API server has answered, and now reads etcd
		io.WriteString(pipe, frame("ADDED", "configmaps/a/o1", 101, "1"))
		<-first
		for i := 2; i <= 2*stagedBatch; i++ {
			io.WriteString(pipe, frame("ADDED", fmt.Sprintf("configmaps/a/o%d", i), 100+i, "1"))
		}
	}()
	within(t, "the first batches", func() {
		resp, err := h.do(t.Context(), alice, allMaps+watchList)
		if err != nil {
			t.Error(err)
			return
		}
		defer resp.Body.Close()
		lines := bufio.NewScanner(resp.Body)
		for i := range 2 * stagedBatch {
			if !lines.Scan() && t.Context().Err() == nil {
				t.Errorf("after %d objects: %v", i, lines.Err())
				return
			}
			if i == 0 {
				close(first)
			}
		}
	})
}

// Too many scopes are no reason to forget tokens, verdicts and discovery.
func TestEvictionOfScopesSparesResponses(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := coldHub(t, memfs.New(), server, t.TempDir()+"/key")
	t.Cleanup(h.stop)
	h.cfg.MaxScopes = 2
	h.PutResponse(nodeUser, "tokenrequest", "k", Response{Body: []byte("token"), Time: time.Now()})
	h.body(nodeUser, "/api/v1/namespaces/a/configmaps/one")
	for i := range 3 {
		h.watchAs(alice, fmt.Sprintf("%s%s&labelSelector=x=%d", allMaps, watchList, i)).next()
	}
	h.evict()
	if _, ok := h.Response(nodeUser, "tokenrequest", "k"); !ok {
		t.Error("the node's recorded token is gone because alice watches too much")
	}
	server.setDown(true)
	if resp, err := h.do(t.Context(), nodeUser, "/api/v1/namespaces/a/configmaps/one"); err != nil {
		t.Errorf("the node's record is gone because alice watches too much: %v", err)
	} else {
		resp.Body.Close()
	}
}

func TestWatchPathKeepsTheName(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.put("configmaps/a/two", "2")
	h := startHub(t, t.TempDir(), server)
	w := h.watchAs(alice, "/api/v1/watch/namespaces/a/configmaps/two")
	w.want("ADDED a/two=2@102")
}

// The feed runs on one token of a user; another token of the same user is good.
func TestRefusalOfAnotherToken(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	var refused atomic.Bool
	server.refuse = func(req *http.Request) int {
		if refused.Load() && req.Header.Get("Authorization") == "Bearer old" {
			return http.StatusUnauthorized
		}
		return 0
	}
	h := startHub(t, t.TempDir(), server)
	for _, token := range []string{"old", "new"} {
		resp, err := h.with(alice, token, allMaps+watchList)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if _, err := resp.Body.Read(make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
		if token == "old" {
			defer func() {}()
		}
	}
	refused.Store(true)
	server.setDown(true)
	server.setDown(false) // the feed comes back, with the old token
	eventually(t, "the feed has come back", func() bool {
		n := 0
		for _, r := range server.seen() {
			if strings.Contains(r, "resourceVersion=101") {
				n++
			}
		}
		return n > 0
	})
	<-time.After(50 * time.Millisecond)
	server.setDown(true)
	resp, err := h.with(alice, "new", allMaps)
	if err != nil {
		t.Fatalf("offline list of a user whose other token has expired: %v; the scope is gone", err)
	}
	resp.Body.Close()
}

// Logs of what was refused stay in memory for ever.
func TestLogsOfRefusedRequests(t *testing.T) {
	server := newFakeServer()
	server.refuse = func(*http.Request) int { return http.StatusForbidden }
	h := startHub(t, t.TempDir(), server)
	for i := range 500 {
		resp, err := h.do(t.Context(), alice, fmt.Sprintf("/apis/g%d/v1/things", i))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	if n := len(h.allLogs()); n > 100 {
		t.Errorf("%d logs in memory after 500 requests that the API server refused", n)
	}
}

func TestResponsesAreBounded(t *testing.T) {
	server := newFakeServer()
	up := &intercept{fakeServer: server, answer: func(req *http.Request) *http.Response { return fakeAnswer(req, 200, `{"major":"1"}`) }}
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.Upstream = up })
	for i := range 3000 {
		h.body(alice, fmt.Sprintf("/version?x=%d", i))
	}
	h.evict()
	n := 0
	for _, l := range h.allLogs() {
		n += len(l.responses)
	}
	if n > 2000 {
		t.Errorf("%d responses are kept of one path, one for each made-up query", n)
	}
}

// A feed that has connected has not caught up.
func TestConnectedIsNotCaughtUp(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	up := &intercept{fakeServer: server, answer: func(*http.Request) *http.Response { return nil }}
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.Upstream = up })
	h.watchAs(nodeUser, allMaps+watchList).want("ADDED a/one=1@101", "SYNCED @101")
	connected := make(chan struct{}, 1)
	server.setDown(true)
	server.put("configmaps/a/two", "2") // while the link is down
	silent := func(req *http.Request) *http.Response {
		if req.URL.Query().Get("watch") == "" {
			return nil
		}
		resp, w := stream(req)
		server.mu.Lock()
		server.streams[&fakeStream{PipeWriter: w, prefix: "none"}] = struct{}{}
		server.mu.Unlock()
		connected <- struct{}{}
		return resp
	}
	up.later.Store(&silent)
	server.setDown(false)
	<-connected
	eventually(t, "the feed is connected", func() bool { return h.count(func(s *scope) int { return btoi(s.feed != nil && s.feed.live) }) == 1 })
	server.setDown(true) // before a byte has come
	eventually(t, "the feed is off", func() bool { return h.count(func(s *scope) int { return btoi(s.feed != nil && s.feed.live) }) == 0 })
	h.refusedGet(http.StatusServiceUnavailable, nodeUser, "/api/v1/namespaces/a/configmaps/two")
}

// A scope that was expired while its feed is connected is fetched again at once.
func TestExpiredScopeIsFetchedAgain(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server)
	w := h.watchAs(nodeUser, allMaps+watchList)
	w.want("ADDED a/one=1@101", "SYNCED @101")
	theScope(t, h).damagedRead(journal.ErrDamaged)
	w.want("ERROR 410")
	w.close()
	within(t, "the watch that follows the 410", func() {
		h.watchAs(nodeUser, allMaps+watchList).want("ADDED a/one=1@101", "SYNCED @101")
	})
}

// A watch that meets damage has the scope fetched again, as a list has.
func TestWatchHealsDamage(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	fs := memfs.New()
	h := coldHub(t, fs, server, t.TempDir()+"/key")
	t.Cleanup(h.stop)
	h.watchAs(nodeUser, allMaps+watchList).want("ADDED a/one=1@101", "SYNCED @101")
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	for _, f := range fs.Files() {
		if strings.HasSuffix(f, ".seg") {
			b := fs.ReadFile(f)
			b[strings.Index(string(b), `"text":"1"`)] ^= 1
			fs.WriteFile(f, b)
		}
	}
	got := ""
	for range 3 {
		if got = nextWithin(t, h.watchAs(nodeUser, allMaps+watchList)); got == "ADDED a/one=1@101" {
			return
		}
	}
	t.Errorf("watches with the link up = %s, for ever; want the state fetched again", got)
}

// etcd was restored from a backup: resourceVersions go back.
func TestHistoryReset(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/old", "1")
	server.put("configmaps/a/lost", "2")
	h := startHub(t, t.TempDir(), server)
	w := h.watchAs(nodeUser, allMaps+watchList)
	w.want("ADDED a/lost=2@102", "ADDED a/old=1@101", "SYNCED @102")
	server.setDown(true)
	server.mu.Lock()
	server.rv = 101
	delete(server.objects, "configmaps/a/lost")
	server.history = server.history[:1]
	server.oldest = 200 // any watch that resumes: 410
	server.mu.Unlock()
	server.setDown(false)
	w.want("ERROR 410")
	eventually(t, "the restored state is served", func() bool {
		return cmp.Equal(texts(t, h.body(nodeUser, allMaps+"?resourceVersion=0")), []string{"a/old=1"})
	})
}

// limit and a resourceVersion without a match is an exact list.
func TestLegacyExactListIsNoState(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.put("configmaps/a/two", "2")
	up := &intercept{fakeServer: server, answer: func(req *http.Request) *http.Response {
		if req.URL.Query().Get("resourceVersion") != "101" {
			return nil
		}
		return fakeAnswer(req, 200, `{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":"101"},"items":[`+fakeJSON("configmaps/a/one", fakeObject{101, "1"}, false)+`]}`)
	}}
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.Upstream = up })
	h.body(alice, allMaps+"?limit=500&resourceVersion=101")
	server.setDown(true)
	h.refusedGet(http.StatusServiceUnavailable, alice, allMaps)
}

// Offline, a watch asks for a state not older than what its client has seen.
func TestOfflineWatchListNotOlderThan(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server)
	h.watchAs(nodeUser, allMaps+watchList).want("ADDED a/one=1@101", "SYNCED @101")
	server.setDown(true)
	resp, err := h.do(t.Context(), nodeUser, allMaps+watchList+"150")
	if err != nil {
		return
	}
	defer resp.Body.Close()
	b := make([]byte, 1000)
	n, _ := resp.Body.Read(b)
	t.Errorf("state not older than 150 = %s; the scope is at 101", b[:n])
}

// A Table is what kubectl asks for; its 403 ends the right as well.
func TestForbiddenTable(t *testing.T) {
	server := newFakeServer()
	server.put("secrets/a/s", "x")
	up := &intercept{fakeServer: server, answer: func(req *http.Request) *http.Response {
		if strings.Contains(req.Header.Get("Accept"), "Table") {
			return fakeAnswer(req, http.StatusForbidden, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":403}`)
		}
		return nil
	}}
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.Upstream = up })
	const path = "/api/v1/namespaces/a/secrets"
	h.body(alice, path)
	table := func() (*http.Response, error) {
		req := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
		req.Header.Set("Authorization", "Bearer alice")
		req.Header.Set("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json")
		info, err := fakeResolver.NewRequestInfo(req)
		if err != nil {
			t.Fatal(err)
		}
		return h.RoundTrip(req.WithContext(request.WithUser(request.WithRequestInfo(req.Context(), info), alice)))
	}
	if resp, err := table(); err != nil || resp.StatusCode != http.StatusForbidden {
		t.Fatalf("%v, %v", resp, err)
	}
	server.setDown(true)
	h.refused(http.StatusServiceUnavailable, table)
}

// The final deletion of a pod is answered with the pod.
func TestDeletedPodIsForgotten(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	up := &intercept{fakeServer: server, answer: func(req *http.Request) *http.Response {
		if req.Method != http.MethodDelete {
			return nil
		}
		return fakeAnswer(req, 200, `{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"one","namespace":"a","uid":"u","resourceVersion":"105","deletionTimestamp":"2026-01-01T00:00:00Z","deletionGracePeriodSeconds":0}}`)
	}}
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.Upstream = up })
	const path = "/api/v1/namespaces/a/configmaps/one"
	h.body(alice, path)
	req := httptest.NewRequestWithContext(t.Context(), http.MethodDelete, path, nil)
	req.Header.Set("Authorization", "Bearer alice")
	info, _ := fakeResolver.NewRequestInfo(req)
	resp, err := h.RoundTrip(req.WithContext(request.WithUser(request.WithRequestInfo(req.Context(), info), alice)))
	if err != nil {
		t.Fatal(err)
	}
	io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	server.setDown(true)
	h.refusedGet(http.StatusServiceUnavailable, alice, path)
}

// Damage of a whole response is left behind once, not at each start.
func TestDamagedResponseIsLeftBehind(t *testing.T) {
	key := t.TempDir() + "/key"
	server := newFakeServer()
	fs := memfs.New()
	h := coldHub(t, fs, server, key)
	put := func(h *hub, k string) {
		h.PutResponse(alice, "verdict", k, Response{Body: []byte(strings.Repeat(k, 100)), Time: time.Now()})
		if err := h.flushAll(everything); err != nil {
			t.Fatal(err)
		}
	}
	put(h, "1")
	put(h, "2")
	h.stop()
	fs = fs.Kill()
	for _, f := range fs.Files() {
		if strings.HasSuffix(f, ".seg") {
			b := fs.ReadFile(f)
			b[strings.Index(string(b), `{"path"`)-40] ^= 1 // in the first body, before its meta
			fs.WriteFile(f, b)
		}
	}
	h = reopen(t, fs, server, key)
	if _, ok := h.Response(alice, "verdict", "2"); ok {
		t.Skip("not damaged enough")
	}
	put(h, "3")
	h.stop()
	h = reopen(t, fs.Kill(), server, key)
	if _, ok := h.Response(alice, "verdict", "3"); !ok {
		t.Error("what was recorded after the damage is gone after the next start")
	}
}

// What was forgotten in a flush that failed later on does not forget what came
// after it.
func TestForgetIsNotRepeated(t *testing.T) {
	server := newFakeServer()
	key := t.TempDir() + "/key"
	fs := memfs.New()
	h := coldHub(t, fs, server, key)
	put := func(k, v string) {
		h.PutResponse(alice, "verdict", k, Response{Body: []byte(v), Time: time.Now()})
	}
	l := h.logOf(logName{User: alice.GetName(), Identity: identityOf(alice, nil), Class: "verdict"})
	for try := range 20 { // the order of the batches is a map's
		k := fmt.Sprint("k", try)
		put(k, "old")
		if err := h.flushAll(everything); err != nil {
			t.Fatal(err)
		}
		l.mu.Lock()
		l.forgetResponse(l.responses[responseMeta{Path: k}.id()])
		l.mu.Unlock()
		put(k, "new")
		put("big", strings.Repeat(fmt.Sprint(try), 1<<20))
		syncs := 0
		fs.SetFault(func(op memfs.Op) error {
			if op.Name == "sync" {
				if syncs++; syncs > 1 {
					return syscall.ENOSPC
				}
			}
			return nil
		})
		_ = h.flushAll(everything)
		fs.SetFault(nil)
		l.mu.Lock()
		l.touch(true)
		l.mu.Unlock()
		if err := h.flushAll(everything); err != nil {
			t.Fatal(err)
		}
	}
	h.stop()
	h = reopen(t, fs.Kill(), server, key)
	for try := range 20 {
		if r, ok := h.Response(alice, "verdict", fmt.Sprint("k", try)); !ok || string(r.Body) != "new" {
			t.Fatalf("response %d after a restart = %q, %v, want new", try, r.Body, ok)
		}
	}
}
