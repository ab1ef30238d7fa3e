// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics of the package.
type metrics struct {
	abandoned       *prometheus.CounterVec
	events          *prometheus.CounterVec
	damaged         prometheus.Counter
	evictions       prometheus.Counter
	journalFailures prometheus.Counter
	rewrites        prometheus.Counter
	overruns        prometheus.Counter
	historyResets   prometheus.Counter
	syncs           *prometheus.CounterVec
	resumes         prometheus.Counter
	joins           *prometheus.CounterVec
	journalOK       *flag
}

// A flag is a gauge of 0 or 1 that can be read back.
type flag struct{ v atomic.Int64 }

func (f *flag) Set(v float64) { f.v.Store(int64(v)) }

func (m *metrics) journalWritable() bool { return m.journalOK.v.Load() == 1 }

func newMetrics(r prometheus.Registerer, c *Cache) *metrics {
	counter := func(name, help string) prometheus.Counter {
		m := prometheus.NewCounter(prometheus.CounterOpts{Namespace: "edgehub", Subsystem: "cache", Name: name, Help: help})
		register(r, m)
		return m
	}
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		m := prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "edgehub", Subsystem: "cache", Name: name, Help: help}, labels)
		register(r, m)
		return m
	}
	gauge := func(name, help string, value func() float64) {
		register(r, prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "edgehub", Subsystem: "cache", Name: name, Help: help}, value))
	}
	m := &metrics{
		abandoned:       vec("abandoned_total", "Recordings refused or abandoned, by reason.", "reason"),
		events:          vec("events_total", "Events of upstream watches, by type.", "type"),
		damaged:         counter("damaged_total", "Scopes and responses dropped because their bytes on disk were damaged."),
		evictions:       counter("evictions_total", "Scopes and responses evicted to keep the limits."),
		journalFailures: counter("journal_failures_total", "Failed writes and reads of the journal."),
		rewrites:        counter("journal_rewrites_total", "Compactions of a log of the journal."),
		overruns:        counter("watcher_overruns_total", "Watchers ended because they were too far behind."),
		historyResets:   counter("history_resets_total", "Times that the API server's history was found to have been set back."),
		syncs:           vec("feed_syncs_total", "Whole states that feeds asked for: new, after their resourceVersion had expired, or after a reset of the history.", "reason"),
		resumes:         counter("feed_resumes_total", "Watches that feeds went on with where they had been."),
		joins:           vec("joins_total", "Watches that joined a feed: the user's own, the node's shared one, or a wider one of the user.", "scope"),
		journalOK:       &flag{},
	}
	m.journalOK.Set(1)
	gauge("journal_writable", "1 while the journal can be written.", func() float64 { return float64(m.journalOK.v.Load()) })
	gauge("feeds", "Open feeds.", func() float64 { return float64(c.count(func(s *scope) int { return btoi(s.feed != nil) })) })
	gauge("feeds_live", "Feeds that follow the API server now.", func() float64 {
		return float64(c.count(func(s *scope) int { return btoi(s.feed != nil && s.feed.live) }))
	})
	gauge("watchers", "Local watches served by feeds.", func() float64 { return float64(c.count(func(s *scope) int { return len(s.watchers) })) })
	gauge("scopes", "Recorded scopes.", func() float64 { return float64(c.count(func(*scope) int { return 1 })) })
	gauge("objects", "Recorded objects.", func() float64 { return float64(c.count(func(s *scope) int { return len(s.objects) })) })
	gauge("staleness_seconds", "Time for which the link to the API server has been down; 0 while it is up.", c.staleness)
	gauge("journal_size_bytes", "Bytes of the journal on disk.", func() float64 { total, _ := c.journalSize(); return float64(total) })
	gauge("journal_dead_bytes", "Bytes of the journal that are superseded and go with its next compaction.", func() float64 {
		total, live := c.journalSize()
		return float64(max(total-live, 0))
	})
	gauge("journal_live_bytes", "Bytes of the journal that are not superseded.", func() float64 { _, live := c.journalSize(); return float64(live) })
	gauge("journal_logs_to_reseal", "Logs on disk that are not yet encrypted as they should be: until it is 0, old encryption keys are needed.", func() float64 { return float64(c.logsToReseal()) })
	register(r, prometheus.NewCounterFunc(prometheus.CounterOpts{
		Namespace: "edgehub", Subsystem: "cache", Name: "journal_written_bytes_total", Help: "Bytes written to the journal.",
	}, func() float64 { return float64(c.journal.Stats().BytesWritten) }))
	return m
}

func register(r prometheus.Registerer, m prometheus.Collector) {
	if r != nil {
		r.MustRegister(m)
	}
}

func btoi(b bool) int {
	if b {
		return 1
	}
	return 0
}

// count adds up over all scopes.
func (c *Cache) count(of func(*scope) int) (n int) {
	for _, l := range c.allLogs() {
		l.mu.RLock()
		for _, s := range l.scopes {
			n += of(s)
		}
		l.mu.RUnlock()
	}
	return n
}

func (c *Cache) journalSize() (total, live int64) {
	for _, l := range c.allLogs() {
		t, v := l.size()
		total, live = total+t, live+v
	}
	return total, live
}

// logsToReseal is how many logs wait to be written with another key, or with one.
func (c *Cache) logsToReseal() (n int) {
	for _, l := range c.allLogs() {
		l.mu.RLock()
		n += btoi(!l.loaded || l.seal != l.wantedSeal())
		l.mu.RUnlock()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for name := range c.onDisk {
		n += btoi(c.logs[name] == nil) // not read yet
	}
	return n
}

// staleness is how long the link has been down.
func (c *Cache) staleness() float64 {
	down := c.downSince.Load()
	if down == 0 || c.cfg.Upstream.Up() {
		return 0
	}
	return c.now().Sub(time.Unix(0, down)).Seconds()
}
