// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// reportPeriod is how often a report of a pool is made at most.
const reportPeriod = 5 * time.Second

// reports remembers, by pool, when the next report may be made, and what was written
// last. All methods are safe for concurrent use.
type reports struct {
	mu      sync.Mutex // guards what follows
	next    map[string]time.Time
	written map[string]writing
}

// A writing is a status as it was sent and as the API server then had it, which may lack
// fields: versions differ in what they have.
type writing struct{ sent, got status }

// wait returns how long it is until a report of the pool may be made; if that is 0 it is
// made now.
func (r *reports) wait(pool string, now time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if next := r.next[pool]; next.After(now) {
		return next.Sub(now)
	}
	if r.next == nil {
		r.next, r.written = map[string]time.Time{}, map[string]writing{}
	}
	r.next[pool] = now.Add(reportPeriod)
	return 0
}

func (r *reports) forget(pool string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.next, pool)
	delete(r.written, pool)
}

func (r *reports) wrote(pool string, w writing) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.written[pool] = w
}

// isWritten reports whether a pool has the status that it is to have, as far as it can.
func (r *reports) isWritten(pool string, is, want status) bool {
	if is.equal(want) {
		return true
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	w, ok := r.written[pool]
	return ok && w.sent.equal(want) && w.got.equal(is)
}

func (s status) equal(t status) bool {
	return s.ReadyNodeNum == t.ReadyNodeNum && s.UnreadyNodeNum == t.UnreadyNodeNum && slices.Equal(s.Nodes, t.Nodes) &&
		slices.EqualFunc(s.Conditions, t.Conditions, sameCondition)
}

// sameCondition leaves out when it came about, which follows from the rest.
func sameCondition(a, b metav1.Condition) bool {
	a.LastTransitionTime, b.LastTransitionTime = metav1.Time{}, metav1.Time{}
	return a == b
}

// pool makes a report of a pool, and writes it into its status.
func (r *reconciler) pool(ctx context.Context, name string) (reconcile.Result, error) {
	if p, known := r.facts.pool(name); p == nil {
		r.metrics.forget(name)
		r.reports.forget(name)
		return reconcile.Result{}, nil
	} else if !known { // a look is asked for again when it is
		return reconcile.Result{}, nil
	}
	now := r.now()
	if wait := r.reports.wait(name, now); wait > 0 {
		return reconcile.Result{RequeueAfter: wait}, nil
	}
	p, report := r.facts.report(name)
	if p == nil {
		return reconcile.Result{}, nil // gone this moment
	}
	r.metrics.set(name, report)
	if !r.active() {
		return reconcile.Result{}, nil
	}
	want := statusOf(p, report, metav1.NewTime(now))
	if r.reports.isWritten(name, p.Status, want) {
		return reconcile.Result{}, nil
	}
	patch, err := statusPatch(p, want)
	if err != nil {
		return reconcile.Result{}, err
	}
	is, err := r.writeStatus(ctx, p, patch)
	switch {
	case apierrors.IsConflict(err): // it has changed, and is told of soon
		return reconcile.Result{RequeueAfter: reportPeriod}, nil
	case apierrors.IsNotFound(err):
		return reconcile.Result{}, nil
	case err != nil:
		return reconcile.Result{}, fmt.Errorf("status of NodePool %s: %w", name, err)
	}
	r.reports.wrote(name, writing{want, is.Status})
	klog.FromContext(ctx).V(4).Info("Wrote the status of a NodePool", "nodePool", name, "nodes", len(report.nodes), "ready", report.ready)
	return reconcile.Result{}, nil
}

// statusPatch returns a JSON merge patch of what changes. It replaces the conditions of
// all, and so holds only for the version of the pool that it was made of.
func statusPatch(p *nodePool, want status) ([]byte, error) {
	changes := map[string]any{"readyNodeNum": want.ReadyNodeNum, "unreadyNodeNum": want.UnreadyNodeNum}
	if !slices.Equal(p.Status.Nodes, want.Nodes) {
		changes["nodes"] = want.Nodes
	}
	if !slices.EqualFunc(p.Status.Conditions, want.Conditions, sameCondition) {
		changes["conditions"] = want.Conditions
	}
	return json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": p.ResourceVersion}, "status": changes})
}
