// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/edgehub/edgehub/test/rig"
)

// retryPeriod is between two tries of a follower.
const retryPeriod = 20 * time.Millisecond

var paths = map[string]string{"configmaps": "/api/v1/configmaps", "services": "/api/v1/services", "widgets": "/apis/example.com/v1/widgets"}

// A view is what a program of somebody's watches, in one form.
type view struct {
	resource  string
	selector  string // of what is below: "", even, in a, one
	protobuf  bool
	byNode    bool
	program   string
	watchList bool
}

func (v *view) String() string {
	return fmt.Sprintf("%s/%s protobuf=%t %s of node=%t WatchList=%t", v.resource, v.selector, v.protobuf, v.program, v.byNode, v.watchList)
}

func (v *view) accept() string {
	if v.protobuf {
		return rig.Protobuf
	}
	return rig.JSON
}

func (v *view) path() string {
	path := paths[v.resource]
	inA := strings.Replace(path, "/"+v.resource, "/namespaces/a/"+v.resource, 1)
	switch v.selector {
	case "even":
		return path + "?labelSelector=parity%3Deven"
	case "in a":
		return inA
	case "one":
		return inA + "?fieldSelector=metadata.name%3Do-03"
	}
	return path
}

// selects is what the path says, which filters have nothing to do with.
func (v *view) selects(key string, object map[string]any) bool {
	switch v.selector {
	case "even":
		return textOf(object, "metadata", "labels", "parity") == "even"
	case "in a":
		return strings.HasPrefix(key, "a/")
	case "one":
		return key == "a/o-03"
	}
	return true
}

// views are of every shape; some differ in nothing but how they begin.
func views() []*view {
	return []*view{
		{"configmaps", "", true, true, "alpha", true},
		{"configmaps", "", false, false, "alpha", false},
		{"configmaps", "", false, false, "alpha", true},
		{"configmaps", "even", true, false, "beta", false},
		{"configmaps", "in a", false, true, "beta", true},
		{"configmaps", "one", true, false, "gamma", false},
		{"configmaps", "", true, true, "delta", true},
		{"services", "", true, true, "alpha", false},
		{"services", "", true, true, "alpha", true},
		{"services", "even", false, false, "beta", true},
		{"services", "in a", false, true, "gamma", false},
		{"services", "", false, true, "delta", false},
		{"widgets", "", false, true, "beta", true},
		{"widgets", "even", false, false, "alpha", false},
		{"widgets", "", false, false, "delta", true},
		{"widgets", "", false, true, "delta", false},
	}
}

// A thing is an object as a client was shown it.
type thing struct {
	meta   rig.Meta
	object map[string]any
}

// A follower does what a reflector does: it gets the whole state, follows it, and resumes
// where it was when its watch has ended. What it is shown must be what one of the
// configurations that may be in force makes of what there was, and go on from what it has.
type follower struct {
	*view
	truth    *truth
	endpoint *rig.Endpoint

	mu       sync.Mutex
	held     map[string]thing
	rv       int64 // that it has reached
	synced   bool
	resumed  int64 // resourceVersion that the stream began at
	trace    []string
	problems []string
	hangUp   context.CancelFunc // ends the stream

	streams, starts, events, expired int
}

// run follows until ctx ends.
func (f *follower) run(ctx context.Context) {
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
			return
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
	resp, err := f.endpoint.Get(ctx, rig.With(f.path(), query), f.accept())
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return f.refused(resp.StatusCode)
	}
	f.begin()
	next := rig.Frames(resp.Body, resp.Header.Get("Content-Type"))
	for {
		ev, err := next()
		if err != nil {
			return err
		}
		if ev.Type == "ERROR" {
			return f.refused(ev.Code)
		}
		if err := f.take(ev); err != nil {
			return err
		}
	}
}

// refused judges a refusal: some are a part of life.
func (f *follower) refused(code int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch code {
	case http.StatusGone:
		f.note("410")
		f.expired++
		f.synced, f.rv, f.held = false, 0, map[string]thing{}
	case http.StatusServiceUnavailable, http.StatusBadGateway, http.StatusGatewayTimeout, http.StatusTooManyRequests:
	default:
		f.problem("a refusal: %d", code)
	}
	return fmt.Errorf("refused with %d", code)
}

// list gets the whole state as a reflector without WatchList does.
func (f *follower) list(ctx context.Context) error {
	l, status, err := f.endpoint.List(ctx, rig.With(f.path(), "resourceVersion=0"), f.accept())
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return f.refused(status)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.starts++
	f.note("LIST at %d", l.ResourceVersion)
	if f.rv = l.ResourceVersion; f.rv == 0 {
		f.problem("a list at 0")
	}
	f.held, f.synced = map[string]thing{}, true
	for _, item := range l.Items {
		got, err := f.read(item, l.Protobuf)
		if err != nil {
			return err
		}
		f.held[got.meta.Key] = got
		f.judge("listed", got)
	}
	return nil
}

func (f *follower) read(item []byte, protobuf bool) (got thing, err error) {
	if got.meta, err = rig.ReadMeta(item, protobuf); err != nil {
		return got, err
	}
	got.object, err = decode(f.resource, item, protobuf)
	return got, err
}

func (f *follower) begin() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.streams++
	f.resumed = f.rv
	if !f.synced {
		f.starts++
		f.held, f.rv, f.resumed = map[string]thing{}, 0, 0
	}
	f.note("WATCH at %d", f.resumed)
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
func (f *follower) take(ev rig.Event) error {
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
			f.synced, f.rv = true, rv
		}
		return nil
	}
	got, err := f.read(ev.Item, f.protobuf)
	if err != nil {
		return err
	}
	old, held := f.held[key]
	switch {
	case ev.Type == "DELETED" && !held && rv == f.resumed:
		// What a list found gone is gone at one resourceVersion; who resumes there is told
		// of all of it, because nobody knows which part was told before.
		return nil
	case held != (ev.Type != "ADDED"):
		f.problem("%s %s at %d, and it is held: %v, at %d", ev.Type, key, rv, held, old.meta.ResourceVersion)
	case held && rv <= old.meta.ResourceVersion:
		f.problem("%s %s at %d after %d", ev.Type, key, rv, old.meta.ResourceVersion)
	}
	if ev.Type == "DELETED" {
		delete(f.held, key)
		if err := patiently(func() error { return f.truth.ended(f.view, got, old) }); err != nil {
			f.problem("DELETED %s at %d, held at %d: %v; it came as %q", key, rv, old.meta.ResourceVersion, err, ev.Item)
		}
		return nil
	}
	f.held[key] = got
	f.judge(ev.Type, got)
	return nil
}

// truthPatience is how far the truth may be behind the hub.
const truthPatience = 5 * time.Second

// judge compares with the truth, which may be a moment behind. The caller holds mu.
func (f *follower) judge(how string, got thing) {
	if err := patiently(func() error { return f.truth.is(f.view, got) }); err != nil {
		f.problem("%s %s at %d: %v", how, got.meta.Key, got.meta.ResourceVersion, err)
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

// agrees says how the follower differs from what a document makes of what the API server
// says. It counts what is withheld and changed of that.
func (f *follower) agrees(ctx context.Context, direct *rig.Endpoint, d document, pool string) (withheld, changed int, err error) {
	l, status, err := direct.List(ctx, f.path(), rig.JSON)
	if err != nil || status != http.StatusOK {
		return 0, 0, fmt.Errorf("list directly: %d %w", status, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.synced {
		return 0, 0, errors.New("it has no state")
	}
	left := len(f.held)
	for _, item := range l.Items {
		is, err := f.read(item, false)
		if err != nil {
			return 0, 0, err
		}
		want := d.view(f.view, is.object, pool)
		got, ok := f.held[is.meta.Key]
		switch {
		case ok != (want != nil):
			return 0, 0, fmt.Errorf("%s is held: %v, want %v", is.meta.Key, ok, !ok)
		case !ok:
			withheld++
			continue
		case !reflect.DeepEqual(got.object, want):
			return 0, 0, fmt.Errorf("%s is %v, want %v", is.meta.Key, got.object, want)
		case !reflect.DeepEqual(want, is.object):
			changed++
		}
		left--
	}
	if left > 0 {
		return 0, 0, fmt.Errorf("%d of the %d objects that are held are there no more", left, len(f.held))
	}
	return withheld, changed, nil
}
