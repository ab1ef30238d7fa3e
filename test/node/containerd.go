// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"text/template"
	"time"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
)

// Image is the one image of Containerd. Without arguments its container waits;
// with the arguments "serve", ":PORT" it answers HTTP with its host name,
// addresses and the time. For more see test/bin/cmd/pause.
const Image = "edgehub.test/pause:1"

// cniBin is where Debian's containernetworking-plugins are.
const cniBin = "/usr/lib/cni"

// RequireContainerd skips the test, and says why, where NewContainerd cannot
// work: it needs root, containerd, runc and the CNI plugins.
func RequireContainerd(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED, NOT TESTED: a real kubelet needs root")
	}
	for _, name := range []string{"containerd", "ctr", "runc", "ip", cniBin + "/bridge"} {
		if _, err := exec.LookPath(name); err != nil {
			t.Skipf("SKIPPED, NOT TESTED: a real kubelet needs %s; run test/install-containerd.sh", name)
		}
	}
}

// A Containerd is the installed containerd, with a configuration, data, socket
// and pod network of its own, and Image.
type Containerd struct {
	*process.Process
	folder folder
	bin    string
	bridge string // the pods' bridge on this machine
}

// NewContainerd returns a containerd that is not started. dir is its folder; "":
// a temporary one, removed by Close. Start waits until it answers and has the
// image.
func NewContainerd(ctx context.Context, dir string) (*Containerd, error) {
	bin, err := controlplane.Binaries(ctx, "cri", "pause", "mkimage")
	if err != nil {
		return nil, err
	}
	f, err := newFolder(dir, "containerd")
	if err != nil {
		return nil, err
	}
	n := rand.IntN(50 * 256)
	c := &Containerd{folder: f, bin: bin, bridge: fmt.Sprintf("edgehub%d", n)}
	if err := c.configure(fmt.Sprintf("10.%d.%d.0/24", 200+n/256, n%256)); err != nil {
		return nil, errors.Join(err, f.remove())
	}
	c.Process = process.New(process.Command{
		Path: "containerd", Args: []string{"--config", f.join("config.toml")}, Dir: f.path, Ready: c.ready,
	})
	return c, nil
}

// Socket returns the path of the socket.
func (c *Containerd) Socket() string { return c.folder.join("containerd.sock") }

// ready imports the image.
func (c *Containerd) ready(ctx context.Context) error {
	out, err := exec.CommandContext(ctx, "ctr", "--address", c.Socket(), "--namespace", "k8s.io",
		"images", "import", c.folder.join("pause.tar")).CombinedOutput()
	if err != nil {
		return fmt.Errorf("ctr images import: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// configure writes all files that containerd reads.
func (c *Containerd) configure(subnet string) error {
	if err := run(filepath.Join(c.bin, "mkimage"), "-name", Image,
		"-binary", filepath.Join(c.bin, "pause"), "-o", c.folder.join("pause.tar")); err != nil {
		return err
	}
	version, err := exec.Command("containerd", "--version").Output()
	if err != nil {
		return fmt.Errorf("containerd --version: %w", err)
	}
	config := containerd2
	if regexp.MustCompile(` v?1\.`).Match(version) {
		config = containerd1
	}
	values := map[string]string{
		"dir": c.folder.path, "cniBin": cniBin, "image": Image, "bridge": c.bridge, "subnet": subnet,
	}
	if err := os.MkdirAll(c.folder.join("cni"), 0o700); err != nil {
		return err
	}
	return errors.Join(
		fill(c.folder.join("config.toml"), config, values),
		fill(c.folder.join("cni", "10-edgehub.conflist"), network, values),
	)
}

// fill writes a template's text with the values into a file.
func fill(file, text string, values map[string]string) error {
	t, err := template.New(filepath.Base(file)).Option("missingkey=error").Parse(text)
	if err != nil {
		return err
	}
	var b bytes.Buffer
	if err := t.Execute(&b, values); err != nil {
		return err
	}
	return os.WriteFile(file, b.Bytes(), 0o600)
}

// RemovePods removes all pods and their containers, as a kubelet would that has
// none of them any more.
func (c *Containerd) RemovePods() error {
	if _, err := os.Stat(c.Socket()); errors.Is(err, os.ErrNotExist) {
		return nil // never started
	}
	if !c.Running() { // killed by the test; its containers live on
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := c.Start(ctx); err != nil {
			return err
		}
	}
	return run(filepath.Join(c.bin, "cri"), "-socket", c.Socket(), "rm")
}

// A Container is what Containers knows of one.
type Container struct {
	ID      string    `json:"id"`
	Pod     string    `json:"pod"` // namespace/name
	Running bool      `json:"running"`
	PID     int       `json:"pid"` // on this machine; 0: it does not run
	Started time.Time `json:"started"`
}

// Containers returns all containers, without the pods' sandboxes, those that have
// ended included.
func (c *Containerd) Containers(ctx context.Context) ([]Container, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin, "cri"), "-socket", c.Socket(), "ps")
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("cri ps: %w: %s", err, bytes.TrimSpace(said.Bytes()))
	}
	var all []Container
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var one Container
		switch err := d.Decode(&one); {
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, fmt.Errorf("cri ps: %w", err)
		}
		all = append(all, one)
	}
}

// Close removes the pods, kills containerd, and removes the pod network's bridge
// and a temporary folder.
func (c *Containerd) Close() error {
	err := errors.Join(c.RemovePods(), c.Kill(), unmountBelow(c.folder.path))
	if _, e := os.Stat("/sys/class/net/" + c.bridge); e == nil {
		err = errors.Join(err, run("ip", "link", "del", c.bridge))
	}
	return errors.Join(err, c.folder.remove())
}

// The two forms of containerd's configuration: 1.x and 2.x.
const (
	containerd1 = `version = 2
root = "{{.dir}}/root"
state = "{{.dir}}/state"
[grpc]
  address = "{{.dir}}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{{.dir}}/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{{.image}}"
  stream_server_address = "127.0.0.1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{{.cniBin}}"
    conf_dir = "{{.dir}}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
`
	containerd2 = `version = 3
root = "{{.dir}}/root"
state = "{{.dir}}/state"
[grpc]
  address = "{{.dir}}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{{.dir}}/opt"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{{.image}}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  [plugins."io.containerd.cri.v1.runtime".cni]
    bin_dirs = ["{{.cniBin}}"]
    conf_dir = "{{.dir}}/cni"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri"]
  stream_server_address = "127.0.0.1"
`
	network = `{"cniVersion": "0.4.0", "name": "edgehub", "plugins": [
  {"type": "bridge", "bridge": "{{.bridge}}", "isGateway": true, "ipMasq": false,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "{{.subnet}}"}]],
            "routes": [{"dst": "0.0.0.0/0"}], "dataDir": "{{.dir}}/cni-ipam"}},
  {"type": "loopback"}
]}
`
)
