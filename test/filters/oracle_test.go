// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/edgehub/edgehub/test/rig"
)

// What follows is docs/filters.md once more, in the simplest Go that says it. It shares
// nothing with the filters.

// allFilters are those for which the tests make objects.
var allFilters = []string{"masterservice", "discardcloudservice", "nodeportisolation", "servicetopology", "forwardkubesvctraffic", "inclusterconfig", "serviceenvupdater"}

// needAddress need an address for pods.
var needAddress = []string{"masterservice", "forwardkubesvctraffic", "serviceenvupdater"}

// A world is what filters go by.
type world struct {
	inForce  []string
	hub      netip.AddrPort
	pool     string            // of the node
	near     []string          // nodes of this pool
	topology map[string]string // of Services by namespace/name
}

// look asks the API server.
func (s *stage) look(ctx context.Context, inForce []string, hub netip.AddrPort) (*world, error) {
	w := &world{inForce: inForce, hub: hub, near: []string{rig.NodeName}, topology: map[string]string{}}
	core := s.ControlPlane.Client.CoreV1()
	n, err := core.Nodes().Get(ctx, rig.NodeName, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	if w.pool = n.Labels[poolLabel]; w.pool != "" {
		pool, err := s.dynamic.Resource(poolsGVR).Get(ctx, w.pool, metav1.GetOptions{})
		if err != nil {
			return nil, err
		}
		nodes, _, err := unstructured.NestedStringSlice(pool.Object, "status", "nodes")
		if err != nil {
			return nil, err
		}
		w.near = append(w.near, nodes...)
	}
	list, err := core.Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for _, s := range list.Items {
		w.topology[s.Namespace+"/"+s.Name] = s.Annotations["openyurt.io/topologyKeys"]
	}
	return w, nil
}

// is reports whether a filter is in force for a program.
func (w *world) is(filter, program string, programs ...string) bool {
	return slices.Contains(w.inForce, filter) && slices.Contains(programs, program)
}

// view is what a program sees of an object, nil for nothing. The object is not changed.
func (w *world) view(program string, object runtime.Object) runtime.Object {
	object = object.DeepCopyObject()
	switch o := object.(type) {
	case *corev1.Service:
		if !w.service(program, o) {
			return nil
		}
	case *discoveryv1.EndpointSlice:
		w.slice(program, o)
	case *corev1.Endpoints: //nolint:staticcheck // what old clients read
		w.endpoints(program, o)
	case *corev1.ConfigMap:
		if w.is("inclusterconfig", program, "kubelet") && o.Namespace == "kube-system" && o.Name == "kube-proxy" {
			o.Data["config.conf"] = strings.Replace(o.Data["config.conf"], kubeconfigLine, "", 1)
		}
	case *corev1.Pod:
		if w.is("serviceenvupdater", program, "kubelet") {
			w.environment(o.Spec.InitContainers)
			w.environment(o.Spec.Containers)
		}
	}
	return object
}

// service reports whether a Service is to be seen.
func (w *world) service(program string, o *corev1.Service) bool {
	if w.is("masterservice", program, "kubelet") && o.Namespace == "default" && o.Name == "kubernetes" {
		o.Spec.ClusterIP, o.Spec.ClusterIPs = w.hub.Addr().String(), []string{w.hub.Addr().String()}
		for i := range o.Spec.Ports {
			if o.Spec.Ports[i].Name == "https" {
				o.Spec.Ports[i].Port = int32(w.hub.Port())
			}
		}
	}
	balanced := o.Spec.Type == corev1.ServiceTypeLoadBalancer
	if w.is("discardcloudservice", program, "kube-proxy") && balanced && o.Annotations["svc.openyurt.io/discard"] == "true" {
		return false
	}
	pools, annotated := o.Annotations["nodeport.openyurt.io/listen"]
	if w.is("nodeportisolation", program, "kube-proxy") && (balanced || o.Spec.Type == corev1.ServiceTypeNodePort) && annotated {
		return listens(pools, w.pool)
	}
	return true
}

// listens reports whether a Service listens in a pool.
func listens(annotation, pool string) bool {
	if pool == "" {
		return true
	}
	others := false
	for _, entry := range strings.Split(annotation, ",") {
		switch strings.TrimSpace(entry) {
		case pool:
			return true
		case "-" + pool:
			return false
		case "*":
			others = true
		}
	}
	return others
}

// sees reports whether a program sees an endpoint on a node, nil for none.
func (w *world) sees(program, service string, node *string) bool {
	if !w.is("servicetopology", program, "kube-proxy", "coredns", "nginx-ingress-controller") {
		return true
	}
	switch w.topology[service] {
	case "kubernetes.io/hostname":
		return node != nil && *node == rig.NodeName
	case "openyurt.io/nodepool", "kubernetes.io/zone":
		return node != nil && slices.Contains(w.near, *node)
	}
	return true
}

func (w *world) slice(program string, o *discoveryv1.EndpointSlice) {
	service := o.Namespace + "/" + o.Labels["kubernetes.io/service-name"]
	var seen []discoveryv1.Endpoint
	for _, e := range o.Endpoints {
		if w.sees(program, service, e.NodeName) {
			seen = append(seen, e)
		}
	}
	o.Endpoints = seen
	if !w.is("forwardkubesvctraffic", program, "kube-proxy") || service != "default/kubernetes" || o.AddressType != discoveryv1.AddressTypeIPv4 {
		return
	}
	for _, p := range o.Ports {
		if p.Name != nil && *p.Name == "https" {
			ready := true
			o.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{w.hub.Addr().String()}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}}
			*p.Port = int32(w.hub.Port())
		}
	}
}

func (w *world) endpoints(program string, o *corev1.Endpoints) { //nolint:staticcheck // see above
	service := o.Namespace + "/" + o.Name
	near := func(all []corev1.EndpointAddress) (seen []corev1.EndpointAddress) {
		for _, a := range all {
			if w.sees(program, service, a.NodeName) {
				seen = append(seen, a)
			}
		}
		return seen
	}
	var left []corev1.EndpointSubset //nolint:staticcheck // see above
	for _, s := range o.Subsets {
		s.Addresses, s.NotReadyAddresses = near(s.Addresses), near(s.NotReadyAddresses)
		if len(s.Addresses)+len(s.NotReadyAddresses) > 0 { // the API knows no subset without addresses
			left = append(left, s)
		}
	}
	o.Subsets = left
}

func (w *world) environment(containers []corev1.Container) {
	for i := range containers {
		for j, v := range containers[i].Env {
			switch v.Name {
			case "KUBERNETES_SERVICE_HOST":
				containers[i].Env[j] = corev1.EnvVar{Name: v.Name, Value: w.hub.Addr().String()}
			case "KUBERNETES_SERVICE_PORT":
				containers[i].Env[j] = corev1.EnvVar{Name: v.Name, Value: portText(w.hub)}
			}
		}
	}
}

func portText(a netip.AddrPort) string { _, port, _ := strings.Cut(a.String(), ":"); return port }
