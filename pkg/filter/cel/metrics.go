// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cel

import (
	"reflect"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/edgehub/edgehub/pkg/filter"
)

const verdictError = "error"

// Would is how many objects a rule in dry run has judged, by what it would have done.
type Would struct {
	Rule                      string
	Keep, Change, Drop, Error uint64
}

// Report returns the counts of the rules in force that are dry runs, in their order.
func (r *Rules) Report() []Would {
	r.mu.Lock()
	defer r.mu.Unlock()
	var report []Would
	for _, c := range r.inUse {
		if c.rule.DryRun {
			report = append(report, Would{c.rule.Name, c.counts.keep.Load(), c.counts.change.Load(), c.counts.drop.Load(), c.counts.failed.Load()})
		}
	}
	return report
}

// countsOf returns new counts, or those of the same rule if it is in force.
func (r *Rules) countsOf(rule Rule) *counts {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.inUse {
		if reflect.DeepEqual(c.rule, rule) {
			return c.counts
		}
	}
	return &counts{}
}

type counts struct{ keep, change, drop, failed atomic.Uint64 }

func (c *counts) of(verdict string) *atomic.Uint64 {
	switch verdict {
	case filter.Change.String():
		return &c.change
	case filter.Drop.String():
		return &c.drop
	case verdictError:
		return &c.failed
	}
	return &c.keep
}

var wouldDesc = prometheus.NewDesc("edgehub_filter_cel_would_total",
	"Objects that a rule in dry run has judged, by what it would have done: keep, change, drop, or error, which would have failed the response.",
	[]string{"rule", "verdict"}, nil)

// A collector shows the rules in force: what is gone has no series.
type collector struct{ rules *Rules }

func (c collector) Describe(descs chan<- *prometheus.Desc) { descs <- wouldDesc }

func (c collector) Collect(out chan<- prometheus.Metric) {
	for _, w := range c.rules.Report() {
		for verdict, n := range map[string]uint64{filter.Keep.String(): w.Keep, filter.Change.String(): w.Change, filter.Drop.String(): w.Drop, verdictError: w.Error} {
			out <- prometheus.MustNewConstMetric(wouldDesc, prometheus.CounterValue, float64(n), w.Rule, verdict)
		}
	}
}
