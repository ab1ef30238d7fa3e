// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package autonomy

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

const (
	// takeIn is what the taint manager gets to see that a pod tolerates for ever.
	takeIn = 3 * time.Second
	// afterConflict is until the cache has what somebody else wrote.
	afterConflict = 200 * time.Millisecond
	// afterUnknown is between two questions whether there are NodePools.
	afterUnknown = 500 * time.Millisecond
)

// A reconciler gives the pods of a node the tolerations that they should have.
type reconciler struct {
	client   client.Client
	pools    *poolReader
	recorder events.EventRecorder
	metrics  *metrics
	writes   *rate.Limiter

	mu    sync.Mutex
	freed map[types.UID]time.Time // pods that tolerate for ever for a moment, since when
	said  map[string]string       // what was wrong with a Node or NodePool, kind/name
}

// Reconcile looks at one node.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (result reconcile.Result, err error) {
	var node corev1.Node
	switch err := r.client.Get(ctx, req.NamespacedName, &node); {
	case apierrors.IsNotFound(err):
		r.metrics.set(req.Name, tally{})
		r.complain(nil, kindNode, req.Name, nil)
		return reconcile.Result{}, nil // nobody keeps the pods of a node that does not exist
	case err != nil:
		return reconcile.Result{}, err
	}
	place, err := r.settingOf(ctx, &node)
	if errors.Is(err, errNotKnown) {
		return reconcile.Result{RequeueAfter: afterUnknown}, nil
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	var pods corev1.PodList
	if err := r.client.List(ctx, &pods, client.MatchingFields{nodeIndex: node.Name}, client.UnsafeDisableDeepCopy); err != nil {
		return reconcile.Result{}, err
	}
	var errs []error
	var count tally
	for i := range pods.Items {
		pod := &pods.Items[i]
		if exempt(pod) {
			continue
		}
		s := ofPod(pod, place)
		wait, err := r.adjust(ctx, &node, pod, s)
		if err != nil {
			errs = append(errs, fmt.Errorf("pod %s/%s: %w", pod.Namespace, pod.Name, err))
		}
		if wait > 0 && (result.RequeueAfter == 0 || wait < result.RequeueAfter) {
			result.RequeueAfter = wait
		}
		switch {
		case s.on && s.seconds == nil:
			count.forever++
		case s.on:
			count.limited++
		}
	}
	r.metrics.set(node.Name, count)
	return result, errors.Join(errs...)
}

// settingOf is what the node says, else what its pool says, nil for nothing.
func (r *reconciler) settingOf(ctx context.Context, node *corev1.Node) (*setting, error) {
	s, err := ofNode(node.Annotations)
	r.complain(node, kindNode, node.Name, err)
	name := node.Labels[nodepool.PoolLabel]
	if s != nil || name == "" {
		return s, nil
	}
	pool, err := r.pools.get(ctx, name)
	if err != nil {
		return nil, err
	}
	if pool == nil {
		r.complain(nil, kindNodePool, name, nil) // what is made anew is told of anew
		return nil, nil
	}
	s, err = ofPool(pool.Annotations)
	r.complain(pool, kindNodePool, name, err)
	return s, nil
}

// complain tells what is wrong with an object, once as long as it does not change.
func (r *reconciler) complain(o runtime.Object, kind, name string, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	key := kind + "/" + name
	r.mu.Lock()
	known := r.said[key] == text
	if r.said[key] = text; text == "" {
		delete(r.said, key)
	}
	r.mu.Unlock()
	if known || text == "" {
		return
	}
	r.metrics.invalid.WithLabelValues(kind).Inc()
	r.recorder.Eventf(o, nil, corev1.EventTypeWarning, "InvalidAutonomy", "Read", "Treated as absent: %s", text)
}

// adjust writes a pod that is not as it should be. A wait above 0 is when to look at it
// again.
//
// A pod of a node that is cut has the time of its deletion already, and Kubernetes does not
// move that when its tolerations change from one number of seconds to another: only
// tolerating for ever calls the deletion off. So that comes in between.
func (r *reconciler) adjust(ctx context.Context, node *corev1.Node, pod *corev1.Pod, s setting) (wait time.Duration, err error) {
	tolerations, original := plan(pod, s)
	same := apiequality.Semantic.DeepEqual(tolerations, pod.Spec.Tolerations)
	if same && original == pod.Annotations[OriginalAnnotation] {
		return 0, nil
	}
	cut := taintsOf(node)
	if !same && limited(pod.Spec.Tolerations, cut) && limited(tolerations, cut) {
		tolerations, original = plan(pod, forever)
		r.free(pod.UID)
		wait = takeIn
	} else if left := r.leftOf(pod.UID); left > 0 {
		return left, nil
	}
	if err := r.writes.Wait(ctx); err != nil {
		return 0, err
	}
	err = r.client.Patch(ctx, with(pod, tolerations, original), client.MergeFromWithOptions(pod, client.MergeFromWithOptimisticLock{}))
	switch {
	case apierrors.IsNotFound(err):
		return 0, nil
	case apierrors.IsConflict(err):
		return afterConflict, nil
	case apierrors.IsInvalid(err): // as when its annotations are full: to try again would change nothing
		r.metrics.changes.WithLabelValues(changeFailed).Inc()
		klog.FromContext(ctx).Error(err, "A pod is left as it is", "pod", klog.KObj(pod), "node", node.Name)
		return 0, nil
	case err != nil:
		r.metrics.changes.WithLabelValues(changeFailed).Inc()
		return 0, err
	}
	change := changeTolerated
	if !s.on && wait == 0 {
		change = changeRestored
	}
	r.metrics.changes.WithLabelValues(change).Inc()
	klog.FromContext(ctx).V(2).Info("Changed tolerations", "pod", klog.KObj(pod), "node", node.Name, "change", change)
	return wait, nil
}

// free remembers that a pod tolerates for ever from now on, for a moment.
func (r *reconciler) free(pod types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for uid, since := range r.freed {
		if time.Since(since) > takeIn {
			delete(r.freed, uid)
		}
	}
	r.freed[pod] = time.Now()
}

// leftOf is how long a pod has to go on tolerating for ever.
func (r *reconciler) leftOf(pod types.UID) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	since, ok := r.freed[pod]
	if !ok {
		return 0
	}
	return takeIn - time.Since(since)
}
