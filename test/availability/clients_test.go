// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package availability

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	// annotation and label are a contract with users, and written out here so that a
	// slip in the companion shows.
	annotation = "apps.openyurt.io/exclude-host-network-pool"
	label      = "nodepool.openyurt.io/hostnetwork"

	// pause is between two pods of a client.
	pause = 30 * time.Millisecond
)

// A creation is one attempt to create a pod.
type creation struct {
	begun time.Time
	took  time.Duration
	rule  bool // it keeps off host-network pools
	err   error
}

// A client creates pods, one after the other, all the time, and remembers how it went.
type client struct {
	name      string
	annotated bool
	pods      kubernetes.Interface

	turn sync.Mutex // held while a pod is being created
	mu   sync.Mutex
	all  []creation
}

// newClient starts one for the length of the test.
func newClient(t *testing.T, name string, annotated bool, config *rest.Config) *client {
	t.Helper()
	config.QPS = -1
	pods, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	c := &client{name: name, annotated: annotated, pods: pods}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { c.run(ctx) })
	t.Cleanup(func() { cancel(); running.Wait() })
	return c
}

func (c *client) run(ctx context.Context) {
	for i := 0; ; i++ {
		c.turn.Lock()
		begun := time.Now()
		pod, err := c.pods.CoreV1().Pods(namespace).Create(ctx, c.pod(i), metav1.CreateOptions{})
		c.turn.Unlock()
		if ctx.Err() != nil {
			return
		}
		c.mu.Lock()
		c.all = append(c.all, creation{begun, time.Since(begun), err == nil && excludes(pod), err})
		c.mu.Unlock()
		if wait(ctx, pause) != nil {
			return
		}
	}
}

func (c *client) pod(i int) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", c.name, i)},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Image: "app:1"}}},
	}
	if c.annotated {
		p.Annotations = map[string]string{annotation: "true"}
	}
	return p
}

// excludes says whether every term of a pod's required node affinity keeps it off nodes
// of host-network pools.
func excludes(p *corev1.Pod) bool {
	if p.Spec.Affinity == nil || p.Spec.Affinity.NodeAffinity == nil || p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return false
	}
	terms := p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	return len(terms) > 0 && !slices.ContainsFunc(terms, func(term corev1.NodeSelectorTerm) bool {
		return !slices.ContainsFunc(term.MatchExpressions, func(e corev1.NodeSelectorRequirement) bool {
			return e.Key == label && e.Operator == corev1.NodeSelectorOpNotIn && slices.Equal(e.Values, []string{"true"})
		})
	})
}

// between calls f while no pod is being created.
func (c *client) between(f func()) {
	c.turn.Lock()
	defer c.turn.Unlock()
	f()
}

// since returns what ended at a time or later.
func (c *client) since(at time.Time) []creation {
	c.mu.Lock()
	defer c.mu.Unlock()
	i, _ := slices.BinarySearchFunc(c.all, at, func(one creation, at time.Time) int { return one.begun.Add(one.took).Compare(at) })
	return slices.Clone(c.all[i:])
}

// slowest returns how long the slowest creation took.
func (c *client) slowest(from time.Time) time.Duration { return quantile(c.since(from), 1) }

// failed are those that did not succeed, or not with the rule.
func failed(all []creation) []creation {
	return slices.DeleteFunc(slices.Clone(all), func(one creation) bool { return one.err == nil && one.rule })
}

// quantile returns the time that a part of the creations took at most.
func quantile(all []creation, q float64) time.Duration {
	if len(all) == 0 {
		return 0
	}
	slices.SortFunc(all, func(a, b creation) int { return int(a.took - b.took) })
	return all[min(int(q*float64(len(all))), len(all)-1)].took
}

// namesWebhook says whether a person learns from an error which webhook is missing.
func namesWebhook(err error) bool { return strings.Contains(err.Error(), `"pods.exclude.edgehub.io"`) }

// wait is for what happens outside of the test and tells nobody.
func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}
