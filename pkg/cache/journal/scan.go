// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"errors"
	"hash/crc32"
	"io"
	"sync"
)

// windowBytes is the part of a segment that replay holds. It is larger than
// the largest meta; bodies are checked piece by piece.
const windowBytes = 256 << 10

var windows = sync.Pool{New: func() any { return new([windowBytes]byte) }}

// A window reads a file sequentially. What cannot be read is zero and sets
// failed: the checksums find it, and it is never taken for a torn write.
type window struct {
	file   File
	size   int64
	base   int64
	buf    []byte
	store  *[windowBytes]byte
	failed bool
}

func newWindow(f File, size int64) *window {
	return &window{file: f, size: size, store: windows.Get().(*[windowBytes]byte)}
}

func (w *window) release() {
	windows.Put(w.store)
	w.buf, w.store = nil, nil
}

// bytes returns n bytes at an offset; off+n is within size and n within
// windowBytes. They are valid until the next call.
func (w *window) bytes(off int64, n int) []byte {
	if off < w.base || off+int64(n) > w.base+int64(len(w.buf)) {
		w.fill(off)
	}
	return w.buf[off-w.base:][:n]
}

func (w *window) fill(off int64) {
	w.base, w.buf = off, w.store[:min(windowBytes, w.size-off)]
	if n, err := w.file.ReadAt(w.buf, off); n == len(w.buf) && (err == nil || errors.Is(err, io.EOF)) {
		return
	}
	const page = 4 << 10 // save what can be saved around a bad sector
	for at := 0; at < len(w.buf); at += page {
		b := w.buf[at:min(at+page, len(w.buf))]
		if n, _ := w.file.ReadAt(b, off+int64(at)); n != len(b) {
			clear(b)
			w.failed = true
		}
	}
}

// crc is the checksum of n bytes at an offset, within size.
func (w *window) crc(off, n int64) uint32 {
	var sum uint32
	for n > 0 {
		if off < w.base || off >= w.base+int64(len(w.buf)) {
			w.fill(off)
		}
		b := w.buf[off-w.base:]
		b = b[:min(int64(len(b)), n)]
		sum = crc32.Update(sum, castagnoli, b)
		off += int64(len(b))
		n -= int64(len(b))
	}
	return sum
}

// A scanner reads the batches of one segment and hands them to a Replay.
type scanner struct {
	*window
	header  segmentHeader
	seed    uint32
	limit   int64 // nothing at or after it belongs to the segment
	sealed  bool  // limit is where the batches end, not just where the file does
	replay  Replay
	damages int // reports made

	pos    int64  // begin of the next batch
	seq    uint64 // of its first record
	count  int    // good batches seen
	next   uint32 // number of the next segment as the footer has it
	torn   bool   // the segment ends with a batch that is not whole
	closed bool   // a sealed record was seen

	// The batch being read.
	after   uint64 // sequence number of the record after it
	entries []Entry
	refs    []Ref
	meta    []byte
	metaAt  []int
	bad     map[uint32]bool // scopes with a damaged meta or body
}

// scan reads the whole segment. After it pos is where the batches end.
func (s *scanner) scan() {
	for {
		at, ok := s.batch()
		switch {
		case ok && len(s.bad) > 0 && !s.sealed && !s.later(at, s.pos):
			s.torn = true
			return
		case ok:
			s.deliver()
			s.pos, s.seq = at, s.after
			if s.sealed && s.pos == s.limit {
				return
			}
		case s.pos == s.limit || s.end():
			return
		case s.sealed || s.later(at, s.pos):
			s.damagedAll()
			if !s.resync(at) {
				s.pos = s.limit
				return
			}
		default:
			s.torn = true
			return
		}
	}
}

// record reads the record header at an offset, if one is there.
func (s *scanner) record(at int64) (recordHeader, bool) {
	if at+recordSize > s.limit {
		return recordHeader{}, false
	}
	return decodeRecord(s.bytes(at, recordSize), s.seed, at)
}

// batch reads one batch at pos. It returns the offset after it, or that of
// what kept it from being one.
func (s *scanner) batch() (int64, bool) {
	s.entries, s.refs, s.meta, s.metaAt = nil, nil, s.meta[:0], s.metaAt[:0]
	clear(s.bad)
	var sum uint32
	seq := s.seq
	for at := s.pos; ; {
		h, ok := s.record(at)
		if !ok || int64(h.batch) != s.pos || at+h.size() > s.limit {
			return at, false
		}
		if h.kind == kindCommit {
			ok = h.seq+1 == seq && int(h.scope) == len(s.refs) && h.scope > 0 && h.metaCRC == sum
			s.after = seq
			return at + recordSize, ok
		}
		if h.kind > maxKind || h.seq != seq {
			return at, false
		}
		sum = crc32.Update(sum, castagnoli, s.bytes(at, recordSize))
		s.content(at, &h)
		seq++
		at += h.size()
	}
}

// content checks the body and the meta of a record and keeps the meta.
func (s *scanner) content(at int64, h *recordHeader) {
	body := at + recordSize
	good := s.crc(body, int64(h.bodyLen)) == h.bodyCRC
	meta := s.bytes(body+int64(h.bodyLen), int(h.metaLen))
	if !good || crc32.Checksum(meta, castagnoli) != h.metaCRC {
		if s.bad == nil {
			s.bad = map[uint32]bool{}
		}
		s.bad[h.scope] = true
	}
	s.entries = append(s.entries, Entry{Scope: h.scope, Kind: h.kind})
	s.refs = append(s.refs, Ref{Segment: s.header.number, Offset: uint32(at), Length: h.bodyLen})
	s.metaAt = append(s.metaAt, len(s.meta))
	s.meta = append(s.meta, meta...)
}

// deliver reports what is damaged in the batch and then hands over the rest.
// Of a damaged scope nothing of the batch is handed over: an entry that ends
// a list must not follow a report of what the list lacks.
func (s *scanner) deliver() {
	s.count++
	n := 0
	reported := map[uint32]bool(nil)
	for i := range s.entries {
		scope := s.entries[i].Scope
		if s.bad[scope] {
			if !reported[scope] {
				if reported == nil {
					reported = map[uint32]bool{}
				}
				reported[scope] = true
				s.damaged(scope)
			}
			continue
		}
		end := len(s.meta)
		if i+1 < len(s.metaAt) {
			end = s.metaAt[i+1]
		}
		s.entries[n], s.refs[n] = s.entries[i], s.refs[i]
		s.entries[n].Meta = s.meta[s.metaAt[i]:end:end]
		n++
	}
	if n > 0 && s.replay.Batch != nil {
		s.replay.Batch(s.entries[:n], s.refs[:n])
	}
}

func (s *scanner) damaged(scope uint32) {
	s.damages++
	if s.replay.Damaged != nil {
		s.replay.Damaged(scope)
	}
}

func (s *scanner) damagedAll() {
	s.damages++
	if s.replay.DamagedAll != nil {
		s.replay.DamagedAll()
	}
}

// end reads what ends a segment at pos: a footer, or the sealed record of a
// snapshot, which a footer may follow.
func (s *scanner) end() bool {
	if h, ok := s.record(s.pos); ok && h.kind == kindSealed && h.seq+1 == s.seq && int64(h.batch) == s.pos {
		s.closed = true
		s.pos += recordSize
		if s.pos == s.limit || s.sealed {
			return s.pos == s.limit
		}
	}
	s.next = s.footer(s.pos)
	return s.next != 0 || s.closed
}

// footer returns the number of the next segment if a footer is at an offset.
func (s *scanner) footer(at int64) uint32 {
	if at+recordSize > s.size {
		return 0
	}
	h, ok := decodeRecord(s.bytes(at, recordSize), s.seed, at)
	if !ok || h.kind != kindFooter || int64(h.batch) != at {
		return 0
	}
	return h.scope
}

// later reports whether anything after an offset was written after the batch
// that begins at batch. Since a batch is durable before the next one is
// written, what is wrong before it is damage and no torn write.
func (s *scanner) later(from, batch int64) bool {
	for at := align(from); at+recordSize <= s.limit; at += 8 {
		if h, ok := s.record(at); ok && int64(h.batch) > batch {
			return true
		}
	}
	return false
}

// resync goes to the first batch at or after an offset that can be read.
func (s *scanner) resync(from int64) bool {
	for at := align(from); at+recordSize <= s.limit; at += 8 {
		h, ok := s.record(at)
		if !ok || int64(h.batch) != at {
			continue
		}
		seq := h.seq
		if h.kind > maxKind {
			seq++
		}
		if seq < s.seq || at == s.pos && seq == s.seq {
			continue
		}
		s.pos, s.seq = at, seq
		return true
	}
	return false
}
