// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"
)

// looksPerLimit is how often within the limit stalls are looked for: one is found
// an eighth of the limit late at most.
const looksPerLimit = 8

// stalls knows all responses under way and ends those of which the client takes
// nothing: what it has asked for would be held for it for ever.
//
// A Write costs two atomic stores. A deadline for each would pass through the loop
// that serves the whole connection.
type stalls struct {
	limit   time.Duration
	metrics *metrics
	looks   atomic.Int64 // so far, and one

	mu   sync.Mutex // guards what follows
	open map[*response]struct{}
}

func newStalls(limit time.Duration, m *metrics) *stalls {
	s := &stalls{limit: limit, metrics: m, open: map[*response]struct{}{}}
	s.looks.Store(1)
	return s
}

// WithStallLimit has responses ended of which the client takes nothing for too
// long. Upgraded connections are their two ends' business.
func WithStallLimit(s *stalls) Middleware {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			r, ok := w.(*response)
			if !ok {
				r = &response{ResponseWriter: w}
			}
			s.add(r)
			defer s.remove(r)
			next.ServeHTTP(r, req)
		})
	}
}

func (s *stalls) add(r *response) {
	r.stalls = s
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[r] = struct{}{}
}

// remove returns when r is not looked at any more: its writer is not to be touched
// once the handler has returned.
func (s *stalls) remove(r *response) {
	s.mu.Lock()
	delete(s.open, r)
	s.mu.Unlock()
	r.ending.Lock()
	defer r.ending.Unlock()
	r.ended = true
}

// run looks for stalls until ctx ends.
func (s *stalls) run(ctx context.Context) {
	ticker := time.NewTicker(max(s.limit/looksPerLimit, time.Millisecond))
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		before := s.looks.Add(1) - looksPerLimit - 1
		for _, r := range s.writingSince(before) {
			if r.endIfWritingSince(before) {
				s.metrics.stalled.Inc()
				klog.FromContext(ctx).V(2).Info("Client takes nothing of a response, it is ended", "user", r.user, "limit", s.limit)
			}
		}
	}
}

func (s *stalls) writingSince(look int64) (stalled []*response) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r := range s.open {
		if r.isWritingSince(look) {
			stalled = append(stalled, r)
		}
	}
	return stalled
}

func (r *response) isWritingSince(look int64) bool {
	began := r.writing.Load()
	return began != 0 && began <= look
}

// endIfWritingSince makes the Write under way and all later ones fail. It reports
// whether it has, which it does once.
func (r *response) endIfWritingSince(look int64) bool {
	r.ending.Lock()
	defer r.ending.Unlock()
	if r.ended || !r.isWritingSince(look) {
		return false
	}
	r.ended = true
	return http.NewResponseController(r.ResponseWriter).SetWriteDeadline(time.Now().Add(-time.Second)) == nil
}

// beginWriting and endWriting are around whatever may wait for the client.
func (r *response) beginWriting() {
	if r.stalls != nil {
		r.writing.Store(r.stalls.looks.Load())
	}
}

func (r *response) endWriting() { r.writing.Store(0) }
