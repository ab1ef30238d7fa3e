// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"context"
	"errors"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// A fakeLink answers probes; it is how the server behaves.
type fakeLink struct {
	hang    atomic.Bool  // no answer comes
	hangs   atomic.Int32 // so many probes get no answer, then the rest as usual
	status  atomic.Int32 // 0: ok
	refuse  atomic.Bool
	begun   atomic.Int32 // probes
	waiting atomic.Int32 // of these, now
	delay   atomic.Int64 // of an answer
}

func (f *fakeLink) try(ctx context.Context) error {
	f.begun.Add(1)
	f.waiting.Add(1)
	defer f.waiting.Add(-1)
	if f.refuse.Load() {
		return syscall.ECONNREFUSED
	}
	if f.hang.Load() || f.hangs.Add(-1) >= 0 {
		<-ctx.Done()
		return ctx.Err()
	}
	select {
	case <-time.After(time.Duration(f.delay.Load())):
	case <-ctx.Done():
		return ctx.Err()
	}
	if status := f.status.Load(); status != 0 {
		return &answerError{int(status)}
	}
	return nil
}

// inBubble runs test with a prober with the default times, in virtual time. The
// server is up and has just been probed.
func inBubble(t *testing.T, test func(t *testing.T, s *server, f *fakeLink)) {
	t.Helper()
	creds := &credentials{}
	synctest.Test(t, func(t *testing.T) {
		m, err := newMetrics(nil)
		if err != nil {
			t.Fatal(err)
		}
		cfg := Config{}.withDefaults()
		s := newServer("a:443", &cfg, m, creds, func() {})
		f := &fakeLink{}
		p := newProber(s)
		p.try = f.try
		ctx, cancel := context.WithCancel(quiet(t.Context()))
		done := make(chan struct{})
		go func() { defer close(done); p.run(ctx) }()
		synctest.Wait()
		if !isUp(s) {
			t.Fatal("server is down after a good probe, want it up")
		}
		test(t, s, f)
		cancel()
		<-done
		s.close()
	})
}

func isUp(s *server) bool { return s.current() != nil }

// until returns how long it took, in steps of 10 ms of virtual time.
func until(t *testing.T, limit time.Duration, condition func() bool) time.Duration {
	t.Helper()
	start := time.Now()
	for !condition() {
		if time.Since(start) > limit {
			t.Fatalf("not within %v", limit)
		}
		<-time.After(10 * time.Millisecond)
		synctest.Wait()
	}
	return time.Since(start)
}

func TestProberFindsDeadLink(t *testing.T) {
	for range 20 { // the period is random
		inBubble(t, func(t *testing.T, s *server, f *fakeLink) {
			<-time.After(time.Hour)
			f.hang.Store(true)
			until(t, 9100*time.Millisecond, func() bool { return !isUp(s) })
		})
	}
}

func TestProberFindsHealedLink(t *testing.T) {
	for range 20 {
		inBubble(t, func(t *testing.T, s *server, f *fakeLink) {
			f.hang.Store(true)
			<-time.After(time.Hour)
			synctest.Wait()
			if n := len(s.poke); n > 1 {
				t.Errorf("%d pokes wait, want at most 1", n)
			}
			f.hang.Store(false)
			until(t, 2010*time.Millisecond, func() bool { return isUp(s) })
		})
	}
}

func TestProberStaysUp(t *testing.T) {
	for _, test := range []struct {
		name  string
		fault func(*fakeLink)
	}{
		{"one lost probe", func(f *fakeLink) { f.hangs.Store(1) }},
		{"slow answers", func(f *fakeLink) { f.delay.Store(int64(2900 * time.Millisecond)) }},
		{"one bad answer", func(f *fakeLink) {
			f.status.Store(500)
			before := f.begun.Load()
			for f.begun.Load() == before {
				<-time.After(10 * time.Millisecond)
				synctest.Wait()
			}
			f.status.Store(0)
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, s *server, f *fakeLink) {
				session := s.current()
				test.fault(f)
				<-time.After(time.Minute)
				if s.current() != session {
					t.Errorf("server went down for %v", s.why())
				}
			})
		})
	}
}

func TestProberBadAnswers(t *testing.T) {
	inBubble(t, func(t *testing.T, s *server, f *fakeLink) {
		f.status.Store(403)
		took := until(t, 7*time.Second, func() bool { return !isUp(s) })
		if n := f.begun.Load(); n < 3 {
			t.Errorf("down after %v and %d probes, want the good one and two bad ones", took, n)
		}
		var answer *answerError
		if !errors.As(s.why(), &answer) || answer.status != 403 {
			t.Errorf("why() = %v, want the answer", s.why())
		}
		<-time.After(time.Minute)
		if isUp(s) {
			t.Error("server came up by 403")
		}
		f.status.Store(0)
		until(t, 2010*time.Millisecond, func() bool { return isUp(s) })
	})
}

// TestProberSignsOfLife is a thin link that a large list fills: probes are late,
// but bytes come.
func TestProberSignsOfLife(t *testing.T) {
	inBubble(t, func(t *testing.T, s *server, f *fakeLink) {
		stop := make(chan struct{})
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				select {
				case <-stop:
					return
				case <-time.After(time.Second):
					s.alive()
				}
			}
		}()
		session := s.current()
		f.delay.Store(int64(15 * time.Second))
		<-time.After(5 * time.Minute)
		synctest.Wait()
		if s.current() != session {
			t.Errorf("server went down for %v, want it up while bytes come", s.why())
		}
		f.hang.Store(true) // bytes come, but nothing ever arrives there
		until(t, 50*time.Second, func() bool { return !isUp(s) })
		close(stop)
		<-done
	})
}

func TestProberBackoff(t *testing.T) {
	inBubble(t, func(t *testing.T, s *server, f *fakeLink) {
		<-time.After(time.Minute)
		f.refuse.Store(true)
		s.down(s.current(), syscall.ECONNREFUSED)
		begun := f.begun.Load()
		until(t, 260*time.Millisecond, func() bool { return f.begun.Load() > begun })
		<-time.After(10 * time.Second) // now it is at its longest
		begun = f.begun.Load()
		<-time.After(100 * time.Second)
		synctest.Wait()
		if n := f.begun.Load() - begun; n < 50 || n > 150 {
			t.Errorf("%d probes in 100 s while down, want about 90", n)
		}
	})
}

func TestProberLimitsWaitingProbes(t *testing.T) {
	inBubble(t, func(t *testing.T, s *server, f *fakeLink) {
		f.hang.Store(true)
		most := int32(0)
		for start := time.Now(); time.Since(start) < 5*time.Minute; {
			<-time.After(50 * time.Millisecond)
			synctest.Wait()
			most = max(most, f.waiting.Load())
		}
		if most < 5 || most > maxTries {
			t.Errorf("%d probes waited at the same time, want some, and at most %d", most, maxTries)
		}
		if !errors.Is(s.why(), errProbeTimeout) {
			t.Errorf("why() = %v, want %v", s.why(), errProbeTimeout)
		}
	})
}

func TestSuspicion(t *testing.T) {
	inBubble(t, func(t *testing.T, s *server, f *fakeLink) {
		<-time.After(time.Second)
		f.delay.Store(int64(500 * time.Millisecond))
		session := s.current()
		s.suspect()
		synctest.Wait() // a probe is on its way
		<-time.After(100 * time.Millisecond)
		s.suspect() // and this one is not cleared by it
		start := time.Now()
		if err := s.wait(t.Context(), session); err != nil {
			t.Fatalf("wait() = %v, want nil", err)
		}
		if took := time.Since(start); took < 500*time.Millisecond || took > 1100*time.Millisecond {
			t.Errorf("wait() took %v, want until a probe that began after the suspicion", took)
		}
		if err := s.wait(t.Context(), session); err != nil {
			t.Errorf("wait() above suspicion = %v, want nil", err)
		}

		f.hang.Store(true)
		s.suspect()
		start = time.Now()
		if err := s.wait(t.Context(), session); !errors.Is(err, ErrUnavailable) {
			t.Errorf("wait() = %v, want ErrUnavailable", err)
		}
		if took := time.Since(start); took > 4100*time.Millisecond {
			t.Errorf("wait() took %v, want until two probes were missed", took)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := s.wait(ctx, session); err == nil {
			t.Error("wait() with its context ended = nil, want an error")
		}
	})
}

func TestSuspicionsDoNotFlood(t *testing.T) {
	inBubble(t, func(t *testing.T, s *server, f *fakeLink) {
		begun := f.begun.Load()
		for range 10_000 {
			s.suspect()
			<-time.After(time.Millisecond)
		}
		synctest.Wait()
		if n := f.begun.Load() - begun; n < 50 || n > 110 {
			t.Errorf("%d probes in 10 s of suspicions, want at most ten a second", n)
		}
		if !isUp(s) {
			t.Errorf("down for %v, want up", s.why())
		}
	})
}

// TestFlappingBacksOff is a path that lets probes through and resets requests.
func TestFlappingBacksOff(t *testing.T) {
	inBubble(t, func(t *testing.T, s *server, f *fakeLink) {
		ups := 0
		for start := time.Now(); time.Since(start) < 100*time.Second; {
			if x := s.current(); x != nil {
				ups++
				x.failed(syscall.ECONNRESET)
			}
			<-time.After(10 * time.Millisecond)
			synctest.Wait()
		}
		if ups > 160 || ups < 40 {
			t.Errorf("came up %d times in 100 s, want about once a second", ups)
		}
	})
}

func TestOldSessionChangesNothing(t *testing.T) {
	inBubble(t, func(t *testing.T, s *server, f *fakeLink) {
		old := s.current()
		old.failed(syscall.ECONNRESET)
		if isUp(s) {
			t.Fatal("up after a reset, want down")
		}
		until(t, 2*time.Second, func() bool { return isUp(s) })
		before := s.suspicions()
		old.failed(syscall.ECONNRESET)
		old.failed(errors.New("late"))
		if !isUp(s) || s.suspicions() != before {
			t.Error("an error of the old session was taken for one of the new")
		}
		if !errors.Is(context.Cause(old.ctx), ErrUnavailable) || !errors.Is(context.Cause(old.ctx), syscall.ECONNRESET) {
			t.Errorf("cause of the old session = %v, want ErrUnavailable and ECONNRESET", context.Cause(old.ctx))
		}
	})
}

func TestChoose(t *testing.T) {
	newUpstream := func(t *testing.T) (*Upstream, *server, *server) {
		m, err := newMetrics(nil)
		if err != nil {
			t.Fatal(err)
		}
		u := &Upstream{cfg: Config{}.withDefaults(), metrics: m, changed: make(chan struct{})}
		a := newServer("a:1", &u.cfg, m, &credentials{}, u.choose)
		b := newServer("b:1", &u.cfg, m, &credentials{}, u.choose)
		u.servers = []*server{a, b}
		return u, a, b
	}
	u, a, b := newUpstream(t)
	steps := []struct {
		name string
		do   func()
		want string
	}{
		{"nothing is up", func() {}, ""},
		{"the second is up", func() { b.good(t.Context(), b.suspicions()) }, "b:1"},
		{"the first came up", func() { a.good(t.Context(), a.suspicions()) }, "b:1"},
		{"and was good again", func() { a.good(t.Context(), a.suspicions()) }, "b:1"},
		{"and again", func() { a.good(t.Context(), a.suspicions()) }, "a:1"},
		{"the second is settled, too", func() {
			for range 5 {
				b.good(t.Context(), b.suspicions())
			}
		}, "a:1"},
		{"the first is lost", func() { a.down(a.current(), errors.New("x")) }, "b:1"},
		{"the first is back", func() { a.good(t.Context(), a.suspicions()) }, "b:1"},
		{"the second is lost", func() { b.down(b.current(), errors.New("x")) }, "a:1"},
		{"both are lost", func() { a.down(a.current(), errors.New("x")) }, ""},
	}
	for _, step := range steps {
		changed, before := u.Changed(), u.Up()
		step.do()
		if got := u.Server(); got != step.want {
			t.Errorf("%s: Server() = %q, want %q", step.name, got, step.want)
		}
		select {
		case <-changed:
			if u.Up() == before {
				t.Errorf("%s: Changed() was closed, want only when Up changes", step.name)
			}
		default:
			if u.Up() != before {
				t.Errorf("%s: Changed() is open, want it closed", step.name)
			}
		}
	}
	for _, s := range u.servers {
		s.close()
	}
}
