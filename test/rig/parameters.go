// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/edgehub/edgehub/test/controlplane"
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

// KeepSeed writes down, in .bin/failed-seeds.txt, how a test of a package, such as
// ./test/feeds, that has failed is run again. It is for t.Cleanup.
func KeepSeed(t testing.TB, pkg string, seed uint64, steps int) {
	t.Helper()
	if !t.Failed() {
		return
	}
	root, err := controlplane.Root()
	if err != nil {
		t.Error(err)
		return
	}
	path := filepath.Join(root, ".bin", "failed-seeds.txt")
	line := fmt.Sprintf("EDGEHUB_SEED=%d EDGEHUB_STEPS=%d go test %s -run '^%s$' # %s\n", seed, steps, pkg, t.Name(), time.Now().Format(time.RFC3339))
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Error(err)
		return
	}
	_, err = f.WriteString(line)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Error(err)
	}
	t.Logf("kept in %s: %s", path, line)
}

// Percentile returns the p-th percentile of durations, p from 0 to 100.
func Percentile(d []time.Duration, p int) time.Duration {
	if len(d) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(d))
	return s[min(len(s)*p/100, len(s)-1)]
}
