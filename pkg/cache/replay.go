// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/cache/journal"
)

// A replay builds a log from its journal.
type replay struct {
	l         *log
	byID      map[uint32]*scope
	responses map[string]*record
	seals     map[uint32]string // of scopes
	lastID    uint32
	bad       map[uint32]bool
	all       bool
}

func (r *replay) damaged(id uint32) {
	if r.bad == nil {
		r.bad = map[uint32]bool{}
	}
	r.bad[id] = true
}

func (r *replay) damagedAll() { r.all = true }

func (r *replay) batch(entries []journal.Entry, refs []journal.Ref) {
	for i, e := range entries {
		if err := r.entry(e, refs[i]); err != nil {
			r.damaged(e.Scope)
		}
	}
}

func (r *replay) entry(e journal.Entry, ref journal.Ref) error {
	r.lastID = max(r.lastID, e.Scope)
	switch e.Kind {
	case entryState:
		return r.state(e)
	case entryResponse, entryForget:
		return r.response(e, ref)
	}
	s := r.byID[e.Scope]
	if s == nil {
		// The state entry of a new scope comes first in its batch.
		return fmt.Errorf("entry of scope %d, which is not there", e.Scope)
	}
	switch e.Kind {
	case entryClear:
		s.objects, s.tombs = map[string]*object{}, nil
		return nil
	case entryAdvance:
		if s.rv = string(e.Meta); !validRV(s.rv) {
			return errObjectMeta
		}
		return nil
	case entryDrop:
		delete(r.byID, e.Scope)
		return nil
	}
	o, err := decodeObjectMeta(e.Meta)
	if err != nil {
		return err
	}
	o.ref, o.size = ref, int32(ref.Length)
	switch e.Kind {
	case entryPut:
		s.objects[o.key] = o
	case entryTomb:
		o.deleted = true
		delete(s.objects, o.key)
		s.tombs = append(s.tombs, o)
	case entryRemove:
		delete(s.objects, o.key)
	default:
		return fmt.Errorf("entry of unknown kind %d", e.Kind)
	}
	return nil
}

func (r *replay) state(e journal.Entry) error {
	var m stateMeta
	if err := json.Unmarshal(e.Meta, &m); err != nil {
		return err
	}
	s := r.byID[e.Scope]
	if s == nil {
		s = &scope{
			log: r.l, id: e.Scope, onDisk: true,
			objects: map[string]*object{}, dirty: map[string]*object{}, watchers: map[*watcher]struct{}{},
		}
		r.byID[e.Scope] = s
	}
	s.key, s.single, s.shape = m.Key, m.Single, m.Shape
	s.rv, s.reach, s.open, s.gaps, s.complete, s.pinned = m.RV, m.Reach, m.Open, m.Gaps, m.Complete, m.Pinned
	s.used, s.seen, s.seenOnDisk = time.Unix(m.Used, 0), time.Unix(m.Seen, 0), time.Unix(m.Seen, 0)
	r.seals[e.Scope] = m.Seal
	return nil
}

func (r *replay) response(e journal.Entry, ref journal.Ref) error {
	var m responseMeta
	if err := json.Unmarshal(e.Meta, &m); err != nil {
		return err
	}
	if e.Kind == entryForget {
		delete(r.responses, m.id())
		return nil
	}
	r.responses[m.id()] = &record{responseMeta: m, ref: ref, used: time.Unix(m.Time, 0), seen: time.Unix(m.Time, 0)}
	return nil
}

// finish keeps what the replay can vouch for. A scope that may be short goes. The
// caller holds the log's lock.
func (r *replay) finish(logger klog.Logger) {
	if r.checkSeals(logger) {
		return
	}
	damaged := 0
	for id, s := range r.byID {
		if r.all || r.bad[id] || !s.single && !s.complete {
			if r.all || r.bad[id] {
				r.l.c.metrics.damaged.Inc()
				damaged++
			}
			r.l.dropped = append(r.l.dropped, journal.Entry{Scope: id, Kind: entryDrop})
			continue
		}
		for _, o := range s.objects {
			s.bytes += int64(o.size)
		}
		if n := len(s.tombs) - maxTombstones; n > 0 {
			s.reach, s.open = s.tombs[n-1].rv, true
			s.tombs = s.tombs[n:]
		}
		if s.single {
			r.l.single[s.key.Representation] = s
		} else {
			r.l.scopes[s.key] = s
		}
		r.l.jsonOnly = r.l.jsonOnly || s.shape.Unstructured
	}
	if damaged > 0 {
		logger.Info("Scopes are damaged on disk and will be fetched again", "resource", r.l.name.gvr().String(), "user", r.l.name.User, "scopes", damaged)
	}
	r.l.responses = r.responses
	if r.all || r.bad[0] {
		// A record that was replaced may be back in its old version.
		r.l.responses = map[string]*record{}
		r.l.nextCheck = 0
	}
	if len(r.l.dropped) > 0 || len(r.bad) > 0 || r.all {
		r.l.rewriteSoon()
	}
}

// replaceForeign lets go of what is sealed with a key that nobody has, while there is a
// link: all of it can be fetched again.
func (c *Cache) replaceForeign() {
	for _, l := range c.allLogs() {
		l.mu.Lock()
		if l.seal != "" && !c.cfg.Sealer.Knows(l.seal) && c.cfg.Upstream.Up() {
			l.rewriteSoon()
		}
		l.mu.Unlock()
	}
}

// checkSeals finds out with which key the log is sealed. All of a log is sealed with
// one; what is not is as good as damaged. A log that must be sealed does not hold anything
// in clear but what somebody has put there.
//
// What nobody has the key of is not shown, and stays on disk for as long as nothing is
// written: the key may be back at the next start. It reports whether that is so.
func (r *replay) checkSeals(logger klog.Logger) (foreign bool) {
	l, want := r.l, r.l.wantedSeal()
	found := map[string]bool{}
	for _, s := range r.seals {
		found[s] = true
	}
	for _, re := range r.responses {
		found[re.Seal] = true
	}
	usable := func(seal string) bool {
		return l.c.cfg.Sealer.Knows(seal) || seal == "" && !l.name.secret()
	}
	all := slices.Sorted(maps.Keys(found))
	if n := slices.IndexFunc(all, usable); n >= 0 && !found[want] {
		l.seal = all[n]
	} else if len(all) == 1 && all[0] != "" && n < 0 {
		logger.Info("Log is sealed with a key that is not there and will be fetched again", "resource", l.name.gvr().String(), "user", l.name.User)
		l.c.metrics.damaged.Inc()
		l.seal, l.nextCheck = all[0], -1 // only a new log can follow
		r.byID, r.responses = nil, map[string]*record{}
		return true
	}
	dropped := false
	for id := range r.byID {
		if r.seals[id] != l.seal {
			r.damaged(id) // and finish rewrites
		}
	}
	for id, re := range r.responses {
		if re.Seal != l.seal {
			l.c.metrics.damaged.Inc()
			delete(r.responses, id)
			dropped = true
		}
	}
	if dropped {
		l.rewriteSoon()
	} else if l.seal != want {
		l.touch(true)
	}
	return false
}
