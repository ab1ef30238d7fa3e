// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package outbox

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

// full makes a file system refuse whatever takes space.
func full(fs *memfs.FS, is bool) {
	fs.SetFault(nil)
	if is {
		fs.SetFault(func(op memfs.Op) error {
			if op.Name == "write" || op.Name == "create" || op.Name == "mkdir" {
				return syscall.ENOSPC
			}
			return nil
		})
	}
}

func TestFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		s.setUp(false)
		h := open(t, memfs.New(), s)
		h.run(t)
		h.put(t, event("a", "1"), event("b", "2"))
		full(h.fs, true)
		for _, e := range []Event{event("c", "3"), event("a", "4")} {
			if err := h.Put(t.Context(), e); !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("Put(%s) on a full disk = %v, want %v", e.Body, err, syscall.ENOSPC)
			}
		}
		if h.Holds("ns", "c") {
			t.Error("Holds() = true for what Put refused")
		}
		if d := cmp.Diff([]string{"1", "2"}, h.waiting(t)); d != "" {
			t.Errorf("after a Put that failed there wait (-want +got):\n%s", d)
		}
		full(h.fs, false)
		h.put(t, event("c", "5"))
		if d := cmp.Diff([]string{"1", "2", "5"}, h.after(t)); d != "" {
			t.Errorf("when there is room again there wait (-want +got):\n%s", d)
		}
		full(h.fs, true)
		s.setUp(true)
		wantPosts(t, s, "1", "2", "5") // also if that cannot be noted
		pass(time.Hour)
		if got := h.after(t); len(got) != 3 {
			t.Errorf("after a crash there wait %q, want all: nothing was noted", got)
		}
		full(h.fs, false)
		pass(diskRetry + noteWithin)
		if got := h.after(t); len(got) != 0 {
			t.Errorf("after a crash there wait %q, want nothing: it is noted late", got)
		}
	})
}

// What is refused because it would need a new log is taken as soon as that works.
func TestFullDiskWhenWasteful(t *testing.T) {
	h := open(t, memfs.New(), newServer(), func(c *Config) { c.MaxBytes = 4000 })
	body := strings.Repeat("x", 300)
	for i := 0; h.Empty() || !h.wasteful(); i++ {
		if i == 100 {
			t.Fatal("replacing an Event for ever leaves nothing behind")
		}
		h.put(t, event("a", body+fmt.Sprint(i)))
	}
	full(h.fs, true)
	if err := h.Put(t.Context(), event("b", "new")); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("Put() = %v, want %v", err, syscall.ENOSPC)
	}
	full(h.fs, false)
	before := h.waiting(t)
	h.put(t, event("b", "new"))
	if d := cmp.Diff(append(before, "new"), h.after(t)); d != "" {
		t.Errorf("there wait (-want +got):\n%s", d)
	}
	if size := h.log.Size(); size > 2000 {
		t.Errorf("the log has %d bytes, want it written anew", size)
	}
}

func TestDiskUseIsBounded(t *testing.T) {
	const maxEvents, maxBytes = 50, 256 << 10
	h := open(t, memfs.New(), newServer(), func(c *Config) { c.MaxEvents, c.MaxBytes = maxEvents, maxBytes })
	if err := h.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	var most int64
	total := 0
	for i := range 1500 {
		switch {
		case i%300 == 299:
			h.drain(t)
			h.tryNote(t.Context())
			if size := h.log.Size(); size > emptyBytes {
				t.Fatalf("an empty outbox has %d bytes on disk, want at most %d", size, emptyBytes)
			}
		case rng.IntN(4) == 0:
			if _, err := h.sendOldest(t.Context(), false); err != nil {
				t.Fatal(err)
			}
		default:
			e := event(fmt.Sprintf("e%d", rng.IntN(80)), strings.Repeat("x", rng.IntN(16<<10)))
			total += len(e.Body)
			h.put(t, e)
		}
		most = max(most, h.log.Size())
		if len(h.queue) > maxEvents || h.bytes > maxBytes {
			t.Fatalf("%d Events of %d bytes wait, want at most %d of %d", len(h.queue), h.bytes, maxEvents, maxBytes)
		}
	}
	if most > 2*maxBytes {
		t.Errorf("up to %d bytes on disk, want at most twice the %d of bodies", most, maxBytes)
	}
	written := h.journal.Stats().BytesWritten
	t.Logf("up to %d bytes on disk; %d written for %d of bodies", most, written, total)
	if written > int64(4*total) {
		t.Errorf("%d bytes were written for %d of bodies", written, total)
	}
}

func TestSmallerLimits(t *testing.T) {
	h := open(t, memfs.New(), newServer())
	h.put(t, event("a", "1"), event("b", "2"), event("c", "3"), event("d", "4444"))
	for _, tc := range []struct {
		name   string
		limits func(*Config)
		want   []string
	}{
		{"fewer", func(c *Config) { c.MaxEvents = 3 }, []string{"2", "3", "4444"}},
		{"smaller", func(c *Config) { c.MaxBytes = 5 }, []string{"3", "4444"}},
		{"none", func(c *Config) { c.MaxBytes = 3 }, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newServer()
				s.setUp(false)
				h := open(t, h.fs.Kill(), s, tc.limits)
				h.run(t)
				pass(time.Minute)
				if d := cmp.Diff(tc.want, h.waiting(t)); d != "" {
					t.Errorf("there wait (-want +got):\n%s", d)
				}
				if got, want := h.dropped("full"), 4-len(tc.want); got != want {
					t.Errorf("%d were dropped, want %d", got, want)
				}
				if d := cmp.Diff(tc.want, h.after(t)); d != "" { // with the former limits
					t.Errorf("dropped, and back after a crash (-want +got):\n%s", d)
				}
			})
		})
	}
}

// damageable is a file system that holds each kind of entry, and what waits there.
func damageable(t *testing.T) (*memfs.FS, []string) {
	h := open(t, memfs.New(), newServer())
	for i := range 9 {
		h.put(t, event(fmt.Sprintf("e%d", i), fmt.Sprintf("%d: %s", i, strings.Repeat("body ", 30))))
		if i < 3 {
			if _, err := h.sendOldest(t.Context(), false); err != nil {
				t.Fatal(err)
			}
		}
		if i == 5 {
			if err := h.rewrite(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	waiting := h.waiting(t)
	if err := h.journal.Close(); err != nil {
		t.Fatal(err)
	}
	return h.fs, waiting
}

func TestEveryByteDamaged(t *testing.T) {
	step := map[bool]int{false: 1, true: 13}[raceEnabled]
	fs, waiting := damageable(t)
	lost := 0
	for _, file := range fs.Files() {
		if strings.HasSuffix(file, "FORMAT") {
			continue
		}
		whole := fs.ReadFile(file)
		for i := 0; i < len(whole); i += step {
			flipped := slices.Clone(whole)
			flipped[i] ^= 1 << (i % 8)
			for what, content := range map[string][]byte{"flipped": flipped, "the last": whole[:i]} {
				what = fmt.Sprintf("%s: byte %d %s", file, i, what)
				damaged := fs.Kill()
				damaged.WriteFile(file, content)
				lost += checkDamaged(t, damaged, waiting, what)
			}
		}
	}
	if lost == 0 {
		t.Error("no damage did any harm")
	}
}

// checkDamaged wants whatever is whole, in order, and nothing else. It returns how
// many Events are missing.
func checkDamaged(t *testing.T, fs *memfs.FS, before []string, what string) int {
	t.Helper()
	h, err := tryOpen(fs, newServer())
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	defer func() { _ = h.journal.Close() }()
	if err := h.Load(t.Context()); err != nil {
		t.Fatalf("%s: Load() = %v, want what is whole", what, err)
	}
	got := h.waiting(t)
	missing := 0
	for _, body := range before {
		if len(got) > 0 && got[0] == body {
			got = got[1:]
		} else {
			missing++
		}
	}
	if len(got) > 0 {
		t.Fatalf("%s: there waits %q, which did not before", what, got)
	}
	// The end of the log looks the same after a crash and after damage.
	if missing > 0 && h.dropped("damaged") == 0 && h.Holds("ns", "e8") {
		t.Errorf("%s: %d Events are missing, and none counted as damaged", what, missing)
	}
	h.drain(t)
	h.put(t, event("new", "new"))
	_ = h.journal.Close()
	again, err := tryOpen(fs, newServer())
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	defer func() { _ = again.journal.Close() }()
	if err := again.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := again.dropped("damaged"); n > 0 {
		t.Errorf("%s: %d damages are counted once more at the next start", what, n)
	}
	if d := cmp.Diff([]string{"new"}, again.waiting(t)); d != "" {
		t.Errorf("%s: at the next start there wait (-want +got):\n%s", what, d)
	}
	return missing
}

// One body that goes bad costs one Event, whether it is found at the start, when it
// is sent, or when the log is written anew.
func TestDamagedBody(t *testing.T) {
	bodies := []string{"first", "second", "third"}
	put := func(t *testing.T) *hub {
		h := open(t, memfs.New(), newServer())
		for _, b := range bodies {
			h.put(t, event(b, b))
		}
		return h
	}
	damage := func(t *testing.T, fs *memfs.FS) {
		t.Helper()
		for _, file := range fs.Files() {
			b := slices.Clone(fs.ReadFile(file))
			if i := bytes.LastIndex(b, []byte("second")); i >= 0 {
				b = bytes.ReplaceAll(b, []byte("second"), []byte("sec0nd"))
				fs.WriteFile(file, b)
				return
			}
		}
		t.Fatal("the body is not on disk")
	}
	start := func(t *testing.T, h *hub) *hub {
		h = open(t, h.fs.Kill(), h.server)
		if err := h.Load(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := len(h.queue); got != 2 {
			t.Errorf("%d wait after the start, want 2", got)
		}
		return h
	}
	for _, tc := range []struct {
		name     string
		together bool // the log has been written anew, all in one batch
		run      func(t *testing.T, h *hub) *hub
	}{
		{"at the start", false, start},
		{"at the start, of one batch", true, start},
		{"when it is sent", false, func(_ *testing.T, h *hub) *hub { return h }},
		{"in a new log", false, func(t *testing.T, h *hub) *hub {
			if err := h.rewrite(t.Context()); err != nil {
				t.Fatal(err)
			}
			if got := h.bytes; len(h.queue) != 2 || got != int64(len("firstthird")) || h.Holds("ns", "second") {
				t.Errorf("%d wait, of %d bytes, want 2 of %d", len(h.queue), got, len("firstthird"))
			}
			return h
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := put(t)
			if tc.together {
				if err := h.rewrite(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			damage(t, h.fs)
			h = tc.run(t, h)
			h.drain(t)
			if d := cmp.Diff([]string{"first", "third"}, h.server.got()); d != "" {
				t.Errorf("sent (-want +got):\n%s", d)
			}
			if got := h.dropped("damaged"); got != 1 {
				t.Errorf("%d counted as damaged, want 1", got)
			}
		})
	}
}

// A process that may open no more files keeps what it cannot read.
func TestUnreadableForNow(t *testing.T) {
	h := open(t, memfs.New(), newServer())
	h.put(t, event("a", "1"), event("b", "2"))
	h.fs.SetFault(func(op memfs.Op) error {
		if op.Name == "open" {
			return syscall.EMFILE
		}
		return nil
	})
	if _, err := h.sendOldest(t.Context(), false); !errors.Is(err, syscall.EMFILE) {
		t.Errorf("sendOldest() = %v, want %v", err, syscall.EMFILE)
	}
	if err := h.rewrite(t.Context()); !errors.Is(err, syscall.EMFILE) {
		t.Errorf("rewrite() = %v, want %v", err, syscall.EMFILE)
	}
	h.fs.SetFault(nil)
	h.drain(t)
	if d := cmp.Diff([]string{"1", "2"}, h.server.got()); d != "" || h.dropped("damaged") != 0 {
		t.Errorf("sent (-want +got), %d counted as damaged:\n%s", h.dropped("damaged"), d)
	}
}

// sealWith is no encryption, but it knows key and place again.
func sealWith(key string) func(*Config) {
	sealed := func(b []byte, place string) []byte {
		b = slices.Clone(b)
		for i := range b {
			b[i] ^= 0x55
		}
		return append([]byte(fmt.Sprintf("%s|%s|", key, place)), b...)
	}
	return func(c *Config) {
		c.Seal = func(b []byte, place string) ([]byte, error) { return sealed(b, place), nil }
		c.Open = func(b []byte, place string) ([]byte, error) {
			rest, ok := bytes.CutPrefix(b, sealed(nil, place))
			if !ok {
				return nil, errors.New("does not open")
			}
			return bytes.TrimPrefix(sealed(rest, ""), sealed(nil, "")), nil
		}
	}
}

func TestSealed(t *testing.T) {
	const secret = "nobody may read this"
	h := open(t, memfs.New(), newServer(), sealWith("k1"))
	other := event("a", secret+" 2")
	other.Namespace, other.Group = "other", eventsGroup
	h.put(t, event("a", secret), other)
	for _, file := range h.fs.Files() {
		if bytes.Contains(h.fs.ReadFile(file), []byte(secret)) {
			t.Errorf("%s holds the body in clear", file)
		}
	}
	if err := h.rewrite(t.Context()); err != nil {
		t.Fatal(err)
	}
	places := map[string]bool{}
	for _, it := range h.queue {
		places[it.sealPlace()] = true
	}
	if len(places) != 2 {
		t.Errorf("two Events are sealed for %v, want two places", places)
	}
	fs := h.fs.Kill()
	h = open(t, fs, newServer(), sealWith("k1"))
	if err := h.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.drain(t)
	if d := cmp.Diff([]string{secret, secret + " 2"}, h.server.got()); d != "" {
		t.Errorf("sent (-want +got):\n%s", d)
	}
	fs = fs.Clone()
	h = open(t, fs, newServer(), sealWith("k2"))
	h.put(t, event("new", "3"))
	h.drain(t)
	if d := cmp.Diff([]string{"3"}, h.server.got()); d != "" || h.dropped("damaged") != 2 {
		t.Errorf("with another key %d counted as damaged, want 2; sent (-want +got):\n%s", h.dropped("damaged"), d)
	}
	h = open(t, memfs.New(), newServer(), func(c *Config) {
		sealWith("k")(c)
		c.Seal = func([]byte, string) ([]byte, error) { return nil, errors.New("no key") }
	})
	if err := h.Put(t.Context(), event("a", "1")); err == nil || !h.Empty() {
		t.Errorf("Put() that cannot be sealed = %v, Empty() = %v, want an error, true", err, h.Empty())
	}
}

// What waits is sealed anew at the next start, so that an old key is not needed any more.
func TestSealedAnew(t *testing.T) {
	s := newServer()
	s.setUp(false)
	with := func(key string) func(*Config) {
		return func(c *Config) {
			c.Seal = func(b []byte, place string) ([]byte, error) { return []byte(key + place + string(b)), nil }
			c.Open = func(b []byte, place string) ([]byte, error) {
				for _, k := range []string{"new ", "old "} {
					if clear, ok := bytes.CutPrefix(b, []byte(k+place)); ok {
						return clear, nil
					}
				}
				return nil, errors.New("no key")
			}
			c.Current = func(b []byte) bool { return bytes.HasPrefix(b, []byte(key)) }
		}
	}
	fs := memfs.New()
	h := open(t, fs, s, with("old "))
	h.put(t, event("a", "1"), event("b", "2"))
	fs = h.fs.Kill()
	h = open(t, fs, s, with("new "))
	if err := h.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, f := range fs.Files() {
		if bytes.Contains(fs.ReadFile(f), []byte("old ")) {
			t.Errorf("%s holds something sealed with the old key", f)
		}
	}
	if d := cmp.Diff([]string{"1", "2"}, h.waiting(t)); d != "" {
		t.Errorf("waiting (-want +got):\n%s", d)
	}
}
