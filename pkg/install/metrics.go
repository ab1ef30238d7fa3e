// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are those of a watch.
type metrics struct {
	ready     prometheus.Gauge
	looks     *prometheus.CounterVec
	rewrites  prometheus.Counter
	fallbacks prometheus.Counter
}

// results of a look, by the error that it ended with.
var results = []struct {
	name string
	err  error
}{
	{"rolled_back", ErrRolledBack}, {"failed_before", ErrFailedBefore}, {"link_down", ErrLinkDown}, {"silent", ErrSilent}, {"restart_kubelet", ErrRestartKubelet},
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		ready: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "edgehub_install_ready", Help: "1: the last look has found, or made, all as wanted.",
		}),
		looks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_install_looks_total",
			Help: "Looks at the node, by result: ok, rolled_back, failed_before (a version that is not tried again), link_down, silent (the hub does not answer), restart_kubelet (by hand), error.",
		}, []string{"result"}),
		rewrites: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "edgehub_install_kubeconfig_rewrites_total", Help: "Times that kubelet's kubeconfig was somebody else's, and was pointed at the hub again.",
		}),
		fallbacks: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "edgehub_install_fallbacks_total", Help: "Times that kubelet was pointed at the API server because the hub was silent.",
		}),
	}
	m.looks.WithLabelValues("ok")
	m.looks.WithLabelValues("error")
	for _, r := range results {
		m.looks.WithLabelValues(r.name)
	}
	if reg != nil {
		reg.MustRegister(m.ready, m.looks, m.rewrites, m.fallbacks)
	}
	return m
}

func (m *metrics) looked(err error) {
	if err == nil {
		m.ready.Set(1)
		m.looks.WithLabelValues("ok").Inc()
		return
	}
	m.ready.Set(0)
	for _, r := range results {
		if errors.Is(err, r.err) {
			m.looks.WithLabelValues(r.name).Inc()
			return
		}
	}
	m.looks.WithLabelValues("error").Inc()
}
