// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// newPod is what a Deployment makes of one container: about 5 KB in protobuf with
// its status, managedFields included, and 7 KB in JSON.
func newPod(p podSet, i int) *corev1.Pod {
	node := p.node
	if node == "" {
		node = fmt.Sprintf("worker-%02d", i%50)
	}
	app := fmt.Sprintf("app-%d", i/10)
	yes := true
	container := newContainer(app)
	if p.env {
		container.Env = append(container.Env, corev1.EnvVar{Name: "KUBERNETES_SERVICE_HOST", Value: "10.0.0.1"}, corev1.EnvVar{Name: "KUBERNETES_SERVICE_PORT", Value: "443"})
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("pod-%05d", i), Namespace: p.namespace,
			Labels:      map[string]string{"app.kubernetes.io/name": app, "app.kubernetes.io/part-of": "shop", "pod-template-hash": "6d4cf56db6"},
			Annotations: map[string]string{"prometheus.io/scrape": "true", "prometheus.io/port": "9090"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: app + "-6d4cf56db6",
				UID: "7d5a2c1e-0e3f-4f6c-9b1d-2f8a6c4e9d10", Controller: &yes, BlockOwnerDeletion: &yes}},
		},
		Spec: corev1.PodSpec{
			NodeName: node, Containers: []corev1.Container{container}, PriorityClassName: "",
			Volumes: []corev1.Volume{{Name: "tmp", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
				{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: configOf(i)}}}}},
		},
	}
}

// configOf is the ConfigMap of a pod; some share one.
func configOf(i int) string { return fmt.Sprintf("map-%05d", i%20) }

func newContainer(app string) corev1.Container {
	probe := &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/healthz", Port: intstr.FromString("http")}}, PeriodSeconds: 10}
	return corev1.Container{
		Name: "server", Image: "registry.example.com/team/" + app + ":v1.42.0@sha256:2b9f5c1a0de4f7e88c1a55d9e0a7e6a9d1b3f4c5e6a7b8c9d0e1f2a3b4c5d6e7",
		Args:  []string{"--listen=:8080", "--log-format=json", "--config=/etc/app/config.yaml"},
		Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}, {Name: "metrics", ContainerPort: 9090}},
		Env: []corev1.EnvVar{{Name: "POD_NAME", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
			{Name: "DATABASE_URL", Value: "postgres://db.shop.svc.cluster.local:5432/shop"}},
		Resources: corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("50m"), corev1.ResourceMemory: resource.MustParse("64Mi")},
			Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("128Mi")},
		},
		VolumeMounts:   []corev1.VolumeMount{{Name: "tmp", MountPath: "/tmp"}, {Name: "config", MountPath: "/etc/app"}},
		ReadinessProbe: probe, LivenessProbe: probe,
	}
}

// podStatus is a running pod's.
func podStatus(p *corev1.Pod, i int) corev1.PodStatus {
	now, yes := metav1.NewTime(time.Now()), true
	ip, host := fmt.Sprintf("10.244.%d.%d", i/250, i%250+1), fmt.Sprintf("192.168.1.%d", i%50+1)
	s := corev1.PodStatus{
		Phase: corev1.PodRunning, HostIP: host, HostIPs: []corev1.HostIP{{IP: host}}, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
		StartTime: &now, QOSClass: p.Status.QOSClass, ObservedGeneration: p.Generation,
	}
	for _, t := range []corev1.PodConditionType{corev1.PodReadyToStartContainers, corev1.PodInitialized, corev1.PodReady, corev1.ContainersReady, corev1.PodScheduled} {
		s.Conditions = append(s.Conditions, corev1.PodCondition{Type: t, Status: corev1.ConditionTrue, LastTransitionTime: now})
	}
	id := fmt.Sprintf("containerd://%064x", i)
	image := p.Spec.Containers[0].Image
	s.ContainerStatuses = []corev1.ContainerStatus{{Name: "server", Image: image, ImageID: image, ContainerID: id, Ready: true, Started: &yes,
		State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}}}}
	return s
}
