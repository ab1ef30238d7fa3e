// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

// A Reader gives what View.Read gives, in any order of Refs, also where some of
// them are damaged, unknown or cut off.
func TestReaderIsAsGoodAsRead(t *testing.T) {
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 1))
		fs := memfs.New()
		j, err := journal.Open(journal.Options{Dir: "/j", FS: fs, SegmentBytes: 128 << 10})
		if err != nil {
			t.Fatal(err)
		}
		l, err := j.OpenLog("log", journal.Replay{})
		if err != nil {
			t.Fatal(err)
		}
		var refs []journal.Ref
		for range 6 {
			var es []journal.Entry
			for range 1 + rng.IntN(40) {
				body := bytes.Repeat([]byte{byte(rng.IntN(256))}, rng.IntN(3000))
				if rng.IntN(40) == 0 {
					body = bytes.Repeat([]byte("large"), 20_000)
				}
				es = append(es, journal.Entry{Scope: 1, Kind: 1, Meta: []byte("meta"), Body: body})
			}
			more, err := l.Append(es)
			if err != nil {
				t.Fatal(err)
			}
			refs = append(refs, more...)
		}
		switch seed % 4 {
		case 1: // an old and a new half, interleaved
			half := len(refs) / 2
			for i := range half {
				refs = append(refs, refs[half+i], refs[i])
			}
			refs = refs[len(refs)-2*half:]
		case 2:
			rng.Shuffle(len(refs), func(i, k int) { refs[i], refs[k] = refs[k], refs[i] })
		case 3:
			refs = slices.DeleteFunc(refs, func(journal.Ref) bool { return rng.IntN(3) == 0 })
			refs = append(refs, journal.Ref{Segment: 99, Offset: 500, Length: 4}, refs[0], refs[0])
		}
		v := l.View()
		if rng.IntN(2) == 0 {
			for _, name := range fs.Files() {
				if b := fs.ReadFile(name); len(b) > 1000 && bytes.HasPrefix(b, []byte("ehubjrnl")) {
					for range 3 {
						b[200+rng.IntN(len(b)-200)] ^= 1
					}
					if rng.IntN(4) == 0 {
						b = b[:len(b)/2]
					}
					fs.WriteFile(name, b)
				}
			}
		}
		next := 0
		r := v.Reader(func(i int) journal.Ref {
			if i += next + 1; i < len(refs) {
				return refs[i]
			}
			return journal.Ref{}
		})
		for next = range refs {
			got, gotErr := r.Read(refs[next])
			want, wantErr := v.Read(refs[next], nil)
			if !bytes.Equal(got, want) || errors.Is(gotErr, journal.ErrDamaged) != errors.Is(wantErr, journal.ErrDamaged) ||
				(gotErr == nil) != (wantErr == nil) {
				t.Fatalf("seed %d, ref %d of %d: %d bytes, %v, want %d, %v", seed, next, len(refs), len(got), gotErr, len(want), wantErr)
			}
		}
		r.Close()
		v.Close()
		if _, err := r.Read(refs[0]); !errors.Is(err, journal.ErrClosed) {
			t.Errorf("read of a closed view = %v, want ErrClosed", err)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// Neighbours on disk cost one read, whatever lies between them in the list.
func TestReaderReadsAhead(t *testing.T) {
	fs := memfs.New()
	j, err := journal.Open(journal.Options{Dir: "/j", FS: fs})
	if err != nil {
		t.Fatal(err)
	}
	defer j.Close()
	l, err := j.OpenLog("log", journal.Replay{})
	if err != nil {
		t.Fatal(err)
	}
	es := make([]journal.Entry, 1000)
	for i := range es {
		es[i] = journal.Entry{Scope: 1, Kind: 1, Body: make([]byte, 2000)}
	}
	refs, err := l.Append(es)
	if err != nil {
		t.Fatal(err)
	}
	newer, err := l.Append(es[:10])
	if err != nil {
		t.Fatal(err)
	}
	for i, ref := range newer { // ten have changed since
		refs[(i*371)%1000] = ref
	}
	v := l.View()
	defer v.Close()
	next := 0
	r := v.Reader(func(i int) journal.Ref {
		if i += next + 1; i < len(refs) {
			return refs[i]
		}
		return journal.Ref{}
	})
	defer r.Close()
	before := fs.Ops()
	for next = range refs {
		if _, err := r.Read(refs[next]); err != nil {
			t.Fatal(err)
		}
	}
	if n := fs.Ops() - before; n > 1000/30+1+10+5 {
		t.Errorf("%d operations for 1,000 bodies of 2 KB of which 10 are elsewhere", n)
	}
}
