// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nodeportisolation is a filter for kube-proxy: a Service of type NodePort or
// LoadBalancer can name the pools on whose nodes it listens. On others it does not exist.
package nodeportisolation

import (
	"context"
	"errors"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/edgehub/edgehub/pkg/filter"
)

// Annotation of a Service: the pools on whose nodes it listens, separated by commas. pool
// is one, -pool is one where it does not listen, * is all that are not named. Of entries
// that name the same the first counts. It does not listen in pools that are neither named
// nor meant by *; on nodes that are in no pool it does.
const Annotation = "nodeport.openyurt.io/listen"

var errPool = errors.New("the pool of this node is not known yet")

// Pool is what the filter has to know of this node's pool.
type Pool interface {
	// Name is "" for a node that is in no pool. known is false as long as that is open.
	Name() (name string, known bool)
	// Changed is closed at the next change of Name.
	Changed() <-chan struct{}
}

// Filter is nodeportisolation. Its entry must say that it withholds.
type Filter struct{ pool Pool }

var (
	_ filter.Filter    = (*Filter)(nil)
	_ filter.Dependent = (*Filter)(nil)
)

// New makes the filter.
func New(pool Pool) *Filter { return &Filter{pool} }

// Name is nodeportisolation.
func (*Filter) Name() string { return "nodeportisolation" }

// Ready is nil: a cluster in which nobody can say what pools there are has no annotated
// Services either, and its nodes need the others. Apply fails for those that there are.
func (*Filter) Ready() error { return nil }

// Changed is closed when the pool changes.
func (f *Filter) Changed() <-chan struct{} { return f.pool.Changed() }

// Apply drops annotated Services that do not listen in this node's pool. It is an error if
// there is one and the pool is not known.
func (f *Filter) Apply(_ context.Context, o *filter.Object) (filter.Verdict, error) {
	listen, ok, err := o.Annotation(Annotation)
	if err != nil || !ok {
		return filter.Keep, err
	}
	service, err := filter.As[corev1.Service](o)
	if err != nil {
		return filter.Keep, err
	}
	if t := service.Spec.Type; t != corev1.ServiceTypeNodePort && t != corev1.ServiceTypeLoadBalancer {
		return filter.Keep, nil
	}
	pool, known := f.pool.Name()
	switch {
	case !known:
		return filter.Keep, errPool
	case pool == "" || listens(listen, pool):
		return filter.Keep, nil
	}
	return filter.Drop, nil
}

// listens reports whether an annotation lets a Service listen in a pool.
func listens(annotation, pool string) bool {
	others, said := false, false // what * says
	for entry := range strings.SplitSeq(annotation, ",") {
		name, not := strings.CutPrefix(strings.TrimSpace(entry), "-")
		switch {
		case name == pool:
			return !not
		case name == "*" && !said:
			others, said = !not, true
		}
	}
	return others
}
