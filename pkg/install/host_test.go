// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestResolve(t *testing.T) {
	root := t.TempDir()
	h := host{root}
	must(t, errors.Join(
		os.MkdirAll(root+"/etc/real", 0o755), os.MkdirAll(root+"/open", 0o755), os.Chmod(root+"/open", 0o777),
		os.MkdirAll(root+"/tmp/mine", 0o755), os.Chmod(root+"/tmp", 0o777|fs.ModeSticky),
		os.WriteFile(root+"/etc/real/file", nil, 0o600), os.WriteFile(root+"/open/file", nil, 0o600),
		os.Symlink("/etc/real", root+"/etc/absolute"), os.Symlink("real", root+"/etc/relative"), os.Symlink("../../../../../etc/real/file", root+"/etc/far"),
		os.Symlink("b", root+"/a"), os.Symlink("a", root+"/b"), os.Symlink("/nowhere/x", root+"/etc/broken"), os.Symlink("/open/file", root+"/etc/hostile"),
	))
	for _, tc := range []struct {
		path, want string
		err        error
	}{
		{"/etc/real/file", "/etc/real/file", nil},
		{"/etc/absolute/file", "/etc/real/file", nil},
		{"/etc/relative/file", "/etc/real/file", nil},
		{"/etc/far", "/etc/real/file", nil},
		{"/etc/broken", "/nowhere/x", nil},
		{"/etc/new/below", "/etc/new/below", nil},
		{"/../../etc/./real//file", "/etc/real/file", nil},
		{"/", "/", nil},
		{"/a", "", errLinks},
		{"/open/file", "", errNotTrusted},
		{"/etc/hostile", "", errNotTrusted},
		{"/tmp/mine/x", "/tmp/mine/x", nil},
	} {
		got, err := h.resolve(tc.path)
		if !errors.Is(err, tc.err) || err == nil && got != filepath.Join(root, tc.want) {
			t.Errorf("resolve(%s) = %s, %v, want %s, %v", tc.path, got, err, tc.want, tc.err)
		}
		if err != nil && strings.Contains(err.Error(), root) {
			t.Errorf("resolve(%s) = %v, which names a path that the host does not have", tc.path, err)
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("owners cannot be changed without root")
	}
	must(t, errors.Join(os.Mkdir(root+"/theirs", 0o755), os.Mkdir(root+"/theirs/x", 0o755), os.Chown(root+"/theirs", 65534, 65534), os.Mkdir(root+"/tmp/theirs", 0o755), os.Chown(root+"/tmp/theirs", 65534, 65534)))
	for _, path := range []string{"/theirs/x", "/tmp/theirs"} {
		if got, err := h.resolve(path); !errors.Is(err, errNotTrusted) {
			t.Errorf("resolve(%s) = %s, %v, want errNotTrusted", path, got, err)
		}
	}
}

func TestReplace(t *testing.T) {
	root := t.TempDir()
	h := host{root}
	file := root + "/conf"
	must(t, errors.Join(os.WriteFile(file, []byte("one"), 0o640), os.Chmod(file, 0o640), os.Symlink("/conf", root+"/link")))
	if os.Geteuid() == 0 {
		must(t, os.Chown(file, 65534, 65533))
	}
	for _, path := range []string{"/conf", "/link"} {
		must(t, h.replace(path, []byte(path), 0))
		info, err := os.Lstat(file)
		must(t, err)
		if b, err := os.ReadFile(file); err != nil || string(b) != path || info.Mode() != 0o640 {
			t.Errorf("after replace(%s) there is %q with mode %v, %v", path, b, info.Mode(), err)
		}
		if st := info.Sys().(*syscall.Stat_t); os.Geteuid() == 0 && (st.Uid != 65534 || st.Gid != 65533) {
			t.Errorf("after replace(%s) it is of %d:%d", path, st.Uid, st.Gid)
		}
		if target, err := os.Readlink(root + "/link"); err != nil || target != "/conf" {
			t.Errorf("after replace(%s) the link leads to %q, %v", path, target, err)
		}
	}
	must(t, h.replace("/new", []byte("x"), 0o600))
	must(t, os.Mkdir(root+"/dir", 0o755))
	for path, want := range map[string]error{"/dir": errNoFile, "/no/where": fs.ErrNotExist, "/missing": fs.ErrNotExist} {
		mode := fs.FileMode(0o600)
		if path == "/missing" {
			mode = 0 // what is kept then is not known
		}
		if err := h.replace(path, []byte("x"), mode); !errors.Is(err, want) || !strings.Contains(err.Error(), "write "+path) {
			t.Errorf("replace(%s) = %v, want %v", path, err, want)
		}
	}
	entries, err := os.ReadDir(root)
	must(t, err)
	if len(entries) != 4 { // conf, dir, link, new
		t.Errorf("there are %v", entries)
	}
	if base := filepath.Base(hidden("/etc/kubernetes/manifests/edgehub.yaml")); !strings.HasPrefix(base, ".") {
		t.Errorf("kubelet would take %s for a manifest", base)
	}
}

func TestRead(t *testing.T) {
	root := t.TempDir()
	h := host{root}
	must(t, syscall.Mkfifo(root+"/pipe", 0o600))
	for path, want := range map[string]error{"/pipe": errNoFile, "/": errNoFile, "/missing": fs.ErrNotExist} {
		if _, err := h.read(path); !errors.Is(err, want) {
			t.Errorf("read(%s) = %v, want %v", path, err, want)
		}
	}
	write(t, root+"/large", make([]byte, maxFileBytes+1))
	if _, err := h.read("/large"); !errors.Is(err, errTooLarge) {
		t.Errorf("read() = %v, want errTooLarge", err)
	}
	for range 2 {
		must(t, errors.Join(os.WriteFile(hidden(root+"/large"), nil, 0o600), h.remove("/large")))
	}
	if entries, err := os.ReadDir(root); err != nil || len(entries) != 1 {
		t.Errorf("after remove there are %v, %v", entries, err)
	}
}
