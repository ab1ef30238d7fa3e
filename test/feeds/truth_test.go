// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package feeds

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// A revision is an object from one resourceVersion on; without an item, its
// absence.
type revision struct {
	rv     int64
	item   []byte
	labels map[string]string
}

// A truth is all that a resource has been in one representation, as watches that
// do not go through the hub tell it. It survives a restart of the API server, if
// nothing is written between what it has seen and that.
type truth struct {
	view     *view // whole
	endpoint *rig.Endpoint

	mu      sync.Mutex
	last    int64
	objects map[string][]revision
	stop    context.CancelFunc
	err     error
}

// follow begins to watch. What is known already is only compared.
func (t *truth) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	resp, err := t.endpoint.Get(ctx, rig.With(t.view.path, rig.WatchList), rig.WatchAccept(t.view.accept))
	if err == nil && resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		err = errors.New(resp.Status)
	}
	if err != nil {
		cancel()
		return fmt.Errorf("the truth about %v: %w", t.view, err)
	}
	next := rig.Frames(resp.Body, resp.Header.Get("Content-Type"))
	synced := make(chan struct{})
	t.mu.Lock()
	t.stop, t.err = cancel, nil
	t.mu.Unlock()
	go func() {
		defer resp.Body.Close()
		for {
			ev, err := next()
			if err == nil && ev.Type == "ERROR" {
				err = fmt.Errorf("ERROR %d", ev.Code)
			}
			if err != nil {
				t.mu.Lock()
				t.err = err
				t.mu.Unlock()
				return
			}
			if t.take(ev); ev.Synced {
				close(synced)
			}
		}
	}()
	return process.Poll(ctx, "the truth about "+t.view.name+" is known", func(context.Context) error {
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

func (t *truth) take(ev rig.Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	rv, key := ev.Meta.ResourceVersion, ev.Meta.Key
	t.last = max(t.last, rv)
	known := t.objects[key]
	switch {
	case ev.Type == "BOOKMARK", len(known) > 0 && known[len(known)-1].rv >= rv:
	case ev.Type == "DELETED":
		t.objects[key] = append(known, revision{rv: rv})
	default:
		t.objects[key] = append(known, revision{rv, ev.Item, ev.Meta.Labels})
	}
}

// wait waits until everything up to rv is known; something must have happened at
// rv.
func (t *truth) wait(ctx context.Context, rv int64) error {
	return process.Poll(ctx, fmt.Sprintf("the truth about %v at %d is known", t.view, rv), func(context.Context) error {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.last < rv {
			return errors.Join(fmt.Errorf("it is at %d", t.last), t.err)
		}
		return nil
	})
}

// is says how an event's object differs from what the API server had at its
// resourceVersion.
func (t *truth) is(v *view, ev rig.Event) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range t.objects[ev.Meta.Key] {
		if r.rv != ev.Meta.ResourceVersion {
			continue
		}
		switch {
		case r.item == nil:
			return errors.New("it was deleted at that")
		case !bytes.Equal(r.item, ev.Item):
			return fmt.Errorf("it was %q then", r.item)
		case !v.match(ev.Meta.Key, r.labels):
			return fmt.Errorf("the selector does not match %v", r.labels)
		}
		return nil
	}
	return errors.New("there was nothing at that resourceVersion")
}

// ended says what is wrong with a deletion, of an object that was held in the
// version of heldRV: it carries a version that matched, this one or a later one,
// and is not earlier than the end of that. exact: it is at the very version that
// ended it; else it may be at a list's, later than that.
func (t *truth) ended(v *view, ev rig.Event, heldRV int64) (exact bool, err error) {
	is, err := rig.Timeless(ev.Item, v.protobuf())
	if err != nil {
		return false, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	all := t.objects[ev.Meta.Key]
	for i, r := range all {
		if r.rv < heldRV || r.item == nil || !v.match(ev.Meta.Key, r.labels) || r.rv >= ev.Meta.ResourceVersion {
			continue
		}
		if was, err := rig.Timeless(r.item, v.protobuf()); err != nil || was != is {
			continue
		}
		// The first version from here on that does not match.
		for _, later := range all[i+1:] {
			if later.item != nil && v.match(ev.Meta.Key, later.labels) {
				continue
			}
			switch {
			case later.rv == ev.Meta.ResourceVersion:
				return true, nil
			case later.rv < ev.Meta.ResourceVersion:
				return false, nil
			}
			return false, fmt.Errorf("it ended at %d", later.rv)
		}
		return false, fmt.Errorf("it has not ended since %d", r.rv)
	}
	return false, fmt.Errorf("it was never so since %d", heldRV)
}
