// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	valid       *prometheus.GaugeVec
	inForce     *prometheus.GaugeVec
	reloads     *prometheus.CounterVec
	writeErrors prometheus.Counter
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		valid: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "edgehub_filter_config_valid",
			Help: "Whether what a source of the configuration of filters (file, configmap, last_good) says now is accepted (1), or is refused or may not be read (0).",
		}, []string{"source"}),
		inForce: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "edgehub_filter_config_in_force",
			Help: "Which source's configuration of filters is in force (1): file, configmap, last_good or defaults.",
		}, []string{"source"}),
		reloads: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_filter_config_reloads_total",
			Help: "New contents of a source of the configuration of filters, by outcome: accepted, or refused (what was in force stays).",
		}, []string{"source", "outcome"}),
		writeErrors: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "edgehub_filter_config_last_good_write_errors_total",
			Help: "Times that the last good configuration of filters could not be written to disk.",
		}),
	}
	for _, s := range []string{sourceFile, sourceConfigMap, sourceLastGood} {
		m.reloads.WithLabelValues(s, accepted)
		m.reloads.WithLabelValues(s, refused)
	}
	if r == nil {
		return m, nil
	}
	var errs []error
	for _, c := range []prometheus.Collector{m.valid, m.inForce, m.reloads, m.writeErrors} {
		if err := r.Register(c); err != nil {
			errs = append(errs, fmt.Errorf("register metric: %w", err))
		}
	}
	return m, errors.Join(errs...)
}

const (
	accepted = "accepted"
	refused  = "refused"
)

func set(g *prometheus.GaugeVec, source string, v bool) {
	n := 0.0
	if v {
		n = 1
	}
	g.WithLabelValues(source).Set(n)
}
