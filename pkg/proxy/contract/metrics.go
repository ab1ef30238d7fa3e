// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package contract

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	answers *prometheus.CounterVec
	expired prometheus.Counter
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
	}
	if reg != nil {
		reg.MustRegister(m.answers, m.expired)
	}
	return m
}
