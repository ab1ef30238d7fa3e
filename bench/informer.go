// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

const informerRounds = 9

// An informerRun is a client-go informer and its end.
type informerRun struct {
	cache.SharedIndexInformer
	cancel context.CancelFunc
	done   chan struct{}
}

// runInformer starts an informer of pods on a connection that is open, waits until
// it is synced, and returns how long that took.
func runInformer(ctx context.Context, c *rest.Config, p podSet) (*informerRun, time.Duration, error) {
	c = rest.CopyConfig(c)
	c.ContentType, c.AcceptContentTypes = protobufType, protobufType+","+jsonType
	client, err := newClient(c, true)
	if err != nil {
		return nil, 0, err
	}
	if _, err := (request{client, c.Host + "/version", jsonType}).do(ctx); err != nil {
		return nil, 0, err
	}
	set, err := kubernetes.NewForConfigAndClient(c, client)
	if err != nil {
		return nil, 0, err
	}
	informer := informers.NewSharedInformerFactoryWithOptions(set, 0, informers.WithNamespace(p.namespace)).Core().V1().Pods().Informer()
	runtime.GC() // what is left of the one before is none of this one's time
	ctx, cancel := context.WithCancel(ctx)
	r := &informerRun{informer, cancel, make(chan struct{})}
	start := time.Now()
	go func() {
		defer close(r.done)
		defer client.CloseIdleConnections()
		informer.RunWithContext(ctx)
	}()
	limit := time.NewTimer(time.Minute)
	defer limit.Stop()
	select {
	case <-informer.HasSyncedChecker().Done():
	case <-ctx.Done():
	case <-limit.C:
	}
	took := time.Since(start)
	if n := len(informer.GetStore().ListKeys()); n != p.n || !informer.HasSynced() {
		r.close()
		return nil, 0, fmt.Errorf("after %v the informer has %d pods of %d", took, n, p.n)
	}
	return r, took, nil
}

func (r *informerRun) close() {
	r.cancel()
	<-r.done
}

// informers measures how long a WatchList informer takes to have 5,000 pods:
// direct, through a hub that has never seen one of them and records all, through
// that hub's live feed, and from a hub whose link is cut.
func (b *bench) informers(ctx context.Context) error {
	if err := b.seedPods(ctx, manyPods); err != nil {
		return err
	}
	offline, err := b.newHub(ctx, true)
	if err != nil {
		return err
	}
	defer b.closing(offline.close)
	first, _, err := runInformer(ctx, offline.Through(b.direct()), manyPods)
	if err != nil {
		return err
	}
	defer first.close()
	if err := errors.Join(wait(ctx, 2*time.Second), offline.cut(ctx)); err != nil {
		return err
	}
	s := samples{}
	err = alternate(informerRounds, []string{"direct", "online", "offline"}, func(name string) error {
		switch name {
		case "online":
			return b.informOnline(ctx, s)
		case "offline":
			return inform(ctx, offline.Through(b.direct()), name, s)
		}
		return inform(ctx, b.direct(), name, s)
	})
	if err != nil {
		return err
	}
	direct := s.median("direct")
	b.add(result{Name: "WatchList informer of 5,000 pods, recorded on the way: times the direct one's", Value: s.median("online") / direct, Unit: "×", Target: atMost(1.3),
		Versus: fmt.Sprintf("edgehub %.0f ms, direct %.0f ms; CPU of the hub %.2f s until synced, %.2f s until all is on disk; %s9–16 ×", s.median("online"), direct, s.median("cpu"), s.median("cpu after"), yurtHub)})
	b.add(result{Name: "WatchList informer of 5,000 pods, the second one on a feed: times the direct one's", Value: s.median("again") / direct, Unit: "×",
		Versus: fmt.Sprintf("edgehub %.0f ms", s.median("again"))})
	b.add(result{Name: "WatchList informer of 5,000 pods, offline: times the direct one's", Value: s.median("offline") / direct, Unit: "×", Target: atMost(1),
		Versus: fmt.Sprintf("edgehub %.0f ms, direct %.0f ms; %snever synced", s.median("offline"), direct, yurtHub)})
	return nil
}

func inform(ctx context.Context, c *rest.Config, name string, s samples) error {
	i, took, err := runInformer(ctx, c, manyPods)
	if err != nil {
		return err
	}
	i.close()
	s.add(name, milliseconds(took))
	return nil
}

// informOnline measures on a new hub.
func (b *bench) informOnline(ctx context.Context, s samples) error {
	h, err := b.newHub(ctx, false)
	if err != nil {
		return err
	}
	defer b.closing(h.close)
	before, err := cpuSeconds(h.PID())
	if err != nil {
		return err
	}
	i, took, err := runInformer(ctx, h.Through(b.direct()), manyPods)
	if err != nil {
		return err
	}
	defer i.close()
	s.add("online", milliseconds(took))
	at, err := cpuSeconds(h.PID())
	if err != nil {
		return err
	}
	if err := wait(ctx, 2*time.Second); err != nil { // a flush is at most a second away
		return err
	}
	after, err := cpuSeconds(h.PID())
	s.add("cpu", at-before)
	s.add("cpu after", after-before)
	if err != nil {
		return err
	}
	return inform(ctx, h.Through(b.direct()), "again", s)
}
