// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/edgehub/edgehub/test/rig"
)

const (
	serviceNames   = 8 // in each of two namespaces
	podNames       = 5
	kubeconfigLine = "  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf\n"
)

var (
	topologies = []any{"kubernetes.io/hostname", "openyurt.io/nodepool", "kubernetes.io/zone", "example.com/rack", "kubernetes.io/hostname,kubernetes.io/zone", nil}
	listeners  = []any{"p1", "p1,p2", "p2,*", "-p1,*", "*,-p1", "p1,-p1", "-p1", " p2 , -p1", "", "p3", nil}
	discards   = []any{"true", "True", "false", nil}
	nodes      = []string{rig.NodeName, "n2", "n3", ""}
)

// A changer changes all that the filters look at, straight at the API server.
type changer struct {
	*stage
	client kubernetes.Interface
	rng    *rand.Rand
}

// step does one thing.
func (c *changer) step(ctx context.Context) error {
	namespace, n := pick(c.rng, []string{"a", "b"}), c.rng.IntN(serviceNames)
	name := fmt.Sprintf("s-%d", n)
	switch dice := c.rng.IntN(100); {
	case dice < 32:
		return only(c.service(ctx, namespace, name))
	case dice < 36:
		return c.annotate(ctx, "default", "kubernetes")
	case dice < 52:
		return only(c.slice(ctx, namespace, fmt.Sprintf("%s-%d", name, c.rng.IntN(2)), name))
	case dice < 57:
		return only(c.slice(ctx, "default", fmt.Sprintf("more-%d", c.rng.IntN(3)), "kubernetes"))
	case dice < 73:
		return only(c.endpoints(ctx, namespace, name))
	case dice < 80:
		return only(c.proxyConfig(ctx))
	case dice < 90:
		return only(c.pod(ctx, namespace, fmt.Sprintf("p-%d", c.rng.IntN(podNames))))
	case dice < 94:
		return c.join(ctx, pick(c.rng, []string{"p1", "p2", ""}))
	default:
		return c.pool(ctx)
	}
}

// service makes a Service, changes it or takes it away.
func (c *changer) service(ctx context.Context, namespace, name string) error {
	services := c.client.CoreV1().Services(namespace)
	dice := c.rng.IntN(10)
	if dice < 2 {
		return services.Delete(ctx, name, metav1.DeleteOptions{})
	}
	if dice < 8 {
		if err := c.annotate(ctx, namespace, name); !apierrors.IsNotFound(err) {
			return err
		}
	}
	_, err := services.Create(ctx, &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.ServiceSpec{Type: c.serviceType(), Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
	}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	return c.annotate(ctx, namespace, name)
}

func (c *changer) serviceType() corev1.ServiceType {
	return pick(c.rng, []corev1.ServiceType{corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeNodePort, corev1.ServiceTypeClusterIP})
}

// annotate changes what a Service says to filters, and sometimes its type.
func (c *changer) annotate(ctx context.Context, namespace, name string) error {
	o := map[string]any{}
	for key, values := range map[string][]any{"openyurt.io/topologyKeys": topologies, "nodeport.openyurt.io/listen": listeners, "svc.openyurt.io/discard": discards} {
		put(o, pick(c.rng, values), "metadata", "annotations", key)
	}
	if namespace != "default" && c.rng.IntN(3) == 0 {
		put(o, c.serviceType(), "spec", "type")
	}
	patch, err := json.Marshal(o)
	if err != nil {
		return err
	}
	_, err = c.client.CoreV1().Services(namespace).Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

func (c *changer) node() *string {
	if name := pick(c.rng, nodes); name != "" {
		return &name
	}
	return nil
}

// slice makes an EndpointSlice, changes it or takes it away.
func (c *changer) slice(ctx context.Context, namespace, name, service string) error {
	slices := c.client.DiscoveryV1().EndpointSlices(namespace)
	if c.rng.IntN(5) == 0 {
		return slices.Delete(ctx, name, metav1.DeleteOptions{})
	}
	family, address := discoveryv1.AddressTypeIPv4, "10.1.%d.%d"
	if c.rng.IntN(4) == 0 {
		family, address = discoveryv1.AddressTypeIPv6, "fd00:1::%d:%d"
	}
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: name, Labels: map[string]string{"kubernetes.io/service-name": service, "n": fmt.Sprint(c.rng.Uint32())}},
		AddressType: family,
	}
	for _, of := range pick(c.rng, [][]string{{"https"}, {"https", "metrics"}, {"http"}, {""}}) {
		port := int32(8000 + c.rng.IntN(10))
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: &of, Port: &port})
	}
	for i := range c.rng.IntN(5) {
		ready := c.rng.IntN(2) == 0
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf(address, i+1, 1+c.rng.IntN(250))}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}, NodeName: c.node(),
		})
	}
	_, err := slices.Create(ctx, s, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		return err
	}
	old, err := slices.Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	if old.AddressType != family { // which cannot be changed
		return slices.Delete(ctx, name, metav1.DeleteOptions{})
	}
	_, err = slices.Update(ctx, s, metav1.UpdateOptions{})
	return err
}

//nolint:staticcheck // what old clients read
func (c *changer) endpoints(ctx context.Context, namespace, name string) error {
	all := c.client.CoreV1().Endpoints(namespace)
	if c.rng.IntN(5) == 0 {
		return all.Delete(ctx, name, metav1.DeleteOptions{})
	}
	e := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for i := range c.rng.IntN(3) {
		s := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Name: "http", Port: int32(8000 + i)}}}
		for j := range 1 + c.rng.IntN(3) {
			a := corev1.EndpointAddress{IP: fmt.Sprintf("10.2.%d.%d", 10*i+j, 1+c.rng.IntN(250)), NodeName: c.node()}
			if c.rng.IntN(3) > 0 {
				s.Addresses = append(s.Addresses, a)
			} else {
				s.NotReadyAddresses = append(s.NotReadyAddresses, a)
			}
		}
		e.Subsets = append(e.Subsets, s)
	}
	_, err := all.Create(ctx, e, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		_, err = all.Update(ctx, e, metav1.UpdateOptions{})
	}
	return err
}

// proxyConfig writes kube-proxy's configuration, and another ConfigMap with the same in it.
func (c *changer) proxyConfig(ctx context.Context) error {
	name := pick(c.rng, []string{"kube-proxy", "kube-proxy", "not-kube-proxy"})
	if c.rng.IntN(6) == 0 {
		return c.client.CoreV1().ConfigMaps("kube-system").Delete(ctx, name, metav1.DeleteOptions{})
	}
	line := kubeconfigLine
	if c.rng.IntN(4) == 0 {
		line = ""
	}
	return c.writeProxyConfig(ctx, name, line)
}

func (c *changer) writeProxyConfig(ctx context.Context, name, line string) error {
	maps := c.client.CoreV1().ConfigMaps("kube-system")
	text := fmt.Sprintf("apiVersion: kubeproxy.config.k8s.io/v1alpha1\nclientConnection:\n  burst: %d # a comment\n%s  qps: 0\nmode: \"\"\nother:\n  kubeconfig: /elsewhere\n", c.rng.IntN(100), line)
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"config.conf": text, "kubeconfig.conf": "clusters: []\n"}}
	_, err := maps.Create(ctx, m, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		_, err = maps.Update(ctx, m, metav1.UpdateOptions{})
	}
	return err
}

// pod makes a pod on some node, changes its labels or takes it away.
func (c *changer) pod(ctx context.Context, namespace, name string) error {
	pods := c.client.CoreV1().Pods(namespace)
	switch now := int64(0); c.rng.IntN(4) {
	case 0:
		return pods.Delete(ctx, name, metav1.DeleteOptions{GracePeriodSeconds: &now})
	case 1:
		patch := fmt.Sprintf(`{"metadata":{"labels":{"n":"%d"}}}`, c.rng.Uint32())
		_, err := pods.Patch(ctx, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		return err
	}
	always := corev1.ContainerRestartPolicyAlways
	_, err := pods.Create(ctx, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeName:       pick(c.rng, []string{rig.NodeName, rig.NodeName, "n2"}),
			InitContainers: []corev1.Container{{Name: "init", Image: "example.invalid/none:1", Env: c.environment()}, {Name: "sidecar", Image: "example.invalid/none:1", RestartPolicy: &always, Env: c.environment()}},
			Containers:     []corev1.Container{{Name: "c", Image: "example.invalid/none:1", Env: c.environment()}, {Name: "d", Image: "example.invalid/none:1"}},
		},
	}, metav1.CreateOptions{})
	return err
}

func (c *changer) environment() (env []corev1.EnvVar) {
	hostIP := &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "status.hostIP"}}
	for _, v := range []corev1.EnvVar{
		{Name: "KUBERNETES_SERVICE_HOST", Value: "api.example.com"}, {Name: "OTHER", Value: "KUBERNETES_SERVICE_HOST"}, {Name: "KUBERNETES_SERVICE_HOST", ValueFrom: hostIP},
		{Name: "KUBERNETES_SERVICE_PORT", Value: "6443"}, {Name: "KUBERNETES_SERVICE_PORT_HTTPS", Value: "6443"}, {Name: "KUBERNETES_SERVICE_HOST_OLD", Value: "x"},
	} {
		if c.rng.IntN(2) == 0 {
			env = append(env, v)
		}
	}
	return env
}

// pool says which nodes are in a pool; sometimes it is another NodePool by then.
func (c *changer) pool(ctx context.Context) error {
	name := pick(c.rng, []string{"p1", "p2"})
	pools := c.dynamic.Resource(poolsGVR)
	if c.rng.IntN(4) == 0 {
		if err := pools.Delete(ctx, name, metav1.DeleteOptions{}); err != nil {
			return err
		}
		if err := c.makePool(ctx, name); err != nil {
			return err
		}
	}
	in := []string{}
	for _, node := range nodes[:3] { // a controller may be late to name this one
		if c.rng.IntN(2) == 0 {
			in = append(in, node)
		}
	}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"nodes": in}})
	if err != nil {
		return err
	}
	_, err = pools.Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}
