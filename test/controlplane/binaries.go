// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
)

const module = "github.com/edgehub/edgehub"

// ErrNoRoot means that the test does not run inside the repository.
var ErrNoRoot = errors.New("no go.mod of " + module + " in the working directory or above")

// Root returns the repository's root folder: the working directory, or the
// nearest one above it, that holds this module's go.mod.
func Root() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		b, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && bytes.HasPrefix(b, []byte("module "+module+"\n")) {
			return dir, nil
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return "", err
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", ErrNoRoot
		}
		dir = parent
	}
}

// Binaries returns the folder of the programs named, or of all of them:
// etcd, kube-apiserver, kube-controller-manager, kube-scheduler, kubectl,
// kubemark, kubelet, helm, cri, pause, mkimage. What is missing is built by
// test/bin/build.sh, which takes some minutes the first time and says so on this
// process's standard error.
func Binaries(ctx context.Context, names ...string) (dir string, err error) {
	root, err := Root()
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(root, "test", "bin", "build.sh"), names...)
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("test/bin/build.sh %s: %w", strings.Join(names, " "), err)
	}
	return strings.TrimSpace(out.String()), nil
}

var built struct {
	sync.Mutex
	paths map[string]string
}

// Build builds this repository's cmd/NAME into .bin, once in a test process, and
// returns its path. GOFLAGS makes it another build, such as -race or -cover.
func Build(ctx context.Context, name string) (string, error) {
	built.Lock()
	defer built.Unlock()
	if path, ok := built.paths[name]; ok {
		return path, nil
	}
	root, err := Root()
	if err != nil {
		return "", err
	}
	path := filepath.Join(root, ".bin", name)
	// Another test may run the one that is there, or build it, too.
	mine := fmt.Sprintf("%s.%d", path, os.Getpid())
	cmd := exec.CommandContext(ctx, "go", "build", "-o", mine, "./cmd/"+name)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go build ./cmd/%s: %w\n%s", name, err, out)
	}
	if err := os.Rename(mine, path); err != nil {
		return "", err
	}
	if built.paths == nil {
		built.paths = map[string]string{}
	}
	built.paths[name] = path
	return path, nil
}
