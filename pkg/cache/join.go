// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
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
	l := c.logOf(q.name)
	for {
		j := &join{c: c, l: l, q: &q, req: req, since: c.now()}
		resp, err := j.run()
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

var errNotOffered = errors.New("no representation that the client accepts is offered")

// refuse says offline what the API server says of options that contradict each
// other.
func (q *query) refuse() error {
	var in internalversion.ListOptions
	if err := internalversion.Convert_v1_ListOptions_To_internalversion_ListOptions(&q.opts, &in, nil); err != nil {
		return apierrors.NewBadRequest(err.Error())
	}
	if errs := validation.ValidateListOptions(&in, true); len(errs) > 0 {
		return apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "ListOptions"}, "", field.ErrorList(errs))
	}
	return nil
}

// A join is a watch on its way to a feed.
type join struct {
	c     *Cache
	l     *log
	q     *query
	req   *http.Request
	since time.Time
	feed  *feed
}

// run waits until the feed, the API server or nobody can serve the watch.
func (j *join) run() (*http.Response, error) {
	j.l.mu.Lock()
	s, err := j.scope()
	if errors.Is(err, errNotOffered) || err == nil && s.feed == nil && j.l.avoids(s.key) && j.c.cfg.Upstream.Up() {
		if s != nil && !s.complete {
			j.l.drop(s)
		}
		j.l.mu.Unlock()
		return j.c.pass(j.req)
	}
	if err != nil {
		j.l.mu.Unlock()
		return nil, err
	}
	if s.feed == nil {
		j.c.startFeed(j.req.Context(), s, j.q.caller)
	}
	if s.feed == nil {
		j.l.mu.Unlock()
		return nil, errNotRecorded(j.q)
	}
	j.feed = s.feed
	j.feed.users++
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

// scope finds the scope to follow, or makes it. The caller holds the log's lock.
func (j *join) scope() (*scope, error) {
	reps := j.l.offered(j.q)
	up := j.c.cfg.Upstream.Up()
	if up && len(reps) > 0 {
		reps = reps[:1] // what the API server would choose
	}
	key := j.q.key
	for _, rep := range reps {
		key.Representation = rep
		if s := j.l.scopes[key]; s != nil && (up || s.complete) {
			s.used = j.c.now()
			return s, nil
		}
	}
	if !up {
		return nil, errNotRecorded(j.q)
	}
	if len(reps) == 0 {
		return nil, errNotOffered
	}
	return j.l.newScope(key, false), nil
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
	case f.refusal != nil:
		resp = f.refusal.response(j.c, j.req)
	case f.over:
		return j.pass()
	case j.q.resumes():
		return j.resume(s, up)
	case s.complete && (f.live || !up):
		switch atLeast := j.q.opts.ResourceVersion; {
		case !up && validRV(atLeast) && compareRV(atLeast, s.rv) > 0:
			f.release()
			return nil, 0, errTooNew(atLeast, s.rv)
		case !up || !j.l.behind(s, j.q.opts.ResourceVersion):
			return j.attach(s, up), 0, nil
		case waited < freshPatience:
			return nil, freshPatience - waited, nil
		}
		return j.pass()
	case !up:
		err = errNotRecorded(j.q)
	case !s.complete && f.staging != nil && f.staging.shape.Kind != "":
		return j.attach(s, up), 0, nil
	case waited < joinPatience:
		return nil, joinPatience - waited, nil
	default:
		return j.pass()
	}
	f.release()
	return resp, 0, err
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
		j.feed.release()
		return nil, 0, apierrors.NewResourceExpired("too old resource version: " + rv + " (" + s.reach + ")")
	}
	j.feed.release()
	return nil, 0, errNotRecorded(j.q)
}

// behind reports whether a scope's state is older than what the user was shown of
// it in any list, get or answer to a write, or than what a request asks for at
// least. The caller holds the log's lock.
func (l *log) behind(s *scope, atLeast string) bool {
	if validRV(atLeast) && compareRV(s.rv, atLeast) < 0 {
		return true
	}
	for key, rv := range l.shown {
		if compareRV(s.rv, rv) < 0 && key.overlaps(s.key) {
			return true
		}
	}
	for _, single := range l.single {
		for _, o := range single.objects {
			if compareRV(s.rv, o.rv) < 0 && s.key.overlaps(Key{Namespace: o.namespace(), Name: o.name()}) {
				return true
			}
		}
	}
	return false
}

// attach answers with a watcher.
func (j *join) attach(s *scope, up bool) *http.Response {
	source := sourceFeed
	if !up {
		source = sourceReplay
	}
	resp := j.c.newResponse(j.req, s.key.WatchContentType(), source)
	resp.Body = newWatcher(j.req, s, j.q)
	return resp
}

// pass sends the watch upstream. The feed counts it as a user all the same: it
// records what this client will ask for next.
func (j *join) pass() (*http.Response, time.Duration, error) {
	j.l.mu.Unlock()
	resp, err := j.c.pass(j.req)
	if err == nil {
		j.c.revoke(resp, j.q)
	}
	j.l.mu.Lock()
	if err != nil || resp.StatusCode != http.StatusOK {
		j.feed.release()
		return resp, 0, err
	}
	resp.Body = &holding{ReadCloser: resp.Body, release: func() {
		j.l.mu.Lock()
		defer j.l.mu.Unlock()
		j.feed.release()
	}}
	return resp, 0, nil
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
