// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

// lookPeriod is how often the API server is asked which versions of NodePool it has.
const lookPeriod = 5 * time.Second

// A nodePool is a NodePool of any version, as far as it matters here.
type nodePool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`

	Spec struct {
		HostNetwork bool `json:"hostNetwork"`
		attributes
	} `json:"spec"`
	Status status `json:"status"`
}

// attributes are what a pool gives to its nodes.
type attributes struct {
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Taints      []corev1.Taint    `json:"taints,omitempty"`
}

// status is what is written here. Others may write more.
type status struct {
	ReadyNodeNum   int                `json:"readyNodeNum"`
	UnreadyNodeNum int                `json:"unreadyNodeNum"`
	Nodes          []string           `json:"nodes"`
	Conditions     []metav1.Condition `json:"conditions"`
}

func readNodePool(u *unstructured.Unstructured) (*nodePool, error) {
	p := &nodePool{}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, p); err != nil {
		return nil, fmt.Errorf("decode NodePool %s: %w", u.GetName(), err)
	}
	return p, nil
}

func (p *nodePool) hostNetwork() bool {
	return nodepool.IsHostNetwork(p.Spec.HostNetwork, p.Annotations)
}

// sameForNodes reports whether nodes need not be looked at for the difference.
func (p *nodePool) sameForNodes(q *nodePool) bool {
	return p.UID == q.UID && p.hostNetwork() == q.hostNetwork() && p.Spec.attributes.equal(q.Spec.attributes)
}

func (a attributes) equal(b attributes) bool {
	return maps.Equal(a.Labels, b.Labels) && maps.Equal(a.Annotations, b.Annotations) && slices.EqualFunc(a.Taints, b.Taints, sameTaint)
}

func sameTaint(a, b corev1.Taint) bool { return a.MatchTaint(&b) && a.Value == b.Value }

func resourceOf(version string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: nodepool.Group, Version: version, Resource: nodepool.Resource}
}

// patchStatus returns a function that applies a JSON merge patch to the status of a
// NodePool, and returns what became of it.
func patchStatus(client dynamic.Interface) func(ctx context.Context, p *nodePool, patch []byte) (*nodePool, error) {
	return func(ctx context.Context, p *nodePool, patch []byte) (*nodePool, error) {
		options := metav1.PatchOptions{FieldManager: controllerName, FieldValidation: metav1.FieldValidationIgnore} // old versions have no conditions
		u, err := client.Resource(resourceOf(p.GroupVersionKind().Version)).Patch(ctx, p.Name, types.MergePatchType, patch, options, "status")
		if err != nil {
			return nil, err
		}
		return readNodePool(u)
	}
}

// A follower tells the facts of NodePools, in the newest version that the API server has.
// It waits for one, and takes another when there is a newer one.
type follower struct {
	client    dynamic.Interface
	resources func(ctx context.Context, groupVersion string) (*metav1.APIResourceList, error)
	facts     *facts
	tell      func(context.Context, []request)
	period    time.Duration
}

// run returns when ctx ends.
func (f *follower) run(ctx context.Context) error {
	version := "unknown"
	var running sync.WaitGroup
	defer running.Wait()
	stop := func() {}
	defer func() { stop() }()
	ticker := time.NewTicker(f.period)
	defer ticker.Stop()
	for {
		now, err := f.newest(ctx)
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "It is not known whether there are NodePools")
		}
		if err == nil && now != version {
			stop()
			running.Wait()
			stop = f.start(ctx, now, &running)
			version = now
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// newest returns the newest version, "" if there is none.
func (f *follower) newest(ctx context.Context) (string, error) {
	for _, version := range nodepool.Versions() {
		resources, err := f.resources(ctx, resourceOf(version).GroupVersion().String())
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("resources of %s: %w", version, err)
		}
		if slices.ContainsFunc(resources.APIResources, func(r metav1.APIResource) bool { return r.Name == nodepool.Resource }) {
			return version, nil
		}
	}
	return "", nil
}

// start follows NodePools in a version until the function that it returns is called.
func (f *follower) start(ctx context.Context, version string, running *sync.WaitGroup) (stop func()) {
	f.tell(ctx, f.facts.forget())
	if version == "" {
		klog.FromContext(ctx).Info("The API server has no NodePools, waiting")
		return func() {}
	}
	klog.FromContext(ctx).Info("Following NodePools", "version", version)
	ctx, stop = context.WithCancel(ctx)
	running.Go(func() {
		if err := f.follow(ctx, version); err != nil {
			klog.FromContext(ctx).Error(err, "NodePools are not followed", "version", version)
		}
	})
	return stop
}

func (f *follower) follow(ctx context.Context, version string) error {
	informer := dynamicinformer.NewFilteredDynamicInformer(f.client, resourceOf(version), "", 0, cache.Indexers{}, nil).Informer()
	set := func(object any) {
		u, ok := object.(*unstructured.Unstructured)
		if !ok {
			return
		}
		p, err := readNodePool(u)
		if err != nil {
			klog.FromContext(ctx).Error(err, "A NodePool is ignored")
			return
		}
		f.tell(ctx, f.facts.setPool(p))
	}
	told, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: set, UpdateFunc: func(_, object any) { set(object) },
		DeleteFunc: func(object any) {
			if key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(object); err == nil {
				f.tell(ctx, f.facts.removePool(key))
			}
		},
	})
	if err != nil {
		return err
	}
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { informer.RunWithContext(ctx) })
	if !cache.WaitForCacheSync(ctx.Done(), told.HasSynced) {
		return nil
	}
	f.facts.know()
	f.tell(ctx, f.facts.all())
	return nil
}
