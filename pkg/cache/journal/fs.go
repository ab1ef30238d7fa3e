// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// FS is the file system below a journal: the operations that it uses and no
// others, so that a test can crash or fail each one (package memfs). It has
// more methods than an interface should have because an operation left out
// is an operation whose failure is never tested.
//
// Paths are slash separated. Errors satisfy errors.Is with the io/fs errors.
// Implementations must be safe for concurrent use.
type FS interface {
	// Mkdir makes one directory with mode 0700; one that exists is no error.
	Mkdir(path string) error
	// ReadDir returns the names in a directory, in any order.
	ReadDir(path string) ([]string, error)
	// Create makes a new file with mode 0600 for reading and writing. A file
	// that exists is an error.
	Create(path string) (File, error)
	// Open opens an existing file, read-only unless write is set.
	Open(path string, write bool) (File, error)
	// Rename moves a file or directory within one parent directory, atomically.
	Rename(oldPath, newPath string) error
	// Remove unlinks a file or an empty directory.
	Remove(path string) error
	// SyncDir makes the entries of a directory durable.
	SyncDir(path string) error
	// Writable returns an error if files cannot be made in the directory for
	// want of permission or because it is mounted read-only.
	Writable(path string) error
	// Lock makes the file if need be and locks it against other processes and
	// other calls of Lock until the Closer is closed. ErrLocked if it is held.
	Lock(path string) (io.Closer, error)
}

// File is an open file of an FS. Reading and writing at offsets may run
// concurrently.
type File interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
	Size() (int64, error)
	Truncate(size int64) error
	// Sync makes data and size durable (fdatasync). After an error nothing is
	// known of what was written since the Sync before it, and calling Sync
	// once more does not change that.
	Sync() error
}

// osFS is the file system of the machine.
type osFS struct{}

var _ FS = osFS{}

func (osFS) Mkdir(path string) error {
	err := os.Mkdir(path, 0o700)
	if errors.Is(err, os.ErrExist) {
		return nil
	}
	return err
}

func (osFS) ReadDir(path string) ([]string, error) {
	d, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Readdirnames(-1)
}

func (osFS) Create(path string) (File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (osFS) Open(path string, write bool) (File, error) {
	flag := os.O_RDONLY
	if write {
		flag = os.O_RDWR
	}
	f, err := os.OpenFile(path, flag, 0)
	if err != nil {
		return nil, err
	}
	return osFile{f}, nil
}

func (osFS) Rename(oldPath, newPath string) error { return os.Rename(oldPath, newPath) }

func (osFS) Remove(path string) error { return os.Remove(path) }

func (osFS) SyncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (osFS) Writable(path string) error {
	if err := unix.Faccessat(unix.AT_FDCWD, path, unix.W_OK|unix.X_OK, unix.AT_EACCESS); err != nil {
		return &os.PathError{Op: "access", Path: path, Err: err}
	}
	return nil
}

func (osFS) Lock(path string) (io.Closer, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	// flock belongs to the open file: it ends with the process, however that
	// ends, and a second open in the same process is locked out too.
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err == nil {
		return f, nil
	}
	f.Close()
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, fmt.Errorf("%s: %w", path, ErrLocked)
	}
	return nil, &os.PathError{Op: "flock", Path: path, Err: err}
}

type osFile struct{ *os.File }

func (f osFile) Size() (int64, error) {
	fi, err := f.Stat()
	if err != nil {
		return 0, err
	}
	return fi.Size(), nil
}

func (f osFile) Sync() error {
	for {
		err := unix.Fdatasync(int(f.Fd()))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return &os.PathError{Op: "fdatasync", Path: f.Name(), Err: err}
		}
		return nil
	}
}
