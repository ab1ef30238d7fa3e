// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package masterservice is a filter for kubelet: the Service default/kubernetes has the
// hub's address, so that the environment of pods (KUBERNETES_SERVICE_HOST and _PORT, by
// which client libraries find the API server) leads to the hub.
//
// The filters that have to do with the same Service share its name and [Hub].
package masterservice

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/edgehub/edgehub/pkg/filter"
)

// Where the API server says how pods find it.
const (
	Namespace   = "default"
	ServiceName = "kubernetes"
	PortName    = "https"
)

var (
	errAddress = errors.New("pods cannot reach it; set --link-local-address to an address of the node's that they reach")
	errPort    = errors.New("it has no port named " + PortName)
)

// A Hub is where the hub answers pods. A filter that embeds one is filter.Conditional.
type Hub struct {
	netip.AddrPort
	err error
}

// NewHub checks an address. Pods have a loopback of their own, and cannot name one of the
// node's interfaces: with such an address Usable says what to do.
func NewHub(address netip.AddrPort) Hub {
	ip := address.Addr().Unmap()
	h := Hub{AddrPort: netip.AddrPortFrom(ip, address.Port())}
	if !address.IsValid() || address.Port() == 0 || ip.IsLoopback() || ip.IsUnspecified() || ip.IsMulticast() || ip.Zone() != "" {
		h.err = fmt.Errorf("the hub's address for pods is %s: %w", address, errAddress)
	}
	return h
}

// Usable is nil if the address is one that pods can reach.
func (h Hub) Usable() error { return h.err }

// Filter is masterservice.
type Filter struct{ Hub }

var (
	_ filter.Filter      = (*Filter)(nil)
	_ filter.Conditional = (*Filter)(nil)
)

// New makes the filter of the address at which the hub answers pods.
func New(hub netip.AddrPort) *Filter { return &Filter{NewHub(hub)} }

// Name is masterservice.
func (*Filter) Name() string { return "masterservice" }

// Apply changes cluster IP and https port of default/kubernetes.
func (f *Filter) Apply(_ context.Context, o *filter.Object) (filter.Verdict, error) {
	if is, err := o.Is(Namespace, ServiceName); err != nil || !is {
		return filter.Keep, err
	}
	if err := f.Usable(); err != nil {
		return filter.Keep, err
	}
	service, err := filter.As[corev1.Service](o)
	if err != nil {
		return filter.Keep, err
	}
	spec := &service.Spec
	at := slices.IndexFunc(spec.Ports, func(p corev1.ServicePort) bool { return p.Name == PortName })
	if at < 0 {
		return filter.Keep, errPort
	}
	ip, port := f.Addr().String(), int32(f.Port())
	if spec.ClusterIP == ip && slices.Equal(spec.ClusterIPs, []string{ip}) && spec.Ports[at].Port == port {
		return filter.Keep, nil
	}
	spec.ClusterIP, spec.ClusterIPs, spec.Ports[at].Port = ip, []string{ip}, port
	return filter.Change, nil
}
