// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

// coldHub makes a cache over a file system, without Run: nothing is written but
// when the test flushes. nil if the journal cannot be opened.
func coldHub(t *testing.T, fs *memfs.FS, server *fakeServer, key string) *hub {
	t.Helper()
	j, err := journal.Open(journal.Options{Dir: "/journal", FS: fs, SegmentBytes: 64 << 10})
	if err != nil {
		if errors.Is(err, memfs.ErrCrashed) {
			return nil
		}
		t.Fatal(err)
	}
	c, err := New(Config{
		Upstream: server, IsUnavailable: func(err error) bool { return errors.Is(err, errDown) }, Journal: j,
		Node: func() user.Info { return nodeUser }, Sealer: sealerOf(t, key),
	})
	if err != nil {
		t.Fatal(err)
	}
	return &hub{Cache: c, t: t, server: server, stop: func() {
		c.endFeeds()
		c.running.Wait()
		_ = j.Close()
	}}
}

// scopesOfWorkload are the lists that the workload makes, and what they list.
var scopesOfWorkload = []struct {
	user   user.Info
	path   string
	prefix string
}{
	{alice, "/api/v1/configmaps", "configmaps/"},
	{alice, "/api/v1/namespaces/a/configmaps", "configmaps/a/"},
	{alice, "/api/v1/namespaces/a/secrets", "secrets/a/"},
	{bob, "/api/v1/namespaces/a/configmaps", "configmaps/a/"},
	{nodeUser, "/api/v1/namespaces/b/configmaps", "configmaps/b/"},
}

// workload changes the server, lists, follows a watch, and flushes after each
// step; flush errors are what it is about.
func workload(h *hub) {
	s := h.server
	w := (*watchClient)(nil)
	for n := range 14 {
		ns := []string{"a", "b"}[n%2]
		s.put(fmt.Sprintf("configmaps/%s/m%d", ns, n%5), fmt.Sprintf("step %d", n))
		s.put(fmt.Sprintf("secrets/a/s%d", n%3), fmt.Sprintf("secret %d", n))
		if n%4 == 3 {
			s.del(fmt.Sprintf("configmaps/%s/m%d", ns, (n+2)%5))
		}
		if n == 2 {
			w = h.watchAs(nodeUser, "/api/v1/namespaces/b/configmaps"+watchList)
		}
		sc := scopesOfWorkload[n%4]
		h.body(sc.user, sc.path)
		if n%5 == 4 {
			h.body(alice, "/api/v1/namespaces/"+ns+"/configmaps/m"+strconv.Itoa(n%5))
		}
		_ = h.flushAll(func(*log) bool { return true })
		if n == 9 {
			for _, l := range h.allLogs() {
				l.mu.Lock()
				l.rewriteSoon()
				l.mu.Unlock()
			}
			_ = h.flushAll(func(*log) bool { return true })
		}
	}
	if w != nil {
		w.close()
	}
}

// check asks for all lists offline. Each is what the server had at the list's
// resourceVersion, or 503. It returns how many were answered.
func check(t *testing.T, h *hub, what string) (answered int) {
	t.Helper()
	h.server.setDown(true)
	for _, sc := range scopesOfWorkload {
		resp, err := h.do(t.Context(), sc.user, sc.path)
		if err != nil {
			continue
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK || err != nil {
			continue // an aborted list is no list
		}
		var l struct {
			Metadata struct{ ResourceVersion string }
		}
		if err := json.Unmarshal(body, &l); err != nil {
			t.Fatalf("%s: %v: %s", what, err, body)
		}
		rv, err := strconv.Atoi(l.Metadata.ResourceVersion)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		if d := cmp.Diff(h.server.at(sc.prefix, rv), texts(t, string(body))); d != "" {
			t.Fatalf("%s: %s of %s at %d differs from what the API server had (-server +list):\n%s", what, sc.path, sc.user.GetName(), rv, d)
		}
		answered++
	}
	return answered
}

// step is 1 but for the race detector: all of it, raced, takes minutes, and one in
// so many says as much about races.
var step = map[bool]int{false: 1, true: 13}[raceEnabled]

func TestCrashAtEveryOperation(t *testing.T) {
	key := t.TempDir() + "/key"
	fs := memfs.New()
	h := coldHub(t, fs, newFakeServer(), key)
	workload(h)
	h.stop()
	ops := fs.Ops()
	if ops < 60 {
		t.Fatalf("the workload is only %d operations", ops)
	}
	answered := 0
	for n := 1; n <= ops; n += step {
		fs := memfs.New()
		fs.CrashAt(n)
		server := newFakeServer()
		if h := coldHub(t, fs, server, key); h != nil {
			workload(h)
			h.stop()
		}
		answered += check(t, reopen(t, fs.Kill(), server, key), fmt.Sprintf("killed at operation %d", n))
		for loss, seed := range map[memfs.Loss]uint64{memfs.Lost: 0, memfs.Torn: uint64(n)} {
			what := fmt.Sprintf("power cut at operation %d, loss %v", n, loss)
			answered += check(t, reopen(t, fs.PowerCut(loss, seed), server, key), what)
		}
	}
	if answered < ops/step {
		t.Errorf("%d operations, and only %d lists answered afterwards", ops, answered)
	}
	t.Logf("%d operations crashed, %d lists checked", ops, answered)
}

func reopen(t *testing.T, fs *memfs.FS, server *fakeServer, key string) *hub {
	t.Helper()
	h := coldHub(t, fs, server, key)
	if h == nil {
		t.Fatal("journal does not open after the crash")
	}
	t.Cleanup(h.stop)
	return h
}

func TestEveryByteFlipped(t *testing.T) {
	key := t.TempDir() + "/key"
	fs := memfs.New()
	server := newFakeServer()
	h := coldHub(t, fs, server, key)
	for n := range 3 {
		server.put(fmt.Sprintf("configmaps/a/m%d", n), "x")
		server.put("secrets/a/s", fmt.Sprint(n))
		h.body(alice, "/api/v1/configmaps")
		h.body(alice, "/api/v1/namespaces/a/configmaps")
		h.body(alice, "/api/v1/namespaces/a/secrets")
		if err := h.flushAll(func(*log) bool { return true }); err != nil {
			t.Fatal(err)
		}
	}
	h.stop()
	flips, answered, cuts := 0, 0, 0
	for _, file := range fs.Files() {
		whole := fs.ReadFile(file)
		for i := 0; i < len(whole); i += step {
			damaged := fs.Kill()
			b := append([]byte(nil), whole...)
			b[i] ^= 1 << (i % 8)
			damaged.WriteFile(file, b)
			flips++
			answered += checkDamaged(t, damaged, server, key, fmt.Sprintf("%s byte %d flipped", file, i))
			if strings.HasSuffix(file, "FORMAT") {
				continue
			}
			shorter := fs.Kill()
			shorter.WriteFile(file, whole[:i])
			cuts++
			answered += checkDamaged(t, shorter, server, key, fmt.Sprintf("%s cut to %d bytes", file, i))
		}
	}
	t.Logf("%d bytes flipped, %d cuts, %d lists checked", flips, cuts, answered)
	if answered < flips {
		t.Errorf("%d flips, and only %d lists answered afterwards", flips, answered)
	}
}

// checkDamaged opens a damaged journal; a format that is not ours any more is
// refused, which is an answer too.
func checkDamaged(t *testing.T, fs *memfs.FS, server *fakeServer, key, what string) int {
	t.Helper()
	j, err := journal.Open(journal.Options{Dir: "/journal", FS: fs})
	if err != nil {
		return 0
	}
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	h := coldHub(t, fs, server, key)
	defer h.stop()
	return check(t, h, what)
}
