// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"sort"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// A version is an object from one resourceVersion on; without an item, its
// absence.
type version struct {
	rv     int64
	item   []byte
	labels map[string]string
}

// A truth is all that a resource has ever been in one representation, as a watch
// that does not go through the hub tells it.
type truth struct {
	mu      sync.Mutex
	first   int64 // resourceVersion from which on everything is known
	last    int64
	objects map[string][]version
}

// followTruth returns when the present state is known. The watch must not end
// before ctx does.
func followTruth(ctx context.Context, g *errgroup.Group, e *rig.Endpoint, path, accept string) (*truth, error) {
	resp, err := e.Get(ctx, path+"?"+rig.WatchList, rig.WatchAccept(accept))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != 200 {
		resp.Body.Close()
		return nil, fmt.Errorf("watch %s: %s", path, resp.Status)
	}
	t := &truth{objects: map[string][]version{}}
	next := rig.Frames(resp.Body, resp.Header.Get("Content-Type"))
	g.Go(func() error {
		defer resp.Body.Close()
		for {
			ev, err := next()
			if ctx.Err() != nil {
				return nil
			}
			if err != nil || ev.Type == "ERROR" {
				return fmt.Errorf("the truth about %s ended: %s %w", path, ev.Item, err)
			}
			t.take(ev)
		}
	})
	return t, process.Poll(ctx, "the truth about "+path+" is known", process.Until(func() bool {
		t.mu.Lock()
		defer t.mu.Unlock()
		return t.first > 0
	}))
}

func (t *truth) take(ev rig.Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last = max(t.last, ev.Meta.ResourceVersion)
	switch {
	case ev.Synced:
		t.first = ev.Meta.ResourceVersion
	case ev.Type == "BOOKMARK":
	case ev.Type == "DELETED":
		t.objects[ev.Meta.Key] = append(t.objects[ev.Meta.Key], version{rv: ev.Meta.ResourceVersion})
	default:
		t.objects[ev.Meta.Key] = append(t.objects[ev.Meta.Key], version{rv: ev.Meta.ResourceVersion, item: ev.Item, labels: ev.Meta.Labels})
	}
}

// wait waits until everything up to rv is known; something must have happened at
// rv.
func (t *truth) wait(ctx context.Context, rv int64) error {
	return process.Poll(ctx, fmt.Sprintf("the truth at %d is known", rv), process.Until(func() bool {
		t.mu.Lock()
		defer t.mu.Unlock()
		return t.last >= rv
	}))
}

// span returns the resourceVersions between which everything is known.
func (t *truth) span() (first, last int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.first, t.last
}

// version returns how an object was at rv.
func (t *truth) version(key string, rv int64) (version, bool) {
	vs := t.objects[key]
	i := sort.Search(len(vs), func(i int) bool { return vs[i].rv > rv })
	if i == 0 || vs[i-1].item == nil {
		return version{}, false
	}
	return vs[i-1], true
}

// at returns what was there at rv, of that what keep wants, in the API server's
// order.
func (t *truth) at(rv int64, keep func(key string, labels map[string]string) bool) (keys []string, items [][]byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, key := range slices.Sorted(maps.Keys(t.objects)) {
		if v, ok := t.version(key, rv); ok && keep(key, v.labels) {
			keys, items = append(keys, key), append(items, v.item)
		}
	}
	return keys, items
}

// compare says how a list differs from the state at its resourceVersion.
func (t *truth) compare(l rig.List, keep func(key string, labels map[string]string) bool) error {
	if first, last := t.span(); l.ResourceVersion < first || l.ResourceVersion > last {
		return fmt.Errorf("a list at %d cannot be judged by the truth from %d to %d", l.ResourceVersion, first, last)
	}
	keys, items := t.at(l.ResourceVersion, keep)
	have := map[string][]byte{}
	var order []string
	for _, i := range l.Items {
		m, err := rig.ReadMeta(i, l.Protobuf)
		if err != nil {
			return err
		}
		have[m.Key] = i
		order = append(order, m.Key)
	}
	for i, key := range keys {
		switch got, ok := have[key]; {
		case !ok:
			return fmt.Errorf("the list at %d has no %s, which was there: %q", l.ResourceVersion, key, items[i])
		case !bytes.Equal(got, items[i]):
			return fmt.Errorf("%s in the list at %d is\n%q\nbut it was\n%q", key, l.ResourceVersion, got, items[i])
		}
	}
	if !slices.Equal(order, keys) {
		return fmt.Errorf("the list at %d has %v, want %v", l.ResourceVersion, order, keys)
	}
	return nil
}
