// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// kubeconfigOf is one of two contexts, with fields of the cluster and the user that count.
func kubeconfigOf(cluster, user string) string {
	return `apiVersion: v1
kind: Config
current-context: b
contexts:
- {name: a, context: {cluster: a, user: a}}
- {name: b, context: {cluster: c, user: u}}
clusters:
- {name: a, cluster: {server: "http://not-this-one"}}
- {name: c, cluster: {` + cluster + `}}
users:
- {name: a, user: {token: not-this-one}}
- {name: u, user: {` + user + `}}
`
}

const (
	goodCluster = `server: "https://10.0.0.1:6443", certificate-authority: /etc/kubernetes/pki/ca.crt`
	goodUser    = `client-certificate: /pki/node.pem, client-key: /pki/node.pem`
)

func TestKubeconfigOfKubelet(t *testing.T) {
	inline := base64.StdEncoding.EncodeToString([]byte("PEM"))
	type answer struct {
		Server, CA, Cert, Key string
		Inline                map[string]string
	}
	good := answer{"https://10.0.0.1:6443", "/etc/kubernetes/pki/ca.crt", "/pki/node.pem", "/pki/node.pem", map[string]string{}}
	for _, tc := range []struct {
		name, raw string
		want      answer
	}{
		{"files", kubeconfigOf(goodCluster, goodUser), good},
		{"relative", kubeconfigOf(`server: "https://10.0.0.1:6443", certificate-authority: pki/ca.crt`, `client-certificate: ../x/c, client-key: k`),
			answer{"https://10.0.0.1:6443", "/etc/kubernetes/pki/ca.crt", "/etc/x/c", "/etc/kubernetes/k", map[string]string{}}},
		{"inline", kubeconfigOf(`server: "https://[fd00::1]:6443/", certificate-authority-data: `+inline, `client-certificate-data: `+inline+`, client-key-data: `+inline), answer{
			"https://[fd00::1]:6443", "/s/ca.crt", "/s/client.pem", "/s/client.pem", map[string]string{"/s/ca.crt": "PEM", "/s/client.pem": "PEM\nPEM"},
		}},
		{"data goes before a file", kubeconfigOf(goodCluster+", certificate-authority-data: "+inline, goodUser), answer{
			"https://10.0.0.1:6443", "/s/ca.crt", "/pki/node.pem", "/pki/node.pem", map[string]string{"/s/ca.crt": "PEM"},
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, err := parseKubeconfig([]byte(tc.raw))
			must(t, err)
			n, err := a.node("/etc/kubernetes", "/s")
			must(t, err)
			got := answer{n.server, n.caFile, n.certFile, n.keyFile, map[string]string{}}
			for file, content := range n.inline {
				got.Inline[file] = string(content)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("node() (-want +got):\n%s", diff)
			}
		})
	}
}

// Errors name the field, and no secret.
func TestKubeconfigOfKubeletRefused(t *testing.T) {
	for _, tc := range []struct {
		name, raw string
		want      []string // what is in the error's lines
	}{
		{"a token", kubeconfigOf(goodCluster, `token: secret`), []string{`users["u"].user.token: not supported`, `user.client-certificate: required`, `user.client-key: required`}},
		{"a token file", kubeconfigOf(goodCluster, goodUser+`, tokenFile: /t`), []string{`users["u"].user.tokenFile`}},
		{"a program", kubeconfigOf(goodCluster, goodUser+`, exec: {command: aws}`), []string{`users["u"].user.exec`}},
		{"a password", kubeconfigOf(goodCluster, goodUser+`, username: u, password: secret`), []string{`user.username`, `user.password`}},
		{"another's name", kubeconfigOf(goodCluster, goodUser+`, as: root`), []string{`users["u"].user.as`}},
		{"no authority", kubeconfigOf(`server: "https://10.0.0.1:6443"`, goodUser), []string{`clusters["c"].cluster.certificate-authority: required`}},
		{"no check", kubeconfigOf(goodCluster+`, insecure-skip-tls-verify: true`, goodUser), []string{`cluster.insecure-skip-tls-verify`}},
		{"another name of the server", kubeconfigOf(goodCluster+`, tls-server-name: x`, goodUser), []string{`cluster.tls-server-name`}},
		{"a proxy", kubeconfigOf(goodCluster+`, proxy-url: "http://p"`, goodUser), []string{`cluster.proxy-url`}},
		{"plain HTTP", kubeconfigOf(strings.Replace(goodCluster, "https", "http", 1), goodUser), []string{`clusters["c"].cluster.server`}},
		{"a path", kubeconfigOf(strings.Replace(goodCluster, ":6443", ":6443/k8s", 1), goodUser), []string{`clusters["c"].cluster.server`}},
		{"no context", "kind: Config\n", []string{`current-context: empty`}},
		{"a context that is missing", strings.Replace(kubeconfigOf(goodCluster, goodUser), "current-context: b", "current-context: x", 1), []string{`contexts: 0 are named "x"`}},
		{"a user that is missing", strings.Replace(kubeconfigOf(goodCluster, goodUser), "user: u", "user: x", 1), []string{`users: 0 are named "x"`}},
		{"two clusters of a name", strings.Replace(kubeconfigOf(goodCluster, goodUser), "- {name: a, cluster", "- {name: c, cluster", 1), []string{`clusters: 2 are named "c"`}},
		{"no YAML", "\t{", []string{`it is no kubeconfig`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			a, err := parseKubeconfig([]byte(tc.raw))
			if err == nil {
				_, err = a.node("/etc/kubernetes", "/s")
			}
			if err == nil {
				t.Fatal("node() = nil, want an error")
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != len(tc.want) {
				t.Fatalf("node() = %q, want %d lines", lines, len(tc.want))
			}
			for i, want := range tc.want {
				if !strings.Contains(lines[i], want) {
					t.Errorf("line %d of node() = %q, want %s", i, lines[i], want)
				}
			}
			if strings.Contains(err.Error(), "secret") {
				t.Errorf("node() = %v, which tells a secret", err)
			}
		})
	}
}

// certificate makes a pair in one PEM, of one that has signed it itself.
func certificate(t *testing.T, cn string, orgs ...string) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: cn, Organization: orgs}, NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw})...)
}

// newInstaller has a scratch root with a kubeconfig in it.
func newInstaller(t *testing.T, conf string) *installer {
	t.Helper()
	o := DefaultOptions()
	o.Root, o.Image = t.TempDir(), "edgehub:1"
	i := &installer{o: o, host: host{o.Root}, command: "install", at: o.hubAt()}
	i.placement = staticPod{i}
	for _, dir := range []string{"/etc/kubernetes/pki", "/pki", "/var/lib/edgehub-install"} {
		if err := os.MkdirAll(filepath.Join(o.Root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(o.Root, "/etc/kubernetes/pki/ca.crt"), certificate(t, "ca"))
	write(t, filepath.Join(o.Root, o.KubeletKubeconfig), []byte(conf))
	return i
}

// Who the certificate is of, and that the backup is the truth once the kubeconfig leads to
// the hub.
func TestReadKubelet(t *testing.T) {
	const user = `client-certificate: /pki/node.pem, client-key: /pki/node.pem`
	conf := kubeconfigOf(`server: "https://10.0.0.1:6443", certificate-authority: /etc/kubernetes/pki/ca.crt`, user)
	hub := kubeconfigOf(`server: "https://127.0.0.1:10268", certificate-authority: /etc/kubernetes/pki/ca.crt`, user)
	for _, tc := range []struct {
		name, conf, backup string
		cn, org            string
		points             bool
		wrong              string
	}{
		{"as it was", conf, "", "system:node:n", "system:nodes", false, ""},
		{"at the hub", hub, conf, "system:node:n", "system:nodes", true, ""},
		{"at the hub, without a backup", hub, "", "system:node:n", "system:nodes", false, "how it was before is not known"},
		{"at the hub, as the backup", hub, hub, "system:node:n", "system:nodes", false, "the backup of kubelet's kubeconfig: /var/lib/edgehub-install/kubelet.conf: it points at edgehub"},
		{"at the hub, with a broken backup", hub, "x", "system:node:n", "system:nodes", false, "/var/lib/edgehub-install/kubelet.conf"},
		{"another's certificate", conf, "", "admin", "system:masters", false, `it is of "admin" in ["system:masters"]`},
		{"a name without the group", conf, "", "system:node:n", "x", false, `client-certificate: it is of`},
		{"no certificate", conf, "", "", "", false, "client-certificate: /pki/node.pem: no such file"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			i := newInstaller(t, tc.conf)
			if tc.cn != "" {
				write(t, filepath.Join(i.o.Root, "/pki/node.pem"), certificate(t, tc.cn, tc.org))
			}
			if tc.backup != "" {
				write(t, filepath.Join(i.o.Root, i.inState(backupFile)), []byte(tc.backup))
			}
			k, err := i.readKubelet()
			if tc.wrong != "" {
				if err == nil || !strings.Contains(err.Error(), tc.wrong) || strings.Contains(err.Error(), i.o.Root) {
					t.Errorf("readKubelet() = %v, want %s, and paths of the host", err, tc.wrong)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if k.name != "n" || k.points != tc.points || string(k.original) != conf || k.server != "https://10.0.0.1:6443" {
				t.Errorf("readKubelet() = name %q, server %q, points %v, original\n%s", k.name, k.server, k.points, k.original)
			}
		})
	}
}

// What somebody else has written since it was read is not overwritten.
func TestReplaceKubeconfig(t *testing.T) {
	i := newInstaller(t, "theirs")
	k := &kubelet{raw: []byte("as it was read"), original: []byte("original"), points: true}
	i.o.Progress = func(string) {}
	if err := i.pointBack(k); !errors.Is(err, errMeddled) {
		t.Errorf("pointBack() = %v, want errMeddled", err)
	}
	if b, err := os.ReadFile(filepath.Join(i.o.Root, i.o.KubeletKubeconfig)); err != nil || string(b) != "theirs" {
		t.Errorf("kubelet's kubeconfig = %q, %v", b, err)
	}
	k.raw = []byte("theirs")
	if err := i.pointBack(k); err != nil || k.points {
		t.Errorf("pointBack() = %v, and it points at the hub: %v", err, k.points)
	}
}
