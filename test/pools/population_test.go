// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/edgehub/edgehub/test/rig"
)

// A population is the pods of a cluster.
type population struct {
	generator
	on     []*corev1.Pod // the node
	rounds int
	marker string // that the last pod to change has
}

// newPopulation makes pods that the API server accepts, of all that are generated.
func newPopulation(r *rig.Rig) *population {
	r.T.Helper()
	ctx := r.T.Context()
	for _, ns := range []string{"a", "b"} {
		r.Must(r.ControlPlane.CreateNamespace(ctx, ns))
	}
	p := &population{generator: generator{rand.New(rand.NewPCG(rig.Seed(r.T), 0))}}
	var g errgroup.Group
	g.SetLimit(8)
	var refused atomic.Int64
	made := make(chan *corev1.Pod, podsOnNode+podsBesides)
	for i := range podsOnNode + podsBesides {
		node := rig.NodeName
		if i >= podsOnNode {
			node = []string{"", "elsewhere"}[i%2]
		}
		tries := []*corev1.Pod{}
		for range 5 {
			tries = append(tries, p.pod([]string{"a", "b"}[i%2], fmt.Sprintf("p-%d", i), node))
		}
		g.Go(func() error {
			var err error
			for _, pod := range tries {
				var is *corev1.Pod
				if is, err = r.ControlPlane.Client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{}); err == nil {
					made <- is
					return nil
				}
				if refused.Add(1); !apierrors.IsInvalid(err) {
					return err
				}
			}
			return err
		})
	}
	r.Must(g.Wait())
	close(made)
	for pod := range made {
		if pod.Spec.NodeName == rig.NodeName {
			p.on = append(p.on, pod)
		}
	}
	slices.SortFunc(p.on, func(a, b *corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	if n := refused.Load(); n > podsOnNode/10 {
		r.T.Errorf("the API server refused %d of the pods that were generated", n)
	}
	p.live(r, p.on[:30])
	return p
}

// live gives pods a status and ephemeral containers.
func (p *population) live(r *rig.Rig, pods []*corev1.Pod) {
	r.T.Helper()
	for i, pod := range pods {
		of := r.ControlPlane.Client.CoreV1().Pods(pod.Namespace)
		pod.Spec.EphemeralContainers = []corev1.EphemeralContainer{{
			EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "debug", Image: "example.invalid/debug:1", Stdin: true}, TargetContainerName: pod.Spec.Containers[0].Name,
		}}
		now, err := of.UpdateEphemeralContainers(r.T.Context(), pod.Name, pod, metav1.UpdateOptions{})
		r.Must(err)
		now.Status.Phase = []corev1.PodPhase{corev1.PodRunning, corev1.PodFailed, corev1.PodSucceeded}[i%3]
		now.Status.Message = p.text()
		now.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c0", RestartCount: 3, State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137, Message: p.text()}}}}
		_, err = of.UpdateStatus(r.T.Context(), now, metav1.UpdateOptions{})
		r.Must(err)
	}
}

// some are a few of the pods on the node.
func (p *population) some() (pods []*corev1.Pod) {
	for i := 0; i < len(p.on); i += len(p.on) / 8 {
		pods = append(pods, p.on[i])
	}
	return pods
}

// change creates, changes, ends and deletes pods, and returns the resourceVersion before.
func (p *population) change(r *rig.Rig) (since string) {
	r.T.Helper()
	ctx, core := r.T.Context(), r.ControlPlane.Client.CoreV1()
	list, err := core.Pods("").List(ctx, metav1.ListOptions{Limit: 1})
	r.Must(err)
	p.rounds++
	for i := range 10 {
		pod := p.pod("a", fmt.Sprintf("later-%d-%d", p.rounds, i), rig.NodeName)
		pod, err = core.Pods("a").Create(ctx, pod, metav1.CreateOptions{})
		if apierrors.IsInvalid(err) {
			continue
		}
		r.Must(err)
		options := metav1.DeleteOptions{GracePeriodSeconds: new(int64(30))} // that kubelet would end
		if i%2 == 0 {
			options.GracePeriodSeconds = new(int64(0))
		}
		if i%3 != 0 {
			r.Must(core.Pods("a").Delete(ctx, pod.Name, options))
		}
	}
	p.marker = fmt.Sprintf("edgehub-test-marker-%d-of-%s", p.rounds, list.ResourceVersion)
	for _, pod := range append(p.some(), p.on[1]) {
		value := p.text()
		if pod == p.on[1] {
			value = p.marker
		}
		patch := fmt.Appendf(nil, `{"metadata":{"annotations":{"example.com/round":%q}}}`, strings.ToValidUTF8(strings.Map(printable, value), ""))
		_, err := core.Pods(pod.Namespace).Patch(ctx, pod.Name, types.MergePatchType, patch, metav1.PatchOptions{})
		r.Must(err)
	}
	return list.ResourceVersion
}

// printable is for the text of a patch, which %q may write as JSON cannot read it.
func printable(r rune) rune {
	if r < ' ' || r == 0x7f {
		return -1
	}
	return r
}
