// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Goldens are what is put onto a node.
func TestRender(t *testing.T) {
	n := node{server: "https://10.0.0.1:6443", caFile: "/etc/kubernetes/pki/ca.crt", certFile: "/var/lib/kubelet/pki/current.pem", keyFile: "/var/lib/kubelet/pki/current.pem"}
	for _, tc := range []struct {
		name   string
		change func(*Options)
	}{
		{"static-pod", func(*Options) {}},
		{"static-pod-flags", func(o *Options) {
			o.HubFlags = []string{"link-local-address=169.254.2.1:443", "filter-config=/etc/edgehub/filters.yaml", "encryption-key-file=/etc/edgehub-key/key", "v=2", "metrics-listen-address=0.0.0.0:9000"}
			o.ServerURLs, o.MemoryLimit = []string{"https://a:6443", "https://b:6443"}, ""
		}},
		{"systemd", func(o *Options) { o.Mode = ModeSystemd }},
		{"systemd-flags", func(o *Options) {
			o.Mode, o.BinDir, o.DataDir = ModeSystemd, "/opt/my bin", "/data/100%"
			o.HubFlags = []string{"link-local-address=169.254.2.1:443", `vmodule="a $b"=2`}
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			i := newInstaller(t, "")
			pki := filepath.Join(i.o.Root, "/var/lib/kubelet/pki")
			// As kubelet does it; the file is elsewhere, as nobody does it.
			must(t, os.MkdirAll(filepath.Join(i.o.Root, "/store"), 0o755))
			must(t, os.MkdirAll(pki, 0o755))
			must(t, os.Symlink("/store/2026.pem", pki+"/current.pem"))
			write(t, filepath.Join(i.o.Root, "/store/2026.pem"), nil)
			tc.change(&i.o)
			i.programHash = "00112233aabbccdd"
			if i.o.Mode == ModeSystemd {
				i.placement = unit{i}
			}
			v, err := i.wanted(&kubelet{node: n})
			must(t, err)
			again, err := i.wanted(&kubelet{node: n})
			must(t, err)
			if again.hash != v.hash || !strings.Contains(string(v.content), v.hash) {
				t.Errorf("hashes %s, %s of the same, want one, in the content", v.hash, again.hash)
			}
			i.o.HubFlags = append(i.o.HubFlags, "encrypt-all")
			if other, err := i.wanted(&kubelet{node: n}); err != nil || other.hash == v.hash {
				t.Errorf("another flag makes the same hash, %v", err)
			}
			golden := filepath.Join("testdata/placement", tc.name)
			got := strings.ReplaceAll(string(v.content), v.hash, "HASH")
			if *update {
				must(t, os.WriteFile(golden, []byte(got), 0o644))
			}
			want, err := os.ReadFile(golden)
			must(t, err)
			if diff := cmp.Diff(string(want), got); diff != "" {
				t.Errorf("%s; -update writes it anew (-want +got):\n%s", golden, diff)
			}
		})
	}
}

func TestQuoteWord(t *testing.T) {
	for in, want := range map[string]string{
		"--a=b": "--a=b", "a b": `"a b"`, "100%": "100%%", "$HOME": "$$HOME", `a"b`: `"a\"b"`, `a\b`: `"a\\b"`, "": `""`, "a;b": `"a;b"`, "a'b": `"a'b"`,
	} {
		if got := quoteWord(in); got != want {
			t.Errorf("quoteWord(%q) = %s, want %s", in, got, want)
		}
	}
}
