// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package journal_test

import (
	"bytes"
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

// rec is what a test expects to get back for an entry.
type rec struct {
	scope uint32
	kind  uint8
	meta  string
	body  string
}

func (r rec) String() string { return fmt.Sprintf("%d/%d %s %.12q", r.scope, r.kind, r.meta, r.body) }

// content is what a log holds, from its beginning or last Rewrite on.
type content []rec

func (c content) equal(d content) bool {
	if len(c) != len(d) {
		return false
	}
	for i := range c {
		if c[i] != d[i] {
			return false
		}
	}
	return true
}

func (c content) scope(s uint32) content {
	var d content
	for _, r := range c {
		if r.scope == s {
			d = append(d, r)
		}
	}
	return d
}

func entries(c content) []journal.Entry {
	var es []journal.Entry
	for _, r := range c {
		es = append(es, journal.Entry{Scope: r.scope, Kind: r.kind, Meta: []byte(r.meta), Body: []byte(r.body)})
	}
	return es
}

func seq(c content) iter.Seq2[journal.Entry, error] {
	return func(yield func(journal.Entry, error) bool) {
		for _, e := range entries(c) {
			if !yield(e, nil) {
				return
			}
		}
	}
}

// replayed is what OpenLog told about a log.
type replayed struct {
	content content
	refs    []journal.Ref
	scopes  map[uint32]bool
	all     bool
}

func (r *replayed) replay() journal.Replay {
	r.scopes = map[uint32]bool{}
	return journal.Replay{
		Batch: func(es []journal.Entry, refs []journal.Ref) {
			for i, e := range es {
				r.content = append(r.content, rec{scope: e.Scope, kind: e.Kind, meta: string(e.Meta)})
				r.refs = append(r.refs, refs[i])
			}
		},
		Damaged:    func(scope uint32) { r.scopes[scope] = true },
		DamagedAll: func() { r.all = true },
	}
}

func (r *replayed) damaged(scope uint32) bool { return r.all || r.scopes[scope] }

// bodies fills in the bodies of what was replayed.
func (r *replayed) bodies(t testing.TB, l *journal.Log) {
	t.Helper()
	v := l.View()
	defer v.Close()
	for i, ref := range r.refs {
		b, err := v.Read(ref, nil)
		if err != nil {
			t.Fatalf("Read(%v) after replay = %v", ref, err)
		}
		r.content[i].body = string(b)
	}
}

const segmentBytes = 2048

func open(t testing.TB, f journal.FS) *journal.Journal {
	t.Helper()
	j, err := journal.Open(journal.Options{Dir: "/data/journal", FS: f, SegmentBytes: segmentBytes, MaxOpenFiles: 2})
	if err != nil {
		t.Fatalf("Open() = %v", err)
	}
	return j
}

// A track is what is known of one log: what it holds now, and what it may
// hold after a crash. Nil content is a log that is not there, or empty.
type track struct {
	now     content
	allowed []content
	unknown bool // it was reported damaged
}

func (t *track) may(c content) bool {
	for _, a := range t.allowed {
		if a.equal(c) {
			return true
		}
	}
	return false
}

// A world runs a workload and keeps the model beside it.
type world struct {
	t      testing.TB
	fs     *memfs.FS
	j      *journal.Journal
	logs   map[string]*journal.Log
	tracks map[string]*track
	refs   map[string][]journal.Ref
	views  []*journal.View
	n      int
	failed int
	// halt: after the first failure nothing more is done.
	halt bool
	// lenient: so much fails that a failed batch cannot always be taken back.
	lenient bool
}

func newWorld(t testing.TB, f *memfs.FS) *world {
	return &world{t: t, fs: f, logs: map[string]*journal.Log{}, tracks: map[string]*track{}, refs: map[string][]journal.Ref{}}
}

func (w *world) open() bool {
	j, err := journal.Open(journal.Options{Dir: "/data/journal", FS: w.fs, SegmentBytes: segmentBytes, MaxOpenFiles: 2})
	w.j = j
	return err == nil
}

func (w *world) log(name string) *journal.Log {
	if w.logs[name] == nil {
		var r replayed
		l, err := w.j.OpenLog(name, r.replay())
		if err != nil {
			return nil
		}
		w.logs[name] = l
		tr := w.track(name)
		switch {
		case r.all || len(r.scopes) > 0:
			tr.unknown = true
		case len(r.content) > 0 && !tr.unknown:
			r.bodies(w.t, l)
			if !tr.may(r.content) {
				w.t.Fatalf("log %.10q opened again is\n%v\nwant one of\n%v", name, r.content, tr.allowed)
			}
			tr.now, w.refs[name] = r.content, r.refs
		}
	}
	return w.logs[name]
}

func (w *world) track(name string) *track {
	if w.tracks[name] == nil {
		w.tracks[name] = &track{allowed: []content{nil}}
	}
	return w.tracks[name]
}

// result updates the model after an operation that was to lead to next.
func (w *world) result(name string, next content, err error) bool {
	tr := w.track(name)
	switch {
	case err == nil:
		tr.now, tr.allowed = next, []content{next}
	case errors.Is(err, memfs.ErrCrashed):
		tr.allowed = append(tr.allowed, next)
	default:
		if w.lenient {
			tr.allowed = append(tr.allowed, next)
		}
		w.failed++
	}
	return err == nil
}

func (w *world) record(scope uint32, size int) rec {
	w.n++
	return rec{scope, uint8(1 + w.n%5), fmt.Sprintf("meta-%d", w.n), strings.Repeat(fmt.Sprintf("%d,", w.n), size/2+1)[:size]}
}

func (w *world) append(name string, sizes ...int) {
	if w.halt && w.failed > 0 {
		return
	}
	l := w.log(name)
	if l == nil {
		return
	}
	var c content
	for i, size := range sizes {
		c = append(c, w.record(uint32(i%3), size))
	}
	refs, err := l.Append(entries(c))
	if w.result(name, append(append(content(nil), w.track(name).now...), c...), err) {
		w.refs[name] = append(w.refs[name], refs...)
	}
}

func (w *world) rewrite(name string, sizes ...int) {
	if w.halt && w.failed > 0 {
		return
	}
	l := w.log(name)
	if l == nil {
		return
	}
	var c content
	for i, size := range sizes {
		c = append(c, w.record(uint32(i%3), size))
	}
	refs, err := l.Rewrite(seq(c))
	if w.result(name, c, err) {
		w.refs[name] = refs
	}
}

func (w *world) remove(name string) {
	if w.halt && w.failed > 0 {
		return
	}
	l := w.log(name)
	if l == nil {
		return
	}
	err := l.Remove()
	if w.result(name, nil, err) {
		w.refs[name] = nil
		delete(w.logs, name)
	} else if !errors.Is(err, memfs.ErrCrashed) {
		// What is left can be removed once more, or closed.
		err = l.Remove()
		if w.result(name, nil, err) {
			w.refs[name] = nil
		} else {
			l.Close()
			if !slices.Contains(w.j.Logs(), name) {
				tr := w.track(name)
				w.refs[name], tr.now, tr.allowed = nil, nil, append(tr.allowed, nil)
			}
		}
		delete(w.logs, name)
	}
}

func (w *world) view(name string) {
	if l := w.log(name); l != nil {
		w.views = append(w.views, l.View())
	}
}

func (w *world) closeViews() {
	for _, v := range w.views {
		v.Close()
	}
	w.views = nil
}

// live checks that everything acknowledged can be read right now.
func (w *world) live() {
	for name, refs := range w.refs {
		l := w.logs[name]
		if l == nil || w.tracks[name].unknown {
			continue
		}
		v := l.View()
		for i, ref := range refs {
			b, err := v.Read(ref, nil)
			if errors.Is(err, memfs.ErrCrashed) {
				break
			}
			if want := w.tracks[name].now[i].body; err != nil || string(b) != want {
				w.t.Fatalf("log %.10q: Read(%v) = %.20q, %v, want %.20q", name, ref, b, err, want)
			}
		}
		v.Close()
	}
}

var long = strings.Repeat("name of more than one sector ", 30)

// workload is run by the crash and the fault tests.
func (w *world) workload() {
	w.append("a", 100)
	w.append("a", 10, 300, 0)
	w.append("b", 700, 20)
	w.append("a", 900)
	w.append("a", 600, 5) // a new segment
	w.append(long, 30)
	w.append("a", 30)
	w.view("a")
	w.rewrite("a", 200, 700, 700, 900, 1) // several segments
	w.append("a", 17, 18)
	w.append("a", 3000) // more than a segment
	w.append("a", 44)
	w.closeViews()
	w.view("b")
	w.remove("b")
	w.append("b", 50) // anew
	w.closeViews()
	w.append("b", 60)
	w.rewrite("b")
	w.rewrite("c", 500, 500) // of nothing
	w.append("c", 1, 2, 3)
	w.append("b", 7)
	w.append(long, 1500)
	w.append(long, 1200)
	w.rewrite("a", 9, 9)
}

// check opens what is there after a crash and compares it with the model.
// It makes what it finds the state from which the world goes on.
func (w *world) check(what string, damageAllowed bool) {
	w.t.Helper()
	w.j = open(w.t, w.fs)
	w.logs, w.refs = map[string]*journal.Log{}, map[string][]journal.Ref{}
	names := map[string]bool{}
	for _, name := range w.j.Logs() {
		names[name] = true
		if w.tracks[name] == nil {
			w.t.Fatalf("%s: Logs() has %.10q, which was never written", what, name)
		}
	}
	for name, tr := range w.tracks {
		var r replayed
		l, err := w.j.OpenLog(name, r.replay())
		if err != nil {
			w.t.Fatalf("%s: OpenLog(%.10q) = %v", what, name, err)
		}
		if tr.unknown {
			tr.unknown, tr.now, tr.allowed = false, nil, nil
			continue
		}
		if r.all || len(r.scopes) > 0 {
			if !damageAllowed {
				w.t.Fatalf("%s: log %.10q is reported damaged: all=%v scopes=%v", what, name, r.all, r.scopes)
			}
			tr.now, tr.allowed = nil, nil
			continue
		}
		r.bodies(w.t, l)
		if !tr.may(r.content) {
			w.t.Fatalf("%s: log %.10q is\n%v\nwant one of\n%v", what, name, r.content, tr.allowed)
		}
		if len(r.content) > 0 && !names[name] {
			w.t.Fatalf("%s: Logs() = %q lacks %.10q", what, w.j.Logs(), name)
		}
		tr.now = r.content
		w.logs[name], w.refs[name] = l, r.refs
	}
}

// goOn uses every log after a crash.
func (w *world) goOn() {
	if w.n%3 == 0 { // what was left by the crash is rewritten before it is appended to
		for _, name := range slices.Sorted(maps.Keys(w.logs)) {
			w.rewrite(name, 40, 900)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(w.logs)) {
		w.append(name, 120, 0)
	}
	w.live()
	w.rewrite("a", 333, 1800)
	w.append("a", 5)
	w.append("c", 1100)
	w.append("c", 1100)
	w.live()
}

// brief reports whether the tests that try everything should try less of it.
// They have nothing for the race detector, which makes them slow.
func brief() bool { return testing.Short() || raceEnabled }

func fresh(c content) content { return append(content(nil), c...) }

func (w *world) fork(f *memfs.FS) *world {
	c := newWorld(w.t, f)
	c.n = w.n
	for name, tr := range w.tracks {
		c.tracks[name] = &track{now: fresh(tr.now), allowed: append([]content(nil), tr.allowed...), unknown: tr.unknown}
	}
	return c
}

func TestRoundTrip(t *testing.T) {
	f := memfs.New()
	w := newWorld(t, f)
	if !w.open() {
		t.Fatal("Open() failed")
	}
	w.workload()
	if w.failed > 0 {
		t.Fatalf("%d operations failed", w.failed)
	}
	w.live()
	if err := w.j.Close(); err != nil {
		t.Fatalf("Close() = %v", err)
	}
	if n := f.OpenFiles(); n != 0 {
		t.Errorf("OpenFiles() = %d after Close, want 0", n)
	}
	w.check("reopened", false)
	w.goOn()
	w.j.Close()
	w.check("reopened again", false)
	if s := w.j.Stats(); s.Damages+s.Lost+s.TornTails+s.Failures > 0 {
		t.Errorf("Stats() = %+v, want no trouble", s)
	}
}

func TestCrashAtEveryOperation(t *testing.T) {
	seeds := uint64(10)
	if brief() {
		seeds = 1
	}
	total := func() int {
		w := newWorld(t, memfs.New())
		w.open()
		w.workload()
		return w.fs.Ops()
	}()
	for n := 1; n <= total; n++ {
		w := newWorld(t, memfs.New())
		w.fs.CrashAt(n)
		if w.open() {
			w.workload()
		}
		power := func(what string, from *world, loss memfs.Loss, seed uint64) *world {
			c := from.fork(from.fs.PowerCut(loss, seed))
			c.check(fmt.Sprintf("%s, loss %d, seed %d", what, loss, seed), false)
			return c
		}
		again := func(what string, c *world, seed uint64) {
			// The next process is cut off too, or goes on to the end.
			c.fs.CrashAt(c.fs.Ops() + 1 + int(seed*7919+uint64(n)*31)%60)
			c.goOn()
			power(what+", then again", c, memfs.Loss(seed%3), seed)
		}
		what := fmt.Sprintf("crash at %d of %d", n, total)
		power(what, w, memfs.Lost, 0).goOn()
		power(what, w, memfs.Kept, 0).goOn()
		for seed := range seeds {
			again(what, power(what, w, memfs.Torn, seed), seed)
			killed := w.fork(w.fs.Kill())
			killed.check(what+", killed", false)
			power(what+", killed, then cut", killed, memfs.Torn, seed)
			again(what+", killed", killed, seed)
			again(what+", killed", killed.fork2(), seed)
		}
	}
	t.Logf("%d operations, %d seeds", total, seeds)
}

// fork2 is a process killed once more right after its start.
func (w *world) fork2() *world {
	c := w.fork(w.fs.Kill())
	c.check("killed twice", false)
	return c
}

func TestFaultAtEveryOperation(t *testing.T) {
	seeds, step := uint64(3), 1
	if brief() {
		seeds, step = 1, 4
	}
	total := func() int {
		w := newWorld(t, memfs.New())
		w.open()
		w.workload()
		return w.fs.Ops()
	}()
	for _, mode := range []struct {
		name    string
		burst   int
		lenient bool
	}{{"one", 1, false}, {"two", 2, false}, {"five", 5, true}, {"forty", 40, true}} {
		t.Run(mode.name, func(t *testing.T) {
			for n := 1; n <= total; n += step {
				for seed := range seeds {
					faulted(t, n, mode.burst, seed, mode.lenient)
				}
			}
		})
	}
}

var errFault = errors.New("no space left on device")

// faulted fails operation n and some after it. Then everything works again, or
// the process ends right there.
func faulted(t *testing.T, n, burst int, seed uint64, lenient bool) {
	t.Helper()
	for _, halt := range []bool{false, true} {
		w := newWorld(t, memfs.New())
		w.fs.Seed(seed)
		w.fs.SetBrutal(burst == 1)
		lenient := lenient || halt && burst > 1
		w.lenient, w.halt = lenient, halt
		readFailed := false
		w.fs.SetFault(func(op memfs.Op) error {
			if op.N < n || op.N >= n+burst {
				return nil
			}
			readFailed = readFailed || op.Name == "read" || op.Name == "open" || op.Name == "stat" || op.Name == "readdir"
			return errFault
		})
		if !w.open() {
			w.fs.SetFault(nil)
			if !w.open() {
				t.Fatalf("fault at %d: Open() does not work afterwards", n)
			}
		}
		w.workload()
		w.fs.SetFault(nil)
		what := fmt.Sprintf("fault at %d, burst %d, seed %d, halt %v", n, burst, seed, halt)
		w.live()
		if failed := w.failed; !halt {
			if w.goOn(); w.failed != failed {
				t.Fatalf("%s: later operations failed too", what)
			}
			w.live()
		}
		w.fork(w.fs.Kill()).check(what+", killed", readFailed)
		for _, loss := range []memfs.Loss{memfs.Lost, memfs.Kept, memfs.Torn} {
			c := w.fork(w.fs.PowerCut(loss, seed))
			c.check(fmt.Sprintf("%s, loss %d", what, loss), lenient || readFailed)
			c.goOn()
		}
	}
}

func TestViewOutlivesRewriteAndRemove(t *testing.T) {
	f := memfs.New()
	j := open(t, f)
	l, err := j.OpenLog("log", journal.Replay{})
	if err != nil {
		t.Fatal(err)
	}
	body := bytes.Repeat([]byte("x"), 1500)
	var refs []journal.Ref
	for i := range 6 {
		body[0] = byte(i)
		r, err := l.Append([]journal.Entry{{Kind: 1, Body: body}})
		if err != nil {
			t.Fatal(err)
		}
		refs = append(refs, r...)
	}
	read := func(what string, v *journal.View) {
		t.Helper()
		for i, ref := range refs {
			b, err := v.Read(ref, []byte("prefix"))
			body[0] = byte(i)
			if err != nil || !bytes.Equal(b, append([]byte("prefix"), body...)) {
				t.Fatalf("%s: Read(%v) = %d bytes, %v", what, ref, len(b), err)
			}
		}
	}
	v := l.View()
	if _, err := l.Rewrite(seq(content{{1, 1, "m", "b"}})); err != nil {
		t.Fatal(err)
	}
	read("after Rewrite", v)
	w := l.View()
	if _, err := w.Read(refs[0], nil); !errors.Is(err, journal.ErrUnknownRef) {
		t.Errorf("Read of an old ref = %v, want ErrUnknownRef", err)
	}
	if err := l.Remove(); err != nil {
		t.Fatal(err)
	}
	read("after Remove", v)
	l2, err := j.OpenLog("log", journal.Replay{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l2.Append([]journal.Entry{{Kind: 1, Body: body}, {Kind: 1, Body: body}}); err != nil {
		t.Fatal(err)
	}
	read("after a new log", v)
	for _, ref := range refs {
		v2 := l2.View()
		if _, err := v2.Read(ref, nil); !errors.Is(err, journal.ErrUnknownRef) {
			t.Errorf("Read of a ref of a removed log = %v, want ErrUnknownRef", err)
		}
		v2.Close()
	}
	if n := j.Stats().OpenFiles; n > 2 {
		t.Errorf("OpenFiles = %d, want at most 2", n)
	}
	if l2.Size() >= j.Stats().Bytes {
		t.Errorf("Stats().Bytes = %d, want more than the %d of the new log", j.Stats().Bytes, l2.Size())
	}
	v.Close()
	v.Close()
	w.Close()
	if got, want := j.Stats().Bytes, l2.Size(); got != want {
		t.Errorf("Stats().Bytes = %d, want %d", got, want)
	}
	if files := f.Files(); len(files) != 2 { // FORMAT and one segment
		t.Errorf("Files() = %q, want 2", files)
	}
	if _, err := v.Read(refs[0], nil); !errors.Is(err, journal.ErrClosed) {
		t.Errorf("Read of a closed View = %v, want ErrClosed", err)
	}
}
