// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// A disk without room for what is to be written: nothing is half there, kubelet works, and the
// next run ends well.
func TestNoSpace(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED, NOT TESTED: a disk of its own needs root")
	}
	n := newFakeNode(t, cp.URL())
	const kubernetes, state = "/etc/kubernetes", "/var/lib/edgehub-install"
	n.mount(kubernetes)
	full := func(dir, command, want string) {
		t.Helper()
		n.fill(dir)
		defer func() { n.must(os.Remove(n.at(dir + "/.full"))) }()
		for range 2 {
			_, err := n.run(command)
			if err == nil || !strings.Contains(err.Error(), "no space left") || !strings.Contains(err.Error(), want) {
				t.Errorf("%s with no room in %s = %v, want %s and why", command, dir, err, want)
			}
			n.works()
			n.clean(dir)
		}
	}
	full(kubernetes, "install", kubernetes+"/manifests/edgehub.yaml")
	n.mount(state)
	full(state, "install", state)
	n.must(second(n.run("install")))
	n.installed()
	full(kubernetes, "uninstall", kubeletConf)
	n.installed()
	n.options.Image = "good:2"
	full(kubernetes, "install", kubeletConf)
	full(state, "install", state)
	n.installed()
	n.must(second(n.run("install")))
	n.installed()
	full(state, "uninstall", state)
	n.must(second(n.run("uninstall")))
	if files := n.files(state); len(files) > 0 {
		t.Errorf("%s holds %q", state, files)
	}
	n.must(unix.Unmount(n.at(state), unix.MNT_DETACH))
	n.must(os.RemoveAll(n.at(state))) // what the disk has hidden
	n.untouched()
}

// mount makes a folder, with what is in it, a disk of its own, a small one.
func (n *fakeNode) mount(dir string) {
	n.t.Helper()
	path := n.at(dir)
	kept := map[string][]byte{}
	n.must(os.MkdirAll(path, 0o755))
	n.must(filepath.WalkDir(path, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		kept[p], err = os.ReadFile(p)
		return err
	}))
	n.must(unix.Mount("tmpfs", path, "tmpfs", 0, "size=128k,mode=755"))
	n.t.Cleanup(func() {
		if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			n.t.Error(err)
		}
	})
	for p, content := range kept {
		n.must(os.MkdirAll(filepath.Dir(p), 0o755))
		n.must(os.WriteFile(p, content, 0o640))
		n.must(os.Chmod(p, 0o640))
	}
	if dir == "/etc/kubernetes" {
		n.must(os.MkdirAll(path+"/manifests", 0o755))
	}
}

// fill leaves no room in a folder that is a disk.
func (n *fakeNode) fill(dir string) {
	n.t.Helper()
	f, err := os.Create(n.at(dir + "/.full"))
	n.must(err)
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	if !errors.Is(err, unix.ENOSPC) {
		n.t.Fatal(err)
	}
}

// clean wants nothing in a folder that was not written to its end.
func (n *fakeNode) clean(dir string) {
	n.t.Helper()
	n.must(filepath.WalkDir(n.at(dir), func(path string, d fs.DirEntry, err error) error {
		if err == nil && strings.HasPrefix(d.Name(), ".") && d.Name() != ".full" {
			n.t.Errorf("%s is left", path)
		}
		return err
	}))
}
