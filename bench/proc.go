// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/edgehub/edgehub/test/controlplane"
)

// lines yields the lines of a file, none if it cannot be read.
func lines(path string) iter.Seq[string] {
	text, err := os.ReadFile(path)
	if err != nil {
		return strings.Lines("")
	}
	return strings.Lines(string(text))
}

// procField returns a field of /proc/PID/status or io.
func procField(pid int, file, field string) (float64, error) {
	path := fmt.Sprintf("/proc/%d/%s", pid, file)
	for line := range lines(path) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == field+":" {
			return strconv.ParseFloat(f[1], 64)
		}
	}
	return 0, fmt.Errorf("%s has no %s", path, field)
}

// rss returns the resident memory in MB, now and the most it ever was.
func rss(pid int) (now, peak float64, err error) {
	if now, err = procField(pid, "status", "VmRSS"); err != nil {
		return 0, 0, err
	}
	peak, err = procField(pid, "status", "VmHWM")
	return now * 1024 / 1e6, peak * 1024 / 1e6, err
}

// writeBytes returns what a process has made dirty on block devices.
func writeBytes(pid int) (float64, error) { return procField(pid, "io", "write_bytes") }

// cpuSeconds returns the CPU time of a process, in user and kernel mode.
func cpuSeconds(pid int) (float64, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	_, rest, _ := bytes.Cut(stat, []byte(") ")) // the name may have blanks
	f := strings.Fields(string(rest))
	if len(f) < 13 {
		return 0, fmt.Errorf("stat of process %d: %q", pid, stat)
	}
	const ticksPerSecond = 100 // USER_HZ on every Linux that Go knows
	user, err := strconv.ParseFloat(f[11], 64)
	if err != nil {
		return 0, err
	}
	system, err := strconv.ParseFloat(f[12], 64)
	return (user + system) / ticksPerSecond, err
}

// listenerOf returns the process that was told to serve on the port of an address.
func listenerOf(addr string) (int, error) {
	_, port, _ := strings.Cut(addr, ":")
	processes, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return 0, err
	}
	for _, p := range processes {
		cmdline, err := os.ReadFile(p)
		if err == nil && bytes.Contains(cmdline, []byte("\x00--secure-port="+port+"\x00")) && bytes.Contains(cmdline, []byte("kube-apiserver\x00")) {
			return strconv.Atoi(filepath.Base(filepath.Dir(p)))
		}
	}
	return 0, fmt.Errorf("no kube-apiserver with port %s", port)
}

// heap returns about what is live on the hub's heap: the least seen while its
// collector runs some times, which asking for the metrics makes it do.
func (h *hub) heap(ctx context.Context) (float64, error) {
	const cycles = 4
	least, first := math.Inf(1), -1.0
	for range 2000 {
		alloc, err := h.Metric(ctx, "go_memstats_heap_alloc_bytes")
		if err != nil {
			return 0, err
		}
		n, err := h.Metric(ctx, "go_gc_duration_seconds_count")
		if err != nil {
			return 0, err
		}
		if first < 0 {
			first = n
		}
		if n >= first+1 { // what was garbage before is gone
			least = min(least, alloc)
		}
		if n >= first+cycles {
			return least, nil
		}
	}
	return 0, fmt.Errorf("edgehub's garbage collector did not run %d times", cycles)
}

// size builds the agent as make build does.
func (b *bench) size(ctx context.Context) error {
	root, err := controlplane.Root()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "edgehub-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", dir+"/edgehub", "./cmd/edgehub")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	info, err := os.Stat(dir + "/edgehub")
	if err != nil {
		return err
	}
	b.add(result{Name: "stripped binary", Value: float64(info.Size()) / 1e6, Unit: "MB", Target: atMost(40), Versus: yurtHub + "74.0 MB"})
	return nil
}
