// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package forwardkubesvctraffic is a filter for kube-proxy: behind the Service
// default/kubernetes there is the hub, and nothing else. Pods that go to its cluster IP,
// whatever their environment says, come to the hub.
package forwardkubesvctraffic

import (
	"context"
	"net/netip"
	"reflect"
	"slices"

	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/edgehub/edgehub/pkg/filter"
	"github.com/edgehub/edgehub/pkg/filter/masterservice"
)

// Filter is forwardkubesvctraffic. Its entry comes after that of servicetopology, which
// knows no node of the hub's endpoint.
type Filter struct {
	masterservice.Hub
	addressType discoveryv1.AddressType
}

var (
	_ filter.Filter      = (*Filter)(nil)
	_ filter.Conditional = (*Filter)(nil)
)

// New makes the filter of the address at which the hub answers pods.
func New(hub netip.AddrPort) *Filter {
	f := &Filter{masterservice.NewHub(hub), discoveryv1.AddressTypeIPv4}
	if f.Addr().Is6() {
		f.addressType = discoveryv1.AddressTypeIPv6
	}
	return f
}

// Name is forwardkubesvctraffic.
func (*Filter) Name() string { return "forwardkubesvctraffic" }

// Apply makes the hub the one endpoint of the slices of default/kubernetes. It leaves
// alone those of the other address family, for which there is no hub, and those without
// an https port.
func (f *Filter) Apply(_ context.Context, o *filter.Object) (filter.Verdict, error) {
	if m, err := o.Meta(); err != nil || m.Namespace != masterservice.Namespace {
		return filter.Keep, err
	}
	slice, err := filter.As[discoveryv1.EndpointSlice](o)
	if err != nil || slice.Labels[discoveryv1.LabelServiceName] != masterservice.ServiceName {
		return filter.Keep, err
	}
	if err := f.Usable(); err != nil {
		return filter.Keep, err
	}
	at := slices.IndexFunc(slice.Ports, func(p discoveryv1.EndpointPort) bool { return p.Name != nil && *p.Name == masterservice.PortName })
	if at < 0 || slice.AddressType != f.addressType {
		return filter.Keep, nil
	}
	hub := []discoveryv1.Endpoint{{Addresses: []string{f.Addr().String()}, Conditions: discoveryv1.EndpointConditions{Ready: new(true)}}}
	port := int32(f.Port())
	if p := slice.Ports[at].Port; p != nil && *p == port && reflect.DeepEqual(slice.Endpoints, hub) {
		return filter.Keep, nil
	}
	slice.Endpoints, slice.Ports[at].Port = hub, &port
	return filter.Change, nil
}
