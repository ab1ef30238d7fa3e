// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/edgehub/edgehub/test/link"
)

// A demo is a rig and what was seen of it.
type demo struct {
	screen *screen
	rig    *rig
	checks *checks

	feed    *feed
	endFeed func() // never nil

	pods []types.UID // before the cut
	cut  time.Time
	seen int // answers in the feed when the cut was found
}

// play is all acts.
func (d *demo) play(ctx context.Context) error {
	for i, act := range []struct {
		title string
		play  func(context.Context) error
	}{
		{"The cloud: etcd, kube-apiserver, kube-controller-manager, kube-scheduler", d.startCloud},
		{"The edge node: edgehub, and kubelet through it", d.startNode},
		{fmt.Sprintf("A Deployment of %d pods, with a ConfigMap, a Secret and tokens", podCount), d.runPods},
		{"The link is cut silently: no FIN, no RST, packets just vanish", d.cutLink},
		{"Still cut: edgehub and kubelet are killed and started again", d.restart},
		{"The link is back", d.heal},
	} {
		d.screen.act(i+1, act.title)
		if err := act.play(ctx); err != nil {
			return fmt.Errorf("act %d: %w", i+1, err)
		}
	}
	return nil
}

func (d *demo) startCloud(ctx context.Context) error {
	d.screen.say("The control plane starts (the first time it is built from source, which takes some minutes)")
	err := d.screen.during("the control plane starts", nil, func() error { return d.rig.startCloud(ctx) })
	if err != nil {
		return err
	}
	d.screen.say("It serves at %s; the node will reach it through a link at %s", d.rig.cp.Addr(), d.rig.link.Addr())
	return nil
}

func (d *demo) startNode(ctx context.Context) error {
	d.screen.say("edgehub is built")
	if err := d.screen.during("edgehub is built", nil, func() error { return d.rig.buildHub(ctx) }); err != nil {
		return err
	}
	d.screen.say("edgehub starts, with nothing on its disk")
	if err := d.startHub(ctx); err != nil {
		return err
	}
	if err := d.startFeed(); err != nil {
		return err
	}
	if _, err := d.screen.until(ctx, time.Now(), 20*time.Second, "edgehub sees the link up", d.linkIs(true)); err != nil {
		return err
	}
	if err := d.tellLink(ctx); err != nil {
		return err
	}
	d.screen.say("kubelet starts (kubemark: kubelet's own code over a container runtime that pretends). What it asks edgehub:")
	begun := time.Now()
	if err := d.rig.kubelet.Start(ctx); err != nil {
		return err
	}
	took, err := d.screen.until(ctx, begun, time.Minute, nodeName+" is Ready", nodeBecomes(d.rig.cp, corev1.ConditionTrue))
	if err != nil {
		return err
	}
	d.checks.add(true, "the node is Ready, through edgehub", "yes", "after %.1f s", took.Seconds())
	return d.rig.prepareKubectl(ctx)
}

func (d *demo) runPods(ctx context.Context) error {
	begun := time.Now()
	if err := createApp(ctx, d.rig.cp); err != nil {
		return err
	}
	took, err := d.screen.until(ctx, begun, time.Minute, "all pods are Ready", func(ctx context.Context) error {
		pods, err := cloudPods(ctx, d.rig.cp)
		return errors.Join(err, allReady(pods))
	})
	if err != nil {
		return err
	}
	pods, _, err := d.kubeletRuns(ctx, begun)
	if err != nil {
		return err
	}
	d.pods = podUIDs(pods)
	d.checks.add(len(d.pods) == podCount, "pods that kubelet runs, before", fmt.Sprint(podCount), "%d, Ready after %.1f s", len(d.pods), took.Seconds())
	if err := d.showPods(ctx, "pods by kubectl through edgehub", false); err != nil {
		return err
	}
	// Its first try came before the node was there; the next one is 10 s later.
	_, err = d.screen.until(ctx, time.Now(), 30*time.Second, "kubelet has its lease", func(ctx context.Context) error {
		_, err := d.rig.cp.Client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, nodeName, metav1.GetOptions{})
		return err
	})
	if err != nil {
		return err
	}
	return d.settle(ctx)
}

// kubeletRuns waits until kubelet's container runtime runs all pods.
func (d *demo) kubeletRuns(ctx context.Context, begun time.Time) (pods []corev1.Pod, took time.Duration, err error) {
	took, err = d.screen.until(ctx, begun, time.Minute, "kubelet runs all pods", func(ctx context.Context) (err error) {
		pods, err = d.rig.kubeletPods(ctx, "runningpods/")
		if err == nil && len(pods) < podCount {
			err = fmt.Errorf("%d of %d run", len(pods), podCount)
		}
		return err
	})
	return pods, took, err
}

// settle waits until edgehub has nothing left to write.
func (d *demo) settle(ctx context.Context) error {
	const quiet = 1500 * time.Millisecond
	var last float64
	var since time.Time
	_, err := d.screen.until(ctx, time.Now(), 20*time.Second, "edgehub has it all on its disk", func(ctx context.Context) error {
		written, err := d.rig.hub.Metric(ctx, "edgehub_cache_journal_written_bytes_total")
		if err != nil {
			return err
		}
		if written != last || last == 0 {
			last, since = written, time.Now()
		}
		if time.Since(since) < quiet {
			return errors.New("it still writes")
		}
		return nil
	})
	if err != nil {
		return err
	}
	n := map[string]float64{}
	for _, name := range []string{"scopes", "objects", "feeds_live", "watchers"} {
		if n[name], err = d.rig.hub.Metric(ctx, "edgehub_cache_"+name); err != nil {
			return err
		}
	}
	d.screen.say("edgehub has %.0f objects in %.0f scopes on its disk (%.0f KiB written); %.0f watches of the API server feed %.0f watches on the node",
		n["objects"], n["scopes"], last/1024, n["feeds_live"], n["watchers"])
	return nil
}

func (d *demo) cutLink(ctx context.Context) error {
	before, err := d.streams(ctx)
	if err != nil {
		return err
	}
	d.rig.link.BlackHole(link.Both)
	d.cut = time.Now()
	d.screen.say("Cut. Nobody has been told.")
	took, err := d.screen.until(ctx, d.cut, 30*time.Second, "edgehub finds out", d.linkIs(false))
	if err != nil {
		return err
	}
	_, d.seen = d.feed.since(0)
	d.checks.add(took <= 10*time.Second, "the silent cut is found", "≤ 10 s", "after %.1f s", took.Seconds())
	if err := d.tellLink(ctx); err != nil {
		return err
	}
	after, err := d.streams(ctx)
	if err != nil {
		return err
	}
	d.checks.add(before > 0 && after == before, "open watches on the node survive the cut", fmt.Sprintf("%.0f", before), "%.0f", after)
	return d.showPods(ctx, "pods by kubectl, link cut", true)
}

func (d *demo) restart(ctx context.Context) error {
	if err := errors.Join(d.rig.kubelet.Kill(), d.rig.hub.Kill()); err != nil {
		return err
	}
	d.screen.say("Both are dead (kill -9), and with kubelet its containers, as after a power failure. edgehub starts")
	if err := d.startHub(ctx); err != nil {
		return err
	}
	d.screen.say("kubelet starts. There is no API server to ask:")
	begun := time.Now()
	if err := d.rig.kubelet.Start(ctx); err != nil {
		return err
	}
	pods, took, err := d.kubeletRuns(ctx, begun)
	d.checks.add(err == nil && slices.Equal(podUIDs(pods), d.pods), "pods that kubelet runs, restarted while cut", "the same "+fmt.Sprint(podCount),
		"%d, after %.1f s", len(pods), took.Seconds())
	if err != nil {
		return err
	}
	if err := d.showPods(ctx, "pods by kubectl, after the restart", true); err != nil {
		return err
	}
	if err := d.tryWrite(ctx); err != nil {
		return err
	}
	return d.lookFromCloud(ctx)
}

// tryWrite asks for what cannot be done now.
func (d *demo) tryWrite(ctx context.Context) error {
	pods, err := cloudPods(ctx, d.rig.cp)
	if err != nil {
		return err
	}
	_, n := d.feed.since(0)
	d.screen.say("A write is not pretended. $ kubectl delete pod %s", pods[0].Name)
	out, kubectlErr := d.rig.runKubectl(ctx, "delete", "pod", pods[0].Name, "--wait=false")
	d.screen.line(d.screen.paint(dim, out))
	var code string
	_, err = d.screen.until(ctx, time.Now(), 5*time.Second, "edgehub has told", func(context.Context) error {
		answers, _ := d.feed.since(n)
		for _, a := range answers {
			if a.client == "kubectl" && a.verb == "delete" {
				code = a.code
				return nil
			}
		}
		return os.ErrNotExist
	})
	d.checks.add(err == nil && kubectlErr != nil && code == "503" && strings.Contains(out, "ServiceUnavailable"),
		"a write while cut is refused honestly", "503", "%s", code)
	return nil
}

// lookFromCloud waits until the cloud misses the node, and changes a pod there.
func (d *demo) lookFromCloud(ctx context.Context) error {
	took, err := d.screen.until(ctx, d.cut, time.Minute, "the cloud misses the node", nodeBecomes(d.rig.cp, corev1.ConditionUnknown))
	if err != nil {
		return err
	}
	c, err := nodeReady(ctx, d.rig.cp)
	if err != nil {
		return err
	}
	d.checks.add(true, "the cloud misses the node meanwhile", "Ready=Unknown", "Ready=%s (%s), %.0f s after the cut", c.Status, c.Reason, took.Seconds())
	answers, _ := d.feed.since(d.seen)
	sources := map[string]int{}
	for _, a := range answers {
		if a.verb != "watch" || a.streaming { // the end of a watch is no answer
			sources[a.source]++
		}
	}
	d.checks.add(sources["upstream"] == 0, "answers from upstream while cut", "0", "%d (replay %d, feed %d, made here %d)",
		sources["upstream"], sources["replay"], sources["feed"], sources["local"])
	return nil
}
