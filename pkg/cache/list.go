// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/seal"
)

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
	if err := c.listAhead(req, &q); err != nil {
		return nil, err
	}
	floor := c.recordedFor(&q)
	resp, err := c.pass(c.notOlder(req, &q))
	switch {
	case err == nil:
		c.recordList(resp, &q, floor)
		return resp, nil
	case c.unavailable(err):
		return c.replay(req, &q, "list", c.replayList)
	}
	return nil, err
}

// listAhead refuses a list that is to be at least as new as something of a history that
// was reset, if there was a reset since the start. The API server would have the client
// wait for it, again and again.
func (c *Cache) listAhead(req *http.Request, q *query) error {
	rv := q.atLeast()
	if rv == "" || c.resets.Load() == 0 || q.exact() || q.opts.Continue != "" || !c.cfg.Upstream.Up() {
		return nil
	}
	return c.ahead(req.Context(), q, q.key.Representation, q.caller, rv)
}

// recordedFor returns at which resourceVersion the scope of a consistent list is
// before the list is asked for: its answer cannot be older than that.
func (c *Cache) recordedFor(q *query) string {
	l := c.logIfKnown(q.name)
	if l == nil || q.opts.ResourceVersion != "" || q.opts.Continue != "" {
		return ""
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	if s := l.scopes[q.key]; s != nil && s.complete {
		return s.rv
	}
	return ""
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
	w, key := l.liveListing(q)
	if w == nil {
		return nil
	}
	resp, err := c.serveList(req, w, key, sourceFeed)
	if err != nil {
		return nil // the API server has it
	}
	return resp
}

// liveListing returns what a live feed holds of what is asked for, if it is not
// behind what the user has seen: the very scope's, or that of one with more. key is
// the question in its representation.
func (l *log) liveListing(q *query) (w *listing, key Key) {
	l.mu.Lock()
	defer l.mu.Unlock()
	reps := l.offered(q)
	if len(reps) == 0 {
		return nil, key
	}
	key = q.key
	key.Representation = reps[0]
	if s := l.scopes[key]; s != nil && l.serves(s, key, q) {
		return s.listing(), key
	}
	for _, s := range l.scopes {
		// A field that cannot be selected by, only the API server refuses.
		if s.key.covers(key) && s.key.FieldSelector == key.FieldSelector && l.serves(s, key, q) {
			return s.listing(), key
		}
	}
	return nil, key
}

// serves reports whether a scope is live, and not behind what the user has seen of
// key. The caller holds mu.
func (l *log) serves(s *scope, key Key, q *query) bool {
	return s.feed != nil && s.feed.live && s.complete && !l.behind(s, key, q.atLeast())
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
	var tried []*scope
	for {
		w, key, listErr := l.nextListing(q, &tried)
		if listErr != nil {
			err = listErr
		}
		if w == nil {
			return nil, err
		}
		var resp *http.Response
		if resp, err = c.serveList(req, w, key, sourceReplay); err == nil {
			return resp, nil
		}
		// A wider scope may not be able to tell, another one may.
	}
}

// nextListing returns what the best scope holds that has not been tried yet, and
// how what is asked for is called in its representation; nil where there is none
// any more. The error says why scopes were passed over.
func (l *log) nextListing(q *query, tried *[]*scope) (_ *listing, _ Key, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	scopes, keys := l.candidates(q)
	for i, s := range scopes {
		if slices.Contains(*tried, s) {
			continue
		}
		*tried = append(*tried, s)
		switch rv := q.opts.ResourceVersion; {
		case !validRV(rv):
		case q.exact() && rv != s.rv:
			err = apierrors.NewResourceExpired("the link to the API server is down: the recorded state is at " + s.rv + ", not at " + rv)
			continue
		case compareRV(rv, s.rv) > 0:
			err = errTooNew(rv, s.rv)
			continue
		}
		return s.listing(), keys[i], err
	}
	return nil, Key{}, err
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
			if s.complete && s.key.covers(want) && !s.stale() {
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

// serveList answers with what a listing holds of key, and closes the listing. It
// reads the disk, so the caller must not hold the log's lock.
func (c *Cache) serveList(req *http.Request, w *listing, key Key, source string) (*http.Response, error) {
	if err := w.narrow(key); err != nil {
		w.close()
		return nil, errNarrow(w.scope, err)
	}
	resp := c.newResponse(req, key.ContentType(), source)
	resp.Body = &listBody{bodies: w.bodies()}
	resp.ContentLength = w.shape.ListLen(w.rv, w.lens())
	resp.Header.Set("Content-Length", strconv.FormatInt(resp.ContentLength, 10))
	return resp, nil
}

func errNarrow(s *scope, err error) error {
	e := apierrors.NewServiceUnavailable(fmt.Sprintf("the link to the API server is down, and the recorded %s cannot answer this selection: %v", s.log.name.Resource, err))
	e.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: retryAfterSeconds}
	return e
}

// isDamage reports whether bytes on disk have gone bad for good.
func isDamage(err error) bool {
	return errors.Is(err, journal.ErrDamaged) || errors.Is(err, journal.ErrUnknownRef) || errors.Is(err, seal.ErrBroken)
}

// damagedRead makes a scope incomplete whose bytes on disk have gone bad. A file that
// cannot be opened, as when there are too many, is another matter.
func (s *scope) damagedRead(err error) {
	if !isDamage(err) {
		s.log.c.metrics.journalFailures.Inc()
		return
	}
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	s.log.c.metrics.damaged.Inc()
	s.expire()
}

// get answers a get: from a live feed where resourceVersion=0 or one to be at least
// allows that, else from upstream, and when that is away, from the newest record of
// the object.
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
	if resp := c.getFromFeed(req, &q); resp != nil {
		return resp, nil
	}
	resp, err := c.pass(c.notOlder(req, &q))
	switch {
	case err == nil:
		c.recordGet(resp, &q)
		return resp, nil
	case c.unavailable(err):
		return c.replay(req, &q, "get", c.replayGet)
	}
	return nil, err
}

// getFromFeed answers from a live scope that holds the object; nil where there is
// none. That an object does not exist, only the API server says while it can.
func (c *Cache) getFromFeed(req *http.Request, q *query) *http.Response {
	if rv := q.opts.ResourceVersion; rv != "0" && !validRV(rv) || !c.cfg.Upstream.Up() {
		return nil
	}
	l := c.logIfKnown(q.name)
	if l == nil {
		return nil
	}
	w := l.liveObject(q)
	if w == nil {
		return nil
	}
	resp, err := c.serveObject(req, w, sourceFeed)
	if err != nil {
		return nil // the API server has it
	}
	return resp
}

func (l *log) liveObject(q *query) *listing {
	l.mu.Lock()
	defer l.mu.Unlock()
	reps := l.offered(q)
	if len(reps) == 0 {
		return nil
	}
	key := q.key
	key.Representation = reps[0]
	for _, s := range l.scopes {
		if o := s.objects[objectKey(key.Namespace, key.Name)]; o != nil && s.key.Representation == key.Representation && l.serves(s, key, q) {
			return s.listingOf([]*object{o})
		}
	}
	return nil
}

// serveObject answers with the one object of a listing, and closes that. It reads
// the disk, so the caller must not hold the log's lock.
func (c *Cache) serveObject(req *http.Request, w *listing, source string) (*http.Response, error) {
	defer w.close()
	b := w.bodies()
	defer b.close()
	bare, err := b.read()
	if err != nil {
		return nil, errNarrow(w.scope, err)
	}
	resp := c.newResponse(req, w.key.ContentType(), source)
	setBody(resp, w.shape.AppendObject(nil, bare))
	return resp, nil
}

// replayGet answers a get while the link is down. 404 is only said when a scope
// that was fed until the link was lost does not hold the object.
func (c *Cache) replayGet(req *http.Request, q *query) (*http.Response, error) {
	l := c.logIfKnown(q.name)
	if l == nil {
		return nil, errNotRecorded(q)
	}
	w, err := l.newest(q)
	if err != nil {
		return nil, err
	}
	return c.serveObject(req, w, sourceReplay)
}

// newest returns a listing of the one object that is asked for, from the scope that
// has its newest version.
func (l *log) newest(q *query) (*listing, error) {
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
			if s.key.Representation != rep || !s.single && (!s.complete || s.stale()) {
				continue
			}
			if o := s.objects[key]; o != nil && !(s.single && l.tooOld(time.Unix(o.seen, 0))) {
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
	return from.listingOf([]*object{found}), nil
}
