// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/codec"
)

// Kinds of journal entries.
const (
	entryState    = 1 // Meta: stateMeta
	entryPut      = 2 // Meta: objectMeta, Body: the object
	entryTomb     = 3 // Meta: objectMeta, Body: the object as it was last
	entryRemove   = 4 // Meta: objectMeta; of a single record, which keeps no tombstone
	entryClear    = 5 // the scope holds nothing any more
	entryDrop     = 6 // the scope is forgotten
	entryResponse = 7 // Meta: responseMeta, Body: the response's
	entryForget   = 8 // Meta: responseMeta of a response that is forgotten
	entryAdvance  = 9 // Meta: the scope's resourceVersion; all else is as the last entryState says
)

// A log is what one user was told of one resource: its scopes, and the whole
// responses. It is one log of the journal.
type log struct {
	c    *Cache
	name logName
	load sync.Once

	maxAge time.Duration // see MaxAges; 0: without end

	touched time.Time // when somebody last asked for it; guarded by Cache.mu

	// mu guards what follows and all scopes. It is never held over a disk
	// write; reads of single objects happen under it.
	mu        sync.RWMutex
	loaded    bool
	journal   *journal.Log
	seal      string      // the key that what is on disk is sealed with; "": clear
	pinned    *pinnedView // while the log is written anew
	scopes    map[Key]*scope
	single    map[codec.Representation]*scope
	responses map[string]*record
	lastID    uint32
	jsonOnly  bool // the API server has no protobuf for this resource
	avoided   map[Key]time.Time
	shown     map[Key]string   // resourceVersions of lists that the user saw
	pages     map[string]*page // by continue token
	pageCount int64

	due          time.Time // when to flush next; zero: nothing to flush
	dropped      []journal.Entry
	dirtyResp    map[string]*record
	nextCheck    int64     // journal size at which compaction is considered next; -1: only a new log makes sense
	rewriteAfter time.Time // no compaction before

	flushing sync.Mutex // held over a flush, so that there is one at a time
}

// stateMeta is what the disk says of a scope besides its objects.
type stateMeta struct {
	Key      Key         `json:"key"`
	Single   bool        `json:"single,omitempty"`
	Shape    codec.Shape `json:"shape"`
	RV       string      `json:"rv,omitempty"`
	Reach    string      `json:"reach,omitempty"`
	Open     bool        `json:"open,omitempty"`
	Gaps     []gap       `json:"gaps,omitempty"`
	Complete bool        `json:"complete,omitempty"`
	Pinned   bool        `json:"pinned,omitempty"`
	Used     int64       `json:"used,omitempty"` // Unix seconds
	Seen     int64       `json:"seen,omitempty"` // Unix seconds
	Seal     string      `json:"seal,omitempty"` // the key that all of the log is sealed with
}

func newLog(c *Cache, name logName) *log {
	l := &log{
		c: c, name: name,
		scopes: map[Key]*scope{}, single: map[codec.Representation]*scope{},
		shown: map[Key]string{}, avoided: map[Key]time.Time{}, responses: map[string]*record{}, dirtyResp: map[string]*record{},
	}
	l.seal, l.maxAge = l.wantedSeal(), c.cfg.MaxAges.of(name, c.cfg.Node().GetName())
	return l
}

// open loads what the disk holds of the log, once.
func (l *log) openOnce(logger klog.Logger) {
	l.load.Do(func() {
		// Not under the lock: who looks at all logs must not wait for the disk.
		r := &replay{l: l, byID: map[uint32]*scope{}, responses: map[string]*record{}, seals: map[uint32]string{}}
		var j *journal.Log
		name, err := json.Marshal(l.name)
		if err == nil {
			j, err = l.c.journal.OpenLog(string(name), journal.Replay{Batch: r.batch, Damaged: r.damaged, DamagedAll: r.damagedAll})
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.loaded, l.journal, l.lastID = true, j, r.lastID
		if err != nil {
			logger.Error(err, "Log is not readable; its scopes will be fetched again", "resource", l.name.gvr().String(), "user", l.name.User)
			l.c.metrics.journalFailures.Inc()
			return
		}
		r.finish(logger)
	})
}

// newScope makes an empty scope. The caller holds mu.
func (l *log) newScope(key Key, single bool) *scope {
	l.lastID++
	s := &scope{
		log: l, id: l.lastID, key: key, single: single, used: l.c.now(),
		objects: map[string]*object{}, dirty: map[string]*object{}, watchers: map[*watcher]struct{}{},
	}
	if single {
		l.single[key.Representation] = s
	} else {
		l.scopes[key] = s
	}
	return s
}

// singleOf returns the record of single objects in a representation.
func (l *log) singleOf(rep codec.Representation) *scope {
	if s := l.single[rep]; s != nil {
		return s
	}
	return l.newScope(Key{Representation: rep}, true)
}

// empty reports whether nothing would be lost with the log. The caller holds mu.
func (l *log) empty() bool {
	return l.loaded && len(l.scopes)+len(l.single)+len(l.responses)+len(l.dropped)+len(l.pages) == 0 &&
		(l.journal == nil || l.journal.Size() == 0)
}

// drop forgets a scope, in memory and with the next flush on disk. Its feed and
// watchers are the caller's to end.
func (l *log) drop(s *scope) {
	switch {
	case s.single && l.single[s.key.Representation] == s:
		delete(l.single, s.key.Representation)
	case !s.single && l.scopes[s.key] == s:
		delete(l.scopes, s.key)
	}
	if s.onDisk {
		l.forget(journal.Entry{Scope: s.id, Kind: entryDrop})
	}
	s.reset()
}

// maxDropped bounds what a disk that takes nothing is still to be told to forget.
const maxDropped = 4096

// forget has the disk told that something is gone. The caller holds mu.
func (l *log) forget(e journal.Entry) {
	if l.dropped = append(l.dropped, e); len(l.dropped) > maxDropped {
		l.dropped, l.nextCheck = nil, -1 // a new log does not have it
	}
	l.touch(true)
}

const (
	// avoidFor is how long no feed is opened for what one could not keep.
	avoidFor = 10 * time.Minute
	// maxAvoided bounds what is remembered for that.
	maxAvoided = 64
)

// avoid notes that a feed cannot keep a scope. The caller holds mu.
func (l *log) avoid(key Key) {
	if len(l.avoided) >= maxAvoided {
		clear(l.avoided)
	}
	l.avoided[key] = l.c.now()
}

// avoids reports whether a scope was found to be too much for a feed not long
// ago. The caller holds mu.
func (l *log) avoids(key Key) bool {
	t, ok := l.avoided[key]
	return ok && l.c.now().Sub(t) < avoidFor
}

// maxShown bounds how many lists' resourceVersions are remembered one by one.
const maxShown = 64

// saw notes the resourceVersion of a list that the user was shown. The caller
// holds mu.
func (l *log) saw(key Key, rv string) {
	if len(l.shown) >= maxShown {
		all := rv
		for _, other := range l.shown {
			all = maxRV(all, other)
		}
		l.shown, key, rv = map[Key]string{}, Key{}, all
	}
	l.shown[key] = maxRV(l.shown[key], rv)
}

// touch asks for a flush: within a second, or, when there is nothing urgent to write,
// some minutes. The caller holds mu.
func (l *log) touch(urgent bool) {
	if urgent {
		l.flushWithin(l.c.cfg.FlushPeriod)
	} else {
		l.flushWithin(l.c.cfg.StatusFlushPeriod)
	}
}

// What says no more than that somebody is alive, or that nothing has happened, is
// written this many times less often than a status. An idle node has nothing else to
// write, and each write costs some pages; what a crash loses, the API server sends
// again. A shutdown writes all of it.
const (
	heartbeatFlushes = 6  // half an hour
	advanceFlushes   = 72 // six hours
)

func (l *log) flushWithin(d time.Duration) {
	if due := l.c.now().Add(d); l.due.IsZero() || due.Before(l.due) {
		l.due = due
		l.c.wakeFlusher()
	}
}

// view returns a view in which the refs of the log's objects are good, nil if the
// log is not readable. While the log is written anew, that is the view from before:
// between the journal's change and the new refs nobody sees one without the other.
// The caller holds mu.
func (l *log) view() *pinnedView {
	switch {
	case l.journal == nil:
		return nil
	case l.pinned != nil:
		l.pinned.users.Add(1)
		return l.pinned
	}
	return newPinnedView(l.journal.View(), l.seal)
}

// unpin ends the time of the view from before, which is to be closed without the
// lock: that may unlink files. The caller holds mu.
func (l *log) unpin() (before *pinnedView) {
	before, l.pinned = l.pinned, nil
	return before
}

// A pinnedView is a journal.View that may have several users, and the key that what it
// shows is sealed with.
type pinnedView struct {
	*journal.View
	seal  string
	users atomic.Int32
}

func newPinnedView(v *journal.View, seal string) *pinnedView {
	p := &pinnedView{View: v, seal: seal}
	p.users.Store(1)
	return p
}

// Close gives up one use. nil is no view.
func (p *pinnedView) Close() {
	if p != nil && p.users.Add(-1) == 0 {
		p.View.Close()
	}
}

// openObject reads an object from a view and opens the seal that is on it.
func (s *scope) openObject(v *pinnedView, key string, ref journal.Ref, dst []byte) ([]byte, error) {
	if v == nil {
		return nil, errNoJournal
	}
	b, err := v.Read(ref, dst)
	if err != nil {
		return nil, fmt.Errorf("read %s of %s: %w", key, s.key, err)
	}
	return s.log.c.unseal(v.seal, b, s.place(key))
}

// wantedSeal is the key that what is written anew is sealed with; "": none.
func (l *log) wantedSeal() string {
	if l.name.secret() || l.c.cfg.SealAll {
		return l.c.cfg.Sealer.Current()
	}
	return ""
}

// sealFor is the key for what is appended, or for the whole log. The caller holds mu.
func (l *log) sealFor(whole bool) string {
	if whole {
		return l.wantedSeal()
	}
	return l.seal
}

// unseal opens what is on disk; seal is the name of the key, "" for none.
func (c *Cache) unseal(seal string, b []byte, place string) ([]byte, error) {
	if seal == "" {
		return b, nil
	}
	return c.cfg.Sealer.Open(seal, b, place)
}

// place is what a sealed object is bound to: another place's does not open here.
func (s *scope) place(key string) string {
	return s.log.name.Identity + "\n" + s.log.name.gvr().String() + "\n" + s.log.name.Class + "\n" + s.key.String() + "\n" + key
}

// size returns the bytes on disk, and those of them that are live.
func (l *log) size() (total, live int64) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	if l.journal == nil {
		return 0, 0
	}
	for _, s := range l.allScopes() {
		live += entryOverhead
		for _, o := range s.objects {
			live += entryOverhead + int64(o.ref.Length) + int64(len(o.key))
		}
		for _, o := range s.tombs {
			live += entryOverhead + int64(o.size) + int64(len(o.key))
		}
	}
	for _, r := range l.responses {
		live += entryOverhead + int64(r.ref.Length)
	}
	return l.journal.Size(), live
}

// entryOverhead is about what an entry costs on disk besides key and body.
const entryOverhead = 96

func (l *log) allScopes() []*scope {
	all := make([]*scope, 0, len(l.scopes)+len(l.single))
	for _, s := range l.scopes {
		all = append(all, s)
	}
	for _, s := range l.single {
		all = append(all, s)
	}
	return all
}

// rewriteSoon has the log written anew with the next flush, damage left behind.
func (l *log) rewriteSoon() {
	l.nextCheck = -1
	l.touch(true)
}

var (
	errNotAnObject = errors.New("not an object with a name and a comparable resourceVersion")
	errSharedGone  = errors.New("objects that a list shares with the recorded state are gone")
	errNoJournal   = errors.New("the journal of this log is not readable")
)
