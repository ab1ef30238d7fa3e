// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
)

// A part lives as long as its run, which ends soon after its context does.
type part struct {
	name string
	run  func(context.Context) error
}

var errEnded = errors.New("ended by itself")

// runAll runs the parts until ctx ends or one of them returns. Then they are ended
// in the order given, each only when the one before it is gone, and what they
// returned is joined, each error with the part's name. A part that returns while
// nobody asked it to is a failure.
func runAll(ctx context.Context, parts ...part) error {
	type running struct {
		cancel context.CancelFunc
		ended  chan struct{}
		err    error
	}
	base := context.WithoutCancel(ctx) // each part is told by itself when to end
	first := make(chan struct{}, len(parts))
	all := make([]*running, len(parts))
	for i, p := range parts {
		partCtx, cancel := context.WithCancel(base)
		r := &running{cancel: cancel, ended: make(chan struct{})}
		all[i] = r
		go func() {
			defer close(r.ended)
			r.err = p.run(partCtx)
			if r.err == nil && partCtx.Err() == nil {
				r.err = errEnded
			}
			first <- struct{}{}
		}()
	}
	select {
	case <-ctx.Done():
	case <-first:
	}
	var errs []error
	for i, r := range all {
		r.cancel()
		<-r.ended
		if r.err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", parts[i].name, r.err))
		}
	}
	return errors.Join(errs...)
}
