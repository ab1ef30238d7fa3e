// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package linklocal

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	present  prometheus.Gauge
	restored prometheus.Counter
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		present: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "edgehub_linklocal_present",
			Help: "Whether the link-local address was on an interface that is up (1) or not (0) after the last look, and what it could mend.",
		}),
		restored: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "edgehub_linklocal_restored_total",
			Help: "How often the link-local address was gone and came back.",
		}),
	}
	return m, register(r, m.present, m.restored)
}

func newExposedGauge(r prometheus.Registerer) (prometheus.Gauge, error) {
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "edgehub_linklocal_route_localnet_interfaces",
		Help: "Interfaces with route_localnet set, by which other machines may reach 127.0.0.0/8; all of them count as one if it is set for all.",
	})
	return g, register(r, g)
}

func register(r prometheus.Registerer, collectors ...prometheus.Collector) error {
	if r == nil {
		return nil
	}
	var errs []error
	for _, c := range collectors {
		if err := r.Register(c); err != nil {
			errs = append(errs, fmt.Errorf("register metric: %w", err))
		}
	}
	return errors.Join(errs...)
}
