// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"io"
	"math/rand/v2"
	"net/http"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/edgehub/edgehub/pkg/codec"
)

const (
	// watcherQueue is how many events a watcher may be behind. One that is
	// further behind is ended; it resumes from the window.
	watcherQueue = 1000
	// watchBytes is about how much a watcher prepares at a time.
	watchBytes = 16 << 10
	// defaultWatchTimeout is the API server's: between this and twice this.
	defaultWatchTimeout = 30 * time.Minute
)

// A watcher is one client's watch. It is the body of the response: Read pulls the
// window first, then the events. Only feed.go and the reading goroutine touch it.
type watcher struct {
	scope *scope
	feed  *feed
	shape codec.Shape
	ctx   context.Context

	window  window
	next    int      // of window.items, or of staging.list
	staging *staging // while the feed's first sync is under way
	queue   chan *event
	cursor  string // the client has everything up to here
	since   string // where the client resumed

	initial   bool // a bookmark is to end the initial events
	bookmarks bool

	last    []byte // a final frame, guarded by the log's lock
	overrun bool   // guarded by the log's lock
	timeout *time.Timer
	buf     []byte
	scratch []byte
	ended   bool
	closed  bool
}

// newWatcher attaches a watcher to a scope. The caller holds the log's lock.
func newWatcher(req *http.Request, s *scope, q *query) *watcher {
	w := &watcher{
		scope: s, feed: s.feed, shape: s.shape, ctx: req.Context(), queue: make(chan *event, watcherQueue),
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
		w.window = s.initial()
		s.watchers[w] = struct{}{}
	}
	if compareRV(s.rv, w.cursor) > 0 {
		w.cursor = s.rv
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
	if w.overrun || compareRV(e.rv, w.cursor) <= 0 || e.kind == watch.Bookmark && !w.bookmarks {
		return
	}
	select {
	case w.queue <- e:
	default:
		w.overrun = true
		w.scope.log.c.metrics.overruns.Inc()
		close(w.queue)
	}
}

// finish ends the watcher after what it has been offered, with a last frame if
// there is one. The caller holds the log's lock.
func (w *watcher) finish(last []byte) {
	if !w.overrun {
		w.overrun = true
		w.last = last
		close(w.queue)
	}
}

// Read gives the client its next frames. It waits for the feed, the watch's
// time-out or the end of the request.
func (w *watcher) Read(p []byte) (int, error) {
	if len(w.buf) == 0 {
		w.buf = w.scratch[:0]
		if err := w.fill(); err != nil {
			return 0, err
		}
		w.scratch = w.buf
	}
	n := copy(p, w.buf)
	w.buf = w.buf[n:]
	return n, nil
}

// fill prepares at least one frame.
func (w *watcher) fill() error {
	for len(w.buf) == 0 {
		if w.ended {
			return io.EOF
		}
		var err error
		switch {
		case w.staging != nil:
			err = w.fillStaged()
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

// fillWindow takes the next objects of the window.
func (w *watcher) fillWindow() error {
	var scratch []byte
	for w.next < len(w.window.items) && len(w.buf) < watchBytes {
		i := w.window.items[w.next]
		bare, err := w.scope.readItem(&w.window, i, scratch)
		if err != nil {
			w.scope.damagedRead()
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
	for w.next < len(st.list) && len(w.buf) < watchBytes {
		e := st.list[w.next]
		bare, err := w.scope.readOne(e.object)
		if err != nil {
			l.mu.RUnlock()
			w.scope.damagedRead()
			return err
		}
		w.buf = st.shape.AppendFrame(w.buf, e.kind, bare)
		w.next++
	}
	all, done, failed := w.next == len(st.list), st.done, st.failed
	w.shape = st.shape
	l.mu.RUnlock()
	switch {
	case len(w.buf) > 0 && !(all && done):
		return nil
	case all && done:
		w.staging = nil
		w.endWindow(st.rv)
		return nil
	case failed:
		w.ended = true // the client asks again
		return nil
	}
	return w.wait(changed)
}

// wait waits for a change, the watch's time-out or the end of the request.
func (w *watcher) wait(changed <-chan struct{}) error {
	select {
	case <-changed:
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
	select {
	case e, ok := <-w.queue:
		w.append(e, ok)
	case <-w.timeout.C:
		w.ended = true
	case <-w.ctx.Done():
		return w.ctx.Err()
	}
	for len(w.buf) < watchBytes && !w.ended {
		select {
		case e, ok := <-w.queue:
			w.append(e, ok)
		default:
			return nil
		}
	}
	return nil
}

func (w *watcher) append(e *event, ok bool) {
	switch {
	case !ok:
		w.scope.log.mu.RLock()
		w.buf = append(w.buf, w.last...)
		w.scope.log.mu.RUnlock()
		w.ended = true
	case e.kind == watch.Bookmark:
		w.buf = w.shape.AppendBookmark(w.buf, e.rv, false)
	default:
		w.buf = w.shape.AppendFrame(w.buf, e.kind, e.bare)
	}
}

// Close detaches the watcher.
func (w *watcher) Close() error {
	l := w.scope.log
	l.mu.Lock()
	defer l.mu.Unlock()
	if w.closed {
		return nil
	}
	w.closed = true
	delete(w.scope.watchers, w)
	if st := w.staging; st != nil {
		delete(st.watchers, w)
	}
	w.window.close()
	w.timeout.Stop()
	w.feed.release()
	return nil
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
