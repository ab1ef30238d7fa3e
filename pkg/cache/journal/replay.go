// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
)

// A Replay is told what a log holds, in the order in which it was appended.
// Calls come from within OpenLog, one at a time; what is nil is not called.
type Replay struct {
	// Batch gets whole committed batches. The body of an entry is nil, its
	// Meta valid during the call; the slices may be kept. The checksums of all
	// bodies have been verified. What Rewrite wrote comes in several batches,
	// all of them or none.
	Batch func(entries []Entry, refs []Ref)
	// Damaged says that entries of a scope are lost at this point. Nothing of
	// the scope is whole until entries follow that begin it anew.
	Damaged func(scope uint32)
	// DamagedAll says that anything may be lost at this point, of any scope.
	DamagedAll func()
}

// A foundFile is a segment file in the directory of a log.
type foundFile struct {
	segmentHeader
	file  uint32 // number in the file name
	size  int64
	state headerState
}

// segments reads the headers of the segment files in a directory, ascending.
// A file that cannot be read is a damaged one.
func (j *Journal) segments(dir string) ([]foundFile, error) {
	names, err := j.fs.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var found []foundFile
	for _, name := range names {
		number, ok := parseSegmentName(name)
		if !ok {
			continue
		}
		f := j.readHeader(dir, number)
		if f.state == headerNewer {
			return nil, fmt.Errorf("%s: %w", path.Join(dir, name), ErrNewerFormat)
		}
		found = append(found, f)
	}
	slices.SortFunc(found, func(a, b foundFile) int { return int(int64(a.file) - int64(b.file)) })
	return found, nil
}

func (j *Journal) readHeader(dir string, number uint32) foundFile {
	found := foundFile{file: number, state: headerBad}
	f, err := j.fs.Open(path.Join(dir, segmentName(number)), false)
	if err != nil {
		return found
	}
	defer f.Close()
	size, err := f.Size()
	if err != nil {
		return found
	}
	found.size = size
	b := make([]byte, min(size, 512))
	if n, _ := f.ReadAt(b, 0); n != len(b) {
		return found
	}
	if len(b) >= headerFixed && le.Uint32(b[64:])+headerFixed > uint32(len(b)) { // a long name
		b = make([]byte, min(size, headerFixed+maxNameBytes))
		if n, _ := f.ReadAt(b, 0); n != len(b) {
			return found
		}
	}
	found.segmentHeader, found.state = decodeHeader(b, path.Base(dir), number)
	return found
}

// identify returns the name of the log that segments belong to: headerOK with
// a name, headerBlank if nothing was ever completely written, or headerBad.
func identify(found []foundFile) (string, headerState) {
	state := headerBlank
	for _, f := range found {
		if f.state == headerOK || f.state == headerBad && hasName(f) {
			return f.name, headerOK
		}
		if f.state != headerBlank {
			state = headerBad
		}
	}
	return "", state
}

// hasName is for damaged headers: their name is only set if it is beyond doubt.
func hasName(f foundFile) bool { return f.name != "" }

func totalSize(found []foundFile) int64 {
	var n int64
	for _, f := range found {
		n += f.size
	}
	return n
}

// A link is a segment of the chain that makes up a log.
type link struct {
	foundFile
	gap    bool  // what was before it is missing
	sealed bool  // end is known from the segment after it
	end    int64 // where its batches end
	footed bool  // a footer says that it has a batch
}

// A chain is what a log consists of, oldest first, and what else was found.
type chain struct {
	links   []link
	extra   []uint32 // numbers of files that are not part of it
	damaged bool     // something that came after it is damaged or missing
}

// makeChain finds the last segment of a log, and goes back from there. done
// reports whether the segment ends a complete snapshot.
func makeChain(found []foundFile, done func(foundFile) bool) chain {
	var c chain
	byNumber := map[uint32]foundFile{}
	for _, f := range found {
		if f.state == headerOK {
			byNumber[f.number] = f
		}
	}
	i := len(found) - 1
	for ; i >= 0; i-- {
		f := found[i]
		if f.state == headerBad {
			c.damaged = true
		}
		if f.state != headerOK {
			continue
		}
		if !f.snapshot() || done(f) {
			break
		}
		if _, ok := byNumber[f.replaces]; !ok {
			// It was complete once: only then what it replaces is unlinked.
			c.damaged = true
			break
		}
	}
	if i >= 0 {
		c.back(found[:i], found[i], byNumber)
	}
	for _, f := range found {
		if !slices.ContainsFunc(c.links, func(l link) bool { return l.file == f.file }) {
			c.extra = append(c.extra, f.file)
		}
	}
	return c
}

// back collects the segments from the last one to the first.
func (c *chain) back(older []foundFile, last foundFile, byNumber map[uint32]foundFile) {
	cur := link{foundFile: last}
	for cur.prev != 0 {
		prev, ok := byNumber[cur.prev]
		if ok {
			c.links = append(c.links, cur)
			cur = link{foundFile: prev, sealed: true, end: int64(cur.prevEnd)}
			continue
		}
		cur.gap = true
		i := len(older) - 1
		for i >= 0 && (older[i].file >= cur.prev || older[i].state != headerOK || cur.snapshot() && older[i].first != cur.first) {
			i--
		}
		if i < 0 {
			break
		}
		c.links = append(c.links, cur)
		cur = link{foundFile: older[i]}
	}
	c.links = append(c.links, cur)
	slices.Reverse(c.links)
}

// load replays the log from disk and gets it ready for appending.
func (l *Log) load(r Replay) error {
	l.seq = 1
	if l.lost {
		l.damaged(r)
		l.afterDamage = true
		l.j.found(l.hash)
	}
	found, err := l.j.segments(l.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	l.made = true
	l.j.mu.Lock()
	l.j.names[l.name] = 0
	l.j.mu.Unlock()
	if len(found) > 0 {
		l.next = max(l.next, found[len(found)-1].file+1)
	}
	c := makeChain(found, l.endsSnapshot)
	damaged := c.damaged || l.lost
	for i := range c.links {
		damaged = l.replay(&c, i, r) || damaged
	}
	if c.damaged {
		l.damaged(r)
		l.afterDamage, damaged = true, true
	}
	if n := len(l.segments); n > 0 {
		l.head = l.segments[n-1]
	}
	l.roll = l.roll || damaged
	if !damaged {
		l.sweep(c.extra)
	}
	return nil
}

// found forgets that a log was lost, since its user has been told.
func (j *Journal) found(hash string) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.lost, hash)
}

func (l *Log) damaged(r Replay) {
	l.j.stats.damages.Add(1)
	if r.DamagedAll != nil {
		r.DamagedAll()
	}
}

// replay reads one segment of the chain and reports whether it is damaged.
func (l *Log) replay(c *chain, i int, r Replay) bool {
	k := &c.links[i]
	last := i == len(c.links)-1
	damaged := false
	if k.gap || k.flags&flagAfterDamage != 0 {
		l.damaged(r)
		damaged = k.gap
	}
	seg := l.segment(&k.segmentHeader, k.segmentHeader.size(), k.size)
	l.segments = append(l.segments, seg)
	f, err := seg.open(false)
	if err != nil {
		l.damaged(r)
		c.damaged = c.damaged || last
		seg.end.Store(k.size)
		l.seq = max(l.seq, k.firstSeq)
		return true
	}
	defer f.Close()
	s := newScanner(f, seg, k.size)
	defer s.release()
	s.replay = r
	if k.sealed {
		s.sealed, s.limit = true, min(k.end, k.size)
	}
	s.scan()
	seg.end.Store(s.pos)
	l.seq = max(l.seq, s.seq)
	l.j.stats.damages.Add(int64(s.damages))
	switch {
	case !last:
		next := &c.links[i+1]
		next.footed = s.footer(s.pos) == next.number
		short := k.sealed && (s.pos != k.end || s.seq != next.firstSeq || s.footer(k.end) != 0 && !next.footed)
		if short && s.damages == 0 {
			l.damaged(r)
			damaged = true
		}
	default:
		l.finish(c, k, s)
	}
	return damaged || s.damages > 0
}

// finish looks at how the last segment of the log ends.
func (l *Log) finish(c *chain, k *link, s *scanner) {
	l.roll = k.snapshot() || s.next != 0
	switch {
	case s.next != 0, k.footed && s.count == 0, s.failed:
		// The footer says that there is one more segment, or the footer before
		// it that there is a batch in this one; or what looks like the end of
		// the log is where the disk could not be read.
		c.damaged = true
	case s.torn:
		if s.pos < k.size {
			l.j.stats.torn.Add(1)
		}
	}
}

func newScanner(f File, seg *segment, size int64) *scanner {
	return &scanner{
		window: newWindow(f, size), header: seg.header, seed: seg.seed, limit: size,
		pos: seg.header.size(), seq: seg.header.firstSeq,
	}
}

// verify returns how much of a segment up to an end is damaged.
func verify(f File, seg *segment, end int64) int {
	s := newScanner(f, seg, end)
	defer s.release()
	s.sealed = true
	s.scan()
	return s.damages
}

// endsSnapshot reports whether a sealed record is at the end of a segment,
// where a footer may follow it.
func (l *Log) endsSnapshot(found foundFile) bool {
	seg := l.segment(&found.segmentHeader, 0, found.size)
	f, err := seg.open(false)
	if err != nil {
		return false
	}
	defer f.Close()
	var b [2 * recordSize]byte
	at := found.size - int64(len(b))
	if at < 0 {
		return false
	}
	if n, _ := f.ReadAt(b[:], at); n != len(b) {
		return false
	}
	if r, ok := decodeRecord(b[recordSize:], seg.seed, at+recordSize); ok && r.kind == kindSealed {
		return true
	}
	r, ok := decodeRecord(b[:], seg.seed, at)
	return ok && r.kind == kindSealed
}
