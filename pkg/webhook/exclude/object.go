// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package exclude

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/json"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

// A pod is what counts of a Pod, or of a template of Pods.
type pod struct {
	Metadata metadata `json:"metadata"`
	Spec     *podSpec `json:"spec"` // nil if there is none, as in a custom resource that is yet to be refused
}

type podSpec struct {
	NodeName        string            `json:"nodeName"`
	NodeSelector    map[string]string `json:"nodeSelector"`
	HostNetwork     bool              `json:"hostNetwork"`
	Affinity        *corev1.Affinity  `json:"affinity"`
	SchedulingGates []any             `json:"schedulingGates"`
}

type metadata struct {
	Annotations     map[string]string       `json:"annotations"`
	OwnerReferences []metav1.OwnerReference `json:"ownerReferences"`
}

// value is that of the annotation, "" without.
func (m metadata) value() string { return m.Annotations[nodepool.ExcludeAnnotation] }

// marked reports whether the annotation is there and counts.
func (m metadata) marked() bool { return m.value() == nodepool.True }

func (m metadata) controller() *metav1.OwnerReference {
	i := slices.IndexFunc(m.OwnerReferences, func(r metav1.OwnerReference) bool { return r.Controller != nil && *r.Controller })
	if i < 0 {
		return nil
	}
	return &m.OwnerReferences[i]
}

// mirror reports whether the Pod only shows a static pod of a kubelet's.
func (p *pod) mirror() bool {
	_, ok := p.Metadata.Annotations[corev1.MirrorPodAnnotationKey]
	return ok
}

// ofDaemonSet reports whether the Pod belongs to a DaemonSet whose template is looked
// after.
func (p *pod) ofDaemonSet() bool {
	c := p.Metadata.controller()
	return c != nil && c.Kind == "DaemonSet" && (strings.HasPrefix(c.APIVersion, appsGroup+"/") || strings.HasPrefix(c.APIVersion, kruiseGroup+"/"))
}

func (p *pod) gated() bool { return p.Spec != nil && len(p.Spec.SchedulingGates) > 0 }

// placed reports whether the Pod has its node already.
func (p *pod) placed() bool { return p.Spec != nil && p.Spec.NodeName != "" }

// A workload is what counts of an object that makes Pods.
type workload struct {
	Metadata metadata
	Spec     any  // compared only
	Template *pod // nil without one
	raw      any  // the template, compared only
}

// same reports whether nothing that counts differs from an older state; nil: there is none.
func (w *workload) same(old *workload) bool {
	return old != nil && w.Metadata.value() == old.Metadata.value() && reflect.DeepEqual(w.Spec, old.Spec)
}

func decodePod(raw []byte) (*pod, error) {
	p := &pod{}
	if err := json.Unmarshal(raw, p); err != nil {
		return nil, fmt.Errorf("decode a pod: %w", err)
	}
	return p, nil
}

func decodeWorkload(raw []byte) (*workload, error) {
	var o struct {
		Metadata metadata `json:"metadata"`
		Spec     any      `json:"spec"`
	}
	if err := json.Unmarshal(raw, &o); err != nil {
		return nil, fmt.Errorf("decode a workload: %w", err)
	}
	w := &workload{Metadata: o.Metadata, Spec: o.Spec, raw: template(o.Spec)}
	if w.raw == nil {
		return w, nil
	}
	b, err := json.Marshal(w.raw)
	if err != nil {
		return nil, fmt.Errorf("encode a pod template: %w", err)
	}
	w.Template, err = decodePod(b)
	return w, err
}

// template finds the pod template of a spec: its own, that of its job template (CronJob),
// or that of the one template of a workload in its template (AdvancedCronJob,
// UnitedDeployment).
func template(spec any) any {
	if t := at(spec, "jobTemplate", "spec", "template"); t != nil {
		return t
	}
	own, _ := at(spec, "template").(map[string]any)
	for name, inner := range own {
		if t := at(inner, "spec", "template"); t != nil && strings.HasSuffix(name, "Template") {
			return t
		}
	}
	if own == nil {
		return nil
	}
	return own
}

// at follows the fields; nil if there is nothing.
func at(o any, fields ...string) any {
	for _, f := range fields {
		m, _ := o.(map[string]any)
		o = m[f]
	}
	return o
}
