// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import "time"

// evict forgets what was used least recently until the limits hold: scopes
// without a feed first, never one with watchers.
func (c *Cache) evict() {
	for {
		scopes := c.count(func(*scope) int { return 1 })
		total, live := c.journalSize()
		if total > c.cfg.MaxBytes {
			c.compact()
		}
		// What is dead goes with compaction; a quarter is left for that.
		tooMuch := live > c.cfg.MaxBytes/4*3
		if scopes <= c.cfg.MaxScopes && !tooMuch || !c.evictOne(tooMuch) {
			return
		}
	}
}

// compact has every log with something dead in it written anew.
func (c *Cache) compact() {
	for _, l := range c.allLogs() {
		if total, live := l.size(); total > live+live/4+minRewriteBytes/16 {
			l.mu.Lock()
			l.rewriteSoon()
			l.mu.Unlock()
		}
	}
}

// evictOne drops the scope that was used least recently and that nobody needs
// now, and where it is about bytes, single objects and whole responses too. What
// the node needs to come back goes last.
func (c *Cache) evictOne(bytes bool) bool {
	node := identityOf(c.cfg.Node(), nil)
	var oldest time.Time
	var from *log
	var victim *scope
	var response *record
	consider := func(l *log, used time.Time, s *scope, r *record) {
		own, best := l.name.Identity == node, from != nil && from.name.Identity == node
		if from == nil || best && !own || best == own && used.Before(oldest) {
			oldest, from, victim, response = used, l, s, r
		}
	}
	for _, l := range c.allLogs() {
		l.mu.RLock()
		for _, s := range l.allScopes() {
			if s.feed == nil && !s.pinned && (bytes || !s.single) {
				consider(l, s.used, s, nil)
			}
		}
		for _, r := range l.responses {
			if bytes {
				consider(l, r.used, nil, r)
			}
		}
		l.mu.RUnlock()
	}
	if from == nil {
		return false
	}
	from.mu.Lock()
	defer from.mu.Unlock()
	switch {
	case response != nil && from.responses[response.id()] == response:
		from.forgetResponse(response)
	case victim != nil && victim.feed == nil:
		from.drop(victim)
	}
	from.rewriteSoon()
	c.metrics.evictions.Inc()
	return true
}

// forgetEmptyLogs lets go of the logs that hold nothing, such as those of watches
// that were refused.
func (c *Cache) forgetEmptyLogs() {
	for _, l := range c.allLogs() {
		c.mu.Lock()
		if !l.mu.TryLock() { // elsewhere c.mu is taken second
			c.mu.Unlock()
			continue
		}
		if c.now().Sub(l.touched) > emptyLogAge && l.empty() {
			delete(c.logs, l.name)
			delete(c.onDisk, l.name)
			if l.journal != nil {
				_ = l.journal.Close() // nothing is in it
			}
		}
		l.mu.Unlock()
		c.mu.Unlock()
	}
}

// emptyLogAge is how long a log may be empty; much longer than a request takes
// from finding its log to putting something in.
const emptyLogAge = 5 * time.Minute
