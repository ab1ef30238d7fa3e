// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package memfs is a file system in memory for tests of what survives a
// crash. It tells apart what a process sees (the page cache) from what is on
// the disk, counts every operation, and can fail or stop at any of them:
//
//	fs := memfs.New()
//	fs.CrashAt(17)                    // operation 17 and all later ones: ErrCrashed
//	... run the code ...
//	fs = fs.PowerCut(memfs.Torn, 1)   // what the next boot finds
//
// It is as mean as the rules allow: without Sync any 512-byte sector of a
// file may be as it was or as it was last written, and its size too; without
// SyncDir any change of a directory may be lost while later ones are not; and
// a Sync that fails marks what it did not write as clean, as Linux does, so
// that the next Sync succeeds and writes nothing.
package memfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"path"
	"sync"

	"github.com/edgehub/edgehub/pkg/cache/journal"
)

// ErrCrashed is returned by every operation after the crash.
var ErrCrashed = errors.New("memfs: crashed")

const sector = 512

// Loss says what a power cut does to what was not synced.
type Loss int

// What a power cut does.
const (
	Lost Loss = iota // all of it is gone
	Kept             // all of it is there
	Torn             // each sector, size and directory entry by chance
)

// An Op describes an operation to a Fault.
type Op struct {
	N    int    // counted from 1
	Name string // "write", "sync", "create", ...
	Path string
}

// A Fault returns the error that an operation fails with, or nil. A write that
// fails has written half of its bytes.
type Fault func(Op) error

// FS implements journal.FS. It is safe for concurrent use.
type FS struct {
	mu      sync.Mutex
	rng     *rand.Rand
	root    *dir
	ops     int
	crashAt int
	fault   Fault
	stall   func(Op) bool
	stalled int
	resume  *sync.Cond // on mu
	brutal  bool
	locks   map[string]bool
	open    int
}

var _ journal.FS = (*FS)(nil)

// A node is a *file or a *dir.
type node any

// A dir keeps its entries as they are, and as they are on disk.
type dir struct {
	entries map[string]node
	durable map[string]node
	pending []change
}

// A change of a directory that has not been synced: remove, then add.
type change struct {
	remove string
	add    string
	node   node
}

func newDir() *dir { return &dir{entries: map[string]node{}, durable: map[string]node{}} }

func (d *dir) apply(c change) {
	apply(d.entries, c)
	d.pending = append(d.pending, c)
}

func apply(m map[string]node, c change) {
	if c.remove != "" {
		delete(m, c.remove)
	}
	if c.add != "" {
		m[c.add] = c.node
	}
}

// A file keeps its content as it is, and as it is on disk.
type file struct {
	data  []byte
	disk  []byte
	dirty map[int64]bool // sectors that the disk does not have
	size  bool           // nor the size
}

// New returns an empty file system.
func New() *FS {
	f := &FS{root: newDir(), rng: rand.New(rand.NewPCG(1, 2)), locks: map[string]bool{}}
	f.resume = sync.NewCond(&f.mu)
	return f
}

// Ops is the number of operations so far.
func (f *FS) Ops() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.ops
}

// OpenFiles is the number of files that are open now.
func (f *FS) OpenFiles() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.open
}

// CrashAt makes operation n, counted from 1 at New, and all after it fail
// with ErrCrashed. A write that is operation n is done by half.
func (f *FS) CrashAt(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.crashAt = n
}

// SetFault makes fault decide about every operation from now on; nil ends it.
func (f *FS) SetFault(fault Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fault = fault
}

// SetStall makes the operations of which stall is true wait, as on a disk that
// hangs, while others go on. nil lets all of them go on.
func (f *FS) SetStall(stall func(Op) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.stall = stall
	f.resume.Broadcast()
}

// Stalled is the number of operations that wait.
func (f *FS) Stalled() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.stalled
}

// SetBrutal makes a Sync that fails destroy the first sector that it was to
// write, also where that had been durable before.
func (f *FS) SetBrutal(brutal bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.brutal = brutal
}

// Seed sets the source of chance.
func (f *FS) Seed(seed uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rng = rand.New(rand.NewPCG(seed, 3))
}

// Kill returns the file system as the next process finds it: what was written
// is there, synced or not, locks are free. It can be cut off from power later.
func (f *FS) Kill() *FS {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := New()
	c.rng = f.rng
	c.root = cloneDir(f.root, map[node]node{})
	return c
}

func cloneDir(d *dir, seen map[node]node) *dir {
	c := newDir()
	seen[d] = c
	clone := func(n node) node {
		if c, ok := seen[n]; ok {
			return c
		}
		if d, ok := n.(*dir); ok {
			return cloneDir(d, seen)
		}
		o := n.(*file)
		c := &file{data: append([]byte(nil), o.data...), disk: append([]byte(nil), o.disk...), dirty: map[int64]bool{}, size: o.size}
		for s := range o.dirty {
			c.dirty[s] = true
		}
		seen[n] = c
		return c
	}
	for name, n := range d.entries {
		c.entries[name] = clone(n)
	}
	for name, n := range d.durable {
		c.durable[name] = clone(n)
	}
	for _, p := range d.pending {
		if p.node != nil {
			p.node = clone(p.node)
		}
		c.pending = append(c.pending, p)
	}
	return c
}

// PowerCut returns the file system as it is after a loss of power and a boot.
func (f *FS) PowerCut(loss Loss, seed uint64) *FS {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := New()
	rng := rand.New(rand.NewPCG(seed, uint64(loss)))
	c.root = bootDir(f.root, loss, rng)
	return c
}

func bootDir(d *dir, loss Loss, rng *rand.Rand) *dir {
	entries := map[string]node{}
	for name, n := range d.durable {
		entries[name] = n
	}
	for _, p := range d.pending {
		if loss == Kept || loss == Torn && rng.IntN(2) == 0 {
			apply(entries, p)
		}
	}
	c := newDir()
	for _, name := range sortedNames(entries) {
		var n node
		switch o := entries[name].(type) {
		case *dir:
			n = bootDir(o, loss, rng)
		case *file:
			n = bootFile(o, loss, rng)
		}
		c.entries[name], c.durable[name] = n, n
	}
	return c
}

func bootFile(f *file, loss Loss, rng *rand.Rand) *file {
	b := f.disk
	switch loss {
	case Kept:
		b = f.kept(func(int64) bool { return true }, int64(len(f.data)))
	case Torn:
		size := int64(len(f.data))
		if f.size {
			switch rng.IntN(3) {
			case 0:
				size = int64(len(f.disk))
			case 1:
				lo, hi := min(len(f.data), len(f.disk)), max(len(f.data), len(f.disk))
				size = int64(lo+rng.IntN(hi-lo+1)) / sector * sector
				size = max(size, int64(lo))
			}
		}
		few := rng.IntN(3)
		b = f.kept(func(int64) bool {
			switch few {
			case 0:
				return rng.IntN(8) == 0
			case 1:
				return rng.IntN(8) != 0
			}
			return rng.IntN(2) == 0
		}, size)
	}
	b = append([]byte(nil), b...)
	return &file{data: b, disk: append([]byte(nil), b...), dirty: map[int64]bool{}}
}

// kept is the content on disk if the dirty sectors of which keep is true
// reach it, and the size is size.
func (f *file) kept(keep func(int64) bool, size int64) []byte {
	b := make([]byte, size)
	copy(b, f.disk)
	for s := int64(0); s*sector < size; s++ {
		if f.dirty[s] && keep(s) && s*sector < int64(len(f.data)) {
			clear(b[s*sector : min((s+1)*sector, size)])
			copy(b[s*sector:min((s+1)*sector, size)], f.data[s*sector:])
		}
	}
	return b
}

// begin counts an operation and decides what becomes of it.
func (f *FS) begin(name, p string) error {
	f.ops++
	for op := (Op{N: f.ops, Name: name, Path: p}); f.stall != nil && f.stall(op); {
		f.stalled++
		f.resume.Wait()
		f.stalled--
	}
	if f.crashAt > 0 && f.ops >= f.crashAt {
		return ErrCrashed
	}
	if f.fault != nil {
		if err := f.fault(Op{N: f.ops, Name: name, Path: p}); err != nil {
			return &fs.PathError{Op: name, Path: p, Err: err}
		}
	}
	return nil
}

// atCrash reports whether this very operation is the one that crashes.
func (f *FS) atCrash() bool { return f.ops == f.crashAt }

func (f *FS) lookup(p string) (node, error) {
	p = path.Clean("/" + p)
	var n node = f.root
	for _, name := range splitPath(p) {
		d, ok := n.(*dir)
		if !ok || d.entries[name] == nil {
			return nil, fs.ErrNotExist
		}
		n = d.entries[name]
	}
	return n, nil
}

func (f *FS) parent(p string) (*dir, string, error) {
	p = path.Clean("/" + p)
	n, err := f.lookup(path.Dir(p))
	if err != nil {
		return nil, "", err
	}
	d, ok := n.(*dir)
	if !ok {
		return nil, "", fs.ErrNotExist
	}
	return d, path.Base(p), nil
}

func pathError(op, p string, err error) error {
	if err == nil {
		return nil
	}
	return &fs.PathError{Op: op, Path: p, Err: err}
}

// Mkdir implements journal.FS.
func (f *FS) Mkdir(p string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.begin("mkdir", p); err != nil {
		return err
	}
	d, name, err := f.parent(p)
	if err == nil && d.entries[name] == nil {
		d.apply(change{add: name, node: newDir()})
	}
	return pathError("mkdir", p, err)
}

// ReadDir implements journal.FS.
func (f *FS) ReadDir(p string) ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.begin("readdir", p); err != nil {
		return nil, err
	}
	n, err := f.lookup(p)
	if d, ok := n.(*dir); err == nil && ok {
		return sortedNames(d.entries), nil
	}
	return nil, pathError("readdir", p, fs.ErrNotExist)
}

// Create implements journal.FS.
func (f *FS) Create(p string) (journal.File, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.begin("create", p); err != nil {
		return nil, err
	}
	d, name, err := f.parent(p)
	if err == nil && d.entries[name] != nil {
		err = fs.ErrExist
	}
	if err != nil {
		return nil, pathError("create", p, err)
	}
	n := &file{dirty: map[int64]bool{}}
	d.apply(change{add: name, node: n})
	f.open++
	return &handle{fs: f, file: n, path: p, write: true}, nil
}

// Open implements journal.FS.
func (f *FS) Open(p string, write bool) (journal.File, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.begin("open", p); err != nil {
		return nil, err
	}
	n, err := f.lookup(p)
	o, ok := n.(*file)
	if err == nil && !ok {
		err = fs.ErrInvalid
	}
	if err != nil {
		return nil, pathError("open", p, err)
	}
	f.open++
	return &handle{fs: f, file: o, path: p, write: write}, nil
}

// Rename implements journal.FS.
func (f *FS) Rename(oldPath, newPath string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.begin("rename", oldPath); err != nil {
		return err
	}
	d, from, err := f.parent(oldPath)
	if err != nil {
		return pathError("rename", oldPath, err)
	}
	e, to, err := f.parent(newPath)
	if err != nil || d != e || d.entries[from] == nil {
		return pathError("rename", newPath, errors.Join(err, fs.ErrInvalid))
	}
	d.apply(change{remove: from, add: to, node: d.entries[from]})
	return nil
}

// Remove implements journal.FS.
func (f *FS) Remove(p string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.begin("remove", p); err != nil {
		return err
	}
	d, name, err := f.parent(p)
	if err == nil && d.entries[name] == nil {
		err = fs.ErrNotExist
	}
	if err != nil {
		return pathError("remove", p, err)
	}
	if o, ok := d.entries[name].(*dir); ok && len(o.entries) > 0 {
		return pathError("remove", p, errors.New("directory not empty"))
	}
	d.apply(change{remove: name})
	return nil
}

// SyncDir implements journal.FS.
func (f *FS) SyncDir(p string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.begin("syncdir", p); err != nil {
		return err
	}
	n, err := f.lookup(p)
	d, ok := n.(*dir)
	if err != nil || !ok {
		return pathError("syncdir", p, fs.ErrNotExist)
	}
	for _, c := range d.pending {
		apply(d.durable, c)
	}
	d.pending = nil
	return nil
}

// Writable implements journal.FS.
func (f *FS) Writable(p string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.begin("access", p)
}

// Lock implements journal.FS. The lock file itself takes no room.
func (f *FS) Lock(p string) (io.Closer, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.begin("lock", p); err != nil {
		return nil, err
	}
	if f.locks[p] {
		return nil, fmt.Errorf("%s: %w", p, journal.ErrLocked)
	}
	f.locks[p] = true
	return unlocker(func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.locks[p] = false
		return nil
	}), nil
}

type unlocker func() error

func (u unlocker) Close() error { return u() }
