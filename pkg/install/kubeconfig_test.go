// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"k8s.io/client-go/tools/clientcmd"
)

var update = flag.Bool("update", false, "write the goldens anew")

func write(t *testing.T, file string, content []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, content, 0o600); err != nil {
		t.Fatal(err)
	}
}

const (
	kubeconfigDir = "testdata/kubeconfig"
	testCAFile    = kubeconfigDir + "/ca.crt"
)

// absolute is the path of a test's CA, which the goldens call by another name.
func absolute(t *testing.T) string {
	t.Helper()
	file, err := filepath.Abs(testCAFile)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// A way is what a kubeconfig says.
type way struct {
	Server, CAFile, CertFile, KeyFile, TokenFile string
	Embedded                                     bool
}

func TestKubeconfig(t *testing.T) {
	const podsFile = "/var/run/secrets/kubernetes.io/serviceaccount/token"
	ca := absolute(t)
	authority, err := os.ReadFile(ca)
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		args []string
		want way
	}{
		{"kubelet", []string{"--client=kubelet", "--certificate-authority=" + ca}, way{
			Server: "https://127.0.0.1:10268", CAFile: ca,
			CertFile: "/var/lib/kubelet/pki/kubelet-client-current.pem", KeyFile: "/var/lib/kubelet/pki/kubelet-client-current.pem",
		}},
		{"kubelet-embedded", []string{
			"--client=kubelet", "--certificate-authority=" + testCAFile, "--embed-certs", "--server=https://[::1]:10268/",
			"--node-cert-file=/etc/edge/node.crt", "--node-key-file=/etc/edge/node.key",
		}, way{Server: "https://[::1]:10268/", Embedded: true, CertFile: "/etc/edge/node.crt", KeyFile: "/etc/edge/node.key"}},
		{"kube-proxy", []string{"--client=kube-proxy", "--certificate-authority=" + testCAFile}, way{
			Server: "https://127.0.0.1:10268", Embedded: true, TokenFile: podsFile,
		}},
		{"kube-proxy-path", []string{"--client=kube-proxy", "--certificate-authority=" + ca, "--embed-certs=false"}, way{
			Server: "https://127.0.0.1:10268", CAFile: ca, TokenFile: podsFile,
		}},
		{"cni", []string{"--client=cni", "--certificate-authority=" + testCAFile, "--token-file=/run/cni/token"}, way{
			Server: "https://127.0.0.1:10268", Embedded: true, TokenFile: "/run/cni/token",
		}},
		{"coredns", []string{"--client", "coredns", "--certificate-authority", testCAFile}, way{
			Server: "https://169.254.2.1:10268", Embedded: true, TokenFile: podsFile,
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var out bytes.Buffer
			if err := Kubeconfig(tc.args, &out); err != nil {
				t.Fatalf("Kubeconfig(%q) = %v, want nil", tc.args, err)
			}
			golden(t, tc.name, strings.ReplaceAll(out.String(), ca, "/var/lib/edgehub/pki/ca.crt"))
			config, err := clientcmd.Load(out.Bytes())
			if err != nil {
				t.Fatalf("Load() = %v, want nil", err)
			}
			current := config.Contexts[config.CurrentContext]
			cluster, user := config.Clusters[current.Cluster], config.AuthInfos[current.AuthInfo]
			got := way{
				Server: cluster.Server, CAFile: cluster.CertificateAuthority, Embedded: bytes.Equal(cluster.CertificateAuthorityData, authority),
				CertFile: user.ClientCertificate, KeyFile: user.ClientKey, TokenFile: user.TokenFile,
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("Kubeconfig(%q) (-want +got):\n%s", tc.args, diff)
			}
			if user.Token != "" || len(user.ClientKeyData) > 0 || len(user.ClientCertificateData) > 0 {
				t.Error("the kubeconfig holds a credential itself")
			}
		})
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join(kubeconfigDir, name+".yaml")
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s; -update writes it anew (-want +got):\n%s", file, diff)
	}
}

func TestKubeconfigOutput(t *testing.T) {
	for client, mode := range map[string]fs.FileMode{"kubelet": 0o600, "kube-proxy": 0o600, "cni": 0o600, "coredns": 0o644} {
		dir := t.TempDir()
		file := filepath.Join(dir, "kubeconfig")
		write(t, file, []byte("what was there before"))
		args := []string{"--client=" + client, "--certificate-authority=" + absolute(t), "--output=" + file}
		if client == "cni" {
			args = append(args, "--token-file=/run/cni/token")
		}
		var out bytes.Buffer
		if err := Kubeconfig(args, &out); err != nil || out.Len() > 0 {
			t.Fatalf("Kubeconfig(%q) = %v with output %q, want nothing", args, err, &out)
		}
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != mode {
			t.Errorf("mode of the kubeconfig of %s = %v, %v, want %v", client, info.Mode(), err, mode)
		}
		if _, err := clientcmd.LoadFromFile(file); err != nil {
			t.Errorf("LoadFromFile() = %v, want nil", err)
		}
		// A directory in its place: it stays, and nothing else is left.
		if err := errors.Join(os.Remove(file), os.MkdirAll(filepath.Join(file, "x"), 0o700)); err != nil {
			t.Fatal(err)
		}
		if err := Kubeconfig(args, io.Discard); err == nil || !strings.Contains(err.Error(), "--output: ") {
			t.Errorf("Kubeconfig() onto a directory = %v, want an error of --output", err)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
			t.Errorf("files left = %v, %v, want none", entries, err)
		}
	}
}

// badAuthorities are files for --certificate-authority, by what is wrong with them.
func badAuthorities(t *testing.T) map[string]string {
	t.Helper()
	authority, err := os.ReadFile(testCAFile)
	if err != nil {
		t.Fatal(err)
	}
	key := bytes.ReplaceAll(authority, []byte("CERTIFICATE"), []byte("PRIVATE KEY"))
	junk := []byte("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
	files := map[string]string{"missing": filepath.Join(t.TempDir(), "missing")}
	for name, content := range map[string][]byte{
		"empty": nil, "cut": authority[:100], "cut behind one": slices.Concat(authority, authority[:100]),
		"with a key": slices.Concat(authority, key), "no certificate": junk,
	} {
		files[name] = filepath.Join(t.TempDir(), "ca.crt")
		write(t, files[name], content)
	}
	return files
}

func TestKubeconfigRefuses(t *testing.T) {
	dir := t.TempDir()
	ca := "--certificate-authority=" + absolute(t)
	type test struct {
		name string
		args []string
		want []string // lines of the error
	}
	tests := []test{
		{"nothing", nil, []string{`--client: "" is none of kubelet, kube-proxy, cni, coredns`}},
		{"a stranger", []string{"--client=scheduler", ca}, []string{`--client: "scheduler" is none of kubelet`}},
		{"an unknown flag", []string{"--token=x"}, []string{"unknown flag: --token"}},
		{"an argument", []string{"kubelet"}, []string{`"kubelet" is no flag`}},
		{"plain HTTP", []string{"--client=kubelet", ca, "--server=http://127.0.0.1:10268"}, []string{"--server: "}},
		{"a server with a path", []string{"--client=kubelet", ca, "--server=https://127.0.0.1/x"}, []string{"--server: "}},
		{"a server that is none", []string{"--client=kubelet", ca, "--server=127.0.0.1:10268"}, []string{"--server: "}},
		{"relative paths", []string{"--client=kubelet", "--certificate-authority=" + testCAFile, "--node-cert-file=a", "--node-key-file=b"},
			[]string{"--certificate-authority: ", "--node-cert-file: ", "--node-key-file: "}},
		{"a relative token file", []string{"--client=cni", ca, "--token-file=token"}, []string{"--token-file: "}},
		{"cni without a token", []string{"--client=cni", ca}, []string{"--token-file: required for cni: it runs on the host"}},
		{"kubelet with a token", []string{"--client=kubelet", ca, "--token-file=/token"}, []string{"--token-file: kubelet has a client certificate"}},
		{"kube-proxy with a certificate", []string{"--client=kube-proxy", ca, "--node-cert-file=/a", "--node-key-file=/b"}, []string{"--node-cert-file: ", "--node-key-file: "}},
		{"no output", []string{"--client=kubelet", ca, "--output="}, []string{"--output: empty"}},
		{"a directory that is not there", []string{"--client=kubelet", ca, "--output=" + filepath.Join(dir, "no", "file")}, []string{"--output: "}},
		{"no data directory", []string{"--client=kubelet", "--data-dir=" + dir}, []string{"--certificate-authority " + filepath.Join(dir, "pki", "ca.crt") + ": "}},
	}
	for name, path := range badAuthorities(t) {
		tests = append(tests, test{"an authority: " + name, []string{"--client=coredns", "--certificate-authority=" + path}, []string{"--certificate-authority " + path + ": "}})
	}
	for _, tc := range tests {
		t.Run(tc.name, func(t *testing.T) {
			var out bytes.Buffer
			err := Kubeconfig(tc.args, &out)
			if err == nil || out.Len() > 0 {
				t.Fatalf("Kubeconfig(%q) = %v with output %q, want an error alone", tc.args, err, &out)
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != len(tc.want) {
				t.Fatalf("Kubeconfig(%q) = %q, want %d lines", tc.args, lines, len(tc.want))
			}
			for i, want := range tc.want {
				if !strings.Contains(lines[i], want) {
					t.Errorf("line %d of Kubeconfig(%q) = %q, want %s", i, tc.args, lines[i], want)
				}
			}
		})
	}
}

func TestKubeconfigHelp(t *testing.T) {
	var out bytes.Buffer
	if err := Kubeconfig([]string{"--help"}, &out); !errors.Is(err, pflag.ErrHelp) || !strings.Contains(out.String(), "--client") {
		t.Errorf("Kubeconfig(--help) = %v with output %q, want the flags", err, &out)
	}
	flags := pflag.NewFlagSet("edgehub kubeconfig", pflag.ContinueOnError)
	new(kubeconfigOptions).addFlags(flags)
	flags.VisitAll(func(f *pflag.Flag) {
		if !strings.HasSuffix(f.Usage, ".") {
			t.Errorf("--%s: usage %q is no sentence", f.Name, f.Usage)
		}
	})
}
