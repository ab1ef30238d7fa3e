// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package exclude

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

// A warning says what is wrong and what to do about it, in at most 120 characters. Its
// reason is for metrics.
type warning struct{ reason, text string }

// All warnings there are. The chart's policy gives those that can be told from the object
// alone, in the same words.
var (
	badValue     = warning{"value", `exclude-host-network-pool is ignored, its value is not exactly "true": write "true" or remove it`}
	misplaced    = warning{"misplaced", "exclude-host-network-pool has no effect here: put it among the annotations of the pod template"}
	daemonSetPod = warning{"daemonset-pod", "exclude-host-network-pool of a DaemonSet's pod has no effect: set it in the DaemonSet's template"}
	hostNetwork  = warning{"host-network", "hostNetwork pods can use host-network pools: remove exclude-host-network-pool if this one may"}
	nodeSelector = warning{"node-selector", "nodeSelector asks for host-network nodes, exclude-host-network-pool forbids them: remove one"}
	poolSelector = warning{"pool-selector", "nodeSelector asks for a host-network pool, exclude-host-network-pool forbids it: remove one"}
	nodeAffinity = warning{"node-affinity", "node affinity asks for host-network nodes, exclude-host-network-pool forbids them: remove one"}
	nodeName     = warning{"node-name", "spec.nodeName bypasses the scheduler, so exclude-host-network-pool has no effect: remove one"}
	tooLate      = warning{"too-late", "exclude-host-network-pool has no effect on a pod that exists: delete it and create it again"}
	leftBehind   = warning{"left-behind", "the template still keeps pods off host-network nodes: remove its node affinity as well"}
	unreadable   = warning{"unreadable", "edgehub cannot read this object's pod template and leaves it as it is: check its fields"}
)

// falseWords are values of which nobody expects that pods are kept off.
var falseWords = []string{"", "false", "f", "no", "n", "off", "0", "disabled"}

// nearMiss reports whether the value has no effect although whoever wrote it may
// expect one.
func nearMiss(value string) bool {
	return value != nodepool.True && !slices.Contains(falseWords, strings.ToLower(strings.TrimSpace(value)))
}

// contradictions are what else a marked pod says that goes ill with it. hostNetworkPool
// tells whether a pool is known to be one.
func (p *pod) contradictions(hostNetworkPool func(name string) bool) (found []warning) {
	if p.Spec == nil {
		return nil
	}
	if p.Spec.HostNetwork {
		found = append(found, hostNetwork)
	}
	if p.Spec.NodeSelector[nodepool.HostNetworkLabel] == nodepool.True {
		found = append(found, nodeSelector)
	}
	if name := p.Spec.NodeSelector[nodepool.PoolLabel]; name != "" && hostNetworkPool(name) {
		found = append(found, poolSelector)
	}
	if slices.ContainsFunc(p.terms(), func(t corev1.NodeSelectorTerm) bool { return slices.ContainsFunc(t.MatchExpressions, demands) }) {
		found = append(found, nodeAffinity)
	}
	return found
}

func (p *pod) terms() []corev1.NodeSelectorTerm {
	if p.Spec == nil {
		return nil
	}
	a := p.Spec.Affinity
	if a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return nil
	}
	return a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
}

// excluded reports whether a term of the required node affinity keeps off host-network
// nodes.
func (p *pod) excluded() bool {
	return slices.ContainsFunc(p.terms(), func(t corev1.NodeSelectorTerm) bool { return slices.ContainsFunc(t.MatchExpressions, excludes) })
}
