// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal_test

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

// history is a log, as it is after each batch since its last Rewrite.
type history struct {
	fs     *memfs.FS
	states []content // states[i] is the log after i batches
	sizes  map[string][]int64
}

const small = 640 // SegmentBytes of the logs that are damaged: three batches and more in the last segment

// smallLog makes a log of several segments, with or without a snapshot.
func smallLog(t *testing.T, snapshot bool) history {
	t.Helper()
	f := memfs.New()
	j, err := journal.Open(journal.Options{Dir: "/j", FS: f, SegmentBytes: small})
	if err != nil {
		t.Fatal(err)
	}
	l, err := j.OpenLog("log", journal.Replay{})
	if err != nil {
		t.Fatal(err)
	}
	h := history{fs: f, states: []content{nil}, sizes: map[string][]int64{}}
	w := newWorld(t, f)
	if snapshot {
		c := content{w.record(0, 60), w.record(1, 90), w.record(2, 120), w.record(0, 10), w.record(1, 33)}
		l.Append(entries(content{w.record(3, 50)}))
		if _, err := l.Rewrite(seq(c)); err != nil {
			t.Fatal(err)
		}
		h.states = []content{c}
		h.size(1)
	}
	for i, sizes := range [][]int{{20}, {50, 0}, {70}, {9, 8, 7}, {100}, {30}, {5, 64}, {40}, {21}} {
		var c content
		for k, size := range sizes {
			c = append(c, w.record(uint32((i+k)%3), size))
		}
		if _, err := l.Append(entries(c)); err != nil {
			t.Fatal(err)
		}
		h.states = append(h.states, append(fresh(h.states[len(h.states)-1]), c...))
		h.size(len(h.states))
	}
	j.Close()
	// Damage between the first and the last batch of the last segment has to
	// be seen too.
	last := h.sizes[segments(f)[len(segments(f))-1]]
	if n := len(last); last[n-1] == last[n-2] || last[n-2] == last[n-3] || last[n-3] == 0 {
		t.Fatalf("the last segment has %v bytes after each batch, want three batches", last)
	}
	return h
}

// size notes how large each file is after a number of states.
func (h *history) size(states int) {
	for _, name := range h.fs.Files() {
		for len(h.sizes[name]) < states {
			h.sizes[name] = append(h.sizes[name], 0)
		}
		h.sizes[name][states-1] = int64(len(h.fs.ReadFile(name)))
	}
}

// verdictOf replays a damaged file system. It returns what the test of one
// scope has to know: at which of the states it is, or that it is reported.
func verdictOf(t *testing.T, what string, f *memfs.FS, h history) (reported bool, at map[uint32][]int) {
	t.Helper()
	j, err := journal.Open(journal.Options{Dir: "/j", FS: f, SegmentBytes: small})
	if err != nil {
		t.Fatalf("%s: Open() = %v", what, err)
	}
	defer j.Close()
	var r replayed
	l, err := j.OpenLog("log", r.replay())
	if err != nil {
		t.Fatalf("%s: OpenLog() = %v", what, err)
	}
	r.bodies(t, l)
	at = map[uint32][]int{}
	for scope := range uint32(3) {
		if r.damaged(scope) {
			continue
		}
		for i, state := range h.states {
			if state.scope(scope).equal(r.content.scope(scope)) {
				at[scope] = append(at[scope], i)
			}
		}
		if at[scope] == nil {
			t.Fatalf("%s: scope %d is not reported, and holds\n%v\nwhich it never did", what, scope, r.content.scope(scope))
		}
	}
	return r.all || len(r.scopes) > 0, at
}

// stays checks that damage is still reported after more has been appended,
// and not any more after a Rewrite.
func stays(t *testing.T, what string, f *memfs.FS) {
	t.Helper()
	reopen := func(change func(*journal.Log)) bool {
		j, err := journal.Open(journal.Options{Dir: "/j", FS: f, SegmentBytes: small})
		if err != nil {
			t.Fatalf("%s: Open() = %v", what, err)
		}
		defer j.Close()
		var r replayed
		l, err := j.OpenLog("log", r.replay())
		if err != nil {
			t.Fatalf("%s: OpenLog() = %v", what, err)
		}
		change(l)
		return r.all || len(r.scopes) > 0
	}
	appendOne := func(l *journal.Log) {
		refs, err := l.Append([]journal.Entry{{Scope: 9, Kind: 1, Body: []byte("after damage")}})
		if err != nil {
			t.Fatalf("%s: Append after damage = %v", what, err)
		}
		v := l.View()
		defer v.Close()
		if b, err := v.Read(refs[0], nil); err != nil || string(b) != "after damage" {
			t.Fatalf("%s: Read after damage = %q, %v", what, b, err)
		}
	}
	reopen(appendOne)
	for i := range 2 {
		if !reopen(appendOne) {
			t.Fatalf("%s: not reported any more at replay %d", what, i+2)
		}
	}
	reopen(func(l *journal.Log) {
		if _, err := l.Rewrite(seq(content{{1, 1, "", "whole"}})); err != nil {
			t.Fatalf("%s: Rewrite = %v", what, err)
		}
	})
	if reopen(func(*journal.Log) {}) {
		t.Fatalf("%s: still reported after Rewrite", what)
	}
}

func TestEveryByteFlipped(t *testing.T) {
	for _, snapshot := range []bool{false, true} {
		h := smallLog(t, snapshot)
		files := segments(h.fs)
		last := len(h.states) - 1
		t.Run(fmt.Sprintf("snapshot=%v", snapshot), func(t *testing.T) {
			for _, name := range files {
				whole := h.fs.ReadFile(name)
				// Where the last batch of the log begins: flips in it cannot be
				// told from a torn write.
				lastBatch := h.sizes[name][last-1]
				inLast := name == files[len(files)-1]
				for i := range whole {
					if brief() && i%3 != 0 {
						continue
					}
					for _, mask := range masks() {
						b := slices.Clone(whole)
						b[i] ^= mask
						what := fmt.Sprintf("%s byte %d ^ %#x", path.Base(name), i, mask)
						f := h.fs.Clone()
						f.WriteFile(name, b)
						reported, at := verdictOf(t, what, f, h)
						oldest := last
						if inLast && int64(i) >= lastBatch {
							oldest = last - 1
						}
						for scope, states := range at {
							if slices.Max(states) < oldest {
								t.Fatalf("%s: scope %d is silently at state %v of %d", what, scope, states, last)
							}
						}
						if reported && mask == 0x01 && i%13 == 0 {
							stays(t, what, f)
						}
					}
				}
			}
		})
	}
}

func masks() []byte {
	if brief() {
		return []byte{0x01}
	}
	return []byte{0x01, 0x80, 0xff}
}

// TestGoesOnAfterDamage checks that what follows damage is still replayed.
func TestGoesOnAfterDamage(t *testing.T) {
	f := memfs.New()
	j := open(t, f)
	l, err := j.OpenLog("log", journal.Replay{})
	if err != nil {
		t.Fatal(err)
	}
	var refs []journal.Ref
	for i := range uint32(5) {
		r, err := l.Append(entries(content{{i, 1, "m", "body"}, {9, 1, "m", fmt.Sprint(i)}}))
		if err != nil {
			t.Fatal(err)
		}
		refs = append(refs, r[0])
	}
	j.Close()
	name := segments(f)[0]
	for _, tc := range []struct {
		name   string
		at     uint32
		all    bool
		scopes map[uint32]bool
		want   string
	}{
		{"header", refs[1].Offset + 8, true, map[uint32]bool{}, "0 9 2 9 3 9 4 9"},
		{"body", refs[1].Offset + 41, false, map[uint32]bool{1: true}, "0 9 9 2 9 3 9 4 9"},
		{"meta", refs[3].Offset + 44, false, map[uint32]bool{3: true}, "0 9 1 9 2 9 9 4 9"},
		{"commit", refs[3].Offset - 30, true, map[uint32]bool{}, "0 9 1 9 3 9 4 9"},
		{"last batch", refs[4].Offset, false, map[uint32]bool{}, "0 9 1 9 2 9 3 9"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := f.Clone()
			b := c.ReadFile(name)
			b[tc.at] ^= 4
			c.WriteFile(name, b)
			var r replayed
			if _, err := open(t, c).OpenLog("log", r.replay()); err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, rec := range r.content {
				got = append(got, fmt.Sprint(rec.scope))
			}
			if r.all != tc.all || !maps.Equal(r.scopes, tc.scopes) || strings.Join(got, " ") != tc.want {
				t.Errorf("replayed scopes %v, damaged %v %v, want %v, %v %v", got, r.all, r.scopes, tc.want, tc.all, tc.scopes)
			}
		})
	}
}

func segments(f *memfs.FS) []string {
	return slices.DeleteFunc(f.Files(), func(name string) bool { return !strings.HasSuffix(name, ".seg") })
}

// TestEveryTruncation cuts every file at every length. Only one thing cannot
// be told: the last segment, cut anywhere after its first batch, or, if it is
// the only segment, anywhere.
func TestEveryTruncation(t *testing.T) {
	for _, snapshot := range []bool{false, true} {
		h := smallLog(t, snapshot)
		files := segments(h.fs)
		last := len(h.states) - 1
		silent := 0
		for k, name := range files {
			whole := h.fs.ReadFile(name)
			for n := range len(whole) {
				if brief() && n%3 != 0 {
					continue
				}
				what := fmt.Sprintf("snapshot=%v: %s cut at %d of %d", snapshot, path.Base(name), n, len(whole))
				f := h.fs.Clone()
				f.WriteFile(name, whole[:n])
				reported, at := verdictOf(t, what, f, h)
				// The state in which the file had not more than n bytes.
				oldest := last
				if k == len(files)-1 {
					for oldest > 0 && h.sizes[name][oldest] > int64(n) {
						oldest--
					}
					if h.sizes[name][oldest] == 0 {
						oldest = last // not even the first batch: has to be seen
					}
				}
				for scope, states := range at {
					if slices.Max(states) < oldest {
						t.Fatalf("%s: scope %d is silently at state %v, want %d of %d", what, scope, states, oldest, last)
					}
				}
				if !reported && oldest < last {
					silent++
				}
				if reported && n%13 == 0 {
					stays(t, what, f)
				}
			}
		}
		t.Logf("snapshot=%v: %d truncations cannot be told from an earlier state", snapshot, silent)
	}
}

func TestEveryFileMissing(t *testing.T) {
	for _, snapshot := range []bool{false, true} {
		h := smallLog(t, snapshot)
		for _, name := range segments(h.fs) {
			what := fmt.Sprintf("snapshot=%v: %s missing", snapshot, path.Base(name))
			f := h.fs.Clone()
			if err := f.Remove(name); err != nil {
				t.Fatal(err)
			}
			if reported, _ := verdictOf(t, what, f, h); !reported {
				t.Errorf("%s: not reported", what)
			}
			stays(t, what, f)
		}
	}
}

// TestEveryReadFails makes each read during replay fail. What cannot be read
// is reported, and never taken for the end of the log.
func TestEveryReadFails(t *testing.T) {
	h := smallLog(t, true)
	last := len(h.states) - 1
	for n := 1; ; n++ {
		f := h.fs.Clone()
		hit := false
		f.SetFault(func(op memfs.Op) error {
			if op.N < n || op.Name != "read" && op.Name != "stat" || strings.HasSuffix(op.Path, "FORMAT") {
				return nil
			}
			hit = true
			return errFault
		})
		j, err := journal.Open(journal.Options{Dir: "/j", FS: f, SegmentBytes: small})
		if err != nil {
			t.Fatalf("reads fail from %d: Open() = %v", n, err)
		}
		var r replayed
		if _, err := j.OpenLog("log", r.replay()); err != nil {
			t.Fatalf("reads fail from %d: OpenLog() = %v", n, err)
		}
		if !hit {
			break
		}
		// The header says where it was read before the fault; what a later
		// read would have said has to be reported.
		if !r.all && len(r.scopes) == 0 {
			t.Fatalf("reads fail from %d: not reported, %d of %d entries", n, len(r.content), len(h.states[last]))
		}
	}
}

func TestReadChecksBody(t *testing.T) {
	f := memfs.New()
	j := open(t, f)
	l, err := j.OpenLog("log", journal.Replay{})
	if err != nil {
		t.Fatal(err)
	}
	refs, err := l.Append(entries(content{{1, 1, "meta", "the first body"}, {1, 1, "", "the other body"}}))
	if err != nil {
		t.Fatal(err)
	}
	v := l.View()
	defer v.Close()
	dst := []byte("dst")
	for _, ref := range []journal.Ref{
		{}, {Segment: 1}, {Segment: 2, Offset: refs[0].Offset, Length: 4}, {Segment: 1, Offset: 1 << 30, Length: 4},
		{Segment: 1, Offset: refs[0].Offset, Length: 1 << 31},
	} {
		if b, err := v.Read(ref, dst); !errors.Is(err, journal.ErrUnknownRef) || string(b) != "dst" {
			t.Errorf("Read(%v) = %q, %v, want ErrUnknownRef", ref, b, err)
		}
	}
	for _, ref := range []journal.Ref{
		{Segment: 1, Offset: refs[0].Offset + 8, Length: refs[0].Length},
		{Segment: 1, Offset: refs[0].Offset, Length: refs[0].Length - 1},
		{Segment: 1, Offset: refs[0].Offset, Length: refs[0].Length + 1},
	} {
		if b, err := v.Read(ref, dst); !errors.Is(err, journal.ErrDamaged) || string(b) != "dst" {
			t.Errorf("Read(%v) = %q, %v, want ErrDamaged", ref, b, err)
		}
	}
	name := segments(f)[0]
	file, err := f.Open(name, true)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteAt([]byte{'T'}, int64(refs[0].Offset)+40); err != nil {
		t.Fatal(err)
	}
	if _, err := v.Read(refs[0], nil); !errors.Is(err, journal.ErrDamaged) {
		t.Errorf("Read of a changed body = %v, want ErrDamaged", err)
	}
	if b, err := v.Read(refs[1], nil); err != nil || string(b) != "the other body" {
		t.Errorf("Read of the other body = %q, %v", b, err)
	}
	f.SetFault(func(op memfs.Op) error {
		if op.Name == "read" {
			return errFault
		}
		return nil
	})
	if _, err := v.Read(refs[1], nil); !errors.Is(err, journal.ErrDamaged) || !errors.Is(err, errFault) {
		t.Errorf("Read that fails = %v, want ErrDamaged and the reason", err)
	}
	if n := j.Stats().ReadErrors; n != 5 {
		t.Errorf("ReadErrors = %d, want 5", n)
	}
}
