// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/edgehub/edgehub/test/process"
)

const (
	// proxyUser has the rights of kube-proxy by RBAC's default roles.
	proxyUser = "system:kube-proxy"
	services  = 1000
	// nodeMaps is how many ConfigMaps the node's pods mount; kubelet watches each.
	nodeMaps = 20
)

// nodeClients are the informers of a kubelet and a kube-proxy.
type nodeClients struct {
	kubelet kubernetes.Interface
	cancel  context.CancelFunc
	running sync.WaitGroup
	synced  []cache.InformerSynced
}

// seedNodeSet makes what a node of 110 pods in a cluster of 1,000 services sees.
func (b *bench) seedNodeSet(ctx context.Context) error {
	if err := errors.Join(b.seedNode(ctx), b.seedServices(ctx, services), b.seedPods(ctx, nodePods)); err != nil {
		return err
	}
	if !b.once("node's ConfigMaps") {
		return nil
	}
	m := mapSet{namespace: nodePods.namespace, n: nodeMaps, bytes: 1000}
	return each(ctx, m.n, func(ctx context.Context, i int) error {
		_, err := b.cp.Client.CoreV1().ConfigMaps(m.namespace).Create(ctx, newMap(m, i), metav1.CreateOptions{})
		return err
	})
}

// newNodeClients starts the informers that kubelet and kube-proxy have, with their
// identities and selectors, through a hub.
func (b *bench) newNodeClients(ctx context.Context, h *hub) (*nodeClients, error) {
	asNode, err := b.cp.NodeConfig(nodeName)
	if err != nil {
		return nil, err
	}
	kubelet, err := protobufClient(h.Through(asNode), "kubelet")
	if err != nil {
		return nil, err
	}
	proxy, err := protobufClient(h.Through(b.cp.TokenConfig(proxyUser)), "kube-proxy")
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	n := &nodeClients{kubelet: kubelet, cancel: cancel}
	n.startKubelet(ctx)
	const self, served = "metadata.name=" + nodeName, "!service.kubernetes.io/headless,!service.kubernetes.io/service-proxy-name"
	n.run(ctx, factory(proxy, "", "", served).Core().V1().Services().Informer())
	n.run(ctx, factory(proxy, "", "", served).Discovery().V1().EndpointSlices().Informer())
	n.run(ctx, factory(proxy, "", self, "").Core().V1().Nodes().Informer())
	for i, synced := range n.synced {
		if err := process.Poll(ctx, fmt.Sprintf("informer %d of the node is synced", i), process.Until(synced)); err != nil {
			n.close()
			return nil, err
		}
	}
	return n, nil
}

func (n *nodeClients) startKubelet(ctx context.Context) {
	const self = "metadata.name=" + nodeName
	n.run(ctx, factory(n.kubelet, "", "spec.nodeName="+nodeName, "").Core().V1().Pods().Informer())
	n.run(ctx, factory(n.kubelet, "", self, "").Core().V1().Nodes().Informer())
	n.run(ctx, factory(n.kubelet, "", "", "").Core().V1().Services().Informer())
	n.run(ctx, factory(n.kubelet, "", "", "").Storage().V1().CSIDrivers().Informer())
	n.run(ctx, factory(n.kubelet, "", "", "").Node().V1().RuntimeClasses().Informer())
	maps := []string{"kube-root-ca.crt"}
	for i := range nodeMaps {
		maps = append(maps, configOf(i))
	}
	for _, name := range maps { // one watch each, as kubelet does it
		n.run(ctx, factory(n.kubelet, nodePods.namespace, "metadata.name="+name, "").Core().V1().ConfigMaps().Informer())
	}
}

func (n *nodeClients) run(ctx context.Context, i cache.SharedIndexInformer) {
	n.running.Go(func() { i.RunWithContext(ctx) })
	n.synced = append(n.synced, i.HasSynced)
}

func (n *nodeClients) close() {
	n.cancel()
	n.running.Wait()
}

func protobufClient(c *rest.Config, program string) (*kubernetes.Clientset, error) {
	c.ContentType, c.AcceptContentTypes, c.UserAgent = protobufType, protobufType+","+jsonType, program+"/v1.36.0"
	return kubernetes.NewForConfig(c)
}

// factory makes an informer with selectors.
func factory(c kubernetes.Interface, namespace, fields, labels string) informers.SharedInformerFactory {
	return informers.NewSharedInformerFactoryWithOptions(c, 0, informers.WithNamespace(namespace), informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector, o.LabelSelector = fields, labels
	}))
}
