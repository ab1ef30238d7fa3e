// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hostport knows which ports pods take on their node and which of them collide,
// by the rules of the scheduler and of kubelet's admission. It is the one engine for all
// who judge host ports: the agent, admission and lint.
//
// One caveat: these are the ports that pods declare. Who listens on the host network on a
// port that no container names takes it unseen.
package hostport

import (
	"cmp"
	"iter"
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// anyIP is the IP of a port that is taken on all of them. The scheduler knows no such
// IP but this one: "::" collides with "::" and anyIP only.
const anyIP = "0.0.0.0"

// A Port is taken on a node by a container. An empty Protocol is TCP, an empty IP is
// 0.0.0.0; what this package returns has neither.
type Port struct {
	Container string
	Protocol  corev1.Protocol
	IP        string
	Port      int32
}

// Of returns the ports that a pod takes as long as it runs, in the order of its
// containers: those of containers, and of init containers that keep running (sidecars).
// On the host network an unset host port is the container's port, as the API server has
// it in Pods; in templates, and in the manifests of static pods, it stays unset.
func Of(spec *corev1.PodSpec) []Port {
	var ports []Port
	for i := range spec.InitContainers {
		if p := spec.InitContainers[i].RestartPolicy; p != nil && *p == corev1.ContainerRestartPolicyAlways {
			ports = appendPorts(ports, spec.HostNetwork, &spec.InitContainers[i])
		}
	}
	for i := range spec.Containers {
		ports = appendPorts(ports, spec.HostNetwork, &spec.Containers[i])
	}
	return ports
}

func appendPorts(ports []Port, hostNetwork bool, c *corev1.Container) []Port {
	for _, p := range c.Ports {
		port := p.HostPort
		if hostNetwork && port == 0 {
			port = p.ContainerPort
		}
		if port > 0 {
			ports = append(ports, Port{c.Name, p.Protocol, p.HostIP, port}.normal())
		}
	}
	return ports
}

// Held is Of for a pod at its present phase: one that has succeeded or failed holds
// nothing.
func Held(pod *corev1.Pod) []Port {
	if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
		return nil
	}
	return Of(&pod.Spec)
}

func (p Port) normal() Port {
	p.Protocol = cmp.Or(p.Protocol, corev1.ProtocolTCP)
	p.IP = cmp.Or(p.IP, anyIP)
	return p
}

// Conflicts reports whether a node can have only one of the two. A port that is not
// positive is unspecified and conflicts with none.
func (p Port) Conflicts(q Port) bool {
	p, q = p.normal(), q.normal()
	return p.Port > 0 && p.Port == q.Port && p.Protocol == q.Protocol && (p.IP == q.IP || p.IP == anyIP || q.IP == anyIP)
}

// A Holder is a pod, by whatever identifies it to the caller, and the ports it holds.
type Holder struct {
	ID    string
	Ports []Port
}

// A Claim is a port and the Holder.ID of who holds it.
type Claim struct {
	Holder string
	Port
}

// A Collision is two claims that conflict, of two holders or of one.
type Collision struct{ First, Second Claim }

// Collisions returns all pairs of claims on a node that conflict, each once. The order,
// by port, protocol, IP, holder and container, does not depend on that of the holders. It
// takes the time to sort the claims and to visit each pair; who has seen enough may stop.
func Collisions(holders []Holder) iter.Seq[Collision] {
	return func(yield func(Collision) bool) {
		claims := sortClaims(holders)
		for i, c := range claims {
			for _, other := range claims[i+1:] {
				// The claims on all IPs come first, so what conflicts with c is next to it.
				if !c.Conflicts(other.Port) {
					break
				}
				if !yield(Collision{c, other}) {
					return
				}
			}
		}
	}
}

func sortClaims(holders []Holder) []Claim {
	var claims []Claim
	for _, h := range holders {
		for _, p := range h.Ports {
			if p.Port > 0 {
				claims = append(claims, Claim{h.ID, p.normal()})
			}
		}
	}
	slices.SortFunc(claims, func(a, b Claim) int {
		return cmp.Or(
			cmp.Compare(a.Port.Port, b.Port.Port),
			cmp.Compare(a.Protocol, b.Protocol),
			compareIPs(a.IP, b.IP),
			cmp.Compare(a.Holder, b.Holder),
			cmp.Compare(a.Container, b.Container),
		)
	})
	return claims
}

// compareIPs puts anyIP before all others.
func compareIPs(a, b string) int {
	switch {
	case a == b:
		return 0
	case a == anyIP:
		return -1
	case b == anyIP:
		return 1
	}
	return cmp.Compare(a, b)
}
