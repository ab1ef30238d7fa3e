// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package datadir

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// modes are those of all that is in a folder.
func modes(t *testing.T, dir string) map[string]os.FileMode {
	t.Helper()
	found := map[string]os.FileMode{}
	must(t, filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil {
			rel, _ := filepath.Rel(dir, path)
			found[rel] = info.Mode().Perm()
		}
		return err
	}))
	return found
}

func TestPrepareMakes(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "b")
	must(t, Prepare(t.Context(), dir))
	if diff := cmp.Diff(map[string]os.FileMode{".": 0o700}, modes(t, dir)); diff != "" {
		t.Error(diff)
	}
}

func TestPrepareMends(t *testing.T) {
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "journal", "log"), 0o755))
	must(t, os.Mkdir(filepath.Join(dir, "pki"), 0o755))
	for file, mode := range map[string]os.FileMode{"journal/log/1.seg": 0o666, "encryption.key": 0o644, "pki/ca.crt": 0o666, "pki/ca.key": 0o400, "odd": os.ModeSetuid | 0o755} {
		path := filepath.Join(dir, file)
		must(t, os.WriteFile(path, nil, 0o600))
		must(t, os.Chmod(path, mode))
	}
	must(t, os.Chmod(dir, 0o777))
	root := os.Geteuid() == 0
	if root {
		must(t, os.Chown(filepath.Join(dir, "journal", "log"), 65534, 65534))
		must(t, os.Chown(filepath.Join(dir, "encryption.key"), 65534, 65534))
	}
	for range 2 { // the second time there is nothing to do
		must(t, Prepare(t.Context(), dir))
		want := map[string]os.FileMode{
			".": 0o700, "journal": 0o700, "journal/log": 0o700, "journal/log/1.seg": 0o600, "encryption.key": 0o600,
			"pki": 0o700, "pki/ca.crt": 0o644, "pki/ca.key": 0o400, "odd": 0o600,
		}
		if diff := cmp.Diff(want, modes(t, dir)); diff != "" {
			t.Errorf("modes (-want +got):\n%s", diff)
		}
	}
	if !root {
		t.Skip("owners cannot be changed without root")
	}
	for _, file := range []string{"journal/log", "encryption.key"} {
		info, err := os.Stat(filepath.Join(dir, file))
		must(t, err)
		if uid := info.Sys().(*syscall.Stat_t).Uid; uid != 0 {
			t.Errorf("%s is of %d, want 0", file, uid)
		}
	}
}

// What the agent never makes, somebody else has put there.
func TestPrepareRefuses(t *testing.T) {
	for name, make := range map[string]func(path string) error{
		"a symbolic link":         func(p string) error { return os.Symlink("/etc/passwd", p) },
		"a broken symbolic link":  func(p string) error { return os.Symlink("/nowhere", p) },
		"a symbolic link to here": func(p string) error { return os.Symlink(".", p) },
		"a hard link to a file that others may read": func(p string) error {
			outside := filepath.Join(t.TempDir(), "passwd")
			return errors.Join(os.WriteFile(outside, nil, 0o600), os.Chmod(outside, 0o644), os.Link(outside, p))
		},
		"a pipe": func(p string) error { return syscall.Mkfifo(p, 0o600) },
		"a socket": func(p string) error {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: p, Net: "unix"})
			if err == nil {
				t.Cleanup(func() { l.Close() })
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			must(t, make(filepath.Join(dir, "x")))
			if err := Prepare(t.Context(), dir); !errors.Is(err, ErrNotOurs) {
				t.Errorf("Prepare = %v, want ErrNotOurs", err)
			}
		})
	}
}

func TestPrepareFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	PrepareFile(t.Context(), file) // is missing
	must(t, os.WriteFile(file, nil, 0o600))
	link := file + "-link"
	must(t, os.Symlink(file, link))
	for _, path := range []string{file, link} {
		must(t, os.Chmod(file, 0o644))
		PrepareFile(t.Context(), path)
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("mode %v, %v, want 0600", info.Mode(), err)
		}
	}
	must(t, os.Chmod(file, 0o400))
	PrepareFile(t.Context(), file)
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o400 {
		t.Errorf("mode %v, %v, want 0400 as it was", info.Mode(), err)
	}
}
