// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"
)

const startRounds = 7

// starts measures the time from exec to the first answer, after a SIGKILL, with the
// link cut: 5,000 pods of two users each.
func (b *bench) starts(ctx context.Context) error {
	if err := b.seedPods(ctx, manyPods); err != nil {
		return err
	}
	h, err := b.newHub(ctx, true)
	if err != nil {
		return err
	}
	defer b.closing(h.close)
	var bytes int64
	for _, u := range []string{user, recorder(0)} {
		r, err := to(ctx, h.Through(b.cp.TokenConfig(u)), manyPods.path(), protobufType)
		if err != nil {
			return err
		}
		if bytes, err = r.do(ctx); err != nil {
			return err
		}
		r.close()
	}
	if err := errors.Join(wait(ctx, 3*time.Second), h.cut(ctx)); err != nil { // all is on disk
		return err
	}
	s := samples{}
	for range startRounds {
		if err := b.startOnce(ctx, h, s); err != nil {
			return err
		}
	}
	list, err := to(ctx, h.Through(b.direct()), manyPods.path(), protobufType)
	if err != nil {
		return err
	}
	defer list.close()
	n, err := list.do(ctx)
	if err == nil && n < bytes*99/100 {
		err = fmt.Errorf("after the start the list has %d bytes; it had %d", n, bytes)
	}
	b.add(result{Name: "start with 10,000 objects, offline: exec to first answer", Value: s.median("answer"), Unit: "ms", Target: atMost(300),
		Versus: fmt.Sprintf("%d starts, slowest %.0f ms; CPU until then %.0f ms; %sready after 2.7–2.9 s", startRounds, quantile(s["answer"], 1), s.median("cpu"), yurtHub)})
	return err
}

// startOnce asks again and again, from before the process exists.
func (b *bench) startOnce(ctx context.Context, h *hub, s samples) error {
	if err := h.Kill(); err != nil {
		return err
	}
	c := h.Through(b.direct())
	client, err := newClient(c, false)
	if err != nil {
		return err
	}
	defer client.CloseIdleConnections()
	client.Timeout = 5 * time.Second
	started := make(chan error, 1)
	start := time.Now()
	go func() { started <- h.Start(ctx) }()
	took, err := firstAnswer(ctx, request{client, c.Host + manyPods.path() + "/pod-00042", protobufType}, start)
	if err == nil {
		s.add("answer", milliseconds(took))
		var cpu float64
		cpu, err = cpuSeconds(h.PID())
		s.add("cpu", cpu*1000)
	}
	return errors.Join(err, <-started)
}

func firstAnswer(ctx context.Context, r request, start time.Time) (time.Duration, error) {
	var last error
	for time.Since(start) < 30*time.Second {
		if _, last = r.do(ctx); last == nil {
			return time.Since(start), nil
		}
		if err := wait(ctx, time.Millisecond); err != nil {
			return 0, err
		}
	}
	return 0, fmt.Errorf("no answer with %d: %w", http.StatusOK, last)
}
