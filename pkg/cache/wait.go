// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/pkg/codec"
)

// maxStatusBytes is far more than any Status that refuses a watch.
const maxStatusBytes = 64 << 10

// watchLater answers, while the link is down, a watch that goes on from a whole
// response, such as the Table that kubectl get -w has just been shown: nothing
// happens that it could tell of, so it stays open, and goes to the API server when
// the link is back. nil where there is no such response.
func (c *Cache) watchLater(req *http.Request, q *query) *http.Response {
	if q.unanswerable || !q.resumes() || !validRV(q.opts.ResourceVersion) {
		return nil
	}
	r, ok := c.logOf(q.name).listedAs(req.URL, q)
	if !ok {
		return nil
	}
	resp := c.newResponse(req, r.ContentType, sourceReplay)
	resp.Body = &laterWatch{c: c, req: req, until: c.now().Add(watchTimeout(q))}
	return resp
}

// listedAs finds a whole response to the list, or the get, that a watch goes on
// from.
func (l *log) listedAs(u *url.URL, q *query) (*record, bool) {
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, r := range l.responses {
		was, err := url.Parse(r.Path)
		switch {
		case err != nil:
		case was.Path == u.Path && sameSelectors(was, u):
			return r, true
		case q.key.Name != "" && q.key.plain() && was.Path == u.Path+"/"+q.key.Name:
			return r, true
		}
	}
	return nil, false
}

func sameSelectors(a, b *url.URL) bool {
	p, q := a.Query(), b.Query()
	return p.Get("labelSelector") == q.Get("labelSelector") && p.Get("fieldSelector") == q.Get("fieldSelector")
}

// A laterWatch is the body of a watch that waits for the link.
type laterWatch struct {
	c     *Cache
	req   *http.Request
	until time.Time // the watch's time-out
	body  io.Reader // once the link was back
	close func() error
}

func (w *laterWatch) Read(p []byte) (int, error) {
	if w.body == nil {
		if err := w.open(); err != nil {
			return 0, err
		}
	}
	return w.body.Read(p)
}

// open waits for the link and sends the watch; what refuses it becomes its last
// event, because the client has had its 200.
func (w *laterWatch) open() error {
	ctx, cancel := context.WithDeadline(w.req.Context(), w.until)
	defer cancel()
	for {
		changed := w.c.cfg.Upstream.Changed()
		if w.c.cfg.Upstream.Up() {
			resp, err := w.c.pass(w.req)
			if err == nil {
				return w.follow(resp)
			}
			if !w.c.unavailable(err) {
				return err
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			if err := w.req.Context().Err(); err != nil {
				return err
			}
			return io.EOF
		}
	}
}

func (w *laterWatch) follow(resp *http.Response) error {
	if resp.StatusCode == http.StatusOK {
		w.body, w.close = resp.Body, resp.Body.Close
		return nil
	}
	defer resp.Body.Close()
	var status metav1.Status
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxStatusBytes))
	if err != nil {
		return err
	}
	if json.Unmarshal(body, &status) != nil || status.Status != metav1.StatusFailure {
		return io.ErrUnexpectedEOF // not from an API server; the client asks again
	}
	w.body = bytes.NewReader(codec.AppendStatusFrame(nil, codec.Representation{}, &status))
	return nil
}

// Close ends what has been opened.
func (w *laterWatch) Close() error {
	if w.close == nil {
		return nil
	}
	return w.close()
}
