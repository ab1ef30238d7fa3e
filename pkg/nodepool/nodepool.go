// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package nodepool knows OpenYurt's NodePools as far as a node is concerned: how labels
// and annotations are called, what a NodePool says in any of its versions, and, in a
// [Tracker], which pool this node is in and whether that is a host-network pool, where
// pods have no network but the node's.
//
// One caveat: pool and node label are written by different parties and may differ. What
// the NodePool says counts; [Membership] tells of the difference.
package nodepool

import (
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/json"
)

const (
	// PoolLabel of a node names the pool that it is in.
	PoolLabel = "apps.openyurt.io/nodepool"
	// DesiredPoolLabel of a node names the pool that it is to join.
	DesiredPoolLabel = "apps.openyurt.io/desired-nodepool"
	// HostNetworkLabel is "true" on the nodes of host-network pools. As an annotation of a
	// NodePool it makes one, in any case of letters.
	HostNetworkLabel = "nodepool.openyurt.io/hostnetwork"
	// ExcludeAnnotation of a pod keeps it off host-network pools if it is "true", in just
	// these letters.
	ExcludeAnnotation = "apps.openyurt.io/exclude-host-network-pool"

	// True is the one value of these that counts.
	True = "true"
)

// The types of NodePools.
const (
	Edge  = "Edge"
	Cloud = "Cloud"
)

// What NodePools are called. They have no namespace.
const (
	Group    = "apps.openyurt.io"
	Resource = "nodepools"
)

// Versions returns those of NodePool, newest first.
func Versions() []string { return []string{"v1beta2", "v1beta1", "v1alpha1"} }

func resourceOf(version string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: Group, Version: version, Resource: Resource}
}

// A Pool is what a NodePool says.
type Pool struct {
	Name        string
	HostNetwork bool
	// Type is Edge or Cloud.
	Type string
	// Nodes are the names of its nodes, sorted, as its controller last wrote them down.
	Nodes []string
}

// IsHostNetwork reports whether a NodePool of any version with spec.hostNetwork and with
// these annotations is a host-network pool. The field and the annotation mean the same:
// OpenYurt's conversion between versions carries only the annotation, so that the field
// alone does not tell.
func IsHostNetwork(field bool, annotations map[string]string) bool {
	return field || strings.EqualFold(annotations[HostNetworkLabel], True)
}

// ReadPool takes a Pool out of the JSON of a NodePool of any version.
func ReadPool(object []byte) (Pool, error) {
	var o struct {
		Metadata struct {
			Name        string            `json:"name"`
			Annotations map[string]string `json:"annotations"`
		} `json:"metadata"`
		Spec struct {
			HostNetwork bool   `json:"hostNetwork"`
			Type        string `json:"type"`
		} `json:"spec"`
		Status struct {
			Nodes []string `json:"nodes"`
		} `json:"status"`
	}
	if err := json.Unmarshal(object, &o); err != nil {
		return Pool{}, fmt.Errorf("decode NodePool: %w", err)
	}
	slices.Sort(o.Status.Nodes)
	return Pool{
		Name:        o.Metadata.Name,
		HostNetwork: IsHostNetwork(o.Spec.HostNetwork, o.Metadata.Annotations),
		Type:        o.Spec.Type,
		Nodes:       slices.Compact(o.Status.Nodes),
	}, nil
}
