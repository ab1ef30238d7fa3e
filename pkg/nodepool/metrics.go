// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package nodepool

import (
	"fmt"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

var (
	infoDesc = prometheus.NewDesc("edgehub_nodepool_info",
		"The pool that this node is in; nothing if it is in none or that is unknown.", []string{"pool", "type", "host_network"}, nil)
	stateDesc = prometheus.NewDesc("edgehub_nodepool_membership",
		"How well the pool of this node is known: known, stale (known, but the link is down), or unknown. One of them is 1.", []string{"state"}, nil)
	driftDesc = prometheus.NewDesc("edgehub_nodepool_label_drift",
		"Whether the NodePool and the labels of this node differ (1) or not (0).", nil, nil)
)

// metrics are those of a Tracker at the time of a scrape.
type metrics struct{ *Tracker }

func register(r prometheus.Registerer, t *Tracker) error {
	if r == nil {
		return nil
	}
	if err := r.Register(metrics{t}); err != nil {
		return fmt.Errorf("register metric: %w", err)
	}
	return nil
}

func (metrics) Describe(descs chan<- *prometheus.Desc) {
	descs <- infoDesc
	descs <- stateDesc
	descs <- driftDesc
}

func (s metrics) Collect(out chan<- prometheus.Metric) {
	m := s.Membership()
	gauge := func(desc *prometheus.Desc, on bool, labels ...string) {
		value := 0.
		if on {
			value = 1
		}
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	if m.Pool != "" {
		gauge(infoDesc, true, m.Pool, m.Type, strconv.FormatBool(m.HostNetwork))
	}
	for _, state := range []State{Known, Stale, Unknown} {
		gauge(stateDesc, m.State == state, string(state))
	}
	gauge(driftDesc, m.Drift != NoDrift)
}
