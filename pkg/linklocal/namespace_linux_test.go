// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package linklocal

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const insideEnv = "EDGEHUB_TEST_IN_NETWORK_NAMESPACE"

// inside runs the calling test in another process, which has a network namespace
// of its own with lo up, and takes over its result. It reports whether the caller
// is in there.
func inside(t *testing.T) bool {
	t.Helper()
	if os.Getenv(insideEnv) != "" {
		lo := find(t, loopback)
		if err := netlink.LinkSetUp(lo); err != nil {
			t.Fatalf("set lo up: %v", err)
		}
		return true
	}
	if os.Geteuid() != 0 {
		t.Skip("a network namespace of its own takes root")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	pattern := "^" + strings.ReplaceAll(regexp.QuoteMeta(t.Name()), "/", "$/^") + "$"
	cmd := exec.CommandContext(t.Context(), self, "-test.run="+pattern, "-test.v", "-test.timeout=2m")
	cmd.Env = append(os.Environ(), insideEnv+"=1", "GORACE=atexit_sleep_ms=0") // else each takes a second
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	out, err := cmd.CombinedOutput()
	switch {
	case errors.Is(err, unix.EPERM):
		t.Skipf("a network namespace of its own is not allowed here: %v", err)
	case err != nil:
		t.Fatalf("%v\n%s", err, out)
	case strings.Contains(string(out), "--- SKIP"):
		t.Skipf("%s", out)
	case !strings.Contains(string(out), "--- PASS: "+t.Name()+" "):
		t.Fatalf("the test did not run:\n%s", out)
	}
	return false
}

// dummyKind is the kind of interface that stands for a dummy: dummy, or on a
// kernel without it an ifb, which is like it in all that matters here.
func dummyKind(t *testing.T) string {
	t.Helper()
	for _, kind := range []string{dummy, "ifb"} {
		link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Name: "probe0"}, LinkType: kind}
		err := netlink.LinkAdd(link)
		if errors.Is(err, unix.EOPNOTSUPP) {
			continue
		}
		if err == nil {
			err = netlink.LinkDel(link)
		}
		if err != nil {
			t.Fatalf("try an interface of kind %s: %v", kind, err)
		}
		return kind
	}
	t.Skip("this kernel has neither dummy nor ifb interfaces")
	return ""
}

// noSuchKind makes a kernel one without dummy interfaces.
const noSuchKind = "edgehub-none"

// newReal is an Address in the namespace of the process.
func newReal(t *testing.T, addr, kind string) *Address {
	t.Helper()
	ip := netip.MustParseAddr(addr)
	a := newAddress(t, &rtnetlink{addr: ip, name: DefaultInterface, kind: kind})
	a.addr = ip
	return a
}

// add makes an interface that is up.
func add(t *testing.T, name, kind string) netlink.Link {
	t.Helper()
	link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Name: name, Flags: net.FlagUp}, LinkType: kind}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatalf("add interface %s: %v", name, err)
	}
	return find(t, name)
}

func find(t *testing.T, name string) netlink.Link {
	t.Helper()
	link, err := netlink.LinkByName(name)
	if err != nil {
		t.Fatalf("look up interface %s: %v", name, err)
	}
	return link
}

func exists(t *testing.T, name string) bool {
	t.Helper()
	_, err := netlink.LinkByName(name)
	if err != nil && !isNotFound(err) {
		t.Fatalf("look up interface %s: %v", name, err)
	}
	return err == nil
}

// addresses are those of an interface as "address/bits scope".
func addresses(t *testing.T, name string) (found []string) {
	t.Helper()
	addrs, err := netlink.AddrList(find(t, name), netlink.FAMILY_ALL)
	if err != nil {
		t.Fatalf("list addresses of %s: %v", name, err)
	}
	for _, a := range addrs {
		found = append(found, a.IPNet.String()+" "+netlink.Scope(a.Scope).String())
	}
	return found
}

// assign puts an address, as address/bits, on an interface as another program
// would.
func assign(t *testing.T, link netlink.Link, addr string) {
	t.Helper()
	a, err := netlink.ParseAddr(addr)
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(link, a); err != nil {
		t.Fatalf("add %s to %s: %v", addr, link.Attrs().Name, err)
	}
}
