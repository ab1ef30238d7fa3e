// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package offline

import (
	"fmt"
	"net/http"
	"time"

	"github.com/edgehub/edgehub/test/rig"
)

// hearWithin is for an event that must come.
const hearWithin = 30 * time.Second

// A watch is one that lasts as long as the test.
type watch struct {
	endpoint     *rig.Endpoint
	path, accept string
	frames       chan rig.Event // closed when the watch has ended
	seen         []int64        // resourceVersions of what has come since the state
	last         int64          // resourceVersion of all that has come
}

// watch opens a watch that begins with the state.
func (w *world) watch(e *rig.Endpoint, path, accept string) *watch {
	w.T.Helper()
	x := &watch{endpoint: e, path: path, accept: accept}
	x.open(w, rig.WatchList)
	return x
}

func (x *watch) open(w *world, parameters string) {
	w.T.Helper()
	start := time.Now()
	resp, err := x.endpoint.Get(w.ctx, rig.With(x.path, parameters), rig.WatchAccept(x.accept))
	w.Must(err)
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		w.T.Fatalf("watch %s = %d", x.path, resp.StatusCode)
	}
	if took := time.Since(start); took > hearWithin {
		w.T.Errorf("watch %s took %v to begin", x.path, took)
	}
	frames := make(chan rig.Event, 1000)
	x.frames = frames
	next := rig.Frames(resp.Body, resp.Header.Get("Content-Type"))
	go func() {
		defer close(frames)
		defer resp.Body.Close()
		for {
			e, err := next()
			if err != nil {
				return
			}
			select {
			case frames <- e:
			case <-w.ctx.Done():
				return
			}
		}
	}()
}

// again opens the watch anew where it was, as a client does that lost it.
func (x *watch) again(w *world) {
	w.T.Helper()
	x.open(w, fmt.Sprintf("watch=1&allowWatchBookmarks=true&timeoutSeconds=3000&resourceVersion=%d", x.last))
}

// next waits for a frame.
func (x *watch) next(w *world) (e rig.Event, ok bool) {
	w.T.Helper()
	select {
	case e, ok = <-x.frames:
		x.last = max(x.last, e.Meta.ResourceVersion)
		return e, ok
	case <-time.After(hearWithin):
		w.T.Fatalf("watch %s: nothing came for %v", x.path, hearWithin)
		return e, false
	}
}

// sync reads the state.
func (x *watch) sync(w *world) {
	w.T.Helper()
	for {
		if e, ok := x.next(w); !ok {
			w.T.Fatalf("watch %s ended before its state was there", x.path)
		} else if e.Synced {
			return
		}
	}
}

// wants waits until exactly these have come since the state, bookmarks aside.
func (x *watch) wants(w *world, want []int64) {
	w.T.Helper()
	for len(x.seen) < len(want) {
		e, ok := x.next(w)
		if !ok {
			w.T.Fatalf("watch %s ended; it has seen %d, want %d", x.path, x.seen, want)
		}
		if e.Type != "BOOKMARK" {
			x.seen = append(x.seen, e.Meta.ResourceVersion)
		}
		if n := len(x.seen); n > 0 && x.seen[n-1] != want[n-1] {
			w.T.Fatalf("watch %s has seen %d, want %d", x.path, x.seen, want)
		}
	}
}

// silent wants that nothing has come, and that the watch goes on.
func (x *watch) silent(w *world) {
	w.T.Helper()
	for {
		select {
		case e, ok := <-x.frames:
			if !ok {
				w.T.Errorf("watch %s has ended, want it to stay open", x.path)
				return
			}
			x.last = max(x.last, e.Meta.ResourceVersion)
			if e.Type != "BOOKMARK" {
				w.T.Errorf("watch %s has %s of %s, code %d, want nothing: %.300q", x.path, e.Type, e.Meta.Key, e.Code, e.Item)
			}
		default:
			return
		}
	}
}

// ended waits until the watch is over.
func (x *watch) ended(w *world) {
	w.T.Helper()
	for {
		if _, ok := x.next(w); !ok {
			return
		}
	}
}
