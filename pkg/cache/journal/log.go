// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"crypto/rand"
	"errors"
	"fmt"
	"path"
	"slices"
	"sync"
)

// rescueBytes is how much before the end of a segment is written once more
// after a failed sync: no file system has larger pages or blocks.
const rescueBytes = 64 << 10

// maxSegment is the largest number with eight digits.
const maxSegment = 99_999_999

// A Log is one append-only log. Its methods may be called concurrently;
// Append, Rewrite, Remove and Close wait for one another, View and Size do not.
type Log struct {
	j      *Journal
	name   string
	hash   string
	shared bool // Views of an earlier Log of this name are open: unlink nothing
	lost   bool // Open had to remove what was there

	mu          sync.Mutex // held while writing; guards what follows
	head        *segment   // the last one, nil if the log is empty
	seq         uint64     // of the next record
	next        uint32     // number of the next segment
	roll        bool       // head must not be appended to
	uncut       bool       // only a new segment can say that a failed batch is not part of the log
	afterDamage bool       // the next segment must say so
	made        bool       // the directory exists
	dirSynced   bool       // the entries of all segments are durable
	entrySynced bool       // and that of the directory itself
	renamed     bool       // Remove has moved the directory away, but has not finished

	// moving is held while the directory is moved, and for reading while a file in it
	// is opened. It comes before set, which nobody holds while the disk works.
	moving sync.RWMutex

	set      sync.RWMutex // guards what follows, and the counts of segments
	closed   bool
	removed  bool
	drained  bool // closed, and the last View too
	dir      string
	segments []*segment // ascending; copied when changed
	pinned   []*segment // replaced or removed, but still read by Views
	views    int
}

// Append writes a batch: all of it durably, or none of it. The refs are in
// the order of the entries. A batch of up to 256 KiB is one write; then comes
// one fdatasync, and an fsync of the directory for a new segment. On error
// the log goes on as it was before: earlier refs stay readable and the batch
// will not be replayed, unless the process dies before the disk accepts any
// other write to the log. A batch is at most 1 GiB; none is no batch.
func (l *Log) Append(entries []Entry) ([]Ref, error) {
	if len(entries) == 0 {
		return nil, nil
	}
	need, err := batchSize(entries)
	if err != nil {
		return nil, fmt.Errorf("append: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.usable(); err != nil {
		return nil, fmt.Errorf("append: %w", err)
	}
	var refs []Ref
	if l.roll || l.head == nil || l.full(need) {
		refs, err = l.begin(entries)
	} else {
		refs, err = l.extend(entries)
	}
	if err != nil {
		l.j.stats.failures.Add(1)
		return nil, fmt.Errorf("append to %s: %w", l.dir, err)
	}
	return refs, nil
}

func (l *Log) usable() error {
	l.set.RLock()
	defer l.set.RUnlock()
	if l.closed || l.renamed {
		return ErrClosed
	}
	return nil
}

// full reports whether a batch has to go into a new segment.
func (l *Log) full(need int64) bool {
	end := l.head.end.Load()
	return end > l.head.header.size() && end+need > l.j.opts.SegmentBytes
}

// extend appends to the last segment.
func (l *Log) extend(entries []Entry) ([]Ref, error) {
	head := l.head
	f, err := head.open(true)
	if err != nil {
		l.roll = true
		return nil, err
	}
	defer f.Close()
	end := head.end.Load()
	if !head.synced {
		if err := l.clean(f, head); err != nil {
			l.roll = true
			return nil, err
		}
	}
	w := newWriter(f, &head.header, end, l.seq)
	defer w.release()
	refs := w.batchOf(entries)
	l.j.stats.written.Add(w.bytes)
	if w.err != nil {
		l.undo(f, head, false)
		return nil, w.err
	}
	if err := l.j.sync(f); err != nil {
		l.undo(f, head, true)
		return nil, err
	}
	if err := l.syncDirs(); err != nil {
		l.undo(f, head, false)
		return nil, err
	}
	head.size.Store(w.at)
	head.end.Store(w.at)
	l.seq = w.seq
	return refs, nil
}

// clean gets a segment of an earlier process ready for appending. That one may
// have died before its last batch was durable. Replay takes a batch that is
// missing for damage if a later one is there, so it has to be durable now.
func (l *Log) clean(f File, head *segment) error {
	if end := head.end.Load(); head.size.Load() > end { // what is left of a torn batch
		if err := f.Truncate(end); err != nil {
			return err
		}
		head.size.Store(end)
	}
	err := l.j.sync(f)
	head.synced, head.suspect = err == nil, err != nil
	return err
}

// undo takes back a batch that was not made durable. After a failed sync the
// segment gets no more batches, and its last pages are written again: Linux
// takes pages for clean that it could not write, and the batch shares one
// with those before it. If the batch cannot be cut off, the header of a new
// segment says where this one ends.
func (l *Log) undo(f File, head *segment, syncFailed bool) {
	end := head.end.Load()
	err := f.Truncate(end)
	if syncFailed {
		l.roll, head.suspect = true, true
		err = errors.Join(err, l.rescue(f, head))
	} else if err == nil {
		err = l.j.sync(f)
	}
	if err == nil {
		head.size.Store(end)
		return
	}
	l.roll, l.uncut = true, true
	l.j.stats.failures.Add(1)
	if n, err := f.Size(); err == nil {
		head.size.Store(n)
	}
	if _, err := l.begin(nil); err != nil {
		l.j.stats.failures.Add(1) // the next Append tries again, or Close
	}
}

// rescue makes the end of a segment durable after a failed sync: what is
// there is verified, and the last pages are made dirty again.
func (l *Log) rescue(f File, s *segment) error {
	end := s.end.Load()
	if damages := verify(f, s, end); damages > 0 {
		return fmt.Errorf("verify segment %d after a failed sync: %w", s.header.number, ErrDamaged)
	}
	from := max(0, end-rescueBytes)
	b := make([]byte, end-from)
	if _, err := f.ReadAt(b, from); err != nil {
		return err
	}
	n, err := f.WriteAt(b, from)
	l.j.stats.written.Add(int64(n))
	if err == nil {
		err = l.j.sync(f)
	}
	if err == nil {
		s.suspect = false
	}
	return err
}

// begin makes a new segment with a batch in it, or with none.
func (l *Log) begin(entries []Entry) ([]Ref, error) {
	prev := l.head
	if err := l.settle(prev); err != nil {
		return nil, err
	}
	h, err := l.header()
	if err != nil {
		return nil, err
	}
	if prev != nil {
		h.prev, h.prevEnd = prev.header.number, uint32(prev.end.Load())
	}
	if l.afterDamage {
		h.flags |= flagAfterDamage
	}
	f, name, err := l.create(h)
	if err != nil {
		return nil, err
	}
	w := newWriter(f, h, 0, l.seq)
	defer w.release()
	w.header(h)
	var refs []Ref
	if len(entries) > 0 {
		refs = w.batchOf(entries)
	}
	w.flush()
	l.j.stats.written.Add(w.bytes)
	if err = w.err; err == nil {
		err = l.j.sync(f)
	}
	if err == nil {
		l.dirSynced = false
		err = l.syncDirs()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		l.discard(name)
		return nil, err
	}
	l.seq, l.roll, l.uncut, l.afterDamage = w.seq, false, false, false
	l.head = l.add(h, w.at)
	if prev != nil && len(entries) > 0 {
		l.footer(prev, h)
	}
	return refs, nil
}

// settle makes sure that what a new segment's header will say of the one
// before it is true after a power cut. Only if that one is beyond repair the
// new segment is made all the same: then replay finds what is lost.
func (l *Log) settle(prev *segment) error {
	if prev == nil || prev.synced && !prev.suspect {
		return nil
	}
	f, err := prev.open(true)
	if err != nil {
		return ignoreIf(prev.suspect, err)
	}
	defer f.Close()
	if prev.suspect {
		err = l.rescue(f, prev)
	} else {
		err = l.j.sync(f)
	}
	if err == nil {
		err = l.syncDirs() // its entry may not be durable either
	}
	if err == nil {
		prev.synced = true
	}
	return ignoreIf(prev.suspect, err)
}

func ignoreIf(ignore bool, err error) error {
	if ignore {
		return nil
	}
	return err
}

// header returns the header of a new segment. Its number is used up, even if
// nothing comes of it: two files never have the same number.
func (l *Log) header() (*segmentHeader, error) {
	if l.next > maxSegment {
		return nil, ErrFull
	}
	var salt [8]byte
	rand.Read(salt[:])
	h := &segmentHeader{salt: le.Uint64(salt[:]), number: l.next, firstSeq: l.seq, name: l.name}
	l.next++
	return h, nil
}

// create makes the file of a segment, and the log's directory if need be.
func (l *Log) create(h *segmentHeader) (File, string, error) {
	if !l.made {
		if err := l.j.fs.Mkdir(l.dir); err != nil {
			return nil, "", err
		}
		l.made, l.dirSynced, l.entrySynced = true, false, false
		l.j.mu.Lock()
		l.j.names[l.name] = 0
		l.j.mu.Unlock()
	}
	name := path.Join(l.dir, segmentName(h.number))
	f, err := l.j.fs.Create(name)
	return f, name, err
}

// discard unlinks a segment that did not come to be. Until that is durable
// nothing may be appended to an older segment, because this one would end it.
func (l *Log) discard(names ...string) {
	l.roll = true
	var err error
	for _, name := range names {
		err = errors.Join(err, l.j.fs.Remove(name))
	}
	if err == nil {
		err = l.j.syncDir(l.dir)
	}
	if err != nil {
		l.uncut = true
		l.j.stats.failures.Add(1)
	}
}

// footer notes in a segment that it has a successor, which has to be missed
// from then on if it is not there. That is all it is for, so it may fail.
func (l *Log) footer(s *segment, next *segmentHeader) {
	if s.suspect {
		return
	}
	f, err := s.open(true)
	if err == nil {
		end := s.end.Load()
		if s.size.Load() > end {
			err = f.Truncate(end)
		}
		w := newWriter(f, &s.header, end, next.firstSeq)
		w.mark(kindFooter, next.number)
		w.flush()
		if err = errors.Join(err, w.err); err == nil {
			if err = l.j.sync(f); err != nil {
				s.suspect = true
				err = errors.Join(err, l.rescue(f, s))
			}
		}
		l.j.stats.written.Add(w.bytes)
		s.size.Store(w.at)
		w.release()
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		l.j.stats.failures.Add(1)
	}
}

// syncDirs makes the entries of new files durable, and of a new directory.
func (l *Log) syncDirs() error {
	if !l.dirSynced {
		if err := l.j.syncDir(l.dir); err != nil {
			return err
		}
		l.dirSynced = true
	}
	if !l.entrySynced {
		if err := l.j.syncDir(l.j.opts.Dir); err != nil {
			return err
		}
		l.entrySynced = true
	}
	return nil
}

// add makes a segment part of the log.
func (l *Log) add(h *segmentHeader, end int64) *segment {
	s := l.segment(h, end, end)
	s.synced = true
	l.set.Lock()
	defer l.set.Unlock()
	l.segments = append(slices.Clip(l.segments), s)
	return s
}

func (l *Log) segment(h *segmentHeader, end, size int64) *segment {
	s := &segment{log: l, header: *h, seed: h.seed()}
	s.end.Store(end)
	s.size.Store(size)
	return s
}

// Remove deletes the log and closes it. The directory gets another name in one
// step and is emptied after the last View is closed, or at the next Open. On
// error the log may be there again after a crash, whole; Remove may be called
// again. Afterwards OpenLog makes a new log, in which no old Ref means anything.
func (l *Log) Remove() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.usable(); err != nil && !l.renamed {
		return fmt.Errorf("remove: %w", err)
	}
	if l.made {
		if err := l.unlink(); err != nil {
			l.j.stats.failures.Add(1)
			return fmt.Errorf("remove %s: %w", l.dir, err)
		}
	}
	l.j.mu.Lock()
	if l.j.logs[l.name] == l {
		delete(l.j.logs, l.name)
	}
	delete(l.j.names, l.name)
	l.j.floor = max(l.j.floor, l.next)
	l.j.draining[l] = true
	l.j.mu.Unlock()
	l.retire(true)
	return nil
}

func (l *Log) unlink() error {
	if !l.renamed {
		to := fmt.Sprintf("%s.%08d%s", path.Join(l.j.opts.Dir, l.hash), l.next, removedSuffix)
		l.moving.Lock()
		err := l.j.fs.Rename(l.dir, to)
		if err == nil {
			l.set.Lock()
			l.dir, l.renamed = to, true
			l.set.Unlock()
		}
		l.moving.Unlock()
		if err != nil {
			return err
		}
	}
	return l.j.syncDir(l.j.opts.Dir)
}

// retire takes all segments from the log. Those of a removed log are dead.
func (l *Log) retire(removed bool) {
	l.set.Lock()
	l.closed, l.removed = true, removed && l.made
	var dead []*segment
	for _, s := range l.segments {
		s.dead = removed
		if s.views == 0 {
			dead = append(dead, s)
		} else if removed {
			l.pinned = append(l.pinned, s)
		}
	}
	if !removed {
		for _, s := range dead {
			l.j.files.drop(s)
		}
		dead = nil
	}
	l.segments = nil
	l.set.Unlock()
	l.head = nil
	l.reap(dead)
}

// Close ends the use of the log. Its Views stay readable until the Journal is
// closed. Close of a closed or removed log does nothing.
func (l *Log) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.usable(); err != nil && !l.renamed {
		return nil
	}
	var err error
	if l.uncut && !l.renamed {
		if _, err = l.begin(nil); err != nil {
			err = fmt.Errorf("close %s: a failed batch could not be taken back: %w", l.dir, err)
		}
	}
	l.j.mu.Lock()
	if l.j.logs[l.name] == l {
		delete(l.j.logs, l.name)
	}
	switch {
	case l.renamed:
		delete(l.j.names, l.name)
		l.j.floor = max(l.j.floor, l.next)
	case l.made:
		l.j.names[l.name] = l.Size()
	}
	l.j.draining[l] = true
	l.j.mu.Unlock()
	l.retire(false)
	return err
}
