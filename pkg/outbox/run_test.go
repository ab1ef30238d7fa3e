// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package outbox

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

// run runs the outbox until stop is called.
func (h *hub) run(t *testing.T) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- h.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run() = %v", err)
		}
	}
	t.Cleanup(stop)
	return stop
}

// pass lets virtual time pass, and all that happens in it happen.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func wantPosts(t *testing.T, s *server, want ...string) {
	t.Helper()
	synctest.Wait()
	if d := cmp.Diff(want, s.got()); d != "" {
		t.Fatalf("sent (-want +got):\n%s", d)
	}
}

func TestRunWaitsForTheLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		s.setUp(false)
		h := open(t, memfs.New(), s)
		h.run(t)
		h.put(t, event("a", "1"), event("b", "2"))
		pass(24 * time.Hour)
		wantPosts(t, s)
		s.setUp(true)
		wantPosts(t, s, "1", "2") // at once
		h.put(t, event("a", "3"))
		wantPosts(t, s, "1", "2", "3")
		s.setUp(false)
		h.put(t, event("c", "4"))
		pass(time.Hour)
		wantPosts(t, s, "1", "2", "3")
		s.setUp(true)
		wantPosts(t, s, "1", "2", "3", "4")
	})
}

// The link breaks while something is sent, and Up says so later.
func TestRunFindsTheLinkDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		s.setAnswer(func(*http.Request, string) (*http.Response, error) { return nil, errDown })
		h := open(t, memfs.New(), s)
		h.put(t, event("a", "1"))
		h.run(t)
		pass(100 * time.Second)
		// At the shortest interval, however long it takes.
		if n := len(s.got()); n < 50 || n > 101 {
			t.Errorf("%d tries in 100 s, want one in 1 to 2 s", n)
		}
		s.setUp(false)
		pass(time.Minute)
		n := len(s.got())
		pass(time.Hour)
		if got := len(s.got()); got != n {
			t.Errorf("%d tries while the link was down, want none", got-n)
		}
		s.setAnswer(always(http.StatusCreated, ""))
		s.setUp(true)
		synctest.Wait()
		if !h.Empty() {
			t.Error("not sent when the link was back")
		}
	})
}

func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var times []time.Duration
		start := time.Now()
		h := open(t, memfs.New(), newServer())
		answers := append(slices.Repeat([]int{503}, 7), 201, 401, 500, 429, 201)
		h.server.setAnswer(func(*http.Request, string) (*http.Response, error) {
			times = append(times, time.Since(start))
			code := answers[0]
			answers = answers[1:]
			return reply(code, ""), nil
		})
		h.put(t, event("a", "1"), event("b", "2"))
		h.run(t)
		pass(10 * time.Minute)
		limits := []time.Duration{2, 4, 8, 16, 30, 30, 30, 0, 2, 4, 8}
		if len(times) != len(limits)+1 {
			t.Fatalf("%d requests, want %d", len(times), len(limits)+1)
		}
		for i, limit := range limits {
			limit *= time.Second
			if got := times[i+1] - times[i]; got < limit/2 || got > limit {
				t.Errorf("waited %v after try %d, want %v to %v", got, i+1, limit/2, limit)
			}
		}
		if d := cmp.Diff([]string{"1", "2"}, slices.Compact(h.server.got())); d != "" {
			t.Errorf("sent (-want +got):\n%s", d)
		}
	})
	seen := map[time.Duration]bool{}
	for range 10 {
		seen[backoff(3)] = true
	}
	if len(seen) < 5 {
		t.Errorf("backoff(3) = %v, want it random", seen)
	}
}

// An Event that some webhook fails for does not hold up the others for ever; an API server
// that has no time is waited for.
func TestInternalErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := open(t, memfs.New(), newServer())
		var free atomic.Bool
		h.server.setAnswer(func(_ *http.Request, body string) (*http.Response, error) {
			switch {
			case body == "bad":
				return reply(500, ""), nil
			case !free.Load():
				return reply(503, ""), nil
			}
			return reply(201, ""), nil
		})
		h.put(t, event("a", "bad"), event("b", "good"))
		h.run(t)
		pass(time.Hour)
		bad := slices.Index(h.server.got(), "good")
		if bad != maxInternalErrors+1 || h.sent(rejected) != 1 || h.Empty() {
			t.Errorf("sent %d times before it was given up, %d rejected, empty: %v, want %d, 1, false", bad, h.sent(rejected), h.Empty(), maxInternalErrors+1)
		}
		free.Store(true)
		pass(time.Minute)
		if h.sent(created) != 1 || !h.Empty() {
			t.Errorf("%d created, empty: %v, want 1, true", h.sent(created), h.Empty())
		}
	})
}

func TestRetryAfter(t *testing.T) {
	for _, tc := range []struct {
		header   string
		min, max time.Duration
	}{
		{"", time.Second, 2 * time.Second},
		{"0", time.Second, 2 * time.Second},
		{"7", 7 * time.Second, 7 * time.Second},
		{"60", time.Minute, time.Minute},
		{"3601", time.Minute, time.Minute},
		{"99999999999999999", time.Minute, time.Minute},
		{"99999999999999999999999", time.Second, 2 * time.Second},
		{"-7", time.Second, 2 * time.Second},
		{"Wed, 21 Oct 2099 07:28:00 GMT", time.Second, 2 * time.Second},
	} {
		t.Run(tc.header, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var times []time.Time
				h := open(t, memfs.New(), newServer())
				h.server.setAnswer(func(*http.Request, string) (*http.Response, error) {
					if times = append(times, time.Now()); len(times) > 1 {
						return reply(http.StatusCreated, ""), nil
					}
					resp := reply(http.StatusTooManyRequests, "")
					resp.Header.Set("Retry-After", tc.header)
					return resp, nil
				})
				h.put(t, event("a", "1"))
				h.run(t)
				pass(2 * time.Minute)
				if len(times) != 2 {
					t.Fatalf("%d requests, want 2", len(times))
				}
				if got := times[1].Sub(times[0]); got < tc.min || got > tc.max {
					t.Errorf("waited %v, want %v to %v", got, tc.min, tc.max)
				}
			})
		})
	}
}

func TestSendTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := open(t, memfs.New(), newServer())
		hang := func(req *http.Request, _ string) (*http.Response, error) {
			<-req.Context().Done()
			return nil, req.Context().Err()
		}
		h.server.setAnswer(hang)
		h.put(t, event("a", "1"))
		stop := h.run(t)
		pass(sendTimeout - time.Millisecond)
		wantPosts(t, h.server, "1")
		pass(2*time.Second + time.Millisecond)
		wantPosts(t, h.server, "1", "1")
		start := time.Now()
		stop()
		if d := time.Since(start); d > 0 {
			t.Errorf("Run returned after %v, want at once", d)
		}
		if !h.Holds("ns", "a") {
			t.Error("what was cut off does not wait any more")
		}
	})
}

func TestPutWhileSending(t *testing.T) {
	for _, tc := range []struct {
		name    string
		puts    []Event // while 1, the body of a, is sent; b, 2, waits
		code    int     // for 1
		want    []string
		dropped int
	}{
		{"others", []Event{event("c", "3")}, 201, []string{"1", "2", "3"}, 0},
		{"the same is sent after it", []Event{event("a", "3"), event("c", "4")}, 201, []string{"1", "3", "2", "4"}, 0},
		{"the same twice", []Event{event("a", "3"), event("a", "4")}, 201, []string{"1", "4", "2"}, 0},
		{"the same, and the old one fails", []Event{event("a", "3")}, 500, []string{"1", "3", "2"}, 0},
		{"the same, and the old one is rejected", []Event{event("a", "3")}, 403, []string{"1", "3", "2"}, 0},
		{"it is dropped", []Event{event("c", "3"), event("d", "4")}, 201, []string{"1", "2", "3", "4"}, 1},
		{"it is dropped and fails", []Event{event("c", "3"), event("d", "4")}, 500, []string{"1", "2", "3", "4"}, 1},
		{"it is dropped and put again", []Event{event("c", "3"), event("d", "4"), event("a", "5")}, 201, []string{"1", "3", "4", "5"}, 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := open(t, memfs.New(), newServer(), func(c *Config) { c.MaxEvents = 3 })
				release := make(chan struct{})
				h.server.setAnswer(func(_ *http.Request, body string) (*http.Response, error) {
					if body == "1" {
						<-release
						return reply(tc.code, ""), nil
					}
					return reply(http.StatusCreated, ""), nil
				})
				h.put(t, event("a", "1"), event("b", "2"))
				h.run(t)
				wantPosts(t, h.server, "1")
				h.put(t, tc.puts...) // which would hang here if it waited
				close(release)
				pass(time.Minute)
				wantPosts(t, h.server, tc.want...)
				if !h.Empty() || h.dropped("full") != tc.dropped {
					t.Errorf("Empty() = %v, %d dropped, want true, %d", h.Empty(), h.dropped("full"), tc.dropped)
				}
			})
		})
	}
}

// after is what the next process would send if this one died now.
func (h *hub) after(t *testing.T) []string {
	t.Helper()
	next := open(t, h.fs.Kill(), newServer())
	if err := next.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	return next.waiting(t)
}

// letters are Events and their bodies.
func letters(n int) (all []Event, bodies []string) {
	for i := range n {
		s := string(rune('A' + i))
		all, bodies = append(all, event(s, s)), append(bodies, s)
	}
	return all, bodies
}

func TestSentIsNoted(t *testing.T) {
	all, bodies := letters(40)
	h := open(t, memfs.New(), newServer())
	h.put(t, all...)
	for n := range 35 {
		if d := cmp.Diff(bodies[n/16*16:], h.after(t)); d != "" {
			t.Fatalf("%d were sent; after a crash there wait (-want +got):\n%s", n, d)
		}
		if _, err := h.sendOldest(t.Context(), false); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSentIsNotedInTime(t *testing.T) {
	all, bodies := letters(3)
	for n := range all {
		t.Run(fmt.Sprintf("%d after a second", n), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := open(t, memfs.New(), newServer())
				h.put(t, all...)
				h.server.setAnswer(func(_ *http.Request, body string) (*http.Response, error) {
					if body == bodies[n] {
						return nil, errDown
					}
					return reply(http.StatusCreated, ""), nil
				})
				h.run(t)
				pass(noteWithin - time.Millisecond)
				if d := cmp.Diff(bodies, h.after(t)); d != "" {
					t.Errorf("noted at once, want some together (-want +got):\n%s", d)
				}
				pass(time.Millisecond)
				if d := cmp.Diff(bodies[n:], h.after(t)); d != "" {
					t.Errorf("not noted after %v (-want +got):\n%s", noteWithin, d)
				}
			})
		})
	}
	t.Run("with the next Put", func(t *testing.T) {
		h := open(t, memfs.New(), newServer())
		h.put(t, all[:2]...)
		h.drain(t)
		h.put(t, all[2])
		if d := cmp.Diff(bodies[2:3], h.after(t)); d != "" {
			t.Errorf("after Put and a crash there wait (-want +got):\n%s", d)
		}
	})
	t.Run("at the end of Run", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h := open(t, memfs.New(), newServer())
			h.put(t, all...)
			stop := h.run(t)
			wantPosts(t, h.server, bodies...)
			stop()
			if got := h.after(t); len(got) > 0 {
				t.Errorf("after Run there wait %q, want nothing", got)
			}
		})
	})
}

func TestIdleWritesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer()
		h := open(t, memfs.New(), s)
		stop := h.run(t)
		quiet := func(what string) {
			t.Helper()
			pass(time.Minute) // for what is still to be noted
			ops := h.fs.Ops()
			pass(24 * time.Hour)
			if got := h.fs.Ops(); got != ops {
				t.Errorf("%s: %d operations of the file system in a day, want none", what, got-ops)
			}
		}
		quiet("empty")
		h.put(t, event("a", "1"))
		quiet("after sending")
		s.setUp(false)
		h.put(t, event("b", "2"))
		quiet("without link")
		stop()
	})
}

func TestRunTriesAgainToRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := open(t, memfs.New(), newServer())
		other, err := h.journal.OpenLog(logName, journal.Replay{})
		if err != nil {
			t.Fatal(err)
		}
		h.run(t)
		if err := h.Put(t.Context(), event("a", "1")); !errors.Is(err, journal.ErrOpen) {
			t.Errorf("Put() = %v, want ErrOpen", err)
		}
		pass(time.Second)
		if err := other.Close(); err != nil {
			t.Fatal(err)
		}
		pass(diskRetry)
		h.put(t, event("a", "1"))
		wantPosts(t, h.server, "1")
	})
}

// Answers that are no 500 must not use up the 500s of an Event: one 500 after an API server that
// was busy for ten minutes loses it.
func TestOneInternalErrorAfterBusyIsNotTheLast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := open(t, memfs.New(), newServer())
		n := 0
		h.server.setAnswer(func(*http.Request, string) (*http.Response, error) {
			n++
			switch {
			case n <= maxInternalErrors:
				return reply(503, ""), nil
			case n == maxInternalErrors+1:
				return reply(500, ""), nil // the first
			}
			return reply(201, ""), nil
		})
		h.put(t, event("a", "1"))
		h.run(t)
		pass(time.Hour)
		if h.sent(rejected) != 0 || h.sent(created) != 1 {
			t.Errorf("%d rejected, %d created; want 0 and 1: it was answered 500 once", h.sent(rejected), h.sent(created))
		}
	})
}

// An Event on which a webhook hangs as long as one may (30 s) must not hold up all others for ever.
func TestHangingEventDoesNotBlockForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := open(t, memfs.New(), newServer())
		h.server.setAnswer(func(req *http.Request, body string) (*http.Response, error) {
			if body == "bad" {
				select {
				case <-req.Context().Done():
					return nil, req.Context().Err()
				case <-time.After(30*time.Second + 50*time.Millisecond): // webhook timeoutSeconds: 30, then 500
					return reply(500, ""), nil
				}
			}
			return reply(201, ""), nil
		})
		h.put(t, event("a", "bad"), event("b", "good"))
		h.run(t)
		pass(24 * time.Hour)
		if !slices.Contains(h.server.got(), "good") {
			t.Errorf("after a day with the link up the second Event was never sent: the first was tried %d times", len(h.server.got()))
		}
	})
}
