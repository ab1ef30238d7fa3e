// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package pools is the companion's controller of NodePools. It keeps the nodes of a pool
// as the pool has them: the host-network label, and the pool's labels, annotations and
// taints. It writes down in a pool's status which nodes are in it and what is wrong there,
// and tells the same by metrics.
//
// In a cluster with OpenYurt its yurt-manager does most of this. With [Auto] the
// controller then writes nothing at all, and begins when yurt-manager goes.
//
// One caveat: all that it knows comes from watches, so it acts on the cluster as it was
// a moment ago. Each write names the version that it is about, and is refused if that
// has passed.
package pools

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/metadata"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	ctrlmetrics "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/source"
)

// The values of Options.Mode.
const (
	Auto = "auto" // write unless OpenYurt's yurt-manager is there
	On   = "on"   // write
	Off  = "off"  // do nothing, and have no metrics
)

const (
	// controllerName is in logs and metrics, and is who writes and reports Events.
	controllerName = "edgehub-pools"
	// workers bounds how many nodes are written at a time.
	workers = 4
)

// Options say what to do.
type Options struct {
	// Mode is Auto, On or Off.
	Mode string
	// Registerer takes the metrics; nil: controller-runtime's.
	Registerer prometheus.Registerer
}

// Add adds the controller to the manager, for its leader. It asks the API server
// nothing: NodePools may be installed at any time.
func Add(mgr manager.Manager, o Options) error {
	if o.Mode == Off {
		return nil
	}
	if o.Registerer == nil {
		o.Registerer = ctrlmetrics.Registry
	}
	metrics, err := newMetrics(o.Registerer)
	if err != nil {
		return err
	}
	pools, err := dynamic.NewForConfigAndClient(mgr.GetConfig(), mgr.GetHTTPClient())
	if err != nil {
		return fmt.Errorf("client for NodePools: %w", err)
	}
	api, err := discovery.NewDiscoveryClientForConfigAndClient(mgr.GetConfig(), mgr.GetHTTPClient())
	if err != nil {
		return fmt.Errorf("client for discovery: %w", err)
	}
	known := newFacts()
	changes := make(chan event.TypedGenericEvent[[]request])
	tell := func(ctx context.Context, requests []request) {
		select {
		case changes <- event.TypedGenericEvent[[]request]{Object: requests}:
		case <-ctx.Done():
		}
	}
	r := &reconciler{
		facts: known, metrics: metrics, active: func() bool { return true },
		nodes: mgr.GetCache(), writer: mgr.GetClient(), writeStatus: patchStatus(pools),
		events: mgr.GetEventRecorder(controllerName), now: time.Now,
	}
	if o.Mode == Auto {
		owners, err := metadata.NewForConfigAndClient(metadata.ConfigFor(mgr.GetConfig()), mgr.GetHTTPClient())
		if err != nil {
			return fmt.Errorf("client for metadata: %w", err)
		}
		y := newYurtManager(owners, func(ctx context.Context) { tell(ctx, known.all()) })
		r.active = y.absent
		if err := mgr.Add(manager.RunnableFunc(y.run)); err != nil {
			return err
		}
	}
	metrics.active = r.active
	f := &follower{client: pools, resources: api.ServerResourcesForGroupVersionWithContext, facts: known, tell: tell, period: lookPeriod}
	if err := mgr.Add(manager.RunnableFunc(f.run)); err != nil {
		return err
	}
	return r.watch(mgr, changes)
}

// A request is for a look at a pool or, if it names one, at a node.
type request struct{ pool, node string }

func (r request) String() string { return cmp.Or(r.node, r.pool) }

func (r *reconciler) watch(mgr manager.Manager, changes <-chan event.TypedGenericEvent[[]request]) error {
	c, err := controller.NewTyped(controllerName, mgr, controller.TypedOptions[request]{Reconciler: r, MaxConcurrentReconciles: workers})
	if err != nil {
		return err
	}
	told := handler.TypedFuncs[[]request, request]{GenericFunc: func(_ context.Context, e event.TypedGenericEvent[[]request], q queue) {
		for _, request := range e.Object {
			q.Add(request)
		}
	}}
	for _, s := range []source.TypedSource[request]{
		source.TypedKind(mgr.GetCache(), &corev1.Node{}, r.facts.nodeHandler()),
		source.TypedKind(mgr.GetCache(), &corev1.Pod{}, r.facts.podHandler()),
		source.TypedChannel(changes, told),
	} {
		if err := c.Watch(s); err != nil {
			return err
		}
	}
	return nil
}
