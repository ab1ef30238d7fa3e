// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package feeds

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	flapsByDefault = 20
	flapWrites     = 40 * time.Millisecond // between two writes to a resource
	restPeriod     = 10 * time.Second      // long enough that the hub collects its garbage
	mostTombstones = 6e6                   // bytes: what is remembered of 512 deletions in each of twenty scopes
)

// A kind of cut.
type cut string

const (
	reset         cut = "RST"
	truncated     cut = "mid-frame"
	silent        cut = "black hole"
	silentUp      cut = "black hole to the server"
	silentDown    cut = "black hole to the client"
	serverStopped cut = "API server restart"
	serverKilled  cut = "API server killed"
)

// cuts returns n cuts of every kind, in the order of the dice. The slow ones are
// few.
func cuts(n int, rng *rand.Rand) (all []cut) {
	for range max(1, n/40) {
		all = append(all, silent, silentUp, silentDown)
	}
	for range max(1, n/80) {
		all = append(all, serverStopped, serverKilled)
	}
	all = all[:min(n, len(all))]
	for len(all) < n {
		all = append(all, []cut{reset, truncated}[len(all)%2])
	}
	rng.Shuffle(n, func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// A span of time in which the API server had no history to resume from.
type outage struct{ from, to time.Time }

// flapping is a link that is cut again and again.
type flapping struct {
	*rig.Rig
	rng     *rand.Rand
	outages []outage
	done    map[cut]int
	took    map[cut]time.Duration
}

// pause lets up to d go by.
func (f *flapping) pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(rand.N(d)):
	case <-ctx.Done():
	}
}

func (f *flapping) cut(ctx context.Context, c cut) {
	f.T.Helper()
	start := time.Now()
	switch c {
	case reset:
		f.Link.Cut()
		f.pause(ctx, 400*time.Millisecond)
		f.Must(f.Link.Heal())
	case truncated:
		before := f.Link.Stats()
		f.Link.TruncateAfter(int64(1 + f.rng.IntN(5000)))
		within, cancel := context.WithTimeout(ctx, time.Second)
		// Until a connection is new; what is truncated while there is none, is so
		// later.
		_ = process.Poll(within, "a connection is made", process.Until(func() bool { return f.Link.Stats().Connections > before.Connections }))
		cancel()
	case silent, silentUp, silentDown:
		f.silence(ctx, c)
	default:
		f.WaitLink(true)
		f.WaitFeeds()
		from := time.Now()
		f.RestartAPIServer(c == serverKilled)
		f.WaitLink(true)
		f.WaitFeeds()
		f.outages = append(f.outages, outage{from, time.Now()})
	}
	if f.rng.IntN(3) == 0 {
		// Feeds that never get through would be so far behind that the API server
		// itself has forgotten what came since.
		f.WaitLink(true)
		f.WaitFeeds()
	}
	f.pause(ctx, 400*time.Millisecond)
	f.done[c]++
	f.took[c] += time.Since(start)
}

// silence has the link lose packets without a word, until the hub has noticed and
// a bit longer.
func (f *flapping) silence(ctx context.Context, c cut) {
	f.T.Helper()
	f.WaitLink(true)
	began := time.Now()
	f.Link.BlackHole(map[cut]link.Direction{silent: link.Both, silentUp: link.ToServer, silentDown: link.ToClient}[c])
	f.WaitLink(false)
	found := time.Since(began)
	f.pause(ctx, time.Second)
	healed := time.Now()
	f.Online()
	f.T.Logf("%s: noticed after %v, up %v after it was healed", c, found.Round(time.Millisecond), time.Since(healed).Round(time.Millisecond))
}

// resources are what a process holds.
type resources struct {
	goroutines, heap float64
	files            float64 // open ones, but segments of the journal
	deleted          float64 // of them, and of segments: those that are no more
}

func (r resources) String() string {
	return fmt.Sprintf("%.0f goroutines, %.1f MB of heap, %.0f open files beside the journal's, %.0f deleted ones", r.goroutines, r.heap/1e6, r.files, r.deleted)
}

func (f *flapping) resources(ctx context.Context) (r resources, err error) {
	for name, v := range map[string]*float64{"go_goroutines": &r.goroutines, "go_memstats_heap_inuse_bytes": &r.heap} {
		if *v, err = f.Hub.Metric(ctx, name); err != nil {
			return r, err
		}
	}
	fds := fmt.Sprintf("/proc/%d/fd", f.Hub.PID())
	entries, err := os.ReadDir(fds)
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(fds, e.Name()))
		if err != nil {
			continue // closed since
		}
		if !strings.HasPrefix(target, filepath.Join(f.Hub.DataDir(), "journal")) {
			r.files++
		}
		if strings.HasSuffix(target, " (deleted)") {
			r.deleted++
		}
	}
	return r, err
}

// atRest is the least that the hub holds within a few seconds in which nothing
// happens: it collects its garbage then, and what comes and goes is no leak.
func (f *flapping) atRest(ctx context.Context) resources {
	f.T.Helper()
	var least resources
	began := time.Now()
	f.Must(process.Poll(ctx, "the hub has been at rest", func(ctx context.Context) error {
		r, err := f.resources(ctx)
		if err != nil {
			return err
		}
		if least == (resources{}) {
			least = r
		}
		least = resources{min(least.goroutines, r.goroutines), min(least.heap, r.heap), min(least.files, r.files), min(least.deleted, r.deleted)}
		if rested := time.Since(began); rested < restPeriod {
			return fmt.Errorf("for %v", rested)
		}
		return nil
	}))
	return least
}

// wantBack wants the hub to hold about as much as before.
func (f *flapping) wantBack(before, now resources) {
	f.T.Helper()
	f.T.Logf("before: %v; after: %v", before, now)
	// Files: a connection or two. Heap: what is remembered of deletions.
	if now.goroutines > before.goroutines+8 || now.files > before.files+4 || now.deleted > before.deleted || now.heap > before.heap*1.3+mostTombstones {
		f.T.Errorf("the hub holds more than before")
	}
}

// TestFlaps cuts the link in every way while twenty informers watch a cluster that
// changes all the time. None of them is to notice: no list, no watch that ends
// before its time, no step back.
func TestFlaps(t *testing.T) {
	t.Parallel()
	n := rig.Number(t, "EDGEHUB_FLAPS", flapsByDefault)
	seed := rig.Seed(t)
	f := &flapping{Rig: newRig(t), rng: rand.New(rand.NewPCG(seed, 0)), done: map[cut]int{}, took: map[cut]time.Duration{}}
	process.Run(t, f.Hub)
	f.WaitLink(true)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	var g errgroup.Group
	writing, stopWriting := context.WithCancel(ctx)
	defer stopWriting()
	var writers []*writer
	for i, gvr := range []schema.GroupVersionResource{configMapsGVR, secretsGVR, podsGVR, rig.Widgets} {
		w := newWriter(f.Rig, gvr, seed+uint64(i))
		writers = append(writers, w)
		for range 3 * names {
			f.Must(w.step(ctx))
		}
	}
	began := time.Now()
	informers := startInformers(ctx, f.Rig, specs())
	f.WaitFeeds()
	synced := time.Now()
	before := f.atRest(ctx)
	for _, w := range writers {
		g.Go(func() error { return w.run(writing, flapWrites) })
	}
	for _, c := range cuts(n, f.rng) {
		f.cut(ctx, c)
	}
	f.Online()
	f.WaitFeeds()
	flapped := time.Since(synced)
	stopWriting()
	f.Must(g.Wait())
	if err := converge(ctx, informers); err != nil {
		t.Error(err)
	}
	f.wantBack(before, f.atRest(ctx))
	f.report(informers, writers, began, synced)
	t.Logf("%d cuts in %v: %v", n, flapped.Round(time.Second), f.kinds())
}

func (f *flapping) kinds() (all []string) {
	for _, c := range slices.Sorted(maps.Keys(f.done)) {
		all = append(all, fmt.Sprintf("%s %d × %v", c, f.done[c], (f.took[c]/time.Duration(f.done[c])).Round(100*time.Millisecond)))
	}
	return all
}

// report judges what went over the informers' wires and what the API server was
// asked.
func (f *flapping) report(informers []*informer, writers []*writer, began, synced time.Time) {
	f.T.Helper()
	for _, i := range informers {
		got := i.tally()
		if len(got.wholes) != 1 {
			f.T.Errorf("%v asked %d times for the whole state, want once: %q", i, len(got.wholes), got.wholes)
		}
		if len(got.early) > 0 {
			f.T.Errorf("%v: %d watches ended before their time: %q", i, len(got.early), got.early)
		}
		for _, p := range got.problems {
			f.T.Errorf("%v: %s", i, p)
		}
	}
	events, err := f.ControlPlane.Requests(began)
	f.Must(err)
	during := 0
	for _, e := range wholeStates(events) {
		at := e.RequestReceivedTimestamp.Time
		switch {
		case at.Before(synced):
		case slices.ContainsFunc(f.outages, func(o outage) bool { return !at.Before(o.from) && !at.After(o.to) }):
			during++
		default:
			f.T.Errorf("the hub asked for a whole state at %s: %s %s as %s", at.Format(time.TimeOnly), e.Verb, e.RequestURI, e.User.Username)
		}
	}
	for _, e := range events {
		if strings.HasPrefix(e.UserAgent, agentPrefix) && e.RequestReceivedTimestamp.After(synced) {
			f.T.Errorf("the hub passed on %s %s of %s", e.Verb, e.RequestURI, e.UserAgent)
		}
	}
	var writes, failed int64
	for _, w := range writers {
		writes, failed = writes+w.writes.Load(), failed+w.failed.Load()
	}
	resets, err := f.Hub.Metric(f.T.Context(), "edgehub_cache_history_resets_total")
	f.Must(err)
	if resets != 0 {
		f.T.Errorf("edgehub_cache_history_resets_total = %v, and nothing was reset", resets)
	}
	resumes, err := f.Hub.Metric(f.T.Context(), "edgehub_cache_feed_resumes_total")
	f.Must(err)
	f.T.Logf("%d writes (%d without an API server), %d whole states in %d restarts of the API server, %d watches of the hub, %v of them resumed",
		writes, failed, during, len(f.outages), len(ownRequests(events))-len(wholeStates(events)), resumes)
}
