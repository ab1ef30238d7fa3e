// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/pkg/hostport"
)

func TestTrimPod(t *testing.T) {
	always, yes := corev1.ContainerRestartPolicyAlways, true
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "a", Name: "p", UID: "u", ResourceVersion: "7", Labels: map[string]string{"l": "v"}, Finalizers: []string{"f"},
			Annotations: map[string]string{
				"k": "v", "apps.openyurt.io/exclude-host-network-pool": "true", "edgehub.io/autonomy": "false",
				"edgehub.io/autonomy-original-tolerations": "[]", "kubernetes.io/config.mirror": "",
			},
			OwnerReferences: []metav1.OwnerReference{{Kind: "Node"}, {Kind: "DaemonSet", Controller: &yes}}, ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}},
		},
		Spec: corev1.PodSpec{
			NodeName: "n", HostNetwork: true, Tolerations: []corev1.Toleration{{Key: "k"}}, Volumes: []corev1.Volume{{Name: "v"}},
			Containers:     []corev1.Container{{Name: "c", Image: "i", Env: []corev1.EnvVar{{Name: "E"}}, Ports: []corev1.ContainerPort{{ContainerPort: 80}}}},
			InitContainers: []corev1.Container{{Name: "s", Command: []string{"x"}, RestartPolicy: &always, Ports: []corev1.ContainerPort{{ContainerPort: 81, HostPort: 82}}}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: "10.0.0.1"},
	}
	ports := hostport.Held(pod)
	want := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "a", Name: "p", UID: "u", ResourceVersion: "7",
			Annotations: map[string]string{
				"apps.openyurt.io/exclude-host-network-pool": "true", "edgehub.io/autonomy": "false",
				"edgehub.io/autonomy-original-tolerations": "[]", "kubernetes.io/config.mirror": "",
			},
			OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Controller: &yes}},
		},
		Spec: corev1.PodSpec{
			NodeName: "n", HostNetwork: true, Tolerations: []corev1.Toleration{{Key: "k"}},
			Containers:     []corev1.Container{{Name: "c", Ports: []corev1.ContainerPort{{ContainerPort: 80}}}},
			InitContainers: []corev1.Container{{Name: "s", RestartPolicy: &always, Ports: []corev1.ContainerPort{{ContainerPort: 81, HostPort: 82}}}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	}
	got, err := trimPod(pod)
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("trimPod differs, %v (-want +got):\n%s", err, d)
	}
	if d := cmp.Diff(ports, hostport.Held(pod)); d != "" || len(ports) != 2 {
		t.Errorf("the ports of a trimmed pod differ (-before +after):\n%s", d)
	}
	if got, err := trimPod("a tombstone"); got != "a tombstone" || err != nil {
		t.Errorf("trimPod of something else = %v, %v, want it back", got, err)
	}
}
