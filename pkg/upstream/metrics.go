// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"errors"
	"fmt"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	healthy           *prometheus.GaugeVec
	changes           prometheus.Counter
	probeDuration     prometheus.Histogram
	requests          *prometheus.CounterVec
	receivedBytes     prometheus.Counter
	sentBytes         prometheus.Counter
	reloads           *prometheus.CounterVec
	certificateExpiry prometheus.Gauge
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		healthy: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "edgehub_upstream_healthy",
			Help: "Whether the API server is known to be ready (1) or not (0).",
		}, []string{"server"}),
		changes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "edgehub_upstream_changes_total",
			Help: "How often the upstream as a whole became reachable or ceased to be.",
		}),
		probeDuration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "edgehub_upstream_probe_duration_seconds",
			Help:    "Time until a probe of /readyz was answered, of good answers only.",
			Buckets: []float64{.001, .005, .02, .05, .1, .2, .5, 1, 2, 3, 10},
		}),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_upstream_requests_total",
			Help: "Requests by class of the answer (1xx to 5xx), or error (the connection failed), unavailable (not sent: nothing is up), refused (not sent: no credential), canceled (by the caller).",
		}, []string{"code"}),
		receivedBytes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "edgehub_upstream_received_bytes_total",
			Help: "Bytes received from API servers as they came over the link: compressed and encrypted, probes included.",
		}),
		sentBytes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "edgehub_upstream_sent_bytes_total",
			Help: "Bytes sent to API servers as they went over the link, probes included.",
		}),
		reloads: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_upstream_reloads_total",
			Help: "Changes of the certificate, key or CA file, by result: success, or failure (the old ones stay in force).",
		}, []string{"result"}),
		certificateExpiry: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "edgehub_upstream_certificate_expiration_timestamp_seconds",
			Help: "When the node's client certificate expires, in seconds since 1970.",
		}),
	}
	for _, code := range []string{"1xx", "2xx", "3xx", "4xx", "5xx", "error", "unavailable", "refused", "canceled"} {
		m.requests.WithLabelValues(code)
	}
	for _, result := range []string{"success", "failure"} {
		m.reloads.WithLabelValues(result)
	}
	if r == nil {
		return m, nil
	}
	var errs []error
	for _, c := range []prometheus.Collector{
		m.healthy, m.changes, m.probeDuration, m.requests, m.receivedBytes, m.sentBytes, m.reloads, m.certificateExpiry,
	} {
		if err := r.Register(c); err != nil {
			errs = append(errs, fmt.Errorf("register metric: %w", err))
		}
	}
	return m, errors.Join(errs...)
}

// class is the code label of an answer.
func class(status int) string {
	switch status / 100 {
	case 1:
		return "1xx"
	case 2:
		return "2xx"
	case 3:
		return "3xx"
	case 4:
		return "4xx"
	default:
		return "5xx"
	}
}
