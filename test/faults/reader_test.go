// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/edgehub/edgehub/test/rig"
)

// A reader does what a reflector does: it gets the whole state once, follows it,
// and resumes where it was when its watch has ended.
type reader struct {
	view     *view
	endpoint *rig.Endpoint
	events   *atomic.Int64 // counts all readers'

	mu      sync.Mutex
	synced  bool
	rv      int64
	objects map[string][]byte

	life             int // of the hub that the watch is of
	resumed, started int
}

// state returns what the reader holds, as a list.
func (r *reader) state() (rig.List, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := rig.List{ResourceVersion: r.rv, Protobuf: r.view.form() != "json"}
	for _, key := range slices.Sorted(maps.Keys(r.objects)) {
		l.Items = append(l.Items, r.objects[key])
	}
	return l, r.synced
}

// run follows until ctx ends. Only what must never happen is an error.
func (r *reader) run(ctx context.Context) error {
	tick := time.NewTicker(retryPeriod)
	defer tick.Stop()
	for {
		if err := r.watch(ctx); err != nil {
			return fmt.Errorf("watch of %v: %w", r.view, err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func (r *reader) watch(ctx context.Context) error {
	path := r.view.path + "&" + rig.WatchList
	if r.synced {
		path = fmt.Sprintf("%s&watch=1&allowWatchBookmarks=true&timeoutSeconds=3000&resourceVersion=%d", r.view.path, r.rv)
	}
	r.life = r.view.now()
	resp, err := r.endpoint.Get(ctx, strings.Replace(path, "?&", "?", 1), rig.WatchAccept(r.view.accept))
	if err != nil {
		return nil // the hub is dead
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
	case http.StatusGone:
		r.forget()
		return nil
	case http.StatusServiceUnavailable, http.StatusBadGateway, http.StatusGatewayTimeout, http.StatusTooManyRequests:
		return nil
	default:
		return fmt.Errorf("status %d", resp.StatusCode)
	}
	r.begin()
	next := rig.Frames(resp.Body, resp.Header.Get("Content-Type"))
	for {
		ev, err := next()
		if err != nil {
			return nil // the hub is dead, or the watch is over
		}
		r.events.Add(1)
		if ev.Type == "ERROR" {
			if ev.Code == http.StatusGone {
				r.forget()
			}
			return nil
		}
		if err := r.take(ev); err != nil {
			return err
		}
	}
}

// begin counts a watch that was taken.
func (r *reader) begin() {
	if !r.synced {
		r.forget() // what a first sync left that did not come to its end
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.synced {
		r.started++
		return
	}
	r.resumed++
	r.view.noteRecorded(r.life)
}

func (r *reader) counts() (resumed, started int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.resumed, r.started
}

func (r *reader) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.synced, r.rv, r.objects = false, 0, map[string][]byte{}
}

func (r *reader) take(ev rig.Event) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.synced {
		// A list that overtakes the watch tells of several deletions at once.
		if ev.Meta.ResourceVersion < r.rv || ev.Meta.ResourceVersion == r.rv && ev.Type != "BOOKMARK" && ev.Type != "DELETED" {
			return fmt.Errorf("%s %s at %d after %d", ev.Type, ev.Meta.Key, ev.Meta.ResourceVersion, r.rv)
		}
	}
	switch ev.Type {
	case "BOOKMARK":
		if ev.Synced {
			r.synced = true
			r.view.noteRecorded(r.life)
		}
	case "DELETED":
		delete(r.objects, ev.Meta.Key)
	default:
		r.objects[ev.Meta.Key] = ev.Item
	}
	if r.synced {
		if r.rv = ev.Meta.ResourceVersion; ev.Type != "BOOKMARK" {
			r.view.noteSeen(r.life, ev.Meta.ResourceVersion)
		}
	}
	return nil
}
