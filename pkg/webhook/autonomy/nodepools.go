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

// lookAgain is how long a cluster's first NodePool may go unnoticed.
const lookAgain = 5 * time.Second

// errNotKnown means that nobody has looked yet. To take it for a cluster without NodePools
// would put back what pods of pools have.
var errNotKnown = errors.New("whether there are NodePools is not known yet")

// poolReader reads the annotations of NodePools, which a cluster may not have, or not yet.
// It runs as long as the manager, in every replica.
type poolReader struct {
	cache     cache.Cache
	resources func(ctx context.Context, groupVersion string) (*metav1.APIResourceList, error)
	// found is called once, when there are NodePools.
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

// Start looks for NodePools until there are any, and returns when ctx ends.
func (p *poolReader) Start(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	// Admission must not wait for Nodes when the first pod comes.
	if _, err := p.cache.GetInformer(ctx, &corev1.Node{}); err != nil && ctx.Err() == nil {
		return fmt.Errorf("watch Nodes: %w", err)
	}
	t := time.NewTicker(lookAgain)
	defer t.Stop()
	for {
		done, err := p.look(ctx)
		if done {
			logger.Info("Following NodePools", "version", p.kind.Load().Version)
			<-ctx.Done()
			return nil
		}
		if err != nil && ctx.Err() == nil {
			logger.Error(err, "NodePools cannot be followed, will try again")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
	}
}

// look takes the newest version that is served.
func (p *poolReader) look(ctx context.Context) (done bool, err error) {
	for _, version := range nodepool.Versions() {
		gvk := schema.GroupVersionKind{Group: nodepool.Group, Version: version, Kind: kindNodePool}
		resources, err := p.resources(ctx, gvk.GroupVersion().String())
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return false, err
		}
		if !slices.ContainsFunc(resources.APIResources, func(r metav1.APIResource) bool { return r.Name == nodepool.Resource }) {
			continue
		}
		if _, err := p.cache.GetInformer(ctx, partial(gvk)); err != nil {
			return false, err
		}
		if err := p.found(partial(gvk)); err != nil {
			return false, err
		}
		p.kind.Store(&gvk)
		p.looked.Store(true)
		return true, nil
	}
	p.looked.Store(true)
	return false, nil
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
