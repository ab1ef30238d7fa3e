// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"fmt"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

var (
	nodesDesc = prometheus.NewDesc("edgehub_pool_nodes", "Nodes in a pool, by whether they are ready.", []string{"pool", "ready"}, nil)

	excludedDesc = prometheus.NewDesc("edgehub_pool_excluded_pods",
		"Pods in a host-network pool that ask to stay off such pools.", []string{"pool"}, nil)
	withoutHostNetworkDesc = prometheus.NewDesc("edgehub_pool_pods_without_host_network",
		"Pods in a host-network pool that are not on the host network, and so have none.", []string{"pool"}, nil)
	conflictsDesc = prometheus.NewDesc("edgehub_pool_host_port_conflicts",
		fmt.Sprintf("Pairs of pods on a node of the pool that want the same port of it, up to %d a node.", maxConflicts), []string{"pool"}, nil)

	activeDesc = prometheus.NewDesc("edgehub_pool_writing",
		"Whether this replica, if it leads, keeps labels of nodes and the status of NodePools (1), or leaves that to OpenYurt's yurt-manager (0).", nil, nil)
)

// metrics are the reports at the time of a scrape. A replica that does not lead has none.
type metrics struct {
	active func() bool // set before the first scrape
	drift  *prometheus.CounterVec

	mu      sync.Mutex        // guards reports
	reports map[string]report // by pool
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		active: func() bool { return false },
		drift: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_pool_label_drift_total",
			Help: "How often the host-network label of a node was found to differ from its pool: LabelMissing, LabelNotTrue and LabelLeftOver, which were put right, and PoolMissing, which was left.",
		}, []string{"drift"}),
		reports: map[string]report{},
	}
	for _, d := range []nodepool.Drift{nodepool.LabelMissing, nodepool.LabelNotTrue, nodepool.LabelLeftOver, nodepool.PoolMissing} {
		m.drift.WithLabelValues(string(d))
	}
	for _, c := range []prometheus.Collector{m.drift, m} {
		if err := r.Register(c); err != nil {
			return nil, fmt.Errorf("register metric: %w", err)
		}
	}
	return m, nil
}

func (m *metrics) set(pool string, r report) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.reports[pool] = r
}

func (m *metrics) forget(pool string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.reports, pool)
}

// Describe is prometheus.Collector's.
func (*metrics) Describe(descs chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{nodesDesc, excludedDesc, withoutHostNetworkDesc, conflictsDesc, activeDesc} {
		descs <- d
	}
}

// Collect is prometheus.Collector's.
func (m *metrics) Collect(out chan<- prometheus.Metric) {
	gauge := func(desc *prometheus.Desc, value int, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(value), labels...)
	}
	active := 0
	if m.active() {
		active = 1
	}
	gauge(activeDesc, active)
	m.mu.Lock()
	defer m.mu.Unlock()
	for pool, r := range m.reports {
		gauge(nodesDesc, r.ready, pool, "true")
		gauge(nodesDesc, len(r.nodes)-r.ready, pool, "false")
		gauge(excludedDesc, r.excluded.count, pool)
		gauge(withoutHostNetworkDesc, r.withoutHostNetwork.count, pool)
		gauge(conflictsDesc, r.conflicts.count, pool)
	}
}
