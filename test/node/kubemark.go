// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strconv"

	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
)

// KubeletConfig says what a kubelet, kubemark's or a real one, is started with.
type KubeletConfig struct {
	Dir    string       // for its data and log; "": a temporary one, removed by Close
	Name   string       // of the node
	Client *rest.Config // its server and credentials: ControlPlane.NodeConfig, or that through a link or a hub
	Args   []string     // more flags, after the rig's own
}

// A Kubemark is the real kubelet code over a container runtime that only
// pretends: its pods are soon Running, without images, and nothing needs root.
type Kubemark struct {
	*process.Process
	folder folder
}

// NewKubemark returns a kubelet that is not started. Start does not wait:
// whether the node is Ready is for the API server to say.
func NewKubemark(ctx context.Context, c KubeletConfig) (*Kubemark, error) {
	bin, err := controlplane.Binaries(ctx, "kubemark")
	if err != nil {
		return nil, err
	}
	p, err := port.Free()
	if err != nil {
		return nil, err
	}
	k := &Kubemark{}
	if k.folder, err = newFolder(c.Dir, "kubemark"); err != nil {
		return nil, err
	}
	kubeconfig := k.folder.join("kubeconfig")
	if err := controlplane.WriteKubeconfig(kubeconfig, c.Client); err != nil {
		return nil, err
	}
	path, args := filepath.Join(bin, "kubemark"), []string{
		"--morph=kubelet", "--name=" + c.Name, "--kubeconfig=" + kubeconfig,
		"--use-host-image-service=false", // the default is this machine's containerd
		"--kubelet-port=" + strconv.Itoa(p), "--kubelet-read-only-port=0", "--v=2",
	}
	args = append(args, c.Args...)
	if os.Geteuid() == 0 {
		// It would put its KUBE-FIREWALL chains into this machine's iptables.
		args = append([]string{"--bounding-set=-net_admin", "--inh-caps=-net_admin", path}, args...)
		path = "setpriv"
	}
	k.Process = process.New(process.Command{Name: "kubemark-" + c.Name, Path: path, Args: args, Dir: k.folder.path})
	return k, nil
}

// kubemark makes a folder in /tmp at each start, and leaves it there.
var kubemarkRoot = regexp.MustCompile(`Using (/tmp/hollow-kubelet\.[0-9]+) as root dir`)

// Close kills it and removes what it has left.
func (k *Kubemark) Close() error {
	err := k.Kill()
	log, readErr := os.ReadFile(k.Log())
	if errors.Is(readErr, os.ErrNotExist) { // it was never started
		readErr = nil
	}
	err = errors.Join(err, readErr)
	for _, m := range kubemarkRoot.FindAllSubmatch(log, -1) {
		err = errors.Join(err, os.RemoveAll(string(m[1])))
	}
	return errors.Join(err, k.folder.remove())
}
