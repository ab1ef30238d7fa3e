// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package discardcloudservice is a filter for kube-proxy: LoadBalancer Services that are
// meant for the cloud alone do not exist on this node. kube-proxy would otherwise answer
// for the load balancer's address itself, and send its traffic to pods that the node may
// not reach; without the Service, packets leave for the load balancer.
package discardcloudservice

import (
	"context"

	corev1 "k8s.io/api/core/v1"

	"github.com/edgehub/edgehub/pkg/filter"
)

// Annotation of a Service that is to be withheld, if its value is true.
const Annotation = "svc.openyurt.io/discard"

// Filter is discardcloudservice. Its entry must say that it withholds.
type Filter struct{}

var _ filter.Filter = Filter{}

// New makes the filter.
func New() Filter { return Filter{} }

// Name is discardcloudservice.
func (Filter) Name() string { return "discardcloudservice" }

// Apply drops annotated Services of type LoadBalancer.
func (Filter) Apply(_ context.Context, o *filter.Object) (filter.Verdict, error) {
	if value, _, err := o.Annotation(Annotation); err != nil || value != "true" {
		return filter.Keep, err
	}
	service, err := filter.As[corev1.Service](o)
	if err != nil || service.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return filter.Keep, err
	}
	return filter.Drop, nil
}
