// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal_test

import (
	"bytes"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/edgehub/edgehub/pkg/cache/journal"
)

// benchDir is on a disk: the default place for temporary files may be memory,
// where a sync costs nothing. Set JOURNAL_BENCH_DIR to measure another disk.
func benchDir(b *testing.B) string {
	b.Helper()
	dir, err := os.MkdirTemp(os.Getenv("JOURNAL_BENCH_DIR"), "journal-bench-")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func benchLog(b *testing.B) (*journal.Journal, *journal.Log) {
	b.Helper()
	j, err := journal.Open(journal.Options{Dir: benchDir(b)})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { j.Close() })
	l, err := j.OpenLog("bench", journal.Replay{})
	if err != nil {
		b.Fatal(err)
	}
	return j, l
}

func benchEntries(n, size int) []journal.Entry {
	es := make([]journal.Entry, n)
	rng := rand.NewChaCha8([32]byte{1})
	for i := range es {
		body := make([]byte, size)
		rng.Read(body)
		es[i] = journal.Entry{Scope: uint32(i % 20), Kind: 1, Meta: bytes.Repeat([]byte("m"), 90), Body: body}
	}
	return es
}

// BenchmarkAppend is one watch event of 5 KB, made durable.
func BenchmarkAppend(b *testing.B) {
	j, l := benchLog(b)
	es := benchEntries(1, 5<<10)
	b.ReportAllocs()
	b.SetBytes(5 << 10)
	for b.Loop() {
		if _, err := l.Append(es); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(j.Stats().BytesWritten)/float64(b.N), "written/op")
}

// BenchmarkAppendList is a list of 5,000 objects of 4 KB in one batch.
func BenchmarkAppendList(b *testing.B) {
	j, l := benchLog(b)
	es := benchEntries(5000, 4<<10)
	b.ReportAllocs()
	b.SetBytes(5000 * 4 << 10)
	for b.Loop() {
		if _, err := l.Append(es); err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if _, err := l.Rewrite(seq(nil)); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	b.ReportMetric(float64(j.Stats().BytesWritten)/float64(b.N), "written/op")
}

// BenchmarkRewrite compacts a log to 5,000 objects of 4 KB, read from itself.
func BenchmarkRewrite(b *testing.B) {
	j, l := benchLog(b)
	es := benchEntries(5000, 4<<10)
	refs, err := l.Append(es)
	if err != nil {
		b.Fatal(err)
	}
	before := j.Stats().BytesWritten
	b.ReportAllocs()
	b.SetBytes(5000 * 4 << 10)
	var buf []byte
	for b.Loop() {
		v := l.View()
		refs, err = l.Rewrite(func(yield func(journal.Entry, error) bool) {
			for i, ref := range refs {
				body, err := v.Read(ref, buf[:0])
				buf = body
				if !yield(journal.Entry{Scope: es[i].Scope, Kind: 1, Meta: es[i].Meta, Body: body}, err) {
					return
				}
			}
		})
		if err != nil {
			b.Fatal(err)
		}
		v.Close()
	}
	b.ReportMetric(float64(j.Stats().BytesWritten-before)/float64(b.N), "written/op")
}

// BenchmarkOpen replays 10,000 records, 30 MB, of one log or of 200.
func BenchmarkOpen(b *testing.B) {
	for _, logs := range []int{1, 200} {
		b.Run(map[int]string{1: "1log", 200: "200logs"}[logs], func(b *testing.B) {
			dir := benchDir(b)
			j, err := journal.Open(journal.Options{Dir: dir})
			if err != nil {
				b.Fatal(err)
			}
			es := benchEntries(10000/logs, 3<<10)
			for i := range logs {
				l, err := j.OpenLog(string(rune('a'+i)), journal.Replay{})
				if err != nil {
					b.Fatal(err)
				}
				for k := 0; k < len(es); k += 25 {
					if _, err := l.Append(es[k : k+25]); err != nil {
						b.Fatal(err)
					}
				}
			}
			j.Close()
			b.ReportAllocs()
			b.SetBytes(10000 * 3 << 10)
			for b.Loop() {
				j, err := journal.Open(journal.Options{Dir: dir})
				if err != nil {
					b.Fatal(err)
				}
				n := 0
				for _, name := range j.Logs() {
					if _, err := j.OpenLog(name, journal.Replay{Batch: func(es []journal.Entry, _ []journal.Ref) { n += len(es) }}); err != nil {
						b.Fatal(err)
					}
				}
				if n != 10000 {
					b.Fatalf("%d records", n)
				}
				j.Close()
			}
		})
	}
}

// BenchmarkRead is one body of 4 KB out of 5,000.
func BenchmarkRead(b *testing.B) {
	_, l := benchLog(b)
	refs, err := l.Append(benchEntries(5000, 4<<10))
	if err != nil {
		b.Fatal(err)
	}
	v := l.View()
	defer v.Close()
	b.ReportAllocs()
	b.SetBytes(4 << 10)
	var buf []byte
	for i := 0; b.Loop(); i++ {
		if buf, err = v.Read(refs[i%len(refs)], buf[:0]); err != nil {
			b.Fatal(err)
		}
	}
}
