// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
)

// A Kubelet is a real one on a Containerd; it needs root, see RequireContainerd.
type Kubelet struct {
	*process.Process
	folder     folder
	containerd *Containerd
	ip         string // of the node, added to lo: the kubelet refuses a loopback address
	port       int    // of its API
	cgroup     string // of its own, for its pods
	sysctls    map[string]string
}

// NewKubelet returns a kubelet on a started runtime, itself not started. Its API
// trusts client certificates of clientCAFile. Close it before the runtime. Start
// does not wait: whether the node is Ready is for the API server to say.
func NewKubelet(ctx context.Context, c KubeletConfig, runtime *Containerd, clientCAFile string) (*Kubelet, error) {
	bin, err := controlplane.Binaries(ctx, "kubelet")
	if err != nil {
		return nil, err
	}
	p, err := port.Free()
	if err != nil {
		return nil, err
	}
	f, err := newFolder(c.Dir, "kubelet")
	if err != nil {
		return nil, err
	}
	k := &Kubelet{
		folder: f, containerd: runtime, port: p, cgroup: fmt.Sprintf("edgehub%d", rand.IntN(1e6)),
		ip: fmt.Sprintf("10.250.%d.%d", rand.IntN(256), 1+rand.IntN(254)),
	}
	for _, d := range []string{"root", "manifests", "pki"} {
		if err := os.MkdirAll(f.join(d), 0o700); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(
		controlplane.WriteKubeconfig(f.join("kubeconfig"), c.Client),
		fill(f.join("config.yaml"), kubeletConfiguration, map[string]string{
			"dir": f.path, "ip": k.ip, "port": strconv.Itoa(p), "socket": runtime.Socket(), "ca": clientCAFile,
			"cgroup": k.cgroup,
		}),
	); err != nil {
		return nil, errors.Join(err, f.remove())
	}
	k.Process = process.New(process.Command{
		Name: "kubelet-" + c.Name, Path: filepath.Join(bin, "kubelet"), Dir: f.path,
		Args: append([]string{
			"--config=" + f.join("config.yaml"), "--kubeconfig=" + f.join("kubeconfig"),
			"--hostname-override=" + c.Name, "--node-ip=" + k.ip,
			"--root-dir=" + f.join("root"), "--cert-dir=" + f.join("pki"), "--v=2",
		}, c.Args...),
	})
	return k, nil
}

// Start runs the kubelet.
func (k *Kubelet) Start(ctx context.Context) (err error) {
	if k.sysctls == nil {
		if k.sysctls, err = readSysctls(); err != nil {
			return err
		}
	}
	if err := makeCgroup(k.cgroup); err != nil {
		return err
	}
	if !hasAddress(k.ip) {
		if err := run("ip", "addr", "add", k.ip+"/32", "dev", "lo"); err != nil {
			return err
		}
	}
	return k.Process.Start(ctx)
}

// IP returns the node's address.
func (k *Kubelet) IP() string { return k.ip }

// URL returns the URL of its API. The certificate there is one that it has signed
// itself.
func (k *Kubelet) URL() string { return "https://" + net.JoinHostPort(k.ip, strconv.Itoa(k.port)) }

// RootDir returns the folder of its pods' volumes, among others.
func (k *Kubelet) RootDir() string { return k.folder.join("root") }

// Unmount undoes the mounts of its pods' volumes, as a reboot of the machine does.
// Kill the kubelet and remove the pods before.
func (k *Kubelet) Unmount() error { return unmountBelow(k.folder.path) }

// ManifestDir returns the folder of static pods.
func (k *Kubelet) ManifestDir() string { return k.folder.join("manifests") }

// Close kills the kubelet, removes its pods, and undoes what it has done to this
// machine: mounts, its cgroup, kernel parameters, links to logs, its address.
func (k *Kubelet) Close() error {
	err := errors.Join(k.Kill(), k.containerd.RemovePods(), unmountBelow(k.folder.path),
		writeSysctls(k.sysctls), removeLogLinks(k.folder.path), removeCgroup(k.cgroup))
	if hasAddress(k.ip) {
		err = errors.Join(err, run("ip", "addr", "del", k.ip+"/32", "dev", "lo"))
	}
	return errors.Join(err, k.folder.remove())
}

func hasAddress(ip string) bool {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return false
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && n.IP.String() == ip {
			return true
		}
	}
	return false
}

const kubeletConfiguration = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {{.ip}}
port: {{.port}}
healthzPort: 0
readOnlyPort: 0
failCgroupV1: false
cgroupDriver: cgroupfs
cgroupRoot: /{{.cgroup}}
containerRuntimeEndpoint: unix://{{.socket}}
staticPodPath: {{.dir}}/manifests
podLogsDir: {{.dir}}/pod-logs
makeIPTablesUtilChains: false
failSwapOn: false
enforceNodeAllocatable: []
evictionHard: {memory.available: 100Mi, nodefs.available: 1%, imagefs.available: 1%}
clusterDNS: []
resolvConf: ""
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: "{{.ca}}"}
authorization: {mode: Webhook}
`
