// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"iter"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/watch"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/codec"
)

// maxTombstones bounds how many deletions a scope remembers for those who
// resume; older ones give way, and who resumes before them gets a 410.
const maxTombstones = 512

// An object is one version of one object, or its tombstone. It is never changed
// once it is in a scope, but for where its bytes are and when it was seen: a new
// version is a new object. ref, bare, of and seen are guarded by the log's lock.
type object struct {
	key        string // namespace + "/" + name: the API server's order
	rv         string // a tombstone's: of the deletion
	added      string // resourceVersion at which the scope first held the name
	generation int64
	seen       int64 // Unix seconds; of a single record: when the API server last showed it
	seenOnDisk int64 // what the disk says of seen
	size       int32 // bytes
	deleted    bool

	bare []byte      // until it is on disk
	ref  journal.Ref // once it is
	of   *object     // whose bytes a tombstone's are, until they are on disk once more
}

// place is where the bytes are. The caller holds the log's lock.
func (o *object) place() ([]byte, journal.Ref) {
	if o.of != nil {
		return o.of.bare, o.of.ref
	}
	return o.bare, o.ref
}

func objectKey(namespace, name string) string { return namespace + "/" + name }

// newObject reads the metadata of a bare object that the caller gives away.
func newObject(rep codec.Representation, bare []byte) (*object, codec.Meta, error) {
	m, err := codec.ReadMeta(rep, bare)
	if err != nil {
		return nil, m, err
	}
	if m.Name == "" || !validRV(m.ResourceVersion) {
		return nil, m, errNotAnObject
	}
	o := &object{key: objectKey(m.Namespace, m.Name), rv: m.ResourceVersion, generation: m.Generation, size: int32(len(bare)), bare: bare}
	o.added = o.rv
	return o, m, nil
}

// A scope is the state of what one list or watch asked for. All fields are
// guarded by its log's lock.
type scope struct {
	log *log
	id  uint32
	key Key
	// single marks the record of objects that were fetched or written one by
	// one: it is never complete, and answers nothing but GETs.
	single bool

	shape    codec.Shape
	objects  map[string]*object
	bytes    int64     // of objects
	tombs    []*object // in resourceVersion order
	rv       string    // at which the state is complete
	reach    string    // resuming is possible from here on
	open     bool      // but not at reach itself, where there may have been more
	gaps     []gap     // but not within these
	also     string    // and from here, see alsoFrom
	complete bool
	// fed is true while a live feed vouches for the state, and after it for as
	// long as it is the link that keeps the feed away.
	fed    bool
	pinned bool // reopen the feed at start
	used   time.Time
	seen   time.Time // when the API server last showed all of it, see vouch
	// seenOnDisk is what the disk says of seen.
	seenOnDisk time.Time

	feed     *feed
	watchers map[*watcher]struct{}
	told     string // resourceVersion of the last change that a watcher was told

	order      keyOrder           // see inOrder
	dirty      map[string]*object // changed since the last flush
	dirtyTombs []*object
	dirtyState bool
	dirtyRV    bool // as dirtyState, but nothing else than rv has changed
	clearDisk  bool // what the disk holds of the scope is to be dropped first
	onDisk     bool // the disk holds something of the scope
}

// An event is a change, as all watchers of a scope share it.
type event struct {
	kind watch.EventType // ADDED, MODIFIED, DELETED, BOOKMARK
	rv   string
	// object is what it is about; nil for a BOOKMARK. bare are its bytes, nil if they
	// are on disk.
	object *object
	bare   []byte
}

func newEvent(kind watch.EventType, o *object) *event {
	bare, _ := o.place()
	return &event{kind: kind, rv: o.rv, object: o, bare: bare}
}

// apply takes one event of the feed into the state and hands it on. Events at or
// below the scope's resourceVersion are dropped: a list has said it already.
func (s *scope) apply(kind watch.EventType, o *object) {
	if compareRV(o.rv, s.rv) <= 0 {
		return
	}
	if kind == watch.Deleted {
		s.bury(o)
	} else {
		kind = s.put(o)
	}
	s.advance(o.rv)
	s.send(newEvent(kind, o))
}

// put makes o the version of its name and returns how a watcher sees that.
func (s *scope) put(o *object) watch.EventType {
	kind, urgent, heartbeat := watch.Added, true, false
	if o.generation == 0 && s.log.name.heartbeats() {
		o.generation = labelGeneration(s.key.Representation, o.bare)
	}
	if old := s.objects[o.key]; old != nil {
		kind, o.added = watch.Modified, old.added
		heartbeat = s.log.name.heartbeats()
		urgent = o.generation != old.generation || o.generation == 0 && !heartbeat
		s.bytes -= int64(old.size)
	}
	s.bytes += int64(o.size)
	s.objects[o.key] = o
	s.dirty[o.key] = o
	if heartbeat && !urgent {
		s.log.flushWithin(heartbeatFlushes * s.log.c.cfg.StatusFlushPeriod)
	} else {
		s.log.touch(urgent)
	}
	return kind
}

// labelGeneration stands in for the generation of what has none and reports all the time
// that it is alive: Nodes. What pool a node is in must not be lost with the reports.
func labelGeneration(rep codec.Representation, bare []byte) int64 {
	sum, err := codec.HashLabels(rep, bare)
	if err != nil {
		return 0
	}
	return int64(sum >> 1)
}

// bury turns the name of o into a tombstone. o holds the last state with the
// deletion's resourceVersion.
func (s *scope) bury(o *object) {
	o.deleted = true
	if old := s.objects[o.key]; old != nil {
		s.bytes -= int64(old.size)
		o.added = old.added
	}
	delete(s.objects, o.key)
	delete(s.dirty, o.key)
	s.tombs = append(s.tombs, o)
	s.dirtyTombs = append(s.dirtyTombs, o)
	if n := len(s.tombs) - maxTombstones; n > 0 {
		s.reach, s.open, s.also, s.dirtyState = s.tombs[n-1].rv, true, "", true
		s.tombs = slices.Delete(s.tombs, 0, n)
	}
	if len(s.dirtyTombs) > len(s.tombs) {
		// The disk does not take them, and the oldest nobody needs any more. Without them
		// only the whole log makes sense.
		s.dirtyTombs = slices.Clone(s.tombs)
		s.log.nextCheck = -1
	}
	s.log.touch(true)
}

// advance moves the scope's resourceVersion on. On disk that alone is not urgent.
func (s *scope) advance(rv string) {
	if compareRV(rv, s.rv) > 0 {
		s.rv = rv
		s.dirtyRV = true
		s.log.flushWithin(advanceFlushes * s.log.c.cfg.StatusFlushPeriod)
	}
}

// everyWatcher are the watchers of the state and of a sync that is under way.
func (s *scope) everyWatcher() iter.Seq[*watcher] {
	return func(yield func(*watcher) bool) {
		for w := range s.watchers {
			if !yield(w) {
				return
			}
		}
		if s.feed == nil || s.feed.staging == nil {
			return
		}
		for w := range s.feed.staging.watchers {
			if !yield(w) {
				return
			}
		}
	}
}

func (s *scope) send(e *event) {
	if e.kind != watch.Bookmark && len(s.watchers) > 0 {
		s.told = e.rv
	}
	for w := range s.watchers {
		w.offer(e)
	}
}

// replace makes the scope exactly what a list at rv said, and hands the
// difference on: what is new in resourceVersion order, then what is gone, each
// at the list's resourceVersion, then a bookmark. listed is what the list held,
// by key; entries that the scope has already may be the scope's own.
func (s *scope) replace(shape codec.Shape, rv string, listed map[string]*object) error {
	if s.complete && compareRV(rv, s.rv) <= 0 {
		return nil
	}
	for key, o := range listed {
		// An object that the list shares with the scope must still be the scope's:
		// its bytes may have moved on disk, or gone, since.
		if o.bare == nil && s.objects[key] != o {
			return errSharedGone
		}
	}
	first := !s.complete
	if first {
		s.reset()
		s.reach = rv
	} else {
		s.addGap(s.rv, rv)
	}
	s.setShape(shape)
	var changed []*object
	for key, o := range listed {
		if old := s.objects[key]; old == nil || old.rv != o.rv {
			changed = append(changed, o)
		}
	}
	slices.SortFunc(changed, func(a, b *object) int { return compareRV(a.rv, b.rv) })
	for _, o := range changed {
		kind := s.put(o)
		s.send(newEvent(kind, o))
	}
	s.buryMissing(rv, listed)
	s.complete = true
	s.rv = rv
	s.dirtyState = true
	s.log.touch(first)
	s.send(&event{kind: watch.Bookmark, rv: rv})
	return nil
}

// A gap is a stretch of history that a scope has not followed: what came and went
// within it is not known. Who resumes inside of it may know more than the scope.
type gap struct {
	From, To string
}

func (g gap) holds(rv string) bool { return compareRV(rv, g.From) > 0 && compareRV(rv, g.To) < 0 }

// maxGaps bounds how many gaps a scope remembers. Before the end of an older one
// nobody can resume.
const maxGaps = 8

// addGap notes that a list took the scope from one resourceVersion to another.
func (s *scope) addGap(from, to string) {
	s.gaps = append(s.gaps, gap{from, to})
	if n := len(s.gaps) - maxGaps; n > 0 {
		if to := s.gaps[n-1].To; compareRV(to, s.reach) > 0 {
			s.reach, s.open, s.also = to, false, ""
		}
		s.gaps = slices.Delete(s.gaps, 0, n)
	}
	s.endWatchers(func(w *watcher) bool { return w.since != "" && compareRV(w.since, from) > 0 })
}

// alsoFrom lets a client resume at the resourceVersion of a list that is older than all
// of the scope's history: the feed's first sync has overtaken it, as happens when a
// client lists and then watches what nobody has watched before. With what the list held
// the difference to the state is known, unless something of it is gone without a trace.
func (s *scope) alsoFrom(rv string, listed map[string]*object) {
	tombs := make(map[string]*object, len(s.tombs))
	for _, o := range slices.Backward(s.tombs) {
		tombs[o.key] = o // the first one of each
	}
	for key := range listed {
		if s.objects[key] == nil && tombs[key] == nil {
			return
		}
	}
	for key, o := range listed {
		now := s.objects[key]
		if t := tombs[key]; t != nil {
			now = t // of the one that the list held; what came after it is new
		}
		if compareRV(now.added, o.rv) > 0 {
			now.added = o.rv
		}
	}
	s.also = rv
}

// canResume reports whether the scope can tell all that happened after rv.
func (s *scope) canResume(rv string) bool {
	return s.complete && (rv == s.also || compareRV(rv, s.reach) >= btoi(s.open)) && !slices.ContainsFunc(s.gaps, func(g gap) bool { return g.holds(rv) })
}

// setShape takes over what a list or watch said of its objects. A watch does not
// tell the kind of the list; it is the object's with List behind it.
func (s *scope) setShape(shape codec.Shape) {
	if shape.ListKind == "" {
		shape.ListKind = shape.Kind + "List"
	}
	s.shape = shape
}

// buryMissing deletes what the list at rv did not hold. Their DELETED carries the
// list's resourceVersion, because a reflector resumes from it.
func (s *scope) buryMissing(rv string, listed map[string]*object) {
	var gone []*object
	for key, o := range s.objects {
		if listed[key] == nil {
			gone = append(gone, o)
		}
	}
	slices.SortFunc(gone, func(a, b *object) int { return strings.Compare(a.key, b.key) })
	for _, old := range gone {
		// The bytes stay where they are; who reads them puts the resourceVersion in.
		o := &object{key: old.key, rv: rv, added: old.added, generation: old.generation, size: old.size, of: old}
		s.bury(o)
		s.send(newEvent(watch.Deleted, o))
	}
}

// reset forgets the state, in memory and with the next flush on disk.
func (s *scope) reset() {
	s.objects = map[string]*object{}
	s.dirty = map[string]*object{}
	s.tombs, s.dirtyTombs = nil, nil
	s.bytes, s.told, s.also = 0, "", ""
	s.rv, s.reach, s.open, s.gaps = "", "", false, nil
	s.complete, s.fed = false, false
	s.clearDisk = s.onDisk
	s.dirtyState = true
	s.log.touch(true)
}

// A window is what a watcher that resumes gets before it follows the feed.
type window struct {
	items []windowItem
	view  *pinnedView
}

type windowItem struct {
	kind watch.EventType
	bare []byte
	ref  journal.Ref
	key  string
	rv   string // of a deletion
}

// narrowKeys leaves in the window what has the namespace and name of key.
func (w *window) narrowKeys(key Key) {
	w.items = slices.DeleteFunc(w.items, func(i windowItem) bool { return !key.names(i.key) })
}

// since returns what happened after rv, in resourceVersion order: the objects
// that are newer, and the deletions. Versions in between are gone.
func (s *scope) since(rv string) window {
	var newer []*object
	for _, o := range s.objects {
		if compareRV(o.rv, rv) > 0 {
			newer = append(newer, o)
		}
	}
	same := 0
	for _, o := range s.objects {
		same += btoi(o.rv == rv)
	}
	for _, o := range s.tombs {
		switch c := compareRV(o.rv, rv); {
		case compareRV(o.added, rv) > 0:
			// It came and went since: who resumes does not hold it.
		case c > 0:
			newer = append(newer, o)
		case c == 0:
			same++
		}
	}
	if same > 1 {
		// What a list found gone is all at the list's resourceVersion, where an object may
		// be as well; who resumes there may have seen a part of it. To be told twice does
		// no harm.
		newer = append(newer, slices.DeleteFunc(slices.Clone(s.tombs), func(o *object) bool { return o.rv != rv })...)
	}
	slices.SortStableFunc(newer, func(a, b *object) int { return compareRV(a.rv, b.rv) })
	w := window{view: s.log.view(), items: make([]windowItem, 0, len(newer))}
	for _, o := range newer {
		bare, ref := o.place()
		i := windowItem{kind: watch.Modified, bare: bare, ref: ref, key: o.key}
		switch {
		case o.deleted:
			i.kind, i.rv = watch.Deleted, o.rv
		case compareRV(o.added, rv) > 0:
			i.kind = watch.Added
		}
		w.items = append(w.items, i)
	}
	return w
}

// readItem returns the bytes of an item of a window; dst is reused for those on
// disk.
func (s *scope) readItem(w *window, i windowItem, dst []byte) (bare []byte, err error) {
	if bare = i.bare; bare == nil {
		if bare, err = s.openObject(w.view, i.key, i.ref, dst); err != nil {
			return nil, err
		}
	}
	if i.kind == watch.Deleted {
		return codec.SetResourceVersion(s.key.Representation, bare, i.rv)
	}
	return bare, nil
}

// read returns the bytes of an object. Nothing is read from disk under the log's
// lock.
func (s *scope) read(o *object) (bare []byte, err error) {
	l := s.log
	l.mu.RLock()
	bare, ref := o.place()
	var v *pinnedView
	if bare == nil {
		v = l.view()
	}
	l.mu.RUnlock()
	if bare == nil {
		if v == nil {
			return nil, errNoJournal
		}
		defer v.Close()
		if bare, err = s.openObject(v, o.key, ref, nil); err != nil {
			return nil, err
		}
	}
	if o.deleted {
		return codec.SetResourceVersion(s.key.Representation, bare, o.rv)
	}
	return bare, nil
}

func (w *window) close() {
	if w.view != nil {
		w.view.Close()
		w.view = nil
	}
}
