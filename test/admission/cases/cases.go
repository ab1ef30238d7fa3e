// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cases is the table of what becomes of objects on their way into a cluster with
// host-network pools. The tests of pkg/webhook/exclude hold the rule to it, and
// test/admission the webhook and the policies, so that they cannot come apart.
package cases

import (
	_ "embed"
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"
)

//go:embed cases.yaml
var table []byte

// What things are called. It is a contract with OpenYurt, and written out here so that a
// slip elsewhere shows.
const (
	Annotation = "apps.openyurt.io/exclude-host-network-pool"
	Label      = "nodepool.openyurt.io/hostnetwork"
	PoolLabel  = "apps.openyurt.io/nodepool"
	// HostPool has host-network nodes only.
	HostPool = "hosts"
	// PlainPool has none.
	PlainPool = "plain"
)

// Warnings are the texts of all reasons.
var Warnings = map[string]string{
	"value":         `exclude-host-network-pool is ignored, its value is not exactly "true": write "true" or remove it`,
	"misplaced":     "exclude-host-network-pool has no effect here: put it among the annotations of the pod template",
	"daemonset-pod": "exclude-host-network-pool of a DaemonSet's pod has no effect: set it in the DaemonSet's template",
	"host-network":  "hostNetwork pods can use host-network pools: remove exclude-host-network-pool if this one may",
	"node-selector": "nodeSelector asks for host-network nodes, exclude-host-network-pool forbids them: remove one",
	"pool-selector": "nodeSelector asks for a host-network pool, exclude-host-network-pool forbids it: remove one",
	"node-affinity": "node affinity asks for host-network nodes, exclude-host-network-pool forbids them: remove one",
	"node-name":     "spec.nodeName bypasses the scheduler, so exclude-host-network-pool has no effect: remove one",
	"too-late":      "exclude-host-network-pool has no effect on a pod that exists: delete it and create it again",
	"left-behind":   "the template still keeps pods off host-network nodes: remove its node affinity as well",
	"unreadable":    "edgehub cannot read this object's pod template and leaves it as it is: check its fields",
}

// A State is what an object says, see cases.yaml.
type State struct {
	Value        *string        `json:"value"`
	Own          *string        `json:"own"`
	Terms        []any          `json:"terms"`
	Affinity     map[string]any `json:"affinity"`
	Metadata     map[string]any `json:"metadata"`
	OwnMetadata  map[string]any `json:"ownMetadata"`
	Spec         map[string]any `json:"spec"`
	WorkloadSpec map[string]any `json:"workloadSpec"`
}

// A Case is a request and what is expected of it.
type Case struct {
	State
	Name           string    `json:"name"`
	Kind           string    `json:"kind"`
	Old            *State    `json:"old"`
	Want           []any     `json:"want"`
	Warnings       []string  `json:"warnings"`
	PolicyWarnings *[]string `json:"policyWarnings"`
	Refused        string    `json:"refused"`
}

// A kind is where an object has its pod.
type kind struct {
	kind     string
	resource schema.GroupVersionResource
	pod      []string // the path of the pod template; nil: the object is the pod
	restart  string   // restartPolicy, if not the default
}

var (
	inSpec = []string{"spec", "template"}

	kinds = map[string]kind{
		"Pod":                   {"Pod", gvr("", "v1", "pods"), nil, ""},
		"DaemonSet":             {"DaemonSet", gvr("apps", "v1", "daemonsets"), inSpec, ""},
		"Deployment":            {"Deployment", gvr("apps", "v1", "deployments"), inSpec, ""},
		"ReplicaSet":            {"ReplicaSet", gvr("apps", "v1", "replicasets"), inSpec, ""},
		"StatefulSet":           {"StatefulSet", gvr("apps", "v1", "statefulsets"), inSpec, ""},
		"ReplicationController": {"ReplicationController", gvr("", "v1", "replicationcontrollers"), inSpec, ""},
		"Job":                   {"Job", gvr("batch", "v1", "jobs"), inSpec, "Never"},
		"CronJob":               {"CronJob", gvr("batch", "v1", "cronjobs"), []string{"spec", "jobTemplate", "spec", "template"}, "Never"},
		"KruiseDaemonSet":       {"DaemonSet", gvr("apps.kruise.io", "v1beta1", "daemonsets"), inSpec, ""},
		"KruiseDaemonSetAlpha":  {"DaemonSet", gvr("apps.kruise.io", "v1alpha1", "daemonsets"), inSpec, ""},
		"CloneSet":              {"CloneSet", gvr("apps.kruise.io", "v1alpha1", "clonesets"), inSpec, ""},
		"UnitedDeployment":      {"UnitedDeployment", gvr("apps.kruise.io", "v1alpha1", "uniteddeployments"), []string{"spec", "template", "statefulSetTemplate", "spec", "template"}, ""},
	}
)

func gvr(group, version, resource string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: group, Version: version, Resource: resource}
}

// All returns the table.
func All() ([]Case, error) {
	var f struct {
		Cases []Case `json:"cases"`
	}
	if err := yaml.Unmarshal(table, &f); err != nil {
		return nil, err
	}
	for i := range f.Cases {
		c := &f.Cases[i]
		if c.Kind == "" {
			c.Kind = "Pod"
		}
		if _, ok := kinds[c.Kind]; !ok {
			return nil, fmt.Errorf("case %q: unknown kind %s", c.Name, c.Kind)
		}
		for _, reason := range c.Warnings {
			if Warnings[reason] == "" {
				return nil, fmt.Errorf("case %q: unknown warning %s", c.Name, reason)
			}
		}
	}
	return f.Cases, nil
}

// Resource is what the case is a request for.
func (c *Case) Resource() schema.GroupVersionResource { return kinds[c.Kind].resource }

// Object is the one that is created or updated to, with a name.
func (c *Case) Object(namespace, name string) *unstructured.Unstructured {
	return c.build(&c.State, namespace, name)
}

// OldObject is the one that is updated, nil if the case creates one.
func (c *Case) OldObject(namespace, name string) *unstructured.Unstructured {
	if c.Old == nil {
		return nil
	}
	return c.build(c.Old, namespace, name)
}

// Affinity returns that of the pod or pod template in an object.
func (c *Case) Affinity(object map[string]any) any { return c.podSpec(object)["affinity"] }

// SetAffinity replaces it; nil: there is none.
func (c *Case) SetAffinity(object map[string]any, affinity any) {
	if affinity == nil {
		delete(c.podSpec(object), "affinity")
		return
	}
	c.podSpec(object)["affinity"] = affinity
}

// podSpec is nil if there is none.
func (c *Case) podSpec(object map[string]any) map[string]any {
	for _, f := range append(slices.Clone(kinds[c.Kind].pod), "spec") {
		object, _ = object[f].(map[string]any)
	}
	return object
}

// WantAffinity is what Affinity is to be afterwards.
func (c *Case) WantAffinity() any {
	want := c.State
	if c.Want != nil {
		want.Terms = c.Want
	}
	return c.Affinity(c.build(&want, "", "").Object)
}

// build never shares anything with the case.
func (c *Case) build(s *State, namespace, name string) *unstructured.Unstructured {
	k := kinds[c.Kind]
	spec := map[string]any{
		"containers":    []any{map[string]any{"name": "c", "image": "example.com/i"}},
		"schedulerName": "nobody", "terminationGracePeriodSeconds": int64(0),
	}
	if k.restart != "" {
		spec["restartPolicy"] = k.restart
	}
	maps.Copy(spec, clone(s.Spec))
	if a := s.affinity(); a != nil {
		spec["affinity"] = a
	}
	pod := map[string]any{"metadata": s.metadata(s.Metadata, s.Value), "spec": spec}
	object := pod
	if k.pod != nil {
		set(pod, map[string]any{"app": name}, "metadata", "labels")
		object = map[string]any{"metadata": s.metadata(s.OwnMetadata, s.Own), "spec": clone(s.WorkloadSpec)}
		switch {
		case k.kind == "ReplicationController":
			set(object, map[string]any{"app": name}, "spec", "selector")
		case k.restart == "":
			set(object, map[string]any{"matchLabels": map[string]any{"app": name}}, "spec", "selector")
		}
		switch k.kind {
		case "CronJob":
			set(object, "0 0 1 1 *", "spec", "schedule")
		case "StatefulSet":
			set(object, "s", "spec", "serviceName")
		}
		set(object, pod, k.pod...)
	}
	set(object, name, "metadata", "name")
	set(object, namespace, "metadata", "namespace")
	u := &unstructured.Unstructured{Object: object}
	u.SetGroupVersionKind(k.resource.GroupVersion().WithKind(k.kind))
	return u
}

// metadata is m with the annotation.
func (s *State) metadata(m map[string]any, value *string) map[string]any {
	m = clone(m)
	if value != nil {
		set(m, *value, "annotations", Annotation)
	}
	return m
}

// affinity is nil where the spec says nothing of it.
func (s *State) affinity() map[string]any {
	if s.Affinity == nil && s.Terms == nil {
		return nil
	}
	a := clone(s.Affinity)
	if s.Terms != nil {
		terms, _ := runtime.DeepCopyJSONValue(s.Terms).([]any)
		set(a, terms, "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms")
	}
	return a
}

func clone(m map[string]any) map[string]any {
	if m == nil {
		return map[string]any{}
	}
	return runtime.DeepCopyJSON(m)
}

// set makes maps on its way; what is there and no map is replaced.
func set(m map[string]any, value any, path ...string) {
	for _, f := range path[:len(path)-1] {
		inner, ok := m[f].(map[string]any)
		if !ok {
			inner = map[string]any{}
			m[f] = inner
		}
		m = inner
	}
	m[path[len(path)-1]] = value
}
