// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// WithDeadline bounds requests that end by themselves. A client may ask for less
// by ?timeout=, as at the API server; more is cut to limit.
func WithDeadline(limit time.Duration) Middleware {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if isLongRunning(req) {
				next.ServeHTTP(w, req)
				return
			}
			timeout := limit
			if asked := askedTimeout(req.URL); asked != "" {
				d, err := time.ParseDuration(asked)
				if err != nil || d < 0 {
					writeError(w, req, apierrors.NewBadRequest("timeout must be a duration such as 30s"))
					return
				}
				if d > 0 {
					timeout = min(limit, d)
				}
			}
			ctx, cancel := context.WithTimeout(req.Context(), timeout)
			defer cancel()
			if req.ContentLength != 0 {
				// net/http does not know of the context while it reads. Nor is the deadline taken
				// back: what is left of a body that nobody has read is read by net/http, and
				// for the next request it sets its own.
				_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(timeout)) // not with a writer of a test
			}
			next.ServeHTTP(w, req.WithContext(ctx))
		})
	}
}

func askedTimeout(u *url.URL) string {
	if u.RawQuery == "" {
		return ""
	}
	return u.Query().Get("timeout")
}

// WithMaxInFlight bounds how many requests, and apart from them how many streams,
// are served at once. One more is answered 429 and may try again after a second. The
// node has places of its own, as many, and nobody else may have more than half of the
// others': a single caller must not starve the rest, kubelet least of all. The limits
// hold for the handlers made by one call of this function.
func WithMaxInFlight(requests, streams int, m *metrics) Middleware {
	requestPlaces, streamPlaces := newPlaces(requests), newPlaces(streams)
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			p, reason := requestPlaces, "requests_limit"
			if isLongRunning(req) {
				p, reason = streamPlaces, "streams_limit"
			}
			u, _ := request.UserFrom(req.Context())
			if !p.take(u) {
				m.refused.WithLabelValues(reason).Inc()
				writeError(w, req, apierrors.NewTooManyRequests("edgehub: too many requests in flight, try again", 1))
				return
			}
			defer p.give(u)
			next.ServeHTTP(w, req)
		})
	}
}

// places are how many of a kind may be served at once.
type places struct {
	limit int

	mu           sync.Mutex // guards what follows
	node, others int
	byUser       map[string]int // of others
}

func newPlaces(limit int) *places { return &places{limit: limit, byUser: map[string]int{}} }

// isNode reports whether u is a node: only this one is let in by its certificate, and no
// other user has that group.
func isNode(u user.Info) bool { return u != nil && slices.Contains(u.GetGroups(), user.NodesGroup) }

func nameOf(u user.Info) string {
	if u == nil {
		return ""
	}
	return u.GetName()
}

func (p *places) take(u user.Info) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if isNode(u) {
		if p.node >= p.limit {
			return false
		}
		p.node++
		return true
	}
	name := nameOf(u)
	if p.others >= p.limit || p.byUser[name] >= (p.limit+1)/2 {
		return false
	}
	p.others++
	p.byUser[name]++
	return true
}

func (p *places) give(u user.Info) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if isNode(u) {
		p.node--
		return
	}
	p.others--
	if name := nameOf(u); p.byUser[name] == 1 {
		delete(p.byUser, name)
	} else {
		p.byUser[name]--
	}
}

// WithMaxBody bounds request bodies to limit bytes, as the API server does. What
// is proxied or upgraded is a stream and has no bound there either.
func WithMaxBody(limit int64) Middleware {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if info := infoFrom(req); isUpgrade(req) || info.Verb == "proxy" || info.Subresource == "proxy" {
				next.ServeHTTP(w, req)
				return
			}
			if req.ContentLength > limit {
				writeError(w, req, &http.MaxBytesError{Limit: limit})
				return
			}
			if req.ContentLength != 0 { // with HTTP/2 there is a Body even where there is none
				r := *req
				r.Body = clientBody{http.MaxBytesReader(w, req.Body, limit)}
				req = &r
			}
			next.ServeHTTP(w, req)
		})
	}
}

// A clientBody tells a body that the client has broken from an answer that is.
type clientBody struct{ io.ReadCloser }

func (b clientBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF { //nolint:errorlint // io.Reader says that it is this very value
		err = fmt.Errorf("%w: %w", errBody, err)
	}
	return n, err
}

// WithDrain lets shutdown wait for requests that end by themselves, and end streams.
func WithDrain(d *drain) Middleware {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if !isLongRunning(req) {
				d.requests.add()
				defer d.requests.done()
				next.ServeHTTP(w, req)
				return
			}
			ctx, cancel := context.WithCancel(req.Context())
			defer cancel()
			d.streams.add()
			defer d.streams.done()
			forget := d.endWith(cancel)
			defer forget()
			next.ServeHTTP(w, req.WithContext(ctx))
		})
	}
}

// drain knows what is being served.
type drain struct {
	requests, streams *counter

	mu      sync.Mutex // guards what follows
	ended   bool
	cancels map[int]context.CancelFunc
	next    int
}

func newDrain() *drain {
	return &drain{requests: newCounter(), streams: newCounter(), cancels: map[int]context.CancelFunc{}}
}

// endWith makes endStreams call cancel, until forget is called.
func (d *drain) endWith(cancel context.CancelFunc) (forget func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ended {
		cancel()
	}
	d.next++
	key := d.next
	d.cancels[key] = cancel
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.cancels, key)
	}
}

// endStreams cancels every stream, those to come too.
func (d *drain) endStreams() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ended = true
	for _, cancel := range d.cancels {
		cancel()
	}
}

func (d *drain) waitRequests(ctx context.Context) { d.requests.wait(ctx) }
func (d *drain) waitStreams(ctx context.Context)  { d.streams.wait(ctx) }

// counter is a sync.WaitGroup that may be added to while it is waited for.
type counter struct {
	mu   sync.Mutex // guards what follows
	n    int
	zero chan struct{} // closed while n is 0
}

func newCounter() *counter {
	c := &counter{zero: make(chan struct{})}
	close(c.zero)
	return c
}

func (c *counter) add() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n == 0 {
		c.zero = make(chan struct{})
	}
	c.n++
}

func (c *counter) done() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.n--; c.n == 0 {
		close(c.zero)
	}
}

// wait returns when the count is 0, or ctx ends.
func (c *counter) wait(ctx context.Context) {
	c.mu.Lock()
	zero := c.zero
	c.mu.Unlock()
	select {
	case <-zero:
	case <-ctx.Done():
	}
}
