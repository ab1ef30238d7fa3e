// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"net/http"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A user is never given an older state than it was shown before: by a list, a get, a
// watch or the answer to a write, of anything that overlaps.

// behind reports whether a scope's state is older than what the user was shown, or
// than what the request asks for at least. The caller holds the log's lock.
func (j *join) behind(s *scope) bool {
	atLeast := maxRV(j.q.atLeast(), j.floor)
	if j.guest == nil {
		return j.l.behind(s, j.q.key, atLeast)
	}
	return compareRV(s.rv, maxRV(atLeast, j.l.toldTo(j.guest.identity, j.q.key, s))) < 0
}

// atLeast is the resourceVersion that a request asks for, "" if there is none.
func (q *query) atLeast() string {
	if rv := q.opts.ResourceVersion; rv != "0" && validRV(rv) {
		return rv
	}
	return ""
}

// behind reports whether a scope is older than atLeast, or than what the user was
// shown of key in any list, watch, get or answer to a write. The caller holds mu.
func (l *log) behind(s *scope, key Key, atLeast string) bool {
	return compareRV(s.rv, maxRV(atLeast, l.shownOf(key, s))) < 0
}

// shownOf returns the highest resourceVersion that the user was shown of what key
// asks for, by others than one scope. The caller holds mu.
func (l *log) shownOf(key Key, but *scope) string {
	rv := ""
	for k, shown := range l.shown {
		if k.overlaps(key) {
			rv = maxRV(rv, shown)
		}
	}
	for _, single := range l.single {
		for _, o := range single.objects {
			if key.names(o.key) {
				rv = maxRV(rv, o.rv)
			}
		}
	}
	for _, s := range l.scopes {
		if s != but && s.key.overlaps(key) {
			rv = maxRV(rv, s.told)
		}
	}
	return rv
}

// toldTo is shownOf for a guest whose watches other scopes of the log serve. The
// caller holds mu.
func (l *log) toldTo(identity string, key Key, but *scope) string {
	rv := ""
	for _, s := range l.scopes {
		if s == but || !s.key.overlaps(key) || compareRV(s.told, rv) <= 0 {
			continue
		}
		for w := range s.watchers {
			if w.guest != nil && w.guest.identity == identity {
				rv = maxRV(rv, s.told)
			}
		}
	}
	return rv
}

// notOlder makes a list or get that would take any state ask for one that is not
// older than what the user has been shown: this time it may be another API server
// that answers, and they lag behind each other.
func (c *Cache) notOlder(req *http.Request, q *query) *http.Request {
	l := c.logIfKnown(q.name)
	if l == nil || q.opts.ResourceVersion != "0" || q.opts.ResourceVersionMatch != "" {
		return req
	}
	l.mu.RLock()
	shown := l.shownOf(q.key, nil)
	l.mu.RUnlock()
	if shown == "" {
		return req
	}
	values := req.URL.Query()
	values.Set("resourceVersion", shown)
	if !q.get {
		values.Set("resourceVersionMatch", string(metav1.ResourceVersionMatchNotOlderThan))
		values.Del("limit") // which resourceVersion=0 has the API server ignore
	}
	u := *req.URL
	u.RawQuery = values.Encode()
	req = req.WithContext(req.Context())
	req.URL = &u
	return req
}
