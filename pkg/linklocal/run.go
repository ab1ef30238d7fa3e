// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package linklocal

import (
	"context"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

const (
	// lookPeriod is the time between two looks when nothing is heard of, for what a
	// subscription lost.
	lookPeriod = 30 * time.Second
	// minPause follows each look, so that a burst of changes costs few of them.
	minPause = 100 * time.Millisecond
	// maxPause bounds the time until the next try after failures, and how often
	// edgehub fights with somebody who takes the address away again and again.
	maxPause = 30 * time.Second
	// calm is how long nothing must have happened for the next trouble to be met as
	// the first.
	calm = time.Minute
	// maxTexts bounds the texts that failures remembers.
	maxTexts = 16
)

// Run keeps the address in place until ctx ends, and then returns nil. When the
// address or its interface is removed, or the interface set down, it does again
// what Ensure does: at once if the kernel tells of it, else within 30 s. After a
// failure, or if this happens time and again, it waits longer and longer before
// the next try, up to 30 s. Each return is logged and counted; a failure is logged
// when its text is new.
//
// The address is left in place at the end: pods must not lose it over a restart of
// edgehub. Remove takes it away.
func (a *Address) Run(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	lost := make(chan struct{}, 1)
	var following sync.WaitGroup
	following.Go(func() { a.follow(ctx, lost) })
	defer following.Wait()

	failed := failures{}
	var p pace
	for ctx.Err() == nil {
		iface, changed, err := a.put()
		if err != nil {
			failed.report(logger, err, "Link-local address is not in place", "address", a.addr)
			wait(ctx, p.next(true), nil)
			continue
		}
		if changed || len(failed) > 0 {
			a.metrics.restored.Inc()
			logger.Info("Link-local address is back", "address", a.addr, "interface", iface)
			clear(failed)
		}
		wait(ctx, p.next(changed), nil)
		wait(ctx, lookPeriod, lost)
	}
	return nil
}

// follow sends on lost after what may have cost the address, until ctx ends.
func (a *Address) follow(ctx context.Context, lost chan<- struct{}) {
	failed := failures{}
	for ctx.Err() == nil {
		err := a.system.follow(ctx, func() {
			select {
			case lost <- struct{}{}:
			default: // there will be a look anyway
			}
		})
		if err != nil {
			failed.report(klog.FromContext(ctx), err, "Changes of interfaces and addresses cannot be followed, looking now and then",
				"period", lookPeriod)
		}
		wait(ctx, lookPeriod, nil)
	}
}

// pace is how long to wait after a look. The zero value is ready.
type pace struct {
	pause   time.Duration
	trouble time.Time // the last
}

// next is the pause after a look that met trouble or not: it failed, or there was
// something to do.
func (p *pace) next(trouble bool) time.Duration {
	now := time.Now()
	switch {
	case trouble:
		p.pause, p.trouble = min(2*p.pause, maxPause), now
	case now.Sub(p.trouble) >= calm:
		p.pause = minPause
	}
	p.pause = max(p.pause, minPause)
	return p.pause
}

// wait returns after d, when early delivers, or when ctx ends.
func wait(ctx context.Context, d time.Duration, early <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-early:
	case <-t.C:
	}
}

// failures are the texts of the errors since all was well.
type failures map[string]bool

// report logs err if its text is new.
func (f failures) report(logger klog.Logger, err error, message string, keysAndValues ...any) {
	text := err.Error()
	if f[text] {
		return
	}
	if len(f) >= maxTexts {
		clear(f)
	}
	f[text] = true
	logger.Error(err, message, keysAndValues...)
}
