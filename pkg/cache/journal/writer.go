// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"fmt"
	"hash/crc32"
	"sync"
)

// chunkBytes is how much a writer collects before it writes. A batch that is
// smaller is one write; of a larger one no second copy is held in memory.
const chunkBytes = 256 << 10

var chunks = sync.Pool{New: func() any { b := make([]byte, 0, 16<<10); return &b }}

// A writer encodes batches into a segment. It collects its first error and
// does nothing after it.
type writer struct {
	file   File
	number uint32
	seed   uint32
	at     int64 // offset at which buf will be written
	buf    []byte
	pooled *[]byte
	bytes  int64 // written so far
	err    error

	seq   uint64 // of the next record
	batch int64  // offset at which the open batch began
	count uint32 // records of the open batch
	crc   uint32 // over the record headers of the open batch
}

func newWriter(f File, h *segmentHeader, at int64, seq uint64) *writer {
	p := chunks.Get().(*[]byte)
	return &writer{file: f, number: h.number, seed: h.seed(), at: at, buf: (*p)[:0], pooled: p, seq: seq, batch: at}
}

// release gives the buffer back. The writer must not be used any more.
func (w *writer) release() {
	if cap(w.buf) <= 2*chunkBytes {
		*w.pooled = w.buf[:0]
		chunks.Put(w.pooled)
	}
	w.buf, w.pooled = nil, nil
}

func (w *writer) offset() int64 { return w.at + int64(len(w.buf)) }

// header writes the segment's own header; it comes before all records.
func (w *writer) header(h *segmentHeader) {
	w.buf = append(w.buf, h.encode()...)
	w.batch = w.offset()
}

func (w *writer) entry(e *Entry) Ref {
	at := w.offset()
	h := recordHeader{
		kind: e.Kind, seq: w.seq, scope: e.Scope, batch: uint32(w.batch),
		metaLen: uint32(len(e.Meta)), bodyLen: uint32(len(e.Body)),
		metaCRC: crc32.Checksum(e.Meta, castagnoli), bodyCRC: crc32.Checksum(e.Body, castagnoli),
	}
	w.record(&h)
	w.seq++
	w.count++
	if len(e.Body) < chunkBytes {
		w.buf = append(w.buf, e.Body...)
	} else {
		w.flush()
		w.write(e.Body)
	}
	w.buf = append(w.buf, e.Meta...)
	var pad [8]byte
	w.buf = append(w.buf, pad[:h.size()-recordSize-int64(len(e.Body)+len(e.Meta))]...)
	if len(w.buf) >= chunkBytes {
		w.flush()
	}
	return Ref{Segment: w.number, Offset: uint32(at), Length: h.bodyLen}
}

func (w *writer) record(h *recordHeader) {
	at, n := w.offset(), len(w.buf)
	var b [recordSize]byte
	w.buf = append(w.buf, b[:]...)
	h.put(w.buf[n:], w.seed, at)
	w.crc = crc32.Update(w.crc, castagnoli, w.buf[n:])
}

// commit ends the batch; the next entry begins a new one.
func (w *writer) commit() {
	w.record(&recordHeader{kind: kindCommit, seq: w.seq - 1, scope: w.count, batch: uint32(w.batch), metaCRC: w.crc})
	w.begin()
}

// batchOf writes one whole batch.
func (w *writer) batchOf(entries []Entry) []Ref {
	refs := make([]Ref, len(entries))
	for i := range entries {
		refs[i] = w.entry(&entries[i])
	}
	w.commit()
	w.flush()
	return refs
}

// mark writes a footer or sealed record, which is a batch of its own.
func (w *writer) mark(kind uint8, next uint32) {
	w.record(&recordHeader{kind: kind, seq: w.seq - 1, scope: next, batch: uint32(w.batch)})
	w.begin()
}

func (w *writer) begin() { w.batch, w.count, w.crc = w.offset(), 0, 0 }

func (w *writer) flush() {
	w.write(w.buf)
	w.buf = w.buf[:0]
}

func (w *writer) write(b []byte) {
	if w.err != nil || len(b) == 0 {
		return
	}
	n, err := w.file.WriteAt(b, w.at)
	w.bytes += int64(n)
	w.at += int64(n)
	if err == nil && n != len(b) {
		err = fmt.Errorf("short write: %d of %d bytes", n, len(b))
	}
	w.err = err
}

// batchSize is the number of bytes that a batch of entries takes, or an error
// if the format has no room for it.
func batchSize(entries []Entry) (int64, error) {
	total := int64(recordSize)
	for i := range entries {
		n, err := entrySize(&entries[i])
		if err != nil {
			return 0, fmt.Errorf("entry %d: %w", i, err)
		}
		total += n
	}
	if total > maxBatchBytes {
		return 0, fmt.Errorf("batch of %d bytes: %w", total, ErrTooLarge)
	}
	return total, nil
}

func entrySize(e *Entry) (int64, error) {
	switch {
	case e.Kind == 0 || e.Kind > maxKind:
		return 0, fmt.Errorf("kind %d is not in 1..%d", e.Kind, maxKind)
	case len(e.Meta) > maxMetaBytes:
		return 0, fmt.Errorf("meta of %d bytes: %w", len(e.Meta), ErrTooLarge)
	case len(e.Body) > maxBodyBytes:
		return 0, fmt.Errorf("body of %d bytes: %w", len(e.Body), ErrTooLarge)
	}
	return align(recordSize + int64(len(e.Body)+len(e.Meta))), nil
}
