// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal_test

import (
	"testing"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

// FuzzReplay replays two segments of arbitrary bytes. how has the checksums of
// headers made right: behind a checksum that never matches nothing would be found.
func FuzzReplay(f *testing.F) {
	good := memfs.New()
	j, err := journal.Open(journal.Options{Dir: "/j", FS: good, SegmentBytes: 200})
	if err != nil {
		f.Fatal(err)
	}
	l, err := j.OpenLog("log", journal.Replay{})
	if err != nil {
		f.Fatal(err)
	}
	for i := range uint32(2) {
		if _, err := l.Append(entries(content{{1, 1, "meta", "body"}, {i, 2, "", ""}})); err != nil {
			f.Fatal(err)
		}
	}
	names := segments(good)
	one, two := good.ReadFile(names[0]), good.ReadFile(names[1])
	if _, err := l.Rewrite(seq(content{{1, 1, "meta", "body"}, {2, 1, "", "other body"}})); err != nil {
		f.Fatal(err)
	}
	three := good.ReadFile(segments(good)[0])
	f.Add(one, two, uint8(0))
	f.Add(one, two, uint8(3))
	f.Add(two, one, uint8(3))
	f.Add(one, three, uint8(3))
	f.Add([]byte{}, one, uint8(1))
	f.Add(make([]byte, 200), []byte("ehubjrnl"), uint8(2))
	f.Fuzz(func(t *testing.T, a, b []byte, how uint8) {
		files := memfs.New()
		files.WriteFile(names[0], journal.Reseal(a, 1, how))
		files.WriteFile(names[1], journal.Reseal(b, 2, how))
		j, err := journal.Open(journal.Options{Dir: "/j", FS: files})
		if err != nil {
			return // a newer format
		}
		defer j.Close()
		var r replayed
		l, err := j.OpenLog("log", r.replay())
		if err != nil {
			t.Fatal(err)
		}
		r.bodies(t, l)
		count := 0
		for _, rec := range r.content {
			count += len(rec.meta) + len(rec.body)
		}
		if count > len(a)+len(b) {
			t.Fatalf("%d bytes replayed out of %d", count, len(a)+len(b))
		}
		if _, err := l.Append(entries(content{{1, 9, "", "new"}})); err != nil {
			t.Fatal(err)
		}
		l.Close()
		var again replayed
		if l, err = j.OpenLog("log", again.replay()); err != nil {
			t.Fatal(err)
		}
		again.bodies(t, l)
		if n := len(again.content); n == 0 || again.content[n-1].body != "new" {
			t.Fatalf("%v after Append", again.content)
		}
		if reported := r.all || len(r.scopes) > 0; reported && !again.all && len(again.scopes) == 0 {
			t.Fatal("damage is not reported any more")
		}
	})
}
