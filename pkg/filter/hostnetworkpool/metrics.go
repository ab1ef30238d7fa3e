// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package hostnetworkpool

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

// What becomes of an attempt to send an Event.
const (
	created  = "created"
	accepted = "accepted"
	exists   = "exists"
	failed   = "failed"
)

type metrics struct {
	findings   *prometheus.GaugeVec
	events     *prometheus.CounterVec
	waiting    prometheus.Gauge
	unreadable prometheus.Counter
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		findings: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "edgehub_nodepool_findings",
			Help: "What is wrong with pods on this node, or with its labels, by the kind of finding; see /debug/pool.",
		}, []string{"kind"}),
		events: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_nodepool_events_total",
			Help: "Attempts to create an Event about a finding: created, accepted (it is sent when the link is back), exists (it had been sent before), or failed (it is tried again).",
		}, []string{"result"}),
		waiting: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "edgehub_nodepool_events_waiting",
			Help: "Findings of which no Event was created yet.",
		}),
		unreadable: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "edgehub_nodepool_unreadable_pods_total",
			Help: "Objects in lists and watches of this node's pods that could not be read as pods.",
		}),
	}
	m.show(nil)
	for _, result := range []string{created, accepted, exists, failed} {
		m.events.WithLabelValues(result)
	}
	if r == nil {
		return m, nil
	}
	var errs []error
	for _, c := range []prometheus.Collector{m.findings, m.events, m.waiting, m.unreadable} {
		if err := r.Register(c); err != nil {
			errs = append(errs, fmt.Errorf("register metric: %w", err))
		}
	}
	return m, errors.Join(errs...)
}

func (m *metrics) show(findings []Finding) {
	n := map[Kind]int{}
	for _, f := range findings {
		n[f.Kind]++
	}
	for _, kind := range kinds {
		m.findings.WithLabelValues(string(kind)).Set(float64(n[kind]))
	}
}
