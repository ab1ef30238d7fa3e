// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package link

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

// A line is one direction of a link: what all connections share that way.
type line struct {
	delivered atomic.Int64 // bytes

	mu     sync.Mutex    // guards all below
	opened chan struct{} // closed while bytes may pass
	delay  time.Duration
	rate   int       // bytes a second, 0: no limit
	free   time.Time // when the line has sent all that was admitted
	budget int64     // bytes until a reset, negative: none is due
}

func newLine() *line {
	opened := make(chan struct{})
	close(opened)
	return &line{opened: opened, budget: -1}
}

func (l *line) shut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.opened:
		l.opened = make(chan struct{})
	default:
	}
}

func (l *line) open() {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.opened:
	default:
		close(l.opened)
	}
}

// passable waits until bytes may pass.
func (l *line) passable(ctx context.Context) error {
	l.mu.Lock()
	opened := l.opened
	l.mu.Unlock()
	select {
	case <-opened:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (l *line) setDelay(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delay = d
}

// due returns when what is sent now arrives.
func (l *line) due() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Now().Add(l.delay)
}

func (l *line) setRate(bytesPerSecond int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rate, l.free = bytesPerSecond, time.Time{}
}

// admit takes a piece of at most n bytes onto the line: its size, and when it has
// passed. A limited line takes a twentieth of a second's worth at a time, so that
// connections share it and a change of the limit is soon felt.
func (l *line) admit(n int) (int, time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if l.rate <= 0 {
		return n, now
	}
	n = min(n, max(1, l.rate/20))
	if l.free.Before(now) {
		l.free = now
	}
	l.free = l.free.Add(time.Duration(n) * time.Second / time.Duration(l.rate))
	return n, l.free
}

func (l *line) setBudget(n int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.budget = n
}

// spend takes at most n bytes from the budget. last: after these the connection
// is to be reset.
func (l *line) spend(n int) (allowed int, last bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.budget < 0:
		return n, false
	case int64(n) < l.budget:
		l.budget -= int64(n)
		return n, false
	default:
		n = int(l.budget)
		l.budget = -1
		return n, true
	}
}

// sleep waits until t.
func sleep(ctx context.Context, t time.Time) error {
	d := time.Until(t)
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
