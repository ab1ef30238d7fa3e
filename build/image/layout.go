// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

// write writes the image as an OCI layout, a folder or a file in tar's format, and
// returns the image's digest.
func write(out string, c contents) (digest v1.Hash, err error) {
	index, digest, err := newIndex(c)
	if err != nil {
		return v1.Hash{}, err
	}
	if !strings.HasSuffix(out, ".tar") {
		if there, err := os.ReadDir(out); err == nil && len(there) > 0 {
			return v1.Hash{}, fmt.Errorf("-o: %s is not empty", out)
		}
		_, err := layout.Write(out, index)
		return digest, err
	}
	dir, err := os.MkdirTemp(filepath.Dir(out), ".image-")
	if err != nil {
		return v1.Hash{}, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if _, err := layout.Write(dir, index); err != nil {
		return v1.Hash{}, err
	}
	return digest, tarFolder(out, dir, c)
}

// tarFolder writes all files below dir, in the order of their names.
func tarFolder(out, dir string, c contents) error {
	var files []file
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || path == dir {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		if d.IsDir() {
			files = append(files, file{name + "/", 0o755, nil})
			return nil
		}
		data, err := os.ReadFile(path)
		files = append(files, file{name, 0o644, data})
		return err
	})
	if err != nil {
		return err
	}
	f, err := os.Create(out)
	if err != nil {
		return err
	}
	return errors.Join(archive(f, files, c.created), f.Close())
}
