// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package datadir

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestWriteFileReplacesWhole(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))
	dir := t.TempDir()
	path := filepath.Join(dir, "copy")
	if err := errors.Join(WriteFile(path, []byte("one"), 0o600), os.Mkdir(path+".tmp", 0o700), os.Mkdir(path+".tmp/x", 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(path, []byte("two"), 0o600); err == nil {
		t.Error("WriteFile() with the temporary name taken = nil, want an error")
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "one" {
		t.Errorf("the file = %q, %v, want the old content", b, err)
	}
	if err := errors.Join(os.RemoveAll(path+".tmp"), os.WriteFile(path+".tmp", []byte("left by a crash"), 0o600), os.Link(path, path+".old"), WriteFile(path, []byte("two"), 0o644)); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(path + ".old"); err != nil || string(b) != "one" {
		t.Errorf("another name of the old file = %q, %v, want the old content: it was written in place", b, err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "two" {
		t.Errorf("the file = %q, %v, want the new content", b, err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("the file's mode = %v, %v, want 0644 whatever the umask", info.Mode(), err)
	}
	if err := errors.Join(WriteFile(path, nil, 0o600), WriteFile(path, nil, 0o600)); err != nil {
		t.Errorf("WriteFile(nothing), twice = %v, want nil", err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Stat(the removed file) = %v, want %v", err, os.ErrNotExist)
	}
}
