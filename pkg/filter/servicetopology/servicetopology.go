// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package servicetopology is a filter for those who send traffic to Services: of the
// endpoints of an annotated Service they see only those on this node, or in this node's
// pool. It goes by the Services and by the pool, and knows nothing without them.
package servicetopology

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/filter"
	"github.com/edgehub/edgehub/pkg/follow"
)

// Annotation of a Service whose endpoints are to be near.
const Annotation = "openyurt.io/topologyKeys"

// What the annotation may say. Everything else is as if it were not there.
const (
	OnNode = "kubernetes.io/hostname"
	InPool = "openyurt.io/nodepool"
	InZone = "kubernetes.io/zone" // the same as InPool
)

var errPool = errors.New("the nodes of this node's pool are not known yet")

// Pool is what the filter has to know of this node's pool.
type Pool interface {
	// Nodes are the names of those in the pool; none if this node is in no pool. known is
	// false as long as that is open.
	Nodes() (names []string, known bool)
	// Changed is closed at the next change of Nodes.
	Changed() <-chan struct{}
}

// Services is what the filter has to know of Services: the annotation of those that have
// one of the values above.
type Services interface {
	Get(namespace, name string) (topology string, ok bool)
	All() map[string]string
	// Err is nil once they are known.
	Err() error
	// Changed is closed at the next change of any of these.
	Changed() <-chan struct{}
}

var _ Services = (*follow.Table[string])(nil)

// NewServices makes a table of the annotations that its Run follows, of all Services in
// the cluster.
func NewServices(source follow.Source) *follow.Table[string] {
	query := follow.Query{GroupVersionResource: schema.GroupVersionResource{Version: "v1", Resource: "services"}}
	return follow.New(source, query, func(shape codec.Shape, bare []byte) (string, bool, error) {
		topology, _, err := codec.ReadAnnotation(shape.Representation, bare, Annotation)
		return topology, topology == OnNode || ofPool(topology), err
	})
}

func ofPool(topology string) bool { return topology == InPool || topology == InZone }

// Filter is servicetopology.
type Filter struct {
	node     string
	pool     Pool
	services Services

	mu      sync.Mutex // guards what follows
	changed chan struct{}
}

var (
	_ filter.Filter    = (*Filter)(nil)
	_ filter.Dependent = (*Filter)(nil)
)

// New makes the filter of a node.
func New(node string, pool Pool, services Services) *Filter {
	return &Filter{node: node, pool: pool, services: services, changed: make(chan struct{})}
}

// Name is servicetopology.
func (*Filter) Name() string { return "servicetopology" }

// Ready is nil once the Services are known, and the pool if one of them asks for it.
func (f *Filter) Ready() error {
	if err := f.services.Err(); err != nil {
		return err
	}
	if _, known := f.pool.Nodes(); known {
		return nil
	}
	for _, topology := range f.services.All() {
		if ofPool(topology) {
			return errPool
		}
	}
	return nil
}

// Changed is closed by Run when Services or the pool have changed.
func (f *Filter) Changed() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

// Run tells of changes until ctx ends.
func (f *Filter) Run(ctx context.Context) error {
	for {
		pool, services := f.pool.Changed(), f.services.Changed()
		f.notify() // whoever asks from now on is told of what these two tell
		select {
		case <-ctx.Done():
			return nil
		case <-pool:
		case <-services:
		}
	}
}

func (f *Filter) notify() {
	f.mu.Lock()
	defer f.mu.Unlock()
	close(f.changed)
	f.changed = make(chan struct{})
}

// Apply removes the endpoints that are not near enough, of EndpointSlices and Endpoints. An
// endpoint without a node is nowhere near. A node that is in no pool is one by itself. It
// is an error if the Services are not known, or not the pool that one of them asks for.
func (f *Filter) Apply(_ context.Context, o *filter.Object) (filter.Verdict, error) {
	if err := f.services.Err(); err != nil {
		return filter.Keep, err
	}
	namespace, service, err := serviceOf(o)
	if err != nil {
		return filter.Keep, err
	}
	topology, ok := f.services.Get(namespace, service)
	if !ok {
		return filter.Keep, nil
	}
	near := []string{f.node}
	if ofPool(topology) {
		nodes, known := f.pool.Nodes()
		if !known {
			return filter.Keep, fmt.Errorf("service %s/%s: %w", namespace, service, errPool)
		}
		near = append(near, nodes...)
	}
	return keepNear(o, func(node *string) bool { return node != nil && slices.Contains(near, *node) })
}

// serviceOf names the Service that endpoints are of: Endpoints by their own name, slices by
// a label; "" if they are of none.
func serviceOf(o *filter.Object) (namespace, name string, err error) {
	if o.Shape().Kind == "Endpoints" {
		m, err := o.Meta()
		return m.Namespace, m.Name, err
	}
	slice, err := filter.As[discoveryv1.EndpointSlice](o)
	if err != nil {
		return "", "", err
	}
	return slice.Namespace, slice.Labels[discoveryv1.LabelServiceName], nil
}

func keepNear(o *filter.Object, near func(node *string) bool) (filter.Verdict, error) {
	object, err := o.Decode()
	if err != nil {
		return filter.Keep, err
	}
	verdict := filter.Keep
	switch e := object.(type) {
	case *discoveryv1.EndpointSlice:
		e.Endpoints = slices.DeleteFunc(e.Endpoints, func(e discoveryv1.Endpoint) bool {
			if near(e.NodeName) {
				return false
			}
			verdict = filter.Change
			return true
		})
	case *corev1.Endpoints: //nolint:staticcheck // clients that are older than EndpointSlice
		verdict = keepNearEndpoints(e, near)
	}
	return verdict, nil
}

func keepNearEndpoints(e *corev1.Endpoints, near func(node *string) bool) filter.Verdict { //nolint:staticcheck // see above
	verdict := filter.Keep
	far := func(a corev1.EndpointAddress) bool {
		if near(a.NodeName) {
			return false
		}
		verdict = filter.Change
		return true
	}
	for i := range e.Subsets {
		s := &e.Subsets[i]
		s.Addresses, s.NotReadyAddresses = slices.DeleteFunc(s.Addresses, far), slices.DeleteFunc(s.NotReadyAddresses, far)
	}
	if verdict == filter.Change {
		e.Subsets = slices.DeleteFunc(e.Subsets, func(s corev1.EndpointSubset) bool { //nolint:staticcheck // see above
			return len(s.Addresses)+len(s.NotReadyAddresses) == 0
		})
	}
	return verdict
}
