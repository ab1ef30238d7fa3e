// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"iter"
	"time"

	"github.com/edgehub/edgehub/pkg/cache/journal"
)

// worthRewriting reports whether less than a third of the log is live. The
// answer is looked for again when the log has grown by as much as is live.
// Nothing else will do (must) where what is on disk is not to be gone on with.
func (l *log) worthRewriting() (worth, must bool) {
	l.mu.RLock()
	next, after, reseal := l.nextCheck, l.rewriteAfter, l.seal != l.wantedSeal()
	l.mu.RUnlock()
	total, live := l.size()
	if next >= 0 && (l.c.now().Before(after) || total < max(next, minRewriteBytes) && !reseal) {
		return false, false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.nextCheck = total + live/2
	return next < 0 || reseal || total > 3*live, next < 0
}

// rewriteRetry is for how long no other rewrite is tried after one that failed.
const rewriteRetry = 10 * time.Minute

// minRewriteBytes is the size below which a log is not worth compacting.
const minRewriteBytes = 1 << 20

// rewrite replaces the log on disk by the groups.
func (l *log) rewrite(groups []group) error {
	v, to := l.lockedView(), l.wantedSeal()
	defer v.Close()
	var items []item
	for _, g := range groups {
		items = append(items, g.items...)
	}
	var seq iter.Seq2[journal.Entry, error] = func(yield func(journal.Entry, error) bool) {
		for n := range items {
			e, err := l.bodyOf(&items[n], v, to)
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
	refs, err := l.journal.Rewrite(seq)
	if err != nil {
		return err
	}
	l.c.metrics.rewrites.Inc()
	l.settle(items, refs, to)
	return nil
}

// bodyOf completes an entry with its body, sealed with a key. What is on disk
// already is copied as it is there, or sealed anew. What cannot be read any more is
// forgotten.
func (l *log) bodyOf(i *item, v *pinnedView, to string) (journal.Entry, error) {
	e := i.entry
	if e.Kind != entryPut && e.Kind != entryTomb && e.Kind != entryResponse {
		return e, nil
	}
	var err error
	if e.Body = i.bare; e.Body == nil {
		if e.Body, err = v.Read(i.ref, nil); err == nil && v.seal != to {
			e.Body, err = l.c.unseal(v.seal, e.Body, l.placeOf(i))
		}
		if isDamage(err) {
			l.forgetDamaged(*i)
		}
		if err != nil || v.seal == to {
			return e, err
		}
	}
	if to != "" {
		e.Body, err = l.c.cfg.Sealer.Seal(to, e.Body, l.placeOf(i))
	}
	return e, err
}

// placeOf is what the body of an item is bound to.
func (l *log) placeOf(i *item) string {
	if i.record != nil {
		return l.responsePlace(i.record)
	}
	return i.scope.place(i.object.key)
}

// forgetDamaged drops what can no longer be read, so that it is fetched again.
func (l *log) forgetDamaged(i item) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.c.metrics.damaged.Inc()
	switch {
	case i.record != nil:
		delete(l.responses, i.record.id())
	case i.scope.single:
		delete(i.scope.objects, i.object.key)
	default:
		i.scope.expire()
	}
}
