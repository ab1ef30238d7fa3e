// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/codec"
)

const (
	// watchBytes is about how much a watcher prepares at a time, or more where more is
	// asked for.
	watchBytes = 16 << 10
	// idleBytes is how much buffer a watcher keeps while nothing happens.
	idleBytes = 1 << 10
	// defaultWatchTimeout is the API server's: between this and twice this.
	defaultWatchTimeout = 30 * time.Minute
)

// A watcher is one client's watch. It is the body of the response: Read pulls the
// window first, then the events. Only feed.go and the reading goroutine touch it.
type watcher struct {
	scope  *scope
	feed   *feed
	key    Key    // what is asked for: the scope's, or a narrower namespace or name
	holder caller // for whom it holds the feed
	guest  *guest // whom it is for, if the feed is another's
	shape  codec.Shape
	ctx    context.Context

	state   *bodies  // what there was at first, nil once that is told
	window  window   // or what has happened since the client was away
	next    int      // of window.items, or of staging.list
	staging *staging // while the feed's first sync is under way
	queue   queue
	cursor  string // the client has everything up to here; guarded by the log's lock
	since   string // where the client resumed

	initial   bool // a bookmark is to end the initial events
	bookmarks bool

	pending []*event // taken from the queue
	last    []byte   // final frame, once the queue has ended
	timeout *time.Timer
	much    int // how much to prepare
	buf     []byte
	scratch []byte
	over    bool // nothing follows pending and last
	ended   bool
	closed  bool
}

// newWatcher attaches a watcher to a scope that the feed's holder has opened. The
// caller holds the log's lock.
func newWatcher(req *http.Request, s *scope, q *query, holder caller) *watcher {
	w := &watcher{
		scope: s, feed: s.feed, key: q.key, holder: holder, shape: s.shape, ctx: req.Context(), queue: newQueue(),
		initial: !q.resumes(), bookmarks: q.opts.AllowWatchBookmarks,
		timeout: time.NewTimer(watchTimeout(q)),
	}
	switch {
	case s.feed.staging != nil && !s.complete:
		w.staging = s.feed.staging
		w.staging.watchers[w] = struct{}{}
	case q.resumes():
		w.cursor, w.since = q.opts.ResourceVersion, q.opts.ResourceVersion
		w.window = s.since(w.cursor)
		s.watchers[w] = struct{}{}
	default:
		w.cursor = s.rv
		w.state = s.listing().bodies()
		s.watchers[w] = struct{}{}
	}
	if compareRV(s.rv, w.cursor) > 0 {
		w.cursor = s.rv
	}
	s.told = maxRV(s.told, s.rv)
	w.key.Representation = s.key.Representation
	if w.key != s.key {
		w.window.narrowKeys(w.key)
		if w.state != nil {
			w.state.narrowKeys(w.key)
		}
	}
	return w
}

func watchTimeout(q *query) time.Duration {
	if q.opts.TimeoutSeconds != nil && *q.opts.TimeoutSeconds > 0 {
		return time.Duration(*q.opts.TimeoutSeconds) * time.Second
	}
	return defaultWatchTimeout + rand.N(defaultWatchTimeout)
}

// offer hands an event to the watcher without ever waiting for it. The caller
// holds the log's lock.
func (w *watcher) offer(e *event) {
	if compareRV(e.rv, w.cursor) <= 0 || e.object == nil && !w.bookmarks || e.object != nil && !w.key.names(e.object.key) {
		return
	}
	if w.queue.put(e) {
		w.scope.log.c.metrics.overruns.Inc()
	}
}

// finish ends the watcher after what it has been offered, with a last frame if
// there is one.
func (w *watcher) finish(last []byte) { w.queue.end(last) }

// Read gives the client its next frames. It waits for the feed, the watch's
// time-out or the end of the request.
func (w *watcher) Read(p []byte) (int, error) {
	if len(w.buf) == 0 {
		w.buf, w.much = w.scratch[:0], max(len(p), watchBytes)
		if err := w.fill(); err != nil {
			return 0, err
		}
		w.scratch = w.buf
	}
	n := copy(p, w.buf)
	if w.buf = w.buf[n:]; len(w.buf) == 0 && cap(w.scratch) > idleBytes && w.quiet() {
		w.scratch, w.buf = nil, nil
	}
	return n, nil
}

// quiet reports whether there is nothing to say at the moment.
func (w *watcher) quiet() bool {
	return w.staging == nil && w.state == nil && len(w.pending) == 0 && w.next >= len(w.window.items) && len(w.queue.wake) == 0
}

// fill prepares at least one frame.
func (w *watcher) fill() error {
	for len(w.buf) == 0 {
		if w.ended || w.queue.isCut() {
			return io.EOF
		}
		var err error
		switch {
		case w.staging != nil:
			err = w.fillStaged()
		case w.state != nil:
			err = w.fillState()
		case w.next < len(w.window.items):
			err = w.fillWindow()
		default:
			err = w.fillLive()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// fillState takes the next objects of the state.
func (w *watcher) fillState() error {
	for w.state.next < len(w.state.items) && len(w.buf) < w.much {
		bare, err := w.state.read()
		if err != nil {
			w.scope.damagedRead(err)
			return err
		}
		w.buf = w.shape.AppendFrame(w.buf, watch.Added, bare)
	}
	if w.state.next == len(w.state.items) {
		w.closeState()
		w.endWindow(w.cursor)
	}
	return nil
}

func (w *watcher) closeState() {
	if w.state != nil {
		w.state.close()
		w.state.listing.close()
		w.state = nil
	}
}

// fillWindow takes the next events of the window.
func (w *watcher) fillWindow() error {
	var scratch []byte
	for w.next < len(w.window.items) && len(w.buf) < w.much {
		i := w.window.items[w.next]
		bare, err := w.scope.readItem(&w.window, i, scratch)
		if err != nil {
			w.scope.damagedRead(err)
			return err
		}
		w.buf = w.shape.AppendFrame(w.buf, i.kind, bare)
		w.next++
		if i.bare == nil {
			scratch = bare[:0]
		}
	}
	if w.next == len(w.window.items) {
		w.endWindow(w.cursor)
	}
	return nil
}

// endWindow says that the initial events are over. An API server that knows
// WatchList does so for every watch that begins with the state and allows
// bookmarks, also where sendInitialEvents was not asked for.
func (w *watcher) endWindow(rv string) {
	w.window.close()
	w.window.items, w.next = nil, 0
	if w.initial && w.bookmarks {
		w.buf = w.shape.AppendBookmark(w.buf, rv, true)
	}
	w.initial = false
}

// fillStaged follows the first sync of the feed as it comes in.
func (w *watcher) fillStaged() error {
	l := w.scope.log
	l.mu.RLock()
	st := w.staging
	changed := st.changed
	end := w.next
	for size := 0; end < len(st.list) && size < w.much; end++ {
		size += int(st.list[end].object.size)
	}
	batch := st.list[w.next:end]
	all, done, failed := end == len(st.list), st.done, st.failed
	w.shape = st.shape
	l.mu.RUnlock()
	for _, e := range batch {
		if w.next++; !w.key.names(e.object.key) {
			continue
		}
		bare, err := w.scope.read(e.object)
		if err != nil {
			return w.unread(err)
		}
		w.buf = w.shape.AppendFrame(w.buf, e.kind, bare)
	}
	switch {
	case all && done:
		w.staging = nil
		w.endWindow(st.rv)
		return nil
	case len(batch) > 0:
		return nil
	case failed:
		w.ended = true // the client asks again
		return nil
	}
	return w.wait(changed)
}

// wait waits for a change, something in the queue, the watch's time-out or the end of
// the request.
func (w *watcher) wait(changed <-chan struct{}) error {
	select {
	case <-changed:
	case <-w.queue.wake:
	case <-w.timeout.C:
		w.ended = true
	case <-w.ctx.Done():
		return w.ctx.Err()
	}
	return nil
}

// fillLive takes what the feed has to say.
func (w *watcher) fillLive() error {
	if w.initial {
		w.endWindow(w.cursor) // there was nothing to begin with
		return nil
	}
	if len(w.pending) == 0 && !w.over {
		if w.pending, w.last, w.over = w.queue.take(); len(w.pending) == 0 && !w.over {
			return w.wait(nil)
		}
	}
	for len(w.pending) > 0 && len(w.buf) < w.much {
		e := w.pending[0]
		w.pending[0], w.pending = nil, w.pending[1:]
		if err := w.append(e); err != nil {
			return err
		}
	}
	if len(w.pending) > 0 {
		return nil
	}
	if w.pending = nil; w.over {
		w.buf = append(w.buf, w.last...)
		w.ended = true
	}
	return nil
}

// unread ends the watch because something cannot be read that was to be told. A slow
// client may come too late for what the state has replaced or forgotten since, and the
// disk has let go of: then it asks again, and nothing is damaged.
func (w *watcher) unread(err error) error {
	w.pending, w.over, w.ended = nil, true, true
	if errors.Is(err, journal.ErrUnknownRef) {
		return nil
	}
	w.scope.damagedRead(err)
	return err
}

func (w *watcher) append(e *event) (err error) {
	if e.kind == watch.Bookmark {
		w.buf = w.shape.AppendBookmark(w.buf, e.rv, false)
		return nil
	}
	bare := e.bare
	if bare == nil {
		if bare, err = w.scope.read(e.object); err != nil {
			return w.unread(err)
		}
	}
	if e.kind == watch.Deleted { // the bytes may be those of the object as it was
		if bare, err = codec.SetResourceVersion(w.scope.key.Representation, bare, e.rv); err != nil {
			return w.unread(err)
		}
	}
	w.buf = w.shape.AppendFrame(w.buf, e.kind, bare)
	return nil
}

// Close detaches the watcher.
func (w *watcher) Close() error {
	if !w.detach() {
		return nil
	}
	w.closeState()
	w.window.close()
	w.timeout.Stop()
	return nil
}

// detach takes the watcher from its scope and feed; only the first call does.
func (w *watcher) detach() bool {
	l := w.scope.log
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.closed {
		return false
	}
	w.closed = true
	delete(w.scope.watchers, w)
	if st := w.staging; st != nil {
		delete(st.watchers, w)
	}
	w.feed.release(w.holder)
	return true
}

// initialEvents reports whether a watch asks for WatchList's initial events.
func (q *query) initialEvents() bool {
	return q.opts.SendInitialEvents != nil && *q.opts.SendInitialEvents
}

// resumes reports whether a watch goes on from a resourceVersion.
func (q *query) resumes() bool {
	rv := q.opts.ResourceVersion
	return rv != "" && rv != "0" && !q.initialEvents()
}

// followable reports whether a feed can serve the watch. The odd ones, among
// them those that the API server refuses, go upstream as they are.
func (q *query) followable() bool {
	o := &q.opts
	switch {
	case q.opaque, o.Continue != "", o.Limit != 0:
		return false
	case o.ResourceVersion != "" && o.ResourceVersion != "0" && !validRV(o.ResourceVersion):
		return false
	case q.initialEvents():
		return o.ResourceVersionMatch == metav1.ResourceVersionMatchNotOlderThan
	}
	return o.SendInitialEvents == nil && o.ResourceVersionMatch == ""
}
