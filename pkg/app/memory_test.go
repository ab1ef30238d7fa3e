// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"runtime"
	"runtime/metrics"
	"testing"
	"testing/synctest"
	"time"
)

// kept is how many bytes of memory the runtime keeps that nobody uses.
func kept() uint64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/free:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

// burst leaves behind what has been collected and not given back.
func burst() {
	const size = 64 << 20
	b := make([]byte, size)
	for i := 0; i < size; i += 4096 {
		b[i] = 1
	}
	runtime.KeepAlive(b)
	runtime.GC()
}

// While there is work, memory is kept for it. After a rest it is the system's
// again; and while there is nothing new to give back, nothing is collected.
func TestMemoryIsGivenBackAtRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- giveBack(ctx) }()
		for range 2 {
			for range 3 {
				burst()
				<-time.After(restPeriod / 10 * 7) // the last time over a tick
			}
			if n := kept(); n < 32<<20 {
				t.Errorf("%d bytes are kept while there is work", n)
			}
			<-time.After(3 * restPeriod)
			if n := kept(); n > 8<<20 {
				t.Errorf("%d bytes are kept at rest", n)
			}
		}
		before := collections()
		<-time.After(20 * restPeriod)
		if n := collections() - before; n > 0 {
			t.Errorf("collected %d times at rest", n)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
