// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
)

const (
	realNode  = "real-edge"
	goodImage = "edgehub.test/hub:1"
	badImage  = "edgehub.test/bad:1"
)

// A kubeletNode is a real kubelet on containerd, restarted by the stub of systemd.
type kubeletNode struct {
	t       *testing.T
	dir     string
	runtime *node.Containerd
	kubelet *node.Kubelet
	program string // edgehub, as in the image
	flags   []string
	hub     string // URL
}

func newKubeletNode(t *testing.T) *kubeletNode {
	t.Helper()
	dir, err := os.MkdirTemp("", "edgehub-install-")
	n := &kubeletNode{t: t, dir: dir}
	n.must(err)
	t.Cleanup(func() { n.must(os.RemoveAll(dir)) })
	n.runtime, err = node.NewContainerd(t.Context(), "")
	n.must(err)
	process.Run(t, n.runtime)
	config, err := cp.NodeConfig(realNode)
	n.must(err)
	n.kubelet, err = node.NewKubelet(t.Context(), node.KubeletConfig{Dir: filepath.Join(dir, "kubelet"), Name: realNode, Client: config}, n.runtime, cp.CAFile())
	n.must(err)
	socket := filepath.Join(dir, "run", "bus")
	newSystemd(t, socket, func(verb, unit string) error {
		if verb != "restart" || unit != "kubelet.service" {
			return errors.New(verb + " " + unit)
		}
		return errors.Join(n.kubelet.Stop(), n.kubelet.Start(context.Background()))
	})
	process.Run(t, n.kubelet)
	n.images()
	n.flags = []string{
		"--system-bus-socket=" + socket, "--state-dir=" + filepath.Join(dir, "state"), "--ready-timeout=90s",
	}
	listen, metrics := n.port(), n.port()
	n.hub = "https://127.0.0.1:" + listen
	n.flags = append(n.flags, "--data-dir="+filepath.Join(dir, "data"), "--kubelet-kubeconfig="+n.conf(), "--static-pod-dir="+n.kubelet.ManifestDir(),
		"--hub-flag=listen-address=127.0.0.1:"+listen, "--hub-flag=metrics-listen-address=127.0.0.1:"+metrics)
	return n
}

func (n *kubeletNode) conf() string { return filepath.Join(n.dir, "kubelet", "kubeconfig") }

func (n *kubeletNode) port() string {
	p, err := port.Free()
	n.must(err)
	return fmt.Sprint(p)
}

func (n *kubeletNode) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

// images makes one of the hub, and one of a program that never answers.
func (n *kubeletNode) images() {
	n.t.Helper()
	ctx := n.t.Context()
	bin, err := controlplane.Binaries(ctx, "mkimage", "pause")
	n.must(err)
	root, err := controlplane.Root()
	n.must(err)
	n.program = filepath.Join(n.dir, "good", "edgehub")
	bad := filepath.Join(n.dir, "bad", "edgehub")
	build := exec.CommandContext(ctx, "go", "build", "-o", n.program, "./cmd/edgehub")
	build.Dir, build.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	n.command(build)
	pause, err := os.ReadFile(filepath.Join(bin, "pause"))
	n.must(errors.Join(err, os.MkdirAll(filepath.Dir(bad), 0o700), os.WriteFile(bad, pause, 0o700)))
	for image, program := range map[string]string{goodImage: n.program, badImage: bad} {
		tar := program + ".tar"
		n.command(exec.CommandContext(ctx, filepath.Join(bin, "mkimage"), "-name", image, "-binary", program, "-o", tar))
		n.command(exec.CommandContext(ctx, "ctr", "--address", n.runtime.Socket(), "--namespace", "k8s.io", "images", "import", tar))
	}
}

func (n *kubeletNode) command(cmd *exec.Cmd) {
	n.t.Helper()
	if out, err := cmd.CombinedOutput(); err != nil {
		n.t.Fatalf("%s: %v\n%s", cmd, err, out)
	}
}

// edgehub runs the real program, and returns what it has said.
func (n *kubeletNode) edgehub(args ...string) (string, error) {
	n.t.Helper()
	cmd := exec.CommandContext(n.t.Context(), n.program, args...)
	out, err := cmd.CombinedOutput()
	n.t.Logf("%s\n%s", strings.Join(args, " "), out)
	return string(out), err
}

// runs creates a pod on the node and waits until it runs.
func (n *kubeletNode) runs(name string) {
	n.t.Helper()
	_, err := cp.Client.CoreV1().Pods("default").Create(n.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec:       corev1.PodSpec{NodeName: realNode, Containers: []corev1.Container{{Name: "c", Image: node.Image}}},
	}, metav1.CreateOptions{})
	n.must(err)
	ctx, cancel := context.WithTimeout(n.t.Context(), 2*patience)
	defer cancel()
	_, err = cp.WaitPodRunning(ctx, "default", name)
	n.must(err)
}

// containers are the running ones of pods of the API server's, id by pod.
func (n *kubeletNode) containers() map[string]string {
	n.t.Helper()
	all, err := n.runtime.Containers(n.t.Context())
	n.must(err)
	ids := map[string]string{}
	for _, c := range all {
		if c.Running && strings.HasPrefix(c.Pod, "default/") {
			ids[c.Pod] = c.ID
		}
	}
	return ids
}

func (n *kubeletNode) unharmed(when string, before map[string]string) {
	n.t.Helper()
	if diff := cmp.Diff(before, n.containers()); diff != "" {
		n.t.Errorf("containers after %s (-before +after):\n%s", when, diff)
	}
}

// The real program installs the hub as a static pod of a real kubelet; a broken image is
// rolled back; uninstall puts all back. Pods run on all the time.
func TestRealKubelet(t *testing.T) {
	node.RequireContainerd(t)
	t.Parallel()
	n := newKubeletNode(t)
	original, err := os.ReadFile(n.conf())
	n.must(err)
	n.must(cp.WaitNodeReady(t.Context(), realNode))
	n.runs("first")
	before := n.containers()
	install := append([]string{"install", "--image=" + goodImage}, n.flags...)
	if _, err := n.edgehub(install...); err != nil {
		t.Fatalf("edgehub install = %v", err)
	}
	n.unharmed("install", before)
	if conf, err := os.ReadFile(n.conf()); err != nil || !bytes.Contains(conf, []byte(n.hub)) {
		t.Errorf("kubelet's kubeconfig does not lead to %s: %v\n%s", n.hub, err, conf)
	}
	n.runs("second") // kubelet hears of it through the hub
	before = n.containers()

	upgrade := append([]string{"install", "--image=" + badImage, "--skip-candidate"}, append(n.flags, "--ready-timeout=25s")...)
	if out, err := n.edgehub(upgrade...); err == nil || !strings.Contains(out, "rolled back to the version before") {
		t.Errorf("edgehub install of a broken image = %v\n%s", err, out)
	}
	n.unharmed("a broken upgrade", before)
	n.runs("third")
	before = n.containers()

	if _, err := n.edgehub("uninstall", n.flags[0], n.flags[1], n.flags[2], "--purge"); err != nil {
		t.Fatalf("edgehub uninstall = %v", err)
	}
	n.unharmed("uninstall", before)
	if conf, err := os.ReadFile(n.conf()); err != nil || !bytes.Equal(conf, original) {
		t.Errorf("kubelet's kubeconfig is not as it was: %v\n%s", err, conf)
	}
	for _, dir := range []string{"state", "data"} {
		if _, err := os.Stat(filepath.Join(n.dir, dir)); err == nil {
			t.Errorf("%s is left", dir)
		}
	}
	n.runs("fourth")
}
