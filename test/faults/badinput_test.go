// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// A misuse is a start that must fail.
type misuse struct {
	name  string
	args  []string           // over those that are right
	spoil func(t *testing.T) // what is wrong around it
	want  []string           // in the error, each
	not   []string           // not in the error
	lines int                // of the error; 0: one
}

// klogLine is what the program logs before it gives up.
var klogLine = regexp.MustCompile(`^[IWE]\d{4} `)

// TestBadInput starts the program with what it cannot work with: it ends with exit
// code 1 and an error that says what is wrong and where, all flags in one go, and
// what earlier runs have recorded is as it was.
func TestBadInput(t *testing.T) {
	r := newRig(t, nil)
	data := record(r)
	root, err := controlplane.Root()
	r.Must(err)
	binary := filepath.Join(root, ".bin", "edgehub")
	other := filepath.Join(t.TempDir(), "other") // of another data directory
	garbage := filepath.Join(t.TempDir(), "garbage.pem")
	r.Must(os.WriteFile(garbage, []byte("-----BEGIN CERTIFICATE-----\nnot base64\n-----END CERTIFICATE-----\n"), 0o600))
	_, otherKey, err := r.ControlPlane.NodeCredentials("n2")
	r.Must(err)
	userCert, userKey, err := r.ControlPlane.ClientCert("alice")
	r.Must(err)
	busy, err := net.Listen("tcp", "127.0.0.1:0")
	r.Must(err)
	defer busy.Close()
	taken := busy.Addr().String()
	journal := filepath.Join(data, "journal")
	for _, m := range []misuse{
		{name: "bad flags", args: []string{"--server-url=http://10.0.0.1", "--listen-address=0.0.0.0:10268", "--cache-max-bytes=-1", "--feed-linger=0s", "--data-dir=relative", "--metrics-listen-address=nowhere"},
			want: []string{"--server-url", "--listen-address", "--cache-max-bytes", "--feed-linger", "--data-dir", "--metrics-listen-address"}, lines: 6},
		{name: "unknown flag", args: []string{"--no-such-flag"}, want: []string{"--no-such-flag"}, not: []string{"--server-url"}},
		{name: "flags that are no numbers", args: []string{"--cache-max-scopes=many", "--feed-linger=long"}, want: []string{"--cache-max-scopes", "many", "--feed-linger", "long"}, not: []string{"must be above 0"}, lines: 2},
		{name: "no file of the CA", args: []string{"--server-ca-file=/none/ca.crt"}, want: []string{"/none/ca.crt"}},
		{name: "CA that is none", args: []string{"--server-ca-file=" + garbage}, want: []string{garbage}},
		{name: "no file of the clients' CA", args: []string{"--client-ca-file=/none/ca.crt"}, want: []string{"/none/ca.crt"}},
		{name: "clients' CA that is none", args: []string{"--client-ca-file=" + garbage}, want: []string{garbage}},
		{name: "no certificate", args: []string{"--node-cert-file=/none/node.crt"}, want: []string{"/none/node.crt"}},
		{name: "certificate that is none", args: []string{"--node-cert-file=" + garbage}, want: []string{garbage}},
		{name: "key of another certificate", args: []string{"--node-key-file=" + otherKey}, want: []string{otherKey}},
		{name: "certificate of no node", args: []string{"--node-cert-file=" + userCert, "--node-key-file=" + userKey}, want: []string{userCert}},
		{name: "address in use", args: []string{"--listen-address=" + taken}, want: []string{taken, "in use"}},
		{name: "metrics address in use", args: []string{"--metrics-listen-address=" + taken}, want: []string{taken, "in use"}},
		{name: "address of nobody", args: []string{"--link-local-address=169.254.77.77:10268", "--link-local-interface="}, want: []string{"169.254.77.77:10268"}},
		{name: "file in the place of the data directory", args: []string{"--data-dir=" + garbage}, want: []string{garbage}},
		{name: "file in the place of the journal", args: []string{"--data-dir=" + other}, want: []string{filepath.Join(other, "journal")}, spoil: func(t *testing.T) {
			r.Must(os.MkdirAll(other, 0o700))
			r.Must(os.WriteFile(filepath.Join(other, "journal"), []byte("mine"), 0o600))
		}},
		{name: "read-only journal", want: []string{journal, "read-only"}, spoil: func(t *testing.T) { readOnly(t, journal) }},
		{name: "journal of a newer format", want: []string{filepath.Join(journal, "FORMAT"), "newer"}, spoil: func(t *testing.T) {
			text := "edgehub-journal 2"
			replace(t, filepath.Join(journal, "FORMAT"), fmt.Appendf(nil, "%s %08x\n", text, crc32.Checksum([]byte(text), crc32.MakeTable(crc32.Castagnoli))))
		}},
		{name: "journal with a segment of a newer format", want: []string{".seg", "newer"}, spoil: func(t *testing.T) {
			segments, err := filepath.Glob(filepath.Join(journal, "*", "*.seg"))
			if err != nil || len(segments) == 0 {
				t.Fatalf("no segments in %s: %v", journal, err)
			}
			b, err := os.ReadFile(segments[0])
			if err != nil {
				t.Fatal(err)
			}
			b[8] = 2
			crc := crc32.Checksum(b[:12], crc32.MakeTable(crc32.Castagnoli))
			for i := range 4 {
				b[12+i] = byte(crc >> (8 * i))
			}
			replace(t, segments[0], b)
		}},
		{name: "journal of a hub that runs", want: []string{journal}, spoil: func(t *testing.T) {
			if err := r.Hub.Start(t.Context()); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := r.Hub.Stop(); err != nil {
					t.Error(err)
				}
			})
		}},
	} {
		t.Run(m.name, func(t *testing.T) { m.run(t, r, binary, data) })
	}
	// And with all as it should be, everything is still there.
	r.Link.Cut()
	r.Must(r.Hub.Start(t.Context()))
	status, body, err := r.Through(r.ControlPlane.TokenConfig(operator)).Fetch(t.Context(), "/api/v1/secrets", rig.JSON)
	if err != nil || status != 200 || !strings.Contains(string(body), "kept") {
		t.Errorf("what was recorded before = %d, %v: %.200s", status, err, body)
	}
}

// record has a hub record something, ends it, and returns its data directory.
func record(r *rig.Rig) string {
	ctx := r.T.Context()
	w := map[string]any{"apiVersion": "v1", "kind": "Secret", "metadata": map[string]any{"name": "kept", "namespace": "a"}}
	apply(ctx, r, "secrets", w)
	process.Run(r.T, r.Hub)
	r.WaitLink(true)
	for _, path := range []string{"/api/v1/secrets", "/api/v1/namespaces", "/version"} {
		if status, body, err := r.Through(r.ControlPlane.TokenConfig(operator)).Fetch(ctx, path, rig.JSON); err != nil || status != 200 {
			r.T.Fatalf("%s = %d, %v: %s", path, status, err, body)
		}
	}
	r.Must(r.Hub.Stop())
	return r.Hub.DataDir()
}

func (m misuse) run(t *testing.T, r *rig.Rig, binary, data string) {
	if m.spoil != nil {
		m.spoil(t)
	}
	free, err := port.Free()
	if err != nil {
		t.Fatal(err)
	}
	metrics, err := port.Free()
	if err != nil {
		t.Fatal(err)
	}
	args := append([]string{
		"--server-ca-file=" + r.ControlPlane.CAFile(), "--client-ca-file=" + r.ControlPlane.CAFile(), "--node-cert-file=" + r.Node.CertFile, "--node-key-file=" + r.Node.KeyFile,
		"--data-dir=" + data, fmt.Sprintf("--listen-address=127.0.0.1:%d", free), fmt.Sprintf("--metrics-listen-address=127.0.0.1:%d", metrics),
	}, m.args...)
	if !strings.Contains(strings.Join(args, " "), "--server-url") {
		args = append(args, "--server-url="+r.Link.URL())
	}
	// The serving certificate is made anew for other addresses; its authority and
	// all that is recorded must be as they were.
	before, err := fingerprint(data)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	start := time.Now()
	out, err := exec.CommandContext(ctx, binary, args...).CombinedOutput()
	took := time.Since(start)
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 {
		t.Errorf("%v, want exit status 1:\n%s", err, out)
	}
	var lines []string
	for line := range strings.Lines(string(out)) {
		if !klogLine.MatchString(line) {
			lines = append(lines, line)
		}
	}
	text := strings.Join(lines, "")
	if !strings.HasPrefix(text, "edgehub: ") || len(lines) != max(m.lines, 1) {
		t.Errorf("%d lines, want %d:\n%s", len(lines), max(m.lines, 1), out)
	}
	for _, want := range m.want {
		if !strings.Contains(text, want) {
			t.Errorf("the error does not name %s:\n%s", want, text)
		}
	}
	for _, not := range m.not {
		if strings.Contains(text, not) {
			t.Errorf("the error names %s:\n%s", not, text)
		}
	}
	after, err := fingerprint(data)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range []map[string]string{before, after} {
		delete(m, filepath.Join(data, "pki", "serving.pem"))
	}
	if d := cmp.Diff(before, after); d != "" && m.name != "journal of a hub that runs" {
		t.Errorf("files have changed:\n%s", d)
	}
	t.Logf("after %v: %s", took.Round(time.Millisecond), text)
}

// replace puts other content into a file for the length of a test.
func replace(t *testing.T, path string, content []byte) {
	t.Helper()
	old, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, content, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(path, old, 0o600); err != nil {
			t.Error(err)
		}
	})
}

// readOnly mounts a folder over itself for the length of a test, so that not even
// root can write there.
func readOnly(t *testing.T, dir string) {
	t.Helper()
	err := unix.Mount(dir, dir, "", unix.MS_BIND, "")
	if errors.Is(err, unix.EPERM) {
		t.Skip("needs root: a bind mount that is read-only")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	if err := unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
}
