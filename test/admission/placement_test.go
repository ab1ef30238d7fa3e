// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/edgehub/edgehub/test/admission/cases"
	"github.com/edgehub/edgehub/test/process"
)

// podTemplate makes pods that may go onto the nodes of the rig, and that are gone as soon
// as they are deleted.
func podTemplate(app, value string) corev1.PodTemplateSpec {
	t := corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"app": app}},
		Spec: corev1.PodSpec{
			Containers:                    []corev1.Container{{Name: "c", Image: "example.com/i"}},
			TerminationGracePeriodSeconds: ptr.To[int64](0),
			Tolerations:                   []corev1.Toleration{{Key: "test", Operator: corev1.TolerationOpExists}},
		},
	}
	if value != "" {
		t.Annotations = map[string]string{cases.Annotation: value}
	}
	return t
}

func selector(app string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}
}

// placed returns the nodes of an app's pods, with their numbers of pods, once there are as
// many on nodes as wanted.
func (r *rig) placed(t *testing.T, namespace, app string, want int) map[string]int {
	t.Helper()
	var nodes map[string]int
	if err := process.Poll(t.Context(), fmt.Sprintf("%d pods of %s/%s are on nodes", want, namespace, app), func(ctx context.Context) error {
		pods, err := r.cp.Client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: "app=" + app})
		if err != nil {
			return err
		}
		n := 0
		nodes = map[string]int{}
		for _, p := range pods.Items {
			if p.Spec.NodeName != "" {
				nodes[p.Spec.NodeName]++
				n++
			}
		}
		if n != want || len(pods.Items) != want {
			return fmt.Errorf("%w: %d of %d pods are on nodes", errNotThere, n, len(pods.Items))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return nodes
}

// onHosts counts pods on host-network nodes.
func onHosts(nodes map[string]int) (n int) {
	for node, pods := range nodes {
		if strings.HasPrefix(node, "host-") {
			n += pods
		}
	}
	return n
}

// testScheduler: the real scheduler puts no pod with the annotation onto a host-network
// node, however it is made, and others there as well.
func (r *rig) testScheduler(t *testing.T, mode string) {
	ctx, client := t.Context(), r.cp.Client
	deployment := func(app, value string) {
		_, err := client.AppsV1().Deployments(mode).Create(ctx, &appsv1.Deployment{
			ObjectMeta: metav1.ObjectMeta{Name: app},
			Spec:       appsv1.DeploymentSpec{Replicas: ptr.To[int32](12), Selector: selector(app), Template: podTemplate(app, value)},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	deployment("kept-off", "true")
	deployment("anywhere", "")
	deployment("opted-out", "false")
	job := podTemplate("job", "true")
	job.Spec.RestartPolicy = corev1.RestartPolicyNever
	if _, err := client.BatchV1().Jobs(mode).Create(ctx, &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: "job"}, Spec: batchv1.JobSpec{Parallelism: ptr.To[int32](6), Completions: ptr.To[int32](6), Template: job},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	contrary := podTemplate("contrary", "true")
	contrary.Spec.NodeSelector = map[string]string{cases.PoolLabel: cases.HostPool}
	if _, err := client.CoreV1().Pods(mode).Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "contrary", Labels: contrary.Labels, Annotations: contrary.Annotations}, Spec: contrary.Spec}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	r.testGated(t, mode)

	for app, pods := range map[string]int{"kept-off": 12, "job": 6, "gated": 1} {
		if nodes := r.placed(t, mode, app, pods); onHosts(nodes) > 0 {
			t.Errorf("pods of %s are on %v, want none on a host-network node", app, nodes)
		}
	}
	for _, app := range []string{"anywhere", "opted-out"} {
		if nodes := r.placed(t, mode, app, 12); onHosts(nodes) == 0 {
			t.Errorf("pods of %s are on %v, want some on host-network nodes", app, nodes)
		}
	}
	if err := process.Poll(ctx, "the pod that contradicts itself is unschedulable", func(ctx context.Context) error {
		p, err := client.CoreV1().Pods(mode).Get(ctx, "contrary", metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Reason == corev1.PodReasonUnschedulable {
				return nil
			}
		}
		return fmt.Errorf("%w: node %q, conditions %v", errNotThere, p.Spec.NodeName, p.Status.Conditions)
	}); err != nil {
		t.Error(err)
	}
}

// testGated makes a pod that gets the annotation while gates hold it back, and lets it go.
func (r *rig) testGated(t *testing.T, mode string) {
	t.Helper()
	ctx, pods := t.Context(), r.cp.Client.CoreV1().Pods(mode)
	template := podTemplate("gated", "")
	template.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "example.com/wait"}}
	p, err := pods.Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "gated", Labels: template.Labels}, Spec: template.Spec}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	p.Annotations = map[string]string{cases.Annotation: "true"}
	p.ResourceVersion, p.Spec.SchedulingGates = "", nil
	if _, err := pods.Update(ctx, p, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// oldDaemonSet was there, with the annotation, before anybody looked at it.
const oldDaemonSet = "old-daemons"

func (r *rig) createDaemonSet(t *testing.T, namespace, app, value string) {
	t.Helper()
	if _, err := r.cp.Client.AppsV1().DaemonSets(namespace).Create(t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: app}, Spec: appsv1.DaemonSetSpec{Selector: selector(app), Template: podTemplate(app, value)},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) createOldDaemonSets() {
	for _, mode := range modes {
		r.createDaemonSet(r.T, mode, oldDaemonSet, "true")
	}
	for _, mode := range modes {
		if nodes := r.placed(r.T, mode, oldDaemonSet, 6); onHosts(nodes) != 3 {
			r.Fatalf("%s is on %v", oldDaemonSet, nodes)
		}
	}
}

// desired waits until the DaemonSet's controller wants pods on so many nodes, has them
// all, and has nothing left to do.
func (r *rig) desired(t *testing.T, namespace, app string, want int) {
	t.Helper()
	if err := process.Poll(t.Context(), fmt.Sprintf("DaemonSet %s/%s has what it wants", namespace, app), func(ctx context.Context) error {
		d, err := r.cp.Client.AppsV1().DaemonSets(namespace).Get(ctx, app, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if s := d.Status; s.ObservedGeneration != d.Generation || int(s.DesiredNumberScheduled) != want || int(s.CurrentNumberScheduled) != want || int(s.UpdatedNumberScheduled) != want || s.NumberMisscheduled != 0 {
			return fmt.Errorf("%w: generation %d, status %+v, want %d nodes", errNotThere, d.Generation, s, want)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// testDaemonSets: the controller itself leaves host-network nodes out, so that no pod is
// pending, neither of a new DaemonSet nor of one whose template is changed.
func (r *rig) testDaemonSets(t *testing.T, mode string) {
	r.createDaemonSet(t, mode, "daemons", "true")
	r.createDaemonSet(t, mode, "everywhere", "")
	r.desired(t, mode, "daemons", 3)
	if nodes := r.placed(t, mode, "daemons", 3); onHosts(nodes) > 0 {
		t.Errorf("pods of daemons are on %v, want none on a host-network node", nodes)
	}
	r.desired(t, mode, "everywhere", 6)
	r.placed(t, mode, "everywhere", 6)

	ctx, sets := t.Context(), r.cp.Client.AppsV1().DaemonSets(mode)
	change := func(f func(*appsv1.DaemonSet)) {
		if err := process.Poll(ctx, "the DaemonSet is updated", func(ctx context.Context) error {
			d, err := sets.Get(ctx, oldDaemonSet, metav1.GetOptions{})
			if err != nil {
				return err
			}
			f(d)
			_, err = sets.Update(ctx, d, metav1.UpdateOptions{})
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	change(func(d *appsv1.DaemonSet) { d.Labels = map[string]string{"a": "b"} })
	if d, err := sets.Get(ctx, oldDaemonSet, metav1.GetOptions{}); err != nil || d.Generation != 1 || d.Spec.Template.Spec.Affinity != nil {
		t.Errorf("a label makes the DaemonSet roll its pods: %v, generation %d", err, d.Generation)
	}
	change(func(d *appsv1.DaemonSet) { d.Spec.Template.Spec.Containers[0].Image = "example.com/j" })
	r.desired(t, mode, oldDaemonSet, 3)
	if nodes := r.placed(t, mode, oldDaemonSet, 3); onHosts(nodes) > 0 {
		t.Errorf("pods of %s are on %v, want none on a host-network node", oldDaemonSet, nodes)
	}
}
