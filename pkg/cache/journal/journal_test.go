// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal_test

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

func TestRealFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "data", "journal")
	j, err := journal.Open(journal.Options{Dir: dir, SegmentBytes: 4096})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := journal.Open(journal.Options{Dir: dir}); !errors.Is(err, journal.ErrLocked) || !strings.Contains(fmt.Sprint(err), dir) {
		t.Errorf("second Open() = %v, want ErrLocked with the path", err)
	}
	l, err := j.OpenLog("log", journal.Replay{})
	if err != nil {
		t.Fatal(err)
	}
	if files := fileModes(t, dir); len(files) != 3 {
		t.Errorf("files before the first Append = %v, want FORMAT and LOCK", files)
	}
	w := newWorld(t, nil)
	w.j, w.logs["log"] = j, l
	for range 20 {
		w.append("log", 500, 20, 0)
	}
	w.live()
	w.rewrite("log", 3000, 3000, 3000)
	w.append("log", 1)
	w.live()
	want := w.tracks["log"].now
	for name, mode := range fileModes(t, dir) {
		if mode != 0o600 && mode != fs.ModeDir|0o700 {
			t.Errorf("mode of %s = %v", name, mode)
		}
	}
	size := l.Size()
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Append(entries(content{{1, 1, "", ""}})); !errors.Is(err, journal.ErrClosed) {
		t.Errorf("Append after Close = %v, want ErrClosed", err)
	}

	j, err = journal.Open(journal.Options{Dir: dir, SegmentBytes: 4096})
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	if got := j.Stats().Bytes; got != size {
		t.Errorf("Stats().Bytes = %d after Open, want %d", got, size)
	}
	var r replayed
	l, err = j.OpenLog("log", r.replay())
	if err != nil {
		t.Fatal(err)
	}
	r.bodies(t, l)
	if !want.equal(r.content) {
		t.Errorf("replayed %v, want %v", r.content, want)
	}
	if _, err := j.OpenLog("log", journal.Replay{}); !errors.Is(err, journal.ErrOpen) {
		t.Errorf("second OpenLog() = %v, want ErrOpen", err)
	}
	if err := l.Remove(); err != nil {
		t.Fatal(err)
	}
	if files := fileModes(t, dir); len(files) != 3 {
		t.Errorf("files after Remove = %v, want FORMAT and LOCK", files)
	}
}

func fileModes(t *testing.T, dir string) map[string]fs.FileMode {
	t.Helper()
	modes := map[string]fs.FileMode{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		modes[p] = fi.Mode()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return modes
}

func TestFormat(t *testing.T) {
	newer := "edgehub-journal 2"
	newer = fmt.Sprintf("%s %08x\n", newer, crc32.Checksum([]byte(newer), crc32.MakeTable(crc32.Castagnoli)))
	base := smallLog(t, false)
	first := segments(base.fs)[0]
	segment := base.fs.ReadFile(first)
	segment[8] = 2
	crc := crc32.Checksum(segment[:12], crc32.MakeTable(crc32.Castagnoli))
	for i := range 4 {
		segment[12+i] = byte(crc >> (8 * i))
	}
	flipped := base.fs.ReadFile("/j/FORMAT")
	flipped[16] ^= 2
	for _, tc := range []struct {
		name, path string
		content    []byte
		want       error
	}{
		{"newer FORMAT", "/j/FORMAT", []byte(newer), journal.ErrNewerFormat},
		{"newer segment", first, segment, journal.ErrNewerFormat},
		{"flipped FORMAT", "/j/FORMAT", flipped, nil},
		{"empty FORMAT", "/j/FORMAT", nil, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := base.fs.Clone()
			f.WriteFile(tc.path, tc.content)
			before := snapshotFiles(f)
			j, err := journal.Open(journal.Options{Dir: "/j", FS: f})
			if tc.want == nil {
				if err != nil {
					t.Fatalf("Open() = %v", err)
				}
				j.Close()
				return
			}
			if !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.path) {
				t.Errorf("Open() = %v, want %v with path %s", err, tc.want, tc.path)
			}
			if diff := cmp.Diff(before, snapshotFiles(f)); diff != "" {
				t.Errorf("files changed: %s", diff)
			}
		})
	}
}

func snapshotFiles(f *memfs.FS) map[string]string {
	m := map[string]string{}
	for _, name := range f.Files() {
		m[name] = string(f.ReadFile(name))
	}
	return m
}

func TestLostName(t *testing.T) {
	f := memfs.New()
	j := open(t, f)
	for _, name := range []string{"one", "two"} {
		l, err := j.OpenLog(name, journal.Replay{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Append(entries(content{{1, 1, "m", "body"}})); err != nil {
			t.Fatal(err)
		}
	}
	j.Close()
	for _, p := range segments(f) {
		if b := f.ReadFile(p); strings.Contains(string(b[:100]), "one") {
			b[72] = 'O' // in the name
			f.WriteFile(p, b)
		}
	}
	j = open(t, f)
	if got := j.Logs(); !slices.Equal(got, []string{"two"}) {
		t.Errorf("Logs() = %q, want two", got)
	}
	if s := j.Stats(); s.Lost != 1 {
		t.Errorf("Lost = %d, want 1", s.Lost)
	}
	if n := len(segments(f)); n != 1 {
		t.Errorf("%d segments left, want 1", n)
	}
	var r replayed
	if _, err := j.OpenLog("one", r.replay()); err != nil || !r.all {
		t.Errorf("OpenLog() = %v, damaged %v, want DamagedAll", err, r.all)
	}
}

// TestAppendCost holds Append to what it may cost: the disk is what is slow.
func TestAppendCost(t *testing.T) {
	f := memfs.New()
	j := open(t, f)
	l, err := j.OpenLog("log", journal.Replay{})
	if err != nil {
		t.Fatal(err)
	}
	var ops []string
	f.SetFault(func(op memfs.Op) error {
		ops = append(ops, op.Name)
		return nil
	})
	first := []string{"mkdir", "create", "write", "sync", "syncdir", "syncdir"}
	next := []string{"open", "write", "sync"}
	roll := []string{"create", "write", "sync", "syncdir", "open", "write", "sync"}
	reopened := []string{"open", "sync", "write", "sync", "syncdir", "syncdir"}
	appendOps := func(want []string) {
		t.Helper()
		ops = nil
		if _, err := l.Append(entries(content{{1, 1, "m", strings.Repeat("x", 900)}})); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, ops); diff != "" {
			t.Errorf("operations of Append (-want +got):\n%s", diff)
		}
	}
	for _, want := range [][]string{first, next, roll, next, roll} {
		appendOps(want)
	}
	before := j.Stats()
	appendOps(next)
	after := j.Stats()
	if n := after.BytesWritten - before.BytesWritten; n > 900+1+90 {
		t.Errorf("%d bytes written for a body of 900", n)
	}
	if n := after.Syncs - before.Syncs; n != 1 {
		t.Errorf("%d syncs, want 1", n)
	}
	appendOps(roll)
	l.Close()
	if l, err = j.OpenLog("log", journal.Replay{}); err != nil {
		t.Fatal(err)
	}
	appendOps(reopened)
}

func TestLimits(t *testing.T) {
	j := open(t, memfs.New())
	if _, err := j.OpenLog(strings.Repeat("x", 4097), journal.Replay{}); !errors.Is(err, journal.ErrTooLarge) {
		t.Errorf("OpenLog of a long name = %v, want ErrTooLarge", err)
	}
	l, err := j.OpenLog(strings.Repeat("x", 4096), journal.Replay{})
	if err != nil {
		t.Fatal(err)
	}
	if refs, err := l.Append(nil); refs != nil || err != nil {
		t.Errorf("Append(nil) = %v, %v", refs, err)
	}
	for _, e := range []journal.Entry{{Kind: 0}, {Kind: 128}, {Kind: 1, Meta: make([]byte, 64<<10+1)}} {
		if _, err := l.Append([]journal.Entry{e}); err == nil {
			t.Errorf("Append(kind %d, meta %d) = nil, want an error", e.Kind, len(e.Meta))
		}
		if _, err := l.Rewrite(func(yield func(journal.Entry, error) bool) { yield(e, nil) }); err == nil {
			t.Errorf("Rewrite(kind %d, meta %d) = nil, want an error", e.Kind, len(e.Meta))
		}
	}
	big := journal.Entry{Kind: 127, Scope: 1<<32 - 1, Meta: make([]byte, 64<<10), Body: make([]byte, 600<<10)}
	big.Body[599<<10] = 7
	refs, err := l.Append([]journal.Entry{big, big})
	if err != nil {
		t.Fatal(err)
	}
	boom := errors.New("boom")
	if _, err := l.Rewrite(func(yield func(journal.Entry, error) bool) { _ = yield(big, nil) && yield(big, boom) }); !errors.Is(err, boom) {
		t.Errorf("Rewrite with a failing iterator = %v, want boom", err)
	}
	v := l.View()
	defer v.Close()
	for _, ref := range refs {
		if b, err := v.Read(ref, nil); err != nil || string(b) != string(big.Body) {
			t.Errorf("Read(%v) = %d bytes, %v", ref, len(b), err)
		}
	}
	l.Close()
	var r replayed
	if _, err := j.OpenLog(strings.Repeat("x", 4096), r.replay()); err != nil || len(r.content) != 2 || r.all {
		t.Errorf("replayed %d entries, %v, %v, want 2", len(r.content), r.all, err)
	}
}

// TestOldViewOfClosedLog opens a log again while a View of its former life
// is still read, and rewrites it.
func TestOldViewOfClosedLog(t *testing.T) {
	f := memfs.New()
	j := open(t, f)
	l, _ := j.OpenLog("log", journal.Replay{})
	refs, err := l.Append(entries(content{{1, 1, "", "old"}}))
	if err != nil {
		t.Fatal(err)
	}
	v := l.View()
	l.Close()
	l, err = j.OpenLog("log", journal.Replay{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Rewrite(seq(content{{1, 1, "", "new"}})); err != nil {
		t.Fatal(err)
	}
	if b, err := v.Read(refs[0], nil); err != nil || string(b) != "old" {
		t.Errorf("Read() = %q, %v, want old", b, err)
	}
	v.Close()
	l.Close()
	var r replayed
	if _, err := j.OpenLog("log", r.replay()); err != nil || len(r.content) != 1 || r.all {
		t.Errorf("replayed %v, %v, %v", r.content, r.all, err)
	}
	if n := len(segments(f)); n != 1 {
		t.Errorf("%d segments left, want 1", n)
	}
}

// TestConcurrent reads through Views while logs are appended to, rewritten and
// removed. Each body says where it belongs.
func TestConcurrent(t *testing.T) {
	j, err := journal.Open(journal.Options{Dir: t.TempDir(), SegmentBytes: 8 << 10, MaxOpenFiles: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	var wg sync.WaitGroup
	for n := range 3 {
		wg.Go(func() { churn(t, j, fmt.Sprintf("log-%d", n)) })
	}
	wg.Wait()
	if s := j.Stats(); s.ReadErrors+s.Failures+s.Damages > 0 || s.OpenFiles > 3 {
		t.Errorf("Stats() = %+v", s)
	}
}

// live is what readers of one log work with.
type live struct {
	sync.Mutex
	view func() *journal.View
	refs map[string]journal.Ref
}

func (l *live) take() (*journal.View, map[string]journal.Ref) {
	l.Lock()
	defer l.Unlock()
	refs := map[string]journal.Ref{}
	for body, ref := range l.refs {
		refs[body] = ref
	}
	return l.view(), refs
}

func churn(t *testing.T, j *journal.Journal, name string) {
	l, err := j.OpenLog(name, journal.Replay{})
	if err != nil {
		t.Error(err)
		return
	}
	state := &live{view: l.View, refs: map[string]journal.Ref{}}
	var stop atomic.Bool
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for !stop.Load() {
				v, refs := state.take()
				for body, ref := range refs {
					if b, err := v.Read(ref, nil); err != nil || string(b) != body {
						t.Errorf("Read(%v) = %.20q, %v, want %.20q", ref, b, err, body)
					}
				}
				v.Close()
				j.Stats()
				runtime.Gosched()
			}
		})
	}
	body := func(i, k int) string { return fmt.Sprintf("%s/%d/%d:%s", name, i, k, strings.Repeat("x", 300*k)) }
	for i := range 60 {
		switch {
		case i%20 == 19:
			// Views must be taken while the log has what the refs mean.
			state.Lock()
			state.refs = map[string]journal.Ref{}
			if err := l.Remove(); err != nil {
				t.Error(err)
			}
			if l, err = j.OpenLog(name, journal.Replay{}); err != nil {
				t.Error(err)
			}
			state.view = l.View
			state.Unlock()
		case i%7 == 6:
			v, refs := state.take()
			names := []string{}
			for b := range refs {
				names = append(names, b)
			}
			names = names[len(names)/2:]
			// Readers go on during the Rewrite; refs and Views change hands after it.
			state.Lock()
			got, err := l.Rewrite(func(yield func(journal.Entry, error) bool) {
				for _, b := range names {
					old, err := v.Read(refs[b], nil)
					if !yield(journal.Entry{Kind: 1, Body: old}, err) {
						return
					}
				}
			})
			if err != nil {
				t.Error(err)
			}
			state.refs = map[string]journal.Ref{}
			for k, ref := range got {
				state.refs[names[k]] = ref
			}
			state.Unlock()
			v.Close()
		default:
			es := []journal.Entry{{Kind: 1, Body: []byte(body(i, 0))}, {Kind: 2, Body: []byte(body(i, i%9))}}
			refs, err := l.Append(es)
			if err != nil {
				t.Error(err)
			}
			state.Lock()
			for k, ref := range refs {
				state.refs[string(es[k].Body)] = ref
			}
			state.Unlock()
		}
	}
	stop.Store(true)
	wg.Wait()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

func TestUnwritableDir(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := journal.Open(journal.Options{Dir: filepath.Join(file, "journal")}); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("Open() below a file = %v, want an error with the path", err)
	}
	for _, o := range []journal.Options{{}, {Dir: "x", SegmentBytes: -1}, {Dir: "x", SegmentBytes: 2 << 30}, {Dir: "x", MaxOpenFiles: -1}} {
		if _, err := journal.Open(o); err == nil {
			t.Errorf("Open(%+v) = nil, want an error", o)
		}
	}
}
