// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package outbox

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

const (
	modelEvents = 24
	modelBytes  = 4000
)

func modelLimits(c *Config) { c.MaxEvents, c.MaxBytes = modelEvents, modelBytes }

// A model is what an Outbox should hold.
type model struct {
	queue   []Event
	unnoted []Event // sent, and sent again if the process dies now
	dropped int
}

// put replaces, or appends, and drops the oldest until all fits.
func (m *model) put(e Event) {
	at := slices.IndexFunc(m.queue, func(o Event) bool { return o.Name == e.Name })
	rest := slices.Clone(m.queue)
	if at >= 0 {
		rest = slices.Delete(rest, at, at+1)
	}
	for len(rest)+1 > modelEvents || bodyBytes(rest)+len(e.Body) > modelBytes {
		rest = rest[1:]
		m.dropped++
		at-- // below 0 it is the oldest itself that had to go
	}
	if at < 0 {
		at = len(rest)
	}
	m.queue, m.unnoted = slices.Insert(rest, at, e), nil
}

func bodyBytes(events []Event) (n int) {
	for _, e := range events {
		n += len(e.Body)
	}
	return n
}

// reloaded is the queue of the next process, with what was sent but not noted. The
// limits count for that too.
func (m *model) reloaded() []Event {
	all := append(slices.Clone(m.unnoted), m.queue...)
	for len(all) > modelEvents || bodyBytes(all) > modelBytes {
		all = all[1:]
	}
	return all
}

// onDisk are the states in which the log may be: the note was written, or not.
func (m *model) onDisk() []string { return []string{show(m.reloaded()), show(m.queue)} }

func show(events []Event) string {
	var b strings.Builder
	for _, e := range events {
		fmt.Fprintf(&b, "%s %s\n", e.Name, e.Body)
	}
	return b.String()
}

// A step is one thing that happens to an Outbox.
type step struct {
	what   string // put, send, flush, reopen
	event  Event  // of put; of send: put meanwhile, if it has a name; "same" is the name of what is sent
	answer int    // of send: the status code, 0 for no link
}

// steps are a random life, the same for the same seed: bursts of Events while the
// link is down, and of sending when it is back.
func steps(seed uint64, n int) []step {
	rng := rand.New(rand.NewPCG(seed, 7))
	var all []step
	some := func() Event {
		e := event(fmt.Sprintf("e%d", rng.IntN(60)), "")
		e.Body = []byte(strings.Repeat(fmt.Sprintf("%d,", len(all)), 4+rng.IntN(60)))
		if rng.IntN(20) == 0 {
			e.Body = append(e.Body, make([]byte, 1500)...)
		}
		if rng.IntN(2) == 0 {
			e.Group = eventsGroup
		}
		return e
	}
	for range modelEvents {
		all = append(all, step{what: "put", event: some()})
	}
	for range modelEvents { // so many in a row that they have to be noted
		all = append(all, step{what: "send", answer: 201})
	}
	for down := true; len(all) < n; down = !down {
		for range 10 + rng.IntN(25) {
			s := step{what: "put"}
			switch p := rng.IntN(40); {
			case p == 0:
				s.what = "reopen"
			case p == 1:
				s.what = "flush"
			case down || p < 4:
				s.event = some()
			default:
				s.what = "send"
				s.answer = []int{201, 201, 201, 201, 201, 201, 409, 403, 500, 0}[rng.IntN(10)]
				switch rng.IntN(20) {
				case 0:
					s.event = some()
				case 1:
					s.event = some()
					s.event.Name = "same"
				}
			}
			all = append(all, s)
		}
	}
	return all
}

// A life is an Outbox beside its model.
type life struct {
	*hub
	t     *testing.T
	model model
	// may are the states in which the log may be found if the process dies within
	// the step that runs now.
	may    []string
	failed int // Puts

	drops, rejects, creates, existing int
}

// next does a step. It returns false if the process died in it: crashed says so.
func (l *life) next(s step, crashed func() bool) bool {
	l.may = l.model.onDisk()
	switch s.what {
	case "put":
		l.tryPut(s.event, crashed)
	case "flush":
		l.tryNote(l.t.Context())
	case "reopen":
		l.reopen(crashed)
	case "send":
		l.send(s, crashed)
	}
	if crashed() {
		return false
	}
	if l.unnoted > len(l.model.unnoted) {
		l.t.Fatalf("%s: %d Events count as sent and not noted, want at most %d", s.what, l.unnoted, len(l.model.unnoted))
	}
	l.model.unnoted = l.model.unnoted[len(l.model.unnoted)-l.unnoted:]
	if want, got := sizes(l.model.queue), l.sizes(); !slices.Equal(want, got) {
		l.t.Fatalf("after %s the queue is not as it should be (-want +got):\n%s", s.what, cmp.Diff(want, got))
	}
	return true
}

func (l *life) tryPut(e Event, crashed func() bool) {
	before := l.model
	l.model.put(e)
	l.may = append(l.may, l.model.onDisk()...)
	if err := l.Put(l.t.Context(), e); err != nil {
		l.failed++
		if !crashed() {
			l.model = before
		}
	}
}

func (l *life) send(s step, crashed func() bool) {
	if len(l.model.queue) == 0 {
		return
	}
	head := l.model.queue[0]
	posts := len(l.server.got())
	l.server.setAnswer(func(*http.Request, string) (*http.Response, error) {
		if e := s.event; e.Name != "" {
			if e.Name == "same" {
				e.Name = head.Name
			}
			l.tryPut(e, crashed)
		}
		if s.answer == 0 {
			return nil, errDown
		}
		return reply(s.answer, alreadyExists), nil
	})
	_, err := l.sendOldest(l.t.Context(), false)
	if got := l.server.got()[posts:]; len(got) > 0 && got[0] != string(head.Body) || len(got) > 1 {
		l.t.Fatalf("sent %q, want %q", got, head.Body)
	} else if len(got) == 0 && err == nil && !crashed() {
		l.t.Fatal("nothing was sent")
	} else if len(got) == 0 || s.answer == 0 || s.answer == 500 {
		return
	}
	if q := l.model.queue; len(q) > 0 && q[0].Name == head.Name && string(q[0].Body) == string(head.Body) {
		l.model.queue, l.model.unnoted = q[1:], append(slices.Clone(l.model.unnoted), head)
	}
	l.may = append(l.may, l.model.onDisk()...)
}

// reopen is a restart in good order.
func (l *life) reopen(crashed func() bool) {
	l.tryNote(l.t.Context())
	l.model.unnoted = l.model.unnoted[len(l.model.unnoted)-l.unnoted:] // all, if that failed
	queue := l.model.reloaded()
	l.model.dropped += len(l.model.unnoted) + len(l.model.queue) - len(queue)
	l.model.queue, l.model.unnoted = queue, nil
	l.count()
	_ = l.journal.Close()
	for range 2 { // one operation may fail
		h, err := tryOpen(l.fs, l.server, modelLimits)
		if err == nil {
			if err = h.Load(l.t.Context()); err == nil {
				l.hub = h
				return
			}
			_ = h.journal.Close()
		}
		if crashed() {
			return
		}
	}
	l.t.Fatal("the journal does not open again")
}

// count adds up what the Outboxes of this life have counted.
func (l *life) count() {
	l.drops += l.hub.dropped("full")
	l.rejects += l.sent(rejected)
	l.creates += l.sent(created)
	l.existing += l.sent(exists)
}

// events are what waits, with the bodies as they are on disk.
func (h *hub) events(t *testing.T) []Event {
	var all []Event
	for i, body := range h.waiting(t) {
		e := event(h.queue[i].Name, body)
		all = append(all, e)
	}
	return all
}

// sizes say enough of a queue, without reading the disk: that would be operations
// that the code has not asked for.
func (l *life) sizes() (all []string) {
	for _, it := range l.queue {
		all = append(all, fmt.Sprintf("%s %d", it.Name, it.size()))
	}
	return all
}

func sizes(events []Event) (all []string) {
	for _, e := range events {
		all = append(all, fmt.Sprintf("%s %d", e.Name, len(e.Body)))
	}
	return all
}

func never() bool { return false }

// checkModel opens what a crash has left, compares it, sends it, and goes on.
func checkModel(t *testing.T, fs *memfs.FS, may []string, what string) {
	t.Helper()
	s := newServer()
	h := open(t, fs, s, modelLimits)
	defer func() { _ = h.journal.Close() }()
	if err := h.Load(t.Context()); err != nil {
		t.Fatalf("%s: Load() = %v", what, err)
	}
	if n := h.dropped("damaged"); n > 0 {
		t.Fatalf("%s: %d Events counted as damaged, want none", what, n)
	}
	got := show(h.events(t))
	if !slices.Contains(may, got) {
		t.Fatalf("%s: what waits is\n%swant one of\n%s", what, got, strings.Join(may, "or\n"))
	}
	waiting := h.waiting(t)
	h.drain(t)
	if d := cmp.Diff(waiting, s.got()); d != "" {
		t.Fatalf("%s: sent is not what waited (-waited +sent):\n%s", what, d)
	}
	h.put(t, event("after", what))
	h.tryNote(t.Context())
	_ = h.journal.Close()
	h = open(t, fs, s, modelLimits)
	if err := h.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got, want := show(h.events(t)), show([]Event{event("after", what)}); got != want {
		t.Fatalf("%s, sent and opened once more: what waits is\n%swant\n%s", what, got, want)
	}
}

// live runs the steps until the end or until the process dies.
func live(t *testing.T, fs *memfs.FS, all []step, crashed func() bool) *life {
	t.Helper()
	l := &life{t: t, may: []string{""}}
	h, err := tryOpen(fs, newServer(), modelLimits)
	if err == nil {
		err = h.Load(t.Context())
	}
	if err != nil {
		if !crashed() {
			t.Fatal(err)
		}
		return l
	}
	l.hub = h
	for _, s := range all {
		if !l.next(s, crashed) {
			return l
		}
		if n := len(l.model.unnoted); n >= maxUnnoted && l.failed == 0 {
			t.Fatalf("%d Events are sent and not noted, want less than %d", n, maxUnnoted)
		}
		if size := l.log.Size(); size > 2*modelBytes+modelEvents*entryOverhead {
			t.Fatalf("the log has %d bytes, with %d of bodies at most", size, modelBytes)
		}
	}
	l.may = l.model.onDisk()[:1]
	l.count()
	return l
}

func TestModelCrashAtEveryOperation(t *testing.T) {
	// One life is tried at every operation, others at some of theirs.
	strides := []int{1, 31, 31, 31, 31}
	if raceEnabled {
		strides = []int{29, 29}
	}
	most, crashes, drops, creates, existing, rejects := 0, 0, 0, 0, 0, 0
	for seed, stride := range strides {
		all := steps(uint64(seed), 140)
		fs := memfs.New()
		l := live(t, fs, all, never)
		checkModel(t, fs.Kill(), l.may, "killed at the end")
		if l.drops != l.model.dropped {
			t.Fatalf("seed %d: %d were dropped, want %d", seed, l.drops, l.model.dropped)
		}
		drops, creates, existing, rejects = drops+l.drops, creates+l.creates, existing+l.existing, rejects+l.rejects
		for n := 1; n <= fs.Ops(); n += stride {
			fs := memfs.New()
			fs.CrashAt(n)
			l := live(t, fs, all, func() bool { return fs.Ops() >= n })
			most = max(most, len(l.model.unnoted))
			what := fmt.Sprintf("seed %d, operation %d", seed, n)
			checkModel(t, fs.Kill(), l.may, what+", killed")
			for _, loss := range []memfs.Loss{memfs.Lost, memfs.Kept, memfs.Torn} {
				checkModel(t, fs.PowerCut(loss, uint64(n)), l.may, fmt.Sprintf("%s, power cut %d", what, loss))
			}
			crashes++
		}
	}
	t.Logf("%d crashes; up to %d Events had been sent and not noted; %d dropped, %d created, %d existed, %d rejected",
		crashes, most, drops, creates, existing, rejects)
	if min(drops, creates, existing, rejects) == 0 {
		t.Error("want some of each")
	}
	if !raceEnabled && most < maxUnnoted || most > maxUnnoted {
		t.Errorf("up to %d Events had been sent and not noted, want some, and at most %d", most, maxUnnoted)
	}
}

var errDisk = errors.New("no space left on device")

func TestModelFaultAtEveryOperation(t *testing.T) {
	stride := map[bool]int{false: 5, true: 29}[raceEnabled]
	failed := 0
	for seed := range uint64(2) {
		// What cannot be read at the start is damage, which is another test.
		all := slices.DeleteFunc(steps(seed, 140), func(s step) bool { return s.what == "reopen" })
		total := live(t, memfs.New(), all, never).fs.Ops()
		first := memfs.New() // what opening it for the first time takes
		live(t, first, nil, never)
		for n := first.Ops() + 1; n <= total; n += stride {
			fs := memfs.New()
			fs.SetFault(func(op memfs.Op) error {
				// And so is what cannot be read later.
				if op.N == n && !slices.Contains([]string{"read", "readdir", "stat", "mkdir", "lock", "writable"}, op.Name) {
					return fmt.Errorf("%s: %w", op.Name, errDisk)
				}
				return nil
			})
			l := live(t, fs, all, never)
			failed += l.failed
			what := fmt.Sprintf("seed %d, fault at operation %d", seed, n)
			checkModel(t, fs.Kill(), l.may, what+", killed")
			checkModel(t, fs.PowerCut(memfs.Lost, 0), l.may, what+", power cut")
		}
	}
	t.Logf("%d Puts failed", failed)
	if failed < 10 {
		t.Errorf("%d Puts failed, want more: nothing was tested", failed)
	}
}
