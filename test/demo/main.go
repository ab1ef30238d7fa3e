// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Command demo shows what edgehub is for, with a real API server and the real
// kubelet code: a node is cut from its API server, everything on it is restarted,
// and it comes back. Needs no root; what it starts, it ends.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
)

const (
	nodeName = "edge-1"
	podCount = 3
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 20*time.Minute) // building Kubernetes takes most of it, once
	defer cancel()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

func say(format string, args ...any) { fmt.Printf("\n== "+format+"\n", args...) }

// demo is everything that runs.
type demo struct {
	cp      *controlplane.ControlPlane
	link    *link.Link
	hub     *node.Hub
	kubelet *node.Kubemark
	pods    kubernetes.Interface // as the node, through the hub
}

func run(ctx context.Context) (err error) {
	d := &demo{}
	defer func() { err = errors.Join(err, d.stop()) }()
	say("etcd and kube-apiserver start (the first time they are built from source: some minutes)")
	if err := d.start(ctx); err != nil {
		return err
	}
	say("%s and its %d pods, through the hub:", nodeName, podCount)
	if err := d.show(ctx); err != nil {
		return err
	}
	say("The link to the API server is cut. kubelet and edgehub are killed, and started again.")
	d.link.Cut()
	if err := errors.Join(d.kubelet.Kill(), d.hub.Kill()); err != nil {
		return err
	}
	began := time.Now()
	if err := errors.Join(d.hub.Start(ctx), d.kubelet.Start(ctx)); err != nil {
		return err
	}
	if err := d.show(ctx); err != nil {
		return err
	}
	fmt.Printf("\nanswered %.1f s after the start, without an API server\n", time.Since(began).Seconds())
	err = d.pods.CoreV1().Pods("default").Delete(ctx, "web-0", metav1.DeleteOptions{})
	fmt.Printf("a write is not pretended: %v\n", err)
	say("The link is healed.")
	if err := d.link.Heal(); err != nil {
		return err
	}
	if err := d.cp.WaitNodeReady(ctx, nodeName); err != nil {
		return err
	}
	return d.show(ctx)
}

func (d *demo) start(ctx context.Context) (err error) {
	if d.cp, err = controlplane.Start(ctx, controlplane.Config{}); err != nil {
		return err
	}
	if d.link, err = link.New(ctx, d.cp.Addr()); err != nil {
		return err
	}
	cert, key, err := d.cp.NodeCredentials(nodeName)
	if err != nil {
		return err
	}
	if d.hub, err = node.NewHub(ctx, node.HubConfig{ServerURLs: []string{d.link.URL()}, ServerCAFile: d.cp.CAFile(), CertFile: cert, KeyFile: key}); err != nil {
		return err
	}
	if err := d.hub.Start(ctx); err != nil {
		return err
	}
	client := d.hub.Through(&rest.Config{TLSClientConfig: rest.TLSClientConfig{CertFile: cert, KeyFile: key}})
	if d.kubelet, err = node.NewKubemark(ctx, node.KubeletConfig{Name: nodeName, Client: client}); err != nil {
		return err
	}
	if err := d.kubelet.Start(ctx); err != nil {
		return err
	}
	client.ContentType = "application/vnd.kubernetes.protobuf" // as kubelet
	if d.pods, err = kubernetes.NewForConfig(client); err != nil {
		return err
	}
	if err := d.cp.WaitNodeReady(ctx, nodeName); err != nil {
		return err
	}
	for i := range podCount {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("web-%d", i)}, Spec: corev1.PodSpec{NodeName: nodeName,
			Containers: []corev1.Container{{Name: "web", Image: "web"}}}}
		if _, err := d.cp.Client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{}); err != nil {
			return err
		}
		if _, err := d.cp.WaitPodRunning(ctx, "default", pod.Name); err != nil {
			return err
		}
	}
	return nil
}

// show lists the node's pods as kubelet does, once there are all of them.
func (d *demo) show(ctx context.Context) error {
	var list *corev1.PodList
	err := process.Poll(ctx, "all pods are listed", func(ctx context.Context) (err error) {
		list, err = d.pods.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + nodeName})
		if err == nil && len(list.Items) != podCount {
			err = fmt.Errorf("%d of %d", len(list.Items), podCount)
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, p := range list.Items {
		fmt.Printf("%s/%s\t%s\n", p.Namespace, p.Name, p.Status.Phase)
	}
	return nil
}

func (d *demo) stop() error {
	var errs []error
	if d.kubelet != nil {
		errs = append(errs, d.kubelet.Close())
	}
	if d.hub != nil {
		errs = append(errs, d.hub.Close())
	}
	if d.link != nil {
		d.link.Close()
	}
	if d.cp != nil {
		errs = append(errs, d.cp.Stop())
	}
	return errors.Join(errs...)
}
