// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"cmp"
	"fmt"
	"io"
	"iter"
	"net/http"
	"slices"
	"strconv"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/edgehub/edgehub/pkg/codec"
)

// listBytes is about how much of a list is prepared at a time.
const listBytes = 64 << 10

// list answers a list: from a live feed where resourceVersion=0 or NotOlderThan
// allows that, else from upstream, and when that is away, from the scopes.
func (c *Cache) list(req *http.Request, q query) (*http.Response, error) {
	if resp := c.listShared(req, &q); resp != nil {
		return resp, nil
	}
	if resp := c.listFromFeed(req, &q); resp != nil {
		return resp, nil
	}
	if q.opaque {
		resp, err := c.roundTripResponse(req, q.name, q.accepted)
		switch {
		case err == nil:
			c.revoke(resp, &q)
			return resp, nil
		case !c.unavailable(err) || q.unanswerable:
			return nil, err
		}
		return c.replay(req, &q, "list", c.replayList)
	}
	resp, err := c.pass(req)
	switch {
	case err == nil:
		c.recordList(resp, &q)
		return resp, nil
	case c.unavailable(err):
		return c.replay(req, &q, "list", c.replayList)
	}
	return nil, err
}

// listFromFeed answers from a feed that is live and not behind what the user has
// seen; nil where that cannot be.
func (c *Cache) listFromFeed(req *http.Request, q *query) *http.Response {
	if !q.fromFeed() || !c.cfg.Upstream.Up() {
		return nil
	}
	l := c.logIfKnown(q.name)
	if l == nil {
		return nil
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	reps := l.offered(q)
	if len(reps) == 0 {
		return nil
	}
	key := q.key
	key.Representation = reps[0]
	s := l.scopes[key]
	if s == nil || s.feed == nil || !s.feed.live || !s.complete || l.behind(s, key, q.atLeast()) {
		return nil
	}
	resp, err := c.serveList(req, s, key, sourceFeed)
	if err != nil {
		return nil // the API server has it
	}
	return resp
}

// replayList answers while the link is down, from the newest scope of the user
// that holds all that is asked for.
func (c *Cache) replayList(req *http.Request, q *query) (*http.Response, error) {
	o := &q.opts
	if err := q.refuse(); err != nil {
		return nil, err
	}
	if o.Continue != "" {
		return nil, apierrors.NewResourceExpired("the link to the API server is down: the list cannot be continued, start it again")
	}
	err := errNotRecorded(q)
	l := c.logIfKnown(q.name)
	if l == nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	scopes, keys := l.candidates(q)
	for i, s := range scopes {
		switch rv := o.ResourceVersion; {
		case !validRV(rv):
		case q.exact() && rv != s.rv:
			err = apierrors.NewResourceExpired("the link to the API server is down: the recorded state is at " + s.rv + ", not at " + rv)
			continue
		case compareRV(rv, s.rv) > 0:
			err = errTooNew(rv, s.rv)
			continue
		}
		resp, serveErr := c.serveList(req, s, keys[i], sourceReplay)
		if serveErr == nil {
			return resp, nil
		}
		err = serveErr // a wider scope may not be able to tell, another one may
	}
	return nil, err
}

// errTooNew is the API server's answer to a resourceVersion that it has not
// reached: a reflector then asks without one.
func errTooNew(asked, have string) error {
	err := apierrors.NewTimeoutError(fmt.Sprintf("Too large resource version: %s, current: %s", asked, have), 1)
	err.ErrStatus.Details.Causes = []metav1.StatusCause{{Type: metav1.CauseTypeResourceVersionTooLarge, Message: "Too large resource version"}}
	return err
}

// candidates returns the scopes that hold all that q asks for, and how it is
// called in their representation. The representation that the client likes best
// comes first, because that is what it was given online; in one, the newest. The
// caller holds the log's lock.
func (l *log) candidates(q *query) (scopes []*scope, keys []Key) {
	for _, rep := range q.representations() {
		want := q.key
		want.Representation = rep
		var found []*scope
		for _, s := range l.scopes {
			if s.complete && s.key.covers(want) {
				found = append(found, s)
			}
		}
		slices.SortFunc(found, func(a, b *scope) int {
			return cmp.Or(compareRV(b.rv, a.rv), btoi(b.key == want)-btoi(a.key == want), strings.Compare(a.key.String(), b.key.String()))
		})
		for _, s := range found {
			scopes, keys = append(scopes, s), append(keys, want)
		}
	}
	return scopes, keys
}

// serveList answers with what a scope holds of key. The caller holds the log's
// lock.
func (c *Cache) serveList(req *http.Request, s *scope, key Key, source string) (*http.Response, error) {
	s.used = c.now()
	w := s.initial()
	if err := s.narrow(&w, key); err != nil {
		w.close()
		return nil, errNarrow(s, err)
	}
	b := &listBody{scope: s, shape: s.shape, rv: s.rv, window: w}
	resp := c.newResponse(req, key.ContentType(), source)
	resp.Body = b
	resp.ContentLength = s.shape.ListLen(s.rv, b.lens())
	resp.Header.Set("Content-Length", strconv.FormatInt(resp.ContentLength, 10))
	return resp, nil
}

func errNarrow(s *scope, err error) error {
	e := apierrors.NewServiceUnavailable(fmt.Sprintf("the link to the API server is down, and the recorded %s cannot answer this selection: %v", s.log.name.Resource, err))
	e.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: retryAfterSeconds}
	return e
}

// narrow leaves in the window what key asks for. What is encrypted is opened
// here, because the list needs to know its length.
func (s *scope) narrow(w *window, key Key) error {
	same := s.key == key
	if same && !s.log.name.sealed() {
		return nil
	}
	labels, fields := key.LabelSelector, key.FieldSelector
	if labels == s.key.LabelSelector {
		labels = ""
	}
	if fields == s.key.FieldSelector {
		fields = ""
	}
	sel, err := codec.ParseSelector(labels, fields)
	if err != nil {
		return err
	}
	kept := w.items[:0]
	for _, i := range w.items {
		o := object{key: i.key}
		if key.Namespace != "" && o.namespace() != key.Namespace || key.Name != "" && o.name() != key.Name {
			continue
		}
		bare, err := s.readItem(w, i, nil)
		if err != nil {
			return err
		}
		if ok, err := sel.Matches(s.shape, bare); err != nil {
			return err
		} else if !ok {
			continue
		}
		if s.log.name.sealed() {
			i.bare = bare
		}
		kept = append(kept, i)
	}
	w.items = kept
	return nil
}

// A listBody is a list by concatenation of what a scope holds.
type listBody struct {
	scope  *scope
	shape  codec.Shape
	rv     string
	window window
	next   int // item; -1 after the tail
	begun  bool

	buf, space, scratch []byte
}

func (b *listBody) lens() iter.Seq[int] {
	return func(yield func(int) bool) {
		for _, i := range b.window.items {
			n := len(i.bare)
			if i.bare == nil {
				n = int(i.ref.Length)
			}
			if !yield(n) {
				return
			}
		}
	}
}

// Read gives the next part. An object that cannot be read aborts the list: a
// short one would be taken for the truth.
func (b *listBody) Read(p []byte) (int, error) {
	if len(b.buf) == 0 {
		if b.next < 0 {
			return 0, io.EOF
		}
		b.buf = b.space[:0]
		if err := b.fill(); err != nil {
			return 0, err
		}
		b.space = b.buf
	}
	n := copy(p, b.buf)
	b.buf = b.buf[n:]
	return n, nil
}

func (b *listBody) fill() error {
	if !b.begun {
		b.begun = true
		b.buf = b.shape.AppendListHead(b.buf, b.rv, b.lens())
	}
	items := b.window.items
	for b.next < len(items) && len(b.buf) < listBytes {
		bare, err := b.scope.readItem(&b.window, items[b.next], b.scratch)
		if err != nil {
			b.scope.damagedRead()
			return err
		}
		if items[b.next].bare == nil {
			b.scratch = bare[:0]
		}
		b.buf = b.shape.AppendListItem(b.buf, bare, b.next == 0)
		b.next++
	}
	if b.next == len(items) {
		b.buf = b.shape.AppendListTail(b.buf, b.rv)
		b.next = -1
	}
	return nil
}

func (b *listBody) Close() error {
	b.window.close()
	return nil
}

// damagedRead makes a scope incomplete whose bytes on disk have gone bad.
func (s *scope) damagedRead() {
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	s.log.c.metrics.damaged.Inc()
	s.expire()
}

// get answers a get: from upstream, and when that is away, from the newest record
// of the object.
func (c *Cache) get(req *http.Request, q query) (*http.Response, error) {
	if q.opaque {
		resp, err := c.roundTripResponse(req, q.name, q.accepted)
		switch {
		case err == nil:
			c.revoke(resp, &q)
			return resp, nil
		case !c.unavailable(err) || q.unanswerable:
			return nil, err
		}
		return c.replay(req, &q, "get", c.replayGet)
	}
	resp, err := c.pass(req)
	switch {
	case err == nil:
		c.recordGet(resp, &q)
		return resp, nil
	case c.unavailable(err):
		return c.replay(req, &q, "get", c.replayGet)
	}
	return nil, err
}

// replayGet answers a get while the link is down. 404 is only said when a scope
// that was fed until the link was lost does not hold the object.
func (c *Cache) replayGet(req *http.Request, q *query) (*http.Response, error) {
	l := c.logIfKnown(q.name)
	if l == nil {
		return nil, errNotRecorded(q)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	var from *scope
	var found *object
	absent := "" // resourceVersion at which a complete scope does not hold it
	fed := false
	key := objectKey(q.key.Namespace, q.key.Name)
	for _, rep := range q.representations() {
		want := q.key
		want.Representation = rep
		for _, s := range l.allScopes() {
			if s.key.Representation != rep || !s.single && !s.complete {
				continue
			}
			if o := s.objects[key]; o != nil {
				if found == nil || compareRV(o.rv, found.rv) > 0 {
					from, found = s, o
				}
			} else if !s.single && s.key.plain() && s.key.covers(want) {
				absent = maxRV(absent, s.rv)
				fed = fed || s.fed
			}
		}
	}
	switch {
	case absent != "" && (found == nil || compareRV(absent, found.rv) > 0):
		if !fed {
			return nil, errNotRecorded(q)
		}
		return nil, apierrors.NewNotFound(schema.GroupResource{Group: q.name.Group, Resource: q.name.Resource}, q.key.Name)
	case found == nil:
		return nil, errNotRecorded(q)
	}
	bare, err := from.readOne(found)
	if err != nil {
		return nil, errNarrow(from, err)
	}
	from.used = c.now()
	resp := c.newResponse(req, from.key.ContentType(), sourceReplay)
	setBody(resp, from.shape.AppendObject(nil, bare))
	return resp, nil
}
