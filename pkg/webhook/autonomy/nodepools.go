// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package autonomy

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/manager"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

// lookAgain is how long a cluster's first NodePool, or another version, may go unnoticed.
const lookAgain = 5 * time.Second

// errNotKnown means that nobody has looked yet. To take it for a cluster without NodePools
// would put back what pods of pools have.
var errNotKnown = errors.New("whether there are NodePools is not known yet")

// poolReader reads the annotations of NodePools, which a cluster may not have, or not yet.
// It runs as long as the manager, in every replica.
type poolReader struct {
	cache     cache.Cache
	resources func(ctx context.Context, groupVersion string) (*metav1.APIResourceList, error)
	// found is called when there are NodePools, and again when there is another version.
	found func(*metav1.PartialObjectMetadata) error

	looked atomic.Bool
	kind   atomic.Pointer[schema.GroupVersionKind] // nil: there are none
}

func newPoolReader(mgr manager.Manager, found func(*metav1.PartialObjectMetadata) error) (*poolReader, error) {
	d, err := discovery.NewDiscoveryClientForConfigAndClient(mgr.GetConfig(), mgr.GetHTTPClient())
	if err != nil {
		return nil, err
	}
	p := &poolReader{cache: mgr.GetCache(), resources: d.ServerResourcesForGroupVersionWithContext, found: found}
	return p, mgr.Add(p)
}

// NeedLeaderElection is false: admission is every replica's.
func (*poolReader) NeedLeaderElection() bool { return false }

// Start looks for NodePools, and returns when ctx ends.
func (p *poolReader) Start(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	// Admission must not wait for Nodes when the first pod comes.
	if _, err := p.cache.GetInformer(ctx, &corev1.Node{}); err != nil && ctx.Err() == nil {
		return fmt.Errorf("watch Nodes: %w", err)
	}
	t := time.NewTicker(lookAgain)
	defer t.Stop()
	for {
		if err := p.look(ctx); err != nil && ctx.Err() == nil {
			logger.Error(err, "NodePools cannot be followed, will try again")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// look takes the newest version that is served. The one before may not be any more, and
// what is known by it would be out of date. Where none is served it stays: its informer
// is told what is deleted, and a single answer is no reason to put back what all pods have.
func (p *poolReader) look(ctx context.Context) error {
	gvk, err := p.newest(ctx)
	if err != nil {
		return err
	}
	before := p.kind.Load()
	if gvk == nil || before != nil && *before == *gvk {
		p.looked.Store(true)
		return nil
	}
	if _, err := p.cache.GetInformer(ctx, partial(*gvk)); err != nil {
		return err
	}
	p.kind.Store(gvk) // who is told looks there
	if err := p.found(partial(*gvk)); err != nil {
		p.kind.Store(before)
		return err
	}
	p.looked.Store(true)
	klog.FromContext(ctx).Info("Following NodePools", "version", gvk.Version)
	if before == nil {
		return nil
	}
	return p.cache.RemoveInformer(ctx, partial(*before))
}

// newest returns nil if there is none.
func (p *poolReader) newest(ctx context.Context) (*schema.GroupVersionKind, error) {
	for _, version := range nodepool.Versions() {
		gvk := schema.GroupVersionKind{Group: nodepool.Group, Version: version, Kind: kindNodePool}
		resources, err := p.resources(ctx, gvk.GroupVersion().String())
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(resources.APIResources, func(r metav1.APIResource) bool { return r.Name == nodepool.Resource }) {
			return &gvk, nil
		}
	}
	return nil, nil
}

func partial(gvk schema.GroupVersionKind) *metav1.PartialObjectMetadata {
	o := &metav1.PartialObjectMetadata{}
	o.SetGroupVersionKind(gvk)
	return o
}

// get returns the NodePool of a name, nil if there is none.
func (p *poolReader) get(ctx context.Context, name string) (*metav1.PartialObjectMetadata, error) {
	if !p.looked.Load() {
		return nil, errNotKnown
	}
	gvk := p.kind.Load()
	if gvk == nil {
		return nil, nil
	}
	pool := partial(*gvk)
	err := p.cache.Get(ctx, client.ObjectKey{Name: name}, pool)
	switch {
	case apierrors.IsNotFound(err):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("get NodePool %s: %w", name, err)
	}
	pool.SetGroupVersionKind(*gvk)
	return pool, nil
}
