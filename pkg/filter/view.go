// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bytes"
	"maps"
	"net/url"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/resourceversion"

	"github.com/edgehub/edgehub/pkg/codec"
)

const (
	// maxHeldBytes bounds what is remembered of objects that watchers hold, so that a
	// DELETED can carry them; beyond, a watcher that is to lose one lists again.
	maxHeldBytes = 16 << 20
	// maxViews bounds how many ends of lists and watches are remembered, and maxViewsEach
	// how many of one kind; a client whose own is forgotten lists again.
	maxViews     = 1024
	maxViewsEach = 8
	// viewAge is for how long they are.
	viewAge = 30 * time.Minute
	// claimAge is how long a client is expected back that has been shown something by other
	// filters, where its resourceVersion does not tell it from one that has been shown what
	// there is by those of now: longer than clients wait between two tries.
	claimAge = 2 * time.Minute
)

// A view is what a client has been shown by a list or a watch: who resumes a watch goes on
// from one. Fields are guarded by the lock of its sessions.
type view struct {
	sessions *sessions
	pipeline *pipeline
	rep      codec.Representation // of what is held
	from, to string               // resourceVersions; "" nothing yet
	last     string               // the one that came last
	held     map[string][]byte    // at last; nil: nothing is withheld
	bytes    int
	used     time.Time
	live     bool // a watch is under way
	gone     bool // takes no room any more
	stale    bool // what it says is not what is shown now
	unknown  bool // and at which resourceVersion is not known
	claims   int  // how many clients may be at it, besides that of the watch
	told     bool // the client of the watch has been told to list again
}

// newView begins a view. What the client holds is remembered only where it can be asked
// to give it up.
func (c *Chain) newView(p *pipeline, rep codec.Representation) *view {
	v := &view{sessions: c.sessions, pipeline: p, rep: rep}
	if p.withholds() {
		v.held = map[string][]byte{}
	}
	return v
}

// begin makes it the view of a watch, in a form that may not be that of the list before.
func (v *view) begin(rep codec.Representation) {
	v.sessions.mu.Lock()
	defer v.sessions.mu.Unlock()
	if v.live = true; v.rep != rep {
		v.rep = rep
		v.sessions.bytes -= v.bytes
		v.bytes = 0
		for key := range v.held {
			v.held[key] = nil
		}
	}
}

// hold notes that the client has been shown an object, and reports whether it had been
// before. At rv it may resume; "": it may not.
func (v *view) hold(key string, bare []byte, rv string) (held bool) {
	v.sessions.mu.Lock()
	defer v.sessions.mu.Unlock()
	v.reachLocked(rv)
	if v.held == nil {
		return false
	}
	_, held = v.held[key]
	v.drop(key)
	if v.gone || v.sessions.bytes+len(bare) > maxHeldBytes {
		v.held[key] = nil
		return held
	}
	v.held[key] = bytes.Clone(bare)
	v.bytes += len(bare)
	v.sessions.bytes += len(bare)
	return held
}

// holds returns what the client has been shown of an object; nil if that is not remembered.
func (v *view) holds(key string) (bare []byte, held bool) {
	v.sessions.mu.Lock()
	defer v.sessions.mu.Unlock()
	bare, held = v.held[key]
	return bare, held
}

// release notes that it is told that the object is gone, and that it may resume at rv.
func (v *view) release(key, rv string) {
	v.sessions.mu.Lock()
	defer v.sessions.mu.Unlock()
	v.drop(key)
	v.reachLocked(rv)
}

// drop forgets an object. The caller holds the lock.
func (v *view) drop(key string) {
	n := len(v.held[key])
	delete(v.held, key)
	v.bytes -= n
	v.sessions.bytes -= n
}

// reach notes a resourceVersion that the client may resume at.
func (v *view) reach(rv string) {
	v.sessions.mu.Lock()
	defer v.sessions.mu.Unlock()
	v.reachLocked(rv)
}

func (v *view) reachLocked(rv string) {
	if rv == "" {
		return
	}
	v.last = rv
	if v.from == "" || less(rv, v.from) {
		v.from = rv
	}
	if v.to == "" || less(v.to, rv) {
		v.to = rv
	}
}

func less(a, b string) bool {
	c, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && c < 0
}

// spans reports whether rv is one that the client may be at, or may have been at.
func (v *view) spans(rv string) bool {
	return v.last == rv || v.from == rv || v.to == rv || less(v.from, rv) && less(rv, v.to)
}

// reaches reports whether a client at rv holds what the view says. Where objects are
// withheld that is known of the very end only.
func (v *view) reaches(rv string) bool { return v.last == rv || v.held == nil && v.spans(rv) }

// outdated reports whether what it says is not what is shown now, for good.
func (v *view) outdated() bool {
	v.stale = v.stale || !v.pipeline.current()
	return v.stale
}

// claimed reports whether a client at rv may be one that has been shown what the view
// says, and that has neither come back since nor been told to list again.
func (v *view) claimed(rv string, now time.Time) bool {
	return (v.live && !v.told || v.claims > 0 && now.Sub(v.used) <= claimAge) && (v.unknown || v.spans(rv))
}

// sessions are the views that clients may resume from.
type sessions struct {
	mu    sync.Mutex // guards all views too
	byKey map[string][]*view
	n     int
	bytes int
}

func newSessions() *sessions { return &sessions{byKey: map[string][]*view{}} }

// put remembers a view, in place of ended ones that are no longer of use.
func (s *sessions) put(key string, v *view) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v.used = time.Now()
	if s.n >= maxViews {
		s.sweep(v.used)
	}
	list := slices.DeleteFunc(s.byKey[key], func(o *view) bool {
		useless := !o.live && o.replaced(v)
		if useless {
			s.forget(o)
		}
		return useless
	})
	if len(list) >= maxViewsEach {
		if at := slices.IndexFunc(list, func(o *view) bool { return !o.live }); at >= 0 {
			s.forget(list[at])
			list = slices.Delete(list, at, at+1)
		}
	}
	s.byKey[key] = append(list, v)
	s.n++
}

// replaced reports whether a view that has ended is of no use beside a newer one, which
// then stands for its clients too. The caller holds the lock.
func (v *view) replaced(newer *view) bool {
	age := newer.used.Sub(v.used)
	if v.outdated() {
		v.empty()
		if v.unknown && newer.unknown {
			newer.claims += v.claims
			return true
		}
		return v.claims == 0 || age > claimAge
	}
	if age > viewAge {
		return true
	}
	if newer.stale || v.last == "" || v.last != newer.last {
		return false
	}
	if age <= claimAge {
		newer.claims += v.claims
	}
	if less(v.from, newer.from) {
		newer.from = v.from
	}
	return true
}

// sweep forgets what has ended long ago or, if that is too little, all that has ended. The
// caller holds mu.
func (s *sessions) sweep(now time.Time) {
	for _, age := range []time.Duration{viewAge, 0} {
		if s.n < maxViews {
			return
		}
		for key, list := range s.byKey {
			list = slices.DeleteFunc(list, func(o *view) bool {
				old := !o.live && now.Sub(o.used) >= age
				if old {
					s.forget(o)
				}
				return old
			})
			if s.byKey[key] = list; len(list) == 0 {
				delete(s.byKey, key)
			}
		}
	}
}

// forget gives back what a view takes. The caller holds mu and takes it off its list.
func (s *sessions) forget(v *view) {
	v.empty()
	v.gone = true
	s.n--
}

// empty gives up what is remembered of objects. The caller holds the lock.
func (v *view) empty() {
	v.sessions.bytes -= v.bytes
	v.bytes = 0
	clear(v.held)
}

// resume returns a view that begins where a client at rv is, nil if that is not known, or
// if it may as well be a client that has been shown something else.
func (s *sessions) resume(u *url.URL, rv string, p *pipeline) *view {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.doubts(u, rv, p.request) {
		return nil
	}
	var at *view // with as much as is remembered of objects
	for _, old := range s.of(p.request, u) {
		if old.reaches(rv) && (old.held != nil) == p.withholds() && !old.outdated() && (at == nil || at.bytes < old.bytes) {
			at = old
		}
	}
	if at == nil {
		return nil
	}
	v := &view{sessions: s, pipeline: p, rep: at.rep, from: rv, to: rv, last: rv, held: maps.Clone(at.held), bytes: at.bytes}
	s.bytes += v.bytes
	return v
}

// of returns the views of who watches the same. The caller holds mu.
func (s *sessions) of(r *Request, u *url.URL) []*view {
	return slices.Concat(s.byKey[sessionKey(r, u, codec.Representation{Protobuf: true})], s.byKey[sessionKey(r, u, codec.Representation{})])
}

// doubts reports whether a client that comes back at rv may be one that has been shown
// what is outdated. If nobody else can be meant, its claim is settled: it goes on, or it is
// told to list again. The caller holds mu.
func (s *sessions) doubts(u *url.URL, rv string, r *Request) (doubt bool) {
	var claims []*view
	for _, v := range s.of(r, u) {
		if v.claimed(rv, time.Now()) {
			claims = append(claims, v)
			doubt = v.outdated() || doubt
		}
	}
	if len(claims) == 1 && !claims[0].live {
		claims[0].claims--
	}
	return doubt
}

// doubtful does for a client of whose answers nothing is known what resume does.
func (s *sessions) doubtful(u *url.URL, rv string, r *Request) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.doubts(u, rv, r)
}

// discard gives up a view that was not put.
func (s *sessions) discard(v *view) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v.empty()
	v.gone = true
}

// tell notes that the client of a watch is told to list again.
func (s *sessions) tell(v *view) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v.told = true
}

// end notes that a watch is over.
func (s *sessions) end(v *view) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !v.live {
		return
	}
	if v.live, v.used = false, time.Now(); !v.told {
		v.claims++
	}
}
