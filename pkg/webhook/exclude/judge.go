// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package exclude

import (
	"reflect"

	"gomodules.xyz/jsonpatch/v2"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	appsGroup   = "apps"
	kruiseGroup = "apps.kruise.io"
)

// A verdict is what becomes of a request. It is never a refusal.
type verdict struct {
	patches  []jsonpatch.Operation
	warnings []warning
}

// judge is the whole rule: it looks at the request alone, and at hostNetworkPool, which
// tells whether a NodePool is known to be a host-network pool. An error means that the
// object cannot be understood.
func judge(r *admissionv1.AdmissionRequest, hostNetworkPool func(name string) bool) (verdict, error) {
	if r.SubResource != "" || r.Operation != admissionv1.Create && r.Operation != admissionv1.Update {
		return verdict{}, nil
	}
	if r.Resource.Group == corev1.GroupName && r.Resource.Resource == "pods" {
		p, old, err := decodeBoth(r, decodePod)
		if err != nil || p.mirror() {
			return verdict{}, err
		}
		if old != nil {
			return judgeUpdate(p, old, hostNetworkPool), nil
		}
		return judgeCreate(p, hostNetworkPool), nil
	}
	w, old, err := decodeBoth(r, decodeWorkload)
	if err != nil || w.same(old) {
		return verdict{}, err
	}
	if isDaemonSet(r.Resource) {
		return judgeDaemonSet(w, old, hostNetworkPool), nil
	}
	if w.Metadata.controller() != nil {
		return verdict{}, nil // what made it has been told
	}
	return verdict{warnings: warningsOf(w, hostNetworkPool)}, nil
}

// decodeBoth decodes the object and, of an update, its older state.
func decodeBoth[T any](r *admissionv1.AdmissionRequest, decode func([]byte) (*T, error)) (now, old *T, err error) {
	if now, err = decode(r.Object.Raw); err != nil || r.Operation == admissionv1.Create {
		return now, nil, err
	}
	old, err = decode(r.OldObject.Raw)
	return now, old, err
}

func isDaemonSet(r metav1.GroupVersionResource) bool {
	return r.Resource == "daemonsets" && (r.Group == appsGroup || r.Group == kruiseGroup)
}

// judgeCreate injects into pods that a scheduler is going to place.
func judgeCreate(p *pod, hostNetworkPool func(string) bool) verdict {
	switch {
	case nearMiss(p.Metadata.value()):
		return verdict{warnings: []warning{badValue}}
	case !p.Metadata.marked():
		return verdict{}
	case p.ofDaemonSet():
		// The DaemonSet's controller has decided for this node already, by the template. With
		// an affinity against the node the pod would be pending for ever.
		return verdict{warnings: []warning{daemonSetPod}}
	case p.placed():
		// kubelet would refuse a pod that says two things.
		return verdict{warnings: []warning{nodeName}}
	}
	return verdict{p.patch(""), p.contradictions(hostNetworkPool)}
}

// judgeUpdate injects only as long as scheduling gates hold the pod back: until then the
// API lets requirements be added to terms, and terms to pods without any. Of all other
// pods the affinity is immutable, and a patch would turn a harmless update into an error.
func judgeUpdate(p, old *pod, hostNetworkPool func(string) bool) (v verdict) {
	told := p.Metadata.value() == old.Metadata.value()
	injectable := old.gated() && !p.placed() && !p.ofDaemonSet()
	switch {
	case p.Metadata.marked() && injectable:
		v.patches = p.patch("")
		if !told {
			v.warnings = p.contradictions(hostNetworkPool)
		}
	case told:
	case p.Metadata.marked():
		v.warnings = []warning{tooLate}
	case nearMiss(p.Metadata.value()):
		v.warnings = []warning{badValue}
	}
	return v
}

// judgeDaemonSet injects into the template, which the DaemonSet's controller judges nodes
// by; but never into one that the request leaves alone, because that would roll all its
// pods for an update of something else.
func judgeDaemonSet(w, old *workload, hostNetworkPool func(string) bool) verdict {
	v := verdict{warnings: warningsOf(w, hostNetworkPool)}
	switch {
	case w.Template == nil || old != nil && reflect.DeepEqual(w.raw, old.raw):
	case w.Template.Metadata.marked():
		v.patches = w.Template.patch("/spec/template")
	case old != nil && old.Template != nil && old.Template.Metadata.marked() && w.Template.excluded():
		v.warnings = append(v.warnings, leftBehind)
	}
	return v
}

// warningsOf looks at the annotation in all the places where people put it.
func warningsOf(w *workload, hostNetworkPool func(string) bool) (found []warning) {
	t := w.Template
	own := w.Metadata.marked() || nearMiss(w.Metadata.value())
	if own && (t == nil || !t.Metadata.marked()) {
		found = append(found, misplaced)
	}
	switch {
	case t == nil:
	case nearMiss(t.Metadata.value()):
		found = append(found, badValue)
	case t.Metadata.marked():
		found = append(found, t.contradictions(hostNetworkPool)...)
		if t.placed() {
			found = append(found, nodeName)
		}
	}
	return found
}
