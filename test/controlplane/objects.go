// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"context"
	"fmt"
	"os"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/process"
)

// CreateNamespace makes a namespace in which pods can be created: with the
// default ServiceAccount and the ConfigMap kube-root-ca.crt, whether or not a
// controller manager runs. A namespace that is there is completed.
func (cp *ControlPlane) CreateNamespace(ctx context.Context, name string) error {
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	_, err := cp.Client.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	return cp.fillNamespace(ctx, name)
}

// fillNamespace waits for a namespace and does there what the controller manager
// would do.
func (cp *ControlPlane) fillNamespace(ctx context.Context, namespace string) error {
	ca, err := os.ReadFile(cp.CAFile())
	if err != nil {
		return err
	}
	account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "default"}}
	root := &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "kube-root-ca.crt"},
		Data:       map[string]string{"ca.crt": string(ca)},
	}
	return process.Poll(ctx, "namespace "+namespace+" is complete", func(ctx context.Context) error {
		_, err := cp.Client.CoreV1().ServiceAccounts(namespace).Create(ctx, account, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		_, err = cp.Client.CoreV1().ConfigMaps(namespace).Create(ctx, root, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err
		}
		return nil
	})
}

func (cp *ControlPlane) waitServiceAccount(ctx context.Context, namespace string) error {
	return process.Poll(ctx, "service account "+namespace+"/default is there", func(ctx context.Context) error {
		_, err := cp.Client.CoreV1().ServiceAccounts(namespace).Get(ctx, "default", metav1.GetOptions{})
		return err
	})
}

// WaitNodeReady waits until the node's condition Ready is True.
func (cp *ControlPlane) WaitNodeReady(ctx context.Context, node string) error {
	return process.Poll(ctx, "node "+node+" is Ready", func(ctx context.Context) error {
		n, err := cp.Client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range n.Status.Conditions {
			if c.Type != corev1.NodeReady {
				continue
			}
			if c.Status == corev1.ConditionTrue {
				return nil
			}
			return fmt.Errorf("condition Ready is %s: %s: %s", c.Status, c.Reason, c.Message)
		}
		return fmt.Errorf("no condition Ready among %d", len(n.Status.Conditions))
	})
}

// WaitPodRunning waits until all containers of the pod are ready, and returns
// the pod.
func (cp *ControlPlane) WaitPodRunning(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	var pod *corev1.Pod
	err := process.Poll(ctx, "pod "+namespace+"/"+name+" is ready", func(ctx context.Context) (err error) {
		pod, err = cp.Client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.ContainersReady && c.Status == corev1.ConditionTrue {
				return nil
			}
		}
		return fmt.Errorf("phase %q on node %q, conditions %v, containers %v",
			pod.Status.Phase, pod.Spec.NodeName, pod.Status.Conditions, pod.Status.ContainerStatuses)
	})
	return pod, err
}
