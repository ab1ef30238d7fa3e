// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package image holds the image to what docs/image.md says of it: nothing in it but the
// static programs and a user, the same digest from the same sources, and programs that
// start in a container, read-only and without rights.
package image

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
)

const (
	reference = "docker.io/library/edgehub:test"
	user      = 65532
)

// sources copies what the image is made from to a folder of its own: somebody may be
// editing the tree, and where it is must not be seen in the image.
func sources(t *testing.T, from string) string {
	t.Helper()
	to := t.TempDir()
	for _, part := range []string{"go.mod", "go.sum", "cmd", "pkg", "build"} {
		if out, err := exec.CommandContext(t.Context(), "cp", "-r", filepath.Join(from, part), to).CombinedOutput(); err != nil {
			t.Fatalf("cp: %v\n%s", err, out)
		}
	}
	return to
}

// assemble runs build/image in a folder of sources, and returns what it says. GOFLAGS of
// the test's own build, such as -race, are not the image's.
func assemble(t *testing.T, sources, out string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "run", "./build/image", "-o", out, "-tag", "edgehub:test")
	cmd.Dir = sources
	cmd.Env = append(os.Environ(), "GOFLAGS=", "SOURCE_DATE_EPOCH=1700000000")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	said, err := cmd.Output()
	if err != nil {
		t.Fatalf("go run ./build/image: %v\n%s", err, stderr.Bytes())
	}
	return strings.TrimSpace(string(said))
}

// open returns the image of this machine's platform.
func open(t *testing.T, path string) v1.Image {
	t.Helper()
	outer, err := layout.ImageIndexFromPath(path)
	if err != nil {
		t.Fatal(err)
	}
	for index := outer; ; {
		m, err := index.IndexManifest()
		if err != nil {
			t.Fatal(err)
		}
		if len(m.Manifests) != 1 {
			t.Fatalf("the index has %d manifests, want 1", len(m.Manifests))
		}
		if m.Manifests[0].MediaType.IsIndex() {
			if index, err = index.ImageIndex(m.Manifests[0].Digest); err != nil {
				t.Fatal(err)
			}
			continue
		}
		image, err := index.Image(m.Manifests[0].Digest)
		if err != nil {
			t.Fatal(err)
		}
		return image
	}
}

func TestImage(t *testing.T) {
	dir, archive := filepath.Join(t.TempDir(), "layout"), filepath.Join(t.TempDir(), "edgehub.tar")
	root, err := controlplane.Root()
	if err != nil {
		t.Fatal(err)
	}
	one := sources(t, root)
	first := assemble(t, one, dir)
	if again := assemble(t, sources(t, one), archive); again != first {
		t.Errorf("two builds say %s and %s, want one digest", first, again)
	}
	if name, digest, _ := strings.Cut(first, "@"); name != reference || !strings.HasPrefix(digest, "sha256:") {
		t.Errorf("build/image says %q, want %s@sha256:…", first, reference)
	}
	image := open(t, dir)
	t.Run("Configuration", func(t *testing.T) { configuration(t, image) })
	t.Run("Files", func(t *testing.T) { files(t, one, image) })
	t.Run("Containerd", func(t *testing.T) { inContainerd(t, archive, first) })
}

func configuration(t *testing.T, image v1.Image) {
	c, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if c.OS != "linux" || c.Architecture != runtime.GOARCH {
		t.Errorf("platform %s/%s, want linux/%s", c.OS, c.Architecture, runtime.GOARCH)
	}
	if want := fmt.Sprintf("%d:%[1]d", user); c.Config.User != want {
		t.Errorf("user %q, want %q", c.Config.User, want)
	}
	if diff := cmp.Diff([]string{"/edgehub"}, c.Config.Entrypoint); diff != "" {
		t.Errorf("entrypoint (-want +got):\n%s", diff)
	}
	if c.Config.Cmd != nil {
		t.Errorf("command %q, want none", c.Config.Cmd)
	}
	if got := c.Created.Unix(); got != 1700000000 {
		t.Errorf("created at %d, want SOURCE_DATE_EPOCH", got)
	}
	if c.Config.Labels["org.opencontainers.image.licenses"] != "Apache-2.0" {
		t.Errorf("labels %v", c.Config.Labels)
	}
}

// files compares all that is in the image with what should be.
func files(t *testing.T, sources string, image v1.Image) {
	programs, err := filepath.Glob(filepath.Join(sources, "cmd", "*", "main.go"))
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{"etc/": "drwxr-xr-x", "etc/passwd": "-rw-r--r--", "etc/group": "-rw-r--r--", "tmp/": "dtrwxrwxrwx"}
	for _, p := range programs {
		want[filepath.Base(filepath.Dir(p))] = "-rwxr-xr-x"
	}
	layers, err := image.Layers()
	if err != nil {
		t.Fatal(err)
	}
	got, size := map[string]string{}, int64(0)
	for _, l := range layers {
		compressed, err := l.Size()
		if err != nil {
			t.Fatal(err)
		}
		size += compressed
		for name, f := range contents(t, l) {
			if f.header.Uid != 0 || f.header.Gid != 0 || f.header.ModTime.Unix() != 1700000000 {
				t.Errorf("%s belongs to %d:%d and is of %v, want root's and SOURCE_DATE_EPOCH", name, f.header.Uid, f.header.Gid, f.header.ModTime)
			}
			got[name] = f.header.FileInfo().Mode().String()
			if strings.HasPrefix(name, "edgehub") {
				static(t, name, f.data)
			}
			if name == "etc/passwd" && !strings.Contains(string(f.data), fmt.Sprintf(":x:%d:%[1]d:", user)) {
				t.Errorf("etc/passwd has no user %d:\n%s", user, f.data)
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	t.Logf("%d programs, %.1f MB compressed", len(programs), float64(size)/1e6)
}

type file struct {
	header *tar.Header
	data   []byte
}

func contents(t *testing.T, l v1.Layer) map[string]file {
	t.Helper()
	r, err := l.Compressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	// Go's own takes a minute with the race detector.
	unzip := exec.CommandContext(t.Context(), "gzip", "-dc")
	unzip.Stdin = r
	data, err := unzip.Output()
	if err != nil {
		t.Fatalf("gzip: %v", err)
	}
	all := map[string]file{}
	for archive := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(archive)
		if err != nil {
			t.Fatal(err)
		}
		all[h.Name] = file{h, data}
	}
}

// static fails the test if a program needs anything besides the kernel.
func static(t *testing.T, name string, program []byte) {
	t.Helper()
	f, err := elf.NewFile(bytes.NewReader(program))
	if err != nil {
		t.Errorf("%s: %v", name, err)
		return
	}
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP || p.Type == elf.PT_DYNAMIC {
			t.Errorf("%s has a %v: it is not static", name, p.Type)
		}
	}
	if f.Section(".symtab") != nil || f.Section(".debug_info") != nil {
		t.Errorf("%s is not stripped", name)
	}
	if want := map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}[runtime.GOARCH]; f.Machine != want {
		t.Errorf("%s is for %v, want %v", name, f.Machine, want)
	}
}

// inContainerd runs the programs from the archive.
func inContainerd(t *testing.T, archive, built string) {
	node.RequireContainerd(t)
	c, err := node.NewContainerd(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	process.Run(t, c)
	ctr := func(args ...string) (string, error) {
		out, err := exec.CommandContext(t.Context(), "ctr", append([]string{"--address", c.Socket(), "--namespace", "k8s.io"}, args...)...).CombinedOutput()
		return string(out), err
	}
	if out, err := ctr("images", "import", archive); err != nil {
		t.Fatalf("ctr images import: %v\n%s", err, out)
	}
	listed, err := ctr("images", "ls")
	if _, digest, _ := strings.Cut(built, "@"); err != nil || !strings.Contains(listed, reference) || !strings.Contains(listed, digest) {
		t.Fatalf("ctr images ls has no %s (%v):\n%s", built, err, listed)
	}
	run := func(args ...string) (string, error) {
		return ctr(append([]string{"run", "--rm", "--read-only"}, args...)...)
	}
	for _, tc := range []struct {
		name string
		args []string // after the image's name
		want string
	}{
		{"entrypoint", nil, "--server-url"}, // required, says the hub
		{"hub", []string{"/edgehub", "--help"}, "--listen-address"},
		{"companion", []string{"/edgehub-webhook", "--help"}, "--webhook-listen-address"},
		{"by PATH", []string{"edgehub-webhook", "--help"}, "--webhook-listen-address"},
	} {
		out, err := run(append([]string{reference, strings.ReplaceAll(tc.name, " ", "-")}, tc.args...)...)
		if failed := tc.name == "entrypoint"; (err != nil) != failed || !strings.Contains(out, tc.want) {
			t.Errorf("%s: %q = %v, want %q in\n%s", tc.name, tc.args, err, tc.want, out)
		}
	}
	unprivileged(t, run)
}

// unprivileged shows by whose files the companion may read who it is.
func unprivileged(t *testing.T, run func(args ...string) (string, error)) {
	dir := t.TempDir()
	for owner, want := range map[int]string{0: "permission denied", user: "yaml"} {
		config := filepath.Join(dir, fmt.Sprint(owner))
		if err := os.WriteFile(config, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(config, owner, owner); err != nil {
			t.Fatal(err)
		}
		id := fmt.Sprintf("owner-%d", owner)
		out, err := run("--mount", "type=bind,src="+config+",dst=/config,options=rbind:ro", reference, id,
			"/edgehub-webhook", "--kubeconfig=/config", "--certificate-names=localhost")
		if err == nil || !strings.Contains(out, want) {
			t.Errorf("with a kubeconfig of user %d: %v, want %q in\n%s", owner, err, want, out)
		}
	}
}
