// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"slices"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/edgehub/edgehub/test/controlplane"
)

const (
	namespace = "default"
	appName   = "web"
	podCount  = 5
)

// createApp makes a Deployment whose pods mount a ConfigMap, a Secret and, as
// every pod does, a token; and lets person edit in its namespace.
func createApp(ctx context.Context, cp *controlplane.ControlPlane) error {
	meta := metav1.ObjectMeta{Name: appName}
	binding := &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: person},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: person}},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "edit"},
	}
	if _, err := cp.Client.RbacV1().RoleBindings(namespace).Create(ctx, binding, metav1.CreateOptions{}); err != nil {
		return err
	}
	config := &corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{"color": "blue"}}
	if _, err := cp.Client.CoreV1().ConfigMaps(namespace).Create(ctx, config, metav1.CreateOptions{}); err != nil {
		return err
	}
	secret := &corev1.Secret{ObjectMeta: meta, StringData: map[string]string{"password": "demo"}}
	if _, err := cp.Client.CoreV1().Secrets(namespace).Create(ctx, secret, metav1.CreateOptions{}); err != nil {
		return err
	}
	replicas, labels := int32(podCount), map[string]string{"app": appName}
	deployment := &appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{
		Replicas: &replicas,
		Selector: &metav1.LabelSelector{MatchLabels: labels},
		Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: corev1.PodSpec{
			Containers: []corev1.Container{{Name: "web", Image: "web:1", VolumeMounts: []corev1.VolumeMount{
				{Name: "config", MountPath: "/config"}, {Name: "secret", MountPath: "/secret"},
			}}},
			Volumes: []corev1.Volume{
				{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
					LocalObjectReference: corev1.LocalObjectReference{Name: appName}}}},
				{Name: "secret", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: appName}}},
			},
		}},
	}}
	_, err := cp.Client.AppsV1().Deployments(namespace).Create(ctx, deployment, metav1.CreateOptions{})
	return err
}

// podUIDs is who the pods are.
func podUIDs(pods []corev1.Pod) []types.UID {
	var uids []types.UID
	for _, p := range pods {
		uids = append(uids, p.UID)
	}
	slices.Sort(uids)
	return uids
}

// cloudPods are the pods that the API server has, asked directly.
func cloudPods(ctx context.Context, cp *controlplane.ControlPlane) ([]corev1.Pod, error) {
	list, err := cp.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// allReady says in an error how many pods are ready, unless all are. A pod of
// kubemark is Ready before it is Running.
func allReady(pods []corev1.Pod) error {
	ready := 0
	for _, p := range pods {
		if p.Status.Phase == corev1.PodRunning && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		}) {
			ready++
		}
	}
	if ready != podCount || len(pods) != podCount {
		return fmt.Errorf("%d of %d pods run and are Ready", ready, podCount)
	}
	return nil
}

// nodeReady is the node's condition Ready as the API server has it: True, False
// or Unknown, and why.
func nodeReady(ctx context.Context, cp *controlplane.ControlPlane) (corev1.NodeCondition, error) {
	n, err := cp.Client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
	if err != nil {
		return corev1.NodeCondition{}, err
	}
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			return c, nil
		}
	}
	return corev1.NodeCondition{}, fmt.Errorf("%s has no condition Ready yet", nodeName)
}

// nodeBecomes is a condition to wait for.
func nodeBecomes(cp *controlplane.ControlPlane, status corev1.ConditionStatus) func(context.Context) error {
	return func(ctx context.Context) error {
		c, err := nodeReady(ctx, cp)
		if err == nil && c.Status != status {
			err = fmt.Errorf("the API server says Ready=%s (%s)", c.Status, c.Reason)
		}
		return err
	}
}
