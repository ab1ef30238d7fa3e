// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/edgehub/edgehub/pkg/codec"
)

// What edgehub_filter_expired_total tells apart.
const (
	expiredChanged = "changed"
	expiredUnknown = "unknown"
	expiredRoom    = "room"
)

var errExpired = apierrors.NewResourceExpired("edgehub: the filters of this watch, or what they depend on, have changed: list again")

// resumes reports whether a watch goes on from where its client is.
func resumes(q url.Values) bool {
	rv := q.Get("resourceVersion")
	initial, has := q["sendInitialEvents"] // read as the API server reads it
	return rv != "" && rv != "0" && (!has || initial[0] == "0" || strings.EqualFold(initial[0], "false"))
}

// watch filters a watch. Who resumes must hold what the filters would show now: a client
// of which that is not known lists again.
func (c *Chain) watch(req *http.Request, p *pipeline, observers []Observer) (*http.Response, error) {
	q := req.URL.Query()
	rv := q.Get("resourceVersion")
	resumes := resumes(q)
	v := c.newView(p, codec.Representation{})
	if resumes {
		if v = c.sessions.resume(req.URL, rv, p); v == nil {
			c.metrics.expired.WithLabelValues(expiredUnknown).Inc()
			return nil, errExpired
		}
	}
	ctx, cancel := context.WithCancel(req.Context())
	resp, err := c.cfg.Next.RoundTrip(req.WithContext(ctx))
	if err != nil || resp.StatusCode != http.StatusOK {
		c.sessions.discard(v)
		if err != nil {
			cancel()
			return nil, err
		}
		resp.Body = &cancelling{resp.Body, cancel}
		return resp, nil
	}
	rep, ok := codec.FromContentType(resp.Header.Get("Content-Type"))
	if !ok {
		resp.Body.Close()
		cancel()
		c.sessions.discard(v)
		return nil, apierrors.NewInternalError(fmt.Errorf("edgehub: a watch of type %q cannot be filtered", resp.Header.Get("Content-Type")))
	}
	c.observe(resp, p.request, observers)
	v.begin(rep)
	c.sessions.put(sessionKey(p.request, req.URL, rep), v)
	s := &stream{
		chain: c, pipeline: p, ctx: ctx, cancel: cancel, rep: rep, view: v, body: resp.Body, frames: codec.NewFrameReader(resp.Body, rep, maxFrameBytes),
		withholds: v.held != nil, initial: !resumes,
	}
	c.track(s)
	resp.Body, resp.ContentLength = s, -1
	resp.Header.Del("Content-Length")
	return resp, nil
}

// maxFrameBytes bounds a frame: an object and what is around it.
const maxFrameBytes = maxObjectBytes + 64<<10

// A cancelling is a body with a context to end.
type cancelling struct {
	io.ReadCloser
	cancel context.CancelFunc
}

func (c *cancelling) Close() error {
	defer c.cancel()
	return c.ReadCloser.Close()
}

// A stream is the body of a filtered watch.
type stream struct {
	chain    *Chain
	pipeline *pipeline
	ctx      context.Context //nolint:containedctx // of the one request that it answers
	cancel   context.CancelFunc
	rep      codec.Representation
	view     *view
	body     io.ReadCloser
	frames   *codec.FrameReader

	withholds bool
	// initial is set while initial events, whose resourceVersions are in no order, are not
	// over for all that is known: until a bookmark, or an event that they cannot have.
	initial bool

	expired atomic.Bool // the filters have changed
	buf     []byte
	space   []byte
	err     error // after buf
	ends    bool  // with a 410
}

func (s *stream) current() bool { return s.pipeline.current() }

// expire ends the stream with a 410, from any goroutine.
func (s *stream) expire() {
	if !s.expired.Swap(true) {
		s.chain.metrics.expired.WithLabelValues(expiredChanged).Inc()
	}
	s.cancel()
}

func (s *stream) Read(b []byte) (int, error) {
	for len(s.buf) == 0 {
		if s.err != nil {
			return 0, s.err
		}
		s.buf = s.space[:0]
		err := s.next()
		if s.expired.Load() {
			s.buf, err = s.buf[:0], errExpired // what has been read goes by the old filters
		}
		if status := apierrors.APIStatus(nil); errors.As(err, &status) {
			st := status.Status()
			s.buf = codec.AppendStatusFrame(s.buf, s.rep, &st)
			s.ends = st.Code == http.StatusGone
			err = io.EOF
		}
		s.err = err
		if cap(s.buf) <= spoolBufferBytes {
			s.space = s.buf
		}
	}
	n := copy(b, s.buf)
	if s.buf = s.buf[n:]; len(s.buf) == 0 && s.ends {
		s.chain.sessions.tell(s.view)
	}
	return n, nil
}

// next prepares what follows from one frame, which may be nothing.
func (s *stream) next() error {
	frame, err := s.frames.Next()
	if err != nil {
		return err
	}
	shape, bare, err := codec.DecodeObject(s.rep, frame.Object)
	if err != nil {
		return s.pipeline.unreadable(err)
	}
	shape.Representation = s.rep
	if frame.Type == watch.Error {
		s.buf = shape.AppendFrame(s.buf, frame.Type, bare)
		return io.EOF
	}
	o := NewObject(shape, bare)
	m, err := o.Meta()
	if err != nil {
		return s.pipeline.unreadable(err)
	}
	if frame.Type == watch.Bookmark {
		s.buf = shape.AppendFrame(s.buf, frame.Type, bare)
		s.initial = false
		s.view.reach(m.ResourceVersion)
		return nil
	}
	verdict, out, err := s.pipeline.apply(s.ctx, o)
	if err != nil {
		return err
	}
	if frame.Type != watch.Added {
		s.initial = false
	}
	rv := m.ResourceVersion
	if s.initial {
		rv = ""
	}
	kind := frame.Type
	if !s.withholds {
		s.view.reach(rv)
	} else if kind, out, err = s.withhold(kind, verdict, m, out, rv); err != nil || kind == "" {
		return err
	}
	s.buf = shape.AppendFrame(s.buf, kind, out)
	return nil
}

var errNoRoom = apierrors.NewResourceExpired("edgehub: what this client holds is not remembered: list again")

// withhold makes of an event what it means for a client that has not been shown
// everything; "" for nothing. What is withheld from one that holds it is DELETED, with
// what it holds, as the API server does where an object leaves a selector.
func (s *stream) withhold(kind watch.EventType, v Verdict, m codec.Meta, out []byte, rv string) (watch.EventType, []byte, error) {
	key := m.Namespace + "/" + m.Name
	if kind != watch.Deleted && v != Drop {
		if !s.view.hold(key, out, rv) {
			kind = watch.Added
		}
		return kind, out, nil
	}
	was, held := s.view.holds(key)
	if !held {
		return "", nil, nil
	}
	if kind != watch.Deleted || v == Drop {
		if was == nil {
			s.chain.metrics.expired.WithLabelValues(expiredRoom).Inc()
			return "", nil, errNoRoom
		}
		var err error
		if out, err = codec.SetResourceVersion(s.rep, was, m.ResourceVersion); err != nil {
			return "", nil, s.pipeline.unreadable(err)
		}
	}
	s.view.release(key, rv)
	return watch.Deleted, out, nil
}

// Close ends the watch.
func (s *stream) Close() error {
	s.cancel()
	s.chain.untrack(s)
	s.chain.sessions.end(s.view)
	return s.body.Close()
}

// An unfiltered is the body of a watch for which no filter is in force.
type unfiltered struct {
	io.ReadCloser
	pipeline *pipeline
	key      string // of its session
	cancel   context.CancelFunc
	expired  atomic.Bool
}

func (w *unfiltered) current() bool { return w.pipeline.current() }

// expire ends the watch. When its client resumes it, a filter is in force and says 410.
func (w *unfiltered) expire() {
	if w.expired.Swap(true) {
		return
	}
	s := w.pipeline.chain.sessions
	s.put(w.key, &view{sessions: s, pipeline: w.pipeline, stale: true, unknown: true, claims: 1})
	w.cancel()
}

func (w *unfiltered) Read(b []byte) (int, error) {
	if w.expired.Load() {
		return 0, io.EOF
	}
	n, err := w.ReadCloser.Read(b)
	if w.expired.Load() && err != nil {
		err = io.EOF
	}
	return n, err
}

func (w *unfiltered) Close() error {
	w.cancel()
	w.pipeline.chain.untrack(w)
	return w.ReadCloser.Close()
}

// An upgraded is a watch over a WebSocket, whose body is left to whoever upgraded.
type upgraded struct {
	pipeline *pipeline
	body     io.Closer
}

func (u *upgraded) current() bool { return u.pipeline.current() }
func (u *upgraded) expire()       { u.body.Close() }

// trackUpgrade ends the connection when a filter is put in force for it.
func (c *Chain) trackUpgrade(ctx context.Context, u *upgraded) {
	c.track(u)
	context.AfterFunc(ctx, func() { c.untrack(u) })
}
