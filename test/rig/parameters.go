// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"
)

// Number is an environment variable, or what is used without it.
func Number(t testing.TB, name string, otherwise int) int {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		t.Fatalf("%s=%s: %v", name, text, err)
	}
	return n
}

// Seed is EDGEHUB_SEED, or a random one. It makes the same decisions again, not
// the same timing.
func Seed(t testing.TB) uint64 {
	t.Helper()
	s := rand.Uint64()
	if text := os.Getenv("EDGEHUB_SEED"); text != "" {
		var err error
		if s, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("EDGEHUB_SEED=%s: %v", text, err)
		}
	}
	t.Logf("EDGEHUB_SEED=%d", s)
	return s
}

// Percentile returns the p-th percentile of durations, p from 0 to 100.
func Percentile(d []time.Duration, p int) time.Duration {
	if len(d) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(d))
	return s[min(len(s)*p/100, len(s)-1)]
}
