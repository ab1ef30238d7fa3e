// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"embed"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// rootfs holds what is in the image besides the programs; the Dockerfile copies it too.
//
//go:embed rootfs
var rootfs embed.FS

// config is what the last stage of the Dockerfile says.
func config(version string) v1.Config {
	return v1.Config{
		User:       "65532:65532",
		Env:        []string{"PATH=/"},
		Entrypoint: []string{"/edgehub"},
		WorkingDir: "/",
		Labels: map[string]string{
			"org.opencontainers.image.title":       "edgehub",
			"org.opencontainers.image.description": "The node agent, the companion in the cluster and the command line of edgehub",
			"org.opencontainers.image.licenses":    "Apache-2.0",
			"org.opencontainers.image.source":      "https://github.com/edgehub/edgehub",
			"org.opencontainers.image.version":     version,
		},
	}
}

// contents are all that an image depends on.
type contents struct {
	platforms []v1.Platform
	programs  map[string][]file // by platform
	tag       name.Tag
	version   string
	created   time.Time
}

// A file is one of a layer. The name of a folder ends in /.
type file struct {
	name string
	mode int64
	data []byte
}

// base are the files that do not depend on the platform, in the order of a layer.
func base() (files []file, err error) {
	err = fs.WalkDir(rootfs, "rootfs", func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == "rootfs" {
			return err
		}
		f := file{strings.TrimPrefix(p, "rootfs/"), 0o644, nil}
		if d.IsDir() {
			f.name, f.mode = f.name+"/", 0o755
		} else if f.data, err = rootfs.ReadFile(p); err != nil {
			return err
		}
		files = append(files, f)
		return nil
	})
	return append(files, file{"tmp/", 0o1777, nil}), err
}

// newIndex returns the image for all platforms, inside an index that names it.
func newIndex(c contents) (v1.ImageIndex, v1.Hash, error) {
	var images v1.ImageIndex = empty.Index
	for _, p := range c.platforms {
		image, err := newImage(c, p)
		if err != nil {
			return nil, v1.Hash{}, fmt.Errorf("image for %s: %w", p, err)
		}
		images = mutate.AppendManifests(images, mutate.IndexAddendum{Add: image, Descriptor: v1.Descriptor{Platform: &p}})
	}
	digest, err := images.Digest()
	if err != nil {
		return nil, v1.Hash{}, err
	}
	return mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: images, Descriptor: v1.Descriptor{Annotations: map[string]string{
		"org.opencontainers.image.ref.name": c.tag.TagStr(),
		"io.containerd.image.name":          reference(c.tag), // what ctr and docker load go by
	}}}), digest, nil
}

// reference is a tag's full name as container runtimes spell it.
func reference(tag name.Tag) string {
	return strings.Replace(tag.Name(), name.DefaultRegistry+"/", "docker.io/", 1)
}

// newImage has a layer for each program: a registry and a node keep the layers of what
// has not changed.
func newImage(c contents, p v1.Platform) (v1.Image, error) {
	files, err := base()
	if err != nil {
		return nil, err
	}
	layers := [][]file{files}
	programs := slices.SortedFunc(slices.Values(c.programs[p.String()]), func(a, b file) int { return strings.Compare(a.name, b.name) })
	for _, program := range programs {
		layers = append(layers, []file{program})
	}
	image := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, files := range layers {
		layer, err := newLayer(files, c.created)
		if err != nil {
			return nil, err
		}
		history := v1.History{Created: v1.Time{Time: c.created}, CreatedBy: "edgehub/build/image", Comment: path.Clean("/" + files[0].name)}
		if image, err = mutate.Append(image, mutate.Addendum{Layer: layer, History: history}); err != nil {
			return nil, err
		}
	}
	file, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture = p.OS, p.Architecture
	file.Created = v1.Time{Time: c.created}
	file.Config = config(c.version)
	return mutate.ConfigFile(image, file)
}

func newLayer(files []file, created time.Time) (v1.Layer, error) {
	var b bytes.Buffer
	if err := archive(&b, files, created); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil },
		tarball.WithMediaType(types.OCILayer), tarball.WithCompressedCaching)
}

// archive writes files as root's, all of one time.
func archive(to io.Writer, files []file, created time.Time) error {
	w := tar.NewWriter(to)
	for _, f := range files {
		h := &tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: f.mode, Size: int64(len(f.data)), ModTime: created, Format: tar.FormatPAX}
		if strings.HasSuffix(f.name, "/") {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			return err
		}
		if _, err := w.Write(f.data); err != nil {
			return err
		}
	}
	return w.Close()
}
