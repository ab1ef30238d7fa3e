// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package linklocal

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// fakeSystem is a system whose state a test sets.
type fakeSystem struct {
	putFunc    func() (string, bool, error)
	followFunc func(ctx context.Context, lost func()) error
	removeErr  error
}

func (f *fakeSystem) put() (string, bool, error) { return f.putFunc() }

func (f *fakeSystem) remove() error { return f.removeErr }

func (f *fakeSystem) follow(ctx context.Context, lost func()) error { return f.followFunc(ctx, lost) }

func newAddress(t *testing.T, s system) *Address {
	t.Helper()
	a, err := New(Config{Addr: netip.MustParseAddr("169.254.2.1"), Registerer: prometheus.NewPedanticRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	a.system = s
	return a
}

// withLog returns a context with a logger, and what was logged to it: messages,
// and after a colon the error.
func withLog(t *testing.T) (context.Context, func() []string) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	return klog.NewContext(t.Context(), logger), func() (lines []string) {
		for _, e := range logger.GetSink().(ktesting.Underlier).GetBuffer().Data() {
			line := e.Message
			if e.Err != nil {
				line += ": " + e.Err.Error()
			}
			lines = append(lines, line)
		}
		return lines
	}
}

func TestNew(t *testing.T) {
	for _, tc := range []struct {
		name, addr, iface string
		want              []string // parts of the error
	}{
		{"IPv4 link-local", "169.254.2.1", "", nil},
		{"IPv6 link-local", "fe80::1", "", []string{"Addr: pods do not reach"}},
		{"IPv6 unique local", "fd00::1", "", nil},
		{"IPv4 private", "10.1.2.3", "", nil},
		{"IPv4 in IPv6", "::ffff:169.254.2.1", "", nil},
		{"no address", "", "", []string{"Addr: must be a unicast address"}},
		{"IPv4 loopback", "127.0.0.1", "", []string{"Addr: must be a unicast address"}},
		{"IPv4 loopback in IPv6", "::ffff:127.0.0.1", "", []string{"Addr: must be a unicast address"}},
		{"IPv6 loopback", "::1", "", []string{"Addr: must be a unicast address"}},
		{"IPv4 unspecified", "0.0.0.0", "", []string{"Addr: must be a unicast address"}},
		{"IPv6 unspecified", "::", "", []string{"Addr: must be a unicast address"}},
		{"IPv4 multicast", "224.0.0.1", "", []string{"Addr: must be a unicast address"}},
		{"IPv6 multicast", "ff02::1", "", []string{"Addr: must be a unicast address"}},
		{"broadcast", "255.255.255.255", "", []string{"Addr: must be a unicast address"}},
		{"a zone", "fd00::1%eth0", "", []string{"Addr: must have no zone"}},
		{"the longest name", "169.254.2.1", "abcdefghijklmno", nil},
		{"a name too long", "169.254.2.1", "abcdefghijklmnop", []string{`"abcdefghijklmnop" is no name`}},
		{"a dot in a name", "169.254.2.1", "eth0.100", nil},
		{"dot", "169.254.2.1", ".", []string{"is no name"}},
		{"dot dot", "169.254.2.1", "..", []string{"is no name"}},
		{"slash", "169.254.2.1", "a/b", []string{"is no name"}},
		{"colon", "169.254.2.1", "eth0:1", []string{"is no name"}},
		{"a pattern", "169.254.2.1", "edgehub%d", []string{"is no name"}},
		{"space", "169.254.2.1", "a b", []string{"is no name"}},
		{"a control byte", "169.254.2.1", "a\x00b", []string{"is no name"}},
		{"not ASCII", "169.254.2.1", "é", []string{"is no name"}},
		{"the name of a directory", "169.254.2.1", "all", []string{"is no name"}},
		{"all problems", "127.0.0.1", "default", []string{"Addr:", "Interface:"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := Config{Interface: tc.iface}
			if tc.addr != "" {
				c.Addr = netip.MustParseAddr(tc.addr)
			}
			a, err := New(c)
			if tc.want == nil {
				if err != nil || a.addr != c.Addr.Unmap() {
					t.Errorf("New(%q, %q) = %v, want nil and the address", tc.addr, tc.iface, err)
				}
				return
			}
			if err == nil {
				t.Fatalf("New(%q, %q) = nil, want an error", tc.addr, tc.iface)
			}
			for _, part := range tc.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("New(%q, %q) = %v, want it to contain %q", tc.addr, tc.iface, err, part)
				}
			}
		})
	}
}

func TestNewRegistersOnce(t *testing.T) {
	c := Config{Addr: netip.MustParseAddr("169.254.2.1"), Registerer: prometheus.NewPedanticRegistry()}
	if _, err := New(c); err != nil {
		t.Fatal(err)
	}
	var already prometheus.AlreadyRegisteredError
	if _, err := New(c); !errors.As(err, &already) {
		t.Errorf("New() with a used Registerer = %v, want AlreadyRegisteredError", err)
	}
}

func TestEnsureTellsWhatItSaw(t *testing.T) {
	errPut := errors.New("broken")
	s := &fakeSystem{}
	a := newAddress(t, s)
	ctx, logged := withLog(t)
	check := func(when, iface string, present float64) {
		t.Helper()
		if got := a.Interface(); got != iface {
			t.Errorf("%s: Interface() = %q, want %q", when, got, iface)
		}
		if got := testutil.ToFloat64(a.metrics.present); got != present {
			t.Errorf("%s: present = %v, want %v", when, got, present)
		}
	}
	check("before", "", 0)

	s.putFunc = func() (string, bool, error) { return "x0", true, nil }
	if err := a.Ensure(ctx); err != nil {
		t.Errorf("Ensure() = %v, want nil", err)
	}
	check("in place", "x0", 1)

	s.putFunc = func() (string, bool, error) { return "", false, errPut }
	if err := a.Ensure(ctx); !errors.Is(err, errPut) || !strings.Contains(err.Error(), "169.254.2.1") {
		t.Errorf("Ensure() = %v, want what the system said, and the address", err)
	}
	check("lost", "", 0)
	if diff := cmp.Diff([]string{"Link-local address is in place"}, logged()); diff != "" {
		t.Errorf("logged (-want +got):\n%s", diff)
	}
	if got := testutil.ToFloat64(a.metrics.restored); got != 0 {
		t.Errorf("restored = %v, want 0: Ensure does not restore", got)
	}
}

func TestRemoveTellsWhatItSaw(t *testing.T) {
	s := &fakeSystem{putFunc: func() (string, bool, error) { return "x0", true, nil }, removeErr: errors.New("broken")}
	a := newAddress(t, s)
	ctx, _ := withLog(t)
	if err := a.Ensure(ctx); err != nil {
		t.Fatal(err)
	}
	if err := a.Remove(); !errors.Is(err, s.removeErr) || a.Interface() != "x0" {
		t.Errorf("Remove() = %v, Interface() = %q, want what the system said and x0", err, a.Interface())
	}
	s.removeErr = nil
	if err := a.Remove(); err != nil || a.Interface() != "" || testutil.ToFloat64(a.metrics.present) != 0 {
		t.Errorf("Remove() = %v, Interface() = %q, want nil and none", err, a.Interface())
	}
}

func TestMetricsLint(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	if _, err := newMetrics(reg); err != nil {
		t.Fatal(err)
	}
	if _, err := newExposedGauge(reg); err != nil {
		t.Fatal(err)
	}
	problems, err := testutil.GatherAndLint(reg)
	if err != nil || len(problems) > 0 {
		t.Errorf("GatherAndLint() = %v, %v, want none", problems, err)
	}
	names := []string{"edgehub_linklocal_present", "edgehub_linklocal_restored_total", "edgehub_linklocal_route_localnet_interfaces"}
	if n, err := testutil.GatherAndCount(reg, names...); err != nil || n != len(names) {
		t.Errorf("GatherAndCount() = %d, %v, want %d", n, err, len(names))
	}
}
