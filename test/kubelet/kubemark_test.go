// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
)

// podsOf asks a kubelet's API for pods: path /pods is what it has been told to
// run, /runningpods/ what its container runtime runs.
func podsOf(ctx context.Context, client *http.Client, base, path string) ([]corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+path, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("GET %s: %s: %.200s", path, resp.Status, body)
	}
	var list corev1.PodList
	return list.Items, json.Unmarshal(body, &list)
}

// runs is a condition: the kubelet at base has all pods of the rig, and no other,
// and its runtime runs all their containers.
func (r *rig) runs(client *http.Client, base string) func(context.Context) error {
	return func(ctx context.Context) error {
		for _, path := range []string{"/pods", "/runningpods/"} {
			pods, err := podsOf(ctx, client, base, path)
			if err != nil {
				return err
			}
			have := map[string]bool{}
			for _, p := range pods {
				have[string(p.UID)] = len(p.Spec.Containers) == 1
			}
			missing := 0
			for _, p := range r.pods {
				if !have[string(p.UID)] {
					missing++
				}
			}
			if missing > 0 || len(have) != len(r.pods) {
				return fmt.Errorf("%s: %d pods, %d of %d are missing", path, len(have), missing, len(r.pods))
			}
		}
		return nil
	}
}

// A markedNode is a rig with kubemark's kubelet.
type markedNode struct {
	*rig
	kubelet *node.Kubemark
	url     string // of kubelet's API
}

func newMarkedNode(t *testing.T) *markedNode {
	t.Helper()
	n := &markedNode{rig: newRig(t, nil)}
	p, err := port.Free()
	n.must(err)
	// kubemark's kubelet serves its API without TLS and to anybody.
	n.url = "http://127.0.0.1:" + strconv.Itoa(p)
	n.kubelet, err = node.NewKubemark(t.Context(), node.KubeletConfig{
		Name: nodeName, Client: n.config, Args: []string{"--kubelet-port=" + strconv.Itoa(p)},
	})
	n.must(err)
	return n
}

// restart kills edgehub and kubelet, starts them, and waits until kubelet has all
// its pods.
func (n *markedNode) restart() {
	n.t.Helper()
	n.must(errors.Join(n.kubelet.Kill(), n.hub.Kill()))
	start := time.Now()
	n.must(n.hub.Start(n.t.Context()))
	ready := time.Since(start)
	n.must(n.kubelet.Start(n.t.Context()))
	n.poll("kubelet has all its pods again", n.runs(http.DefaultClient, n.url))
	n.t.Logf("restart while cut: hub ready after %v, kubelet runs %d pods after %v", round(ready), len(n.pods), round(time.Since(start)))
}

// kubemark's kubelet becomes Ready through edgehub and runs 30 pods. The link is
// black-holed, edgehub and kubelet are killed and started again: kubelet gets all
// its pods again. When the link is back it becomes Ready, and nothing is listed.
// Then pods come and go, and all of it once more, with a pod deleted while cut.
//
// kubemark's container runtime is within its process: after the kill nothing runs,
// as after a reboot, and all that a pod needs is asked for again.
func TestKubemark(t *testing.T) {
	t.Parallel()
	n := newMarkedNode(t)
	n.phase("online")
	start := time.Now()
	process.Run(t, n.kubelet)
	n.ready(start)
	start = time.Now()
	n.create(30)
	t.Logf("30 pods run after %v", round(time.Since(start)))
	n.poll("kubelet's API shows its pods", n.runs(http.DefaultClient, n.url))

	n.phase("cut; edgehub and kubelet are killed and started")
	n.cut()
	n.restart()
	n.checkReplays()
	n.notReady()
	n.must(n.intact(t.Context()))
	n.must(n.runs(http.DefaultClient, n.url)(t.Context()))
	n.checkAtRest(kubemarkRoot(t, n.kubelet))

	n.phase("healed")
	healed := n.heal(0)
	n.back(healed)
	n.checkNoLists(healed)
	n.checkNoneDeleted()
	n.create(1)
	n.delete(0)
	n.poll("kubelet has one pod more and one less", n.runs(http.DefaultClient, n.url))

	n.phase("cut again; edgehub and kubelet are killed and started")
	n.cut()
	n.restart()
	gone := n.pods[0].Name
	n.must(n.cp.Client.CoreV1().Pods(namespace).Delete(t.Context(), gone, metav1.DeleteOptions{}))

	n.phase("healed again")
	n.forget(0)
	healed = n.heal(1)
	n.back(healed)
	n.poll("kubelet has that pod no more", n.runs(http.DefaultClient, n.url))
	n.checkNoLists(healed)
}

// edgehub alone is killed and started again under a running kubelet, first with
// the link up, then cut. Kubelet's watches go on where they were: nothing is listed,
// and what happens afterwards arrives.
func TestKubemarkHubRestarts(t *testing.T) {
	t.Parallel()
	n := newMarkedNode(t)
	n.phase("online")
	process.Run(t, n.kubelet)
	n.ready(time.Now())
	n.create(10)
	n.poll("kubelet's API shows its pods", n.runs(http.DefaultClient, n.url))

	n.phase("online; edgehub is killed and started")
	since := time.Now()
	n.must(n.hub.Kill())
	n.must(n.hub.Start(t.Context()))
	n.feedsLive(since)
	n.checkNoLists(since)
	n.create(1)
	n.delete(0)
	n.poll("kubelet has one pod more and one less", n.runs(http.DefaultClient, n.url))

	n.phase("cut; edgehub is killed and started")
	n.cut()
	n.must(n.hub.Kill())
	n.must(n.hub.Start(t.Context()))
	n.poll("kubelet watches again", func(ctx context.Context) error {
		watchers, err := n.hub.Metric(ctx, "edgehub_cache_watchers")
		// of pods, and of a ConfigMap and a Secret of each; there are more
		if want := 1 + 2*len(n.pods); err == nil && watchers < float64(want) {
			err = fmt.Errorf("%v watches, want at least %d", watchers, want)
		}
		return err
	})
	n.must(n.runs(http.DefaultClient, n.url)(t.Context()))

	n.phase("healed")
	healed := n.heal(0)
	n.back(healed)
	n.checkNoLists(healed)
	n.create(1)
	n.poll("kubelet runs a new pod", n.runs(http.DefaultClient, n.url))
}

// delete deletes pod i, and waits until kubelet has let it go.
func (r *rig) delete(i int) {
	r.t.Helper()
	r.must(r.cp.Client.CoreV1().Pods(namespace).Delete(r.t.Context(), r.pods[i].Name, metav1.DeleteOptions{}))
	r.forget(i)
	r.poll("a deleted pod is gone", r.intact)
}

// forget has pod i not expected any more.
func (r *rig) forget(i int) { r.pods = slices.Delete(r.pods, i, i+1) }

// kubemarkRoot returns the folder of its last start.
func kubemarkRoot(t *testing.T, k *node.Kubemark) string {
	t.Helper()
	log, err := os.ReadFile(k.Log())
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`Using (/tmp/hollow-kubelet\.[0-9]+) as root dir`).FindAllSubmatch(log, -1)
	if len(m) == 0 {
		t.Fatalf("%s does not name kubemark's folder", k.Log())
	}
	return string(m[len(m)-1][1])
}
