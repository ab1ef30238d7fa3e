// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
)

const (
	nodeName = "machine"
	image    = "edgehub.test/edgehub"
	tag      = "test"
)

// A machine is a node with a real kubelet, containerd, the image, and what a hub looks
// for in its host paths.
type machine struct {
	server           *url.URL // the API server's for pods: they do not reach loopback
	dir              string
	port, metricPort int // for the hub
}

func newMachine(t *testing.T, cp *controlplane.ControlPlane) *machine {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	ctx := t.Context()
	archive := filepath.Join(t.TempDir(), "image.tar")
	must(buildImage(ctx, archive))
	runtime, err := node.NewContainerd(ctx, "")
	must(err)
	process.Run(t, runtime)
	out, err := exec.CommandContext(ctx, "ctr", "--address", runtime.Socket(), "--namespace", "k8s.io", "images", "import", archive).CombinedOutput()
	if err != nil {
		t.Fatalf("ctr images import: %v\n%s", err, out)
	}
	config, err := cp.NodeConfig(nodeName)
	must(err)
	kubelet, err := node.NewKubelet(ctx, node.KubeletConfig{Name: nodeName, Client: config}, runtime, cp.CAFile())
	must(err)
	process.Run(t, kubelet)
	must(cp.WaitNodeReady(ctx, nodeName))

	m := &machine{}
	// Not below t.TempDir, which is removed before the kubelet has ended its pods.
	m.dir, err = os.MkdirTemp("", "edgehub-chart-node-")
	must(err)
	t.Cleanup(func() { must(os.RemoveAll(m.dir)) })
	must(m.hostPaths(cp, config))
	for _, p := range []*int{&m.port, &m.metricPort} {
		*p, err = port.Free()
		must(err)
	}
	m.server, err = forward(t, cp, kubelet.IP())
	must(err)
	return m
}

// buildImage makes the image as `make image` does.
func buildImage(ctx context.Context, archive string) error {
	root, err := controlplane.Root()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "run", "./build/image", "-o", archive, "-tag", image+":"+tag)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go run ./build/image: %w\n%s", err, out)
	}
	return nil
}

// hostPaths lays out what the chart mounts from the node.
func (m *machine) hostPaths(cp *controlplane.ControlPlane, config *rest.Config) error {
	ca, e1 := os.ReadFile(cp.CAFile())
	certificate, e2 := os.ReadFile(config.CertFile)
	key, e3 := os.ReadFile(config.KeyFile)
	pki, kubelet := m.path("kubernetes", "pki"), m.path("kubelet-pki")
	if err := errors.Join(e1, e2, e3, os.MkdirAll(pki, 0o755), os.MkdirAll(kubelet, 0o700)); err != nil {
		return err
	}
	return errors.Join(os.WriteFile(filepath.Join(pki, "ca.crt"), ca, 0o600),
		os.WriteFile(filepath.Join(kubelet, "kubelet-client-current.pem"), append(certificate, key...), 0o600))
}

func (m *machine) path(elem ...string) string {
	return filepath.Join(append([]string{m.dir}, elem...)...)
}

// values are helm's arguments for what is different about this machine.
func (m *machine) values(server string) []string {
	set := map[string]string{
		"image.repository": image, "image.tag": tag, "image.pullPolicy": "Never",
		"webhook.env[0].name": "KUBERNETES_SERVICE_HOST", "webhook.env[0].value": m.server.Hostname(),
		"webhook.env[1].name": "KUBERNETES_SERVICE_PORT",
		"hub.mode":            "plain", "hub.serverURLs": "{" + server + "}", "hub.flags.serving-certificate": "csr",
		"hub.port": strconv.Itoa(m.port), "hub.metricsPort": strconv.Itoa(m.metricPort),
		"hub.paths.kubernetes": m.path("kubernetes"), "hub.paths.kubeletPKI": m.path("kubelet-pki"), "hub.paths.data": m.path("data"),
		"hub.nodeSelector.openyurt\\.io/is-edge-worker": "null",
	}
	args := []string{"--set-string", "webhook.env[1].value=" + m.server.Port(), "--set-string", "hub.nodeSelector.edgehub\\.test/edge=true"}
	for name, value := range set {
		args = append(args, "--set", name+"="+value)
	}
	return args
}

// forward lets pods reach the API server at an address of the node's, by a certificate of
// the cluster's authority for that address.
func forward(t *testing.T, cp *controlplane.ControlPlane, ip string) (*url.URL, error) {
	authority, err := tls.LoadX509KeyPair(cp.CAFile(), cp.CAKeyFile())
	if err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: "forward"}, IPAddresses: []net.IP{net.ParseIP(ip)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, authority.Leaf, key.Public(), authority.PrivateKey)
	if err != nil {
		return nil, err
	}
	target, err := url.Parse(cp.URL())
	if err != nil {
		return nil, err
	}
	transport, err := rest.TransportFor(rest.AnonymousClientConfig(cp.AdminConfig()))
	if err != nil {
		return nil, err
	}
	listener, err := tls.Listen("tcp", net.JoinHostPort(ip, "0"), &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}})
	if err != nil {
		return nil, err
	}
	s := &http.Server{ReadHeaderTimeout: time.Minute, Handler: &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, Transport: transport, FlushInterval: -1,
		ErrorLog: log.New(io.Discard, "", 0), // clients that leave
	}}
	go func() { _ = s.Serve(listener) }()
	t.Cleanup(func() { _ = s.Close() })
	return url.Parse("https://" + listener.Addr().String())
}
