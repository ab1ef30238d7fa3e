// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package contract

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	answers *prometheus.CounterVec
	expired prometheus.Counter
	leases  prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		answers: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_proxy_offline_answers_total",
			Help: "Answers by the offline contract while the API server could not be reached, by rule.",
		}, []string{"rule"}),
		expired: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "edgehub_proxy_expired_tokens_replayed_total",
			Help: "Recorded TokenRequest answers given while the link was down although their token had expired.",
		}),
		leases: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "edgehub_proxy_node_lease_updates_total",
			Help: "Updates of the node's own Lease that the API server has accepted: kubelet comes through.",
		}),
	}
	if reg != nil {
		reg.MustRegister(m.answers, m.expired, m.leases)
	}
	return m
}
