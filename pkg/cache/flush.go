// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/edgehub/edgehub/pkg/cache/journal"
)

// maxBatchBytes is how much one append to the journal may hold. A scope with
// more to write is incomplete on disk until the last part is there.
const maxBatchBytes = 1 << 20

// An item is one entry on its way to disk, and what it is the entry of.
type item struct {
	scope  *scope
	object *object // of put and tomb
	record *record // of response
	entry  journal.Entry
	bare   []byte
	ref    journal.Ref // where the bytes are now, if not in bare
}

// A group is what must be written together: the items of one scope, its state
// first.
type group struct {
	scope *scope // nil: no scope
	items []item
	tombs []*object // that are written, to be restored when they are not
	clear bool
	parts bool // it is written in parts, and the first of them may be on disk
}

// sort puts the objects in key order: a list then reads the disk from front to
// back. What comes before them stays as it is.
func (g *group) sort() {
	isObject := func(i item) bool { return i.entry.Kind == entryPut || i.entry.Kind == entryRemove }
	if n := slices.IndexFunc(g.items, isObject); n >= 0 {
		slices.SortFunc(g.items[n:], func(a, b item) int { return strings.Compare(a.object.key, b.object.key) })
	}
}

// flush writes what has changed, or, when more than two thirds of the log are
// dead or it is to be sealed in another way, the whole log anew. If there is no room for
// that, what has changed is appended all the same, unless only a new log makes sense. On
// an error everything stays dirty.
func (l *log) flush() error {
	l.flushing.Lock()
	defer l.flushing.Unlock()
	whole, must := l.worthRewriting()
	l.mu.Lock()
	if l.journal == nil {
		l.due = time.Time{}
		l.mu.Unlock()
		return nil
	}
	l.due = time.Time{}
	dropped := l.dropped
	groups := l.collect(whole)
	if whole {
		l.pinned = newPinnedView(l.journal.View(), l.seal)
	}
	l.mu.Unlock()
	for _, g := range groups {
		g.sort()
	}

	var done int
	var err error
	if whole {
		err = l.rewrite(groups)
	} else {
		done, err = l.appendGroups(groups)
	}
	l.mu.Lock()
	before := l.unpin()
	if err != nil {
		l.restore(groups[done:], whole && must)
	}
	if err != nil && whole && !must {
		l.dropped = append(dropped, l.dropped...)
		l.rewriteAfter = l.c.now().Add(rewriteRetry)
	}
	if err == nil && l.seal != l.wantedSeal() {
		l.flushWithin(rewriteRetry) // what is left for later
	}
	l.mu.Unlock()
	before.Close()
	if err != nil {
		return fmt.Errorf("write %s: %w", l.name.gvr(), err)
	}
	return nil
}

// collect takes what is to be written. The caller holds mu.
func (l *log) collect(whole bool) (groups []group) {
	if len(l.dropped) > 0 && !whole {
		g := group{}
		for _, e := range l.dropped {
			g.items = append(g.items, item{entry: e})
		}
		groups = append(groups, g)
	}
	l.dropped = nil
	for _, s := range l.allScopes() {
		if g, ok := s.collect(whole); ok {
			groups = append(groups, g)
		}
	}
	responses := l.dirtyResp
	if whole {
		responses = l.responses
	}
	for _, r := range responses {
		r.Seal = l.sealFor(whole)
		groups = append(groups, group{items: []item{{record: r, bare: r.body, ref: r.ref, entry: r.entry()}}})
	}
	l.dirtyResp = map[string]*record{}
	return groups
}

// collect takes what is to be written of a scope.
func (s *scope) collect(whole bool) (group, bool) {
	if !whole && !s.dirtyState && !s.dirtyRV && len(s.dirty) == 0 && len(s.dirtyTombs) == 0 && !s.clearDisk {
		return group{}, false
	}
	if !s.single && !s.complete && (whole || !s.onDisk) {
		return group{}, false // nothing of it would survive a restart
	}
	g := group{scope: s, clear: s.clearDisk, tombs: s.dirtyTombs}
	g.items = append(g.items, item{scope: s, entry: s.headEntry(whole)})
	if s.clearDisk && !whole {
		g.items = append(g.items, item{scope: s, entry: journal.Entry{Scope: s.id, Kind: entryClear}})
	}
	if !s.single && !s.complete {
		// What the disk says of it holds no longer; that is all there is to say.
		g.tombs = nil
		s.dirtyState, s.dirtyRV, s.clearDisk = false, false, false
		return g, true
	}
	objects, tombs := s.dirty, s.dirtyTombs
	if whole {
		objects, tombs = s.objects, s.tombs
	}
	for _, o := range tombs {
		g.items = append(g.items, s.objectItem(entryTomb, o))
	}
	for _, o := range objects {
		if !o.deleted {
			g.items = append(g.items, s.objectItem(entryPut, o))
		}
	}
	for _, o := range s.dirty {
		if o.deleted { // a new log has none of it, but it may be that only the old one can be gone on with
			g.items = append(g.items, s.objectItem(entryRemove, o))
		}
	}
	s.dirty, s.dirtyTombs = map[string]*object{}, nil
	s.dirtyState, s.dirtyRV, s.clearDisk, s.onDisk = false, false, false, true
	return g, true
}

func (s *scope) objectItem(kind uint8, o *object) item {
	o.seenOnDisk = o.seen
	bare, ref := o.place()
	return item{
		scope: s, object: o, bare: bare, ref: ref,
		entry: journal.Entry{Scope: s.id, Kind: kind, Meta: encodeObjectMeta(o)},
	}
}

// maxAdvance is how many objects, and maxAdvanceBytes how much of them, may come with
// an entryAdvance: not so much that it has to be written in parts, between which the
// state says that it is not complete.
const (
	maxAdvance      = 64
	maxAdvanceBytes = maxBatchBytes / 2
)

// headEntry is what the entries of a scope begin with: its state, or, where that is
// on disk already, its resourceVersion.
func (s *scope) headEntry(whole bool) journal.Entry {
	if whole || s.dirtyState || !s.onDisk || s.clearDisk || s.single || !s.complete || len(s.dirty)+len(s.dirtyTombs) > maxAdvance {
		return s.stateEntry(true, whole)
	}
	size := 0
	for _, o := range s.dirty {
		size += int(o.size)
	}
	for _, o := range s.dirtyTombs {
		size += int(o.size)
	}
	if size > maxAdvanceBytes {
		return s.stateEntry(true, false)
	}
	return journal.Entry{Scope: s.id, Kind: entryAdvance, Meta: []byte(s.rv)}
}

func (s *scope) stateEntry(final, whole bool) journal.Entry {
	s.seenOnDisk = s.seen
	meta, err := json.Marshal(stateMeta{
		Key: s.key, Single: s.single, Shape: s.shape, RV: s.rv, Reach: s.reach, Open: s.open, Gaps: slices.Clone(s.gaps),
		Complete: s.complete && final, Pinned: s.pinned, Used: s.used.Unix(), Seen: s.seen.Unix(), Seal: s.log.sealFor(whole),
	})
	if err != nil {
		panic(err) // strings, numbers and booleans
	}
	return journal.Entry{Scope: s.id, Kind: entryState, Meta: meta}
}

// restore makes dirty again what could not be written. The caller holds mu.
func (l *log) restore(groups []group, whole bool) {
	l.touch(true)
	if whole {
		l.nextCheck = -1 // all of it, again
	}
	for _, g := range groups {
		if g.scope == nil {
			l.restoreOthers(g)
			continue
		}
		if g.parts {
			// Some of it may be on disk, and which is not worth knowing.
			l.nextCheck = -1
		}
		s := g.scope
		s.dirtyState = true
		s.clearDisk = s.clearDisk || g.clear
		for _, i := range g.items {
			o := i.object
			if o == nil || o.bare == nil {
				continue
			}
			_, newer := s.dirty[o.key]
			if s.objects[o.key] == o || i.entry.Kind == entryRemove && s.objects[o.key] == nil && !newer {
				s.dirty[o.key] = o
			}
		}
		s.dirtyTombs = append(g.tombs, s.dirtyTombs...)
	}
}

// restoreOthers makes dirty again what is of no scope. Entries that drop something
// stay before all that came after them.
func (l *log) restoreOthers(g group) {
	var again []journal.Entry
	for _, i := range g.items {
		switch {
		case i.record == nil:
			again = append(again, i.entry)
		case l.responses[i.record.id()] == i.record && i.record.body != nil:
			l.dirtyResp[i.record.id()] = i.record
		}
	}
	l.dropped = append(again, l.dropped...)
}

// appendGroups writes the groups, as many as fit into a batch at a time, and
// returns how many are on disk.
func (l *log) appendGroups(groups []group) (done int, err error) {
	batch := make([]item, 0, 16)
	size := 0
	commit := func(upTo int) error {
		if len(batch) > 0 {
			if err := l.appendItems(batch); err != nil {
				return err
			}
		}
		batch, size, done = batch[:0], 0, upTo
		return nil
	}
	for n, g := range groups {
		gs := g.size()
		if len(batch) > 0 && size+gs > maxBatchBytes {
			if err := commit(n); err != nil {
				return done, err
			}
		}
		if gs > maxBatchBytes && g.scope != nil {
			groups[n].parts = true
			if err := l.appendLarge(g); err != nil {
				return done, err
			}
			done = n + 1
			continue
		}
		batch = append(batch, g.items...)
		size += gs
	}
	return done, commit(len(groups))
}

func (g *group) size() int {
	n := 0
	for _, i := range g.items {
		n += len(i.bare) + len(i.entry.Meta) + entryOverhead
	}
	return n
}

// appendLarge writes a group in several batches. Until the last of them the disk
// says that the scope is incomplete.
func (l *log) appendLarge(g group) error {
	final := g.items[0]
	open := item{scope: g.scope, entry: g.scope.stateEntryLocked(false)}
	batch, size := []item{open}, 0
	for _, i := range g.items[1:] {
		batch = append(batch, i)
		if size += len(i.bare) + len(i.entry.Meta) + entryOverhead; size > maxBatchBytes {
			if err := l.appendItems(batch); err != nil {
				return err
			}
			batch, size = batch[:0], 0
		}
	}
	return l.appendItems(append(batch, final))
}

func (s *scope) stateEntryLocked(final bool) journal.Entry {
	s.log.mu.RLock()
	defer s.log.mu.RUnlock()
	return s.stateEntry(final, false)
}

// appendItems writes one batch and lets go of the bytes that are on disk now.
func (l *log) appendItems(items []item) error {
	v := l.lockedView()
	defer v.Close()
	entries := make([]journal.Entry, len(items))
	for n := range items {
		e, err := l.bodyOf(&items[n], v, v.seal)
		if err != nil {
			return err
		}
		entries[n] = e
	}
	refs, err := l.journal.Append(entries)
	if err != nil {
		return err
	}
	l.settle(items, refs, v.seal)
	return nil
}

// settle notes where the bytes of items are, and with which key the log is sealed.
func (l *log) settle(items []item, refs []journal.Ref, seal string) {
	l.mu.Lock()
	l.seal = seal
	for n, i := range items {
		switch {
		case i.object != nil && i.entry.Kind != entryRemove:
			i.object.ref, i.object.bare, i.object.of = refs[n], nil, nil
		case i.record != nil:
			i.record.ref, i.record.body = refs[n], nil
		}
	}
	before := l.unpin()
	l.mu.Unlock()
	before.Close()
}

func (l *log) lockedView() *pinnedView {
	l.mu.RLock()
	defer l.mu.RUnlock()
	return l.view()
}

// encodeObjectMeta writes what the index knows of an object.
func encodeObjectMeta(o *object) []byte {
	var b []byte
	for _, s := range []string{o.key, o.rv, o.added} {
		b = binary.AppendUvarint(b, uint64(len(s)))
		b = append(b, s...)
	}
	return binary.AppendVarint(binary.AppendVarint(b, o.generation), o.seen)
}

func decodeObjectMeta(b []byte) (*object, error) {
	o := &object{}
	for _, s := range []*string{&o.key, &o.rv, &o.added} {
		n, w := binary.Uvarint(b)
		if w <= 0 || n > uint64(len(b)-w) {
			return nil, errObjectMeta
		}
		*s = string(b[w : w+int(n)])
		b = b[w+int(n):]
	}
	if o.added == o.rv {
		o.added = o.rv // one string for both
	}
	for _, n := range []*int64{&o.generation, &o.seenOnDisk} {
		v, w := binary.Varint(b)
		if w <= 0 {
			return nil, errObjectMeta
		}
		*n, b = v, b[w:]
	}
	if len(b) > 0 || !validRV(o.rv) {
		return nil, errObjectMeta
	}
	o.seen = o.seenOnDisk
	return o, nil
}

var errObjectMeta = errors.New("malformed object metadata")
