// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"errors"
	"fmt"
	"time"
)

const (
	pollPeriod  = 50 * time.Millisecond
	pollTimeout = 90 * time.Second // when ctx has no deadline
)

// Poll calls condition until it returns nil, every 50 ms. It gives up when ctx
// ends, after 90 s if ctx has no deadline, and then tells what it waited for and
// what condition said last, which it wraps.
func Poll(ctx context.Context, what string, condition func(ctx context.Context) error) error {
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, pollTimeout)
		defer cancel()
	}
	start := time.Now()
	tick := time.NewTicker(pollPeriod)
	defer tick.Stop()
	var last error
	for {
		err := condition(ctx)
		if err == nil {
			return nil
		}
		// A condition that is cut off by ctx says less than the one before.
		if last == nil || ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("waited %v until %s: %w; last seen: %w",
				time.Since(start).Round(time.Millisecond), what, context.Cause(ctx), last)
		case <-tick.C:
		}
	}
}

// errNotYet is the last error of a condition that only says no.
var errNotYet = errors.New("not yet")

// Until makes a condition for Poll and Wait out of one that only says yes or no.
func Until(condition func() bool) func(context.Context) error {
	return func(context.Context) error {
		if condition() {
			return nil
		}
		return errNotYet
	}
}
