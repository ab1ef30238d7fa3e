// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/codec"
)

const (
	minBackoff = 200 * time.Millisecond
	maxBackoff = 30 * time.Second
	// healJitter is over how long the feeds come back when the link does.
	healJitter = 500 * time.Millisecond
	// pageLimit is how many objects a feed asks for at a time where the API
	// server has no WatchList.
	pageLimit = "500"
	// maxRefusalBytes bounds the body of an answer that is not 200.
	maxRefusalBytes = 1 << 20
)

// A feed owns the upstream watch of a scope: it brings the state up to date,
// follows, and after a cut goes on at its resourceVersion. Fields are guarded by
// the log's lock.
type feed struct {
	scope  *scope
	user   user.Info // whose feed it is
	cancel context.CancelFunc

	// holders are the open requests that the feed serves, by their credential: the
	// feed asks with one of these, and with none that nobody holds any more.
	holders map[string]*holder
	using   string // key of the holder whose credential the connection has

	live    bool   // connected, and the state complete and up to date
	catchUp string // resourceVersion from which a resumed feed is live; "" is not known

	connection int      // counts them
	hangUp     func()   // ends the connection, not the feed; nil while there is none
	resync     bool     // the upstream has no history back to the scope's rv
	reset      bool     // the next sync follows a reset of the history
	agreed     bool     // the last connection ended as it was asked to; run's alone
	staging    *staging // of the sync that is under way
	refusal    *refusal // the answer that ended the feed, if one did
	stopped    bool     // nothing more of it is taken in
	over       bool     // the feed has ended
	jsonOnly   bool     // it ended because the resource has no protobuf
	changed    chan struct{}

	idleSince time.Time
}

// A holder is one credential of open requests.
type holder struct {
	credential http.Header
	uses       int
	bad        bool // the API server has refused it
}

// A staging collects a whole state before it becomes the scope's. Guarded by the
// log's lock.
type staging struct {
	shape    codec.Shape
	list     []stagedEvent // as they came, for the watchers
	byKey    map[string]*object
	bytes    int64
	from     string // the scope's resourceVersion when it began
	rv       string
	done     bool
	failed   bool
	changed  chan struct{}
	watchers map[*watcher]struct{}
}

type stagedEvent struct {
	kind   watch.EventType
	object *object
}

func newStaging() *staging {
	return &staging{byKey: map[string]*object{}, changed: make(chan struct{}), watchers: map[*watcher]struct{}{}}
}

func (st *staging) notify() {
	close(st.changed)
	st.changed = make(chan struct{})
}

// add takes the next object in; one that the scope has in this very version is
// not kept twice.
func (st *staging) add(s *scope, shape codec.Shape, kind watch.EventType, o *object) error {
	cfg := &s.log.c.cfg
	if old := s.objects[o.key]; kind != watch.Deleted && old != nil && old.rv == o.rv {
		o = old
	}
	st.bytes += int64(len(o.bare))
	if len(st.list) >= cfg.MaxObjects || st.bytes > cfg.MaxScopeBytes {
		return errTooLarge
	}
	st.shape = shape
	st.list = append(st.list, stagedEvent{kind, o})
	if st.byKey[o.key] = o; kind == watch.Deleted {
		delete(st.byKey, o.key)
	}
	return nil
}

// A refusal is an answer of the API server that is not the watch asked for.
type refusal struct {
	code   int
	header http.Header
	body   []byte
}

// isFinal reports whether the answer would be the same in a moment.
func (r *refusal) isFinal() bool { return r.code < 500 && r.code != http.StatusTooManyRequests }

func (r *refusal) Error() string { return fmt.Sprintf("API server answered %d", r.code) }

func (r *refusal) response(c *Cache, req *http.Request) *http.Response {
	resp := c.newResponse(req, "", sourceUpstream)
	resp.Header = r.header.Clone()
	resp.Header.Set(SourceHeader, sourceUpstream)
	resp.StatusCode, resp.Status = r.code, strconv.Itoa(r.code)+" "+http.StatusText(r.code)
	setBody(resp, r.body)
	return resp
}

var (
	errTooLarge = errors.New("more than the cache keeps of one scope")
	errExpired  = errors.New("resourceVersion is too old")
	errJSONOnly = errors.New("resource has no protobuf")
	errNoInit   = errors.New("API server does not send initial events")
	errHungUp   = errors.New("the feed begins anew")
)

// A resetError says that the API server's history was reset: it is at now, and the
// feed is ahead of that.
type resetError struct{ now string }

func (e *resetError) Error() string { return "the API server's history was reset; it is at " + e.now }

// startFeed gives a scope its feed, for who is about to hold it. ctx lends its logger
// and nothing else, since its values hold the request and so the credential: the feed
// ends with its last holder, or when it has idled long enough. The caller holds the
// log's lock.
func (c *Cache) startFeed(ctx context.Context, s *scope, who caller) *feed {
	root := context.TODO() //nolint:forbidigo // see above
	ctx, cancel := context.WithCancel(klog.NewContext(root, klog.FromContext(ctx)))
	f := &feed{scope: s, user: who.user, cancel: cancel, holders: map[string]*holder{}, changed: make(chan struct{}), idleSince: c.now()}
	f.holders[who.credentialKey()] = &holder{credential: who.credential}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		cancel()
		f.over = true
		return f
	}
	s.feed = f
	if f.lingers() && !s.pinned {
		s.pinned, s.dirtyState = true, true
	}
	c.feeds[f] = struct{}{}
	c.running.Go(func() {
		defer cancel()
		f.run(ctx)
	})
	return f
}

// lingers reports whether the feed outlives its users: the node's do; with
// another's credential nothing is done once nobody asks.
func (f *feed) lingers() bool { return f.holders[""] != nil }

// hold notes that an open request uses the feed. The caller holds the log's lock.
func (f *feed) hold(who caller) {
	k := who.credentialKey()
	h := f.holders[k]
	if h == nil {
		h = &holder{credential: who.credential}
		f.holders[k] = h
	}
	h.uses++
}

// release gives up one use. A credential that nobody holds any more is forgotten;
// if the connection has it, another one takes over. The caller holds the log's lock.
func (f *feed) release(who caller) {
	k := who.credentialKey()
	f.holders[k].uses--
	f.idleSince = f.scope.log.c.now()
	f.scope.used = f.idleSince
	if k == "" || f.holders[k].uses > 0 {
		return
	}
	delete(f.holders, k)
	switch {
	case len(f.holders) == 0:
		f.stop()
	case f.using == k && f.hangUp != nil:
		f.hangUp()
	}
}

// stop ends the feed. Who comes from now on starts another one. The caller holds the
// log's lock.
func (f *feed) stop() {
	f.stopped = true
	f.cancel()
	if f.scope.feed == f {
		f.scope.feed, f.scope.fed = nil, false
	}
}

// users is how many open requests hold the feed. The caller holds the log's lock.
func (f *feed) users() (n int) {
	for _, h := range f.holders {
		n += h.uses
	}
	return n
}

// credential chooses what the feed asks with. The caller holds the log's lock.
func (f *feed) credential() http.Header {
	if h := f.holders[f.using]; h != nil && !h.bad {
		return h.credential
	}
	for k, h := range f.holders {
		if f.using = k; !h.bad {
			return h.credential
		}
	}
	if h := f.holders[f.using]; h != nil {
		return h.credential
	}
	return http.Header{}
}

func (f *feed) notify() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// endIdleFeeds ends the node's feeds that nobody has used for long.
func (c *Cache) endIdleFeeds() {
	now := c.now()
	for _, l := range c.allLogs() {
		l.mu.Lock()
		for _, s := range l.scopes {
			if f := s.feed; f != nil && f.users() == 0 && now.Sub(f.idleSince) > c.cfg.FeedLinger && c.cfg.Upstream.Up() {
				s.pinned, s.dirtyState = false, true
				l.touch(false)
				f.stop()
			}
		}
		l.mu.Unlock()
	}
}

func (c *Cache) endFeeds() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	for f := range c.feeds {
		f.cancel()
	}
}

// run keeps the scope up to date until ctx ends or the API server refuses.
func (f *feed) run(ctx context.Context) {
	c := f.scope.log.c
	logger := klog.FromContext(ctx).WithValues("resource", f.scope.log.name.gvr().String(), "scope", f.scope.key.String())
	defer f.end()
	backoff := minBackoff
	for ctx.Err() == nil {
		changed := c.cfg.Upstream.Changed()
		if !c.cfg.Upstream.Up() {
			down := c.now()
			select {
			case <-ctx.Done():
			case <-changed:
			}
			// All feeds of all nodes come back when a link heals: not at once, but no
			// later than is proportionate.
			f.pause(ctx, rand.N(min(healJitter, c.now().Sub(down)/10+time.Millisecond)))
			continue
		}
		logger.V(4).Info("Feed connects", "resourceVersion", f.scopeRV())
		start, again := c.now(), f.resync // resync: only this goroutine sets it
		lived, err := f.connect(ctx)
		f.disconnected(err)
		var reset *resetError
		if errors.As(err, &reset) {
			logger.Info("History of the API server was reset; listing again", "from", f.scopeRV(), "to", reset.now)
			f.forgetHistory(reset.now)
		}
		if ctx.Err() != nil || f.isOver(err) {
			return
		}
		logger.V(4).Info("Feed disconnected", "reason", err)
		if lived && c.now().Sub(start) > time.Second {
			backoff = minBackoff
		}
		if errors.Is(err, errExpired) && !again || errors.Is(err, errNoInit) || errors.Is(err, errHungUp) || reset != nil || c.unavailable(err) && !c.cfg.Upstream.Up() {
			continue
		}
		logger.V(2).Info("Feed interrupted", "reason", err)
		select {
		case <-ctx.Done():
		case <-c.cfg.Upstream.Changed():
		case <-time.After(backoff/2 + rand.N(backoff)):
		}
		backoff = min(2*backoff, maxBackoff)
	}
}

func (f *feed) pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

func (f *feed) scopeRV() string {
	f.scope.log.mu.RLock()
	defer f.scope.log.mu.RUnlock()
	return f.scope.rv
}

// isOver decides whether an error ends the feed, and notes why.
func (f *feed) isOver(err error) bool {
	l := f.scope.log
	l.mu.Lock()
	defer l.mu.Unlock()
	var r *refusal
	switch {
	case errors.Is(err, errJSONOnly):
		l.jsonOnly, f.jsonOnly = true, true
		return true
	case errors.Is(err, errTooLarge):
		l.c.metrics.abandoned.WithLabelValues("too large").Inc()
		l.avoid(f.scope.key)
		l.drop(f.scope)
		return true
	case errors.Is(err, errNotAnObject):
		l.c.metrics.abandoned.WithLabelValues("undecodable").Inc()
		l.avoid(f.scope.key)
		l.drop(f.scope)
		return true
	case !errors.As(err, &r):
		return false
	case r.code == http.StatusUnauthorized:
		// This credential is no good any more; the user may have another one.
		if h := f.holders[f.using]; h != nil {
			h.bad = true
		}
		for _, h := range f.holders {
			if !h.bad {
				return false
			}
		}
		f.refusal = r
		return true
	case r.code == http.StatusForbidden || r.code == http.StatusNotFound:
		f.refusal = r
		f.scope.pinned = false
		l.drop(f.scope)
		return true
	case !f.scope.complete && r.code != http.StatusTooManyRequests && r.code < 500:
		f.refusal = r
		return true
	}
	if f.users() > 0 && !f.scope.complete {
		f.refusal = r // for those who wait; the next one starts a feed again
		return true
	}
	return false
}

// disconnected notes that the scope is not followed for now.
func (f *feed) disconnected(err error) {
	l := f.scope.log
	l.mu.Lock()
	defer l.mu.Unlock()
	if f.live {
		f.scope.vouch()
	}
	f.live, f.hangUp = false, nil
	if !l.c.unavailable(err) && f.scope.feed == f {
		f.scope.fed = false // somebody else may have ended it: nothing vouches for the state
	}
	if errors.Is(err, errExpired) {
		f.resync = true
	}
	if st := f.staging; st != nil {
		f.staging = nil
		st.failed = true
		st.notify()
	}
	f.notify()
}

// end detaches the feed; its watchers end after what they have been offered.
func (f *feed) end() {
	l := f.scope.log
	l.mu.Lock()
	defer l.mu.Unlock()
	if f.live {
		f.scope.vouch()
	}
	f.over, f.live = true, false
	if f.scope.feed == f {
		f.scope.feed, f.scope.fed = nil, false
	}
	for w := range f.scope.watchers {
		if w.feed == f {
			w.finish(nil)
		}
	}
	if !f.scope.complete && f.scope.feed == nil && l.scopes[f.scope.key] == f.scope {
		l.drop(f.scope)
	}
	f.notify()
	l.c.mu.Lock()
	delete(l.c.feeds, f)
	l.c.mu.Unlock()
}
