// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/watch"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

// onMemory has a bench write to memory, in segments that it can sync fast.
func onMemory(o *journal.Options) { o.Dir, o.FS, o.SegmentBytes = "/journal", memfs.New(), 128<<10 }

// A list that says nothing new writes nothing at once, and its resourceVersion once
// when five minutes are over.
func TestSameListOftenWritesNothing(t *testing.T) {
	for _, protobuf := range []bool{true, false} {
		h := newBench(t, onMemory)
		now := time.Unix(1_800_000_000, 0)
		h.now = func() time.Time { return now }
		path, buf := cannedPaths["Pod"], make([]byte, 32<<10)
		list := cannedList(t, "Pod", 300, protobuf)
		h.serve(path, protobuf, list)
		req := h.request(t, path, protobuf)
		h.get(t, req, buf)
		h.flushNow(t)
		due := func() int64 {
			before := h.journal.Stats().BytesWritten
			if err := h.flushAll(func(l *log) bool { return !l.due.After(now) }); err != nil {
				t.Fatal(err)
			}
			return h.journal.Stats().BytesWritten - before
		}
		for i := range 10 {
			h.get(t, req, buf)
			now = now.Add(10 * time.Second)
			if n := due(); n != 0 {
				t.Errorf("protobuf=%t: the same list for the %d. time wrote %d bytes", protobuf, i+2, n)
			}
		}
		now = now.Add(time.Hour)
		for i := range 10 { // nothing but the list's resourceVersion moves
			newer := []byte(fmt.Sprint(9001 + i))
			h.serve(path, protobuf, replaceOnce(list, []byte("9000"), newer))
			h.get(t, req, buf)
			now = now.Add(10 * time.Second)
			if n := due(); n != 0 {
				t.Errorf("protobuf=%t: a list with another resourceVersion wrote %d bytes at once", protobuf, n)
			}
		}
		now = now.Add(5 * time.Minute)
		if n := due(); n == 0 || n > 2000 {
			t.Errorf("protobuf=%t: after five minutes %d bytes were written for a resourceVersion", protobuf, n)
		}
		now = now.Add(time.Hour)
		if n := due(); n != 0 {
			t.Errorf("protobuf=%t: %d bytes were written when nothing had changed", protobuf, n)
		}
	}
}

func replaceOnce(b, old, by []byte) []byte {
	for i := range b {
		if i+len(old) <= len(b) && string(b[i:i+len(old)]) == string(old) {
			return append(append(append([]byte{}, b[:i]...), by...), b[i+len(old):]...)
		}
	}
	return b
}

// Under steady updates the disk takes at most twice what the events hold,
// compaction included: for pods one by one, and for larger bursts.
func TestBytesWrittenPerEvent(t *testing.T) {
	for _, tt := range []struct{ objects, burst, megabytes int }{{300, 1, 6}, {1500, 20, 20}} {
		t.Run(fmt.Sprintf("%d objects, %d at a time", tt.objects, tt.burst), func(t *testing.T) {
			h := newBench(t, onMemory)
			path, buf := cannedPaths["Pod"], make([]byte, 32<<10)
			h.serve(path, true, cannedList(t, "Pod", tt.objects, true))
			h.get(t, h.request(t, path, true), buf)
			h.flushNow(t)
			s := theOnlyScope(t, h)
			rng := rand.New(rand.NewPCG(1, uint64(tt.objects)))
			before := h.journal.Stats().BytesWritten
			var events int64
			rv := 10_000
			for events < int64(tt.megabytes)<<20 {
				s.log.mu.Lock()
				for range tt.burst {
					rv++
					bare := cannedBare(t, rng.IntN(tt.objects), rv, "Pod", true)
					o, _, err := newObject(s.key.Representation, bare)
					if err != nil {
						t.Fatal(err)
					}
					events += int64(len(bare))
					s.apply(watch.Modified, o)
				}
				s.log.mu.Unlock()
				h.flushNow(t)
			}
			written := h.journal.Stats().BytesWritten - before
			ratio := float64(written) / float64(events)
			t.Logf("%.1f MB of events, %.1f MB written: %.2f times; %d bytes on disk", float64(events)/1e6, float64(written)/1e6, ratio, h.journal.Stats().Bytes)
			if ratio > 2 {
				t.Errorf("%.2f bytes written for each byte of the events, want at most 2", ratio)
			}
		})
	}
}

func theOnlyScope(tb testing.TB, h *bench) *scope {
	tb.Helper()
	for _, l := range h.allLogs() {
		for _, s := range l.scopes {
			return s
		}
	}
	tb.Fatal("no scope")
	return nil
}

// BenchmarkIndex says how much memory an object takes that is on disk.
func BenchmarkIndex(b *testing.B) {
	const n = 10_000
	h := newBench(b)
	path, buf := cannedPaths["Pod"], make([]byte, 32<<10)
	list := cannedList(b, "Pod", n, true)
	h.serve(path, true, list)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	req := h.request(b, path, true)
	before := heap()
	h.get(b, req, buf)
	h.flushNow(b)
	recorded := heap()
	h.server.down.Store(true)
	h.get(b, req, buf)
	listed := heap()
	for b.Loop() {
	}
	b.ReportMetric(float64(recorded-before)/n, "B/object")
	b.ReportMetric(float64(listed-before)/n, "B/object-listed")
	runtime.KeepAlive(list)
	runtime.KeepAlive(h)
}
