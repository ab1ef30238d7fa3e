// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"sync"
)

const (
	// readAheadBytes is the most that a Reader reads at once for several bodies.
	readAheadBytes = 64 << 10
	// readAheadGap is how much that nobody asked for may lie between two bodies
	// that are read at once: about what another read would cost.
	readAheadGap = 8 << 10
	// readAheadMisses is how many of the coming bodies may lie elsewhere before no
	// further ones are looked at.
	readAheadMisses = 16
)

var aheads = sync.Pool{New: func() any { return new([readAheadBytes]byte) }}

// A Reader reads many bodies of a View one after the other. It looks at what will
// be asked for next: neighbours on disk cost one read together. Each body is
// checked as View.Read checks it. A Reader holds 64 KiB and no file; it is not safe
// for concurrent use and must be closed, but not before its last body was used.
type Reader struct {
	view   *View
	coming func(i int) Ref

	ahead *[readAheadBytes]byte
	run   []byte // bytes of segment from offset at, in ahead
	in    *segment
	at    int64
	last  uint32 // offset of the last body for which the run was read
	spent bool   // that one has been asked for
	one   []byte // a body that lies alone
}

// Reader returns a Reader. coming says what will be asked for after the Ref that is
// being read, from 0 on, and the zero Ref at the end.
func (v *View) Reader(coming func(i int) Ref) *Reader {
	return &Reader{view: v, coming: coming, spent: true}
}

// Read returns the body that ref stands for. It is valid until the next Read or
// Close. Errors are those of View.Read.
func (r *Reader) Read(ref Ref) ([]byte, error) {
	s, err := r.view.segment(ref)
	if err != nil {
		return nil, err
	}
	b, err := r.fetch(s, ref)
	if err == nil {
		b, err = s.check(ref, b)
	}
	if err != nil {
		return nil, r.view.failed(ref, err)
	}
	return b, nil
}

// Close gives the Reader's memory back.
func (r *Reader) Close() {
	if r.ahead != nil {
		aheads.Put(r.ahead)
	}
	*r = Reader{view: r.view, spent: true}
}

// fetch returns the record at ref up to the end of its body.
func (r *Reader) fetch(s *segment, ref Ref) ([]byte, error) {
	from, n := int64(ref.Offset), recordSize+int64(ref.Length)
	if s != r.in || from < r.at || from+n > r.at+int64(len(r.run)) {
		end := from + n
		last := ref.Offset
		if r.spent { // a run that is still needed is not given up for another one
			end, last = r.reach(ref, end)
		}
		if last == ref.Offset {
			r.one = slices.Grow(r.one[:0], int(n))[:n]
			return r.one, s.readAt(r.one, from)
		}
		if r.ahead == nil {
			r.ahead = aheads.Get().(*[readAheadBytes]byte)
		}
		r.in, r.at, r.run, r.last, r.spent = s, from, r.ahead[:end-from], last, false
		if err := s.readAt(r.run, from); err != nil {
			// Only one of them may be bad; each is told of on its own.
			r.in, r.run, r.spent = nil, nil, true
			r.one = slices.Grow(r.one[:0], int(n))[:n]
			return r.one, s.readAt(r.one, from)
		}
	}
	r.spent = r.spent || ref.Offset == r.last
	b := r.run[from-r.at:]
	return b[:n:n], nil
}

// reach returns up to where it pays to read when the record at ref, which ends at
// end, is read, and the last body before that.
func (r *Reader) reach(ref Ref, end int64) (to int64, last uint32) {
	last = ref.Offset
	misses := 0
	for i := 0; misses < readAheadMisses; i++ {
		next := r.coming(i)
		if next.IsZero() {
			break
		}
		from := int64(next.Offset)
		nextEnd := from + recordSize + int64(next.Length)
		if next.Segment != ref.Segment || from < end || from-end > readAheadGap || nextEnd-int64(ref.Offset) > readAheadBytes {
			misses++
			continue
		}
		end, last = nextEnd, next.Offset
	}
	return end, last
}

// readAt reads exactly b.
func (s *segment) readAt(b []byte, at int64) error {
	files := &s.log.j.files
	h, err := files.acquire(s)
	if err != nil {
		return err
	}
	defer files.release(h)
	if got, err := h.file.ReadAt(b, at); got != len(b) {
		if err == nil || errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return nil
}

// check returns the body of the record at ref, which b holds up to its end.
func (s *segment) check(ref Ref, b []byte) ([]byte, error) {
	r, ok := decodeRecord(b, s.seed, int64(ref.Offset))
	if !ok || r.kind > maxKind || r.bodyLen != ref.Length || crc32.Checksum(b[recordSize:], castagnoli) != r.bodyCRC {
		return nil, ErrDamaged
	}
	return b[recordSize:], nil
}
