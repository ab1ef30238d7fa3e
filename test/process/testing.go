// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"testing"
)

// A Runner is a Process, or something made of one.
type Runner interface {
	Start(ctx context.Context) error
	Close() error
	LogTail() string
}

// Run starts r for the length of the test, and shows the end of its log if the
// test has failed by then.
func Run(t testing.TB, r Runner) {
	t.Helper()
	// Registered first: a Start that fails half-way leaves something to close.
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(r.LogTail())
		}
		if err := r.Close(); err != nil {
			t.Errorf("Close() = %v", err)
		}
	})
	if err := r.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
}
