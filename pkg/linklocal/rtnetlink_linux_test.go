// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package linklocal

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2/ktesting"

	"github.com/edgehub/edgehub/test/process"
)

// TestNewTakesDummies is for kernels that have none: their tests take another kind.
func TestNewTakesDummies(t *testing.T) {
	addr := netip.MustParseAddr("169.254.2.1")
	a, err := New(Config{Addr: addr})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := *a.system.(*rtnetlink), (rtnetlink{addr: addr, name: "edgehub0", kind: "dummy"}); got != want {
		t.Errorf("New() asks for %v, want %v", got, want)
	}
}

// places are all the ways in which an address is put somewhere.
var places = []struct {
	name, addr string
	dummy      bool // the kernel has dummy interfaces
	iface      string
	want       string // among the addresses of iface
}{
	{"IPv4 on a dummy", "169.254.2.1", true, DefaultInterface, "169.254.2.1/32 link"},
	{"IPv6 on a dummy", "fd00::2:1", true, DefaultInterface, "fd00::2:1/128 universe"},
	{"IPv4 on lo", "169.254.2.1", false, loopback, "169.254.2.1/32 host"},
	{"IPv6 on lo", "fd00::2:1", false, loopback, "fd00::2:1/128 universe"},
}

func kindFor(t *testing.T, hasDummy bool) string {
	t.Helper()
	if hasDummy {
		return dummyKind(t)
	}
	return noSuchKind
}

func TestEnsureMakesAndRemoveTakesAway(t *testing.T) {
	for _, tc := range places {
		t.Run(tc.name, func(t *testing.T) {
			if !inside(t) {
				return
			}
			_, ctx := ktesting.NewTestContext(t)
			a := newReal(t, tc.addr, kindFor(t, tc.dummy))
			if err := a.Remove(); err != nil {
				t.Errorf("Remove() before there was anything = %v, want nil", err)
			}
			if err := a.Ensure(ctx); err != nil {
				t.Fatalf("Ensure() = %v, want nil", err)
			}
			before := addresses(t, tc.iface)
			if !slices.Contains(before, tc.want) || a.Interface() != tc.iface {
				t.Errorf("addresses of %s = %q, want %q among them; Interface() = %q", tc.iface, before, tc.want, a.Interface())
			}
			if find(t, tc.iface).Attrs().Flags&net.FlagUp == 0 {
				t.Errorf("%s is down, want up", tc.iface)
			}
			if got := exists(t, DefaultInterface); got != tc.dummy {
				t.Errorf("%s exists: %v, want %v", DefaultInterface, got, tc.dummy)
			}

			if iface, changed, err := a.system.put(); iface != tc.iface || changed || err != nil {
				t.Errorf("put() again = %q, %v, %v, want %q, false, nil", iface, changed, err, tc.iface)
			}
			if diff := cmp.Diff(before, addresses(t, tc.iface)); diff != "" {
				t.Errorf("addresses after a second Ensure (-want +got):\n%s", diff)
			}

			for range 2 {
				if err := a.Remove(); err != nil {
					t.Errorf("Remove() = %v, want nil", err)
				}
				if exists(t, DefaultInterface) || slices.Contains(addresses(t, loopback), tc.want) {
					t.Errorf("after Remove(): %s exists: %v, addresses of lo: %q", DefaultInterface, exists(t, DefaultInterface), addresses(t, loopback))
				}
			}
			if got := addresses(t, loopback); !slices.Contains(got, "127.0.0.1/8 host") {
				t.Errorf("addresses of lo after Remove() = %q, want 127.0.0.1 to stay", got)
			}
		})
	}
}

// losses are what may happen to an address on an interface.
var losses = []struct {
	name  string
	dummy bool // only there
	do    func(link netlink.Link, addr *netlink.Addr) error
}{
	{"address deleted", false, netlink.AddrDel},
	{"interface set down", false, func(link netlink.Link, _ *netlink.Addr) error { return netlink.LinkSetDown(link) }},
	{"interface deleted", true, func(link netlink.Link, _ *netlink.Addr) error { return netlink.LinkDel(link) }},
	{"address deleted again", false, netlink.AddrDel},
}

// TestRunBringsBack has a listener that is there all the time, as edgehub's is.
func TestRunBringsBack(t *testing.T) {
	for _, tc := range places {
		t.Run(tc.name, func(t *testing.T) {
			if !inside(t) {
				return
			}
			_, ctx := ktesting.NewTestContext(t)
			a := newReal(t, tc.addr, kindFor(t, tc.dummy))
			if err := a.Ensure(ctx); err != nil {
				t.Fatalf("Ensure() = %v, want nil", err)
			}
			address := listen(t, a)
			reached := func(when string, condition func() bool) {
				t.Helper()
				// Well before a look that nobody asked for. A first packet may be lost: the
				// kernel makes the route to an IPv6 address some time after the address.
				ctx, cancel := context.WithTimeout(t.Context(), lookPeriod/2)
				defer cancel()
				if err := process.Poll(ctx, "the address is reached", func(ctx context.Context) error {
					if !condition() {
						return errors.New("not restored")
					}
					return dial(ctx, address)
				}); err != nil {
					t.Fatalf("%s: %v", when, err)
				}
			}
			reached("before any loss", func() bool { return true })
			stop := runReal(ctx, t, a)
			ours := a.system.(*rtnetlink).on(tc.iface)
			for _, loss := range losses {
				if loss.dummy && !tc.dummy {
					continue
				}
				before := restored(a)
				if err := loss.do(find(t, tc.iface), ours); err != nil {
					t.Fatalf("%s: %v", loss.name, err)
				}
				reached(loss.name, func() bool { return restored(a) > before })
				if got := addresses(t, tc.iface); !slices.Contains(got, tc.want) {
					t.Errorf("%s: addresses of %s = %q, want %q among them", loss.name, tc.iface, got, tc.want)
				}
			}
			stop()
			if err := dial(t.Context(), address); err != nil {
				t.Errorf("after the end of Run: %v, want the address to stay", err)
			}
		})
	}
}

// listen accepts on the address until the end of the test, and returns where.
func listen(t *testing.T, a *Address) string {
	t.Helper()
	l, err := net.Listen("tcp", net.JoinHostPort(a.addr.String(), "0"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	return l.Addr().String()
}

func dial(ctx context.Context, address string) error {
	d := net.Dialer{Timeout: time.Second}
	conn, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return conn.Close()
}

// runReal runs a until stop is called.
func runReal(ctx context.Context, t *testing.T, a *Address) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	return func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("Run() = %v, want nil", err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("Run goes on after the end of its context")
		}
	}
}

func TestEnsureWakesLoopback(t *testing.T) {
	if !inside(t) {
		return
	}
	_, ctx := ktesting.NewTestContext(t)
	if err := netlink.LinkSetDown(find(t, loopback)); err != nil {
		t.Fatal(err)
	}
	a := newReal(t, "169.254.2.1", noSuchKind)
	if err := a.Ensure(ctx); err != nil || find(t, loopback).Attrs().Flags&net.FlagUp == 0 {
		t.Errorf("Ensure() = %v, want nil and lo up", err)
	}
}

func TestForeignInterfaceOfTheName(t *testing.T) {
	if !inside(t) {
		return
	}
	_, ctx := ktesting.NewTestContext(t)
	kind := dummyKind(t)
	add(t, DefaultInterface, kind)
	before := addresses(t, DefaultInterface)
	a := newReal(t, "169.254.2.1", noSuchKind) // so kind is another
	err := a.Ensure(ctx)
	if err == nil || !strings.Contains(err.Error(), DefaultInterface) || !strings.Contains(err.Error(), kind) {
		t.Errorf("Ensure() = %v, want an error with %s and %s", err, DefaultInterface, kind)
	}
	if diff := cmp.Diff(before, addresses(t, DefaultInterface)); diff != "" {
		t.Errorf("addresses of somebody else's interface (-want +got):\n%s", diff)
	}
	if err := a.Remove(); err != nil || !exists(t, DefaultInterface) {
		t.Errorf("Remove() = %v, exists: %v, want nil and somebody else's interface to stay", err, exists(t, DefaultInterface))
	}
}

func TestAddressOnAnotherInterface(t *testing.T) {
	if !inside(t) {
		return
	}
	_, ctx := ktesting.NewTestContext(t)
	kind := dummyKind(t)
	other := add(t, "x0", kind)
	assign(t, other, "169.254.2.1/16")
	a := newReal(t, "169.254.2.1", kind)
	if err := a.Ensure(ctx); err != nil || a.Interface() != "x0" || exists(t, DefaultInterface) {
		t.Errorf("Ensure() = %v, Interface() = %q, want nil and x0, which has it", err, a.Interface())
	}
	if err := a.Remove(); err != nil || !slices.Contains(addresses(t, "x0"), "169.254.2.1/16 universe") {
		t.Errorf("Remove() = %v, addresses of x0 = %q, want them to stay", err, addresses(t, "x0"))
	}

	// Nobody is reached by an interface that is down.
	if err := netlink.LinkSetDown(other); err != nil {
		t.Fatal(err)
	}
	if err := a.Ensure(ctx); err != nil || a.Interface() != DefaultInterface {
		t.Errorf("Ensure() with x0 down = %v, Interface() = %q, want nil and %s", err, a.Interface(), DefaultInterface)
	}
	if find(t, "x0").Attrs().Flags&net.FlagUp != 0 {
		t.Error("somebody else's interface was set up, want it left alone")
	}

	if err := netlink.LinkSetDown(find(t, DefaultInterface)); err != nil {
		t.Fatal(err)
	}
	if err := a.Ensure(ctx); err != nil || find(t, DefaultInterface).Attrs().Flags&net.FlagUp == 0 {
		t.Errorf("Ensure() with the address on an interface of ours that is down = %v, want nil and it up", err)
	}
}

// TestRunTakesOver is an address that somebody else had, and took away.
func TestRunTakesOver(t *testing.T) {
	if !inside(t) {
		return
	}
	_, ctx := ktesting.NewTestContext(t)
	kind := dummyKind(t)
	other := add(t, "x0", kind)
	assign(t, other, "169.254.2.1/32")
	a := newReal(t, "169.254.2.1", kind)
	stop := runReal(ctx, t, a)
	poll(t, "Run has seen x0", func() bool { return a.Interface() == "x0" })
	if err := netlink.LinkDel(other); err != nil {
		t.Fatal(err)
	}
	poll(t, "the address is on an interface of ours", func() bool { return a.Interface() == DefaultInterface })
	stop()
}

func poll(t *testing.T, what string, condition func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), lookPeriod/2)
	defer cancel()
	if err := process.Poll(ctx, what, process.Until(condition)); err != nil {
		t.Fatal(err)
	}
}

func TestRemoveLeavesOthersOnLoopback(t *testing.T) {
	for _, others := range []string{"169.254.2.1/32", "169.254.2.1/16", "fd00::2:1/64"} {
		t.Run(strings.ReplaceAll(others, "/", " of "), func(t *testing.T) {
			if !inside(t) {
				return
			}
			_, ctx := ktesting.NewTestContext(t)
			assign(t, find(t, loopback), others)
			addr, _, _ := strings.Cut(others, "/")
			a := newReal(t, addr, noSuchKind)
			if err := a.Ensure(ctx); err != nil || a.Interface() != loopback {
				t.Errorf("Ensure() = %v, Interface() = %q, want nil and lo", err, a.Interface())
			}
			if err := a.Remove(); err != nil {
				t.Errorf("Remove() = %v, want nil", err)
			}
			if got := addresses(t, loopback); !slices.Contains(got, others+" universe") {
				t.Errorf("addresses of lo = %q, want %s to stay", got, others)
			}
		})
	}
}

func TestWithoutCapability(t *testing.T) {
	if !inside(t) {
		return
	}
	_, ctx := ktesting.NewTestContext(t)
	kind := dummyKind(t)
	v4, v6 := newReal(t, "169.254.2.1", kind), newReal(t, "fd00::2:1", kind)
	onLoopback := newReal(t, "169.254.2.1", noSuchKind)
	check := func(call string, err error, want ...string) {
		t.Helper()
		for _, part := range append(want, "CAP_NET_ADMIN") {
			if !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), part) {
				t.Errorf("%s = %v, want EPERM and %q", call, err, part)
			}
		}
	}

	restore := dropCapability(t)
	check("Ensure()", v4.Ensure(ctx),
		"ip link add edgehub0 type "+kind, "ip link set edgehub0 up",
		"ip addr add 169.254.2.1/32 dev edgehub0 scope link", "ip addr add 169.254.2.1/32 dev lo scope host")
	check("Ensure() of IPv6", v6.Ensure(ctx), "ip addr add fd00::2:1/128 dev edgehub0 nodad", "ip addr add fd00::2:1/128 dev lo nodad")
	restore()

	if err := v4.Ensure(ctx); err != nil {
		t.Fatal(err)
	}
	restore = dropCapability(t)
	if err := v4.Ensure(ctx); err != nil {
		t.Errorf("Ensure() with nothing to do = %v, want nil", err)
	}
	check("Remove()", v4.Remove(), "ip link del edgehub0")
	restore()
	if err := v4.Remove(); err != nil {
		t.Fatal(err)
	}

	if err := onLoopback.Ensure(ctx); err != nil {
		t.Fatal(err)
	}
	defer dropCapability(t)()
	check("Remove() from lo", onLoopback.Remove(), "ip addr del 169.254.2.1/32 dev lo")
}

// dropCapability takes CAP_NET_ADMIN from the thread of the caller until restore.
func dropCapability(t *testing.T) (restore func()) {
	t.Helper()
	runtime.LockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var before [2]unix.CapUserData
	if err := unix.Capget(&header, &before[0]); err != nil {
		t.Fatalf("capget: %v", err)
	}
	without := before
	without[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	if err := unix.Capset(&header, &without[0]); err != nil {
		t.Fatalf("capset: %v", err)
	}
	return func() {
		if err := unix.Capset(&header, &before[0]); err != nil {
			t.Fatalf("capset: %v", err) // the thread, still locked, ends with the test
		}
		runtime.UnlockOSThread()
	}
}

func TestRouteLocalnetOfTheKernel(t *testing.T) {
	if !inside(t) {
		return
	}
	add(t, "x0", dummyKind(t))
	for _, step := range []struct {
		name, iface, value string
		want               []string
	}{
		{"as it comes", "x0", "0", nil},
		{"one", "x0", "1", []string{"x0"}},
		{"all", "all", "1", []string{"all"}},
	} {
		if err := os.WriteFile(filepath.Join(IPv4Conf, step.iface, "route_localnet"), []byte(step.value), 0); err != nil {
			t.Skipf("/proc/sys is not writable: %v", err)
		}
		got, err := RouteLocalnet(IPv4Conf)
		if err != nil {
			t.Fatalf("%s: RouteLocalnet() = %v, want nil", step.name, err)
		}
		if diff := cmp.Diff(step.want, got); diff != "" {
			t.Errorf("%s: RouteLocalnet() (-want +got):\n%s", step.name, diff)
		}
	}
}
