// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package autonomy runs the real companion, with the chart's rights, before a real
// control plane whose eviction is quick: nodes are cut for longer than it takes, and
// annotations put on and off. And it has hubs' serving certificates approved, and others
// not.
package autonomy

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/companion"
	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
)

// What nodes, pools and pods are marked with. They are a contract, and written out here
// so that a slip in the companion shows.
const (
	annotation             = "edgehub.io/autonomy"
	original               = "edgehub.io/autonomy-original-tolerations"
	openYurtFlag           = "node.beta.openyurt.io/autonomy"
	openYurtDuration       = "node.openyurt.io/autonomy-duration"
	poolLabel              = "apps.openyurt.io/nodepool"
	defaultSeconds         = 12 // of tolerations that pods get without being asked
	gracePeriod            = 20 * time.Second
	heartbeat              = 2 * time.Second
	namespace              = "autonomy"
	withoutCRD             = "nodePools.crd.install=never"
	withCRD                = "nodePools.crd.install=always"
	leaseNamespace         = "kube-node-lease"
	leaseSeconds     int32 = 40
)

// Patience of what must be right within seconds, on a machine that is busy.
const patience = 60 * time.Second

func TestMain(m *testing.M) {
	flag.Parse()
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	if err := flag.Set("test.parallel", "16"); err != nil { // most of them wait most of the time
		panic(err)
	}
	os.Exit(m.Run())
}

// A world is a control plane, and the companion once it is installed.
type world struct {
	*testing.T
	cp      *controlplane.ControlPlane
	release *companion.Release
	pools   dynamic.NamespaceableResourceInterface
	alive   *names
}

// names are nodes without kubelet that have a heartbeat.
type names struct {
	mu  sync.Mutex
	all []string
}

func (n *names) add(name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.all = append(n.all, name)
}

func (n *names) get() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.all)
}

func newWorld(t *testing.T) *world {
	t.Helper()
	cp := controlplane.New(t, controlplane.Config{
		APIServerArgs: []string{
			fmt.Sprintf("--default-not-ready-toleration-seconds=%d", defaultSeconds), fmt.Sprintf("--default-unreachable-toleration-seconds=%d", defaultSeconds),
		},
		ControllerManager: true,
		ControllerManagerArgs: []string{
			"--node-monitor-period=500ms", "--node-monitor-grace-period=" + gracePeriod.String(), "--node-eviction-rate=100",
			"--controllers=node-lifecycle-controller,taint-eviction-controller,pod-garbage-collector-controller,deployment-controller,replicaset-controller," +
				"statefulset-controller,serviceaccount-controller,root-ca-certificate-publisher-controller,certificatesigningrequest-signing-controller",
		},
	})
	w := &world{T: t, cp: cp, alive: &names{}}
	w.must(cp.CreateNamespace(t.Context(), namespace))
	c, err := dynamic.NewForConfig(cp.AdminConfig())
	w.must(err)
	w.pools = c.Resource(schema.GroupVersionResource{Group: "apps.openyurt.io", Version: "v1beta2", Resource: "nodepools"})
	w.beat()
	return w
}

// in is the world of a subtest.
func (w *world) in(t *testing.T) *world {
	return &world{T: t, cp: w.cp, release: w.release, pools: w.pools, alive: w.alive}
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *world) client() kubernetes.Interface { return w.cp.Client }

// soon polls a condition.
func (w *world) soon(what string, condition func(context.Context) error) {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), patience)
	defer cancel()
	w.must(process.Poll(ctx, what, condition))
}

// beat keeps the nodes without kubelet ready until the end of the test.
func (w *world) beat() {
	ctx, cancel := context.WithCancel(w.Context())
	done := make(chan struct{})
	w.Cleanup(func() { cancel(); <-done })
	go func() {
		defer close(done)
		ticker := time.NewTicker(heartbeat)
		defer ticker.Stop()
		for {
			for _, name := range w.alive.get() {
				patch := fmt.Sprintf(`{"spec":{"renewTime":%q}}`, time.Now().UTC().Format(metav1.RFC3339Micro))
				_, err := w.client().CoordinationV1().Leases(leaseNamespace).Patch(ctx, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
				if err != nil && ctx.Err() == nil {
					w.Errorf("heartbeat of %s: %v", name, err)
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
		}
	}()
}

// node makes a node without kubelet that is ready and stays so: Kubernetes evicts nobody
// where most of the nodes seem to be gone.
func (w *world) node(name, pool string, addresses ...string) {
	w.Helper()
	ctx, now := w.Context(), metav1.NowMicro()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
	if pool != "" {
		n.Labels[poolLabel] = pool
	}
	_, err := w.client().CoreV1().Nodes().Create(ctx, n, metav1.CreateOptions{})
	w.must(err)
	w.status(w.client(), name, corev1.NodeStatus{
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now()}},
		Addresses:  addressesOf(addresses...),
	})
	seconds := leaseSeconds
	_, err = w.client().CoordinationV1().Leases(leaseNamespace).Create(ctx, &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &name, LeaseDurationSeconds: &seconds, RenewTime: &now},
	}, metav1.CreateOptions{})
	w.must(err)
	w.alive.add(name)
}

// status replaces parts of a Node's status, as whoever is asked.
func (w *world) status(as kubernetes.Interface, name string, status corev1.NodeStatus) {
	w.Helper()
	patch, err := json.Marshal(corev1.Node{Status: status})
	w.must(err)
	_, err = as.CoreV1().Nodes().Patch(w.Context(), name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	w.must(err)
}

func addressesOf(values ...string) (all []corev1.NodeAddress) {
	for _, a := range values {
		all = append(all, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return all
}

// annotateNode sets an annotation, or removes it if value is "".
func (w *world) annotateNode(name, key, value string) {
	w.Helper()
	_, err := w.client().CoreV1().Nodes().Patch(w.Context(), name, types.MergePatchType, annotationPatch(key, value), metav1.PatchOptions{})
	w.must(err)
}

func (w *world) annotatePool(name, key, value string) {
	w.Helper()
	_, err := w.pools.Patch(w.Context(), name, types.MergePatchType, annotationPatch(key, value), metav1.PatchOptions{})
	w.must(err)
}

func (w *world) annotatePod(name, key, value string) {
	w.Helper()
	_, err := w.client().CoreV1().Pods(namespace).Patch(w.Context(), name, types.MergePatchType, annotationPatch(key, value), metav1.PatchOptions{})
	w.must(err)
}

func annotationPatch(key, value string) []byte {
	if value == "" {
		return fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}}}`, key)
	}
	return fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, key, value)
}

// pool makes a NodePool.
func (w *world) pool(name, value string) {
	w.Helper()
	metadata := map[string]any{"name": name}
	if value != "" {
		metadata["annotations"] = map[string]any{annotation: value}
	}
	_, err := w.pools.Create(w.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apps.openyurt.io/v1beta2", "kind": "NodePool", "metadata": metadata, "spec": map[string]any{"type": "Edge"},
	}}, metav1.CreateOptions{})
	w.must(err)
}

// pod makes a bare pod.
func (w *world) pod(name string, edit func(*corev1.Pod)) *corev1.Pod {
	w.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"app": name}}, Spec: specOn("")}
	edit(p)
	made, err := w.client().CoreV1().Pods(namespace).Create(w.Context(), p, metav1.CreateOptions{})
	w.must(err)
	return made
}

func on(node string) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Spec.NodeName = node } }

func specOn(node string) corev1.PodSpec {
	return corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "c", Image: "example.invalid/none:1"}}}
}

// podsOn returns the pods of a node that are not about to go, by name.
func (w *world) podsOn(ctx context.Context, node string) (map[string]*corev1.Pod, error) {
	list, err := w.client().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		return nil, err
	}
	pods := map[string]*corev1.Pod{}
	for i := range list.Items {
		if list.Items[i].DeletionTimestamp == nil {
			pods[list.Items[i].Name] = &list.Items[i]
		}
	}
	return pods, nil
}

// tolerating are the tolerations of both taints; below 0 is for ever.
func tolerating(seconds int64) []corev1.Toleration {
	var s *int64
	if seconds >= 0 {
		s = &seconds
	}
	t := func(key string) corev1.Toleration {
		return corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: s}
	}
	return []corev1.Toleration{t("node.kubernetes.io/not-ready"), t("node.kubernetes.io/unreachable")}
}

// comeTo waits until all pods of a node have these tolerations, and a record or none.
func (w *world) comeTo(when, node string, want []corev1.Toleration, recorded bool) {
	w.Helper()
	w.soon(when+": the pods of "+node+" have the tolerations", func(ctx context.Context) error {
		pods, err := w.podsOn(ctx, node)
		if err != nil || len(pods) == 0 {
			return errors.Join(err, fmt.Errorf("%d pods", len(pods)))
		}
		for name, p := range pods {
			if d := cmp.Diff(want, p.Spec.Tolerations); d != "" {
				return fmt.Errorf("%s (-want +got):\n%s", name, d)
			}
			if _, ok := p.Annotations[original]; ok != recorded {
				return fmt.Errorf("%s has a record: %v, want %v", name, ok, recorded)
			}
		}
		return nil
	})
}
