// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// What is done to the world, in this order.

// collisions are there as long as kubelet does not know of them: it would not admit the pods.
func (w *world) collisions() {
	w.T.Helper()
	e := w.edges[0]
	before := w.truth(e)
	w.Must(e.kubelet.Freeze(w.T.Context()))
	w.create(e.name, "frozen",
		podSpec{name: "any", containers: []string{"8000/TCP/"}},
		podSpec{name: "one", containers: []string{"8000/TCP/10.0.0.1"}},
		podSpec{name: "net", hostNetwork: true, containers: []string{"8000/TCP/10.0.0.2 8001/TCP/"}},
		podSpec{name: "udp", containers: []string{"8000/UDP/"}},
		podSpec{name: "side", containers: []string{""}, sidecars: []string{"8001/TCP/"}},
		podSpec{name: "init", containers: []string{""}, inits: []string{"8001/TCP/"}},
		podSpec{name: "ip-1", containers: []string{"8002/TCP/10.0.0.1"}},
		podSpec{name: "ip-2", containers: []string{"8002/TCP/10.0.0.2"}},
		podSpec{name: "ip-6", containers: []string{"8002/TCP/::"}},
	)
	w.check("pods that kubelet has not seen")
	now := w.truth(e)
	if got := now.count("HostPortConflict") - before.count("HostPortConflict"); got != 5 { // any, one, and net twice, side
		w.T.Errorf("%d conflicts are new, the test is to have 5", got)
	}
	w.Must(e.kubelet.Thaw())
	for _, name := range []string{"udp", "init", "ip-1", "ip-2"} {
		_, err := w.ControlPlane.WaitPodRunning(w.T.Context(), w.namespaceOf(name+"-frozen-n1"), name+"-frozen-n1")
		w.Must(err)
	}
	w.check("kubelet has refused some of them")
	now = w.truth(e)
	if got := now.count("HostPortConflict") - before.count("HostPortConflict"); got != 0 {
		w.T.Errorf("%d conflicts are left after kubelet's admission, the test is to have none", got)
	}
}

func (w *world) namespaceOf(pod string) string {
	w.T.Helper()
	list, err := w.ControlPlane.Client.CoreV1().Pods("").List(w.T.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + pod})
	w.Must(err)
	if len(list.Items) != 1 {
		w.T.Fatalf("%d pods are called %s", len(list.Items), pod)
	}
	return list.Items[0].Namespace
}

// restarts of hubs, in order and not, change nothing, and no Event comes twice.
func (w *world) restarts() {
	w.T.Helper()
	w.Must(errors.Join(w.edges[0].Hub.Stop(), w.edges[1].Hub.Kill()))
	w.Must(errors.Join(w.edges[0].Hub.Start(w.T.Context()), w.edges[1].Hub.Start(w.T.Context())))
	w.check("two hubs were started again")
}

// label sets labels of a node, nil for none.
func (w *world) label(node string, labels map[string]any) {
	w.T.Helper()
	text := "{"
	for k, v := range labels {
		if text != "{" {
			text += ","
		}
		if v == nil {
			text += fmt.Sprintf("%q:null", k)
		} else {
			text += fmt.Sprintf("%q:%q", k, v)
		}
	}
	patch := fmt.Appendf(nil, `{"metadata":{"labels":%s}}`, text+"}")
	_, err := w.ControlPlane.Client.CoreV1().Nodes().Patch(w.T.Context(), node, types.MergePatchType, patch, metav1.PatchOptions{})
	w.Must(err)
}

// moves brings nodes into other pools.
func (w *world) moves() {
	w.T.Helper()
	w.label("n3", map[string]any{poolLabel: "host", hostNetworkLabel: "true"})
	w.label("n2", map[string]any{poolLabel: "plain", hostNetworkLabel: nil})
	w.label("n1", map[string]any{poolLabel: nil, hostNetworkLabel: nil})
	w.check("n3 is in pool host, n2 in plain, n1 in none")
	w.label("n1", map[string]any{poolLabel: "host", hostNetworkLabel: "true"})
	w.check("n1 is back")
}

// drifts are differences of labels and pools.
func (w *world) drifts() {
	w.T.Helper()
	for _, step := range []struct {
		label any // of n1, in pool host
		want  string
		plain any // label of n2, in pool plain
		drift string
	}{
		{nil, "LabelMissing", "true", "LabelLeftOver"},
		{"True", "LabelNotTrue", "false", ""},
		{"true", "", "false", ""},
	} {
		w.label("n1", map[string]any{hostNetworkLabel: step.label})
		w.label("n2", map[string]any{hostNetworkLabel: step.plain})
		w.check(fmt.Sprintf("label of n1 is %v, of n2 %v", step.label, step.plain))
		w.wantDrift("n1", step.want)
		w.wantDrift("n2", step.drift)
	}
}

func (w *world) wantDrift(node, want string) {
	w.T.Helper()
	for _, e := range w.edges {
		if e.name != node {
			continue
		}
		if got, err := e.report(w.T.Context()); err != nil || got.Drift != want {
			w.T.Errorf("drift of %s = %q, %v, want %q", node, got.Drift, err, want)
		}
	}
}

// poolsComeAndGo deletes NodePools and creates them in older versions, where the annotation
// or the field says that they are host-network pools.
func (w *world) poolsComeAndGo() {
	w.T.Helper()
	ctx := w.T.Context()
	w.Must(w.pools["v1beta2"].Delete(ctx, "host", metav1.DeleteOptions{}))
	w.Must(w.pools["v1alpha1"].Delete(ctx, "plain", metav1.DeleteOptions{}))
	w.check("both pools are gone")
	w.wantDrift("n1", "PoolMissing")
	w.wantDrift("n2", "PoolMissing")
	w.pools.create(w.Rig, "v1beta1", map[string]any{"name": "host"}, map[string]any{"type": "Edge", "hostNetwork": true})
	w.pools.create(w.Rig, "v1alpha1", map[string]any{"name": "plain", "annotations": map[string]any{hostNetworkLabel: "True"}}, map[string]any{"type": "Edge"})
	w.check("pool host is back in v1beta1, plain in v1alpha1 with the annotation")
	w.wantDrift("n1", "")
	w.wantDrift("n2", "LabelNotTrue") // it is "false" by now

	pool, err := w.pools["v1beta2"].Get(ctx, "host", metav1.GetOptions{})
	w.Must(err)
	pool.Object["status"] = map[string]any{"nodes": []any{"n1", "n3"}, "readyNodeNum": int64(2)}
	_, err = w.pools["v1beta2"].UpdateStatus(ctx, pool, metav1.UpdateOptions{})
	w.Must(err)
	w.check("the pool's status was written")
}

// cut ends the link, under all that may be started again then.
func (w *world) cut() {
	w.T.Helper()
	one, three := w.edges[0], w.edges[2]
	one.Settle()
	three.Settle()
	for _, e := range w.edges {
		r := w.truth(e).stale()
		e.offline = &r
	}
	w.Link.Cut()
	for _, e := range w.edges {
		e.WaitLink(false)
	}
	w.check("the link is cut")
	w.Must(one.Hub.Kill())
	w.Must(one.Hub.Start(w.T.Context()))
	w.check("a hub was killed")
	w.Must(errors.Join(three.kubelet.Kill(), three.Hub.Kill()))
	w.Must(errors.Join(three.Hub.Start(w.T.Context()), three.kubelet.Start(w.T.Context())))
	w.Must(one.kubelet.Kill())
	w.Must(one.kubelet.Start(w.T.Context()))
	w.check("kubelets were killed, and another hub")

	// What an administrator does meanwhile.
	w.label("n1", map[string]any{hostNetworkLabel: nil})
	w.create("n3", "meanwhile", podSpec{name: "own-network", containers: []string{""}}, podSpec{name: "ports", containers: []string{"9900/TCP/", "9900/TCP/127.0.0.1"}})
	of := w.ControlPlane.Client.CoreV1().Pods(w.namespaceOf("sidecar-after-n2"))
	w.Must(of.Delete(w.T.Context(), "sidecar-after-n2", metav1.DeleteOptions{GracePeriodSeconds: new(int64(0))}))
	w.check("nobody knows of that")
}

// healed is after the cut: what has changed meanwhile is found, and told of once.
func (w *world) healed() {
	w.T.Helper()
	w.Must(w.Link.Heal())
	for _, e := range w.edges {
		e.offline = nil
		e.WaitLink(true)
	}
	w.check("the link is back")
	w.wantDrift("n1", "LabelMissing")
	w.Must(w.edges[2].Hub.Kill())
	w.Must(w.edges[2].Hub.Start(w.T.Context()))
	w.check("a hub was killed after that")
	for _, name := range []string{"own-network-meanwhile-n3", "ports-meanwhile-n3"} {
		pod, err := w.ControlPlane.WaitPodRunning(w.T.Context(), w.namespaceOf(name), name)
		w.Must(err)
		if pod.Status.Phase != corev1.PodRunning {
			w.T.Errorf("pod %s is %s", name, pod.Status.Phase)
		}
	}
	w.check("its new pods run")
}
