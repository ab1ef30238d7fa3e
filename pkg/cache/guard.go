// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/codec"
)

// resetPatience is how far apart two reads must find the API server's history
// behind a feed before it is taken for another one: one alone may come from an API
// server that was not up to date.
const resetPatience = 5 * time.Second

// A guard tells how far the API server's history goes. A watch that is ahead of it,
// because etcd has been restored from a backup, is accepted with 200 and then
// silent for ever; so before a feed goes on where it was, it asks here.
type guard struct {
	c        *Cache
	turn     chan struct{} // capacity 1: one read at a time
	patience time.Duration // resetPatience

	mu    sync.Mutex // guards what follows
	begun time.Time  // of the last read that succeeded
	rv    string
}

func newGuard(c *Cache) *guard {
	return &guard{c: c, turn: make(chan struct{}, 1), patience: resetPatience}
}

// now returns the resourceVersion of a consistent read that began after the call:
// of the node's own Node, which every node may list. All feeds that come back at
// the same time share one read. "" where the node is not allowed to know.
func (g *guard) now(ctx context.Context) (string, error) {
	asked := g.c.now()
	select {
	case g.turn <- struct{}{}:
	case <-ctx.Done():
		return "", ctx.Err()
	}
	defer func() { <-g.turn }()
	if rv, ok := g.since(asked); ok {
		return rv, nil
	}
	begun, before := g.c.now(), g.last()
	rv, err := g.read(ctx)
	var r *refusal
	if errors.As(err, &r) && r.isFinal() {
		rv, err = "", nil
	}
	if err != nil {
		return "", fmt.Errorf("read how far the history goes: %w", err)
	}
	g.mu.Lock()
	g.begun, g.rv = begun, rv
	g.mu.Unlock()
	if rv != "" && compareRV(rv, before) < 0 {
		g.c.historyReset(rv, func(*log) bool { return true })
	}
	return rv, nil
}

// last is how far the history went before: when it was read last, or as far as the
// record of Nodes tells.
func (g *guard) last() (rv string) {
	g.mu.Lock()
	rv = g.rv
	g.mu.Unlock()
	if rv != "" {
		return rv
	}
	for _, l := range g.c.allLogs() {
		if l.name.gvr() != (schema.GroupVersionResource{Version: "v1", Resource: "nodes"}) {
			continue
		}
		l.mu.RLock()
		for _, s := range l.allScopes() {
			rv = maxRV(rv, s.newest())
		}
		l.mu.RUnlock()
	}
	return rv
}

func (g *guard) since(asked time.Time) (string, bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.rv, g.begun.After(asked)
}

func (g *guard) read(ctx context.Context) (string, error) {
	node := g.c.cfg.Node()
	name := strings.TrimPrefix(node.GetName(), "system:node:")
	q := url.Values{"fieldSelector": {fields.OneTermEqualSelector("metadata.name", name).String()}}
	rep := codec.Representation{Protobuf: true, Partial: "v1"}
	return g.c.consistentRV(request.WithUser(ctx, node), "/api/v1/nodes", q, rep, http.Header{})
}

// consistentRV reads the first object of a list from etcd's quorum and returns the
// list's resourceVersion. The user of ctx asks, with the credential given.
func (c *Cache) consistentRV(ctx context.Context, path string, q url.Values, rep codec.Representation, credential http.Header) (string, error) {
	q.Set("limit", "1")
	u := &url.URL{Scheme: "https", Host: "upstream", Path: path, RawQuery: q.Encode()}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return "", err
	}
	req.Header = credential.Clone()
	req.Header.Set("Accept", rep.Accept(true))
	req.Header.Set("User-Agent", "edgehub")
	resp, err := c.cfg.Upstream.RoundTrip(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	got, ok := codec.FromContentType(resp.Header.Get("Content-Type"))
	switch {
	case resp.StatusCode != http.StatusOK:
		body, _ := io.ReadAll(io.LimitReader(resp.Body, maxRefusalBytes))
		return "", &refusal{code: resp.StatusCode, header: resp.Header, body: body}
	case !ok:
		return "", fmt.Errorf("unexpected content type %q", resp.Header.Get("Content-Type"))
	}
	if got.Protobuf == rep.Protobuf {
		got.Partial = rep.Partial // otherwise it is not what was asked for, but tells as much
	}
	d := codec.NewListDecoder(got, c.cfg.MaxObjectBytes, func(codec.Shape, []byte) error { return nil })
	if _, err := io.Copy(d, resp.Body); err != nil {
		return "", err
	}
	list, err := d.Close()
	if err == nil && !validRV(list.ResourceVersion) {
		err = errNotAnObject
	}
	return list.ResourceVersion, err
}

// sameHistory makes sure that the API server's history reaches to where the feed
// is. It returns how far it goes now, "" where that cannot be known, and a
// resetError if it ends before rv for good. A resource may live in an etcd of
// its own, so the last word has a read of the scope itself.
func (f *feed) sameHistory(ctx context.Context, rv string) (now string, err error) {
	c := f.scope.log.c
	now, err = c.guard.now(ctx)
	if err != nil || now == "" || compareRV(now, rv) >= 0 {
		return now, err
	}
	for n := range 2 {
		if n > 0 {
			select {
			case <-ctx.Done():
				return "", ctx.Err()
			case <-time.After(c.guard.patience):
			}
		}
		f.scope.log.mu.Lock()
		credential := f.credential()
		f.scope.log.mu.Unlock()
		k := f.scope.key
		now, err = c.consistentRV(request.WithUser(ctx, f.user), resourcePath(f.scope.log.name, k.Namespace), k.query(), k.Representation, credential)
		if err != nil || compareRV(now, rv) >= 0 {
			return now, err
		}
	}
	return now, &resetError{now: now}
}

// historyReset forgets what some logs recorded of a history that is no more, because
// etcd was restored to a state at now: whatever is ahead of it and not followed. Feeds
// find out by themselves. resourceVersions may go back here, and only here.
func (c *Cache) historyReset(now string, of func(*log) bool) {
	c.metrics.historyResets.Inc()
	c.resets.Add(1)
	for _, l := range c.allLogs() {
		if of(l) {
			l.historyReset(now)
		}
	}
}

// sameResource are the logs of one resource, of all users: what they hold comes from
// one etcd. Another resource's may come from another one, or from another API server.
func sameResource(gvr schema.GroupVersionResource) func(*log) bool {
	return func(l *log) bool { return l.name.gvr() == gvr }
}

func (l *log) historyReset(now string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.shown = map[Key]string{}
	for _, s := range l.allScopes() {
		if s.feed == nil && compareRV(s.newest(), now) > 0 {
			s.endWatchers(func(*watcher) bool { return true })
			l.drop(s)
		}
	}
}

// newest is the highest resourceVersion that the scope knows of.
func (s *scope) newest() string {
	rv := s.rv
	if s.single {
		for _, o := range s.objects {
			rv = maxRV(rv, o.rv)
		}
	}
	return rv
}
