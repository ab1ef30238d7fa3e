// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/edgehub/edgehub/pkg/app"
	"github.com/edgehub/edgehub/pkg/install"
)

// The hub's defaults are known here, too, since the hub knows this package.
func TestDefaultsAreTheHubs(t *testing.T) {
	hub := app.DefaultOptions()
	if got := install.DefaultOptions().DataDir; got != hub.DataDir {
		t.Errorf("DataDir = %s, want the hub's, %s", got, hub.DataDir)
	}
	var out bytes.Buffer
	if err := install.Kubeconfig([]string{"--help"}, &out); !errors.Is(err, pflag.ErrHelp) || !strings.Contains(out.String(), hub.NodeCertFile) {
		t.Errorf("help of kubeconfig does not have the hub's certificate, %s: %v", hub.NodeCertFile, err)
	}
	o := install.DefaultOptions()
	o.Image = "x"
	// The addresses that are looked at are those that the hub has by default.
	o.HubFlags = append(o.HubFlags, "listen-address="+hub.ListenAddress, "metrics-listen-address="+hub.MetricsListenAddress)
	if diff := cmp.Diff([]string{"127.0.0.1:10268", "127.0.0.1:10267"}, []string{hub.ListenAddress, hub.MetricsListenAddress}); diff != "" {
		t.Errorf("the hub's addresses (-known here +its):\n%s", diff)
	}
}

func TestValidate(t *testing.T) {
	check := func(args []string) error {
		o := app.DefaultOptions()
		return o.Parse(args)
	}
	for _, tc := range []struct {
		name, command string
		args, want    []string
	}{
		{"good", "install", []string{"--image=x"}, nil},
		{"good flags of the hub", "install", []string{"--mode=systemd", "--hub-flag=link-local-address=169.254.2.1:10268", "--hub-flag=encrypt-all", "--hub-flag=shared-resources=services", "--hub-flag=shared-resources=pods", "--hub-flag=offline-max-age=user=1h", "--hub-flag=v=2"}, nil},
		{"no image", "install", nil, []string{"--image: required"}},
		{"a mode that is none", "install", []string{"--mode=docker"}, []string{"--mode: "}},
		{"relative paths", "install", []string{"--image=x", "--root=host", "--state-dir=/a/../b", "--kubelet-kubeconfig=k", "--static-pod-dir=/"}, []string{"--root: ", "--kubelet-kubeconfig: ", "--static-pod-dir: ", "--state-dir: "}},
		{"a state directory in the hub's", "install", []string{"--image=x", "--state-dir=/var/lib/edgehub/install"}, []string{"--state-dir: "}},
		{"what comes from elsewhere", "install", []string{"--image=x", "--hub-flag=server-url=https://x", "--hub-flag=data-dir=/x", "--hub-flag=node-cert-file=/x/y"}, []string{"server-url comes from --server-url", "data-dir comes from --data-dir", "node-cert-file comes from kubelet's kubeconfig"}},
		{"no flag of the hub", "install", []string{"--image=x", "--hub-flag=nothing=1"}, []string{"--hub-flag: unknown flag: --nothing"}},
		{"no name", "install", []string{"--image=x", "--hub-flag=--v=1"}, []string{"--hub-flag: "}},
		{"twice", "install", []string{"--image=x", "--hub-flag=listen-address=127.0.0.1:1", "--hub-flag=listen-address=127.0.0.1:2"}, []string{"listen-address is given twice"}},
		{"addresses", "install", []string{"--image=x", "--hub-flag=listen-address=0.0.0.0:1", "--hub-flag=metrics-listen-address="}, []string{"listen-address: ", "metrics-listen-address: "}},
		{"a file", "install", []string{"--image=x", "--hub-flag=filter-config=/filters"}, []string{"filter-config: "}},
		{"quantities", "install", []string{"--image=x", "--cpu-request=many", "--memory-limit=x"}, []string{"--cpu-request: ", "--memory-limit: "}},
		{"times", "install", []string{"--image=x", "--watch", "--interval=0s", "--ready-timeout=0s"}, []string{"--ready-timeout: ", "--interval: "}},
		{"a DaemonSet", "install", []string{"--image=x", "--watch", "--daemonset=hub"}, []string{"--daemonset: "}},
		{"servers", "install", []string{"--image=x", "--server-url=http://x"}, []string{"--server-url: "}},
		{"a restart", "rollback", []string{"--kubelet-restart=reboot"}, []string{"--kubelet-restart: "}},
		{"install's flag", "uninstall", []string{"--image=x"}, []string{"unknown flag: --image"}},
		{"an argument", "uninstall", []string{"now"}, []string{`"now" is no flag`}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			// A dry run on a root that is not there: what passes fails at the first look.
			args := append([]string{tc.command}, tc.args...)
			if !strings.Contains(strings.Join(args, " "), "--root=") {
				args = append(args, "--root="+t.TempDir())
			}
			err := install.Main(context.Background(), append(args, "--dry-run"), new(bytes.Buffer), check)
			if tc.want == nil {
				if err == nil || !strings.Contains(err.Error(), "kubelet's kubeconfig: /etc/kubernetes/kubelet.conf: no such file") {
					t.Errorf("Main(%q) = %v, want no kubeconfig", args, err)
				}
				return
			}
			if err == nil {
				t.Fatalf("Main(%q) = nil, want an error", args)
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != len(tc.want) {
				t.Fatalf("Main(%q) = %q, want %d lines", args, lines, len(tc.want))
			}
			for i, want := range tc.want {
				if !strings.Contains(lines[i], want) {
					t.Errorf("line %d of Main(%q) = %q, want %s", i, args, lines[i], want)
				}
			}
		})
	}
}

const (
	doc   = "../../docs/install.md"
	begin = "<!-- flags: written by go test ./pkg/install -run FlagsDoc -update -->\n"
	end   = "<!-- end of flags -->\n"
)

// docs/install.md has the flags of the program.
func TestFlagsDoc(t *testing.T) {
	b, err := os.ReadFile(doc)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(b), begin)
	table, after, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatalf("%s has no place for the flags", doc)
	}
	want := flagsTable(t)
	if flag.Lookup("update").Value.String() == "true" {
		if err := os.WriteFile(doc, []byte(before+begin+want+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want, table); diff != "" {
		t.Errorf("%s is not the program's; -update writes it anew (-want +got):\n%s", doc, diff)
	}
}

func flagsTable(t *testing.T) string {
	t.Helper()
	commands := map[string][]string{}
	for _, c := range install.Commands() {
		o := install.DefaultOptions()
		fs := pflag.NewFlagSet(c, pflag.ContinueOnError)
		o.AddFlags(fs, c)
		fs.VisitAll(func(f *pflag.Flag) { commands[f.Name] = append(commands[f.Name], c) })
	}
	var out strings.Builder
	out.WriteString("| flag | of | default | meaning |\n|---|---|---|---|\n")
	seen := map[string]bool{}
	for _, c := range install.Commands() {
		o := install.DefaultOptions()
		fs := pflag.NewFlagSet(c, pflag.ContinueOnError)
		fs.SortFlags = false
		o.AddFlags(fs, c)
		fs.VisitAll(func(f *pflag.Flag) {
			if seen[f.Name] {
				return
			}
			seen[f.Name] = true
			if !strings.HasSuffix(f.Usage, ".") {
				t.Errorf("--%s: usage %q is no sentence", f.Name, f.Usage)
			}
			of, value := strings.Join(commands[f.Name], ", "), f.DefValue
			if len(commands[f.Name]) == len(install.Commands()) {
				of = "all"
			}
			if value == "[]" {
				value = ""
			}
			if value != "" {
				value = "`" + value + "`"
			}
			fmt.Fprintf(&out, "| `--%s` | %s | %s | %s |\n", f.Name, of, value, f.Usage)
		})
	}
	return out.String()
}
