// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package datadir keeps the agent's folder on disk its own: nobody else may read
// what lies there, or put something else in its place.
package datadir

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// ErrNotOurs means that something in the folder cannot be made the agent's own.
var ErrNotOurs = errors.New("it is not this process's own")

// public may be read by everybody: what clients trust.
const public = "ca.crt"

// Prepare makes dir, with mode 0700, if need be, and takes back what others have been
// given of it: folders get mode 0700, files 0600 (or lose what they have beyond that;
// ca.crt 0644), and what is not this process's becomes so. Whatever was mended is
// logged. Symbolic links, devices and the like, which the agent never makes, are an
// error, as is what cannot be mended. The folders above dir are not looked at.
func Prepare(ctx context.Context, dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	mended := 0
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		changed := false
		if err == nil {
			changed, err = own(path)
		}
		if err != nil && path != dir && !errors.Is(err, ErrNotOurs) {
			// A bad sector, or gone meanwhile: who reads it knows what to do about it.
			klog.FromContext(ctx).Error(err, "Mode and owner are not known", "path", path)
			return nil
		}
		if changed {
			mended++
		}
		switch ext := filepath.Ext(path); {
		case changed && (ext == ".key" || ext == ".pem"):
			klog.FromContext(ctx).Info("Mode or owner of a key was mended: others may know it, replace it", "path", path)
		case changed && mended <= maxLogged:
			klog.FromContext(ctx).Info("Mode or owner was mended", "path", path)
		}
		return err
	})
	if mended > maxLogged {
		klog.FromContext(ctx).Info("More modes or owners were mended", "files", mended-maxLogged)
	}
	return err
}

const maxLogged = 10

// PrepareFile takes from a key file elsewhere what others have been given of it. It may
// be a link. Where that cannot be changed, as on a medium that is read-only, it is left as
// it is, and logged.
func PrepareFile(ctx context.Context, file string) {
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		return // who reads it has the words for what is wrong
	}
	mode, uid := os.FileMode(st.Mode&0o777), os.Geteuid()
	if mode&0o077 == 0 && int(st.Uid) == uid {
		return
	}
	err := os.Chown(file, uid, os.Getegid())
	if mode&0o077 != 0 {
		err = errors.Join(err, os.Chmod(file, mode&0o600))
	}
	logger := klog.FromContext(ctx)
	if err != nil {
		logger.Error(err, "Others may read the key file", "path", file)
		return
	}
	logger.Info("Mode or owner of the key file was mended: others may know it, replace it", "path", file)
}

// own looks at what is open, not at a name behind which something else may be a moment
// later.
func own(path string) (changed bool, err error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ELOOP):
		return false, fmt.Errorf("%s: %w: it is a symbolic link", path, ErrNotOurs)
	case errors.Is(err, unix.ENXIO):
		return false, fmt.Errorf("%s: %w: it is neither a file nor a folder", path, ErrNotOurs)
	case err != nil:
		return false, &fs.PathError{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return false, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	most := uint32(0o600)
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFDIR:
		most = 0o700
	case unix.S_IFREG:
		if filepath.Base(path) == public {
			most = 0o644
		}
	default:
		return false, fmt.Errorf("%s: %w: it is neither a file nor a folder", path, ErrNotOurs)
	}
	mode, uid := st.Mode&0o7777, os.Geteuid()
	if st.Mode&unix.S_IFMT == unix.S_IFREG && st.Nlink > 1 && (int(st.Uid) != uid || mode&^most != 0) {
		return false, fmt.Errorf("%s: %w: it has another name, which may be outside", path, ErrNotOurs)
	}
	if int(st.Uid) != uid {
		if err := unix.Fchown(fd, uid, os.Getegid()); err != nil {
			return false, fmt.Errorf("%s: %w: its owner is %d, and cannot be changed: %w", path, ErrNotOurs, st.Uid, err)
		}
		changed = true
	}
	if mode&^most != 0 {
		if err := unix.Fchmod(fd, mode&most); err != nil {
			return changed, fmt.Errorf("%s: %w: its mode is %04o, and cannot be changed: %w", path, ErrNotOurs, mode, err)
		}
		changed = true
	}
	return changed, nil
}
