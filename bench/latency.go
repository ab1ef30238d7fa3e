// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	clocksNamespace = "clocks"
	clockPause      = 5 * time.Millisecond
)

// An arrival is when a watcher got the update of a number.
type arrival struct {
	n  int
	at time.Time
}

// watchClock opens a watch and tells of the updates that arrive, until ctx ends.
func watchClock(ctx context.Context, c *rest.Config) (<-chan arrival, error) {
	client, err := newClient(c, false)
	if err != nil {
		return nil, err
	}
	resp, err := request{client, c.Host + "/api/v1/namespaces/" + clocksNamespace + "/configmaps?watch=1&resourceVersion=0", jsonType}.open(ctx)
	if err != nil {
		return nil, err
	}
	arrivals := make(chan arrival, 16)
	go func() {
		defer close(arrivals)
		defer client.CloseIdleConnections()
		defer resp.Body.Close()
		for r := bufio.NewReaderSize(resp.Body, 64<<10); ; {
			frame, err := r.ReadBytes('\n')
			a := arrival{at: time.Now()}
			if err != nil {
				return
			}
			var event struct{ Object corev1.ConfigMap }
			if json.Unmarshal(frame, &event) != nil {
				return
			}
			if a.n, err = strconv.Atoi(event.Object.Data["n"]); err != nil {
				continue
			}
			select {
			case arrivals <- a:
			case <-ctx.Done():
				return
			}
		}
	}()
	return arrivals, nil
}

// A clock is a ConfigMap that is updated, and three watchers of it: two of them
// direct, because what lies between these is the machine's, not the hub's.
type clock struct {
	client             kubernetes.Interface
	object             *corev1.ConfigMap
	n                  int
	direct, again, hub <-chan arrival
	s                  samples // direct: ms from the update on; over, noise: ms later than direct
}

// latency measures when the same update arrives at two watchers, one of them behind
// edgehub: while nothing else happens, and while the hub records 5,000 pods.
func (b *bench) latency(ctx context.Context) error {
	if err := b.seedPods(ctx, manyPods); err != nil {
		return err
	}
	h, err := b.newHub(ctx, false)
	if err != nil {
		return err
	}
	defer b.closing(h.close)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c, err := b.newClock(ctx, h)
	if err != nil {
		return err
	}
	for range 1000 {
		if err := c.tick(ctx); err != nil {
			return err
		}
	}
	b.addLatency("idle", c.s, "; "+yurtHub+"p50 +1.9 ms")
	c.s = samples{}
	recorded := make(chan error, 1)
	go func() { recorded <- b.recordAll(ctx, h) }()
	for {
		select {
		case err := <-recorded:
			b.addLatency("while 5,000 pods are recorded", c.s,
				fmt.Sprintf("; %d updates while %d users' first LIST or WATCH of all pods went through; %sp95 1.8–2.0 s", len(c.s["over"]), recorders, yurtHub))
			return err
		default:
		}
		if err := c.tick(ctx); err != nil {
			return err
		}
	}
}

func (b *bench) newClock(ctx context.Context, h *hub) (c *clock, err error) {
	c = &clock{client: b.cp.Client, s: samples{}}
	if err := b.cp.CreateNamespace(ctx, clocksNamespace); err != nil {
		return nil, err
	}
	o := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "clock"}, Data: map[string]string{"n": "0", "text": text(1000)}}
	if c.object, err = c.client.CoreV1().ConfigMaps(clocksNamespace).Create(ctx, o, metav1.CreateOptions{}); err != nil {
		return nil, err
	}
	for to, config := range map[*<-chan arrival]*rest.Config{&c.direct: b.direct(), &c.again: b.direct(), &c.hub: h.Through(b.direct())} {
		if *to, err = watchClock(ctx, config); err != nil {
			return nil, err
		}
	}
	if err := errors.Join(c.tick(ctx), c.tick(ctx)); err != nil { // all are open
		return nil, err
	}
	c.s = samples{}
	return c, nil
}

// tick updates once and waits until all have seen it.
func (c *clock) tick(ctx context.Context) (err error) {
	c.n++
	c.object.Data["n"] = strconv.Itoa(c.n)
	start := time.Now()
	if c.object, err = c.client.CoreV1().ConfigMaps(clocksNamespace).Update(ctx, c.object, metav1.UpdateOptions{}); err != nil {
		return err
	}
	var at [3]time.Time
	for i, from := range []<-chan arrival{c.direct, c.again, c.hub} {
		if at[i], err = c.await(ctx, from); err != nil {
			return fmt.Errorf("%s watch: %w", []string{"direct", "second direct", "edgehub's"}[i], err)
		}
	}
	c.s.add("direct", milliseconds(at[0].Sub(start)))
	c.s.add("noise", milliseconds(at[1].Sub(at[0])))
	c.s.add("over", milliseconds(at[2].Sub(at[0])))
	return wait(ctx, clockPause)
}

func (c *clock) await(ctx context.Context, from <-chan arrival) (time.Time, error) {
	limit := time.NewTimer(10 * time.Second)
	defer limit.Stop()
	for {
		select {
		case a, ok := <-from:
			switch {
			case !ok:
				return time.Time{}, errors.New("the watch has ended")
			case a.n == c.n:
				return a.at, nil
			}
		case <-limit.C:
			return time.Time{}, fmt.Errorf("update %d did not arrive within 10 s", c.n)
		case <-ctx.Done():
			return time.Time{}, ctx.Err()
		}
	}
}

// recordAll lets one user after the other list or watch all pods for the first
// time.
func (b *bench) recordAll(ctx context.Context, h *hub) error {
	for i := range recorders {
		c := h.Through(b.cp.TokenConfig(recorder(i)))
		var err error
		if i%2 == 0 {
			var r request
			if r, err = toAs(ctx, c, manyPods.path(), protobufType, true); err == nil {
				r.close()
			}
		} else {
			err = watchAll(ctx, c)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// watchAll opens a WatchList and ends it with its first bookmark, after the pods.
func watchAll(ctx context.Context, c *rest.Config) error {
	client, err := newClient(c, true)
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	resp, err := request{client, c.Host + manyPods.path() +
		"?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true", protobufType}.open(ctx)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	const shorterThanPods = 1000
	for r := bufio.NewReaderSize(resp.Body, 64<<10); ; {
		var length [4]byte
		if _, err := io.ReadFull(r, length[:]); err != nil {
			return fmt.Errorf("WatchList, before its bookmark: %w", err)
		}
		n := int(binary.BigEndian.Uint32(length[:]))
		if start, err := r.Peek(min(n, shorterThanPods)); n < shorterThanPods && bytes.Contains(start, []byte("BOOKMARK")) {
			return err
		}
		if _, err := r.Discard(n); err != nil {
			return err
		}
	}
}

func (b *bench) addLatency(when string, s samples, more string) {
	for _, q := range []struct {
		name   string
		q, max float64
	}{{"p50", .5, 1}, {"p99", .99, 5}} {
		b.add(result{Name: "watch event, " + when + ": " + q.name + " later than direct", Value: quantile(s["over"], q.q), Unit: "ms", Target: atMost(q.max),
			Versus: fmt.Sprintf("a second direct watch %+.1f ms; direct %.1f ms after the update was sent%s", quantile(s["noise"], q.q), quantile(s["direct"], q.q), more)})
	}
}
