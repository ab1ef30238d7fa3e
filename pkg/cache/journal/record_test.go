// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"testing"
)

// Reseal makes checksums of headers right where the fuzzer damaged them.
func Reseal(b []byte, number uint32, how uint8) []byte {
	b = bytes.Clone(b)
	if how&1 != 0 && len(b) >= headerFixed {
		copy(b, segmentMagic)
		binary.LittleEndian.PutUint32(b[8:], formatVersion)
		h := segmentHeader{number: number, name: "log"}
		le.PutUint32(b[32:], number)
		le.PutUint32(b[64:], 3)
		if end := int(h.size()); end <= len(b) {
			copy(b[headerFixed:end], "log\x00\x00\x00\x00\x00")
			le.PutUint32(b[12:], crc(b[:12]))
			le.PutUint32(b[16:], headerCRC(b[:end]))
		}
	}
	h, state := decodeHeader(b, hashName("log"), number)
	if how&2 == 0 || state != headerOK {
		return b
	}
	seed := h.seed()
	for at := h.size(); at+recordSize <= int64(len(b)); at += 8 {
		r := b[at : at+recordSize]
		if le.Uint16(r[4:]) == recordMagic {
			le.PutUint32(r, recordCRC(seed, at, r))
		}
	}
	return b
}

func FuzzRecordRoundTrip(f *testing.F) {
	f.Add(uint32(1), uint8(1), []byte("meta"), []byte("body"), uint32(7), int64(80))
	f.Add(uint32(0), uint8(127), []byte{}, []byte{}, uint32(0), int64(0))
	f.Fuzz(func(t *testing.T, scope uint32, kind uint8, meta, body []byte, seed uint32, at int64) {
		at = align(at & 0x7fff_fff0)
		h := recordHeader{
			kind: kind, seq: uint64(scope) * 3, scope: scope, batch: uint32(at), metaLen: uint32(len(meta)), bodyLen: uint32(len(body)),
			metaCRC: crc(meta), bodyCRC: crc(body),
		}
		b := make([]byte, recordSize)
		h.put(b, seed, at)
		got, ok := decodeRecord(b, seed, at)
		want := kind >= 1 && kind <= kindSealed && (kind <= maxKind || len(meta)+len(body) == 0) && len(meta) <= maxMetaBytes
		if ok != want || ok && got != h {
			t.Fatalf("decodeRecord(%+v) = %+v, %v, want %v", h, got, ok, want)
		}
		if _, ok := decodeRecord(b, seed, at+8); ok {
			t.Fatal("decodeRecord at another offset = true")
		}
		for i := range b {
			b[i] ^= 1 << (i % 8)
			if _, ok := decodeRecord(b, seed, at); ok {
				t.Fatalf("decodeRecord with byte %d flipped = true", i)
			}
			b[i] ^= 1 << (i % 8)
		}
		if _, err := entrySize(&Entry{Scope: scope, Kind: kind, Meta: meta, Body: body}); err != nil {
			return
		}
		var file bytesFile
		sh := &segmentHeader{number: 1, salt: uint64(seed), firstSeq: 1, name: "n"}
		w := newWriter(&file, sh, 0, 1)
		w.header(sh)
		e := []Entry{{Scope: scope, Kind: kind, Meta: meta, Body: body}, {Kind: 1, Meta: body[:min(len(body), 99)]}}
		refs := w.batchOf(e)
		size, err := batchSize(e)
		if w.err != nil || err != nil || w.at != size+sh.size() || int64(len(file)) != w.at {
			t.Fatalf("batch of %d bytes at %d, file of %d, %v, %v", size, w.at, len(file), w.err, err)
		}
		s := newScanner(&file, &segment{header: *sh, seed: sh.seed()}, w.at)
		defer s.release()
		s.replay.Batch = func(es []Entry, rs []Ref) {
			if es[0].Scope != scope || es[0].Kind != kind || !bytes.Equal(es[0].Meta, meta) || rs[0] != refs[0] || rs[1] != refs[1] {
				t.Fatalf("replayed %+v %v, want %+v %v", es, rs, e, refs)
			}
		}
		if s.scan(); s.count != 1 || s.damages != 0 || s.torn || s.pos != w.at || s.seq != 3 {
			t.Fatalf("scan: %d batches, %d damages, torn %v, at %d, seq %d", s.count, s.damages, s.torn, s.pos, s.seq)
		}
	})
}

// TestCommitBindsRecords puts a record of another batch, valid at this very
// place, between a record and the commit that do not belong to it.
func TestCommitBindsRecords(t *testing.T) {
	batch := func(body string) bytesFile {
		var file bytesFile
		h := &segmentHeader{number: 1, firstSeq: 1, name: "n"}
		w := newWriter(&file, h, 0, 1)
		defer w.release()
		w.header(h)
		w.batchOf([]Entry{{Kind: 1, Body: []byte(body)}, {Kind: 1, Body: []byte(body)}})
		return file
	}
	for _, tc := range []struct {
		name  string
		mixed bool
		count int
	}{{"whole", false, 1}, {"mixed", true, 0}} {
		t.Run(tc.name, func(t *testing.T) {
			file, other := batch("body one"), batch("body two")
			h := &segmentHeader{number: 1, firstSeq: 1, name: "n"}
			if at := h.size(); tc.mixed {
				copy(file[at:at+48], other[at:at+48])
			}
			s := newScanner(&file, &segment{header: *h, seed: h.seed()}, int64(len(file)))
			defer s.release()
			if s.scan(); s.count != tc.count || s.torn != tc.mixed {
				t.Errorf("scan() = %d batches, torn %v, want %d, %v", s.count, s.torn, tc.count, tc.mixed)
			}
		})
	}
}

func crc(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// bytesFile is a File in memory that is only written at its end.
type bytesFile []byte

func (f *bytesFile) WriteAt(b []byte, off int64) (int, error) {
	*f = append((*f)[:off], b...)
	return len(b), nil
}

func (f *bytesFile) ReadAt(b []byte, off int64) (int, error) {
	return bytes.NewReader(*f).ReadAt(b, off)
}

func (f *bytesFile) Size() (int64, error)   { return int64(len(*f)), nil }
func (f *bytesFile) Truncate(n int64) error { *f = (*f)[:n]; return nil }
func (f *bytesFile) Sync() error            { return nil }
func (f *bytesFile) Close() error           { return nil }
