// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"container/list"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"sync"
	"sync/atomic"
)

// A segment is one file of an open log.
type segment struct {
	log    *Log
	header segmentHeader
	seed   uint32
	end    atomic.Int64 // where the batches end
	size   atomic.Int64 // of the file

	// Of the writer, under Log.mu.
	synced  bool // all of it has been made durable by this process
	suspect bool // a sync failed: what shares a page with its end is uncertain

	// Under Log.set.
	views int  // Views that may read it
	dead  bool // not of the log any more: to be unlinked after the last View
}

func (s *segment) open(write bool) (File, error) {
	s.log.moving.RLock() // dir changes with that lock held
	defer s.log.moving.RUnlock()
	return s.log.j.fs.Open(path.Join(s.log.dir, segmentName(s.header.number)), write)
}

// Size is the number of bytes that the log takes on disk, without those that
// only Views still need.
func (l *Log) Size() int64 {
	l.set.RLock()
	defer l.set.RUnlock()
	var n int64
	for _, s := range l.segments {
		n += s.size.Load()
	}
	return n
}

// onDisk is Size with what only Views still need.
func (l *Log) onDisk() int64 {
	n := l.Size()
	l.set.RLock()
	defer l.set.RUnlock()
	for _, s := range l.pinned {
		n += s.size.Load()
	}
	return n
}

// A View reads the bodies of a log. The segments that the log had when the
// View was taken stay readable until Close, whatever becomes of the log, and
// stay on disk that long. Appends to the last of them are seen, appends to
// newer ones are not. A View is safe for concurrent use.
type View struct {
	log      *Log
	segments []*segment
	closed   atomic.Bool
}

// View returns a View of the log as it is now. It may be taken while an Append
// or a Rewrite runs, and does not wait for them. It has to be closed.
func (l *Log) View() *View {
	l.set.Lock()
	defer l.set.Unlock()
	for _, s := range l.segments {
		s.views++
	}
	l.views++
	return &View{log: l, segments: l.segments}
}

// Read appends the body that ref stands for to dst. It is checked each time:
// ErrDamaged, together with the error of the file system if there is one. On
// error dst is returned as it was.
func (v *View) Read(ref Ref, dst []byte) ([]byte, error) {
	s, err := v.segment(ref)
	if err != nil {
		return dst, err
	}
	n, total := len(dst), recordSize+int(ref.Length)
	out := slices.Grow(dst, total)[:n+total]
	b := out[n:]
	if err = s.readAt(b, int64(ref.Offset)); err == nil {
		_, err = s.check(ref, b)
	}
	if err != nil {
		return dst, v.failed(ref, err)
	}
	copy(b, b[recordSize:])
	return out[:n+int(ref.Length)], nil
}

// segment returns the segment in which ref is.
func (v *View) segment(ref Ref) (*segment, error) {
	if v.closed.Load() {
		return nil, fmt.Errorf("read: %w", ErrClosed)
	}
	i, ok := slices.BinarySearchFunc(v.segments, ref.Segment, func(s *segment, n uint32) int {
		return int(int64(s.header.number) - int64(n))
	})
	if !ok {
		return nil, fmt.Errorf("read segment %d: %w", ref.Segment, ErrUnknownRef)
	}
	s := v.segments[i]
	if int64(ref.Offset)+recordSize+int64(ref.Length) > s.end.Load() || ref.Offset < headerFixed {
		return nil, fmt.Errorf("read segment %d at %d: %w", ref.Segment, ref.Offset, ErrUnknownRef)
	}
	return s, nil
}

// failed counts a read that found damage.
func (v *View) failed(ref Ref, err error) error {
	if errors.Is(err, ErrDamaged) {
		v.log.j.stats.reads.Add(1)
	}
	return fmt.Errorf("read segment %d at %d: %w", ref.Segment, ref.Offset, err)
}

// Close gives the segments back. Only the first call does something.
func (v *View) Close() {
	if v.closed.Swap(true) {
		return
	}
	l := v.log
	l.set.Lock()
	var dead []*segment
	for _, s := range v.segments {
		s.views--
		switch {
		case s.views > 0:
		case s.dead:
			dead = append(dead, s)
		case l.closed:
			l.j.files.drop(s)
		}
	}
	l.views--
	l.set.Unlock()
	l.reap(dead)
}

// reap unlinks segments that nobody can read any more, and the directory of a
// removed log after its last View.
func (l *Log) reap(dead []*segment) {
	l.moving.RLock()
	defer l.moving.RUnlock()
	l.set.Lock()
	dir, removed := l.dir, l.removed
	l.pinned = slices.DeleteFunc(l.pinned, func(s *segment) bool { return slices.Contains(dead, s) })
	drained := l.closed && l.views == 0 && !l.drained
	l.drained = l.drained || drained
	l.set.Unlock()
	for _, s := range dead {
		l.j.files.drop(s)
		if removed || l.shared || l.j.isClosed() {
			continue // the directory goes as a whole, or a later open cleans up
		}
		// If the log has been removed since, somebody else may have emptied the directory.
		if err := l.j.fs.Remove(path.Join(dir, segmentName(s.header.number))); err != nil && !errors.Is(err, fs.ErrNotExist) {
			l.j.stats.failures.Add(1)
		}
	}
	if !drained {
		return
	}
	if removed && !l.j.isClosed() {
		l.j.purge(dir)
	}
	l.j.mu.Lock()
	delete(l.j.draining, l)
	l.j.mu.Unlock()
}

func (j *Journal) isClosed() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.closed
}

// A fileCache keeps the files open that Views read, the most recently used
// ones up to a limit. Since a segment keeps its name until the last View is
// closed, a file that fell out is just opened again.
type fileCache struct {
	mu     sync.Mutex // guards what follows, and openFile.users
	limit  int
	byFile map[*segment]*list.Element // of *openFile
	recent list.List                  // front: most recently used
	closed bool
}

type openFile struct {
	segment *segment
	file    File
	users   int
	dropped bool
}

func (c *fileCache) init(limit int) {
	c.limit, c.byFile = limit, map[*segment]*list.Element{}
}

func (c *fileCache) len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.byFile)
}

// acquire returns the file of a segment; release gives it back.
func (c *fileCache) acquire(s *segment) (*openFile, error) {
	if h, err := c.cached(s); h != nil || err != nil {
		return h, err
	}
	f, err := s.open(false)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	h := &openFile{segment: s, file: f, users: 1}
	if _, ok := c.byFile[s]; ok || c.closed {
		h.dropped = true // somebody else was faster: use it once
		return h, nil
	}
	c.byFile[s] = c.recent.PushFront(h)
	for len(c.byFile) > c.limit {
		c.remove(c.recent.Back())
	}
	return h, nil
}

func (c *fileCache) cached(s *segment) (*openFile, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, ErrClosed
	}
	e, ok := c.byFile[s]
	if !ok {
		return nil, nil
	}
	c.recent.MoveToFront(e)
	h := e.Value.(*openFile)
	h.users++
	return h, nil
}

func (c *fileCache) release(h *openFile) {
	c.mu.Lock()
	defer c.mu.Unlock()
	h.users--
	c.finish(h)
}

func (c *fileCache) remove(e *list.Element) {
	h := c.recent.Remove(e).(*openFile)
	delete(c.byFile, h.segment)
	h.dropped = true
	c.finish(h)
}

func (c *fileCache) finish(h *openFile) {
	if h.dropped && h.users == 0 {
		h.file.Close() // it was only read
	}
}

func (c *fileCache) drop(s *segment) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.byFile[s]; ok {
		c.remove(e)
	}
}

func (c *fileCache) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for c.recent.Len() > 0 {
		c.remove(c.recent.Back())
	}
}
