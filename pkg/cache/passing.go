// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"errors"
	"io"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/edgehub/edgehub/pkg/codec"
)

// A passing is a watch that the API server serves itself, because no feed could when
// it began. When the link is cut it goes on from a feed: the client notices nothing.
type passing struct {
	c    *Cache
	req  *http.Request
	q    *query
	rep  codec.Representation
	body io.ReadCloser // of the API server's answer; then the feed's

	frames *codec.FrameReader // nil once the feed has taken over
	buf    []byte
	space  []byte
	rv     string // where the client is; "" while it gets its initial events
	err    error  // after buf
}

// newPassing follows a watch that has been answered with 200. One in a form that is
// not known here is left as it is.
func newPassing(c *Cache, req *http.Request, q *query, resp *http.Response) io.ReadCloser {
	rep, ok := q.representationOf(resp.Header.Get("Content-Type"))
	if !ok {
		return resp.Body
	}
	p := &passing{c: c, req: req, q: q, rep: rep, body: resp.Body, frames: codec.NewFrameReader(resp.Body, rep, c.cfg.MaxObjectBytes)}
	if q.resumes() {
		p.rv = q.opts.ResourceVersion
	}
	return p
}

func (p *passing) Read(b []byte) (int, error) {
	for len(p.buf) == 0 {
		if p.err != nil {
			return 0, p.err
		}
		if p.frames == nil {
			return p.body.Read(b)
		}
		p.buf = p.space[:0]
		if err := p.next(); err != nil {
			p.lost(err)
		}
		p.space = p.buf
	}
	n := copy(b, p.buf)
	p.buf = p.buf[n:]
	return n, nil
}

// next takes one frame of the API server's.
func (p *passing) next() error {
	frame, err := p.frames.Next()
	if err != nil {
		return err
	}
	shape, bare, err := codec.DecodeObject(p.rep, frame.Object)
	if err != nil {
		return err
	}
	shape.Representation = p.rep
	p.buf = shape.AppendFrame(p.buf, frame.Type, bare)
	if frame.Type == watch.Error {
		p.err = io.EOF // the API server says no more either
		return nil
	}
	meta, err := codec.ReadMeta(p.rep, bare)
	if err != nil || !validRV(meta.ResourceVersion) {
		return errors.Join(err, errNotAnObject)
	}
	if p.rv == "" && frame.Type == watch.Bookmark {
		end, _, err := codec.ReadAnnotation(p.rep, bare, metav1.InitialEventsAnnotationKey)
		if err != nil || end != "true" {
			return err
		}
		p.rv = meta.ResourceVersion
	} else if p.rv != "" {
		p.rv = meta.ResourceVersion
	}
	return nil
}

// lost ends the watch as the API server did, or, if it was the link, goes on from a
// feed.
func (p *passing) lost(err error) {
	p.err = err
	if !p.c.unavailable(err) || p.rv == "" || p.req.Context().Err() != nil {
		return
	}
	q := *p.q
	q.opts.ResourceVersion, q.opts.ResourceVersionMatch, q.opts.SendInitialEvents = p.rv, "", nil
	resp, err := p.c.watch(p.req, q)
	var status apierrors.APIStatus
	switch {
	case err == nil && resp.StatusCode == http.StatusOK:
		_ = p.body.Close() // it is dead
		p.body, p.frames, p.err = resp.Body, nil, nil
	case err == nil:
		_ = resp.Body.Close() // the client asks again, and is told
	case apierrors.IsResourceExpired(err) && errors.As(err, &status):
		st := status.Status()
		p.buf = codec.AppendStatusFrame(p.buf, p.rep, &st)
		p.err = io.EOF
	}
}

func (p *passing) Close() error { return p.body.Close() }
