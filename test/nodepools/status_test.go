// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package nodepools

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/edgehub/edgehub/test/rig"
)

var statusPools = []string{"s-host", "s-annotated", "s-pods", "s-empty"}

// status tells of a pool what an oracle tells who looks at all nodes and pods.
func (s *scene) status() {
	seed := rig.Seed(s)
	s.Cleanup(func() { rig.KeepSeed(s, "./test/nodepools", seed, 0) })
	random := rand.New(rand.NewPCG(seed, 0))
	s.createPool("s-host", spec{"hostNetwork": true}, nil)
	s.createPool("s-annotated", spec{}, map[string]string{hostNetworkLabel: "true"})
	s.createPool("s-pods", spec{}, nil)
	s.createPool("s-empty", spec{"type": "Cloud"}, nil)
	_, err := s.dynamic.Resource(v1beta2).Patch(s.Context(), "s-host", types.MergePatchType,
		[]byte(`{"status":{"leaderNum":1,"conditions":[{"type":"LeaderReady","status":"True","reason":"Others","message":"","lastTransitionTime":"2026-01-01T00:00:00Z"}]}}`), metav1.PatchOptions{}, "status")
	s.must(err)
	for i := range 9 {
		s.createNode("s-"+strconv.Itoa(i), statusPools[i%3], random.IntN(2) == 0)
	}
	for i := range 40 {
		s.createPod(random, i)
	}
	s.wantStatuses()

	// Some change.
	s.setReady("s-0", true)
	s.setReady("s-1", false)
	s.setLabel("s-2", poolLabel, "s-host")
	s.setLabel("s-3", poolLabel, "")
	s.must(s.client.CoreV1().Nodes().Delete(s.Context(), "s-4", metav1.DeleteOptions{}))
	pods, err := s.client.CoreV1().Pods("a").List(s.Context(), metav1.ListOptions{})
	s.must(err)
	for i, p := range pods.Items {
		switch i % 5 {
		case 0:
			s.must(s.client.CoreV1().Pods("a").Delete(s.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}))
		case 1:
			s.patchPod(p.Name, `{"status":{"phase":"Succeeded"}}`, "status")
		case 2:
			s.patchPod(p.Name, `{"metadata":{"annotations":{"`+excludeKey+`":"true"}}}`)
		}
	}
	s.wantStatuses()
	s.must(s.dynamic.Resource(v1beta2).Delete(s.Context(), "s-pods", metav1.DeleteOptions{}))
	s.eventually("there are no metrics of a pool that is gone", func(ctx context.Context) error {
		text, err := s.replica.Metrics(ctx)
		if err == nil && strings.Contains(text, `pool="s-pods"`) {
			return fmt.Errorf("there are")
		}
		return err
	})
	s.nothingMore()
}

// nothingMore is written of what does not change.
func (s *scene) nothingMore() {
	ofThese := func(since time.Time, pools ...string) (all []string) {
		for _, w := range s.writes(since) {
			if slices.ContainsFunc(pools, func(pool string) bool { return strings.Contains(w, "/"+pool+"/status") }) {
				all = append(all, w)
			}
		}
		return all
	}
	s.eventually("no report is due", func(context.Context) error {
		if all := ofThese(time.Now().Add(-6*time.Second), statusPools...); len(all) > 0 {
			return fmt.Errorf("written: %q", all)
		}
		return nil
	})
	since := time.Now()
	for range 3 {
		s.patchPod("p-3", `{"status":{"message":"`+time.Now().String()+`"}}`, "status")
	}
	s.createNode("s-last", "s-empty", true)
	s.wantStatuses()
	if all := ofThese(since, "s-host", "s-annotated"); len(all) > 0 {
		s.Errorf("the companion has written: %q", all)
	}
}

func (s *scene) patchPod(name, patch string, subresource ...string) {
	s.Helper()
	_, err := s.client.CoreV1().Pods("a").Patch(s.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}, subresource...)
	s.must(err)
}

func (s *scene) createPod(random *rand.Rand, i int) {
	s.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p-" + strconv.Itoa(i), Annotations: map[string]string{}},
		Spec:       corev1.PodSpec{NodeName: "s-" + strconv.Itoa(random.IntN(9)), HostNetwork: random.IntN(2) == 0, Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}
	switch random.IntN(4) {
	case 0:
		p.Annotations[excludeKey] = "true"
	case 1:
		p.Annotations[excludeKey] = "True"
	}
	if random.IntN(2) == 0 {
		port := int32(8000 + random.IntN(3))
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: port, HostPort: port}}
	}
	_, err := s.client.CoreV1().Pods("a").Create(s.Context(), p, metav1.CreateOptions{})
	s.must(err)
}

// An expectation is what the oracle says of a pool.
type expectation struct {
	Nodes                                   []string
	Ready                                   int
	Excluded, WithoutHostNetwork, Conflicts int
}

// oracle looks at all that there is.
func (s *scene) oracle(ctx context.Context, pool string) (e expectation, err error) {
	nodes, err := s.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: poolLabel + "=" + pool})
	if err != nil {
		return e, err
	}
	pods, err := s.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return e, err
	}
	for _, n := range nodes.Items {
		e.Nodes = append(e.Nodes, n.Name)
		for _, c := range n.Status.Conditions {
			if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
				e.Ready++
			}
		}
		ports := map[int32]int{}
		for _, p := range pods.Items {
			if p.Spec.NodeName != n.Name || p.Status.Phase == corev1.PodSucceeded {
				continue
			}
			if strings.HasPrefix(pool, "s-host") || pool == "s-annotated" {
				if p.Annotations[excludeKey] == "true" {
					e.Excluded++
				}
				if !p.Spec.HostNetwork {
					e.WithoutHostNetwork++
				}
			}
			for _, port := range p.Spec.Containers[0].Ports {
				e.Conflicts += ports[port.HostPort] // with each that is there already
				ports[port.HostPort]++
			}
		}
	}
	slices.Sort(e.Nodes)
	return e, nil
}

// wantStatuses waits until pools, and the metrics of them, are as the oracle says.
func (s *scene) wantStatuses() {
	s.Helper()
	for _, pool := range statusPools {
		s.eventually("the status of pool "+pool+" is right", func(ctx context.Context) error {
			p, err := s.dynamic.Resource(v1beta2).Get(ctx, pool, metav1.GetOptions{})
			if err != nil {
				if pool == "s-pods" {
					return nil // deleted meanwhile
				}
				return err
			}
			want, err := s.oracle(ctx, pool)
			if err != nil {
				return err
			}
			if err := s.checkStatus(p, want); err != nil {
				return err
			}
			return s.checkMetrics(ctx, pool, want)
		})
	}
}

func (s *scene) checkStatus(p *unstructured.Unstructured, want expectation) error {
	var is struct {
		Nodes                        []string
		ReadyNodeNum, UnreadyNodeNum int
		LeaderNum                    int
		Conditions                   []metav1.Condition
	}
	if err := fromJSON(canonical(p.Object["status"]), &is); err != nil {
		return err
	}
	if !slices.Equal(is.Nodes, want.Nodes) || is.ReadyNodeNum != want.Ready || is.UnreadyNodeNum != len(want.Nodes)-want.Ready {
		return fmt.Errorf("nodes %v, %d ready, %d not, want %+v", is.Nodes, is.ReadyNodeNum, is.UnreadyNodeNum, want)
	}
	conditions := map[string]metav1.Condition{}
	for _, c := range is.Conditions {
		conditions[c.Type] = c
	}
	for kind, count := range map[string]int{"ExcludedPodsRunning": want.Excluded, "PodsWithoutHostNetwork": want.WithoutHostNetwork, "HostPortConflicts": want.Conflicts} {
		c := conditions[kind]
		status, begins := metav1.ConditionFalse, "Th" // There are none, or This is no
		if count > 0 {
			status, begins = metav1.ConditionTrue, strconv.Itoa(count)+" "
		}
		if c.Status != status || !strings.HasPrefix(c.Message, begins) || c.Reason == "" || c.ObservedGeneration != p.GetGeneration() || c.LastTransitionTime.IsZero() {
			return fmt.Errorf("condition %s is %+v, want %s of %d", kind, c, status, count)
		}
		if named := strings.Count(c.Message, "a/p-"); kind != "HostPortConflicts" && named != min(count, 5) {
			return fmt.Errorf("condition %s names %d pods of %d: %s", kind, named, count, c.Message)
		}
	}
	if p.GetName() == "s-host" && (is.LeaderNum != 1 || conditions["LeaderReady"].Reason != "Others") {
		return fmt.Errorf("what others wrote is gone: leaderNum %d, conditions %v", is.LeaderNum, is.Conditions)
	}
	return nil
}

func (s *scene) checkMetrics(ctx context.Context, pool string, want expectation) error {
	for name, value := range map[string]int{
		`edgehub_pool_nodes{pool="` + pool + `",ready="true"}`:        want.Ready,
		`edgehub_pool_nodes{pool="` + pool + `",ready="false"}`:       len(want.Nodes) - want.Ready,
		`edgehub_pool_excluded_pods{pool="` + pool + `"}`:             want.Excluded,
		`edgehub_pool_pods_without_host_network{pool="` + pool + `"}`: want.WithoutHostNetwork,
		`edgehub_pool_host_port_conflicts{pool="` + pool + `"}`:       want.Conflicts,
		`edgehub_pool_writing`:                                        1,
	} {
		if got := s.metric(ctx, name); got != float64(value) {
			return fmt.Errorf("%s is %v, want %d", name, got, value)
		}
	}
	return nil
}

// metric is -1 if there is none.
func (s *scene) metric(ctx context.Context, name string) float64 {
	text, err := s.replica.Metrics(ctx)
	if err != nil {
		return -1
	}
	for line := range strings.Lines(text) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), name+" "); ok {
			if f, err := strconv.ParseFloat(value, 64); err == nil {
				return f
			}
		}
	}
	return -1
}
