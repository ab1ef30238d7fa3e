// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"sync"

	"k8s.io/apimachinery/pkg/watch"
)

const (
	// maxQueueEvents and maxQueueBytes are how far a watcher may be behind. One
	// that is further behind is ended; it resumes from the window.
	maxQueueEvents = 1000
	maxQueueBytes  = 4 << 20
)

// A queue holds what a watcher has not taken yet. It takes no memory while it is
// empty. Safe for concurrent use.
type queue struct {
	wake chan struct{} // capacity 1: there is something to take

	mu     sync.Mutex // guards what follows
	events []*event
	bytes  int
	ended  bool
	off    bool   // nothing more is to be told, not even what is in it
	last   []byte // final frame
}

func newQueue() queue { return queue{wake: make(chan struct{}, 1)} }

// put adds an event, and reports whether that was too much: then the queue has
// ended, and what was in it is gone. It never waits.
func (q *queue) put(e *event) (overrun bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := len(q.events)
	switch {
	case q.ended:
		return false
	case n > 0 && e.kind == watch.Bookmark && q.events[n-1].kind == watch.Bookmark:
		q.events[n-1] = e // the newer one says it all
		return false
	case n >= maxQueueEvents, n > 0 && q.bytes+len(e.bare) > maxQueueBytes:
		q.events, q.ended = nil, true
		q.signal()
		return true
	}
	q.events = append(q.events, e)
	q.bytes += len(e.bare)
	q.signal()
	return false
}

// end ends the queue after what is in it, with a last frame if there is one.
func (q *queue) end(last []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.ended {
		q.ended, q.last = true, last
		q.signal()
	}
}

// cut ends the queue, and with it whatever else the watcher has to tell.
func (q *queue) cut() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.events, q.ended, q.off, q.last = nil, true, true, nil
	q.signal()
}

func (q *queue) isCut() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.off
}

func (q *queue) signal() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// take returns what is there, and whether nothing follows.
func (q *queue) take() (events []*event, last []byte, ended bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	events = q.events
	q.events, q.bytes = nil, 0
	return events, q.last, q.ended
}
