// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

// example has two platforms, each with programs of its own, in an order that is not
// that of the image.
func example(t *testing.T) contents {
	t.Helper()
	platforms, err := parsePlatforms("linux/amd64,linux/arm64")
	if err != nil {
		t.Fatal(err)
	}
	c := contents{platforms: platforms, programs: map[string][]file{}, tag: name.MustParseReference("edgehub:test").(name.Tag), version: "v1", created: time.Unix(1000, 0).UTC()}
	for _, p := range platforms {
		c.programs[p.String()] = []file{{"edgehub-webhook", 0o755, []byte("webhook for " + p.String())}, {"edgehub", 0o755, []byte("hub for " + p.String())}}
	}
	return c
}

func TestSameInputSameDigest(t *testing.T) {
	digests := map[string][]string{}
	for i, change := range []struct {
		name string
		do   func(*contents)
	}{
		{"same", func(*contents) {}},
		{"same", func(c *contents) { slices.Reverse(c.programs["linux/amd64"]) }},
		{"same", func(c *contents) { c.tag = name.MustParseReference("other:tag").(name.Tag) }},
		{"a byte of a program", func(c *contents) { c.programs["linux/arm64"][0].data[0]++ }},
		{"version", func(c *contents) { c.version = "v2" }},
		{"time", func(c *contents) { c.created = c.created.Add(time.Second) }},
		{"platforms", func(c *contents) { c.platforms = c.platforms[:1] }},
	} {
		c := example(t)
		change.do(&c)
		out := filepath.Join(t.TempDir(), "out")
		if i%2 == 1 {
			out += ".tar"
		}
		digest, err := write(out, c)
		if err != nil {
			t.Fatal(err)
		}
		digests[change.name] = append(digests[change.name], digest.String())
	}
	seen := map[string]string{}
	for change, all := range digests {
		if len(slices.Compact(all)) != 1 {
			t.Errorf("%s: digests %v, want one", change, all)
		}
		if other, ok := seen[all[0]]; ok {
			t.Errorf("%s has the digest of %s", change, other)
		}
		seen[all[0]] = change
	}
}

func TestTarHoldsTheFolder(t *testing.T) {
	dir, file := filepath.Join(t.TempDir(), "layout"), filepath.Join(t.TempDir(), "layout.tar")
	for _, out := range []string{dir, file} {
		if _, err := write(out, example(t)); err != nil {
			t.Fatal(err)
		}
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	files := 0
	for r := tar.NewReader(f); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeDir {
			continue
		}
		files++
		got, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if want, err := os.ReadFile(filepath.Join(dir, h.Name)); err != nil || string(got) != string(want) {
			t.Errorf("%s differs between the two forms (%v)", h.Name, err)
		}
	}
	// oci-layout, the two indexes, and of each of two platforms a manifest, a
	// configuration and two programs; the files besides the programs are shared.
	if files != 3+2*4+1 {
		t.Errorf("the archive has %d files, want 12", files)
	}
	if _, err := write(dir, example(t)); err == nil {
		t.Error("write() into a folder with another image succeeded")
	}
	if left, err := filepath.Glob(filepath.Dir(file) + "/.image-*"); len(left) > 0 {
		t.Errorf("write() left %v (%v)", left, err)
	}
}

func TestPlatforms(t *testing.T) {
	out := t.TempDir()
	if _, err := write(out, example(t)); err != nil {
		t.Fatal(err)
	}
	outer, err := layout.ImageIndexFromPath(out)
	if err != nil {
		t.Fatal(err)
	}
	m, err := outer.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"org.opencontainers.image.ref.name": "test", "io.containerd.image.name": "docker.io/library/edgehub:test"}, m.Manifests[0].Annotations); diff != "" {
		t.Errorf("annotations (-want +got):\n%s", diff)
	}
	index, err := outer.ImageIndex(m.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	if m, err = index.IndexManifest(); err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{"linux/amd64", "linux/arm64"} {
		d := m.Manifests[i]
		image, err := index.Image(d.Digest)
		if err != nil {
			t.Fatal(err)
		}
		c, err := image.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Platform().String(); got != want || d.Platform.String() != want {
			t.Errorf("platform of image %d = %s, in the index %s, want %s", i, got, d.Platform, want)
		}
		layers, err := image.Layers()
		if err != nil {
			t.Fatal(err)
		}
		got, err := program(layers[1])
		if err != nil || got != "edgehub: hub for "+want {
			t.Errorf("first program for %s = %q, %v", want, got, err)
		}
	}
}

// program returns the name and the content of a layer's only file.
func program(l v1.Layer) (string, error) {
	r, err := l.Uncompressed()
	if err != nil {
		return "", err
	}
	defer r.Close()
	t := tar.NewReader(r)
	h, err := t.Next()
	if err != nil {
		return "", err
	}
	data, err := io.ReadAll(t)
	return h.Name + ": " + string(data), err
}

func TestParsePlatforms(t *testing.T) {
	for _, tc := range []struct {
		in   string
		want string // "": an error
	}{
		{"linux/amd64", "[linux/amd64]"},
		{"linux/amd64,linux/arm64", "[linux/amd64 linux/arm64]"},
		{"", ""},
		{"linux", ""},
		{"amd64", ""},
		{"windows/amd64", ""},
		{"linux/arm/v7", ""},
		{"linux/amd64,", ""},
	} {
		got, err := parsePlatforms(tc.in)
		if s := fmt.Sprint(got); (err != nil) != (tc.want == "") || err == nil && s != tc.want {
			t.Errorf("parsePlatforms(%q) = %s, %v, want %q", tc.in, s, err, tc.want)
		}
	}
}

func TestSourceDate(t *testing.T) {
	for in, want := range map[string]int64{"": 0, "1700000000": 1700000000} {
		t.Setenv("SOURCE_DATE_EPOCH", in)
		if got, err := sourceDate(); err != nil || got.Unix() != want {
			t.Errorf("sourceDate() with %q = %v, %v, want %d", in, got, err, want)
		}
	}
	t.Setenv("SOURCE_DATE_EPOCH", "yesterday")
	if _, err := sourceDate(); err == nil {
		t.Error("sourceDate() with \"yesterday\" = nil error")
	}
}

// The image and the Dockerfile's are the same.
func TestDockerfile(t *testing.T) {
	text, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	got, err := lastStage(strings.ReplaceAll(string(text), "\\\n", " "))
	if err != nil {
		t.Fatal(err)
	}
	want := config("$VERSION")
	want.WorkingDir = "" // what a Dockerfile without it means
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("Dockerfile (-build/image +Dockerfile):\n%s", diff)
	}
	module, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	_, version, _ := strings.Cut(string(module), "\ngo ")
	version = strings.Join(strings.SplitN(strings.Fields(version)[0], ".", 3)[:2], ".")
	for _, line := range []string{"golang:" + version + " AS build", "cp -r build/image/rootfs/. /image/", "mkdir -m 1777 /image/tmp", `go build -trimpath -ldflags "-s -w" -o /image/ ./cmd/...`, "CGO_ENABLED=0"} {
		if !strings.Contains(string(text), line) {
			t.Errorf("the Dockerfile has no %q", line)
		}
	}
}

// lastStage reads the instructions after the last FROM that make the configuration.
func lastStage(text string) (c v1.Config, err error) {
	stages := strings.Split(text, "\nFROM ")
	for line := range strings.Lines(stages[len(stages)-1]) {
		instruction, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		switch instruction {
		case "USER":
			c.User = rest
		case "ENTRYPOINT":
			err = errors.Join(err, json.Unmarshal([]byte(rest), &c.Entrypoint))
		case "ENV":
			c.Env = append(c.Env, strings.ReplaceAll(rest, `"`, ""))
		case "LABEL":
			c.Labels = map[string]string{}
			for pair := range strings.SplitSeq(rest, "org.") {
				if key, value, ok := strings.Cut(strings.TrimSpace(pair), "="); ok {
					c.Labels["org."+key] = strings.Trim(value, `"`)
				}
			}
		}
	}
	return c, err
}
