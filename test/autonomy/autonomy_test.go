// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package autonomy

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/edgehub/edgehub/test/companion"
	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
)

// spares are nodes for tests that need no kubelet. There are more of them than are cut.
const spares = 6

// TestCompanion runs all tests on one control plane.
func TestCompanion(t *testing.T) {
	w := newWorld(t)
	cutter := w.newCutter()
	for i := range spares {
		w.node(fmt.Sprintf("spare-%d", i), "")
	}
	w.node("late-pool", "late-pool")
	values := []string{"nodePools.mode=off", "hub.enabled=false"}
	w.release = companion.Install(t, w.cp, append(values, "nodePools.crd.install=never")...)
	w.release.Start(t)
	t.Run("WithoutNodePools", func(t *testing.T) { withoutNodePools(w.in(t)) })
	w.release.Upgrade(t, append(values, "nodePools.crd.install=always")...)
	w.soon("there are NodePools", func(ctx context.Context) error {
		_, err := w.pools.List(ctx, metav1.ListOptions{})
		return err
	})
	for name, test := range map[string]func(*world){
		"Cut": cutter.test, "LatePool": latePool, "Bound": bound, "Pools": pools, "OpenYurt": openYurt, "Created": created, "Invalid": invalid,
		"ServingCertificate": servingCertificate, "Hostile": hostile,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(w.in(t))
		})
	}
}

// withoutNodePools looks after nodes in a cluster that has no NodePools.
func withoutNodePools(w *world) {
	w.node("alone", "nowhere")
	w.pod("alone", on("alone"))
	w.comeTo("without annotation", "alone", tolerating(defaultSeconds), false)
	w.annotateNode("alone", annotation, "true")
	w.comeTo("node: true", "alone", tolerating(-1), true)
	w.annotateNode("alone", annotation, "")
	w.comeTo("without annotation again", "alone", tolerating(defaultSeconds), false)
}

// latePool takes a NodePool in although there were none when the companion started.
func latePool(w *world) {
	w.pod("late-pool", on("late-pool"))
	w.pool("late-pool", "true")
	w.comeTo("pool: true", "late-pool", tolerating(-1), true)
}

// workloads makes a Deployment, a StatefulSet and a bare pod on a node.
func (w *world) workloads(name string) {
	w.Helper()
	ctx, apps := w.Context(), w.client().AppsV1()
	w.pod(name+"-bare", on(name))
	meta := metav1.ObjectMeta{Name: name}
	labels := map[string]string{"app": name}
	template := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: specOn(name)}
	_, err := apps.Deployments(namespace).Create(ctx, &appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: template}}, metav1.CreateOptions{})
	w.must(err)
	labels = map[string]string{"app": name + "-set"}
	template.Labels, meta.Name = labels, name+"-set"
	_, err = apps.StatefulSets(namespace).Create(ctx, &appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{ServiceName: name, Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: template}}, metav1.CreateOptions{})
	w.must(err)
}

// workloadPods is how many pods workloads makes.
const workloadPods = 3

// A life is what must not change of a pod that stays.
type life struct {
	UID      types.UID
	Restarts int32
	Started  metav1.Time
}

// lives waits until all pods of a node run, and returns what they are.
func (w *world) lives(name string) map[string]life {
	w.Helper()
	found := map[string]life{}
	w.soon("the pods of "+name+" run", func(ctx context.Context) error {
		pods, err := w.podsOn(ctx, name)
		if err != nil {
			return err
		}
		clear(found)
		for _, p := range pods {
			if len(p.Status.ContainerStatuses) == 1 && p.Status.ContainerStatuses[0].State.Running != nil {
				s := p.Status.ContainerStatuses[0]
				found[p.Name] = life{p.UID, s.RestartCount, s.State.Running.StartedAt}
			}
		}
		if len(found) != workloadPods {
			return fmt.Errorf("%d of %d do", len(found), workloadPods)
		}
		return nil
	})
	return maps.Clone(found)
}

// waitTaint waits until Kubernetes has given up a node, or taken it back.
func (w *world) waitTaint(name string, tainted bool) {
	w.Helper()
	w.soon(fmt.Sprintf("%s is tainted: %v", name, tainted), func(ctx context.Context) error {
		n, err := w.client().CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, taint := range n.Spec.Taints {
			if taint.Effect == corev1.TaintEffectNoExecute {
				if tainted {
					return nil
				}
				return fmt.Errorf("it has the taint %s", taint.Key)
			}
		}
		if tainted {
			return fmt.Errorf("it has the taints %v", n.Spec.Taints)
		}
		return nil
	})
}

// The nodes that are cut.
const (
	byNode      = "by-node"      // says so itself
	byPool      = "by-pool"      // its pool does
	late        = "late"         // says so once it is cut, for a time
	lateForever = "late-forever" // says so once it is cut, for ever
	plain       = "plain"        // does not
)

// A cutter has nodes with a kubelet behind a link.
type cutter struct{ link *link.Link }

// newCutter starts the kubelets and does not wait.
func (w *world) newCutter() *cutter {
	w.Helper()
	l, err := link.New(w.Context(), w.cp.Addr())
	w.must(err)
	w.Cleanup(l.Close)
	for _, name := range []string{byNode, byPool, late, lateForever, plain} {
		config, err := w.cp.NodeConfig(name)
		w.must(err)
		config.Host = l.URL()
		k, err := node.NewKubemark(w.Context(), node.KubeletConfig{Name: name, Client: config})
		w.must(err)
		process.Run(w.T, k)
	}
	return &cutter{l}
}

// test cuts nodes off for longer than the eviction takes. Where the node or its pool says
// so, also when it says so only after the cut, the pods stay, and are the same ones after
// it; elsewhere they are evicted.
func (c *cutter) test(w *world) {
	nodes := []string{byNode, byPool, late, lateForever, plain}
	stay := nodes[:4]
	for _, name := range nodes {
		w.must(w.cp.WaitNodeReady(w.Context(), name))
		w.waitTaint(name, false)
		w.workloads(name)
	}
	w.pool("cut", "15m")
	_, err := w.client().CoreV1().Nodes().Patch(w.Context(), byPool, types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"labels":{%q:"cut"}}}`, poolLabel), metav1.PatchOptions{})
	w.must(err)
	w.annotateNode(byNode, annotation, "true")
	before := map[string]map[string]life{}
	for _, name := range nodes {
		before[name] = w.lives(name)
	}
	w.comeTo("node: true", byNode, tolerating(-1), true)
	w.comeTo("pool: 15m", byPool, tolerating(900), true)

	c.link.Cut()
	w.waitTaint(late, true)
	w.annotateNode(late, annotation, "10m")
	w.waitTaint(lateForever, true)
	w.annotateNode(lateForever, annotation, "true")
	w.evicted(plain, before[plain])
	w.comeTo("after the cut: 10m", late, tolerating(600), true)
	for _, name := range stay {
		w.waitTaint(name, true)
	}
	// Whatever was scheduled at the same time as the eviction of the plain node's pods,
	// or a little later, has had its time.
	w.soon("the eviction has had its time", w.taintedFor(stay, defaultSeconds+5))
	for _, name := range stay {
		if d := cmp.Diff(uidsOf(before[name]), w.uids(name)); d != "" {
			w.Errorf("%s, while it is cut: pods (-before +now):\n%s", name, d)
		}
	}
	w.must(c.link.Heal())
	for _, name := range stay {
		w.waitTaint(name, false)
		w.must(w.cp.WaitNodeReady(w.Context(), name))
		if d := cmp.Diff(before[name], w.lives(name)); d != "" {
			w.Errorf("%s, after the cut: pods (-before +now):\n%s", name, d)
		}
	}
	w.annotateNode(byNode, annotation, "")
	w.comeTo("after the cut, off", byNode, tolerating(defaultSeconds), false)
}

// taintedFor waits until all nodes have had the taint for so many seconds.
func (w *world) taintedFor(names []string, seconds int) func(context.Context) error {
	return func(ctx context.Context) error {
		for _, name := range names {
			n, err := w.client().CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			for _, taint := range n.Spec.Taints {
				if taint.Effect == corev1.TaintEffectNoExecute && taint.TimeAdded != nil && int(metav1.Now().Sub(taint.TimeAdded.Time).Seconds()) < seconds {
					return fmt.Errorf("%s has the taint since %v", name, taint.TimeAdded)
				}
			}
		}
		return nil
	}
}

// evicted waits until all pods that a node had are gone or about to go.
func (w *world) evicted(name string, before map[string]life) {
	w.Helper()
	w.soon("the pods of "+name+" are evicted", func(ctx context.Context) error {
		pods, err := w.podsOn(ctx, name)
		if err != nil {
			return err
		}
		for pod, was := range before {
			if now := pods[pod]; now != nil && now.UID == was.UID {
				return fmt.Errorf("%s is still there", pod)
			}
		}
		return nil
	})
}

func uidsOf(lives map[string]life) map[string]types.UID {
	uids := map[string]types.UID{}
	for name, l := range lives {
		uids[name] = l.UID
	}
	return uids
}

func (w *world) uids(name string) map[string]types.UID {
	w.Helper()
	pods, err := w.podsOn(w.Context(), name)
	w.must(err)
	uids := map[string]types.UID{}
	for name, p := range pods {
		uids[name] = p.UID
	}
	return uids
}

// bound puts the annotation on and off a node with pods of all kinds.
func bound(w *world) {
	const name = "spare-0"
	w.workloads(name)
	w.soon("there are pods", func(ctx context.Context) error {
		pods, err := w.podsOn(ctx, name)
		if err == nil && len(pods) != workloadPods {
			err = fmt.Errorf("there are %d", len(pods))
		}
		return err
	})
	for _, step := range []struct {
		value   string
		seconds int64
	}{{"true", -1}, {"90s", 90}, {"false", defaultSeconds}, {"24h", 86400}, {"", defaultSeconds}} {
		w.annotateNode(name, annotation, step.value)
		w.comeTo(fmt.Sprintf("node: %q", step.value), name, tolerating(step.seconds), step.seconds != defaultSeconds)
	}
	// A pod's own tolerations are raised and come back, whatever they look like.
	const other = "spare-1"
	everyKey, hour := int64(30), int64(3600)
	own := []corev1.Toleration{
		{Key: "example.com/x", Operator: corev1.TolerationOpEqual, Value: "y", Effect: corev1.TaintEffectNoSchedule},
		{Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: &everyKey},
		{Key: "node.kubernetes.io/unreachable", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: &hour},
	}
	w.pod("own", func(p *corev1.Pod) { on(other)(p); p.Spec.Tolerations = own })
	before, err := w.podsOn(w.Context(), other)
	w.must(err)
	w.annotateNode(other, annotation, "10m")
	ten := int64(600)
	raised := append([]corev1.Toleration{}, before["own"].Spec.Tolerations...)
	raised[1].TolerationSeconds = &ten
	w.comeTo("own tolerations raised", other, raised, true)
	w.annotateNode(other, annotation, "")
	w.comeTo("own tolerations put back", other, before["own"].Spec.Tolerations, false)
	// A pod may opt out.
	w.annotateNode(other, annotation, "true")
	w.annotatePod("own", annotation, "false")
	w.comeTo("opted out", other, before["own"].Spec.Tolerations, false)
	w.annotateNode(other, annotation, "")
}

// pools moves a node between pools.
func pools(w *world) {
	const name = "spare-2"
	w.pool("on", "true")
	w.pool("an-hour", "1h")
	w.pool("silent", "")
	w.pod("pools", on(name))
	move := func(pool string) {
		patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%q}}}`, poolLabel, pool)
		_, err := w.client().CoreV1().Nodes().Patch(w.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{})
		w.must(err)
	}
	for _, step := range []struct {
		pool    string
		seconds int64
	}{{"on", -1}, {"an-hour", 3600}, {"silent", defaultSeconds}, {"on", -1}, {"missing", defaultSeconds}, {"silent", defaultSeconds}} {
		move(step.pool)
		w.comeTo("in "+step.pool, name, tolerating(step.seconds), step.seconds != defaultSeconds)
	}
	w.annotatePool("silent", annotation, "2h")
	w.comeTo("pool: 2h", name, tolerating(7200), true)
	w.annotateNode(name, annotation, "false")
	w.comeTo("node: false, pool: 2h", name, tolerating(defaultSeconds), false)
	w.annotateNode(name, annotation, "")
	w.comeTo("pool: 2h again", name, tolerating(7200), true)
	w.must(w.pools.Delete(w.Context(), "silent", metav1.DeleteOptions{}))
	w.comeTo("without the pool", name, tolerating(defaultSeconds), false)
}

// openYurt takes OpenYurt's annotations.
func openYurt(w *world) {
	const name = "spare-3"
	w.pod("openyurt", on(name))
	for _, step := range []struct {
		key, value string
		seconds    int64
	}{{openYurtFlag, "true", -1}, {openYurtDuration, "2m", -1}, {openYurtFlag, "", 120}, {openYurtDuration, "0", -1}, {openYurtDuration, "", defaultSeconds}} {
		w.annotateNode(name, step.key, step.value)
		w.comeTo(fmt.Sprintf("%s: %q", step.key, step.value), name, tolerating(step.seconds), step.seconds != defaultSeconds)
	}
}

// created: pods get their tolerations at once where it is known where they will run. What
// the companion could not know it puts right when the pod is bound.
func created(w *world) {
	const name, other = "spare-4", "spare-5"
	w.pool("created", "true")
	w.annotateNode(name, annotation, "45s")
	selecting := func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{poolLabel: "created"} }
	// The companion learns of node and pool a moment after they are made; and while it is
	// away, or the API server does not know its certificate yet, pods are made without it.
	n := 0
	for what, c := range map[string]struct {
		edit    func(*corev1.Pod)
		seconds int64
	}{"on a node": {on(name), 45}, "selects a pool": {selecting, -1}} {
		w.soon("a pod that "+what+" is created with its tolerations", func(ctx context.Context) error {
			n++
			p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("created-%d", n)}, Spec: specOn("")}
			c.edit(p)
			made, err := w.client().CoreV1().Pods(namespace).Create(ctx, p, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			if err != nil {
				return err
			}
			if d := cmp.Diff(tolerating(c.seconds), made.Spec.Tolerations); d != "" || !strings.HasPrefix(made.Annotations[original], "[{") {
				return fmt.Errorf("record %q, tolerations (-want +got):\n%s", made.Annotations[original], d)
			}
			return nil
		})
	}
	if p := w.pod("anywhere", func(*corev1.Pod) {}); cmp.Diff(tolerating(defaultSeconds), p.Spec.Tolerations) != "" {
		w.Errorf("a pod that may run anywhere is created with %v, want %v", p.Spec.Tolerations, tolerating(defaultSeconds))
	}
	w.pod("bind", selecting)
	w.must(w.client().CoreV1().Pods(namespace).Bind(w.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "bind"}, Target: corev1.ObjectReference{Kind: "Node", Name: other}}, metav1.CreateOptions{}))
	w.comeTo("bound to a node out of the pool", other, tolerating(defaultSeconds), false)
}

// invalid: a value that means nothing is told of, and nothing is done by it.
func invalid(w *world) {
	const name = "invalid"
	w.node(name, "")
	w.pod("invalid", on(name))
	w.annotateNode(name, annotation, "perhaps")
	w.event("Node", name, "InvalidAutonomy", "perhaps")
	w.comeTo("a value that means nothing", name, tolerating(defaultSeconds), false)
}

// event waits for an Event about an object.
func (w *world) event(kind, name, reason, note string) {
	w.Helper()
	w.soon(fmt.Sprintf("an Event about %s %s", kind, name), func(ctx context.Context) error {
		all, err := w.client().EventsV1().Events("default").List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		var notes []string
		for _, e := range all.Items {
			if e.Regarding.Kind == kind && e.Regarding.Name == name && e.Reason == reason {
				notes = append(notes, e.Note)
			}
		}
		if len(notes) != 1 || !strings.Contains(notes[0], note) {
			return fmt.Errorf("the Events say %q, want one of %q", notes, note)
		}
		return nil
	})
}
