// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// A podSet is a namespace full of pods. On nodes of their own, or all on one.
type podSet struct {
	namespace string
	n         int
	node      string // "": on 50 nodes
	env       bool   // says where the API server is
}

// A mapSet is a namespace full of ConfigMaps.
type mapSet struct {
	namespace string
	n, bytes  int
}

var (
	manyPods = podSet{namespace: "pods-5000", n: 5000}
	somePods = podSet{namespace: "pods-500", n: 500}
	nodePods = podSet{namespace: "node", n: 110, node: nodeName}
	bigMaps  = mapSet{namespace: "maps-10mb", n: 1000, bytes: 10_000}
)

func (p podSet) path() string { return "/api/v1/namespaces/" + p.namespace + "/pods" }

// as returns a clientset of the administrator with protobuf and the User-Agent of
// a program, which the API server notes in managedFields.
func (b *bench) as(program string) (*kubernetes.Clientset, error) {
	c := b.cp.AdminConfig()
	c.ContentType, c.UserAgent = protobufType, program+"/v1.36.0"
	return kubernetes.NewForConfig(c)
}

// once reports whether something is to be made now, and notes that it is made.
func (b *bench) once(key string) bool {
	if b.seeded[key] {
		return false
	}
	b.seeded[key] = true
	return true
}

// each calls f for 0 to n-1, some at a time.
func each(ctx context.Context, n int, f func(ctx context.Context, i int) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(16)
	for i := range n {
		g.Go(func() error { return f(ctx, i) })
	}
	return g.Wait()
}

func (b *bench) seedPods(ctx context.Context, p podSet) error {
	if !b.once(p.namespace) {
		return nil
	}
	say("creating %d pods", p.n)
	controller, err := b.as("kube-controller-manager")
	if err != nil {
		return err
	}
	kubelet, err := b.as("kubelet")
	if err != nil {
		return err
	}
	if err := b.cp.CreateNamespace(ctx, p.namespace); err != nil {
		return err
	}
	return each(ctx, p.n, func(ctx context.Context, i int) error {
		made, err := controller.CoreV1().Pods(p.namespace).Create(ctx, newPod(p, i), metav1.CreateOptions{})
		if err != nil {
			return err
		}
		made.Status = podStatus(made, i)
		_, err = kubelet.CoreV1().Pods(p.namespace).UpdateStatus(ctx, made, metav1.UpdateOptions{})
		return err
	})
}

// seedMaps creates ConfigMaps of letters that do not compress to nothing.
func (b *bench) seedMaps(ctx context.Context, m mapSet) error {
	if !b.once(m.namespace) {
		return nil
	}
	say("creating %d ConfigMaps of %d bytes", m.n, m.bytes)
	client, err := b.as("kubectl")
	if err != nil {
		return err
	}
	if err := b.cp.CreateNamespace(ctx, m.namespace); err != nil {
		return err
	}
	return each(ctx, m.n, func(ctx context.Context, i int) error {
		_, err := client.CoreV1().ConfigMaps(m.namespace).Create(ctx, newMap(m, i), metav1.CreateOptions{})
		return err
	})
}

func newMap(m mapSet, i int) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("map-%05d", i), Namespace: m.namespace},
		Data:       map[string]string{"text": text(m.bytes)},
	}
}

// text is as random as a configuration file: gzip makes about a third of it.
func text(n int) string {
	words := []string{"server ", "listen ", "127.0.0.1 ", "timeout ", "upstream ", "location ", "true\n", "proxy_pass ", "https://"}
	b := make([]byte, 0, n+16)
	for len(b) < n {
		b = append(b, words[rand.IntN(len(words))]...)
		b = fmt.Appendf(b, "%x ", rand.Uint32())
	}
	return string(b[:n])
}

// seedServices creates Services, each with an EndpointSlice.
func (b *bench) seedServices(ctx context.Context, n int) error {
	const namespace = "services"
	if !b.once(namespace) {
		return nil
	}
	say("creating %d Services and EndpointSlices", n)
	client, err := b.as("kube-controller-manager")
	if err != nil {
		return err
	}
	if err := b.cp.CreateNamespace(ctx, namespace); err != nil {
		return err
	}
	return each(ctx, n, func(ctx context.Context, i int) error {
		s := newService(i)
		if _, err := client.CoreV1().Services(namespace).Create(ctx, s, metav1.CreateOptions{}); err != nil {
			return err
		}
		_, err := client.DiscoveryV1().EndpointSlices(namespace).Create(ctx, newSlice(s.Name, i), metav1.CreateOptions{})
		return err
	})
}

func newService(i int) *corev1.Service {
	name := fmt.Sprintf("service-%04d", i)
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}},
		Spec:       corev1.ServiceSpec{Selector: map[string]string{"app": name}, Ports: []corev1.ServicePort{{Name: "http", Port: 80}, {Name: "metrics", Port: 9090}}},
	}
}

func newSlice(service string, i int) *discoveryv1.EndpointSlice {
	yes, http, port, tcp := true, "http", int32(8080), corev1.ProtocolTCP
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Name: service + "-x7k2p", Labels: map[string]string{
			discoveryv1.LabelServiceName: service, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &http, Port: &port, Protocol: &tcp}},
	}
	for j := range 3 {
		node := fmt.Sprintf("worker-%02d", (i+j)%50)
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.244.%d.%d", (i/80+j)%250, i%80*3+j+1)}, NodeName: &node,
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes},
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: "services", Name: fmt.Sprintf("%s-%d", service, j)},
		})
	}
	return s
}

// seedNode creates the node itself.
func (b *bench) seedNode(ctx context.Context) error {
	now := metav1.NewTime(time.Now())
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{"kubernetes.io/os": "linux", "kubernetes.io/hostname": nodeName}}}
	for _, t := range []corev1.NodeConditionType{corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure, corev1.NodeReady} {
		n.Status.Conditions = append(n.Status.Conditions, corev1.NodeCondition{Type: t, Status: corev1.ConditionFalse, Reason: "KubeletHasSufficient", Message: "kubelet has sufficient resources available", LastHeartbeatTime: now, LastTransitionTime: now})
	}
	for i := range 40 {
		n.Status.Images = append(n.Status.Images, corev1.ContainerImage{Names: []string{fmt.Sprintf("registry.example.com/team/image-%d:v1.%d", i, i)}, SizeBytes: int64(i) << 24})
	}
	_, err := b.cp.Client.CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}
