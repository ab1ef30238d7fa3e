// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

const (
	idleWatches      = 1000
	watchConnections = 50
)

// watches measures what 1,000 watches on 50 connections cost that nothing happens
// on: on four scopes, each of which has a feed and a watch before. They begin, as
// informers' do, where a list ended: one from the feed.
func (b *bench) watches(ctx context.Context) error {
	if err := b.seedServices(ctx, services); err != nil {
		return err
	}
	if err := b.seedPods(ctx, somePods); err != nil {
		return err
	}
	h, err := b.newHub(ctx, false)
	if err != nil {
		return err
	}
	defer b.closing(h.close)
	w := &watchers{hub: h}
	defer w.close()
	for _, path := range []string{somePods.path(), "/api/v1/services", "/apis/discovery.k8s.io/v1/endpointslices", "/api/v1/nodes"} {
		if err := w.addScope(ctx, b, path); err != nil {
			return err
		}
	}
	before, err := settled(ctx, h.PID())
	if err != nil {
		return err
	}
	if err := w.open(ctx, b, watchConnections, idleWatches); err != nil {
		return err
	}
	after, err := settled(ctx, h.PID())
	if err != nil {
		return err
	}
	served, err := h.Metric(ctx, "edgehub_cache_watchers")
	b.add(result{Name: "1,000 idle watches on 50 connections: RSS a watch", Value: (after - before) * 1e6 / 1024 / idleWatches, Unit: "KiB", Target: atMost(40),
		Versus: fmt.Sprintf("RSS %.1f MB before, %.1f MB after; %.0f watches on %d feeds", before, after, served, len(w.paths))})
	return err
}

// settled waits until what is garbage had time to be given back, and returns the
// RSS.
func settled(ctx context.Context, pid int) (float64, error) {
	if err := wait(ctx, 8*time.Second); err != nil {
		return 0, err
	}
	now, _, err := rss(pid)
	return now, err
}

// watchers are watches that nothing is done with but reading.
type watchers struct {
	hub     *hub
	feeds   []*held
	paths   []string // each with its resourceVersion
	clients []*http.Client
	bodies  []io.Closer
	readers sync.WaitGroup
}

// addScope opens a feed and lists from it.
func (w *watchers) addScope(ctx context.Context, b *bench, path string) error {
	c := w.hub.Through(b.direct())
	feed, err := hold(ctx, c, path+"?watch=1&resourceVersion=0", jsonType)
	if err != nil {
		return err
	}
	w.feeds = append(w.feeds, feed)
	cached, err := to(ctx, c, path+"?resourceVersion=0", jsonType)
	if err != nil {
		return err
	}
	defer cached.close()
	if err := w.hub.fromFeed(ctx, cached); err != nil {
		return err
	}
	resp, err := cached.open(ctx)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var list struct {
		Metadata struct{ ResourceVersion string }
	}
	if err := json.NewDecoder(resp.Body).Decode(&list); err != nil {
		return err
	}
	w.paths = append(w.paths, path+"?watch=1&allowWatchBookmarks=true&timeoutSeconds=600&resourceVersion="+list.Metadata.ResourceVersion)
	return nil
}

// open opens n watches on some new connections.
func (w *watchers) open(ctx context.Context, b *bench, connections, n int) error {
	c := w.hub.Through(b.direct())
	var clients []*http.Client
	for range connections {
		client, err := newClient(c, false)
		if err != nil {
			return err
		}
		clients = append(clients, client)
	}
	w.clients = append(w.clients, clients...)
	for i := range n {
		resp, err := request{clients[i%connections], c.Host + w.paths[i%len(w.paths)], jsonType}.open(ctx)
		if err != nil {
			return fmt.Errorf("watch %d: %w", i, err)
		}
		w.bodies = append(w.bodies, resp.Body)
		w.readers.Go(func() { _, _ = io.Copy(io.Discard, resp.Body) }) // it ends when it is closed
	}
	return nil
}

func (w *watchers) close() {
	for _, b := range w.bodies {
		_ = b.Close() // it is only read from
	}
	w.readers.Wait()
	for _, f := range w.feeds {
		f.close()
	}
	for _, c := range w.clients {
		c.CloseIdleConnections()
	}
}
