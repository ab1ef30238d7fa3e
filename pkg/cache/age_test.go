// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

// A clock is set by hand, after begin.
type clock struct{ after atomic.Int64 }

var begin = time.Unix(1_800_000_000, 0)

func (c *clock) now() time.Time          { return begin.Add(time.Duration(c.after.Load())) }
func (c *clock) set(after time.Duration) { c.after.Store(int64(after)) }

// agingHub is a hub with a clock, on which what anybody is shown has an age.
func agingHub(t *testing.T, fs *memfs.FS, server *fakeServer, key string) (*hub, *clock) {
	t.Helper()
	h, c := reopen(t, fs, server, key), &clock{}
	h.cfg.MaxAges, h.now = MaxAges{ServiceAccount: 48 * time.Hour, User: 24 * time.Hour}, c.now
	return h, c
}

var robot = &user.DefaultInfo{Name: "system:serviceaccount:a:robot", Groups: []string{"system:serviceaccounts"}}

// What a user was last shown online is shown to it offline for as long as its class
// is allowed to, also after restarts; an answer that says nothing new counts as
// showing.
func TestOfflineMaxAge(t *testing.T) {
	const hour = time.Hour
	const list, object, version = "/api/v1/namespaces/a/configmaps", "/api/v1/namespaces/a/configmaps/c", "/version"
	for _, tc := range []struct {
		name        string
		who         user.Info
		again, look time.Duration // after the first time
		want        int
	}{
		{"in time", alice, 0, 24 * hour, http.StatusOK},
		{"too late", alice, 0, 24*hour + time.Minute, http.StatusServiceUnavailable},
		{"shown again", alice, 20 * hour, 43 * hour, http.StatusOK},
		{"shown again, too late", alice, 20 * hour, 45 * hour, http.StatusServiceUnavailable},
		{"another class, in time", robot, 0, 48 * hour, http.StatusOK},
		{"another class, too late", robot, 0, 49 * hour, http.StatusServiceUnavailable},
		{"the node", nodeUser, 0, 9999 * hour, http.StatusOK},
		{"the clock is behind", alice, 0, -9999 * hour, http.StatusOK},
	} {
		for _, path := range []string{list, object, version} {
			t.Run(tc.name+path, func(t *testing.T) {
				fs, key, server := memfs.New(), filepath.Join(t.TempDir(), "key"), newFakeServer()
				server.put("configmaps/a/c", "x")
				h, clock := agingHub(t, fs, server, key)
				h.body(tc.who, path)
				if tc.again != 0 {
					clock.set(tc.again)
					h.body(tc.who, path)
				}
				if err := h.flushAll(everything); err != nil {
					t.Fatal(err)
				}
				clock.set(tc.look)
				server.setDown(true)
				check := func(h *hub, when string) {
					t.Helper()
					if tc.want == http.StatusOK {
						h.body(tc.who, path)
					} else {
						h.refusedGetOrUnavailable(tc.who, path, when)
					}
				}
				check(h, "")
				h.stop()
				h, clock = agingHub(t, fs.Kill(), server, key)
				clock.set(tc.look)
				check(h, " after a restart")
			})
		}
	}
}

// refusedGetOrUnavailable wants no answer: a 503, or the link's own error.
func (h *hub) refusedGetOrUnavailable(u user.Info, path, when string) {
	h.t.Helper()
	resp, err := h.do(h.t.Context(), u, path)
	if err == nil {
		resp.Body.Close()
		h.t.Errorf("%s%s = %d, want none", path, when, resp.StatusCode)
	}
}

// What a live feed shows is shown now, and that is known after a crash.
func TestOfflineMaxAgeOfFeeds(t *testing.T) {
	const hour = time.Hour
	const list = "/api/v1/namespaces/a/configmaps"
	fs, key, server := memfs.New(), filepath.Join(t.TempDir(), "key"), newFakeServer()
	server.put("configmaps/a/c", "x")
	h, clock := agingHub(t, fs, server, key)
	w := h.watchAs(alice, list+watchList)
	w.want("ADDED a/c=x@101", "SYNCED @101")
	for day := range 5 {
		clock.set(time.Duration(day) * 24 * hour)
		h.vouchAll()
		if err := h.flushAll(everything); err != nil {
			t.Fatal(err)
		}
	}
	crashed := fs.Kill()
	server.setDown(true)
	eventually(t, "the feed knows", func() bool { return h.count(func(s *scope) int { return btoi(s.feed != nil && s.feed.live) }) == 0 })
	clock.set(5*24*hour - time.Minute) // live until the fourth day ended
	h.body(alice, list)
	clock.set(5*24*hour + time.Minute)
	h.refusedGetOrUnavailable(alice, list, "")
	if resp, err := h.do(t.Context(), alice, list+watchList); err == nil {
		resp.Body.Close()
		t.Error("a new watch begins with a state that is too old")
	}
	w.close()
	h.stop()

	h, clock = agingHub(t, crashed, server, key)
	clock.set(4*24*hour + 23*hour)
	h.body(alice, list)
	clock.set(5*24*hour + time.Minute)
	h.refusedGetOrUnavailable(alice, list, " after a crash")
}

// Nothing is written because of the age where there is none.
func TestOfflineMaxAgeCostsTheNodeNothing(t *testing.T) {
	fs, server := memfs.New(), newFakeServer()
	server.put("configmaps/a/c", "x")
	h, clock := agingHub(t, fs, server, filepath.Join(t.TempDir(), "key"))
	for _, who := range []user.Info{nodeUser, alice} {
		ask := func() int64 {
			h.body(who, "/api/v1/namespaces/a/configmaps")
			h.body(who, "/api/v1/namespaces/a/configmaps/c")
			h.body(who, "/version")
			if err := h.flushAll(everything); err != nil {
				t.Fatal(err)
			}
			return h.journal.Stats().BytesWritten
		}
		before := ask()
		clock.set(5 * time.Hour)
		if again := ask(); again != before {
			t.Errorf("%s: %d bytes were written for what is five hours old", who.GetName(), again-before)
		}
		clock.set(12 * time.Hour)
		if wrote := ask() > before; wrote != (who == alice) {
			t.Errorf("%s: written at half of the age: %v", who.GetName(), wrote)
		}
		clock.set(0)
	}
	h.stop()
}

// docs/offline.md: 24 h after the API server last showed it; only after a crash a quarter less.
func TestAgeCountsFromTheLastTimeShown(t *testing.T) {
	const hour = time.Hour
	for _, path := range []string{"/api/v1/namespaces/a/configmaps", "/api/v1/namespaces/a/configmaps/c", "/version"} {
		t.Run(path, func(t *testing.T) {
			fs, key, server := memfs.New(), filepath.Join(t.TempDir(), "key"), newFakeServer()
			server.put("configmaps/a/c", "x")
			h, clock := agingHub(t, fs, server, key)
			h.body(alice, path)
			clock.set(5 * hour)
			h.body(alice, path) // shown again
			clock.set(25 * hour)
			server.setDown(true)
			resp, err := h.do(t.Context(), alice, path)
			if err != nil || resp.StatusCode != http.StatusOK {
				t.Errorf("20 h after it was last shown, no crash: %v, want 200", err)
			}
		})
	}
}

// What a user other than the node was given is not given to it offline beyond its age; a token least of all.
func TestTokenRequestHasAnAge(t *testing.T) {
	fs, key, server := memfs.New(), filepath.Join(t.TempDir(), "key"), newFakeServer()
	h, clock := agingHub(t, fs, server, key)
	h.PutResponse(alice, "tokenrequest", "k", Response{ContentType: "text/plain", Body: []byte(tokenText), Time: h.now()})
	clock.set(30 * 24 * time.Hour)
	server.setDown(true)
	if _, ok := h.Response(alice, "tokenrequest", "k"); ok {
		t.Error("a month after the API server last gave it, a user still gets a token from the record")
	}
}

// A watch that waits for its feed while the link goes down must not begin with a state that is too old.
func TestStaleStateIsNotShownWhenTheLinkBreaksDuringAJoin(t *testing.T) {
	const hour = time.Hour
	const list = "/api/v1/namespaces/a/configmaps"
	fs, key, server := memfs.New(), filepath.Join(t.TempDir(), "key"), newFakeServer()
	server.put("configmaps/a/c", "x")
	h, clock := agingHub(t, fs, server, key)
	h.body(alice, list)
	clock.set(500 * hour) // since then alice may have lost every right
	server.setDown(true)
	h.refusedGetOrUnavailable(alice, list, " by a list") // as it should be
	server.mu.Lock()
	server.refuse = func(*http.Request) int { return http.StatusServiceUnavailable } // an API server that is not ready yet
	server.mu.Unlock()
	server.setDown(false)
	time.AfterFunc(200*time.Millisecond, func() { server.setDown(true) })
	resp, err := h.do(t.Context(), alice, list+watchList)
	if err != nil {
		return
	}
	defer resp.Body.Close()
	b := make([]byte, 64<<10)
	n, _ := resp.Body.Read(b)
	if resp.StatusCode == http.StatusOK && strings.Contains(string(b[:n]), `"c"`) {
		t.Errorf("500 h after it was last shown (24 h are allowed), with the link down: %s", b[:n])
	}
}
