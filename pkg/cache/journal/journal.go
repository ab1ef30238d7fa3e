// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
)

var (
	// ErrNewerFormat is returned by Open and OpenLog for files that a newer
	// version of this package wrote. Nothing on disk has been changed.
	ErrNewerFormat = errors.New("written in a newer format than this version reads")
	// ErrLocked is returned by Open if another process uses the directory.
	ErrLocked = errors.New("in use by another process")
	// ErrDamaged is returned by View.Read for a body that is not, or no
	// longer, what was appended.
	ErrDamaged = errors.New("record is damaged")
	// ErrUnknownRef is returned by View.Read for a Ref whose segment is not of
	// the View: of another log, appended after the View was taken to a newer
	// segment, or from before a Rewrite that the View came after.
	ErrUnknownRef = errors.New("ref is not of this view")
	// ErrTooLarge is returned for entries and batches above the limits that
	// Entry and Append state.
	ErrTooLarge = errors.New("too large")
	// ErrClosed is returned for what was closed or removed.
	ErrClosed = errors.New("journal or log is closed")
	// ErrOpen is returned by OpenLog for a name that is open already.
	ErrOpen = errors.New("log is open already")
	// ErrFull is returned when a log has used up its 99,999,999 segment numbers.
	ErrFull = errors.New("log has no segment numbers left")
)

// An Entry is one record. Kind is 1 to 127 and the caller's, as is Scope.
// Meta is at most 64 KiB and comes back at replay; Body is at most 256 MiB and
// is read by its Ref. Neither is kept or changed by the journal.
type Entry struct {
	Scope uint32
	Kind  uint8
	Meta  []byte
	Body  []byte
}

// A Ref says where the body of an entry is. It belongs to the process that
// got it from Append, Rewrite or replay: it must not be stored on disk.
// Length is that of the body.
type Ref struct {
	Segment, Offset, Length uint32
}

// IsZero reports whether r is the zero Ref, which no entry has.
func (r Ref) IsZero() bool { return r == Ref{} }

// Options say where a Journal is and how it writes.
type Options struct {
	// Dir is made if it does not exist, with its parents.
	Dir string
	// FS is the file system, nil for that of the machine.
	FS FS
	// SegmentBytes is the size from which on a log goes on in a new segment,
	// 4 MiB if zero, at most 1 GiB. A batch is never split, so a segment with
	// a larger batch is larger.
	SegmentBytes int64
	// MaxOpenFiles bounds the files kept open for Views, over all logs; 64 if
	// zero. Each running Read, Append and replay holds one more.
	MaxOpenFiles int
}

func (o *Options) complete() error {
	if o.FS == nil {
		o.FS = osFS{}
	}
	if o.SegmentBytes == 0 {
		o.SegmentBytes = 4 << 20
	}
	if o.MaxOpenFiles == 0 {
		o.MaxOpenFiles = 64
	}
	switch {
	case o.Dir == "":
		return errors.New("journal: Dir is empty")
	case o.SegmentBytes < 0 || o.SegmentBytes > 1<<30:
		return fmt.Errorf("journal: SegmentBytes %d is not in 0..%d", o.SegmentBytes, 1<<30)
	case o.MaxOpenFiles < 0:
		return fmt.Errorf("journal: MaxOpenFiles %d is negative", o.MaxOpenFiles)
	}
	o.Dir = path.Clean(o.Dir)
	return nil
}

// A Journal is a directory of logs. Its methods may be called concurrently.
type Journal struct {
	opts  Options
	fs    FS
	files fileCache
	stats counters
	lock  io.Closer

	mu       sync.Mutex // guards what follows
	closed   bool
	names    map[string]int64 // logs on disk; bytes of those that are not open
	lost     map[string]bool  // directories that Open had to give up
	logs     map[string]*Log  // open logs by name
	draining map[*Log]bool    // closed or removed, but still read by Views
	floor    uint32           // segment numbers up to here may stand in Refs of removed logs
}

// Stats are counters since Open, but for Bytes, OpenFiles and Logs.
type Stats struct {
	Bytes        int64 // on disk now, with what only Views still need
	BytesWritten int64
	Syncs        int64 // fdatasync and fsync calls
	Failures     int64 // writes, syncs and other changes that the file system refused
	Damages      int64 // reports to Replay
	TornTails    int64 // batches that a crash kept from being written completely
	Lost         int64 // logs whose name could not be read any more, and which were removed
	ReadErrors   int64 // calls of View.Read that returned ErrDamaged
	OpenFiles    int   // files kept open for Views
	Logs         int   // logs on disk
}

type counters struct {
	written, syncs, failures, damages, torn, lost, reads atomic.Int64
}

// Open makes or opens the journal in a directory. It takes a lock that ends
// with Close or with the process. It reads the headers of all segments, but
// no records: that is what OpenLog does. Errors are ErrNewerFormat, ErrLocked
// and those of the file system, and name the path. A full disk is no error.
func Open(o Options) (*Journal, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	j := &Journal{
		opts: o, fs: o.FS,
		names: map[string]int64{}, lost: map[string]bool{}, logs: map[string]*Log{}, draining: map[*Log]bool{},
	}
	j.files.init(o.MaxOpenFiles)
	if err := j.checkFormat(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	if err := j.makeDir(o.Dir); err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	if err := j.fs.Writable(o.Dir); err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	lock, err := j.fs.Lock(path.Join(o.Dir, lockFile))
	if err != nil {
		return nil, fmt.Errorf("open journal: %w", err)
	}
	j.lock = lock
	if err := j.load(); err != nil {
		return nil, errors.Join(fmt.Errorf("open journal: %w", err), lock.Close())
	}
	return j, nil
}

func (j *Journal) makeDir(dir string) error {
	if _, err := j.fs.ReadDir(dir); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if parent := path.Dir(dir); parent != dir {
		if err := j.makeDir(parent); err != nil {
			return err
		}
	}
	return j.fs.Mkdir(dir)
}

// syncParents makes the journal's own directory durable. An earlier process
// may have died between making a directory and this, so all are synced; but
// not those that somebody else must have made.
func (j *Journal) syncParents() error {
	for dir := path.Dir(j.opts.Dir); ; dir = path.Dir(dir) {
		if err := j.syncDir(dir); err != nil && !errors.Is(err, fs.ErrPermission) {
			return err
		}
		if dir == path.Dir(dir) {
			return nil
		}
	}
}

// checkFormat reads the FORMAT file. A damaged one is as good as none: each
// segment has its own version.
func (j *Journal) checkFormat() error {
	name := path.Join(j.opts.Dir, formatFile)
	f, err := j.fs.Open(name, false)
	if err != nil {
		return err
	}
	defer f.Close()
	b := make([]byte, 128)
	n, err := f.ReadAt(b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read %s: %w", name, err)
	}
	switch v := parseFormat(b[:n]); {
	case v > formatVersion:
		return fmt.Errorf("%s: version %d: %w", name, v, ErrNewerFormat)
	case v < 1:
		return fmt.Errorf("%s: %w", name, fs.ErrNotExist)
	}
	return nil
}

// load finds the logs. Only when no file of a newer format has been found it
// changes what is there.
func (j *Journal) load() error {
	// Once more under the lock: a newer version may just have ended.
	formatErr := j.checkFormat()
	if formatErr != nil && !errors.Is(formatErr, fs.ErrNotExist) {
		return formatErr
	}
	names, err := j.fs.ReadDir(j.opts.Dir)
	if err != nil {
		return err
	}
	slices.Sort(names)
	var garbage, lost []string
	for _, name := range names {
		dir := path.Join(j.opts.Dir, name)
		if strings.HasSuffix(name, removedSuffix) {
			garbage = append(garbage, dir)
			continue
		}
		if !isLogDir(name) {
			continue
		}
		found, err := j.segments(dir)
		if err != nil {
			return err
		}
		switch logName, state := identify(found); state {
		case headerOK:
			j.names[logName] = totalSize(found)
		case headerBlank:
			garbage = append(garbage, dir)
		default:
			lost = append(lost, dir)
		}
	}
	for _, dir := range lost {
		j.lost[path.Base(dir)] = true
		j.stats.lost.Add(1)
	}
	for _, dir := range append(garbage, lost...) {
		j.purge(dir)
	}
	if formatErr == nil {
		return nil
	}
	if err := j.syncParents(); err != nil {
		return err
	}
	j.writeFormat()
	return nil
}

// writeFormat makes the FORMAT file. Without room for it the journal works
// as well: the file is there for a version that has yet to be written.
func (j *Journal) writeFormat() {
	name := path.Join(j.opts.Dir, formatFile)
	temporary := name + ".new"
	_ = j.fs.Remove(temporary)
	f, err := j.fs.Create(temporary)
	if err == nil {
		_, err = f.WriteAt([]byte(formatLine(formatVersion)), 0)
		err = errors.Join(err, j.sync(f), f.Close())
	}
	if err == nil {
		err = j.fs.Rename(temporary, name)
	}
	if err == nil {
		err = j.syncDir(j.opts.Dir)
	}
	if err != nil {
		j.stats.failures.Add(1)
	}
}

// purge removes a directory with the files in it. What it cannot remove, the
// next Open finds.
func (j *Journal) purge(dir string) {
	names, err := j.fs.ReadDir(dir)
	for _, name := range names {
		// A View that is closed at the same time unlinks its own.
		if e := j.fs.Remove(path.Join(dir, name)); !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}
	if err = errors.Join(err, j.fs.Remove(dir)); err != nil {
		j.stats.failures.Add(1)
	}
}

// Logs returns the names of the logs on disk, sorted.
func (j *Journal) Logs() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	names := make([]string, 0, len(j.names))
	for name := range j.names {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// OpenLog replays a log and makes it ready for use. A log that is not on disk
// is empty, and stays off the disk until its first Append. A name is at most
// 4 KiB and may be open only once (ErrOpen). Damage is no error: r is told.
// Different logs may be opened concurrently.
func (j *Journal) OpenLog(name string, r Replay) (*Log, error) {
	if len(name) > maxNameBytes {
		return nil, fmt.Errorf("open log: name of %d bytes: %w", len(name), ErrTooLarge)
	}
	l := &Log{j: j, name: name, hash: hashName(name)}
	l.dir = path.Join(j.opts.Dir, l.hash)
	j.mu.Lock()
	var err error
	switch {
	case j.closed:
		err = ErrClosed
	case j.logs[name] != nil:
		err = ErrOpen
	default:
		j.logs[name] = l
	}
	l.next, l.lost = j.floor+1, j.lost[l.hash]
	for old := range j.draining {
		l.shared = l.shared || old.name == name && !old.removed
	}
	j.mu.Unlock()
	if err == nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		if err = l.load(r); err != nil {
			j.forget(l)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("open log %s: %w", l.dir, err)
	}
	return l, nil
}

func (j *Journal) forget(l *Log) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.logs[l.name] == l {
		delete(j.logs, l.name)
	}
}

// Stats returns the counters. It does no I/O.
func (j *Journal) Stats() Stats {
	s := Stats{
		BytesWritten: j.stats.written.Load(), Syncs: j.stats.syncs.Load(), Failures: j.stats.failures.Load(),
		Damages: j.stats.damages.Load(), TornTails: j.stats.torn.Load(), Lost: j.stats.lost.Load(),
		ReadErrors: j.stats.reads.Load(), OpenFiles: j.files.len(),
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	s.Logs = len(j.names)
	for name, n := range j.names {
		if j.logs[name] == nil {
			s.Bytes += n
		}
	}
	for _, l := range j.logs {
		if !j.draining[l] {
			s.Bytes += l.onDisk()
		}
	}
	for l := range j.draining {
		s.Bytes += l.onDisk()
	}
	return s
}

// Close closes all logs and gives the lock back. Views cannot read any more.
func (j *Journal) Close() error {
	j.mu.Lock()
	logs := make([]*Log, 0, len(j.logs))
	for _, l := range j.logs {
		logs = append(logs, l)
	}
	closed := j.closed
	j.closed = true
	j.mu.Unlock()
	if closed {
		return nil
	}
	var errs []error
	for _, l := range logs {
		errs = append(errs, l.Close())
	}
	j.files.close()
	return errors.Join(append(errs, j.lock.Close())...)
}

func (j *Journal) sync(f File) error {
	j.stats.syncs.Add(1)
	return f.Sync()
}

func (j *Journal) syncDir(dir string) error {
	j.stats.syncs.Add(1)
	return j.fs.SyncDir(dir)
}
