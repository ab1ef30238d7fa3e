// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"fmt"
	"io"
	"net/http"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

// A segment that only a watcher's window has held is unlinked by Close under the
// log's lock: a disk that stalls there stalls everybody of that log.
func TestStalledUnlinkHoldsNoLock(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	fs := memfs.New()
	h := coldHub(t, fs, server, t.TempDir()+"/key")
	defer h.stop()
	h.watchAs(alice, allMaps+watchList).want("ADDED a/one=1@101", "SYNCED @101")
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	w := h.watchAs(alice, allMaps+watchList)
	l := theScope(t, h).log
	l.mu.Lock()
	l.rewriteSoon()
	l.mu.Unlock()
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	fs.SetStall(func(op memfs.Op) bool { return op.Name == "remove" })
	defer fs.SetStall(nil)
	go w.close()
	eventually(t, "the segment is unlinked", func() bool { return fs.Stalled() == 1 })
	if !l.mu.TryLock() {
		t.Error("the log's lock is held while the disk stalls")
		return
	}
	l.mu.Unlock()
}

// A reader opens its segment under the lock that every View takes, and Views are
// taken under the log's lock: an open that stalls stalls everybody of that log.
func TestStalledOpenHoldsNoLock(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	fs := memfs.New()
	h := coldHub(t, fs, server, t.TempDir()+"/key")
	defer h.stop()
	h.body(alice, allMaps)
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	l := theScope(t, h).log
	server.setDown(true)
	fs.SetStall(func(op memfs.Op) bool { return op.Name == "open" })
	defer fs.SetStall(nil)
	ask := func() {
		if resp, err := h.do(t.Context(), alice, allMaps); err == nil {
			io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
	}
	go ask()
	eventually(t, "the segment is opened", func() bool { return fs.Stalled() == 1 })
	go ask()
	late := time.Now().Add(200 * time.Millisecond)
	for time.Now().Before(late) {
		runtime.Gosched()
	}
	if !l.mu.TryLock() {
		t.Error("the log's lock is held while the disk stalls")
		return
	}
	l.mu.Unlock()
}

// While the disk takes nothing, every deletion is kept in memory with its bytes; 512
// are enough for those who resume, and the rest is never used.
func TestTombstonesOfAFullDisk(t *testing.T) {
	server := newFakeServer()
	fs := memfs.New()
	h := coldHub(t, fs, server, t.TempDir()+"/key")
	defer h.stop()
	w := h.watchAs(alice, allMaps+watchList)
	w.want("SYNCED @100")
	fs.SetFault(func(op memfs.Op) error {
		if op.Name == "write" || op.Name == "create" {
			return syscall.ENOSPC
		}
		return nil
	})
	s := theScope(t, h)
	for range 4 * maxTombstones {
		server.put("configmaps/a/job", "1")
		server.del("configmaps/a/job")
		w.next()
		w.next()
		_ = h.flushAll(everything)
	}
	s.log.mu.RLock()
	defer s.log.mu.RUnlock()
	if n := len(s.dirtyTombs); n > maxTombstones {
		t.Errorf("%d tombstones in memory, %d can be used", n, len(s.tombs))
	}
}

// Each watch of a made up resource leaves a log in memory for five minutes, before the
// API server has said anything; there is no limit to their number.
func TestLogsOfMadeUpResources(t *testing.T) {
	server := newFakeServer()
	server.refuse = func(*http.Request) int { return http.StatusNotFound }
	h := startHub(t, t.TempDir(), server)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	const n = 3000
	for i := range n {
		if resp, err := h.do(t.Context(), alice, fmt.Sprintf("/apis/g%d/v1/things?watch=true", i)); err == nil {
			resp.Body.Close()
		}
	}
	server.mu.Lock()
	server.requests, server.tokens = nil, nil
	server.mu.Unlock()
	runtime.GC()
	runtime.ReadMemStats(&after)
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.logs) > n/2 {
		t.Errorf("%d logs, of %d bytes each", len(h.logs), (int64(after.HeapAlloc)-int64(before.HeapAlloc))/int64(len(h.logs)))
	}
}
