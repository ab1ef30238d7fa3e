// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package outbox

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	sent    *prometheus.CounterVec
	dropped *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer, o *Outbox) (*metrics, error) {
	m := &metrics{
		sent: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_outbox_sent_total",
			Help: "Events sent to the API server, by its answer: created, exists (it had been sent before), or rejected.",
		}, []string{"result"}),
		dropped: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_outbox_dropped_total",
			Help: "Events that were dropped: full (the oldest went to keep the limits), or damaged (on disk).",
		}, []string{"reason"}),
	}
	for _, result := range []string{created, exists, rejected} {
		m.sent.WithLabelValues(result)
	}
	for _, reason := range []string{"full", "damaged"} {
		m.dropped.WithLabelValues(reason)
	}
	if r == nil {
		return m, nil
	}
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, func() float64 {
			o.mu.RLock()
			defer o.mu.RUnlock()
			return value()
		})
	}
	var errs []error
	for _, c := range []prometheus.Collector{
		m.sent, m.dropped,
		gauge("edgehub_outbox_events", "Events that wait to be sent.", func() float64 { return float64(len(o.queue)) }),
		gauge("edgehub_outbox_bytes", "Bytes of the bodies of the Events that wait to be sent.", func() float64 { return float64(o.bytes) }),
	} {
		if err := r.Register(c); err != nil {
			errs = append(errs, fmt.Errorf("register metric: %w", err))
		}
	}
	return m, errors.Join(errs...)
}
