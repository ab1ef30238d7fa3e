// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

func TestRetireArguments(t *testing.T) {
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"a word", []string{"now"}, `"now" is no flag`},
		{"an unknown flag", []string{"--deploy=x"}, "unknown flag: --deploy"},
		{"no time", []string{"--timeout=0s"}, "--timeout: 0s is not positive"},
		{"no cluster", []string{"--kubeconfig=/nowhere"}, "--kubeconfig: stat /nowhere"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := Retire(t.Context(), tt.args, &strings.Builder{})
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Retire(%q) = %v, want an error with %q", tt.args, err, tt.want)
			}
		})
	}
}

const testNamespace = "edgehub-system"

// installed is what Retire finds, and a namesake beside each that it must leave alone.
func installed() []runtime.Object {
	ours := metav1.ObjectMeta{Name: "edgehub", Namespace: testNamespace}
	theirs := metav1.ObjectMeta{Name: "other", Namespace: testNamespace}
	companion := metav1.ObjectMeta{Name: "edgehub-webhook", Namespace: testNamespace}
	return []runtime.Object{
		&admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "edgehub"}},
		&admissionv1.MutatingWebhookConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "other"}},
		&appsv1.DaemonSet{ObjectMeta: ours}, &appsv1.DaemonSet{ObjectMeta: theirs},
		&appsv1.Deployment{ObjectMeta: companion}, &appsv1.Deployment{ObjectMeta: theirs},
		&coordinationv1.Lease{ObjectMeta: companion}, &coordinationv1.Lease{ObjectMeta: theirs},
		podOf("hub-a", "a", "DaemonSet", "edgehub"), podOf("hub-b", "b", "DaemonSet", "edgehub"),
		podOf("companion", "cloud", "ReplicaSet", "edgehub-webhook-5d9f"),
		podOf("other-1", "a", "DaemonSet", "other"), podOf("other-2", "a", "ReplicaSet", "edgehub-webhook-other-5d9f"),
		aNode("a", corev1.ConditionTrue), aNode("b", corev1.ConditionTrue), aNode("cloud", corev1.ConditionTrue),
	}
}

func podOf(name, node, kind, owner string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: testNamespace, OwnerReferences: []metav1.OwnerReference{{Kind: kind, Name: owner}}},
		Spec:       corev1.PodSpec{NodeName: node},
	}
}

func aNode(name string, ready corev1.ConditionStatus) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{
		{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionTrue}, {Type: corev1.NodeReady, Status: ready},
	}}}
}

// endPods deletes pods some time after an object was deleted, as the garbage collector and
// kubelet do: half a second before after, since Retire looks at whole seconds.
func endPods(c *fake.Clientset, resource string, after time.Duration, pods ...string) {
	c.PrependReactor("delete", resource, func(clienttesting.Action) (bool, runtime.Object, error) {
		for _, name := range pods {
			time.AfterFunc(after-500*time.Millisecond, func() {
				_ = c.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), testNamespace, name)
			})
		}
		return false, nil, nil
	})
}

// deleted returns what was deleted through the client, in order.
func deleted(c *fake.Clientset) []string {
	var all []string
	for _, a := range c.Actions() {
		if d, ok := a.(clienttesting.DeleteAction); ok {
			all = append(all, d.GetResource().Resource+"/"+d.GetName())
		}
	}
	return all
}

func TestRetire(t *testing.T) {
	everything := []string{"mutatingwebhookconfigurations/edgehub", "daemonsets/edgehub", "deployments/edgehub-webhook", "leases/edgehub-webhook"}
	tests := []struct {
		name    string
		set     func(*fake.Clientset, *retirement)
		took    time.Duration
		deleted []string
		said    []string
		err     string
	}{
		{
			name: "all of it, waiting for pods",
			set: func(c *fake.Clientset, _ *retirement) {
				endPods(c, "daemonsets", 30*time.Second, "hub-a")
				endPods(c, "daemonsets", 40*time.Second, "hub-b")
				endPods(c, "deployments", 5*time.Second, "companion")
			},
			took: 45 * time.Second, deleted: everything,
			said: []string{"MutatingWebhookConfiguration edgehub is deleted.", "DaemonSet edgehub is deleted.", "Deployment edgehub-webhook is deleted.", "Lease edgehub-webhook is deleted."},
		},
		{
			name: "nodes that are not Ready, unknown or gone are named and not waited for",
			set: func(c *fake.Clientset, _ *retirement) {
				endPods(c, "daemonsets", time.Second, "hub-a")
				endPods(c, "deployments", time.Second, "companion")
				_ = c.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), aNode("b", corev1.ConditionUnknown), "")
				_ = c.Tracker().Add(podOf("hub-d", "gone", "DaemonSet", "edgehub"))
			},
			took: 2 * time.Second, deleted: everything,
			said: []string{
				"MutatingWebhookConfiguration edgehub is deleted.", "DaemonSet edgehub is deleted.",
				"Node b is not Ready: what is installed there stays. When it is back, run on it: edgehub uninstall",
				"Node gone is not Ready: what is installed there stays. When it is back, run on it: edgehub uninstall",
				"Deployment edgehub-webhook is deleted.", "Lease edgehub-webhook is deleted.",
			},
		},
		{
			name: "a pod that does not go",
			set:  func(c *fake.Clientset, _ *retirement) { endPods(c, "daemonsets", time.Second, "hub-a") },
			took: 4 * time.Minute, deleted: everything[:2],
			said: []string{"MutatingWebhookConfiguration edgehub is deleted.", "DaemonSet edgehub is deleted."},
			err:  "wait for the pods of DaemonSet edgehub: context deadline exceeded\nstill there: hub-b on b",
		},
		{
			name: "a second time",
			set: func(c *fake.Clientset, _ *retirement) {
				tracker := c.Tracker()
				_ = tracker.Delete(admissionv1.SchemeGroupVersion.WithResource("mutatingwebhookconfigurations"), "", "edgehub")
				_ = tracker.Delete(appsv1.SchemeGroupVersion.WithResource("daemonsets"), testNamespace, "edgehub")
				// It has been deleted, and its pods go on to end.
				time.AfterFunc(2500*time.Millisecond, func() {
					for _, name := range []string{"hub-a", "hub-b"} {
						_ = tracker.Delete(corev1.SchemeGroupVersion.WithResource("pods"), testNamespace, name)
					}
				})
				endPods(c, "deployments", time.Second, "companion")
			},
			took: 4 * time.Second, deleted: everything,
			said: []string{"MutatingWebhookConfiguration edgehub is not there.", "DaemonSet edgehub is not there.", "Deployment edgehub-webhook is deleted.", "Lease edgehub-webhook is deleted."},
		},
		{
			name: "only what is named",
			set:  func(_ *fake.Clientset, r *retirement) { r.webhooks, r.daemonSet, r.deployment = "edgehub", "", "" },
			said: []string{"MutatingWebhookConfiguration edgehub is deleted."}, deleted: everything[:1],
		},
		{
			name: "refused",
			set: func(c *fake.Clientset, _ *retirement) {
				c.PrependReactor("delete", "daemonsets", func(clienttesting.Action) (bool, runtime.Object, error) {
					return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "daemonsets"}, "edgehub", errors.New("no"))
				})
			},
			deleted: everything[:2], said: []string{"MutatingWebhookConfiguration edgehub is deleted."},
			err: `delete DaemonSet edgehub: daemonsets "edgehub" is forbidden: no`,
		},
		{
			name: "the API server is not itself for a moment",
			set: func(c *fake.Clientset, r *retirement) {
				r.daemonSet, r.deployment = "", ""
				answers := []error{apierrors.NewInternalError(errors.New("starting")), apierrors.NewTooManyRequests("busy", 1), errors.New("connection refused")}
				c.PrependReactor("delete", "mutatingwebhookconfigurations", func(clienttesting.Action) (handled bool, _ runtime.Object, err error) {
					if len(answers) == 0 {
						return false, nil, nil
					}
					err, answers = answers[0], answers[1:]
					return true, nil, err
				})
			},
			took: 3 * time.Second, deleted: []string{everything[0], everything[0], everything[0], everything[0]},
			said: []string{"MutatingWebhookConfiguration edgehub is deleted."},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var out strings.Builder
				c := fake.NewClientset(installed()...)
				r := retirement{client: c, out: &out, namespace: testNamespace, webhooks: "edgehub", daemonSet: "edgehub", deployment: "edgehub-webhook"}
				tt.set(c, &r)
				ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
				defer cancel()
				start := time.Now()
				err := r.run(ctx)
				if got := errorText(err); got != tt.err {
					t.Errorf("run() = %q, want %q", got, tt.err)
				}
				if got := time.Since(start); got != tt.took {
					t.Errorf("run() took %v, want %v", got, tt.took)
				}
				if diff := cmp.Diff(tt.deleted, deleted(c)); diff != "" {
					t.Errorf("deleted (-want +got):\n%s", diff)
				}
				if diff := cmp.Diff(tt.said, strings.Split(strings.TrimSpace(out.String()), "\n")); diff != "" {
					t.Errorf("said (-want +got):\n%s", diff)
				}
			})
		})
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
