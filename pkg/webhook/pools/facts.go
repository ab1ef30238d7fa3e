// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/edgehub/edgehub/pkg/hostport"
	"github.com/edgehub/edgehub/pkg/nodepool"
)

// facts are what is known of the cluster, as events tell it and no more than reports
// need, by pool and by node: a change costs the same however large the cluster is, and
// a report looks only at what is in the pool. All methods are safe for concurrent use.
type facts struct {
	mu     sync.Mutex                                     // guards what follows
	known  bool                                           // whether pools are all that there are
	pools  map[string]*nodePool                           // never changed once they are here
	nodes  map[string]map[string]bool                     // by pool ("": none) and name: whether ready
	poolOf map[string]string                              // by node
	pods   map[string]map[types.NamespacedName]podOnANode // by node
	found  map[string]findings                            // by node, as long as its pods are the same
}

// A podOnANode is what matters of a pod that runs, or is to run, on a node.
type podOnANode struct {
	excluded, hostNetwork bool
	ports                 []hostport.Port
}

func newFacts() *facts {
	return &facts{
		pools: map[string]*nodePool{}, nodes: map[string]map[string]bool{}, poolOf: map[string]string{},
		pods: map[string]map[types.NamespacedName]podOnANode{}, found: map[string]findings{},
	}
}

// readPod returns nil for a pod that is on no node, or has ended.
func readPod(p *corev1.Pod) *podOnANode {
	if p.Spec.NodeName == "" || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		return nil
	}
	return &podOnANode{
		excluded:    p.Annotations[nodepool.ExcludeAnnotation] == nodepool.True,
		hostNetwork: p.Spec.HostNetwork,
		ports:       hostport.Held(p),
	}
}

func isReady(n *corev1.Node) bool {
	i := slices.IndexFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool { return c.Type == corev1.NodeReady })
	return i >= 0 && n.Status.Conditions[i].Status == corev1.ConditionTrue
}

// setNode returns the pools whose report it changes.
func (f *facts) setNode(n *corev1.Node) (changed []request) {
	pool, ready := n.Labels[nodepool.PoolLabel], isReady(n)
	f.mu.Lock()
	defer f.mu.Unlock()
	was, known := f.poolOf[n.Name]
	if known && was == pool && f.nodes[pool][n.Name] == ready {
		return nil
	}
	if known && was != pool {
		changed = f.takeOut(n.Name)
	}
	f.poolOf[n.Name] = pool
	addTo(f.nodes, pool, n.Name, ready)
	return append(changed, request{pool: pool})
}

// removeNode returns the pool that the node was in.
func (f *facts) removeNode(node string) []request {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.takeOut(node)
}

// takeOut takes a node out of its pool. The caller holds mu.
func (f *facts) takeOut(node string) []request {
	pool := f.poolOf[node]
	delete(f.poolOf, node)
	removeFrom(f.nodes, pool, node)
	return []request{{pool: pool}}
}

// setPod returns the pools whose report it changes. was is the pod as it was told last,
// nil if it was not; is is nil for one that is gone. One of the same name may have been
// on another node.
func (f *facts) setPod(was, is *corev1.Pod) (changed []request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if was != nil && (is == nil || is.Spec.NodeName != was.Spec.NodeName) {
		changed = f.putPod(was, nil)
	}
	if is != nil {
		changed = append(changed, f.putPod(is, readPod(is))...)
	}
	return changed
}

// putPod sets what is known of a pod on its node, nil: nothing. The caller holds mu.
func (f *facts) putPod(p *corev1.Pod, is *podOnANode) []request {
	node, key := p.Spec.NodeName, types.NamespacedName{Namespace: p.Namespace, Name: p.Name}
	was, known := f.pods[node][key]
	switch {
	case is == nil && !known:
		return nil
	case is == nil:
		removeFrom(f.pods, node, key)
	case known && was.excluded == is.excluded && was.hostNetwork == is.hostNetwork && slices.Equal(was.ports, is.ports):
		return nil
	default:
		addTo(f.pods, node, key, *is)
	}
	delete(f.found, node)
	return []request{{pool: f.poolOf[node]}}
}

// setPool returns what is to be looked at.
func (f *facts) setPool(p *nodePool) []request {
	f.mu.Lock()
	defer f.mu.Unlock()
	was := f.pools[p.Name]
	f.pools[p.Name] = p
	if was != nil && was.sameForNodes(p) {
		return []request{{pool: p.Name}}
	}
	return f.requestsOf(p.Name)
}

// removePool returns what is to be looked at.
func (f *facts) removePool(pool string) []request {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.pools, pool)
	return f.requestsOf(pool)
}

// requestsOf returns the pool and its nodes. The caller holds mu.
func (f *facts) requestsOf(pool string) []request {
	requests := []request{{pool: pool}}
	for node := range f.nodes[pool] {
		requests = append(requests, request{node: node})
	}
	return requests
}

// know says that all pools have been set.
func (f *facts) know() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.known = true
}

// forget says that there is nobody any more who tells of pools. It returns them.
func (f *facts) forget() (requests []request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for pool := range f.pools {
		requests = append(requests, request{pool: pool})
	}
	f.known = false
	clear(f.pools)
	return requests
}

// all returns all that there is to look at.
func (f *facts) all() (requests []request) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for pool := range f.pools {
		requests = append(requests, request{pool: pool})
	}
	for node := range f.poolOf {
		requests = append(requests, request{node: node})
	}
	return requests
}

// pool returns the pool, nil if there is none, and whether that is known.
func (f *facts) pool(pool string) (p *nodePool, known bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.pools[pool], f.known
}

func addTo[K comparable, V any](m map[string]map[K]V, in string, k K, v V) {
	if m[in] == nil {
		m[in] = map[K]V{}
	}
	m[in][k] = v
}

func removeFrom[K comparable, V any](m map[string]map[K]V, in string, k K) {
	delete(m[in], k)
	if len(m[in]) == 0 {
		delete(m, in)
	}
}
