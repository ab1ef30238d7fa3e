// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/singleflight"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/klog/v2"
)

// Services and EndpointSlices are what every node component watches: kube-proxy,
// CNI and DNS alike. One feed of the node's serves all who may read them; each is
// asked for with its own credential, so nobody sees more than the API server would
// show it.

const (
	// maxAccessAge is how long the API server's word for a right is taken.
	maxAccessAge = 2 * time.Minute
	// reviewPeriod is how often the rights behind open watches are looked at, and
	// reviewAge from which age they are asked for again: together less than
	// maxAccessAge.
	reviewPeriod = 15 * time.Second
	reviewAge    = 75 * time.Second
	// reviewTimeout bounds one question for a right.
	reviewTimeout = 10 * time.Second
	// maxReviews is how many rights are asked for again at once.
	maxReviews = 8
	// maxAccesses bounds how many rights are remembered in memory.
	maxAccesses = 4096
	// classAccess is the class of rights on disk: who had one when the link went
	// down keeps it until the link is back.
	classAccess = "access"
)

// An access is a right to read.
type access struct {
	identity string
	gvr      schema.GroupVersionResource
	verb     string
	key      Key // without representation
}

// recordKey is the access within its user, as it is recorded.
func (a access) recordKey() string {
	key, err := json.Marshal(a.key)
	if err != nil {
		panic(err) // strings and a boolean
	}
	return a.gvr.String() + "\n" + a.verb + "\n" + string(key)
}

// recorded reports whether a right is on record that holds for as much as a asks
// for. Who was shown a state by list or watch has seen what any verb would show.
func (s *shares) recorded(g *guest) bool {
	l := s.c.logIfKnown(logName{User: g.user.GetName(), Identity: g.identity, Class: classAccess})
	if l == nil {
		return false
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	for _, r := range l.responses {
		gvr, rest, _ := strings.Cut(r.Path, "\n")
		_, text, _ := strings.Cut(rest, "\n")
		var key Key
		if gvr == g.access.gvr.String() && !l.tooOld(r.seen) && json.Unmarshal([]byte(text), &key) == nil && key.covers(g.access.key) {
			return true
		}
	}
	return false
}

// A guest is a user who is served from a feed of the node's.
type guest struct {
	caller
	access access
}

// A right is all that one user may read of one resource.
type right struct {
	identity string
	gvr      schema.GroupVersionResource
}

// shares remembers who may be served from the node's feeds.
type shares struct {
	c      *Cache
	flight singleflight.Group

	mu      sync.Mutex // guards what follows
	allowed map[access]time.Time
	ended   map[right]int64                           // how often: a yes from before counts no more
	refused map[schema.GroupVersionResource]time.Time // to the node itself
}

func newShares(c *Cache) *shares {
	return &shares{c: c, allowed: map[access]time.Time{}, ended: map[right]int64{}, refused: map[schema.GroupVersionResource]time.Time{}}
}

// guestOf returns who would be served from the node's feed, nil if the question is
// one for the user's own. The node is nobody's guest.
func (c *Cache) guestOf(q *query, verb string) *guest {
	gr := q.name.gvr().GroupResource()
	if len(q.credential) == 0 || q.opaque || !slices.Contains(c.cfg.Shared, gr) || c.shares.isRefused(q.name.gvr()) {
		return nil
	}
	for k := range q.credential {
		if k != "Authorization" {
			return nil // who impersonates somebody has a log of its own
		}
	}
	key := q.key
	key.Representation = Key{}.Representation
	return &guest{caller: q.caller, access: access{identity: q.identity, gvr: q.name.gvr(), verb: verb, key: key}}
}

// node is the node as a caller.
func (c *Cache) node() caller {
	u := c.cfg.Node()
	return caller{user: u, identity: identityOf(u, nil), credential: http.Header{}}
}

// asNode is the same question, of the node's log.
func (c *Cache) asNode(q *query) *query {
	shared := *q
	n := c.node()
	shared.name.User, shared.name.Identity = n.user.GetName(), n.identity
	return &shared
}

func (s *shares) isRefused(gvr schema.GroupVersionResource) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, ok := s.refused[gvr]
	return ok && s.c.now().Sub(at) < avoidFor
}

// refuse notes that the node itself may not read a resource, so that it cannot be
// shared.
func (s *shares) refuse(gvr schema.GroupVersionResource) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.refused) >= maxAccesses {
		clear(s.refused)
	}
	s.refused[gvr] = s.c.now()
}

// may reports whether a guest may be served: by the API server's word, or, while the
// link is down, by what it said last.
func (s *shares) may(ctx context.Context, g *guest) bool {
	if s.fresh(g.access, maxAccessAge) {
		return true
	}
	if s.c.cfg.Upstream.Up() {
		ok, err := s.ask(ctx, g)
		if err == nil {
			return ok
		}
		klog.FromContext(ctx).V(2).Info("Right is not known", "user", g.user.GetName(), "resource", g.access.gvr.String(), "reason", err)
		if s.c.cfg.Upstream.Up() {
			return false // it is served as if nothing were shared
		}
	}
	return s.recorded(g)
}

func (s *shares) fresh(a access, age time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	at, ok := s.allowed[a]
	return ok && s.c.now().Sub(at) < age
}

// ask asks the API server, once for all who want to know the same at the same time
// with the same credential.
func (s *shares) ask(ctx context.Context, g *guest) (bool, error) {
	v, err, _ := s.flight.Do(g.credentialKey()+"\n"+g.access.recordKey(), func() (any, error) {
		s.mu.Lock()
		asked, ended := s.c.now(), s.ended[right{g.identity, g.access.gvr}]
		s.mu.Unlock()
		ok, err := s.review(ctx, g)
		switch {
		case err != nil:
			return false, err
		case !ok:
			s.forget(g.caller, g.access.gvr)
			return false, nil
		}
		return s.keep(g, asked, ended), nil
	})
	if err != nil {
		return false, err
	}
	return v.(bool), nil
}

// keep remembers a right, unless it has ended since it was asked for.
func (s *shares) keep(g *guest, asked time.Time, ended int64) bool {
	s.c.PutResponse(g.user, classAccess, g.access.recordKey(), Response{ContentType: "text/plain", ETag: "1", Body: []byte("yes"), Time: asked})
	s.mu.Lock()
	late := s.ended[right{g.identity, g.access.gvr}] != ended
	if !late {
		if len(s.allowed) >= maxAccesses {
			clear(s.allowed)
		}
		s.allowed[g.access] = asked
	}
	s.mu.Unlock()
	if late {
		s.forgetRecord(g.caller, g.access.gvr)
	}
	return !late
}

var errUnauthorized = errors.New("the credential is not accepted any more")

// review sends a SelfSubjectAccessReview with the guest's own credential.
func (s *shares) review(ctx context.Context, g *guest) (bool, error) {
	ctx, cancel := context.WithTimeout(request.WithUser(ctx, g.user), reviewTimeout)
	defer cancel()
	a := authorizationv1.ResourceAttributes{
		Verb: g.access.verb, Group: g.access.gvr.Group, Version: g.access.gvr.Version, Resource: g.access.gvr.Resource,
		Namespace: g.access.key.Namespace, Name: g.access.key.Name,
	}
	if fs := g.access.key.query().Get("fieldSelector"); fs != "" {
		a.FieldSelector = &authorizationv1.FieldSelectorAttributes{RawSelector: fs}
	}
	if ls := g.access.key.LabelSelector; ls != "" {
		a.LabelSelector = &authorizationv1.LabelSelectorAttributes{RawSelector: ls}
	}
	body, err := json.Marshal(authorizationv1.SelfSubjectAccessReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "authorization.k8s.io/v1", Kind: "SelfSubjectAccessReview"},
		Spec:     authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: &a},
	})
	if err != nil {
		return false, err
	}
	u := &url.URL{Scheme: "https", Host: "upstream", Path: "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String(), bytes.NewReader(body))
	if err != nil {
		return false, err
	}
	req.Header = g.credential.Clone()
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "edgehub")
	resp, err := s.c.cfg.Upstream.RoundTrip(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxRefusalBytes))
	if err != nil {
		return false, err
	}
	switch {
	case resp.StatusCode == http.StatusUnauthorized:
		return false, errUnauthorized
	case resp.StatusCode == http.StatusForbidden:
		return false, nil
	case resp.StatusCode != http.StatusCreated && resp.StatusCode != http.StatusOK:
		return false, fmt.Errorf("SelfSubjectAccessReview: %s", resp.Status)
	}
	var review authorizationv1.SelfSubjectAccessReview
	if err := json.Unmarshal(answer, &review); err != nil {
		return false, fmt.Errorf("SelfSubjectAccessReview: %w", err)
	}
	return review.Status.Allowed, nil
}

// forget ends all rights of a user to a resource, and the watches that rest on
// them.
func (s *shares) forget(who caller, gvr schema.GroupVersionResource) {
	s.mu.Lock()
	if len(s.ended) >= maxAccesses {
		clear(s.ended) // who is asking gets a no, or a yes that counts no more
	}
	s.ended[right{who.identity, gvr}]++
	for a := range s.allowed {
		if a.identity == who.identity && a.gvr == gvr {
			delete(s.allowed, a)
		}
	}
	s.mu.Unlock()
	s.forgetRecord(who, gvr)
	s.eachGuest(func(w *watcher) {
		if w.guest.identity == who.identity && w.guest.access.gvr == gvr {
			w.queue.cut()
		}
	})
}

func (s *shares) forgetRecord(who caller, gvr schema.GroupVersionResource) {
	l := s.c.logIfKnown(logName{User: who.user.GetName(), Identity: who.identity, Class: classAccess})
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.responses {
		if strings.HasPrefix(r.Path, gvr.String()+"\n") {
			l.forgetResponse(r)
		}
	}
}

// eachGuest calls for every watcher that is a guest, under its log's lock.
func (s *shares) eachGuest(do func(*watcher)) {
	identity := s.c.node().identity
	for _, l := range s.c.allLogs() {
		if l.name.Identity != identity || !slices.Contains(s.c.cfg.Shared, l.name.gvr().GroupResource()) {
			continue
		}
		l.mu.Lock()
		for _, sc := range l.scopes {
			for w := range sc.everyWatcher() {
				if w.guest != nil {
					do(w)
				}
			}
		}
		l.mu.Unlock()
	}
}

// run asks again, until ctx ends, for the rights behind open watches.
func (s *shares) run(ctx context.Context) {
	tick := time.NewTicker(reviewPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if !s.c.cfg.Upstream.Up() {
			continue
		}
		s.reviewOpen(ctx)
	}
}

func (s *shares) reviewOpen(ctx context.Context) {
	open := map[access]*guest{}
	s.eachGuest(func(w *watcher) { open[w.guest.access] = w.guest })
	var g errgroup.Group
	g.SetLimit(maxReviews)
	for a, who := range open {
		if !s.fresh(a, reviewAge) {
			g.Go(func() error { s.reviewGuest(ctx, who); return nil })
		}
	}
	_ = g.Wait() // nothing fails
}

// reviewGuest asks again for one right. Where the answer is no, ask ends the watches.
func (s *shares) reviewGuest(ctx context.Context, g *guest) {
	_, err := s.ask(ctx, g)
	switch {
	case err == nil || ctx.Err() != nil || !s.c.cfg.Upstream.Up():
		return
	case errors.Is(err, errUnauthorized):
		// That is about one token. The others' watches are asked for with theirs.
		s.cut(func(other *guest) bool { return other.credentialKey() == g.credentialKey() })
	case !s.fresh(g.access, maxAccessAge):
		s.cut(func(other *guest) bool { return other.access == g.access })
	}
	klog.FromContext(ctx).V(2).Info("Right is not known", "user", g.user.GetName(), "resource", g.access.gvr.String(), "reason", err)
}

// cut ends the watches of some guests.
func (s *shares) cut(whose func(*guest) bool) {
	s.eachGuest(func(w *watcher) {
		if whose(w.guest) {
			w.queue.cut()
		}
	})
}
