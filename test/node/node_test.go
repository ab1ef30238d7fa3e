// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package node_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
)

func newPod(name, nodeName string, args ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			NodeName:   nodeName,
			Containers: []corev1.Container{{Name: "c", Image: node.Image, Args: args}},
		},
	}
}

// runPod creates a pod in the namespace default and waits until it is ready.
func runPod(t *testing.T, cp *controlplane.ControlPlane, pod *corev1.Pod) *corev1.Pod {
	t.Helper()
	if _, err := cp.Client.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	got, err := cp.WaitPodRunning(t.Context(), "default", pod.Name)
	if err != nil {
		t.Fatal(err)
	}
	return got
}

func nodeConfig(t *testing.T, cp *controlplane.ControlPlane, name string) *rest.Config {
	t.Helper()
	c, err := cp.NodeConfig(name)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func waitReady(t *testing.T, cp *controlplane.ControlPlane, name string) {
	t.Helper()
	if err := cp.WaitNodeReady(t.Context(), name); err != nil {
		t.Fatal(err)
	}
}

// kubemark's kubelet becomes Ready and runs pods, bound or scheduled, through a
// link; it is killed and comes back; it leaves nothing in /tmp.
func TestKubemark(t *testing.T) {
	cp := controlplane.New(t, controlplane.Config{Scheduler: true})
	l, err := link.New(t.Context(), cp.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	config := nodeConfig(t, cp, "n1")
	config.Host = l.URL()
	k, err := node.NewKubemark(t.Context(), node.KubeletConfig{Name: "n1", Client: config})
	if err != nil {
		t.Fatal(err)
	}
	before := hollowRoots(t)
	start := time.Now()
	process.Run(t, k)
	waitReady(t, cp, "n1")
	t.Logf("Ready after %v", time.Since(start).Round(time.Millisecond))
	start = time.Now()
	runPod(t, cp, newPod("bound", "n1"))
	t.Logf("pod ready after %v", time.Since(start).Round(time.Millisecond))
	scheduled := newPod("scheduled", "")
	// Nobody takes the taint of a node that is not initialized away.
	scheduled.Spec.Tolerations = []corev1.Toleration{{Operator: corev1.TolerationOpExists}}
	if got := runPod(t, cp, scheduled); got.Spec.NodeName != "n1" {
		t.Errorf("pod was scheduled to %q, want n1", got.Spec.NodeName)
	}
	if s := l.Stats(); s.Connections == 0 || s.ToClient == 0 {
		t.Errorf("Stats() of the link = %+v, want traffic", s)
	}
	if err := k.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := k.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	runPod(t, cp, newPod("after-restart", "n1"))
	if err := k.Close(); err != nil {
		t.Fatal(err)
	}
	if after := hollowRoots(t); after > before {
		t.Errorf("%d folders /tmp/hollow-kubelet.* after Close, want %d", after, before)
	}
}

func hollowRoots(t *testing.T) int {
	t.Helper()
	m, err := filepath.Glob("/tmp/hollow-kubelet.*")
	if err != nil {
		t.Fatal(err)
	}
	return len(m)
}

// A real kubelet on a real containerd runs a pod that answers; everything it did
// to this machine is undone.
func TestKubelet(t *testing.T) {
	node.RequireContainerd(t)
	cp := controlplane.New(t, controlplane.Config{})
	forward := readFile(t, "/proc/sys/net/ipv4/ip_forward")
	c, err := node.NewContainerd(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	process.Run(t, c)
	k, err := node.NewKubelet(t.Context(), node.KubeletConfig{Name: "real", Client: nodeConfig(t, cp, "real")}, c, cp.CAFile())
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	process.Run(t, k)
	waitReady(t, cp, "real")
	t.Logf("Ready after %v", time.Since(start).Round(time.Millisecond))
	start = time.Now()
	pod := runPod(t, cp, newPod("web", "real", "serve", ":8080"))
	t.Logf("pod ready after %v", time.Since(start).Round(time.Millisecond))
	err = process.Poll(t.Context(), "the pod answers", func(ctx context.Context) error {
		return httpGet(ctx, "http://"+net.JoinHostPort(pod.Status.PodIP, "8080"), "web")
	})
	if err != nil {
		t.Error(err)
	}
	log, err := cp.Client.CoreV1().Pods("default").GetLogs("web", &corev1.PodLogOptions{}).DoRaw(t.Context())
	if want := "serving on :8080\n"; err != nil || string(log) != want {
		t.Errorf("GetLogs() = %q, %v, want %q", log, err, want)
	}
	if err := errors.Join(k.Close(), c.Close()); err != nil {
		t.Fatal(err)
	}
	if got := readFile(t, "/proc/sys/net/ipv4/ip_forward"); got != forward {
		t.Errorf("ip_forward after Close = %q, want %q", got, forward)
	}
	if mounts := readFile(t, "/proc/self/mounts"); strings.Contains(mounts, filepath.Dir(c.Socket())) || strings.Contains(mounts, filepath.Dir(k.ManifestDir())) {
		t.Errorf("mounts are left behind:\n%s", mounts)
	}
	if err := httpGet(t.Context(), "http://"+net.JoinHostPort(pod.Status.PodIP, "8080"), "web"); err == nil {
		t.Error("the pod still answers after Close")
	}
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// httpGet wants an answer that starts with prefix.
func httpGet(ctx context.Context, url, prefix string) error {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if !strings.HasPrefix(string(b), prefix) {
		return fmt.Errorf("GET %s = %q, want %q at its start", url, b, prefix)
	}
	return nil
}
