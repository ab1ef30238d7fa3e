// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package exclude keeps pods off host-network pools that say so by the annotation
// apps.openyurt.io/exclude-host-network-pool: "true". As an admission webhook it adds the
// required node affinity nodepool.openyurt.io/hostnetwork NotIn ["true"] to such Pods when
// they are created, and to the templates of DaemonSets, and warns of what has no effect or
// contradicts itself. It never refuses anything.
//
// The chart's admission policies do the same in CEL, for clusters that want no webhook.
// What is changed here must be changed there; test/admission holds both to one table.
package exclude

import (
	"context"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	registry "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

// nodesTimeout bounds how long a request waits for Nodes that are not in the cache yet: a
// warning is not worth a time-out of the API server's.
const nodesTimeout = 500 * time.Millisecond

// Path is where the server answers.
const Path = "/exclude"

// AddWebhooks serves the admission of Pods, DaemonSets, and, for warnings, of every other
// workload at Path. To tell which NodePools are host-network pools it looks at the Nodes in
// the manager's cache. Metrics are controller-runtime's registry's, so it can be called
// once in a process.
func AddWebhooks(mgr manager.Manager, server webhook.Server) error {
	m, err := newMetrics(registry.Registry)
	if err != nil {
		return err
	}
	server.Register(Path, &admission.Webhook{Handler: &handler{metrics: m, nodes: mgr.GetCache()}})
	return nil
}

// A handler answers admission requests. It is safe for concurrent use.
type handler struct {
	metrics *metrics
	nodes   client.Reader
}

// Handle allows every request.
func (h *handler) Handle(ctx context.Context, r admission.Request) admission.Response {
	v, err := judge(&r.AdmissionRequest, func(pool string) bool { return h.hostNetworkPool(ctx, pool) })
	if err != nil {
		klog.FromContext(ctx).Info("An object is left as it is, because it cannot be read", "resource", r.Resource, "object", klog.KRef(r.Namespace, r.Name), "reason", err)
		v = verdict{warnings: []warning{unreadable}}
	}
	if r.DryRun == nil || !*r.DryRun {
		h.count(&r.AdmissionRequest, v)
	}
	response := admission.Allowed("")
	response.Patches = v.patches
	for _, w := range v.warnings {
		response.Warnings = append(response.Warnings, w.text)
	}
	return response
}

func (h *handler) count(r *admissionv1.AdmissionRequest, v verdict) {
	if len(v.patches) > 0 {
		resource := r.Resource.Resource
		if r.Resource.Group == kruiseGroup {
			resource += "." + kruiseGroup
		}
		h.metrics.injections.WithLabelValues(resource).Inc()
	}
	for _, w := range v.warnings {
		h.metrics.warnings.WithLabelValues(w.reason).Inc()
	}
}

// hostNetworkPool reports whether the pool has nodes and all of them are host-network
// nodes. It goes by the nodes' labels because the scheduler does.
func (h *handler) hostNetworkPool(ctx context.Context, name string) bool {
	ctx, cancel := context.WithTimeout(ctx, nodesTimeout)
	defer cancel()
	var nodes corev1.NodeList
	if err := h.nodes.List(ctx, &nodes, client.MatchingLabels{nodepool.PoolLabel: name}, client.UnsafeDisableDeepCopyOption(true)); err != nil {
		klog.FromContext(ctx).Error(err, "Nodes are not known, so a warning may be missing")
		return false
	}
	for i := range nodes.Items {
		if nodes.Items[i].Labels[nodepool.HostNetworkLabel] != nodepool.True {
			return false
		}
	}
	return len(nodes.Items) > 0
}
