// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package feeds

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	stepsByDefault = 60
	convergeWithin = time.Minute
)

// A walk is a random sequence of writes and faults.
type walk struct {
	*rig.Rig
	rng       *rand.Rand
	writers   []*writer
	truths    map[string]*truth // by form
	followers []*follower
	direct    *rig.Endpoint
	done      map[string]int
	lost      time.Time // when a history was for the first time
	kills     []time.Time
}

// TestRandom does what comes to the dice's mind: writes of every kind, cuts, dead
// hubs, clients that go away, API servers without a history. Watchers of every
// shape resume where they were; each event must be one that an API server could
// have sent, and in the end each holds what the API server does.
func TestRandom(t *testing.T) {
	t.Parallel()
	seed, steps := rig.Seed(t), rig.Number(t, "EDGEHUB_STEPS", stepsByDefault)
	w := &walk{Rig: newRig(t), rng: rand.New(rand.NewPCG(seed, 0)), truths: map[string]*truth{}, done: map[string]int{}}
	t.Cleanup(func() { rig.KeepSeed(t, "./test/feeds", seed, steps) })
	process.Run(t, w.Hub)
	w.WaitLink(true)
	ctx, cancel := context.WithCancel(t.Context())
	w.writers = []*writer{newWriter(w.Rig, configMapsGVR, seed+1), newWriter(w.Rig, rig.Widgets, seed+2)}
	w.write(ctx, 3*names)
	w.direct = w.Direct(w.ControlPlane.TokenConfig(writerUser))
	for _, v := range views() {
		if v.path == configMaps || v.path == widgets {
			w.truths[v.form()] = &truth{view: v, endpoint: w.direct, objects: map[string][]revision{}}
		}
	}
	w.followTruths(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	ways := through(w.Rig)
	for i, v := range views() {
		f := &follower{view: v, truth: w.truths[v.form()], endpoint: ways.of(v), watchList: i%3 != 2, held: map[string]rig.Event{}}
		w.followers = append(w.followers, f)
		running.Go(func() { _ = f.run(ctx) }) // it returns nil
	}
	began := time.Now()
	for step := range steps {
		w.step(ctx, step == steps/3 || step == 2*steps/3)
	}
	w.Online()
	w.mark(ctx)
	w.judge(ctx)
	t.Logf("%d steps in %v: %v", steps, time.Since(began).Round(time.Second), w.done)
}

func (w *walk) followTruths(ctx context.Context) {
	w.T.Helper()
	for _, t := range w.truths {
		w.Must(t.follow(ctx))
	}
}

// write has each writer do n things.
func (w *walk) write(ctx context.Context, n int) {
	w.T.Helper()
	for range n {
		for _, writer := range w.writers {
			w.Must(writer.step(ctx))
		}
	}
}

// mark waits until the truth is known up to now.
func (w *walk) mark(ctx context.Context) {
	w.T.Helper()
	for _, writer := range w.writers {
		rv, err := writer.update(ctx, "b", "mark", "even")
		if apierrors.IsNotFound(err) {
			w.Must(writer.create(ctx, "b", "mark", "odd"))
			rv, err = writer.update(ctx, "b", "mark", "even")
		}
		w.Must(err)
		for _, t := range w.truths {
			if t.view.resource == writer.gvr.Resource {
				w.Must(t.wait(ctx, rv))
			}
		}
	}
}

func (w *walk) pause(ctx context.Context, most int) {
	select {
	case <-time.After(time.Duration(w.rng.IntN(most)) * time.Millisecond):
	case <-ctx.Done():
	}
}

// step does one thing; expire is one that takes long.
func (w *walk) step(ctx context.Context, expire bool) {
	w.T.Helper()
	dice := w.rng.IntN(100)
	if expire {
		dice = 100
	}
	switch {
	case dice < 40:
		w.done["bursts of writes"]++
		w.write(ctx, 1+w.rng.IntN(15))
	case dice < 55:
		w.done["clients gone"]++
		for _, f := range w.followers {
			if w.rng.IntN(2) == 0 {
				f.drop()
			}
		}
	case dice < 67:
		w.done["cuts"]++
		w.Link.Cut()
		w.write(ctx, w.rng.IntN(10))
		w.pause(ctx, 300)
		w.Must(w.Link.Heal())
	case dice < 79:
		w.done["mid-frame"]++
		w.Link.TruncateAfter(int64(1 + w.rng.IntN(6000)))
		w.write(ctx, 1+w.rng.IntN(5))
	case dice < 87:
		w.done["hub killed"]++
		w.Must(w.Hub.Kill())
		w.kills = append(w.kills, time.Now())
		w.write(ctx, w.rng.IntN(8))
		w.Must(w.Hub.Start(ctx))
	case dice < 93:
		w.done["hub stopped"]++
		w.Must(w.Hub.Stop())
		w.write(ctx, w.rng.IntN(8))
		w.Must(w.Hub.Start(ctx))
	case dice < 100:
		w.done["link waited for"]++
		w.Online()
	default:
		w.done["history gone"]++
		w.expire(ctx)
	}
	w.pause(ctx, 250)
}

// expire restarts the API server while the link is cut, amid changes.
func (w *walk) expire(ctx context.Context) {
	w.T.Helper()
	if w.rng.IntN(2) == 0 {
		w.Online()
	}
	w.Offline()
	if w.lost.IsZero() {
		w.lost = time.Now()
	}
	w.write(ctx, 5+w.rng.IntN(20))
	w.mark(ctx)
	for _, t := range w.truths {
		t.stop()
	}
	w.RestartAPIServer(w.rng.IntN(2) == 0)
	w.followTruths(ctx)
	w.write(ctx, w.rng.IntN(20))
	w.Must(w.Link.Heal())
}

// judge waits until all hold what is true, and tells what was wrong on the way.
func (w *walk) judge(ctx context.Context) {
	w.T.Helper()
	ctx, cancel := context.WithTimeout(ctx, convergeWithin)
	defer cancel()
	var streams, starts, events, late int
	for _, f := range w.followers {
		if err := process.Poll(ctx, f.view.name+" is right", func(ctx context.Context) error { return f.agrees(ctx, w.direct) }); err != nil {
			w.T.Errorf("%v\n%q", err, f.trail())
		}
		f.mu.Lock()
		for _, p := range f.problems {
			w.T.Error(p)
		}
		// A hub that is killed before it has written down how a lost history went on
		// cannot know what came between; but for that, nobody starts again.
		for _, e := range f.expired {
			if e.at.Before(w.lost) && !w.forgotten(e.began) {
				w.T.Errorf("%v was told to start again before any history was lost\n%q", f.view, f.trace)
			}
		}
		streams, starts, events, late = streams+f.streams, starts+f.starts, events+f.events, late+f.late
		f.mu.Unlock()
	}
	w.T.Logf("%d followers: %d events over %d streams, %d from the start; %d deletions at a list's resourceVersion", len(w.followers), events, streams, starts, late)
}

// flushedWithin is longer than what a hub has learnt is in memory only.
const flushedWithin = 2 * time.Second

// forgotten reports whether a hub was killed before it had written down a state that a
// client got at began. Its next state is a later one; when the link is cut then, the
// client must start again from that.
func (w *walk) forgotten(began time.Time) bool {
	return slices.ContainsFunc(w.kills, func(killed time.Time) bool {
		return killed.After(began) && killed.Sub(began) < flushedWithin
	})
}

func (f *follower) trail() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.trace...)
}
