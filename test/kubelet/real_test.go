// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/clock"
	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
)

const (
	realPods = 10
	// slower is how much longer a reboot may take offline than online without
	// edgehub, on a machine that does much else.
	slower = 5 * time.Second
	// lookEvery is how often the runtime is asked: each time costs a process, and
	// what is measured shares the machine with it.
	lookEvery = 300 * time.Millisecond
	// bootsEach is how often a node is booted to see how long that takes.
	bootsEach = 2
)

// A realNode is a rig with a real kubelet on containerd.
type realNode struct {
	*rig
	runtime *node.Containerd
	kubelet *node.Kubelet
	dir     string       // kubelet's
	client  *http.Client // an administrator's, for kubelet's API
}

func newRealNode(t *testing.T, r *rig) *realNode {
	t.Helper()
	dir, err := os.MkdirTemp("", "edgehub-kubelet-")
	r.must(err)
	t.Cleanup(func() { r.must(os.RemoveAll(dir)) })
	n := &realNode{rig: r, dir: dir}
	n.runtime, err = node.NewContainerd(t.Context(), "")
	r.must(err)
	process.Run(t, n.runtime)
	n.kubelet, err = node.NewKubelet(t.Context(), node.KubeletConfig{Dir: dir, Name: nodeName, Client: r.config}, n.runtime, r.cp.CAFile())
	r.must(err)
	admin := r.cp.AdminConfig()
	admin.CAFile, admin.CAData, admin.Insecure = "", nil, true
	n.client, err = rest.HTTPClientFor(admin)
	r.must(err)
	return n
}

// containers returns the running containers of the rig's pods by their pods.
func (n *realNode) containers(ctx context.Context) (map[string]node.Container, error) {
	all, err := n.runtime.Containers(ctx)
	if err != nil {
		return nil, err
	}
	running := map[string]node.Container{}
	for _, c := range all {
		if !c.Running {
			continue
		}
		if other, twice := running[c.Pod]; twice {
			return nil, fmt.Errorf("pod %s has two running containers, %s and %s", c.Pod, other.ID, c.ID)
		}
		running[c.Pod] = c
	}
	return running, nil
}

// ids returns the running containers' ids by their pods.
func (n *realNode) ids() map[string]string {
	n.t.Helper()
	containers, err := n.containers(n.t.Context())
	n.must(err)
	ids := map[string]string{}
	for pod, c := range containers {
		ids[pod] = c.ID
	}
	return ids
}

// allRun waits until the runtime runs a container of every pod, and returns them.
func (n *realNode) allRun() (containers map[string]node.Container) {
	n.t.Helper()
	var next time.Time
	last := errors.New("not asked yet")
	n.poll("all pods' containers run", func(ctx context.Context) (err error) {
		if time.Now().Before(next) {
			return last
		}
		if containers, err = n.containers(ctx); err == nil && len(containers) != len(n.pods) {
			err = fmt.Errorf("%d of %d run", len(containers), len(n.pods))
		}
		next, last = time.Now().Add(lookEvery), err
		return err
	})
	return containers
}

// checkContents wants that every container has its ConfigMap, its Secret and a
// token, in its environment and its files, as its process sees them. It returns
// the tokens.
func (n *realNode) checkContents(containers map[string]node.Container) (tokens []string) {
	n.t.Helper()
	for i, p := range n.pods {
		proc := fmt.Sprintf("/proc/%d", containers[namespace+"/"+p.Name].PID)
		environ, err := os.ReadFile(proc + "/environ")
		n.must(err)
		env := strings.Split(string(bytes.TrimRight(environ, "\x00")), "\x00")
		for _, want := range []string{"CONFIG=" + configValue(i), "SECRET=" + n.values[i], "KUBERNETES_SERVICE_HOST=10.0.0.1"} {
			if !slices.Contains(env, want) {
				n.t.Errorf("pod %s: environment %q, want %s in it", p.Name, env, want)
			}
		}
		for file, want := range map[string]string{"config/key": configValue(i), "secret/key": n.values[i]} {
			if got, err := os.ReadFile(filepath.Join(proc, "root", file)); err != nil || string(got) != want {
				n.t.Errorf("pod %s: /%s = %q, %v, want %q", p.Name, file, got, err, want)
			}
		}
		token, err := os.ReadFile(filepath.Join(proc, "root/var/run/secrets/kubernetes.io/serviceaccount/token"))
		if err != nil || bytes.Count(token, []byte(".")) != 2 {
			n.t.Errorf("pod %s: its token is %d bytes, %v", p.Name, len(token), err)
		}
		tokens = append(tokens, string(token))
	}
	return tokens
}

// kill ends kubelet and edgehub with SIGKILL.
func (n *realNode) kill() {
	n.t.Helper()
	n.must(errors.Join(n.kubelet.Kill(), n.hub.Kill()))
}

// reboot does to the node what a reboot does, in so far as that can be done to a
// part of a machine: kubelet, edgehub and containerd are killed, all sandboxes and
// containers are gone, the volumes in memory (Secrets, tokens) too; the disk stays.
// Then containerd is started, then (with the hub) edgehub, then kubelet; the last
// two count. It returns the containers, and how long it took.
func (n *realNode) reboot(withHub bool) (map[string]node.Container, took) {
	n.t.Helper()
	n.kill()
	n.must(errors.Join(n.runtime.RemovePods(), n.kubelet.Unmount(), n.runtime.Kill()))
	ctx := n.t.Context()
	n.must(n.runtime.Start(ctx))
	if left, err := n.runtime.Containers(ctx); err != nil || len(left) != 0 {
		n.t.Fatalf("after the reboot there are containers: %v, %v", left, err)
	}
	start := time.Now()
	if withHub {
		n.must(n.hub.Start(ctx))
	}
	n.must(n.kubelet.Start(ctx))
	containers := n.allRun()
	started := func(a, b node.Container) int { return a.Started.Compare(b.Started) }
	byStart := slices.SortedFunc(maps.Values(containers), started)
	return containers, took{first: byStart[0].Started.Sub(start), all: byStart[len(byStart)-1].Started.Sub(start)}
}

// took is how long after its start a node had the first container of a pod
// running, and those of all, by the runtime's own times.
type took struct{ first, all time.Duration }

func (t took) String() string {
	return fmt.Sprintf("first pod after %v, all after %v", round(t.first), round(t.all))
}

// reboots boots the node bootsEach times, looks into the containers each time, and returns
// the better time: what else the machine does at the moment tells more than what is
// measured.
func (n *realNode) reboots(withHub bool) took {
	n.t.Helper()
	var best took
	for range bootsEach {
		containers, t := n.reboot(withHub)
		n.checkContents(containers)
		n.t.Logf("one reboot: %v", t)
		if best.all == 0 || t.all < best.all {
			best = t
		}
	}
	return best
}

// online starts kubelet and the pods.
func (n *realNode) online() {
	n.t.Helper()
	n.phase("online")
	start := time.Now()
	process.Run(n.t, n.kubelet)
	n.ready(start)
	start = time.Now()
	n.create(realPods)
	n.t.Logf("%d pods run after %v", realPods, time.Since(start).Round(time.Millisecond))
	n.checkContents(n.allRun())
	// What the API server says of the administrator's right to ask is recorded
	// here, and stands for its word while the link is cut.
	n.poll("kubelet's API shows its pods", n.runs(n.client, n.kubelet.URL()))
}

func round(d time.Duration) time.Duration { return d.Round(10 * time.Millisecond) }

var realKubelets sync.Mutex

// alone runs a test beside those of kubemark, but one with a real kubelet at a time:
// they would share cgroups.
func alone(t *testing.T) {
	t.Helper()
	node.RequireContainerd(t)
	t.Parallel()
	realKubelets.Lock()
	t.Cleanup(realKubelets.Unlock)
}

// A real kubelet on containerd. Link cut, kubelet and edgehub killed and started
// again: the containers run on. Node booted anew while cut: every pod is back, with
// its ConfigMap, Secret and token. Link healed: Ready, and nothing is listed.
func TestKubelet(t *testing.T) {
	alone(t)
	n := newRealNode(t, newRig(t, nil))
	n.online()
	before := n.ids()
	prometheus := n.newScraper("prometheus")
	prometheus.wants(http.StatusOK)

	n.phase("cut; edgehub and kubelet are killed and started")
	cut := time.Now()
	n.cut()
	prometheus.wants(http.StatusOK)
	n.kill()
	if d := cmp.Diff(before, n.ids()); d != "" {
		t.Errorf("containers changed when edgehub and kubelet were killed (-before +after):\n%s", d)
	}
	start := time.Now()
	n.must(n.hub.Start(t.Context()))
	n.must(n.kubelet.Start(t.Context()))
	n.poll("kubelet has all its pods again", n.runs(n.client, n.kubelet.URL()))
	n.poll("kubelet has asked for all tokens again", func(ctx context.Context) error {
		got, err := n.hub.Metric(ctx, "edgehub_proxy_offline_answers_total", `rule="tokenrequest"`)
		if err == nil && got < realPods {
			err = fmt.Errorf("%v so far", got)
		}
		return err
	})
	t.Logf("restart while cut: kubelet has its %d pods after %v", realPods, round(time.Since(start)))
	if d := cmp.Diff(before, n.ids()); d != "" {
		t.Errorf("containers changed when edgehub and kubelet were started while cut (-before +after):\n%s", d)
	}
	n.checkReplays()
	n.checkScrapes(prometheus)
	n.notReady()
	if d := cmp.Diff(before, n.ids()); d != "" {
		t.Errorf("containers changed while the node was cut (-before +after):\n%s", d)
	}

	n.phase("cut; the node is booted anew")
	offline := n.reboots(true)
	n.poll("kubelet has all its pods again", n.runs(n.client, n.kubelet.URL()))
	n.checkReplays()
	n.must(n.intact(t.Context()))
	n.checkAtRest(n.kubelet.RootDir())

	n.phase("healed")
	healed := n.heal(0)
	n.back(healed)
	n.checkNoLists(healed)
	n.checkNoneDeleted()
	n.checkStarted(cut)

	n.phase("online, without edgehub; the node is booted anew")
	n.must(controlplane.WriteKubeconfig(filepath.Join(n.dir, "kubeconfig"), n.direct))
	online := n.reboots(false)
	t.Logf("reboot: %d pods; link cut, through edgehub: %v; online, without edgehub: %v", realPods, offline, online)
	if offline.all > online.all+slower {
		t.Errorf("all pods are back after %v offline, after %v online and without edgehub", offline.all, online.all)
	}
}

// A node is booted anew after the link has been cut for two hours, by the clock of
// the recorded tokens: see clock.OlderTokens for what stands for the two hours.
func TestKubeletTwoHours(t *testing.T) {
	alone(t)
	const ago = 2 * time.Hour
	tokens := &clock.OlderTokens{Age: ago}
	n := newRealNode(t, newRig(t, tokens.Start))
	n.online()
	if got := tokens.Count(); got < realPods {
		t.Fatalf("%d tokens were made older, want at least %d", got, realPods)
	}

	n.phase("cut; the node is booted anew")
	n.cut()
	containers, boot := n.reboot(true)
	mounted := n.checkContents(containers)
	n.poll("kubelet has all its pods again", n.runs(n.client, n.kubelet.URL()))
	for i, token := range mounted {
		claims, err := clock.ClaimsOf(token)
		n.must(err)
		// Two hours old: due for renewal at 80 % of an hour, and good for a year.
		if age := time.Since(claims.Time("iat")); age < ago || time.Until(claims.Time("exp")) < 24*time.Hour {
			t.Errorf("pod %s: its token is of %v ago and expires at %v", n.pods[i].Name, age, claims.Time("exp"))
		}
	}
	n.checkReplays()
	n.must(n.intact(t.Context()))
	n.checkRecordedExpired()
	t.Logf("reboot: %d pods; link cut, through edgehub, tokens of %v ago: %v", realPods, ago, boot)

	n.phase("healed")
	healed := n.heal(0)
	n.back(healed)
	n.checkNoLists(healed)
	n.checkNoneDeleted()
	for i, token := range mounted {
		c := rest.AnonymousClientConfig(n.direct)
		c.Host, c.BearerToken = n.cp.URL(), token
		client, err := kubernetes.NewForConfig(c)
		n.must(err)
		review, err := client.AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		if want := "system:serviceaccount:" + namespace + ":default"; err != nil || review.Status.UserInfo.Username != want {
			t.Errorf("pod %s: the API server takes its token for %q, %v, want %q", n.pods[i].Name, review.Status.UserInfo.Username, err, want)
		}
	}
}

// checkRecordedExpired asks as kubelet does, and wants the record, whose time is
// over by the API server's own word.
func (n *realNode) checkRecordedExpired() {
	n.t.Helper()
	c := rest.CopyConfig(n.config)
	c.ContentType, c.AcceptContentTypes = runtime.ContentTypeProtobuf, runtime.ContentTypeProtobuf
	client, err := kubernetes.NewForConfig(c)
	n.must(err)
	seconds := int64(3607)
	for _, p := range n.pods {
		got, err := client.CoreV1().ServiceAccounts(namespace).CreateToken(n.t.Context(), "default", &authenticationv1.TokenRequest{
			Spec: authenticationv1.TokenRequestSpec{
				ExpirationSeconds: &seconds,
				BoundObjectRef:    &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: p.Name, UID: p.UID},
			},
		}, metav1.CreateOptions{})
		n.must(err)
		if over := time.Since(got.Status.ExpirationTimestamp.Time); over < 30*time.Minute {
			n.t.Errorf("pod %s: the recorded token is over since %v by its expirationTimestamp, want about an hour", p.Name, over)
		}
	}
}
