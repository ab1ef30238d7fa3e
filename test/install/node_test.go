// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/yaml"

	"github.com/edgehub/edgehub/pkg/install"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
)

// A fakeNode is a scratch root with a kubelet that does two things: run the static pod, and
// renew its Lease with the kubeconfig that it was started with; and with a systemd that
// restarts it, and runs the unit.
type fakeNode struct {
	t       *testing.T
	name    string
	root    string
	systemd *systemd
	options install.Options
	// original is kubelet's kubeconfig as it was.
	original []byte
	// onStep is told of steps of run's. nil: nobody is.
	onStep func(step string)
	// programs by image.
	programs map[string]string

	ctx    context.Context // of the loops
	end    func()
	mu     sync.Mutex
	holds  bool                  // no hub is started
	client *kubernetes.Clientset // kubelet's, as of its last start
	hub    *process.Process
	runs   []byte // what hub is started from
	starts int
	past   []string // servers by start of kubelet
}

const kubeletConf = "/etc/kubernetes/kubelet.conf"

// newFakeNode has a kubelet that runs, as kubeadm leaves it: the CA is in the kubeconfig, the
// certificate behind a link by its full path. server is where the API server is.
func newFakeNode(t *testing.T, server string) *fakeNode {
	t.Helper()
	root, err := os.MkdirTemp("", "edgehub-root-")
	n := &fakeNode{t: t, root: root, name: filepath.Base(root), programs: map[string]string{"good:1": hub, "good:2": hub}}
	n.must(err)
	t.Cleanup(func() { n.must(os.RemoveAll(root)) })
	c := newNode(t, n.name, map[string]string{"edge": "yes"})
	for _, dir := range []string{"etc/kubernetes/manifests", "var/lib/kubelet/pki", "run/dbus", "etc/systemd/system", "usr/local/bin"} {
		n.must(os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	cert, err := os.ReadFile(c.CertFile)
	n.must(err)
	key, err := os.ReadFile(c.KeyFile)
	n.must(err)
	ca, err := os.ReadFile(cp.CAFile())
	n.must(err)
	const pki = "/var/lib/kubelet/pki/"
	n.must(os.WriteFile(n.at(pki+"kubelet-client-2026.pem"), slices.Concat(cert, key), 0o600))
	n.must(os.Symlink(pki+"kubelet-client-2026.pem", n.at(pki+"kubelet-client-current.pem")))
	conf := clientcmdapi.NewConfig()
	conf.Clusters["cluster"] = &clientcmdapi.Cluster{Server: server, CertificateAuthorityData: ca}
	conf.Clusters["other"] = &clientcmdapi.Cluster{Server: "https://203.0.113.1:6443"}
	conf.AuthInfos["node"] = &clientcmdapi.AuthInfo{ClientCertificate: pki + "kubelet-client-current.pem", ClientKey: pki + "kubelet-client-current.pem"}
	conf.Contexts["other"] = &clientcmdapi.Context{Cluster: "other", AuthInfo: "node"}
	conf.Contexts["here"] = &clientcmdapi.Context{Cluster: "cluster", AuthInfo: "node"}
	conf.CurrentContext = "here"
	raw, err := clientcmd.Write(*conf)
	n.must(err)
	n.original = append([]byte("# written by kubeadm\n"), raw...)
	n.must(os.WriteFile(n.at(kubeletConf), n.original, 0o640))
	n.must(os.Chmod(n.at(kubeletConf), 0o640))
	n.options = n.newOptions()
	n.systemd = newSystemd(t, n.at(n.options.SystemBusSocket), n.byNode)
	n.start()
	return n
}

func (n *fakeNode) newOptions() install.Options {
	o := install.DefaultOptions()
	o.Root, o.Image, o.Executable = n.root, "good:1", hub
	for _, flag := range []string{"listen-address", "metrics-listen-address"} {
		p, err := port.Free()
		n.must(err)
		o.HubFlags = append(o.HubFlags, flag+"=127.0.0.1:"+strconv.Itoa(p))
	}
	o.ReadyTimeout = patience
	return o
}

// patience is for one thing to happen on a machine that does much else.
const patience = 90 * time.Second

func (n *fakeNode) must(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

// at is where a path of the node is here.
func (n *fakeNode) at(path string) string { return filepath.Join(n.root, path) }

// here is at, with a link by its full path followed as the node would.
func (n *fakeNode) here(path string) string {
	if target, err := os.Readlink(n.at(path)); err == nil && filepath.IsAbs(target) {
		return n.at(target)
	}
	return n.at(path)
}

// start runs kubelet until the test ends.
func (n *fakeNode) start() {
	ctx, cancel := context.WithCancel(context.Background())
	n.ctx = ctx
	n.must(n.startKubelet())
	var loops sync.WaitGroup
	loops.Go(func() { n.every(50*time.Millisecond, n.runStaticPod) })
	loops.Go(func() { n.every(200*time.Millisecond, n.renewLease) })
	n.end = sync.OnceFunc(func() {
		cancel()
		loops.Wait()
		n.mu.Lock()
		defer n.mu.Unlock()
		n.stopHub()
	})
	n.t.Cleanup(n.end)
}

func (n *fakeNode) every(d time.Duration, do func()) {
	t := time.NewTicker(d)
	defer t.Stop()
	for {
		select {
		case <-n.ctx.Done():
			return
		case <-t.C:
			do()
		}
	}
}

// startKubelet reads its kubeconfig, as kubelet does once.
func (n *fakeNode) startKubelet() error {
	c, err := n.config()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		return err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.client = client
	n.starts++
	n.past = append(n.past, c.Host)
	return nil
}

// config is what kubelet's kubeconfig says now.
func (n *fakeNode) config() (*rest.Config, error) {
	f, err := clientcmd.LoadFromFile(n.at(kubeletConf))
	if err != nil {
		return nil, err
	}
	current := f.Contexts[f.CurrentContext]
	if current == nil {
		return nil, errors.New("kubelet's kubeconfig has no current context")
	}
	cluster, user := f.Clusters[current.Cluster], f.AuthInfos[current.AuthInfo]
	c := &rest.Config{Host: cluster.Server, QPS: -1, Timeout: 10 * time.Second, TLSClientConfig: rest.TLSClientConfig{
		CAData: cluster.CertificateAuthorityData, CertFile: n.here(user.ClientCertificate), KeyFile: n.here(user.ClientKey),
	}}
	if len(c.CAData) == 0 {
		c.CAFile = n.here(cluster.CertificateAuthority)
	}
	return c, nil
}

// writeConf is somebody else who writes kubelet's kubeconfig, as a whole.
func (n *fakeNode) writeConf(b []byte) {
	n.t.Helper()
	file := n.at("/etc/kubernetes/.somebody-elses")
	n.must(errors.Join(os.WriteFile(file, b, 0o640), os.Chmod(file, 0o640), os.Rename(file, n.at(kubeletConf))))
}

func (n *fakeNode) renewLease() {
	n.mu.Lock()
	client := n.client
	n.mu.Unlock()
	leases := client.CoordinationV1().Leases(corev1.NamespaceNodeLease)
	ctx, cancel := context.WithTimeout(n.ctx, 5*time.Second)
	defer cancel()
	seconds := int32(40)
	spec := coordinationv1.LeaseSpec{HolderIdentity: &n.name, LeaseDurationSeconds: &seconds, RenewTime: &metav1.MicroTime{Time: time.Now()}}
	l, err := leases.Get(ctx, n.name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		_, _ = leases.Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: n.name}, Spec: spec}, metav1.CreateOptions{})
	case err == nil:
		l.Spec = spec
		_, _ = leases.Update(ctx, l, metav1.UpdateOptions{}) // the next one may do better
	}
}

// hold keeps hubs from being started, and ends the one that runs.
func (n *fakeNode) hold(holds bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.holds = holds
	if holds {
		n.stopHub()
	}
}

// stopHub is called with mu held.
func (n *fakeNode) stopHub() {
	if n.hub != nil {
		if err := n.hub.Kill(); err != nil {
			n.t.Error(err)
		}
	}
	n.hub, n.runs = nil, nil
}

// runStaticPod does for the manifest what kubelet does: a changed one is another pod, and a
// container that ends is started again.
func (n *fakeNode) runStaticPod() {
	files, err := filepath.Glob(n.at("/etc/kubernetes/manifests/[^.]*"))
	if err != nil || len(files) > 1 {
		n.t.Errorf("manifests: %q, %v, want one at most", files, err)
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ctx.Err() != nil || n.holds || n.runsUnit() {
		return
	}
	var raw []byte
	if len(files) == 1 {
		if raw, err = os.ReadFile(files[0]); errors.Is(err, fs.ErrNotExist) {
			return
		}
	}
	if n.hub != nil && (!bytes.Equal(raw, n.runs) || !n.hub.Running()) {
		n.stopHub()
	}
	if n.hub != nil || len(raw) == 0 {
		return
	}
	var pod corev1.Pod
	if err := yaml.UnmarshalStrict(raw, &pod); err != nil || len(pod.Spec.Containers) != 1 {
		n.t.Errorf("the manifest is no pod with one container: %v\n%s", err, raw)
		return
	}
	c := pod.Spec.Containers[0]
	var env []string
	for _, e := range c.Env {
		env = append(env, e.Name+"="+e.Value)
	}
	n.runHub(n.programs[c.Image], c.Args, env)
	n.runs = raw
}

// runHub is called with mu held. Paths of the node become what they are here.
func (n *fakeNode) runHub(program string, args, env []string) {
	var mapped []string
	for _, a := range args {
		if name, value, ok := strings.Cut(a, "=/"); ok {
			a = name + "=" + n.here("/"+value)
		}
		mapped = append(mapped, a)
	}
	n.hub = process.New(process.Command{Name: "hub", Path: program, Args: mapped, Env: env, Dir: n.root})
	if err := n.hub.Start(n.ctx); err != nil && n.ctx.Err() == nil {
		n.t.Logf("start the hub: %v", err)
	}
}

// runsUnit is called with mu held.
func (n *fakeNode) runsUnit() bool { return bytes.HasPrefix(n.runs, []byte("unit")) }

// byNode does for systemd what it is asked.
func (n *fakeNode) byNode(verb, unit string) error {
	switch unit {
	case "kubelet.service":
		if verb != "restart" {
			return fmt.Errorf("%s kubelet", verb)
		}
		return n.startKubelet()
	case "edgehub.service":
		n.mu.Lock()
		defer n.mu.Unlock()
		n.stopHub()
		if verb == "stop" || n.holds {
			return nil
		}
		raw, err := os.ReadFile(n.at("/etc/systemd/system/edgehub.service"))
		if err != nil {
			return err
		}
		n.runUnit(string(raw))
		return nil
	}
	return errors.New("no such unit")
}

// runUnit understands as much of a unit as there is in these: words without quotes.
func (n *fakeNode) runUnit(text string) {
	text = strings.ReplaceAll(text, " \\\n", " ")
	var words, env []string
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch key {
		case "ExecStart":
			words = strings.Fields(value)
		case "Environment":
			env = append(env, value)
		}
	}
	n.runHub(n.at(words[0]), words[1:], env)
	n.runs = []byte("unit")
}

// run runs a command in this process and returns its steps.
func (n *fakeNode) run(command string, change ...func(*install.Options)) (steps []string, err error) {
	o := n.options
	o.HubFlags = slices.Clone(o.HubFlags)
	for _, c := range change {
		c(&o)
	}
	if command != "install" { // which knows what it was
		o.HubFlags, o.Image = nil, ""
	}
	if err := o.Validate(command); err != nil {
		return nil, err
	}
	var mu sync.Mutex
	o.Progress = func(step string) {
		mu.Lock()
		defer mu.Unlock()
		steps = append(steps, step)
		n.t.Logf("%s: %s", command, step)
		if n.onStep != nil {
			n.onStep(step)
		}
	}
	var out bytes.Buffer
	err = install.Run(n.t.Context(), command, o, &out)
	return steps, err
}

func (n *fakeNode) poll(what string, condition func(context.Context) error) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), patience)
	defer cancel()
	n.must(process.Poll(ctx, what, condition))
}

// works wants that a kubelet that is started now, with the kubeconfig that is there now, has
// somebody who answers it. A hub may be away for a moment, while it is replaced.
func (n *fakeNode) works() {
	n.t.Helper()
	n.poll("kubelet's kubeconfig works", n.answers)
}

func (n *fakeNode) answers(ctx context.Context) error {
	c, err := n.config()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		return err
	}
	_, err = client.CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
	return err
}

func (n *fakeNode) hubURL() string {
	return "https://" + strings.TrimPrefix(n.options.HubFlags[0], "listen-address=")
}

// kubeletUses is the server of the kubelet that runs.
func (n *fakeNode) kubeletUses() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.past[len(n.past)-1]
}

// installed wants kubelet at the hub, and the backup.
func (n *fakeNode) installed() {
	n.t.Helper()
	n.works()
	c, err := n.config()
	n.must(err)
	if c.Host != n.hubURL() || n.kubeletUses() != n.hubURL() {
		n.t.Errorf("kubelet's kubeconfig leads to %s, and kubelet uses %s, want %s", c.Host, n.kubeletUses(), n.hubURL())
	}
	if b, err := os.ReadFile(n.at("/var/lib/edgehub-install/kubelet.conf")); err != nil || !bytes.Equal(b, n.original) {
		n.t.Errorf("the backup is not kubelet's kubeconfig as it was: %v\n%.200s", err, b)
	}
	n.sameMode()
}

// sameMode wants that kubelet's kubeconfig has the mode that it had.
func (n *fakeNode) sameMode() {
	n.t.Helper()
	if info, err := os.Stat(n.at(kubeletConf)); err != nil || info.Mode().Perm() != 0o640 {
		n.t.Errorf("mode of kubelet's kubeconfig = %v, %v, want 0640", info.Mode(), err)
	}
}

// untouched wants kubelet as it was, and nothing of the hub's but what it has recorded.
func (n *fakeNode) untouched() {
	n.t.Helper()
	if b, err := os.ReadFile(n.at(kubeletConf)); err != nil || !bytes.Equal(b, n.original) {
		n.t.Errorf("kubelet's kubeconfig is not as it was: %v\n%.200s", err, b)
	}
	n.sameMode()
	if n.kubeletUses() == n.hubURL() {
		n.t.Error("kubelet uses the hub")
	}
	n.works()
	for _, dir := range []string{"/etc/kubernetes", "/etc/kubernetes/manifests", "/var/lib/edgehub-install", "/usr/local/bin", "/etc/systemd/system"} {
		entries, err := os.ReadDir(n.at(dir))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			n.t.Error(err)
		}
		for _, e := range entries {
			if e.Name() != "kubelet.conf" && e.Name() != "manifests" || dir == "/var/lib/edgehub-install" {
				n.t.Errorf("%s/%s is left", dir, e.Name())
			}
		}
	}
	if _, err := os.Stat(n.at("/var/lib/edgehub-install")); err == nil {
		n.t.Error("the state directory is left")
	}
}
