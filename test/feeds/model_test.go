// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package feeds

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/edgehub/edgehub/test/rig"
)

// retryPeriod is between two tries of a follower.
const retryPeriod = 20 * time.Millisecond

// A follower does what a reflector does: it gets the whole state, follows it, and
// resumes where it was when its watch has ended. Each event must be one that a real
// API server could have sent to somebody who has what the follower has.
type follower struct {
	view      *view
	truth     *truth
	endpoint  *rig.Endpoint
	watchList bool

	mu       sync.Mutex
	held     map[string]rig.Event // what it has, by name
	rv       int64                // that it has reached
	synced   bool
	resumed  int64 // resourceVersion that the stream began at
	trace    []string
	problems []string
	began    time.Time          // when it got its state
	expired  []expiry           // when it was told to start again
	hangUp   context.CancelFunc // ends the stream

	streams, starts, events, late int
}

// An expiry is a 410, to a follower that had its state since began.
type expiry struct{ at, began time.Time }

// run follows until ctx ends.
func (f *follower) run(ctx context.Context) error {
	tick := time.NewTicker(retryPeriod)
	defer tick.Stop()
	for {
		if err := f.once(ctx); err != nil && ctx.Err() == nil && !errors.Is(err, syscall.ECONNREFUSED) {
			f.mu.Lock()
			f.note("%v", err)
			f.mu.Unlock()
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// once makes one request: a list, or a watch to its end.
func (f *follower) once(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	f.mu.Lock()
	f.hangUp = cancel
	synced, rv := f.synced, f.rv
	f.mu.Unlock()
	if !synced && !f.watchList {
		return f.list(ctx)
	}
	query := rig.WatchList
	if synced {
		query = fmt.Sprintf("watch=1&allowWatchBookmarks=true&timeoutSeconds=3000&resourceVersion=%d", rv)
	}
	resp, err := f.endpoint.Get(ctx, rig.With(f.view.path, query), rig.WatchAccept(f.view.accept))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusGone {
		f.forget()
	}
	if resp.StatusCode != http.StatusOK {
		return f.unusual(resp.StatusCode)
	}
	f.begin()
	next := rig.Frames(resp.Body, resp.Header.Get("Content-Type"))
	for {
		ev, err := next()
		if err != nil {
			return err
		}
		if ev.Type == "ERROR" {
			if ev.Code == http.StatusGone {
				f.forget()
			}
			return f.unusual(ev.Code)
		}
		f.take(ev)
	}
}

// unusual judges a refusal: some are a part of life.
func (f *follower) unusual(code int) error {
	switch code {
	case http.StatusGone, http.StatusServiceUnavailable, http.StatusBadGateway, http.StatusGatewayTimeout, http.StatusTooManyRequests:
	default:
		f.mu.Lock()
		defer f.mu.Unlock()
		f.problem("a refusal: %d", code)
	}
	return fmt.Errorf("refused with %d", code)
}

// list gets the whole state as a reflector without WatchList does.
func (f *follower) list(ctx context.Context) error {
	l, status, err := f.endpoint.List(ctx, rig.With(f.view.path, "resourceVersion=0"), f.view.accept)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return f.unusual(status)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.starts++
	f.note("LIST at %d", l.ResourceVersion)
	if f.rv = l.ResourceVersion; f.rv == 0 {
		f.problem("a list at 0")
	}
	f.held, f.synced, f.began = map[string]rig.Event{}, true, time.Now()
	for _, item := range l.Items {
		m, err := rig.ReadMeta(item, l.Protobuf)
		if err != nil {
			return err
		}
		f.held[m.Key] = rig.Event{Type: "ADDED", Meta: m, Item: item}
	}
	return nil
}

func (f *follower) begin() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.streams++
	f.resumed = f.rv
	if !f.synced {
		f.starts++
		f.held, f.rv, f.resumed = map[string]rig.Event{}, 0, 0
	}
	f.note("WATCH at %d", f.resumed)
}

func (f *follower) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.note("410")
	f.expired = append(f.expired, expiry{at: time.Now(), began: f.began})
	f.synced, f.rv, f.held = false, 0, map[string]rig.Event{}
}

// note keeps the last of what happened. The caller holds mu.
func (f *follower) note(format string, args ...any) {
	const most = 30
	f.trace = append(f.trace, time.Now().Format("15:04:05.000 ")+fmt.Sprintf(format, args...))
	if n := len(f.trace) - most; n > 0 {
		f.trace = slices.Delete(f.trace, 0, n)
	}
}

// problem keeps what must not be. The caller holds mu.
func (f *follower) problem(format string, args ...any) {
	if len(f.problems) < 3 {
		f.problems = append(f.problems, fmt.Sprintf("%v: %s\n%q", f.view, fmt.Sprintf(format, args...), f.trace))
	}
}

// take judges an event and takes it in.
func (f *follower) take(ev rig.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	key, rv := ev.Meta.Key, ev.Meta.ResourceVersion
	f.note("%s %s %d", ev.Type, key, rv)
	f.events++
	if f.synced && rv < f.rv {
		f.problem("%s %s at %d after %d", ev.Type, key, rv, f.rv)
	}
	if f.synced {
		f.rv = max(f.rv, rv)
	}
	if ev.Type == "BOOKMARK" {
		if ev.Synced {
			f.synced, f.rv, f.began = true, rv, time.Now()
		}
		return
	}
	old, held := f.held[key]
	// What a list found gone is gone at one resourceVersion; who resumes there is
	// told of all of it, because nobody knows which part was told before.
	again := ev.Type == "DELETED" && !held && rv == f.resumed
	switch {
	case again:
		return
	case held != (ev.Type != "ADDED"):
		f.problem("%s %s at %d, and it is held: %v, at %d", ev.Type, key, rv, held, old.Meta.ResourceVersion)
	case held && rv <= old.Meta.ResourceVersion:
		f.problem("%s %s at %d after %d", ev.Type, key, rv, old.Meta.ResourceVersion)
	}
	if ev.Type == "DELETED" {
		f.judgeEnd(ev, old)
		delete(f.held, key)
		return
	}
	f.held[key] = ev
	f.judge(ev)
}

// truthPatience is how far the truth may be behind the hub.
const truthPatience = 5 * time.Second

// judge compares with the truth, which may be a moment behind. The caller holds
// mu.
func (f *follower) judge(ev rig.Event) {
	if err := patiently(func() error { return f.truth.is(f.view, ev) }); err != nil {
		f.problem("%s %s at %d: %v; it came as %q", ev.Type, ev.Meta.Key, ev.Meta.ResourceVersion, err, ev.Item)
	}
}

func (f *follower) judgeEnd(ev, old rig.Event) {
	err := patiently(func() error {
		exact, err := f.truth.ended(f.view, ev, old.Meta.ResourceVersion)
		if err == nil && !exact {
			f.late++
		}
		return err
	})
	if err != nil {
		f.problem("DELETED %s at %d, held at %d: %v; it came as %q", ev.Meta.Key, ev.Meta.ResourceVersion, old.Meta.ResourceVersion, err, ev.Item)
	}
}

// patiently waits until there is no error, or for long enough.
func patiently(condition func() error) error {
	deadline := time.Now().Add(truthPatience)
	for {
		err := condition()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		<-time.After(5 * time.Millisecond)
	}
}

// drop ends the follower's stream from its own side.
func (f *follower) drop() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.hangUp != nil {
		f.hangUp()
	}
}

// agrees says how the follower differs from the API server.
func (f *follower) agrees(ctx context.Context, direct *rig.Endpoint) error {
	want, err := stateOf(ctx, direct, f.view)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.synced {
		return errors.New("it has no state")
	}
	for key, item := range want.items {
		switch got, ok := f.held[key]; {
		case !ok:
			return fmt.Errorf("%s is missing", key)
		case !bytes.Equal(got.Item, item):
			return fmt.Errorf("%s is %q, want %q", key, got.Item, item)
		}
	}
	for key := range f.held {
		if want.items[key] == nil {
			return fmt.Errorf("%s is there no more", key)
		}
	}
	return nil
}
