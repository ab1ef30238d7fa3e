// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"strings"
	"time"

	"k8s.io/apiserver/pkg/authentication/serviceaccount"
)

// What a user was shown online it is shown offline, since nobody can be asked whether
// it still may see it. MaxAges bounds for how long that goes on.

// MaxAges are for how long after the API server last showed something to a user it is
// shown to that user while the link is down. Zero means without end.
type MaxAges struct {
	Node           time.Duration // the node's own identity
	ServiceAccount time.Duration
	User           time.Duration // everybody else
}

// of returns the age for the user of a log.
func (m MaxAges) of(n logName, node string) time.Duration {
	switch {
	case n.User == node:
		return m.Node
	case strings.HasPrefix(n.User, serviceaccount.ServiceAccountUsernamePrefix):
		return m.ServiceAccount
	}
	return m.User
}

// seenParts is how often within its maximum age it is written down that something is
// still shown: after a crash it seems that much older at most.
const seenParts = 4

// tooOld reports whether what was last shown at seen is not shown offline any more. A
// time to come is not too old: a node without a clock of its own starts in the past.
func (l *log) tooOld(seen time.Time) bool {
	return l.maxAge > 0 && l.c.now().Sub(seen) > l.maxAge
}

// noteworthy reports whether it is to be written down that what was last shown at seen
// still is.
func (l *log) noteworthy(seen time.Time) bool {
	return l.maxAge > 0 && l.c.now().Sub(seen).Abs() > l.maxAge/seenParts
}

// vouch notes that the API server shows all of the scope now. The caller holds the
// log's lock.
func (s *scope) vouch() {
	s.seen = s.log.c.now()
	if s.log.noteworthy(s.seenOnDisk) {
		s.dirtyState = true
		s.log.touch(false)
	}
}

// stale reports whether the scope is not shown offline any more. The caller holds the
// log's lock.
func (s *scope) stale() bool {
	return !(s.feed != nil && s.feed.live) && s.log.tooOld(s.seen)
}

// vouchAll notes that scopes whose feeds are live are shown now, so that it is known
// after a crash.
func (c *Cache) vouchAll() {
	for _, l := range c.allLogs() {
		if l.maxAge == 0 {
			continue
		}
		l.mu.Lock()
		for _, s := range l.scopes {
			if s.feed != nil && s.feed.live {
				s.vouch()
			}
		}
		l.mu.Unlock()
	}
}

// confirm notes that the API server shows what a record holds: the client has it
// already. Nil is a log that there is not.
func (l *log) confirm(id string) {
	if l == nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.responses[id]
	if r == nil {
		return
	}
	if r.seen = l.c.now(); l.noteworthy(time.Unix(r.Time, 0)) {
		r.Time = r.seen.Unix()
		l.dirtyResp[id] = r
		l.touch(false)
	}
}
