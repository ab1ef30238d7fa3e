// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package hostnetworkpool

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/filter"
	"github.com/edgehub/edgehub/pkg/hostport"
	"github.com/edgehub/edgehub/pkg/nodepool"
)

// A pod is what is kept of one. It does not change.
type pod struct {
	uid, resourceVersion, namespace, name string

	hostNetwork bool
	terminal    bool // it has succeeded or failed
	excluded    bool // it asks to stay off host-network pools
	ports       []hostport.Port
}

func newPod(p *corev1.Pod) *pod {
	return &pod{
		uid: string(p.UID), resourceVersion: p.ResourceVersion, namespace: p.Namespace, name: p.Name,
		hostNetwork: p.Spec.HostNetwork,
		terminal:    p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed,
		excluded:    p.Annotations[nodepool.ExcludeAnnotation] == nodepool.True,
		ports:       hostport.Held(p),
	}
}

// An entry is a pod of the node, by its uid, and when it was last seen.
type entry struct {
	*pod
	seen    uint64
	version uint64 // the resourceVersion as a number, 0 if it is none
}

// An observation is one list or watch of the node's pods. Several may be under way: an
// answer may still be looked at when its client has gone on to the next.
type observation struct {
	observer *Observer
	since    uint64 // the observer's clock at its beginning
	unsure   bool   // there was an object that could not be read
	// gone are the uids of pods that others saw deleted since. Guarded by the observer's mu.
	gone map[string]bool
}

func (s *observation) See(kind watch.EventType, obj *filter.Object) {
	if id, ok := obj.Peek(); ok && kind != watch.Deleted && s.observer.hasVersion(id) {
		return
	}
	m, err := obj.Meta()
	if err != nil || m.UID == "" || obj.Shape().Kind != "Pod" {
		s.skip()
		return
	}
	o := s.observer
	if kind == watch.Deleted {
		o.remove(s, m.UID)
		return
	}
	if o.has(m) {
		return
	}
	p, err := filter.As[corev1.Pod](obj)
	if err != nil {
		s.skip()
		return
	}
	o.put(s, newPod(p))
}

func (s *observation) skip() {
	s.unsure = true
	s.observer.metrics.unreadable.Inc()
}

// Synced forgets the pods that were not seen since the observation began, by it or, as
// they may be newer, by another one.
func (s *observation) Synced() {
	if !s.unsure {
		s.observer.forget(s.since)
	}
}

// End changes nothing: what an answer did not say before it broke off may still be so.
func (s *observation) End(bool) {
	o := s.observer
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.open, s)
}

// hasVersion reports whether this very version of a pod is known already.
func (o *Observer) hasVersion(id codec.Identity) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.key = append(append(append(o.key[:0], id.Namespace...), '/'), id.Name...)
	e, version := o.byName[string(o.key)], number(id.ResourceVersion)
	if e == nil || version == 0 || e.version != version {
		return false
	}
	o.clock++
	e.seen = o.clock
	return true
}

// number reads a resourceVersion, 0 for one that is no number.
func number(rv []byte) (n uint64) {
	const most = 19 // digits that always fit
	if len(rv) > most {
		return 0
	}
	for _, c := range rv {
		if c < '0' || c > '9' {
			return 0
		}
		n = 10*n + uint64(c-'0')
	}
	return n
}

// has reports whether this state of a pod is known already, or a later one.
func (o *Observer) has(m codec.Meta) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	e, ok := o.pods[m.UID]
	if !ok {
		return false
	}
	o.clock++
	e.seen = o.clock
	if e.resourceVersion == m.ResourceVersion {
		return true
	}
	order, err := resourceversion.CompareResourceVersion(m.ResourceVersion, e.resourceVersion)
	return err == nil && order < 0
}

func (o *Observer) put(s *observation, p *pod) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if s.gone[p.uid] {
		return
	}
	o.clock++
	was := o.pods[p.uid]
	e := &entry{p, o.clock, number([]byte(p.resourceVersion))}
	o.pods[p.uid], o.byName[p.namespace+"/"+p.name] = e, e
	if was == nil || !same(was.pod, p) {
		o.touch()
	}
}

// remove forgets a pod for good: no uid comes back, so that what others say of it is old.
func (o *Observer) remove(s *observation, uid string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(s.gone, uid)
	for other := range o.open {
		if other != s {
			other.gone[uid] = true
		}
	}
	if e, ok := o.pods[uid]; ok {
		o.drop(e)
		o.touch()
	}
}

// drop forgets a pod. The caller holds mu.
func (o *Observer) drop(e *entry) {
	delete(o.pods, e.uid)
	if key := e.namespace + "/" + e.name; o.byName[key] == e {
		delete(o.byName, key)
	}
}

func (o *Observer) forget(since uint64) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.whole = true
	for _, e := range o.pods {
		if e.seen <= since {
			o.drop(e)
		}
	}
	o.touch()
}
