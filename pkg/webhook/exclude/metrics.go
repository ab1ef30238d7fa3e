// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package exclude

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	injections *prometheus.CounterVec
	warnings   *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		injections: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_exclude_injections_total",
			Help: "Objects that got the node affinity against host-network pools, by resource: pods, daemonsets or daemonsets.apps.kruise.io. No dry runs.",
		}, []string{"resource"}),
		warnings: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_exclude_warnings_total",
			Help: "Warnings about the annotation exclude-host-network-pool, by reason. No dry runs.",
		}, []string{"reason"}),
	}
	for _, c := range []prometheus.Collector{m.injections, m.warnings} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}
