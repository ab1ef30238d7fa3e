// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	verdictError = "error"
	verdictSeen  = "seen" // an observer's
)

type metrics struct {
	objects  *prometheus.CounterVec
	duration *prometheus.CounterVec
	inForce  *prometheus.GaugeVec
	expired  *prometheus.CounterVec
	spooled  prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		objects: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "edgehub_filter_objects_total",
			Help: "Objects that a filter has judged, by verdict: keep, change, drop, or error, which fails the response; or that an observer has seen."}, []string{"filter", "verdict"}),
		duration: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "edgehub_filter_duration_seconds_total",
			Help: "Time that a filter or observer has taken."}, []string{"filter"}),
		inForce: prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "edgehub_filter_in_force",
			Help: "1 for each filter and observer, 0 if it is not in force."}, []string{"filter"}),
		expired: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "edgehub_filter_expired_total",
			Help: "Filtered watches that were told to list again (410), by reason: the filters or what they depend on have changed, what the client holds is unknown, or there was no room to remember it."}, []string{"reason"}),
		spooled: prometheus.NewCounter(prometheus.CounterOpts{Name: "edgehub_filter_spooled_bytes_total",
			Help: "Bytes of filtered lists that were gathered in a file."}),
	}
	if reg != nil {
		reg.MustRegister(m.objects, m.duration, m.inForce, m.expired, m.spooled)
	}
	return m
}

func (m *metrics) count(name string, v Verdict, err error, took time.Duration) {
	verdict := v.String()
	if err != nil {
		verdict = verdictError
	}
	m.objects.WithLabelValues(name, verdict).Inc()
	m.duration.WithLabelValues(name).Add(took.Seconds())
}

// use shows which filters are in force. Those that are not there any more are forgotten.
func (m *metrics) use(all []Entry, set *ruleset) {
	m.inForce.Reset()
	for i := range all {
		m.inForce.WithLabelValues(all[i].Name()).Set(0)
	}
	for _, list := range set.byResource {
		for _, f := range list {
			m.inForce.WithLabelValues(f.Name()).Set(1)
		}
	}
}
