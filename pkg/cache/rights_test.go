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
	"runtime"
	"strings"
	"testing"
	"time"
	"weak"

	"k8s.io/apiserver/pkg/endpoints/request"
)

// A feed lives on the values of the context of the request that opened it. In the
// proxy that holds the http.ResponseWriter, and with HTTP/1.1 that holds the request.
func TestTokenGoesWithItsRequest(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.readers = map[string]bool{"alice": true}
	h := startHub(t, t.TempDir(), server, shareMaps)
	type key struct{}
	open := func() weak.Pointer[string] {
		req := httptest.NewRequest(http.MethodGet, allMaps+watchList, nil)
		req.Header["Authorization"] = []string{strings.Clone("Bearer alice")}
		token := weak.Make(&req.Header["Authorization"][0])
		info, err := fakeResolver.NewRequestInfo(req)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		ctx = context.WithValue(ctx, key{}, req) // as proxy.withResponse does by its writer
		resp, err := h.RoundTrip(req.WithContext(request.WithUser(request.WithRequestInfo(ctx, info), alice)))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return token
	}
	token := open()
	eventually(t, "the token is forgotten", func() bool { runtime.GC(); return token.Value() == nil })
}

// A guest whose right ends during the first sync of the feed goes on getting what
// the sync brings, also what came after.
func TestRightEndsDuringSync(t *testing.T) {
	server := newFakeServer()
	server.readers = map[string]bool{"alice": true}
	var up *io.PipeWriter
	h := startHub(t, t.TempDir(), server, shareMaps, func(c *Config) {
		c.Upstream = &intercept{fakeServer: server, answer: func(req *http.Request) (resp *http.Response) {
			if req.Method == http.MethodGet && req.URL.Query().Get("watch") == "true" {
				resp, up = stream(req)
				go io.WriteString(up, frame("ADDED", "configmaps/a/one", 101, "1"))
			}
			return resp
		}}
	})
	w := h.watchAs(alice, allMaps+watchList)
	w.want("ADDED a/one=1@101")
	server.mu.Lock()
	server.refuse = func(*http.Request) int { return http.StatusForbidden }
	server.mu.Unlock()
	if resp, err := h.do(t.Context(), alice, mapsOfA+"/one"); err != nil || resp.StatusCode != http.StatusForbidden {
		t.Fatalf("alice's get: %v, %v, want 403", resp, err)
	}
	go io.WriteString(up, frame("ADDED", "configmaps/a/two", 102, "secret"))
	if got := nextWithin(t, w); got != "end: EOF" {
		t.Errorf("after the 403: %s, want the end", got)
	}
}

// Whoever may read a shared resource chooses the version in the path; each one that
// the node gets a 404 for is remembered for ever.
func TestRefusedIsBounded(t *testing.T) {
	server := newFakeServer()
	server.readers = map[string]bool{"alice": true}
	server.refuse = func(*http.Request) int { return http.StatusNotFound }
	h := startHub(t, t.TempDir(), server, shareMaps)
	const n = maxAccesses + 100
	for i := range n {
		if resp, err := h.do(t.Context(), alice, fmt.Sprintf("/api/v%d/configmaps?watch=true", i)); err == nil {
			resp.Body.Close()
		}
	}
	h.shares.mu.Lock()
	defer h.shares.mu.Unlock()
	if got := len(h.shares.refused); got > maxAccesses {
		t.Errorf("%d refused resources are remembered", got)
	}
}

// A SelfSubjectAccessReview that was answered yes before a 403, and comes back after
// it, gives the right back that the 403 has ended.
func TestLateYesAfterForbidden(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.readers = map[string]bool{"alice": true}
	var h *hub
	h = startHub(t, t.TempDir(), server, shareMaps, func(c *Config) {
		c.Upstream = &intercept{fakeServer: server, answer: func(req *http.Request) *http.Response {
			if !strings.HasSuffix(req.URL.Path, "/selfsubjectaccessreviews") {
				return nil
			}
			resp, _ := server.RoundTrip(req)
			server.mu.Lock()
			server.refuse = func(req *http.Request) int {
				if req.Header.Get("Authorization") != "" {
					return http.StatusForbidden
				}
				return 0
			}
			server.mu.Unlock()
			if resp, err := h.do(t.Context(), alice, mapsOfA+"/one"); err == nil {
				resp.Body.Close()
			}
			return resp
		}}
	})
	resp, err := h.do(t.Context(), alice, allMaps+watchList)
	if err == nil && resp.StatusCode == http.StatusOK {
		t.Error("alice, who was told 403 meanwhile, is served")
	}
}

// One 503 to the node's feed while it starts counts as "the node may not read this":
// nothing is shared for ten minutes.
func TestNodeFeedFailsOnce(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.readers = map[string]bool{"alice": true}
	failed := false
	server.refuse = func(req *http.Request) int {
		if !failed && strings.Contains(req.URL.Path, "configmaps") {
			failed = true
			return http.StatusServiceUnavailable
		}
		return 0
	}
	h := startHub(t, t.TempDir(), server, shareMaps)
	h.watchAs(alice, allMaps+watchList).want("ADDED a/one=1@101", "SYNCED @101")
	if h.shares.isRefused(theScope(t, h).log.name.gvr()) {
		t.Error("the resource is not shared any more")
	}
}

// Where the API server does not say whether a guest still may, its open watch goes on
// for ever; a new one would not be served.
func TestUnknownRightEndsWatch(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.readers = map[string]bool{"alice": true}
	up := &intercept{fakeServer: server, answer: func(*http.Request) *http.Response { return nil }}
	h := startHub(t, t.TempDir(), server, shareMaps, func(c *Config) { c.Upstream = up })
	w := h.watchAs(alice, allMaps+watchList)
	w.want("ADDED a/one=1@101", "SYNCED @101")
	broken := func(req *http.Request) *http.Response {
		if strings.HasSuffix(req.URL.Path, "/selfsubjectaccessreviews") {
			return fakeAnswer(req, http.StatusInternalServerError, "{}")
		}
		return nil
	}
	up.later.Store(&broken)
	h.shares.mu.Lock()
	for a := range h.shares.allowed {
		h.shares.allowed[a] = time.Now().Add(-2 * maxAccessAge)
	}
	h.shares.mu.Unlock()
	h.shares.reviewOpen(t.Context())
	server.put("configmaps/a/two", "2")
	if got := nextWithin(t, w); got != "end: EOF" {
		t.Errorf("after %v without a word for it: %s, want the end", 2*maxAccessAge, got)
	}
}

// The right behind all watches of an identity is asked for with the token of any one
// of them; if that one has expired, the watches with good tokens end, too.
func TestExpiredTokenOfAnother(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.readers = map[string]bool{"old": true, "new": true}
	up := &intercept{fakeServer: server, answer: func(*http.Request) *http.Response { return nil }}
	h := startHub(t, t.TempDir(), server, shareMaps, func(c *Config) { c.Upstream = up })
	open := func(token string) *watchClient {
		resp, err := h.with(alice, token, allMaps+watchList)
		if err != nil {
			t.Fatal(err)
		}
		w := &watchClient{t: t, d: json.NewDecoder(resp.Body), cancel: func() {}, body: resp.Body}
		t.Cleanup(w.close)
		w.want("ADDED a/one=1@101", "SYNCED @101")
		return w
	}
	for range 50 {
		open("old")
	}
	w := open("new")
	expired := func(req *http.Request) *http.Response {
		if req.Header.Get("Authorization") == "Bearer old" {
			return fakeAnswer(req, http.StatusUnauthorized, "{}")
		}
		return nil
	}
	up.later.Store(&expired)
	h.shares.mu.Lock()
	clear(h.shares.allowed)
	h.shares.mu.Unlock()
	h.shares.reviewOpen(t.Context())
	server.put("configmaps/a/two", "2")
	if got := nextWithin(t, w); got != "ADDED a/two=2@102" {
		t.Errorf("the watch with a good token: %s", got)
	}
}

// Rights are asked for one after the other: who opens many watches with selectors of
// their own holds up that others' rights end (800 at 150 ms are two minutes).
func TestReviewsTogether(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.readers = map[string]bool{"alice": true}
	h := startHub(t, t.TempDir(), server, shareMaps, func(c *Config) {
		c.Upstream = &intercept{fakeServer: server, answer: func(req *http.Request) *http.Response {
			if strings.HasSuffix(req.URL.Path, "/selfsubjectaccessreviews") {
				<-time.After(30 * time.Millisecond)
			}
			return nil
		}}
	})
	for i := range 30 {
		h.watchAs(alice, fmt.Sprintf("%s%s&labelSelector=x%%21%%3D%d", allMaps, watchList, i))
	}
	h.shares.mu.Lock()
	clear(h.shares.allowed)
	h.shares.mu.Unlock()
	start := time.Now()
	h.shares.reviewOpen(t.Context())
	if took := time.Since(start); took > 500*time.Millisecond {
		t.Errorf("30 reviews of 30 ms took %v", took)
	}
}

// Any guest's 403 makes another's yes that is on its way count for nothing, and deletes
// that one's record: who is refused all the time keeps everybody from reading offline.
func TestForbiddenOfAnother(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.readers = map[string]bool{"alice": true}
	server.refuse = func(req *http.Request) int {
		if req.Header.Get("Authorization") == "Bearer bob" {
			return http.StatusForbidden
		}
		return 0
	}
	up := &intercept{fakeServer: server, answer: func(*http.Request) *http.Response { return nil }}
	h := startHub(t, t.TempDir(), server, shareMaps, func(c *Config) { c.Upstream = up })
	h.watchAs(alice, allMaps+watchList).want("ADDED a/one=1@101", "SYNCED @101")
	hostile := func(req *http.Request) *http.Response {
		if strings.HasSuffix(req.URL.Path, "/selfsubjectaccessreviews") {
			if resp, err := h.do(t.Context(), bob, mapsOfA+"/one"); err == nil {
				resp.Body.Close()
			}
		}
		return nil
	}
	up.later.Store(&hostile)
	h.shares.mu.Lock()
	for a := range h.shares.allowed {
		h.shares.allowed[a] = time.Now().Add(-2 * maxAccessAge)
	}
	h.shares.mu.Unlock()
	h.shares.reviewOpen(t.Context())
	server.setDown(true)
	h.body(alice, allMaps)
}
