// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package exclude

import (
	"slices"
	"strconv"

	"gomodules.xyz/jsonpatch/v2"
	corev1 "k8s.io/api/core/v1"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

// exclusion is what a node selector term needs so that no host-network node matches it.
// NotIn also matches nodes without the label.
func exclusion() corev1.NodeSelectorRequirement {
	return corev1.NodeSelectorRequirement{Key: nodepool.HostNetworkLabel, Operator: corev1.NodeSelectorOpNotIn, Values: []string{nodepool.True}}
}

// excludes reports whether no node that matches r is a host-network node.
func excludes(r corev1.NodeSelectorRequirement) bool {
	if r.Key != nodepool.HostNetworkLabel {
		return false
	}
	switch r.Operator {
	case corev1.NodeSelectorOpDoesNotExist:
		return true
	case corev1.NodeSelectorOpNotIn:
		return slices.Contains(r.Values, nodepool.True)
	case corev1.NodeSelectorOpIn:
		return !slices.Contains(r.Values, nodepool.True)
	default:
		return false
	}
}

// demands reports whether only host-network nodes match r.
func demands(r corev1.NodeSelectorRequirement) bool {
	return r.Key == nodepool.HostNetworkLabel && r.Operator == corev1.NodeSelectorOpIn &&
		len(r.Values) > 0 && !slices.ContainsFunc(r.Values, func(v string) bool { return v != nodepool.True })
}

// patch keeps the pod off host-network nodes: it returns the JSON patch for the object that
// has the pod at the JSON pointer at, "" in a Pod. Terms are ORed, so each gets the
// exclusion, except those that have one. A term without requirements matches no node and
// must not begin to, and so does a selector without terms, which the API server refuses.
// Nothing else is touched, and nothing is ever removed, so what the pod could not land on
// before it cannot land on after.
func (p *pod) patch(at string) (operations []jsonpatch.Operation) {
	if p.Spec == nil {
		return nil
	}
	affinity := p.Spec.Affinity
	term := corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{exclusion()}}
	required := &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{term}}
	nodeAffinity := &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: required}
	add := func(path string, value any) {
		operations = append(operations, jsonpatch.NewOperation("add", path, value))
	}

	path := at + "/spec/affinity"
	if affinity == nil {
		add(path, &corev1.Affinity{NodeAffinity: nodeAffinity})
		return operations
	}
	path += "/nodeAffinity"
	if affinity.NodeAffinity == nil {
		add(path, nodeAffinity)
		return operations
	}
	path += "/requiredDuringSchedulingIgnoredDuringExecution"
	if affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		add(path, required)
		return operations
	}
	for i, t := range affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		expressions := path + "/nodeSelectorTerms/" + strconv.Itoa(i) + "/matchExpressions"
		switch {
		case len(t.MatchExpressions) == 0 && len(t.MatchFields) == 0, slices.ContainsFunc(t.MatchExpressions, excludes):
		case len(t.MatchExpressions) == 0:
			add(expressions, term.MatchExpressions)
		default:
			add(expressions+"/-", exclusion())
		}
	}
	return operations
}
