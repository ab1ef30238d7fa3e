// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const loadTime = 30 * time.Second

// memory measures the resident memory of hubs with less and more to do.
func (b *bench) memory(ctx context.Context) error {
	for _, f := range []func(context.Context) error{b.nodeMemory, b.listMemory, b.indexMemory} {
		if err := f(ctx); err != nil {
			return err
		}
	}
	return nil
}

// nodeMemory is a hub that nobody asks anything, and then one with a node's usual
// clients.
func (b *bench) nodeMemory(ctx context.Context) error {
	if err := b.seedNodeSet(ctx); err != nil {
		return err
	}
	h, err := b.newHub(ctx, false)
	if err != nil {
		return err
	}
	defer b.closing(h.close)
	idle, err := settled(ctx, h.PID())
	if err != nil {
		return err
	}
	b.add(result{Name: "RSS idle", Value: idle, Unit: "MB", Target: atMost(20), Versus: yurtHub + "62–64 MB"})
	clients, err := b.newNodeClients(ctx, h)
	if err != nil {
		return err
	}
	defer clients.close()
	node, err := settled(ctx, h.PID())
	if err != nil {
		return err
	}
	_, peak, err := rss(h.PID())
	if err != nil {
		return err
	}
	objects, err := h.Metric(ctx, "edgehub_cache_objects")
	if err != nil {
		return err
	}
	feeds, err := h.Metric(ctx, "edgehub_cache_feeds")
	b.add(result{Name: "RSS with 110 pods, 1,000 services, 1,000 endpointslices watched as kubelet and kube-proxy do", Value: node, Unit: "MB", Target: atMost(30),
		Versus: fmt.Sprintf("peak %.1f MB; %.0f objects recorded, %.0f feeds", peak, objects, feeds)})
	return err
}

// listMemory is a hub through which all pods are listed, and then one under load.
func (b *bench) listMemory(ctx context.Context) error {
	if err := b.seedPods(ctx, manyPods); err != nil {
		return err
	}
	h, err := b.newHub(ctx, false)
	if err != nil {
		return err
	}
	defer b.closing(h.close)
	list, err := toAs(ctx, h.Through(b.direct()), manyPods.path(), protobufType, true)
	if err != nil {
		return err
	}
	defer list.close()
	if _, err := list.times(ctx, 5); err != nil {
		return err
	}
	if err := wait(ctx, 3*time.Second); err != nil { // until it is on disk
		return err
	}
	now, peak, err := rss(h.PID())
	if err != nil {
		return err
	}
	b.add(result{Name: "RSS after LISTs of 5,000 pods", Value: now, Unit: "MB", Target: atMost(60), Versus: fmt.Sprintf("peak %.0f MB; %s219–256 MB", peak, yurtHub)})
	var count loadCount
	if err := b.fullLoad(ctx, h, &count); err != nil {
		return err
	}
	now, peak, err = rss(h.PID())
	b.add(result{Name: "RSS after 30 s of full load", Value: now, Unit: "MB", Target: atMost(60),
		Versus: fmt.Sprintf("peak %.0f MB; %d GETs, %d LISTs of 5,000 pods, %d watch events to each of %d watches; %s2,800–3,300 MB",
			peak, count.gets.Load(), count.lists.Load(), count.updates.Load(), loadWatches, yurtHub)})
	return err
}

// A loadCount says what a load was.
type loadCount struct{ gets, lists, updates atomic.Int64 }

const loadWatches = 4

// fullLoad does what takes all of the machine: GETs on four connections, LISTs of
// all pods on three (from the API server, and from a feed in both encodings), and
// watches of pods that change.
func (b *bench) fullLoad(ctx context.Context, h *hub, count *loadCount) error {
	through := h.Through(b.direct())
	for i := range loadWatches {
		accept := []string{protobufType, jsonType}[i%2]
		w, err := hold(ctx, through, manyPods.path()+"?watch=1&resourceVersion=0", accept)
		if err != nil {
			return err
		}
		defer w.close()
	}
	g, ctx := errgroup.WithContext(ctx)
	until := time.Now().Add(loadTime)
	repeat := func(path, accept string, n *atomic.Int64) {
		g.Go(func() error {
			r, err := to(ctx, through, path, accept)
			if err != nil {
				return err
			}
			defer r.close()
			for time.Now().Before(until) {
				if _, err := r.do(ctx); err != nil {
					return err
				}
				n.Add(1)
			}
			return nil
		})
	}
	for i := range 4 {
		repeat(fmt.Sprintf("%s/pod-%05d", manyPods.path(), i), jsonType, &count.gets)
	}
	repeat(manyPods.path(), protobufType, &count.lists)
	repeat(manyPods.path()+"?resourceVersion=0", protobufType, &count.lists)
	repeat(manyPods.path()+"?resourceVersion=0", jsonType, &count.lists)
	g.Go(func() error { return b.touchPods(ctx, until, &count.updates) })
	return g.Wait()
}

// touchPods changes one pod after the other, 50 a second.
func (b *bench) touchPods(ctx context.Context, until time.Time, n *atomic.Int64) error {
	for time.Now().Before(until) {
		i := n.Add(1)
		patch := []byte(`{"metadata":{"annotations":{"touched":"` + strconv.FormatInt(i, 10) + `"}}}`)
		_, err := b.cp.Client.CoreV1().Pods(manyPods.namespace).Patch(ctx, fmt.Sprintf("pod-%05d", i%int64(manyPods.n)), types.MergePatchType, patch, metav1.PatchOptions{})
		if err := errors.Join(err, wait(ctx, 20*time.Millisecond)); err != nil {
			return err
		}
	}
	return nil
}

// indexMemory is what the heap grows by when 5,000 pods are followed and all of
// their bytes are on disk.
func (b *bench) indexMemory(ctx context.Context) error {
	h, err := b.newHub(ctx, false)
	if err != nil {
		return err
	}
	defer b.closing(h.close)
	// The feed's machinery is not the index's.
	w, err := hold(ctx, h.Through(b.direct()), "/api/v1/nodes?watch=1&resourceVersion=0", protobufType)
	if err != nil {
		return err
	}
	defer w.close()
	before, err := h.heap(ctx)
	if err != nil {
		return err
	}
	all, err := hold(ctx, h.Through(b.direct()), manyPods.path()+"?watch=1&resourceVersion=0", protobufType)
	if err != nil {
		return err
	}
	defer all.close()
	if err := wait(ctx, 4*time.Second); err != nil { // until it is on disk
		return err
	}
	after, err := h.heap(ctx)
	if err != nil {
		return err
	}
	objects, err := h.Metric(ctx, "edgehub_cache_objects")
	if err == nil && int(objects) < manyPods.n {
		err = fmt.Errorf("%.0f objects are recorded", objects)
	}
	b.add(result{Name: "index in memory: heap an object", Value: (after - before) / float64(manyPods.n), Unit: "B",
		Versus: fmt.Sprintf("live heap %.1f MB before, %.1f MB with 5,000 pods", before/1e6, after/1e6)})
	return err
}
