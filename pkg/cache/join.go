// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/codec"
)

const (
	// joinPatience is how long a watch waits for a feed that is starting, before
	// it goes upstream on its own.
	joinPatience = 20 * time.Second
	// freshPatience is how long a watch waits for a feed that is behind what its
	// user has seen.
	freshPatience = time.Second
)

// watch serves a watch from the scope's feed, and opens that first where there is
// none. What a feed cannot serve goes upstream.
func (c *Cache) watch(req *http.Request, q query) (*http.Response, error) {
	tabular := q.opaque && !q.unanswerable // another representation comes first
	if !q.followable() {
		resp, err := c.pass(req)
		if err == nil {
			c.revoke(resp, &q)
		}
		if err == nil || !c.unavailable(err) {
			return resp, err
		}
		if err := q.refuse(); err != nil {
			return nil, err
		}
		q.opaque = q.opaque && q.unanswerable
		if !q.followable() {
			return nil, err
		}
	}
	if c.crowded() && c.logIfKnown(q.name) == nil {
		return c.pass(req) // nothing is kept of what the API server has not vouched for
	}
	g := c.guestOf(&q, "watch")
	if g != nil && !c.shares.may(req.Context(), g) {
		g = nil
	}
	for {
		j := c.newJoin(req, &q, g)
		resp, err := j.run()
		if errors.Is(err, errNotShared) {
			g = nil
			continue
		}
		if tabular && apierrors.IsServiceUnavailable(err) {
			if later := c.watchLater(req, &q); later != nil {
				return later, nil
			}
		}
		if !errors.Is(err, errJSONOnly) {
			return resp, err
		}
	}
}

var (
	errNotOffered = errors.New("no representation that the client accepts is offered")
	errNotShared  = errors.New("the node has no feed for this")
)

// refuse says offline what the API server says of options that contradict each
// other.
func (q *query) refuse() error {
	if rv := q.opts.ResourceVersion; rv != "" && rv != "0" && !validRV(rv) {
		return apierrors.NewBadRequest("resourceVersion: Invalid value: " + strconv.Quote(rv))
	}
	var in internalversion.ListOptions
	if err := internalversion.Convert_v1_ListOptions_To_internalversion_ListOptions(&q.opts, &in, nil); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	if errs := validation.ValidateListOptions(&in, true); len(errs) > 0 {
		return apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "ListOptions"}, "", field.ErrorList(errs))
	}
	return nil
}

// A join is a watch, or a list, on its way to a feed.
type join struct {
	c     *Cache
	l     *log
	q     *query
	guest *guest // nil: the user's own feed
	as    caller // whose feed it is
	floor string // what the user was shown, in its own log
	req   *http.Request
	since time.Time
	feed  *feed
	list  bool // only until the feed is live
}

// newJoin begins a join, to the node's feed for a guest.
func (c *Cache) newJoin(req *http.Request, q *query, g *guest) *join {
	j := &join{c: c, q: q, guest: g, as: q.caller, req: req, since: c.now()}
	if g == nil {
		j.l = c.logOf(q.name)
		return j
	}
	if own := c.logIfKnown(q.name); own != nil {
		own.mu.RLock()
		j.floor = own.shownOf(q.key, nil)
		own.mu.RUnlock()
	}
	j.as = c.node()
	j.l = c.logOf(c.asNode(q).name)
	return j
}

// run waits until the feed, the API server or nobody can serve the watch.
func (j *join) run() (*http.Response, error) {
	if err := j.aheadOfHistory(); err != nil {
		return nil, err
	}
	j.l.mu.Lock()
	s, err := j.scope()
	if err == nil && s.feed == nil && j.l.avoids(s.key) && j.c.cfg.Upstream.Up() {
		err = errNotOffered
	}
	if errors.Is(err, errNotOffered) {
		if s != nil && !s.complete {
			j.l.drop(s)
		}
		j.l.mu.Unlock()
		if j.guest != nil || j.list {
			return nil, errNotShared
		}
		return j.c.pass(j.req)
	}
	if err != nil {
		j.l.mu.Unlock()
		return nil, j.unshared(err)
	}
	if s.feed == nil {
		j.c.startFeed(j.req.Context(), s, j.as)
	}
	if s.feed == nil {
		j.l.mu.Unlock()
		return nil, j.unshared(errNotRecorded(j.q))
	}
	j.feed = s.feed
	j.feed.hold(j.as)
	for {
		resp, wait, err := j.step(s)
		if wait == 0 {
			j.l.mu.Unlock()
			return resp, err
		}
		changed, link := j.feed.changed, j.c.cfg.Upstream.Changed()
		j.l.mu.Unlock()
		timer := time.NewTimer(wait)
		select {
		case <-changed:
		case <-link:
		case <-timer.C:
		case <-j.req.Context().Done():
		}
		timer.Stop()
		j.l.mu.Lock()
	}
}

// unshared lets a guest for whom the node has nothing try its own log.
func (j *join) unshared(err error) error {
	if j.guest != nil {
		return errNotShared
	}
	return err
}

// aheadOfHistory refuses a watch that goes on from where the API server's history
// has not been yet: it is of a history that was reset, and would be silent.
func (j *join) aheadOfHistory() error {
	rv := j.q.opts.ResourceVersion
	if j.list || !j.q.resumes() || !j.c.cfg.Upstream.Up() {
		return nil
	}
	j.l.mu.RLock()
	_, s := j.l.following(j.q, true)
	ahead := s != nil && s.complete && compareRV(rv, s.rv) > 0
	j.l.mu.RUnlock()
	if !ahead {
		return nil
	}
	return j.c.ahead(j.req.Context(), j.q, s.key.Representation, j.as, rv)
}

// ahead returns 410 if the API server's history has not been at rv yet. Where that is
// not known to be so, the API server decides.
func (c *Cache) ahead(ctx context.Context, q *query, rep codec.Representation, as caller, rv string) error {
	now, err := c.guard.now(ctx)
	if err != nil || now == "" || compareRV(now, rv) >= 0 {
		return nil //nolint:nilerr // see above
	}
	now, err = c.consistentRV(request.WithUser(ctx, as.user), resourcePath(q.name, q.key.Namespace), q.key.query(), rep, as.credential)
	if err != nil || compareRV(now, rv) >= 0 {
		return nil //nolint:nilerr // see above
	}
	return apierrors.NewResourceExpired("resourceVersion " + rv + " is of a history that was reset; it is at " + now)
}

// scope finds the scope to follow, or makes it. The caller holds the log's lock.
func (j *join) scope() (*scope, error) {
	up := j.c.cfg.Upstream.Up()
	key, s := j.l.following(j.q, up)
	switch {
	case s != nil:
		s.used = j.c.now()
		return s, nil
	case !up:
		return nil, errNotRecorded(j.q)
	case len(j.l.offered(j.q)) == 0:
		return nil, errNotOffered
	}
	return j.l.newScope(key, false), nil
}

// following returns the scope whose feed tells all that a watch asks for: its own,
// or a live one of more namespaces or names; nil if there is none. key is what its
// own is called. Selectors have to be the same: who resumes on a wider one could
// not be told what has left the narrower. The caller holds mu.
func (l *log) following(q *query, up bool) (key Key, s *scope) {
	reps := l.offered(q)
	if up && len(reps) > 1 {
		reps = reps[:1] // what the API server would choose
	}
	key = q.key
	for _, rep := range reps {
		key.Representation = rep
		if s := l.scopes[key]; s != nil && (up || s.complete && !s.stale()) {
			return key, s
		}
		for _, s := range l.scopes {
			if s.complete && s.key.covers(key) && s.key.LabelSelector == key.LabelSelector && s.key.FieldSelector == key.FieldSelector &&
				s.feed != nil && (!up && !s.stale() || s.feed.live) {
				return key, s
			}
		}
	}
	return key, nil
}

// offered returns the representations that the client accepts and the API server
// has for the resource, as far as is known, best first. The caller holds mu.
func (l *log) offered(q *query) []codec.Representation {
	reps := q.representations()
	if l.jsonOnly {
		reps = slices.DeleteFunc(reps, func(r codec.Representation) bool { return r.Protobuf && r.Partial == "" })
	}
	return reps
}

// step looks once whether the watch can be served now; if not, it returns how
// long to wait. The caller holds the log's lock.
func (j *join) step(s *scope) (resp *http.Response, wait time.Duration, err error) {
	f, up := j.feed, j.c.cfg.Upstream.Up()
	waited := j.c.now().Sub(j.since)
	switch {
	case j.req.Context().Err() != nil:
		err = j.req.Context().Err()
	case f.jsonOnly:
		err = errJSONOnly
	case f.refusal != nil && j.guest != nil:
		if f.refusal.isFinal() {
			j.c.shares.refuse(j.q.name.gvr())
		}
		err = errNotShared
	case f.refusal != nil:
		resp = f.refusal.response(j.c, j.req)
	case f.over:
		return j.pass()
	case !f.live && s.complete && s.log.tooOld(s.seen):
		return j.tooOld(up)
	case j.q.resumes() && !j.list:
		return j.resume(s, up)
	case up && j.c.cfg.StrictInitialList && j.q.initialEvents() && j.q.opts.ResourceVersion == "":
		return j.pass()
	case s.complete && (f.live || !up):
		atLeast := j.q.opts.ResourceVersion
		switch {
		case !up && validRV(atLeast) && compareRV(atLeast, s.rv) > 0:
			err = errTooNew(atLeast, s.rv)
		case !up || !j.behind(s):
			return j.attach(s, up), 0, nil
		case waited < freshPatience:
			return nil, freshPatience - waited, nil
		default:
			return j.pass()
		}
	case !up:
		err = j.unshared(errNotRecorded(j.q))
	case !j.list && !s.complete && f.staging != nil && f.staging.shape.Kind != "":
		return j.attach(s, up), 0, nil
	case waited < joinPatience:
		return nil, joinPatience - waited, nil
	default:
		return j.pass()
	}
	f.release(j.as)
	return resp, 0, err
}

// tooOld does not let a watch begin with a state that nobody has vouched for in time: the
// API server may, or the feed once it is live.
func (j *join) tooOld(up bool) (*http.Response, time.Duration, error) {
	waited := j.c.now().Sub(j.since)
	switch {
	case !up:
		j.feed.release(j.as)
		return nil, 0, j.unshared(errNotRecorded(j.q))
	case waited < joinPatience:
		return nil, joinPatience - waited, nil
	}
	return j.pass()
}

// resume serves a watch that goes on from a resourceVersion. History that the
// scope does not have, the API server may.
func (j *join) resume(s *scope, up bool) (*http.Response, time.Duration, error) {
	switch rv := j.q.opts.ResourceVersion; {
	case s.canResume(rv):
		return j.attach(s, up), 0, nil
	case up:
		return j.pass()
	case s.complete:
		j.feed.release(j.as)
		return nil, 0, apierrors.NewResourceExpired("too old resource version: " + rv + " (" + s.reach + ")")
	}
	j.feed.release(j.as)
	return nil, 0, j.unshared(errNotRecorded(j.q))
}

// attach answers with a watcher.
func (j *join) attach(s *scope, up bool) *http.Response {
	if j.list {
		j.feed.release(j.as)
		return nil
	}
	from := "own"
	switch {
	case j.guest != nil:
		from = "shared"
	case j.q.key.wider(s.key):
		from = "wider"
	}
	j.c.metrics.joins.WithLabelValues(from).Inc()
	source := sourceFeed
	if !up {
		source = sourceReplay
	}
	resp := j.c.newResponse(j.req, s.key.WatchContentType(), source)
	w := newWatcher(j.req, s, j.q, j.as)
	w.guest = j.guest
	resp.Body = w
	return resp
}

// pass sends the watch upstream. The feed counts it as a user all the same: it
// records what this client will ask for next.
func (j *join) pass() (*http.Response, time.Duration, error) {
	if j.list {
		j.feed.release(j.as)
		return nil, 0, errNotShared
	}
	j.l.mu.Unlock()
	resp, err := j.c.pass(j.req)
	if err == nil {
		j.c.revoke(resp, j.q)
	}
	j.l.mu.Lock()
	if err != nil || resp.StatusCode != http.StatusOK {
		j.feed.release(j.as)
		return resp, 0, err
	}
	resp.Body = &holding{ReadCloser: newPassing(j.c, j.req, j.q, resp), release: func() {
		j.l.mu.Lock()
		defer j.l.mu.Unlock()
		j.feed.release(j.as)
	}}
	return resp, 0, nil
}

// listShared answers a list for which any state will do, or one that is not older
// than what it says, from the node's feed of a shared resource. The feed is opened
// if there is none: who lists like that is about to watch. nil where that cannot be.
func (c *Cache) listShared(req *http.Request, q *query) *http.Response {
	if !q.fromFeed() || !c.cfg.Upstream.Up() || !slices.Contains(c.cfg.Shared, q.name.gvr().GroupResource()) {
		return nil
	}
	g := c.guestOf(q, "list")
	if g == nil && len(q.credential) > 0 || g != nil && !c.shares.may(req.Context(), g) {
		return nil
	}
	j := c.newJoin(req, q, g)
	j.list = true
	if _, err := j.run(); err != nil {
		return nil // the API server has it
	}
	shared := c.asNode(q)
	if rv := maxRV(q.atLeast(), j.floor); rv != "" {
		shared.opts.ResourceVersion, shared.opts.ResourceVersionMatch, shared.opts.Limit = rv, metav1.ResourceVersionMatchNotOlderThan, 0
	}
	return c.listFromFeed(req, shared)
}

// fromFeed reports whether a list may be answered from a feed: one that takes any
// state, or any from some resourceVersion on.
func (q *query) fromFeed() bool {
	o := &q.opts
	any := o.ResourceVersion == "0" && (o.ResourceVersionMatch == "" || o.ResourceVersionMatch == metav1.ResourceVersionMatchNotOlderThan)
	atLeast := validRV(o.ResourceVersion) && o.ResourceVersionMatch == metav1.ResourceVersionMatchNotOlderThan && o.Limit == 0
	return !q.opaque && o.Continue == "" && (any || atLeast)
}

// replay answers while the link is down: from the user's own log, or, where it may,
// from what the node has; from the newer of the two first.
func (c *Cache) replay(req *http.Request, q *query, verb string, from func(*http.Request, *query) (*http.Response, error)) (*http.Response, error) {
	g := c.guestOf(q, verb)
	if g == nil || !c.shares.may(req.Context(), g) {
		return from(req, q)
	}
	first, second := c.asNode(q), q
	if compareRV(c.recordedAt(second), c.recordedAt(first)) > 0 {
		first, second = second, first
	}
	resp, err := from(req, first)
	if err != nil && apierrors.IsServiceUnavailable(err) {
		return from(req, second)
	}
	return resp, err
}

// recordedAt is the resourceVersion of the newest state that could answer.
func (c *Cache) recordedAt(q *query) (rv string) {
	l := c.logIfKnown(q.name)
	if l == nil {
		return ""
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, rep := range q.representations() {
		key := q.key
		key.Representation = rep
		for _, s := range l.scopes {
			if s.complete && s.key.covers(key) {
				rv = maxRV(rv, s.rv)
			}
		}
	}
	return rv
}

// holding is a body with something to do at its end.
type holding struct {
	io.ReadCloser
	release func()
}

func (h *holding) Close() error {
	if release := h.release; release != nil {
		h.release = nil
		release()
	}
	return h.ReadCloser.Close()
}

// retryAfterSeconds is when a client may ask again for what is not recorded.
const retryAfterSeconds = 5

// errNotRecorded is the answer to what the cache does not know while the link is
// down: never 404, because that would say that it does not exist.
func errNotRecorded(q *query) error {
	err := apierrors.NewServiceUnavailable("the link to the API server is down, and " + q.name.gvr().GroupResource().String() + " " + strconv.Quote(q.key.String()) + " is not recorded")
	err.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: retryAfterSeconds}
	return err
}
