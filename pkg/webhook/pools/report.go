// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/pkg/hostport"
)

// The conditions of a NodePool that are written here, each True where there is such a pod.
const (
	// ExcludedPodsRunning is about pods that ask to stay off host-network pools, in one.
	ExcludedPodsRunning = "ExcludedPodsRunning"
	// PodsWithoutHostNetwork is about pods in a host-network pool that are not on the host
	// network, and so have none.
	PodsWithoutHostNetwork = "PodsWithoutHostNetwork"
	// HostPortConflicts is about pods on a node that want the same port of it.
	HostPortConflicts = "HostPortConflicts"
)

const (
	// maxExamples is how many pods a condition's message names.
	maxExamples = 5
	// maxConflicts bounds what is looked at of a node: n pods with one port are n²/2 conflicts.
	maxConflicts = 1000
)

// A report is what is to be said of a pool.
type report struct {
	nodes []string // sorted
	ready int
	findings
}

// findings are what is wrong on a node, or on all of a pool.
type findings struct{ excluded, withoutHostNetwork, conflicts finding }

// A finding is how often something was found, with the first examples in the order of
// the alphabet, so that a message changes as little as possible.
type finding struct {
	count    int
	examples []string
}

func (f *finding) add(example string) { f.merge(finding{1, []string{example}}) }

func (f *finding) merge(g finding) {
	f.count += g.count
	for _, example := range g.examples {
		i, _ := slices.BinarySearch(f.examples, example)
		f.examples = slices.Insert(f.examples, i, example)
		f.examples = f.examples[:min(len(f.examples), maxExamples)]
	}
}

// report returns the pool and what is to be said of it, nil if there is no such pool.
func (f *facts) report(pool string) (*nodePool, report) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.pools[pool]
	if p == nil || !f.known {
		return nil, report{}
	}
	r := report{nodes: slices.Sorted(maps.Keys(f.nodes[pool]))}
	for _, node := range r.nodes {
		if f.nodes[pool][node] {
			r.ready++
		}
		found := f.find(node)
		if p.hostNetwork() {
			r.excluded.merge(found.excluded)
			r.withoutHostNetwork.merge(found.withoutHostNetwork)
		}
		r.conflicts.merge(found.conflicts)
	}
	return p, r
}

// find returns what is wrong on a node, if it is in a host-network pool. The caller
// holds mu.
func (f *facts) find(node string) findings {
	found, ok := f.found[node]
	if ok || len(f.pods[node]) == 0 {
		return found
	}
	var holders []hostport.Holder
	for pod, is := range f.pods[node] {
		if len(is.ports) > 0 {
			holders = append(holders, hostport.Holder{ID: pod.String(), Ports: is.ports})
		}
		if is.excluded {
			found.excluded.add(pod.String())
		}
		if !is.hostNetwork {
			found.withoutHostNetwork.add(pod.String())
		}
	}
	for c := range hostport.Collisions(holders) {
		if found.conflicts.count == maxConflicts {
			break
		}
		if found.conflicts.count++; len(found.conflicts.examples) < maxExamples {
			found.conflicts.examples = append(found.conflicts.examples,
				fmt.Sprintf("%s and %s, %s port %d on %s", c.First.Holder, c.Second.Holder, c.First.Protocol, c.First.Port.Port, node))
		}
	}
	f.found[node] = found
	return found
}

// statusOf returns the pool's status with what the report says. Conditions of others
// stay, and so does the time of what has not changed.
func statusOf(p *nodePool, r report, now metav1.Time) status {
	s := status{ReadyNodeNum: r.ready, UnreadyNodeNum: len(r.nodes) - r.ready, Nodes: r.nodes, Conditions: slices.Clone(p.Status.Conditions)}
	for _, c := range []struct {
		kind    string
		finding finding
		what    string // is found, in the plural
		ifAny   bool   // whether it matters only in host-network pools
	}{
		{ExcludedPodsRunning, r.excluded, "pods that are to stay off host-network pools", true},
		{PodsWithoutHostNetwork, r.withoutHostNetwork, "pods without the host network, and so without any", true},
		{HostPortConflicts, r.conflicts, "conflicts of host ports", false},
	} {
		condition := metav1.Condition{
			Type: c.kind, Status: metav1.ConditionFalse, ObservedGeneration: p.Generation, LastTransitionTime: now,
			Reason: "NoneFound", Message: "There are no " + c.what + ".",
		}
		switch {
		case c.finding.count > 0:
			condition.Status, condition.Reason, condition.Message = metav1.ConditionTrue, "Found", c.finding.message(c.what)
		case c.ifAny && !p.hostNetwork():
			condition.Reason, condition.Message = "NoHostNetworkPool", "This is no host-network pool."
		}
		s.Conditions = setCondition(s.Conditions, condition)
	}
	return s
}

func (f finding) message(what string) string {
	text := fmt.Sprintf("%d %s: %s", f.count, what, strings.Join(f.examples, "; "))
	if more := f.count - len(f.examples); more > 0 {
		text += fmt.Sprintf("; and %d more", more)
	}
	return text + "."
}

func setCondition(all []metav1.Condition, c metav1.Condition) []metav1.Condition {
	i := slices.IndexFunc(all, func(is metav1.Condition) bool { return is.Type == c.Type })
	if i < 0 {
		return append(all, c)
	}
	if all[i].Status == c.Status && !all[i].LastTransitionTime.IsZero() {
		c.LastTransitionTime = all[i].LastTransitionTime
	}
	all[i] = c
	return all
}
