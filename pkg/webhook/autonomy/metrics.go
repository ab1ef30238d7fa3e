// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package autonomy

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Values of the labels.
const (
	toleranceForever = "forever"
	toleranceLimited = "limited"

	changeTolerated = "tolerated"
	changeRestored  = "restored"
	changeFailed    = "failed"

	kindNode     = "Node"
	kindNodePool = "NodePool"
)

type metrics struct {
	pods    *prometheus.GaugeVec
	changes *prometheus.CounterVec
	invalid *prometheus.CounterVec

	mu     sync.Mutex
	byNode map[string]tally // of those with any
}

// A tally counts pods.
type tally struct{ forever, limited int }

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{
		pods: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "edgehub_autonomy_pods",
			Help: "Pods that stay on their node while it is cut because the node or its pool says so, by for how long: forever or limited.",
		}, []string{"tolerance"}),
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_autonomy_changes_total",
			Help: "Changes to the tolerations of bound pods: tolerated, restored, or failed.",
		}, []string{"change"}),
		invalid: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "edgehub_autonomy_invalid_annotations_total",
			Help: "Annotations about autonomy found to have a value that means nothing, by kind: Node or NodePool.",
		}, []string{"kind"}),
		byNode: map[string]tally{},
	}
	m.set("", tally{})
	for _, c := range []string{changeTolerated, changeRestored, changeFailed} {
		m.changes.WithLabelValues(c)
	}
	for _, k := range []string{kindNode, kindNodePool} {
		m.invalid.WithLabelValues(k)
	}
	for _, c := range []prometheus.Collector{m.pods, m.changes, m.invalid} {
		if err := r.Register(c); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// set says how many pods there are on a node.
func (m *metrics) set(node string, now tally) {
	m.mu.Lock()
	defer m.mu.Unlock()
	before := m.byNode[node]
	m.pods.WithLabelValues(toleranceForever).Add(float64(now.forever - before.forever))
	m.pods.WithLabelValues(toleranceLimited).Add(float64(now.limited - before.limited))
	if m.byNode[node] = now; now == (tally{}) {
		delete(m.byNode, node)
	}
}
