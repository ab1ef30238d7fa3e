// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// restPeriod is for how long nothing may have been collected before the agent counts as
// being at rest.
const restPeriod = 3 * time.Second

// giveBack returns to the system, once the agent is at rest, what a burst of work has
// left behind: the runtime would keep it for minutes, and the kernel the pages of code that
// ran once, and on a small node others need both. It costs one collection of a small heap after each burst, and nothing under load.
// It returns nil when ctx ends.
func giveBack(ctx context.Context) error {
	tick := time.NewTicker(restPeriod)
	defer tick.Stop()
	before, given := collections(), uint64(0)
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		now := collections()
		if now == before && now != given {
			debug.FreeOSMemory() // which collects, too
			unmapImage()
			given = collections()
			now = given
		}
		before = now
	}
}

// collections is how often the garbage collector has run.
func collections() uint64 {
	sample := []metrics.Sample{{Name: "/gc/cycles/total:gc-cycles"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
