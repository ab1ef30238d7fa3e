// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/edgehub/edgehub/pkg/datadir"
)

var (
	errNotTrusted = errors.New("others can change what is there")
	errLinks      = errors.New("too many symbolic links")
	errNoFile     = errors.New("it is not a regular file")
	errTooLarge   = errors.New("it is too large")
)

const maxFileBytes = 1 << 20 // of a kubeconfig, a certificate, a manifest

// A host is a file system that is seen at root: from a pod, where the host's / is mounted
// elsewhere, an absolute link leads into the container unless it is followed by hand.
// Errors name the host's path.
type host struct{ root string }

// resolve returns where a path of the host is here, with all links followed as the host
// would. What is missing at the end is no error. A directory on the way that others may
// write to is one: they could put something else in its place.
func (h host) resolve(path string) (string, error) {
	at, rest := "/", strings.Split(path, "/")
	for links := 0; len(rest) > 0; {
		name := rest[0]
		rest = rest[1:]
		switch name {
		case "", ".":
			continue
		case "..":
			at = filepath.Dir(at)
			continue
		}
		dir := filepath.Join(h.root, at)
		next := filepath.Join(at, name)
		st, err := os.Lstat(filepath.Join(h.root, next))
		if errors.Is(err, fs.ErrNotExist) {
			return filepath.Join(append([]string{h.root, next}, rest...)...), nil
		}
		if err == nil {
			err = trusted(dir, at, st)
		}
		if err != nil {
			return "", fmt.Errorf("%s: %w", path, withoutPath(err))
		}
		if st.Mode()&fs.ModeSymlink == 0 {
			at = next
			continue
		}
		if links++; links > 40 {
			return "", fmt.Errorf("%s: %w", path, errLinks)
		}
		target, err := os.Readlink(filepath.Join(h.root, next))
		if err != nil {
			return "", fmt.Errorf("%s: %w", path, withoutPath(err))
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	return filepath.Join(h.root, at), nil
}

// trusted says whether only root and this process decide what name leads to in a directory:
// it is theirs and nobody else may write to it; or, as in /tmp, what others may not rename
// is theirs.
func trusted(dir, name string, entry fs.FileInfo) error {
	st, err := os.Lstat(dir + "/.")
	if err != nil {
		return err
	}
	switch {
	case !ours(st):
		return fmt.Errorf("%w: the directory %s is of user %d", errNotTrusted, name, uidOf(st))
	case st.Mode()&0o002 == 0 || st.Mode()&fs.ModeSticky != 0 && ours(entry):
		return nil
	}
	return fmt.Errorf("%w: everybody may write to the directory %s", errNotTrusted, name)
}

func uidOf(st fs.FileInfo) int { return int(st.Sys().(*syscall.Stat_t).Uid) }

func ours(st fs.FileInfo) bool { return uidOf(st) == 0 || uidOf(st) == os.Geteuid() }

// withoutPath drops the path as it is here from an error; who wraps it names the host's.
func withoutPath(err error) error {
	if e := (*fs.PathError)(nil); errors.As(err, &e) {
		return e.Err
	}
	if e := (*os.LinkError)(nil); errors.As(err, &e) {
		return e.Err
	}
	return err
}

// read returns a regular file's content.
func (h host) read(path string) ([]byte, error) {
	real, err := h.resolve(path)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(real, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, withoutPath(err))
	}
	defer f.Close()
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = errNoFile
	}
	if err == nil && st.Size() > maxFileBytes {
		err = errTooLarge
	}
	var b []byte
	if err == nil {
		b, err = io.ReadAll(io.LimitReader(f, maxFileBytes))
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, withoutPath(err))
	}
	return b, nil
}

// hidden is the name under which a file is written before it gets its own: one that kubelet
// does not take for a manifest, nor systemd for a unit.
func hidden(real string) string {
	return filepath.Join(filepath.Dir(real), "."+filepath.Base(real)+".edgehub")
}

// replace puts b in place of a file, such that a crash leaves the old or the new one; on an
// error the old one stays. What is there keeps its owner, and its mode if mode is 0. If it is
// a link, what it leads to is replaced.
func (h host) replace(path string, b []byte, mode fs.FileMode) error {
	return h.put(path, mode, func(temporary string, mode fs.FileMode) error { return datadir.WriteFile(temporary, b, mode) })
}

// put is replace with what write leaves under a temporary name.
func (h host) put(path string, mode fs.FileMode, write func(temporary string, mode fs.FileMode) error) (err error) {
	defer func() {
		if err != nil && !strings.HasPrefix(err.Error(), path) {
			err = fmt.Errorf("write %s: %w", path, withoutPath(err))
		}
	}()
	real, err := h.resolve(path)
	if err != nil {
		return err
	}
	st, err := os.Lstat(real)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		st = nil
		if mode == 0 {
			return err
		}
	case err != nil:
		return err
	case !st.Mode().IsRegular():
		return errNoFile
	case mode == 0:
		mode = st.Mode().Perm()
	}
	temporary := hidden(real)
	defer func() {
		if err != nil {
			_ = os.Remove(temporary)
		}
	}()
	if err := write(temporary, mode); err != nil {
		return err
	}
	if st != nil && uidOf(st) != os.Geteuid() {
		if err := os.Lchown(temporary, uidOf(st), int(st.Sys().(*syscall.Stat_t).Gid)); err != nil {
			return err
		}
	}
	if err := os.Rename(temporary, real); err != nil {
		return err
	}
	return syncDir(filepath.Dir(real))
}

// copyProgram puts a program of this side onto the host.
func (h host) copyProgram(from, to string) error {
	return h.put(to, 0o755, func(temporary string, mode fs.FileMode) (err error) {
		in, err := os.Open(from)
		if err != nil {
			return err
		}
		defer in.Close()
		if err := os.Remove(temporary); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		out, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
		if err != nil {
			return err
		}
		_, err = io.Copy(out, in)
		if err == nil {
			err = out.Chmod(mode)
		}
		if err == nil {
			err = out.Sync()
		}
		return errors.Join(err, out.Close())
	})
}

// remove removes a file, if it is there, and what a crash has left of writing it.
func (h host) remove(path string) error {
	real, err := h.resolve(path)
	if err != nil {
		return err
	}
	if err := os.Remove(real); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path, withoutPath(err))
	}
	if err := h.tidy(path); err != nil {
		return err
	}
	if err := syncDir(filepath.Dir(real)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path, withoutPath(err))
	}
	return nil
}

// tidy removes what a crash has left of writing a file.
func (h host) tidy(path string) error {
	real, err := h.resolve(path)
	if err != nil {
		return err
	}
	for _, name := range []string{hidden(real), hidden(real) + ".tmp"} {
		if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove what is left of writing %s: %w", path, withoutPath(err))
		}
	}
	return nil
}

// removeAll removes a directory with all that is in it; one that is mounted into a pod stays,
// and is empty.
func (h host) removeAll(path string) error {
	real, err := h.resolve(path)
	if err != nil {
		return err
	}
	err = os.RemoveAll(real)
	if left, e := os.ReadDir(real); errors.Is(err, syscall.EBUSY) && e == nil && len(left) == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", path, withoutPath(err))
	}
	return nil
}

// mkdir makes a directory, and those above it.
func (h host) mkdir(path string, mode fs.FileMode) error {
	real, err := h.resolve(path)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(real, mode); err != nil {
		return fmt.Errorf("make %s: %w", path, withoutPath(err))
	}
	return nil
}

func (h host) exists(path string) bool {
	real, err := h.resolve(path)
	if err == nil {
		_, err = os.Lstat(real)
	}
	return err == nil
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// list returns the names in a directory, but those of files that are being written; none if
// it is not there.
func (h host) list(path string) (names []string, err error) {
	real, err := h.resolve(path)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(real)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", path, withoutPath(err))
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") {
			names = append(names, e.Name())
		}
	}
	return names, nil
}
