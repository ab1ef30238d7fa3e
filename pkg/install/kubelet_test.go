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

func TestKubeconfigOfKubelet(t *testing.T) {
	const (
		cluster = `server: "https://10.0.0.1:6443", certificate-authority: /etc/kubernetes/pki/ca.crt`
		user    = `client-certificate: /pki/node.pem, client-key: /pki/node.pem`
	)
	inline := base64.StdEncoding.EncodeToString([]byte("PEM"))
	type answer struct {
		Server, CA, Cert, Key string
		Inline                map[string]string
	}
	good := answer{"https://10.0.0.1:6443", "/etc/kubernetes/pki/ca.crt", "/pki/node.pem", "/pki/node.pem", map[string]string{}}
	for _, tc := range []struct {
		name, raw string
		want      answer
		wrong     []string // what the error has in it, a line each
	}{
		{"files", kubeconfigOf(cluster, user), good, nil},
		{"relative", kubeconfigOf(`server: "https://10.0.0.1:6443", certificate-authority: pki/ca.crt`, `client-certificate: ../x/c, client-key: k`),
			answer{"https://10.0.0.1:6443", "/etc/kubernetes/pki/ca.crt", "/etc/x/c", "/etc/kubernetes/k", map[string]string{}}, nil},
		{"inline", kubeconfigOf(`server: "https://[fd00::1]:6443/", certificate-authority-data: `+inline, `client-certificate-data: `+inline+`, client-key-data: `+inline), answer{
			"https://[fd00::1]:6443", "/s/ca.crt", "/s/client.pem", "/s/client.pem", map[string]string{"/s/ca.crt": "PEM", "/s/client.pem": "PEM\nPEM"},
		}, nil},
		{"data goes before a file", kubeconfigOf(cluster+", certificate-authority-data: "+inline, user), answer{
			"https://10.0.0.1:6443", "/s/ca.crt", "/pki/node.pem", "/pki/node.pem", map[string]string{"/s/ca.crt": "PEM"},
		}, nil},
		{"a token", kubeconfigOf(cluster, `token: secret`), answer{}, []string{`users["u"].user.token: not supported`, `user.client-certificate: required`, `user.client-key: required`}},
		{"a token file", kubeconfigOf(cluster, user+`, tokenFile: /t`), answer{}, []string{`users["u"].user.tokenFile`}},
		{"a program", kubeconfigOf(cluster, user+`, exec: {command: aws}`), answer{}, []string{`users["u"].user.exec`}},
		{"a password", kubeconfigOf(cluster, user+`, username: u, password: secret`), answer{}, []string{`user.username`, `user.password`}},
		{"another's name", kubeconfigOf(cluster, user+`, as: root`), answer{}, []string{`users["u"].user.as`}},
		{"no authority", kubeconfigOf(`server: "https://10.0.0.1:6443"`, user), answer{}, []string{`clusters["c"].cluster.certificate-authority: required`}},
		{"no check", kubeconfigOf(cluster+`, insecure-skip-tls-verify: true`, user), answer{}, []string{`cluster.insecure-skip-tls-verify`}},
		{"another name of the server", kubeconfigOf(cluster+`, tls-server-name: x`, user), answer{}, []string{`cluster.tls-server-name`}},
		{"a proxy", kubeconfigOf(cluster+`, proxy-url: "http://p"`, user), answer{}, []string{`cluster.proxy-url`}},
		{"plain HTTP", kubeconfigOf(strings.Replace(cluster, "https", "http", 1), user), answer{}, []string{`clusters["c"].cluster.server`}},
		{"a path", kubeconfigOf(strings.Replace(cluster, ":6443", ":6443/k8s", 1), user), answer{}, []string{`clusters["c"].cluster.server`}},
		{"no context", "kind: Config\n", answer{}, []string{`current-context: empty`}},
		{"a context that is missing", strings.Replace(kubeconfigOf(cluster, user), "current-context: b", "current-context: x", 1), answer{}, []string{`contexts: 0 are named "x"`}},
		{"a user that is missing", strings.Replace(kubeconfigOf(cluster, user), "user: u", "user: x", 1), answer{}, []string{`users: 0 are named "x"`}},
		{"two clusters of a name", strings.Replace(kubeconfigOf(cluster, user), "- {name: a, cluster", "- {name: c, cluster", 1), answer{}, []string{`clusters: 2 are named "c"`}},
		{"no YAML", "\t{", answer{}, []string{`it is no kubeconfig`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var n node
			a, err := parseKubeconfig([]byte(tc.raw))
			if err == nil {
				n, err = a.node("/etc/kubernetes", "/s")
			}
			if tc.wrong != nil {
				if err == nil {
					t.Fatalf("node() = %v, want an error", n)
				}
				lines := strings.Split(err.Error(), "\n")
				if len(lines) != len(tc.wrong) {
					t.Fatalf("node() = %q, want %d lines", lines, len(tc.wrong))
				}
				for i, want := range tc.wrong {
					if !strings.Contains(lines[i], want) {
						t.Errorf("line %d of node() = %q, want %s", i, lines[i], want)
					}
				}
				if strings.Contains(err.Error(), "secret") {
					t.Errorf("node() = %v, which tells a secret", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
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
