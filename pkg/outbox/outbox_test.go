// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package outbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
	"github.com/edgehub/edgehub/test/process"
)

func TestPutKeepsTheLimits(t *testing.T) {
	limits := func(c *Config) { c.MaxEvents, c.MaxBytes = 3, 30 }
	sized := func(name string, size int) Event { return event(name, strings.Repeat(name, size)) }
	for _, tc := range []struct {
		name    string
		puts    []Event
		want    string // names and sizes
		dropped int
	}{
		{"one", []Event{sized("a", 1)}, "a1", 0},
		{"in order", []Event{sized("a", 1), sized("c", 2), sized("b", 3)}, "a1 c2 b3", 0},
		{"too many", []Event{sized("a", 1), sized("b", 1), sized("c", 1), sized("d", 1), sized("e", 1)}, "c1 d1 e1", 2},
		{"as many bytes as may be", []Event{sized("a", 10), sized("b", 20)}, "a10 b20", 0},
		{"a byte too many", []Event{sized("a", 10), sized("b", 20), sized("c", 1)}, "b20 c1", 1},
		{"a large one for all", []Event{sized("a", 10), sized("b", 10), sized("c", 30)}, "c30", 2},
		{"replaced in its place", []Event{sized("a", 1), sized("b", 1), sized("c", 1), sized("b", 9)}, "a1 b9 c1", 0},
		{"the oldest replaced", []Event{sized("a", 1), sized("b", 1), sized("c", 1), sized("a", 9)}, "a9 b1 c1", 0},
		{"the newest replaced", []Event{sized("a", 1), sized("b", 1), sized("b", 2), sized("c", 3)}, "a1 b2 c3", 0},
		{"replaced by a shorter one", []Event{sized("a", 20), sized("b", 5), sized("a", 5), sized("c", 20)}, "a5 b5 c20", 0},
		{"replaced by a larger one", []Event{sized("a", 10), sized("b", 10), sized("c", 10), sized("b", 15)}, "b15 c10", 1},
		{"replaced one among the oldest", []Event{sized("a", 10), sized("b", 10), sized("c", 10), sized("a", 15)}, "c10 a15", 1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := open(t, memfs.New(), newServer(), limits)
			h.put(t, tc.puts...)
			check := func(what string, h *hub) {
				t.Helper()
				var got []string
				total := 0
				for _, b := range h.waiting(t) {
					got = append(got, fmt.Sprintf("%c%d", b[0], len(b)))
					total += len(b)
				}
				if s := strings.Join(got, " "); s != tc.want {
					t.Errorf("%s: what waits is %s, want %s", what, s, tc.want)
				}
				if n := h.queueBytes(); n != int64(total) {
					t.Errorf("%s: bytes = %d, want %d", what, n, total)
				}
			}
			check("after Put", h)
			if got := h.dropped("full"); got != tc.dropped {
				t.Errorf("%d were dropped, want %d", got, tc.dropped)
			}
			reopened := open(t, h.fs.Kill(), newServer(), limits)
			if err := reopened.Load(t.Context()); err != nil {
				t.Fatal(err)
			}
			check("opened again", reopened)
			if got := reopened.dropped("full"); got != 0 {
				t.Errorf("opened again: %d were dropped, want none", got)
			}
		})
	}
}

func (h *hub) queueBytes() int64 {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.bytes
}

func TestPutRefuses(t *testing.T) {
	long := strings.Repeat("n", maxNameBytes+1)
	for _, tc := range []struct {
		name  string
		event Event
		want  error // nil: any
	}{
		{"another group", Event{Group: "apps", Namespace: "ns", Name: "e"}, nil},
		{"no namespace", Event{Name: "e"}, nil},
		{"no name", Event{Namespace: "ns"}, nil},
		{"a namespace that is a path", Event{Namespace: "ns/pods", Name: "e"}, nil},
		{"a namespace that leads up", Event{Namespace: "..", Name: "e"}, nil},
		{"an escaped name", Event{Namespace: "ns", Name: "a%2fb"}, nil},
		{"a name that is no text", Event{Namespace: "ns", Name: "\xff"}, nil},
		{"a long name", Event{Namespace: "ns", Name: long}, nil},
		{"a header that ends early", Event{Namespace: "ns", Name: "e", ContentType: "a/b\r\nX: y"}, nil},
		{"a long Content-Type", Event{Namespace: "ns", Name: "e", ContentType: long + long}, nil},
		{"a large body", Event{Namespace: "ns", Name: "e", Body: make([]byte, MaxEventBytes+1)}, ErrTooLarge},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := open(t, memfs.New(), newServer())
			err := h.Put(t.Context(), tc.event)
			if err == nil || tc.want != nil && !errors.Is(err, tc.want) {
				t.Errorf("Put() = %v, want an error, %v", err, tc.want)
			}
			if !h.Empty() || h.Holds(tc.event.Namespace, tc.event.Name) {
				t.Error("something of it was kept")
			}
		})
	}
	h := open(t, memfs.New(), newServer())
	h.put(t, Event{Namespace: "ns", Name: "largest", Body: make([]byte, MaxEventBytes)})
	small := open(t, memfs.New(), newServer(), func(c *Config) { c.MaxBytes = 100 })
	if err := small.Put(t.Context(), event("e", strings.Repeat("x", 101))); !errors.Is(err, ErrTooLarge) {
		t.Errorf("Put of more than MaxBytes = %v, want ErrTooLarge", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.Put(ctx, event("e", "x")); !errors.Is(err, context.Canceled) || h.Holds("ns", "e") {
		t.Errorf("Put of a client that has gone = %v, want %v", err, context.Canceled)
	}
}

func TestHoldsAndEmpty(t *testing.T) {
	h := open(t, memfs.New(), newServer())
	want := func(what string, empty bool, names ...string) {
		t.Helper()
		if got := h.Empty(); got != empty {
			t.Errorf("%s: Empty() = %v, want %v", what, got, empty)
		}
		for _, name := range []string{"a", "b"} {
			if got, want := h.Holds("ns", name), slices.Contains(names, name); got != want {
				t.Errorf("%s: Holds(%s) = %v, want %v", what, name, got, want)
			}
		}
		if h.Holds("other", "a") {
			t.Errorf("%s: Holds() of another namespace = true", what)
		}
	}
	want("at first", true)
	h.put(t, event("a", "1"), event("b", "2"))
	want("after Put", false, "a", "b")
	h.server.setAnswer(func(*http.Request, string) (*http.Response, error) {
		want("while it is sent", false, "a", "b")
		return reply(http.StatusCreated, ""), nil
	})
	if _, err := h.sendOldest(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	want("after sending", false, "b")
	h.server.setAnswer(always(http.StatusForbidden, ""))
	h.drain(t)
	want("after sending all", true)
}

func TestSameNameInBothGroups(t *testing.T) {
	h := open(t, memfs.New(), newServer())
	var paths []string
	h.server.setAnswer(func(req *http.Request, _ string) (*http.Response, error) {
		paths = append(paths, req.URL.Path+" "+req.Header.Get("Content-Type"))
		return reply(http.StatusCreated, ""), nil
	})
	later := event("a", "2")
	later.Group, later.ContentType = eventsGroup, "application/vnd.kubernetes.protobuf"
	elsewhere := event("a", "3")
	elsewhere.Namespace = "other"
	h.put(t, event("a", "1"), elsewhere, later)
	h = open(t, h.fs.Kill(), h.server) // this is on disk too
	if err := h.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	h.drain(t)
	want := []string{
		"/apis/events.k8s.io/v1/namespaces/ns/events application/vnd.kubernetes.protobuf",
		"/api/v1/namespaces/other/events application/json",
	}
	if d := cmp.Diff(want, paths); d != "" {
		t.Errorf("sent to (-want +got):\n%s", d)
	}
}

func TestNewChecksItsConfig(t *testing.T) {
	j, err := journal.Open(journal.Options{Dir: "/outbox", FS: memfs.New()})
	if err != nil {
		t.Fatal(err)
	}
	s := newServer()
	good := Config{Journal: j, Upstream: s, Up: s.isUp, Changed: s.change, IsUnavailable: func(error) bool { return false }}
	good.Node = nodeSelf
	seal := func(b []byte, _ string) ([]byte, error) { return b, nil }
	reg := prometheus.NewRegistry()
	for _, tc := range []struct {
		name   string
		change func(*Config)
		ok     bool
	}{
		{"what is required", func(*Config) {}, true},
		{"both of Seal and Open", func(c *Config) { c.Seal, c.Open = seal, seal }, true},
		{"no journal", func(c *Config) { c.Journal = nil }, false},
		{"no upstream", func(c *Config) { c.Upstream = nil }, false},
		{"no IsUnavailable", func(c *Config) { c.IsUnavailable = nil }, false},
		{"no Up", func(c *Config) { c.Up = nil }, false},
		{"no Changed", func(c *Config) { c.Changed = nil }, false},
		{"no node", func(c *Config) { c.Node = nil }, false},
		{"Seal alone", func(c *Config) { c.Seal = seal }, false},
		{"Open alone", func(c *Config) { c.Open = seal }, false},
		{"MaxEvents below 0", func(c *Config) { c.MaxEvents = -1 }, false},
		{"MaxBytes below 0", func(c *Config) { c.MaxBytes = -1 }, false},
		{"metrics", func(c *Config) { c.Registerer = reg }, true},
		{"metrics twice", func(c *Config) { c.Registerer = reg }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := good
			tc.change(&cfg)
			o, err := New(cfg)
			if ok := err == nil; ok != tc.ok {
				t.Fatalf("New() = %v, want an error: %v", err, !tc.ok)
			}
			if tc.ok && (o.cfg.MaxEvents != 2000 || o.cfg.MaxBytes != 8<<20) {
				t.Errorf("New() has limits %d and %d, want the defaults", o.cfg.MaxEvents, o.cfg.MaxBytes)
			}
		})
	}
}

// Everything at the same time, on a real disk: what was put last of each name is
// what is sent last of it.
func TestConcurrentPuts(t *testing.T) {
	const clients, names, rounds = 4, 5, 40
	s := newServer()
	j, err := journal.Open(journal.Options{Dir: t.TempDir(), SegmentBytes: 16 << 10})
	if err != nil {
		t.Fatal(err)
	}
	h := &hub{server: s, reg: prometheus.NewPedanticRegistry(), journal: j}
	h.Outbox, err = New(Config{
		Journal: j, Upstream: s, Up: s.isUp, Changed: s.change, Registerer: h.reg, Node: nodeSelf, MaxBytes: 8 << 10,
		IsUnavailable: func(err error) bool { return errors.Is(err, errDown) },
	})
	if err != nil {
		t.Fatal(err)
	}
	stop := h.run(t)
	var putting sync.WaitGroup
	for c := range clients {
		putting.Go(func() {
			for i := range names * rounds {
				name := fmt.Sprintf("e%d-%d", c, i%names)
				if err := h.Put(t.Context(), event(name, fmt.Sprintf("%s %d", name, i/names))); err != nil {
					t.Errorf("Put() = %v", err)
				}
				if i%50 == 0 {
					s.setUp(i%100 == 0)
					_, _ = h.Empty(), h.Holds("ns", name)
					if _, err := h.reg.Gather(); err != nil {
						t.Errorf("Gather() = %v", err)
					}
				}
			}
		})
	}
	putting.Wait()
	s.setUp(true)
	if err := process.Poll(t.Context(), "all is sent", process.Until(h.Empty)); err != nil {
		t.Fatal(err)
	}
	stop()
	if err := j.Close(); err != nil {
		t.Error(err)
	}
	last := map[string]string{}
	for _, body := range s.got() {
		name, round, _ := strings.Cut(body, " ")
		last[name] = round
	}
	if len(last) != clients*names {
		t.Errorf("%d names were sent, want %d", len(last), clients*names)
	}
	for name, round := range last {
		if round != fmt.Sprint(rounds-1) {
			t.Errorf("of %s round %s was sent last, want %d", name, round, rounds-1)
		}
	}
}

func TestMetrics(t *testing.T) {
	h := open(t, memfs.New(), newServer(), func(c *Config) { c.MaxEvents = 2 })
	h.put(t, event("a", "1"), event("b", "22"), event("c", "333"))
	if problems, err := testutil.GatherAndLint(h.reg); err != nil || len(problems) > 0 {
		t.Errorf("GatherAndLint() = %v, %v, want nothing", problems, err)
	}
	h.server.setAnswer(always(http.StatusConflict, alreadyExists))
	if _, err := h.sendOldest(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	want := `# HELP edgehub_outbox_bytes Bytes of the bodies of the Events that wait to be sent.
# TYPE edgehub_outbox_bytes gauge
edgehub_outbox_bytes 3
# HELP edgehub_outbox_dropped_total Events that were dropped: full (the oldest went to keep the limits), or damaged (on disk).
# TYPE edgehub_outbox_dropped_total counter
edgehub_outbox_dropped_total{reason="damaged"} 0
edgehub_outbox_dropped_total{reason="full"} 1
# HELP edgehub_outbox_events Events that wait to be sent.
# TYPE edgehub_outbox_events gauge
edgehub_outbox_events 1
# HELP edgehub_outbox_sent_total Events sent to the API server, by its answer: created, exists (it had been sent before), or rejected.
# TYPE edgehub_outbox_sent_total counter
edgehub_outbox_sent_total{result="created"} 0
edgehub_outbox_sent_total{result="exists"} 1
edgehub_outbox_sent_total{result="rejected"} 0
`
	if err := testutil.GatherAndCompare(h.reg, bytes.NewReader([]byte(want))); err != nil {
		t.Error(err)
	}
}
