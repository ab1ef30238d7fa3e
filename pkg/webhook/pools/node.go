// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

// appliedAnnotation of a node says, as JSON, which attributes it has from its pool, so
// that they can be taken away again. It is OpenYurt's, and so is its form.
const appliedAnnotation = "nodepool.openyurt.io/previous-attributes"

// conflictDelay is after how long a node is looked at again that has changed meanwhile.
const conflictDelay = 200 * time.Millisecond

// reserved are keys that a pool cannot give to its nodes as it likes.
var reserved = []string{nodepool.PoolLabel, nodepool.DesiredPoolLabel, nodepool.HostNetworkLabel, appliedAnnotation}

// guarded reports whether a label keeps workloads away from nodes that they do not trust.
// No node may write it; but a node writes which pool it is in and what it has from there,
// so that it must not come from a pool either.
func guarded(key string) bool {
	prefix, _, _ := strings.Cut(key, "/")
	return prefix == corev1.LabelNamespaceNodeRestriction || strings.HasSuffix(prefix, "."+corev1.LabelNamespaceNodeRestriction)
}

// guardedTaint is guarded for taints, by which Kubernetes keeps pods away.
func guardedTaint(t corev1.Taint) bool {
	return strings.HasPrefix(t.Key, "node.kubernetes.io/") || strings.HasPrefix(t.Key, "node.cloudprovider.kubernetes.io/")
}

// A reconciler looks at pools and nodes.
type reconciler struct {
	facts   *facts
	reports reports
	metrics *metrics
	active  func() bool // whether to write
	now     func() time.Time

	nodes       client.Reader // must cost nothing
	writer      client.Writer
	writeStatus func(ctx context.Context, p *nodePool, patch []byte) (*nodePool, error)
	events      events.EventRecorder
	missing     missingPools
}

// Reconcile is reconcile.TypedReconciler's.
func (r *reconciler) Reconcile(ctx context.Context, q request) (reconcile.Result, error) {
	if q.node != "" {
		return r.node(ctx, q.node)
	}
	return r.pool(ctx, q.pool)
}

// node makes a node as its pool has it.
func (r *reconciler) node(ctx context.Context, name string) (reconcile.Result, error) {
	var node corev1.Node
	if err := r.nodes.Get(ctx, types.NamespacedName{Name: name}, &node); err != nil {
		r.missing.remove(name)
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	poolName := node.Labels[nodepool.PoolLabel]
	pool, known := r.facts.pool(poolName)
	if !known || !r.active() {
		return reconcile.Result{}, nil
	}
	if poolName != "" && pool == nil {
		if r.missing.add(name, poolName) {
			r.report(&node, nodepool.PoolMissing, poolName)
		}
		return reconcile.Result{}, nil
	}
	r.missing.remove(name)
	want, drift := plan(&node, pool)
	if want == nil {
		return reconcile.Result{}, nil
	}
	patch := client.MergeFromWithOptions(&node, client.MergeFromWithOptimisticLock{})
	switch err := r.writer.Patch(ctx, want, patch, client.FieldOwner(controllerName)); {
	case apierrors.IsConflict(err):
		return reconcile.Result{RequeueAfter: conflictDelay}, nil
	case err != nil:
		return reconcile.Result{}, client.IgnoreNotFound(err)
	}
	if drift != nodepool.NoDrift {
		r.report(&node, drift, poolName)
	}
	klog.FromContext(ctx).Info("Made a node as its pool has it", "node", name, "nodePool", poolName, "labelDrift", drift)
	return reconcile.Result{}, nil
}

// plan returns the node as it is to be, nil if it is so, and how its label differs. A nil
// pool means that the node is in none. The label comes first and by itself: the API server
// may refuse what a pool gives, and pods must be kept off all the same.
func plan(node *corev1.Node, pool *nodePool) (want *corev1.Node, drift nodepool.Drift) {
	var given attributes
	hostNetwork := false
	if pool != nil {
		hostNetwork, given = pool.hostNetwork(), pool.Spec.attributes.allowed()
	}
	drift = nodepool.LabelDrift(node.Labels, hostNetwork)
	applied := appliedTo(node)
	if drift == nodepool.NoDrift && applied.equal(given) {
		return nil, drift
	}
	want = node.DeepCopy()
	switch drift {
	case nodepool.NoDrift:
		give(want, applied, given)
	case nodepool.LabelLeftOver:
		delete(want.Labels, nodepool.HostNetworkLabel)
	default:
		set(&want.Labels, nodepool.HostNetworkLabel, nodepool.True)
	}
	return want, drift
}

// allowed returns the attributes without the reserved ones.
func (a attributes) allowed() attributes {
	without := func(m map[string]string) map[string]string {
		m = maps.Clone(m)
		maps.DeleteFunc(m, func(key, _ string) bool { return slices.Contains(reserved, key) || guarded(key) })
		return m
	}
	return attributes{without(a.Labels), without(a.Annotations), slices.DeleteFunc(slices.Clone(a.Taints), guardedTaint)}
}

// appliedTo returns the attributes that a node has from a pool. What cannot be read is
// none.
func appliedTo(node *corev1.Node) (a attributes) {
	if err := json.Unmarshal([]byte(node.Annotations[appliedAnnotation]), &a); err != nil {
		return attributes{}
	}
	return a.allowed()
}

// give replaces what a node has from a pool. What somebody has changed since is theirs,
// and stays when the pool no longer has it.
func give(node *corev1.Node, applied, given attributes) {
	replace := func(m *map[string]string, old, new map[string]string) {
		for key, value := range old {
			if _, stays := new[key]; !stays && (*m)[key] == value {
				delete(*m, key)
			}
		}
		for key, value := range new {
			set(m, key, value)
		}
	}
	replace(&node.Labels, applied.Labels, given.Labels)
	replace(&node.Annotations, applied.Annotations, given.Annotations)
	node.Spec.Taints = slices.DeleteFunc(node.Spec.Taints, func(is corev1.Taint) bool {
		replaced := slices.ContainsFunc(given.Taints, func(t corev1.Taint) bool { return t.MatchTaint(&is) })
		return replaced || slices.ContainsFunc(applied.Taints, func(t corev1.Taint) bool { return sameTaint(t, is) })
	})
	node.Spec.Taints = append(node.Spec.Taints, given.Taints...)
	if given.equal(attributes{}) {
		delete(node.Annotations, appliedAnnotation)
		return
	}
	if text, err := json.Marshal(given); err == nil { // it always is
		set(&node.Annotations, appliedAnnotation, string(text))
	}
}

func set(m *map[string]string, key, value string) {
	if *m == nil {
		*m = map[string]string{}
	}
	(*m)[key] = value
}

// report tells of a finding about a node.
func (r *reconciler) report(node *corev1.Node, drift nodepool.Drift, pool string) {
	r.metrics.drift.WithLabelValues(string(drift)).Inc()
	kind, action, note := corev1.EventTypeNormal, "Label", ""
	switch drift {
	case nodepool.PoolMissing:
		kind, action = corev1.EventTypeWarning, "None"
		note = fmt.Sprintf("The node's label %s names the NodePool %s, which does not exist; the label %s stays as it is", nodepool.PoolLabel, pool, nodepool.HostNetworkLabel)
	case nodepool.LabelLeftOver:
		note = fmt.Sprintf("The node is in no host-network pool; its label %s was removed", nodepool.HostNetworkLabel)
	case nodepool.LabelMissing, nodepool.LabelNotTrue, nodepool.NoDrift:
		note = fmt.Sprintf("The node is in the host-network pool %s; its label %s was set to %s", pool, nodepool.HostNetworkLabel, nodepool.True)
	}
	r.events.Eventf(node, nil, kind, string(drift), action, "%s", note)
}

// missingPools are the pools that do not exist, by the node that names them. Each is
// reported once.
type missingPools struct {
	mu     sync.Mutex
	byNode map[string]string
}

// add reports whether this is new.
func (m *missingPools) add(node, pool string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.byNode[node] == pool {
		return false
	}
	set(&m.byNode, node, pool)
	return true
}

func (m *missingPools) remove(node string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.byNode, node)
}
