// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"errors"
	"fmt"
	"iter"
	"path"
	"slices"
)

// Rewrite makes the log consist of exactly these entries, atomically: after a
// crash at any moment it is what it was before or what it is after. Bodies are
// streamed, not held; the iterator may use Views of this log, but must not
// call its Append, Rewrite, Remove or Close. The refs are in the order of the
// entries. On error, of the iterator or of the file system, the log is what it
// was before.
func (l *Log) Rewrite(entries iter.Seq2[Entry, error]) ([]Ref, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.usable(); err != nil {
		return nil, fmt.Errorf("rewrite: %w", err)
	}
	refs, err := l.rewrite(entries)
	if err != nil {
		l.j.stats.failures.Add(1)
		return nil, fmt.Errorf("rewrite %s: %w", l.dir, err)
	}
	return refs, nil
}

func (l *Log) rewrite(entries iter.Seq2[Entry, error]) (_ []Ref, err error) {
	if l.head == nil {
		// A snapshot always replaces something, so that one which is not
		// complete can be told from one that is damaged.
		if _, err := l.begin(nil); err != nil {
			return nil, err
		}
	}
	if err := l.settle(l.head); err != nil {
		return nil, err
	}
	s := snapshot{log: l, first: l.next, replaces: l.head.header.number, seq: l.seq}
	done := false
	defer func() { // also if the iterator panics
		if done {
			return
		}
		if s.file != nil {
			s.file.Close()
			s.w.release()
		}
		l.discard(s.names...)
	}()
	for e, err := range entries {
		if err != nil {
			return nil, err
		}
		if err := s.entry(&e); err != nil {
			return nil, err
		}
	}
	if err := s.finish(); err != nil {
		return nil, err
	}
	done = true
	l.replace(&s)
	return s.refs, nil
}

// A snapshot is what a Rewrite has written so far.
type snapshot struct {
	log      *Log
	first    uint32 // number of its first segment
	replaces uint32
	seq      uint64

	names    []string
	segments []*segment
	refs     []Ref
	header   *segmentHeader // of the open segment
	file     File
	w        *writer
}

func (s *snapshot) entry(e *Entry) error {
	need, err := entrySize(e)
	if err != nil {
		return fmt.Errorf("entry %d: %w", len(s.refs), err)
	}
	full := s.w != nil && s.w.offset() > s.header.size() && s.w.offset()+need > s.log.j.opts.SegmentBytes
	if s.w == nil || full {
		if err := s.roll(); err != nil {
			return err
		}
	}
	s.refs = append(s.refs, s.w.entry(e))
	if s.w.offset()-s.w.batch >= chunkBytes {
		s.w.commit()
	}
	return s.w.err
}

// roll ends the open segment and opens the next one.
func (s *snapshot) roll() error {
	l := s.log
	h, err := l.header()
	if err != nil {
		return err
	}
	h.flags, h.first, h.replaces = flagSnapshot, s.first, s.replaces
	if s.w != nil {
		s.commit()
		h.prev, h.prevEnd = s.header.number, uint32(s.w.offset())
		s.w.mark(kindFooter, h.number)
		if err := s.close(int64(h.prevEnd)); err != nil {
			return err
		}
	}
	h.firstSeq = s.seq
	f, name, err := l.create(h)
	if err != nil {
		return err
	}
	s.names = append(s.names, name)
	s.header, s.file, s.w = h, f, newWriter(f, h, 0, s.seq)
	s.w.header(h)
	return nil
}

func (s *snapshot) commit() {
	if s.w.count > 0 {
		s.w.commit()
	}
	s.seq = s.w.seq
}

func (s *snapshot) sync() error {
	s.w.flush()
	if s.w.err != nil {
		return s.w.err
	}
	return s.log.j.sync(s.file)
}

// close makes the open segment durable, of which the batches end at end.
func (s *snapshot) close(end int64) error {
	err := s.sync()
	seg := s.log.segment(s.header, end, s.w.at)
	seg.synced = true
	s.segments = append(s.segments, seg)
	s.log.j.stats.written.Add(s.w.bytes)
	s.w.release()
	err = errors.Join(err, s.file.Close())
	s.w, s.file = nil, nil
	return err
}

// finish seals the snapshot: first everything else is made durable, then the
// record that says so.
func (s *snapshot) finish() error {
	l := s.log
	if s.w == nil { // no entries
		if err := s.roll(); err != nil {
			return err
		}
	}
	s.commit()
	if err := s.sync(); err != nil {
		return err
	}
	l.dirSynced = false
	if err := l.syncDirs(); err != nil {
		return err
	}
	s.w.mark(kindSealed, 0)
	return s.close(s.w.offset())
}

// replace makes a complete snapshot the log.
func (l *Log) replace(s *snapshot) {
	l.set.Lock()
	var dead []*segment
	for _, old := range l.segments {
		old.dead = true
		if old.views == 0 {
			dead = append(dead, old)
		} else {
			l.pinned = append(l.pinned, old)
		}
	}
	l.segments = slices.Clip(s.segments)
	l.set.Unlock()
	l.head = s.segments[len(s.segments)-1]
	l.seq, l.roll, l.afterDamage = s.seq, true, false
	l.reap(dead)
	l.sweepOlder(s.first)
}

// sweepOlder unlinks what damage or failures have left of older segments.
func (l *Log) sweepOlder(first uint32) {
	names, err := l.j.fs.ReadDir(l.dir)
	if err != nil {
		l.j.stats.failures.Add(1)
		return
	}
	l.set.RLock()
	var extra []uint32
	for _, name := range names {
		n, ok := parseSegmentName(name)
		if ok && n < first && !slices.ContainsFunc(l.pinned, func(s *segment) bool { return s.header.number == n }) {
			extra = append(extra, n)
		}
	}
	l.set.RUnlock()
	l.sweep(extra)
}

// sweep unlinks segment files that are not part of the log.
func (l *Log) sweep(numbers []uint32) {
	if len(numbers) == 0 || l.shared {
		return
	}
	// An earlier process may have died before it had synced what makes them
	// superfluous.
	if l.head != nil && !l.head.synced {
		if l.settle(l.head) != nil || !l.head.synced {
			l.j.stats.failures.Add(1)
			return
		}
	}
	for _, n := range numbers {
		if err := l.j.fs.Remove(path.Join(l.dir, segmentName(n))); err != nil {
			l.j.stats.failures.Add(1)
		}
	}
}
