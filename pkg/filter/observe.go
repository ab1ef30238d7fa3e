// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/edgehub/edgehub/pkg/codec"
)

// observe lets observers see what an answer says, beside the client, which gets the bytes
// as they are, whatever the observers make of them.
func (c *Chain) observe(resp *http.Response, r *Request, observers []Observer) {
	if len(observers) == 0 || resp.StatusCode != http.StatusOK || r.Verb == "get" || resp.Request != nil && resp.Request.Method == http.MethodHead {
		return
	}
	rep, ok := codec.FromContentType(resp.Header.Get("Content-Type"))
	if !ok {
		return
	}
	var seeing []*observation
	for _, o := range observers {
		if seen := o.Observe(r); seen != nil {
			seeing = append(seeing, &observation{Observation: seen, objects: c.metrics.objects.WithLabelValues(o.Name(), verdictSeen), seconds: c.metrics.duration.WithLabelValues(o.Name())})
		}
	}
	if len(seeing) == 0 {
		return
	}
	if body, ok := resp.Body.(itemized); ok && r.Verb == "list" {
		resp.Body = observeItems(body, seeing)
		return
	}
	for _, o := range seeing {
		resp.Body = c.observed(resp.Body, r, rep, o)
	}
}

// An itemized is the body of a whole list that tells of its objects by itself: the cache
// knows where they begin. To take 25 MB apart again would take longer than to send them.
type itemized interface {
	io.ReadCloser
	EachItem(f func(shape codec.Shape, bare []byte))
}

func observeItems(body itemized, seeing []*observation) io.ReadCloser {
	body.EachItem(func(shape codec.Shape, bare []byte) {
		for _, o := range seeing {
			o.see(watch.Added, shape, bare)
		}
	})
	return &observedItems{ReadCloser: body, seeing: seeing}
}

// An observedItems is the body of such a list.
type observedItems struct {
	io.ReadCloser
	seeing []*observation
	ended  bool
}

func (l *observedItems) Read(b []byte) (int, error) {
	n, err := l.ReadCloser.Read(b)
	if err != nil {
		l.end(errors.Is(err, io.EOF))
	}
	return n, err
}

// end tells of the end of the list, once.
func (l *observedItems) end(whole bool) {
	if l.ended {
		return
	}
	l.ended = true
	for _, o := range l.seeing {
		if whole {
			o.Synced()
		}
		o.End(whole)
	}
}

func (l *observedItems) Close() error {
	l.end(false)
	return l.ReadCloser.Close()
}

// An observation counts what an Observation sees.
type observation struct {
	Observation
	objects, seconds prometheus.Counter
	seen             int
	object           Object // of the call that is under way
}

// timedEach is of how many objects one is timed: to look at the clock twice takes as long
// as most observers do.
const timedEach = 16

func (o *observation) see(kind watch.EventType, shape codec.Shape, bare []byte) {
	o.objects.Inc()
	o.object = Object{shape: shape, bare: bare}
	if o.seen++; o.seen%timedEach != 1 {
		o.See(kind, &o.object)
		return
	}
	start := time.Now()
	o.See(kind, &o.object)
	o.seconds.Add(timedEach * time.Since(start).Seconds())
}

// observed has an observer read along, in a goroutine of its own that ends after the body.
func (c *Chain) observed(body io.ReadCloser, r *Request, rep codec.Representation, o *observation) io.ReadCloser {
	b := &backlog{}
	b.more.L = &b.mu
	go func() {
		defer b.abandon()
		if r.Verb == "watch" {
			o.follow(b, rep)
		} else {
			o.list(b, rep)
		}
	}()
	return &observed{body, b}
}

// An observed is a body that somebody reads along.
type observed struct {
	io.ReadCloser
	backlog *backlog
}

func (o *observed) Read(b []byte) (int, error) {
	n, err := o.ReadCloser.Read(b)
	o.backlog.add(b[:n], err)
	return n, err
}

func (o *observed) Close() error {
	o.backlog.add(nil, io.ErrUnexpectedEOF)
	return o.ReadCloser.Close()
}

// maxBacklogBytes is how far an observer may be behind the client, which does not wait for
// it: then it has lost touch.
const maxBacklogBytes = 16 << 20

// A backlog is what the client has been given and an observer has not looked at. Reading
// waits for more of it, adding never waits.
type backlog struct {
	mu   sync.Mutex // guards what follows
	more sync.Cond
	buf  []byte
	err  error // after buf
}

// add appends what the client is given. What comes after an error is not looked at.
func (b *backlog) add(p []byte, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.err != nil {
		return
	}
	if b.err = err; len(b.buf)+len(p) > maxBacklogBytes {
		b.buf, b.err = nil, io.ErrUnexpectedEOF
	} else {
		b.buf = append(b.buf, p...)
	}
	b.more.Signal()
}

func (b *backlog) abandon() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.buf, b.err = nil, io.ErrClosedPipe
}

func (b *backlog) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for len(b.buf) == 0 && b.err == nil {
		b.more.Wait()
	}
	n := copy(p, b.buf)
	if b.buf = b.buf[n:]; n == 0 && len(p) > 0 {
		return 0, b.err
	}
	if len(b.buf) == 0 {
		b.buf = nil
	}
	return n, nil
}

// list reads a list to its end.
func (o *observation) list(r io.Reader, rep codec.Representation) {
	d := codec.NewListDecoder(rep, maxObjectBytes, func(shape codec.Shape, bare []byte) error {
		o.see(watch.Added, shape, bare)
		return nil
	})
	_, err := io.CopyBuffer(onlyWriter{d}, r, make([]byte, 32<<10))
	var list codec.List
	if err == nil {
		list, err = d.Close()
	}
	whole := err == nil && list.Continue == "" && !list.Sharded
	if whole {
		o.Synced()
	}
	o.End(whole)
}

// follow reads a watch to its end.
func (o *observation) follow(r io.Reader, rep codec.Representation) {
	o.End(errors.Is(o.frames(r, rep), io.EOF))
}

func (o *observation) frames(r io.Reader, rep codec.Representation) error {
	frames := codec.NewFrameReader(r, rep, maxFrameBytes)
	for {
		frame, err := frames.Next()
		if err != nil {
			return err
		}
		shape, bare, err := codec.DecodeObject(rep, frame.Object)
		switch {
		case err != nil:
			return err
		case frame.Type == watch.Error:
			return io.ErrUnexpectedEOF
		case frame.Type != watch.Bookmark:
			o.see(frame.Type, shape, bare)
			continue
		}
		if end, _, err := codec.ReadAnnotation(rep, bare, metav1.InitialEventsAnnotationKey); err != nil {
			return err
		} else if end == "true" {
			o.Synced()
		}
	}
}
