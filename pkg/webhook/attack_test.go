// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"encoding/json"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Whoever may make Pods must not decide how much memory the companion needs: of a Pod with
// as much metadata as the API takes, little is kept. What a kubelet writes is much, too.
func TestTrimmedObjectsAreSmall(t *testing.T) {
	long := strings.Repeat("x", 200<<10)
	labels, owners := map[string]string{}, []metav1.OwnerReference{}
	for i := range 1000 {
		key := strings.Repeat("l", 1+i%50) + strings.Repeat("m", 1+i/50)
		labels[key] = key
		owners = append(owners, metav1.OwnerReference{Kind: key, Name: key})
	}
	pod, err := trimPod(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Name: "p", Annotations: map[string]string{"example.com/a": long}, Labels: labels, OwnerReferences: owners,
		Finalizers: []string{long}, ManagedFields: []metav1.ManagedFieldsEntry{{Manager: long}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	node, err := trimNode(&corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: "n", ManagedFields: []metav1.ManagedFieldsEntry{{Manager: long}}},
		Status: corev1.NodeStatus{
			Images:     []corev1.ContainerImage{{Names: []string{long}}},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady}}, Addresses: []corev1.NodeAddress{{Address: "10.0.0.1"}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, object := range map[string]any{"Pod": pod, "Node": node} {
		text, err := json.Marshal(object)
		if err != nil || len(text) > 1000 {
			t.Errorf("of a trimmed %s %d bytes are left, %v, want 1000 at most", name, len(text), err)
		}
	}
	if n, ok := node.(*corev1.Node); !ok || len(n.Status.Conditions) != 1 || len(n.Status.Addresses) != 1 {
		t.Errorf("trimNode leaves %v, want conditions and addresses", node)
	}
}
