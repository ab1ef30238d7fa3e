// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package autonomy lets pods outlive a cut. Kubernetes deletes the pods of a node that it
// does not hear of, 300 s after it has tainted the node. Pods on Nodes, and on Nodes of
// NodePools, that say so by [Annotation] get tolerations by which they stay: when they are
// created, as far as it is known then where they will run, and by a controller once they
// are bound. What their tolerations were is kept in [OriginalAnnotation] and put back when
// autonomy ends.
//
// The API lets nobody remove a toleration from a pod: one that was added stays, with
// tolerationSeconds 0, which comes to the same.
package autonomy

import (
	"context"
	"fmt"
	"slices"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	registry "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
	"sigs.k8s.io/controller-runtime/pkg/source"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

const (
	// Path is where the server answers.
	Path = "/autonomy"

	// nodeIndex is of the manager's Pods by the node that they are bound to, apart from
	// what others index them by.
	nodeIndex = "edgehub.io/autonomy-node"

	// A pool may have thousands of pods; the API server has others to serve.
	writesPerSecond = 100
	writesAtOnce    = 200
)

// Add lets the leader keep the tolerations of bound pods. Metrics are controller-runtime's
// registry's, so it can be called once in a process.
func Add(mgr manager.Manager) error {
	m, err := newMetrics(registry.Registry)
	if err != nil {
		return err
	}
	byNode := func(o client.Object) []string {
		if pod, ok := o.(*corev1.Pod); ok && pod.Spec.NodeName != "" {
			return []string{pod.Spec.NodeName}
		}
		return nil
	}
	//nolint:forbidigo // the manager does not run yet, so this waits for nothing
	if err := mgr.GetFieldIndexer().IndexField(context.Background(), &corev1.Pod{}, nodeIndex, byNode); err != nil {
		return fmt.Errorf("index Pods by node: %w", err)
	}
	r := &reconciler{
		client: mgr.GetClient(), recorder: mgr.GetEventRecorder("edgehub-autonomy"), metrics: m, writes: rate.NewLimiter(writesPerSecond, writesAtOnce),
		freed: map[types.UID]time.Time{}, said: map[string]string{},
	}
	c, err := controller.New("autonomy", mgr, controller.Options{Reconciler: r, MaxConcurrentReconciles: 4})
	if err != nil {
		return err
	}
	r.pools, err = newPoolReader(mgr, func(pool *metav1.PartialObjectMetadata) error {
		return c.Watch(source.Kind(mgr.GetCache(), pool, handler.TypedEnqueueRequestsFromMapFunc(r.nodesOf), poolChanges))
	})
	if err != nil {
		return err
	}
	if err := c.Watch(source.Kind(mgr.GetCache(), &corev1.Node{}, &handler.TypedEnqueueRequestForObject[*corev1.Node]{}, nodeChanges)); err != nil {
		return err
	}
	return c.Watch(source.Kind(mgr.GetCache(), &corev1.Pod{}, handler.TypedEnqueueRequestsFromMapFunc(nodeOf), podChanges))
}

// AddWebhooks serves the admission of Pods at [Path].
func AddWebhooks(mgr manager.Manager, server webhook.Server) error {
	pools, err := newPoolReader(mgr, func(*metav1.PartialObjectMetadata) error { return nil })
	if err != nil {
		return err
	}
	h := &podHandler{nodes: mgr.GetCache(), pools: pools, decoder: admission.NewDecoder(mgr.GetScheme())}
	server.Register(Path, &admission.Webhook{Handler: h})
	return nil
}

// What is reconciled are nodes, each with all of its pods. These are the events that
// concern it: kubelets write statuses all the time, which do not.
var (
	nodeChanges = predicate.TypedFuncs[*corev1.Node]{UpdateFunc: func(e event.TypedUpdateEvent[*corev1.Node]) bool {
		return e.ObjectOld.Labels[nodepool.PoolLabel] != e.ObjectNew.Labels[nodepool.PoolLabel] ||
			differ(e.ObjectOld, e.ObjectNew, Annotation, openYurtAnnotation, openYurtDurationAnnotation)
	}}
	poolChanges = predicate.TypedFuncs[*metav1.PartialObjectMetadata]{UpdateFunc: func(e event.TypedUpdateEvent[*metav1.PartialObjectMetadata]) bool {
		return differ(e.ObjectOld, e.ObjectNew, Annotation)
	}}
	podChanges = predicate.TypedFuncs[*corev1.Pod]{UpdateFunc: func(e event.TypedUpdateEvent[*corev1.Pod]) bool {
		return e.ObjectOld.Spec.NodeName != e.ObjectNew.Spec.NodeName || exempt(e.ObjectOld) != exempt(e.ObjectNew) ||
			!apiequality.Semantic.DeepEqual(e.ObjectOld.Spec.Tolerations, e.ObjectNew.Spec.Tolerations) ||
			differ(e.ObjectOld, e.ObjectNew, Annotation, OriginalAnnotation)
	}}
)

// differ compares annotations.
func differ(a, b metav1.Object, keys ...string) bool {
	return slices.ContainsFunc(keys, func(key string) bool {
		before, was := a.GetAnnotations()[key]
		now, is := b.GetAnnotations()[key]
		return was != is || before != now
	})
}

func nodeOf(_ context.Context, pod *corev1.Pod) []reconcile.Request {
	if pod.Spec.NodeName == "" {
		return nil
	}
	return []reconcile.Request{{NamespacedName: types.NamespacedName{Name: pod.Spec.NodeName}}}
}

// nodesOf returns the nodes of a pool, those first whose pods are about to be deleted.
func (r *reconciler) nodesOf(ctx context.Context, pool *metav1.PartialObjectMetadata) (requests []reconcile.Request) {
	var nodes corev1.NodeList
	if err := r.client.List(ctx, &nodes, client.MatchingLabels{nodepool.PoolLabel: pool.Name}, client.UnsafeDisableDeepCopy); err != nil {
		return nil // only if ctx has ended: it is the cache's
	}
	var others []reconcile.Request
	for i := range nodes.Items {
		node := &nodes.Items[i]
		request := reconcile.Request{NamespacedName: types.NamespacedName{Name: node.Name}}
		if len(taintsOf(node)) > 0 {
			requests = append(requests, request)
		} else {
			others = append(others, request)
		}
	}
	return append(requests, others...)
}

// taintsOf are the keys of those taints that a node has for being cut.
func taintsOf(node *corev1.Node) (keys []string) {
	for _, t := range node.Spec.Taints {
		if t.Effect == corev1.TaintEffectNoExecute && slices.Contains(cutTaints, t.Key) {
			keys = append(keys, t.Key)
		}
	}
	return keys
}

// with returns a copy of the pod with other tolerations.
func with(pod *corev1.Pod, tolerations []corev1.Toleration, original string) *corev1.Pod {
	changed := pod.DeepCopy()
	changed.Spec.Tolerations = tolerations
	if original == "" {
		delete(changed.Annotations, OriginalAnnotation)
		return changed
	}
	if changed.Annotations == nil {
		changed.Annotations = map[string]string{}
	}
	changed.Annotations[OriginalAnnotation] = original
	return changed
}
