// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

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
		if gvr == g.access.gvr.String() && json.Unmarshal([]byte(text), &key) == nil && key.covers(g.access.key) {
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

// shares remembers who may be served from the node's feeds.
type shares struct {
	c      *Cache
	flight singleflight.Group

	mu      sync.Mutex // guards what follows
	allowed map[access]time.Time
	refused map[schema.GroupVersionResource]time.Time // to the node itself
}

func newShares(c *Cache) *shares {
	return &shares{c: c, allowed: map[access]time.Time{}, refused: map[schema.GroupVersionResource]time.Time{}}
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

// ask asks the API server, once for all who want to know the same at the same time.
func (s *shares) ask(ctx context.Context, g *guest) (bool, error) {
	v, err, _ := s.flight.Do(g.access.identity+"\n"+g.access.recordKey(), func() (any, error) {
		asked := s.c.now()
		ok, err := s.review(ctx, g)
		switch {
		case err != nil:
			return false, err
		case !ok:
			s.forget(g.caller, g.access.gvr)
			return false, nil
		}
		s.c.PutResponse(g.user, classAccess, g.access.recordKey(), Response{ContentType: "text/plain", ETag: "1", Body: []byte("yes"), Time: asked})
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.allowed) >= maxAccesses {
			clear(s.allowed)
		}
		s.allowed[g.access] = asked
		return true, nil
	})
	if err != nil {
		return false, err
	}
	return v.(bool), nil
}

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
	case resp.StatusCode == http.StatusUnauthorized, resp.StatusCode == http.StatusForbidden:
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
	for a := range s.allowed {
		if a.identity == who.identity && a.gvr == gvr {
			delete(s.allowed, a)
		}
	}
	s.mu.Unlock()
	if l := s.c.logIfKnown(logName{User: who.user.GetName(), Identity: who.identity, Class: classAccess}); l != nil {
		l.mu.Lock()
		for _, r := range l.responses {
			if strings.HasPrefix(r.Path, gvr.String()+"\n") {
				l.forgetResponse(r)
			}
		}
		l.mu.Unlock()
	}
	s.eachGuest(func(w *watcher) {
		if w.guest.identity == who.identity && w.guest.access.gvr == gvr {
			w.finish(nil)
		}
	})
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
	for a, g := range open {
		if s.fresh(a, reviewAge) {
			continue
		}
		// Where the answer is no, ask ends the watches.
		if _, err := s.ask(ctx, g); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).V(2).Info("Right is not known", "user", g.user.GetName(), "resource", a.gvr.String(), "reason", err)
		}
	}
}
