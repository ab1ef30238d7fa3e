// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"sync"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// A revision is an object from one resourceVersion on; nil, its absence.
type revision struct {
	rv     int64
	object map[string]any
}

// A truth is all that a resource has been, as a watch that does not go through the hub
// tells it, and what may be in force.
type truth struct {
	resource string
	force    *force

	mu      sync.Mutex
	last    int64
	objects map[string][]revision
	err     error
}

// follow watches until ctx ends, and returns when all that there is is known.
func (t *truth) follow(ctx context.Context, direct *rig.Endpoint) error {
	resp, err := direct.Get(ctx, rig.With(paths[t.resource], rig.WatchList), rig.JSON)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		return fmt.Errorf("the truth about %s: %s", t.resource, resp.Status)
	}
	next := rig.Frames(resp.Body, resp.Header.Get("Content-Type"))
	synced := make(chan struct{})
	go func() {
		defer resp.Body.Close()
		for {
			ev, err := next()
			if err == nil && ev.Type == "ERROR" {
				err = fmt.Errorf("ERROR %d", ev.Code)
			}
			if err = errors.Join(err, t.take(ev, err)); err != nil {
				return
			}
			if ev.Synced {
				close(synced)
			}
		}
	}()
	return process.Poll(ctx, "the truth about "+t.resource+" is known", func(context.Context) error {
		select {
		case <-synced:
			return nil
		default:
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		return errors.Join(errors.New("not yet"), t.err)
	})
}

// take takes an event in, or the end.
func (t *truth) take(ev rig.Event, end error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if end != nil {
		t.err = end
		return nil
	}
	t.last = max(t.last, ev.Meta.ResourceVersion)
	if ev.Type == "BOOKMARK" {
		return nil
	}
	r := revision{rv: ev.Meta.ResourceVersion}
	if ev.Type != "DELETED" {
		r.object, t.err = decode(t.resource, ev.Item, false)
	}
	t.objects[ev.Meta.Key] = append(t.objects[ev.Meta.Key], r)
	return t.err
}

// wait waits until everything up to rv is known; something must have happened at rv.
func (t *truth) wait(ctx context.Context, rv int64) error {
	return process.Poll(ctx, fmt.Sprintf("the truth about %s at %d is known", t.resource, rv), func(context.Context) error {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.last < rv {
			return errors.Join(fmt.Errorf("it is at %d", t.last), t.err)
		}
		return nil
	})
}

func (t *truth) revisions(key string) []revision {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.objects[key])
}

// is says why a client should not have been shown an object.
func (t *truth) is(v *view, got thing) error {
	for _, r := range t.revisions(got.meta.Key) {
		switch {
		case r.rv != got.meta.ResourceVersion:
			continue
		case r.object == nil:
			return errors.New("it was deleted at that")
		case !v.selects(got.meta.Key, r.object):
			return errors.New("the selector does not match it")
		}
		return t.force.allows(v, r.object, got.object)
	}
	return errors.New("there was nothing at that resourceVersion")
}

// ended says why a client that has held an object should not have been told of its end
// like this: with what it has held, or with a later state that it might have been shown.
func (t *truth) ended(v *view, got, held thing) error {
	is := timeless(got.object)
	if reflect.DeepEqual(is, timeless(held.object)) {
		return nil
	}
	err := errors.New("it was never so since then")
	for _, r := range t.revisions(got.meta.Key) {
		if r.object == nil || r.rv < held.meta.ResourceVersion || r.rv >= got.meta.ResourceVersion || !v.selects(got.meta.Key, r.object) {
			continue
		}
		if err = t.force.allows(v, timeless(r.object), is); err == nil {
			return nil
		}
	}
	return err
}

// timeless is an object without its resourceVersion, which is another one in a DELETED.
func timeless(o map[string]any) map[string]any {
	o = maps.Clone(o)
	if m, ok := o["metadata"].(map[string]any); ok {
		m = maps.Clone(m)
		delete(m, "resourceVersion")
		o["metadata"] = m
	}
	return o
}

// A force is what may be in force: exactly one configuration and one pool since a quiet
// point, and what they have become since then.
type force struct {
	mu        sync.Mutex
	documents []document
	pools     []string
}

func (f *force) rest(d document, pool string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.documents, f.pools = []document{d}, []string{pool}
}

func (f *force) becomes(d ...document) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.documents = append(f.documents, d...)
}

func (f *force) joins(pool string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.pools = append(f.pools, pool)
}

// moved reports whether there was another pool since the last quiet point.
func (f *force) moved() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.pools) > 1
}

// allows says why nothing that may be in force makes what a client was shown of an object.
func (f *force) allows(v *view, object, got map[string]any) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	var err error
	for _, d := range f.documents {
		for _, pool := range f.pools {
			want := d.view(v, object, pool)
			if want != nil && reflect.DeepEqual(want, got) {
				return nil
			}
			if want == nil {
				err = errors.New("it is to be withheld")
			} else {
				err = fmt.Errorf("it is to be %v, not %v", want, got)
			}
		}
	}
	return fmt.Errorf("%w; %d configurations and the pools %q may be in force", err, len(f.documents), f.pools)
}
