// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package linklocal

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/klog/v2"
)

// fakeNode is a node whose address can be lost. What put says is set by broken,
// and whether a loss is heard of by deaf.
type fakeNode struct {
	looks, subscriptions atomic.Int32
	gone, deaf           atomic.Bool
	broken               atomic.Pointer[string]
	thief                atomic.Bool // takes the address away as soon as it is there
	events               chan struct{}
}

func (n *fakeNode) put() (string, bool, error) {
	n.looks.Add(1)
	if text := n.broken.Load(); text != nil {
		return "", false, errors.New(*text)
	}
	changed := n.gone.Swap(false)
	if n.thief.Load() {
		n.lose()
	}
	return "x0", changed, nil
}

func (n *fakeNode) lose() {
	n.gone.Store(true)
	n.tell()
}

func (n *fakeNode) tell() {
	if !n.deaf.Load() {
		n.events <- struct{}{}
	}
}

func (n *fakeNode) remove() error { return nil }

func (n *fakeNode) follow(ctx context.Context, lost func()) error {
	n.subscriptions.Add(1)
	if n.deaf.Load() {
		return errors.New("deaf")
	}
	lost()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-n.events:
			if n.deaf.Load() {
				return errors.New("deaf")
			}
			lost()
		}
	}
}

// inBubble runs f beside Run, after its first look, and ends Run.
func inBubble(t *testing.T, n *fakeNode, f func(t *testing.T, a *Address, logged func() []string)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n.events = make(chan struct{}, 100_000)
		a := newAddress(t, n)
		ctx, logged := withLog(t)
		ctx, cancel := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() { ended <- a.Run(ctx) }()
		synctest.Wait()
		f(t, a, logged)
		cancel()
		synctest.Wait()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("Run() = %v, want nil", err)
			}
		default:
			t.Error("Run goes on after the end of its context")
		}
	})
}

// pass lets time go by.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func restored(a *Address) int { return int(testutil.ToFloat64(a.metrics.restored)) }

const back = "Link-local address is back"

func TestRunLooksWhenTold(t *testing.T) {
	n := &fakeNode{}
	inBubble(t, n, func(t *testing.T, a *Address, logged func() []string) {
		pass(time.Second)
		if got := restored(a); got != 0 || n.gone.Load() || testutil.ToFloat64(a.metrics.present) != 1 {
			t.Errorf("restored = %d while nothing was lost, want 0", got)
		}
		for i := range 3 {
			n.lose()
			pass(2 * time.Second)
			if got := restored(a); got != i+1 || n.gone.Load() {
				t.Errorf("restored = %d after loss %d, want it back", got, i+1)
			}
		}
		if diff := cmp.Diff([]string{back, back, back}, logged()); diff != "" {
			t.Errorf("logged (-want +got):\n%s", diff)
		}
	})
}

func TestRunLooksAtOnce(t *testing.T) {
	n := &fakeNode{}
	inBubble(t, n, func(t *testing.T, a *Address, _ func() []string) {
		pass(time.Second)
		n.lose()
		synctest.Wait() // and no time has gone by
		if n.gone.Load() {
			t.Error("the first loss was not mended at once")
		}
	})
}

func TestRunLooksUntold(t *testing.T) {
	n := &fakeNode{}
	n.deaf.Store(true)
	inBubble(t, n, func(t *testing.T, a *Address, logged func() []string) {
		n.gone.Store(true)
		pass(29 * time.Second)
		if looks := n.looks.Load(); looks != 1 {
			t.Errorf("%d looks in 29 s, want one", looks)
		}
		pass(2 * time.Second)
		if got := restored(a); got != 1 || n.gone.Load() {
			t.Errorf("restored = %d after 31 s, want 1", got)
		}
		pass(5 * time.Minute)
		if got := n.subscriptions.Load(); got < 10 || got > 12 {
			t.Errorf("%d subscriptions in 331 s, want one in 30 s", got)
		}
		deaf := "Changes of interfaces and addresses cannot be followed, looking now and then: deaf"
		if diff := cmp.Diff([]string{deaf, back}, logged()); diff != "" {
			t.Errorf("logged (-want +got):\n%s", diff)
		}

		n.deaf.Store(false) // heard of from the next subscription on
		pass(31 * time.Second)
		n.lose()
		synctest.Wait()
		if n.gone.Load() {
			t.Error("a loss after the subscription came back was not mended at once")
		}
	})
}

// TestRunIsHardToFlood is a node with a storm of changes that are not ours.
func TestRunIsHardToFlood(t *testing.T) {
	n := &fakeNode{}
	inBubble(t, n, func(t *testing.T, a *Address, _ func() []string) {
		before := n.looks.Load()
		for range 10_000 {
			n.tell()
			<-time.After(time.Millisecond)
		}
		synctest.Wait()
		if looks := n.looks.Load() - before; looks < 50 || looks > 102 {
			t.Errorf("%d looks in a storm of 10 s, want about ten a second", looks)
		}
	})
}

func TestRunDoesNotFightHard(t *testing.T) {
	n := &fakeNode{}
	n.thief.Store(true)
	inBubble(t, n, func(t *testing.T, a *Address, _ func() []string) {
		pass(10 * time.Minute)
		if got := restored(a); got < 25 || got > 30 {
			t.Errorf("restored = %d in 10 min, want about one in 30 s at last", got)
		}
		n.thief.Store(false)
		pass(3 * time.Minute)
		for range 2 {
			n.lose()
			pass(200 * time.Millisecond)
			if n.gone.Load() {
				t.Error("a loss after a calm was not mended soon")
			}
		}
	})
}

func TestRunFailing(t *testing.T) {
	n := &fakeNode{}
	set := func(text string) { n.broken.Store(&text) }
	inBubble(t, n, func(t *testing.T, a *Address, logged func() []string) {
		set("one")
		n.tell()
		pass(10 * time.Minute)
		if looks := n.looks.Load(); looks < 25 || looks > 32 {
			t.Errorf("%d looks in 10 min of failures, want about one in 30 s at last", looks)
		}
		if a.Interface() != "" || testutil.ToFloat64(a.metrics.present) != 0 {
			t.Errorf("Interface() = %q after failures, want none", a.Interface())
		}
		set("two")
		pass(time.Minute)
		set("one")
		pass(time.Minute)
		n.broken.Store(nil) // somebody else mended it
		pass(time.Minute)
		if got := restored(a); got != 1 || a.Interface() != "x0" {
			t.Errorf("restored = %d, Interface() = %q, want 1 and x0", got, a.Interface())
		}
		set("one")
		n.tell()
		pass(time.Minute)
		missing := "Link-local address is not in place: "
		if diff := cmp.Diff([]string{missing + "one", missing + "two", back, missing + "one"}, logged()); diff != "" {
			t.Errorf("logged (-want +got):\n%s", diff)
		}
	})
}

func TestRunWaitsForItsSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		a := newAddress(t, &fakeSystem{
			putFunc: func() (string, bool, error) { return "x0", false, nil },
			followFunc: func(ctx context.Context, _ func()) error {
				<-ctx.Done()
				<-release
				return nil
			},
		})
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- a.Run(ctx) }()
		synctest.Wait()
		cancel()
		synctest.Wait()
		if len(ended) != 0 {
			t.Error("Run ended before its subscription")
		}
		close(release)
		if err := <-ended; err != nil {
			t.Errorf("Run() = %v, want nil", err)
		}
	})
}

func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p pace
		for i, step := range []struct {
			after   time.Duration // the step before
			trouble bool
			want    time.Duration
		}{
			{0, true, minPause},
			{0, true, 2 * minPause},
			{0, true, 4 * minPause},
			{time.Second, false, 4 * minPause}, // not yet calm
			{time.Second, true, 8 * minPause},
			{calm, false, minPause},
			{0, true, 2 * minPause},
			{calm, true, 4 * minPause}, // no look in between was without trouble
		} {
			<-time.After(step.after)
			if got := p.next(step.trouble); got != step.want {
				t.Errorf("step %d: next(%v) = %v, want %v", i, step.trouble, got, step.want)
			}
		}
		for range 20 {
			p.next(true)
		}
		if got := p.next(true); got != maxPause {
			t.Errorf("next(true) at last = %v, want %v", got, maxPause)
		}
	})
}

func TestFailuresAreBounded(t *testing.T) {
	ctx, logged := withLog(t)
	f := failures{}
	for i := range 2 * maxTexts {
		f.report(klog.FromContext(ctx), fmt.Errorf("%d", i), "x")
		if len(f) > maxTexts {
			t.Fatalf("%d texts are kept, want at most %d", len(f), maxTexts)
		}
	}
	if got := len(logged()); got != 2*maxTexts {
		t.Errorf("%d texts were logged, want all %d", got, 2*maxTexts)
	}
}
