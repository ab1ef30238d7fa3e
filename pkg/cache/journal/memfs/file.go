// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package memfs

import (
	"io"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
)

// A handle is an open file.
type handle struct {
	fs     *FS
	file   *file
	path   string
	write  bool
	closed bool
}

func (h *handle) begin(op string) error {
	if h.closed {
		return pathError(op, h.path, fs.ErrClosed)
	}
	return h.fs.begin(op, h.path)
}

func (h *handle) ReadAt(b []byte, off int64) (int, error) {
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	if err := h.begin("read"); err != nil {
		return 0, err
	}
	if off >= int64(len(h.file.data)) {
		return 0, io.EOF
	}
	n := copy(b, h.file.data[off:])
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

// WriteAt writes half of the bytes if it fails.
func (h *handle) WriteAt(b []byte, off int64) (int, error) {
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	err := h.begin("write")
	if err == nil && !h.write {
		return 0, pathError("write", h.path, fs.ErrPermission)
	}
	if err != nil {
		if h.closed || h.fs.crashAt > 0 && !h.fs.atCrash() {
			return 0, err
		}
		b = b[:len(b)/2]
	}
	f := h.file
	if end := off + int64(len(b)); len(b) > 0 && end > int64(len(f.data)) {
		f.data = append(f.data, make([]byte, end-int64(len(f.data)))...)
		f.size = true
	}
	copy(f.data[min(off, int64(len(f.data))):], b)
	f.touch(off, off+int64(len(b)))
	return len(b), err
}

func (f *file) touch(from, to int64) {
	for s := from / sector; s*sector < to; s++ {
		f.dirty[s] = true
	}
}

func (h *handle) Size() (int64, error) {
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	if err := h.begin("stat"); err != nil {
		return 0, err
	}
	return int64(len(h.file.data)), nil
}

func (h *handle) Truncate(size int64) error {
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	if err := h.begin("truncate"); err != nil {
		return err
	}
	f := h.file
	old := int64(len(f.data))
	if size <= old {
		f.data = f.data[:size:size]
		f.touch(size, old)
	} else {
		f.data = append(f.data, make([]byte, size-old)...)
		f.touch(old, size)
	}
	f.size = true
	return nil
}

// Sync makes the file durable. If it fails nothing, all or some sectors get to
// the disk, but all count as clean.
func (h *handle) Sync() error {
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	err := h.begin("sync")
	f := h.file
	switch {
	case err == nil:
		// Not a copy of data: a failed sync before this one has left holes.
		f.disk = f.kept(func(int64) bool { return true }, int64(len(f.data)))
		f.dirty, f.size = map[int64]bool{}, false
	case h.closed || h.fs.crashAt > 0:
	default:
		h.fs.spoil(f)
	}
	return err
}

// spoil is what a failed Sync does.
func (f *FS) spoil(o *file) {
	switch f.rng.IntN(3) {
	case 0:
		o.disk = o.kept(func(int64) bool { return true }, int64(len(o.data)))
		o.size = false
	case 1:
		o.disk = o.kept(func(int64) bool { return f.rng.IntN(2) == 0 }, int64(len(o.disk)))
	}
	if f.brutal && len(o.dirty) > 0 {
		s := slices.Min(slices.Collect(maps.Keys(o.dirty)))
		if s*sector < int64(len(o.disk)) {
			clear(o.disk[s*sector : min((s+1)*sector, int64(len(o.disk)))])
		}
	}
	o.dirty = map[int64]bool{}
}

func (h *handle) Close() error {
	h.fs.mu.Lock()
	defer h.fs.mu.Unlock()
	if h.closed {
		return pathError("close", h.path, fs.ErrClosed)
	}
	h.closed = true
	h.fs.open--
	return nil
}

func splitPath(p string) []string {
	return strings.FieldsFunc(p, func(r rune) bool { return r == '/' })
}

func sortedNames(m map[string]node) []string {
	return slices.Sorted(maps.Keys(m))
}

// Files returns the paths of all files, sorted.
func (f *FS) Files() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var files []string
	walk("/", f.root, func(p string, _ *file) { files = append(files, p) })
	return files
}

func walk(p string, d *dir, visit func(string, *file)) {
	for _, name := range sortedNames(d.entries) {
		switch n := d.entries[name].(type) {
		case *dir:
			walk(path.Join(p, name), n, visit)
		case *file:
			visit(path.Join(p, name), n)
		}
	}
}

// ReadFile returns the content of a file, or nil. It is no operation.
func (f *FS) ReadFile(p string) []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	n, err := f.lookup(p)
	if o, ok := n.(*file); err == nil && ok {
		return append([]byte(nil), o.data...)
	}
	return nil
}

// WriteFile sets the content of a file, durably, and makes it and its
// directories if need be. It is no operation.
func (f *FS) WriteFile(p string, b []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	names := splitPath(path.Clean("/" + p))
	d := f.root
	for _, name := range names[:len(names)-1] {
		next, ok := d.entries[name].(*dir)
		if !ok {
			next = newDir()
			d.entries[name], d.durable[name] = next, next
		}
		d = next
	}
	n := &file{data: append([]byte(nil), b...), disk: append([]byte(nil), b...), dirty: map[int64]bool{}}
	d.entries[names[len(names)-1]], d.durable[names[len(names)-1]] = n, n
}

// Clone returns a copy of the file system without locks, faults and crashes.
func (f *FS) Clone() *FS { return f.Kill() }
