// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package linklocal

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

// write makes the setting of each interface what the map says.
func write(t *testing.T, dir string, settings map[string]string) {
	t.Helper()
	for iface, content := range settings {
		if err := os.MkdirAll(filepath.Join(dir, iface), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, iface, "route_localnet"), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRouteLocalnet(t *testing.T) {
	for _, tc := range []struct {
		name     string
		settings map[string]string
		want     []string
	}{
		{"nothing", map[string]string{"all": "0\n", "default": "0\n", "lo": "0\n", "eth0": "0\n"}, nil},
		{"two, sorted", map[string]string{"all": "0\n", "eth1": "1\n", "eth0.7": "1\n", "eth2": "0\n"}, []string{"eth0.7", "eth1"}},
		{"all", map[string]string{"all": "1\n", "eth0": "1\n", "eth1": "0\n"}, []string{"all"}},
		{"default opens nothing", map[string]string{"all": "0\n", "default": "1\n"}, nil},
		{"lo has nobody behind it", map[string]string{"all": "0\n", "lo": "1\n"}, nil},
		{"any other number", map[string]string{"all": "0\n", "eth0": "2\n", "eth1": "-1\n"}, []string{"eth0", "eth1"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, dir, tc.settings)
			if err := os.Mkdir(filepath.Join(dir, "just-gone"), 0o755); err != nil {
				t.Fatal(err)
			}
			got, err := RouteLocalnet(dir)
			if err != nil {
				t.Fatalf("RouteLocalnet() = %v, want nil", err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("RouteLocalnet() (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRouteLocalnetErrors(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{"eth0": "1\n"})
	if got, err := RouteLocalnet(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("RouteLocalnet() without all = %v, %v, want ErrNotExist", got, err)
	}
	write(t, dir, map[string]string{"all": "0\n"})
	if err := os.MkdirAll(filepath.Join(dir, "eth1", "route_localnet"), 0o755); err != nil {
		t.Fatal(err)
	}
	if got, err := RouteLocalnet(dir); err == nil {
		t.Errorf("RouteLocalnet() with one that cannot be read = %v, nil, want an error", got)
	}
}

func TestWatchRouteLocalnet(t *testing.T) {
	const (
		may     = "Other machines may reach loopback addresses: route_localnet is set"
		nothing = "Other machines no longer reach loopback addresses: route_localnet is not set"
		unknown = "It is not known whether other machines may reach loopback addresses"
	)
	dir := t.TempDir()
	write(t, dir, map[string]string{"all": "0\n"})
	synctest.Test(t, func(t *testing.T) {
		ctx, logged := withLog(t)
		ctx, cancel := context.WithCancel(ctx)
		reg := prometheus.NewPedanticRegistry()
		ended := make(chan error, 1)
		go func() { ended <- WatchRouteLocalnet(ctx, dir, reg) }()
		synctest.Wait()
		for _, step := range []struct {
			name     string
			settings map[string]string
			wait     time.Duration
			gauge    float64
			logged   int // lines until now
		}{
			{"at start", nil, 0, 0, 0},
			{"set, not yet seen", map[string]string{"eth0": "1\n"}, 59 * time.Second, 0, 0},
			{"seen", nil, 2 * time.Second, 1, 1},
			{"unchanged", nil, 5 * time.Minute, 1, 1},
			{"another", map[string]string{"eth0": "0\n", "eth1": "1\n"}, time.Minute, 1, 2},
			{"all", map[string]string{"all": "1\n"}, time.Minute, 1, 3},
			{"two", map[string]string{"all": "0\n", "eth0": "1\n"}, time.Minute, 2, 4},
			{"none", map[string]string{"eth0": "0\n", "eth1": "0\n"}, time.Minute, 0, 5},
			{"still none", nil, 5 * time.Minute, 0, 5},
		} {
			write(t, dir, step.settings)
			pass(step.wait)
			if got := gathered(t, reg); got != step.gauge {
				t.Errorf("%s: gauge = %v, want %v", step.name, got, step.gauge)
			}
			if got := len(logged()); got != step.logged {
				t.Errorf("%s: logged %q, want %d lines", step.name, logged(), step.logged)
			}
		}
		if err := os.Remove(filepath.Join(dir, "all", "route_localnet")); err != nil {
			t.Fatal(err)
		}
		pass(10 * time.Minute)
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("WatchRouteLocalnet() = %v, want nil", err)
		}
		path := filepath.Join(dir, "all", "route_localnet")
		want := []string{may, may, may, may, nothing, unknown + ": read route_localnet: open " + path + ": no such file or directory"}
		if diff := cmp.Diff(want, logged()); diff != "" {
			t.Errorf("logged (-want +got):\n%s", diff)
		}
	})
}

// gathered is the value of the only gauge of g.
func gathered(t *testing.T, g prometheus.Gatherer) float64 {
	t.Helper()
	families, err := g.Gather()
	if err != nil || len(families) != 1 {
		t.Fatalf("Gather() = %v, %v, want one family", families, err)
	}
	return families[0].GetMetric()[0].GetGauge().GetValue()
}

func TestWatchRouteLocalnetRegistersOnce(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	if _, err := newExposedGauge(reg); err != nil {
		t.Fatal(err)
	}
	if err := WatchRouteLocalnet(t.Context(), t.TempDir(), reg); err == nil {
		t.Error("WatchRouteLocalnet() with a used Registerer = nil, want an error")
	}
}
