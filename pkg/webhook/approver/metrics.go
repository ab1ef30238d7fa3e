// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package approver

import "github.com/prometheus/client_golang/prometheus"

const resultApproved = "approved"

type metrics struct {
	requests *prometheus.CounterVec
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{requests: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "edgehub_approver_requests_total",
		Help: "Hubs' requests for serving certificates, by result: approved, or what is wrong with one that is left pending: malformed, requester, subject, usages, key, node, names.",
	}, []string{"result"})}
	for _, result := range []string{resultApproved, badRequest, badRequester, badSubject, badUsages, badKey, badNode, badNames} {
		m.requests.WithLabelValues(result)
	}
	return m, r.Register(m.requests)
}
