// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package feeds

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	resetWithin = 30 * time.Second
	// aheadBy is how many writes the restored history lacks: more than the API
	// server does by itself before the hub has looked twice.
	aheadBy = 800
)

// resetting is a cluster that is set back.
type resetting struct {
	*rig.Rig
	writers   []*writer
	informers []*informer
}

// quiet is a namespace in which nothing happens after the restore.
const quiet = "quiet"

func resetSpecs() []spec {
	return []spec{
		{kind: "typed protobuf", gvr: configMapsGVR, byNode: true, watchList: true},
		{kind: "metadata", gvr: configMapsGVR, byNode: true},
		{kind: "typed JSON", gvr: secretsGVR},
		{kind: "dynamic", gvr: rig.Widgets, watchList: true},
		{kind: "typed protobuf", gvr: configMapsGVR, namespace: quiet, byNode: true, watchList: true},
		{kind: "typed JSON", gvr: configMapsGVR, namespace: quiet, watchList: true},
		{kind: "dynamic", gvr: configMapsGVR, namespace: quiet},
	}
}

// TestHistoryReset restores etcd from an older snapshot, while the link is cut and
// while it is not. Within 30 s every client has the restored state, also where
// nothing happens any more, and hears of what is new.
func TestHistoryReset(t *testing.T) {
	t.Parallel()
	r := &resetting{Rig: newRig(t)}
	process.Run(t, r.Hub)
	r.WaitLink(true)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.Must(r.ControlPlane.CreateNamespace(ctx, quiet))
	for i, gvr := range []schema.GroupVersionResource{configMapsGVR, secretsGVR, rig.Widgets} {
		w := newWriter(r.Rig, gvr, uint64(i))
		r.writers = append(r.writers, w)
		for range 2 * names {
			r.Must(w.step(ctx))
		}
		for i := range 4 {
			r.Must(w.create(ctx, quiet, fmt.Sprintf("q-%d", i), "even"))
		}
	}
	r.informers = startInformers(ctx, r.Rig, resetSpecs())
	t.Run("while the link is cut", func(t *testing.T) {
		r.T = t
		r.reset(ctx, func(snapshot string) {
			r.Offline()
			r.Must(r.ControlPlane.RestoreEtcd(ctx, snapshot))
			r.Must(r.Link.Heal())
		})
	})
	t.Run("while connected", func(t *testing.T) {
		r.T = t
		r.reset(ctx, func(snapshot string) { r.Must(r.ControlPlane.RestoreEtcd(ctx, snapshot)) })
	})
	r.T = t
}

// advance makes many changes that the snapshot does not have, the last of them
// everywhere.
func (r *resetting) advance(ctx context.Context) {
	r.T.Helper()
	for i := range aheadBy {
		r.Must(r.writers[i%len(r.writers)].step(ctx))
	}
	for _, w := range r.writers {
		r.Must(w.create(ctx, quiet, "added", "odd"))
		_, err := w.update(ctx, quiet, "q-0", "odd")
		r.Must(err)
		r.Must(w.delete(ctx, quiet, "q-1"))
		for _, ns := range []string{"a", "b"} {
			r.Must(only(w.create(ctx, ns, "o-03", "odd")))
			_, err := w.update(ctx, ns, "o-03", "even")
			r.Must(err)
		}
	}
}

// reset goes back to a snapshot and waits for the clients.
func (r *resetting) reset(ctx context.Context, restore func(snapshot string)) {
	r.T.Helper()
	recording, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, w := range r.writers {
		// All views see it, so that no feed is behind what somebody was shown, and all
		// of these watches are feeds'.
		r.Must(only(w.create(ctx, "a", "o-03", "even")))
		_, err := w.update(ctx, "a", "o-03", "even")
		r.Must(err)
	}
	ways := through(r.Rig)
	var recorders []*recorder
	for _, v := range views() {
		rec, err := record(recording, ways.of(v), v)
		r.Must(err)
		recorders = append(recorders, rec)
	}
	resets, err := r.Hub.Metric(ctx, "edgehub_cache_history_resets_total")
	r.Must(err)
	snapshot, err := r.ControlPlane.SnapshotEtcd(ctx)
	r.Must(err)
	r.advance(ctx)
	r.Must(converge(ctx, r.informers))

	restore(snapshot)
	back := time.Now()
	within, stop := context.WithDeadline(ctx, back.Add(resetWithin))
	defer stop()
	var waiting sync.WaitGroup
	var last atomic.Int64
	wait := func(what string, condition func(context.Context) error) {
		waiting.Go(func() {
			if err := process.Poll(within, what, condition); err != nil {
				r.T.Error(err)
			}
			last.Store(int64(time.Since(back)))
		})
	}
	for _, i := range r.informers {
		wait("the informer "+i.String()+" has the restored state", i.agrees)
	}
	for _, rec := range recorders {
		wait(rec.view.name+" ends with 410", rec.endsGone)
	}
	waiting.Wait()
	r.T.Logf("all informers were right and all raw watches at their end %v after the restore", time.Duration(last.Load()).Round(time.Millisecond))
	now, err := r.Hub.Metric(ctx, "edgehub_cache_history_resets_total")
	r.Must(err)
	if now <= resets {
		r.T.Errorf("edgehub_cache_history_resets_total = %v, as before", now)
	}
	r.goOn(ctx)
}

// endsGone is a condition.
func (r *recorder) endsGone(context.Context) error {
	events, err := r.seen()
	if err == nil {
		return errors.New("it is open")
	}
	if n := len(events); n == 0 || events[n-1].Type != "ERROR" || events[n-1].Code != http.StatusGone {
		return fmt.Errorf("it has ended without ERROR 410: %w", err)
	}
	return nil
}

// goOn writes everywhere: all informers hear of it.
func (r *resetting) goOn(ctx context.Context) {
	r.T.Helper()
	began := time.Now()
	for _, w := range r.writers {
		for range 20 {
			r.Must(w.step(ctx))
		}
		_, err := w.update(ctx, quiet, "q-2", "odd")
		r.Must(err)
	}
	within, stop := context.WithTimeout(ctx, resetWithin)
	defer stop()
	if err := converge(within, r.informers); err != nil {
		r.T.Error(err)
	}
	r.T.Logf("what was new was everywhere within %v", time.Since(began).Round(time.Millisecond))
}
