// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/edgehub/edgehub/test/controlplane"
)

// heal ends the cut.
func (d *demo) heal(ctx context.Context) error {
	pods, err := cloudPods(ctx, d.rig.cp)
	if err != nil {
		return err
	}
	changed := pods[0].Name
	patch := []byte(`{"metadata":{"labels":{"changed":"while-cut"}}}`)
	if _, err := d.rig.cp.Client.CoreV1().Pods(namespace).Patch(ctx, changed, types.StrategicMergePatchType, patch, metav1.PatchOptions{}); err != nil {
		return err
	}
	d.screen.say("In the cloud, %s was given a label that the node has not seen. The link carries again", changed)
	begun := time.Now()
	if err := d.rig.link.Heal(); err != nil {
		return err
	}
	took, err := d.screen.until(ctx, begun, 30*time.Second, "edgehub sees the link up", d.linkIs(true))
	if err != nil {
		return err
	}
	d.checks.add(true, "edgehub finds the link again", "yes", "after %.1f s", took.Seconds())
	if err := d.tellLink(ctx); err != nil {
		return err
	}
	took, err = d.screen.until(ctx, begun, 30*time.Second, "kubelet has the change", func(ctx context.Context) error {
		pods, err := d.rig.kubeletPods(ctx, "pods")
		if err == nil && !slices.ContainsFunc(pods, func(p corev1.Pod) bool { return p.Labels["changed"] != "" }) {
			err = errors.New("not yet")
		}
		return err
	})
	d.checks.add(err == nil, "what the cloud changed meanwhile reaches kubelet", "yes", "after %.1f s", took.Seconds())
	took, err = d.screen.until(ctx, begun, time.Minute, nodeName+" is Ready (kubelet says so every 10 s)", nodeBecomes(d.rig.cp, corev1.ConditionTrue))
	d.checks.add(err == nil, "the node is Ready again", "yes", "after %.1f s", took.Seconds())
	took, err = d.screen.until(ctx, begun, time.Minute, "all pods are Ready in the API server", func(ctx context.Context) error {
		pods, err := cloudPods(ctx, d.rig.cp)
		return errors.Join(err, allReady(pods))
	})
	d.checks.add(err == nil, "the pods are Ready again", fmt.Sprint(podCount), "%s", readyOr(err, took))
	if err := d.countRequests(ctx, begun); err != nil {
		return err
	}
	if err := d.comparePods(ctx); err != nil {
		return err
	}
	return d.showPods(ctx, "pods by kubectl, link up", false)
}

func readyOr(err error, took time.Duration) string {
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%d, after %.1f s", podCount, took.Seconds())
}

// countRequests looks at what the node has asked the API server since the link
// is back, by the API server's audit log.
func (d *demo) countRequests(ctx context.Context, since time.Time) error {
	requests, err := d.rig.cp.Requests(since)
	if err != nil {
		return err
	}
	var lists []string
	for _, e := range requests {
		if e.User.Username == nodeUser && e.Verb == "list" && !asksForHistory(e) {
			lists = append(lists, e.RequestURI)
		}
	}
	d.checks.add(len(lists) == 0, "LISTs at the API server since the link is back", "0", "%s",
		strings.TrimSpace(fmt.Sprint(len(lists), " ", strings.Join(lists, " "))))
	feeds, err := d.rig.hub.Metric(ctx, "edgehub_cache_feeds")
	if err != nil {
		return err
	}
	watches := controlplane.Count(requests, nodeUser, "watch", "")
	d.checks.add(watches == int(feeds), "watches there: one a scope, resumed", fmt.Sprintf("%.0f", feeds), "%d", watches)
	return nil
}

// asksForHistory says whether a list only asks whether the resourceVersions still
// are those of the same history: one object at most, the node itself.
func asksForHistory(e auditv1.Event) bool {
	u, err := url.Parse(e.RequestURI)
	return err == nil && u.Path == "/api/v1/nodes" && u.Query().Get("limit") == "1" && u.Query().Get("continue") == ""
}

// comparePods checks that the pods are those that there were.
func (d *demo) comparePods(ctx context.Context) error {
	pods, err := cloudPods(ctx, d.rig.cp)
	if err != nil {
		return err
	}
	deleted := 0
	for _, p := range pods {
		if p.DeletionTimestamp != nil || p.Status.Phase != corev1.PodRunning {
			deleted++
		}
	}
	same := slices.Equal(podUIDs(pods), d.pods)
	d.checks.add(same && deleted == 0, "pods with the same uid, none evicted", fmt.Sprint(podCount), "%d, %d evicted", d.stillThere(pods), deleted)
	return nil
}

func (d *demo) stillThere(pods []corev1.Pod) (n int) {
	for _, uid := range podUIDs(pods) {
		if slices.Contains(d.pods, uid) {
			n++
		}
	}
	return n
}
