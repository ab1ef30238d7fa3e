// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/kubernetes"
)

// The oracle says what a hub must find, from what the API server has. It shares no code with
// the hub, and looks at each pair of containers.

// A report is what /debug/pool says, as far as it is not free to choose.
type report struct {
	Node, Pool, Type     string
	HostNetwork          bool
	State, Source, Drift string
	Findings             []finding
	Pods                 int
	AllPods              bool
}

type finding struct {
	Kind, Namespace, Pod, UID, Detail string
	Stale                             bool
}

func (f *finding) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s %s/%s %s %s", f.Kind, f.Namespace, f.Pod, f.UID, f.Detail))
}

// truth is what is to be found on a node now.
func truth(ctx context.Context, client kubernetes.Interface, pools nodePools, nodeName string) (report, error) {
	r := report{Node: nodeName, State: "known", AllPods: true}
	node, err := client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
	if err != nil {
		return r, err
	}
	label, labelled := node.Labels[hostNetworkLabel]
	if r.Pool = node.Labels[poolLabel]; r.Pool != "" {
		pool, err := pools["v1beta2"].Get(ctx, r.Pool, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			r.Source, r.HostNetwork, r.Drift = "NodeLabel", label == "true", "PoolMissing"
		case err != nil:
			return r, err
		default:
			r.Source = "NodePool"
			r.Type, _, _ = unstructured.NestedString(pool.Object, "spec", "type")
			r.HostNetwork, _, _ = unstructured.NestedBool(pool.Object, "spec", "hostNetwork")
			if strings.ToLower(pool.GetAnnotations()[hostNetworkLabel]) == "true" {
				r.HostNetwork = true
			}
		}
	}
	if r.Drift == "" {
		switch {
		case r.HostNetwork && !labelled:
			r.Drift = "LabelMissing"
		case r.HostNetwork && label != "true":
			r.Drift = "LabelNotTrue"
		case !r.HostNetwork && label == "true":
			r.Drift = "LabelLeftOver"
		}
	}
	pods, err := client.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + nodeName})
	if err != nil {
		return r, err
	}
	r.Pods = len(pods.Items)
	r.find(pods.Items)
	return r, nil
}

func (r *report) find(pods []corev1.Pod) {
	add := func(p *corev1.Pod, kind, detail string) {
		f := finding{Kind: kind, Namespace: p.Namespace, Pod: p.Name, UID: string(p.UID), Detail: detail}
		if !slices.Contains(r.Findings, f) {
			r.Findings = append(r.Findings, f)
		}
	}
	for i := range pods {
		p := &pods[i]
		if p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		if r.HostNetwork && !p.Spec.HostNetwork {
			add(p, "NoPodNetwork", "")
		}
		if r.HostNetwork && p.Annotations[excludeAnnotation] == "true" {
			add(p, "ExcludedPodOnHostNetworkPool", "")
		}
		for a, mine := range hostPorts(p) {
			for j := range pods {
				for b, other := range hostPorts(&pods[j]) {
					if (i != j || a != b) && collide(mine, other) {
						add(p, "HostPortConflict", fmt.Sprintf("%d/%s", mine.HostPort, mine.Protocol))
					}
				}
			}
		}
	}
	if r.Drift != "" {
		r.Findings = append(r.Findings, finding{Kind: "PoolLabelDrift", Detail: strings.TrimSpace(r.Drift + " " + r.Pool)})
	}
	sortFindings(r.Findings)
}

func sortFindings(f []finding) {
	slices.SortFunc(f, func(a, b finding) int { return cmp.Compare(a.String(), b.String()) })
}

// hostPorts are what a pod that has not ended takes on its node.
func hostPorts(p *corev1.Pod) (ports []corev1.ContainerPort) {
	if p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
		return nil
	}
	all := slices.Clone(p.Spec.Containers)
	for _, c := range p.Spec.InitContainers {
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			all = append(all, c)
		}
	}
	for _, c := range all {
		for _, port := range c.Ports {
			if port.HostPort > 0 {
				ports = append(ports, port)
			}
		}
	}
	return ports
}

// collide is the scheduler's rule.
func collide(a, b corev1.ContainerPort) bool {
	everywhere := func(ip string) bool { return ip == "" || ip == "0.0.0.0" }
	return a.HostPort == b.HostPort && a.Protocol == b.Protocol && (everywhere(a.HostIP) || everywhere(b.HostIP) || a.HostIP == b.HostIP)
}

// stale is what a hub must say of r once the link is down.
func (r report) stale() report {
	r.State, r.Findings = "stale", slices.Clone(r.Findings)
	for i := range r.Findings {
		r.Findings[i].Stale = true
	}
	return r
}

// metrics are what a hub must show for r.
func (r *report) metrics() map[string]string {
	bit := map[bool]string{true: "1", false: "0"}
	m := map[string]string{"edgehub_nodepool_label_drift": bit[r.Drift != ""], "edgehub_nodepool_unreadable_pods_total": "0"}
	for _, state := range []string{"known", "stale", "unknown"} {
		m[fmt.Sprintf("edgehub_nodepool_membership{state=%q}", state)] = bit[state == r.State]
	}
	if r.Pool != "" {
		m[fmt.Sprintf("edgehub_nodepool_info{host_network=\"%v\",pool=%q,type=%q}", r.HostNetwork, r.Pool, r.Type)] = "1"
	}
	for _, kind := range []string{"NoPodNetwork", "HostPortConflict", "ExcludedPodOnHostNetworkPool", "PoolLabelDrift"} {
		m[fmt.Sprintf("edgehub_nodepool_findings{kind=%q}", kind)] = fmt.Sprint(r.count(kind))
	}
	return m
}

func (r *report) count(kind string) (n int) {
	for _, f := range r.Findings {
		if f.Kind == kind {
			n++
		}
	}
	return n
}
