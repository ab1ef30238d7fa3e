// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package linklocal

import (
	"context"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// TestFollowOverflow is a subscription that is told more than it can keep, none of
// it a loss.
func TestFollowOverflow(t *testing.T) {
	if !inside(t) {
		return
	}
	link := add(t, "x0", dummyKind(t))
	assign(t, link, "169.254.2.1/32")
	ctx, cancel := context.WithCancel(t.Context())
	lost, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- newReal(t, "169.254.2.1", dummy).system.follow(ctx, func() { lost <- struct{}{} })
	}()
	heard := func(what string) {
		t.Helper()
		select {
		case <-lost:
		case err := <-ended:
			t.Fatalf("follow() = %v, want it to go on", err)
		case <-time.After(lookPeriod / 2):
			t.Fatalf("nothing was heard of %s", what)
		}
	}
	// follow is subscribed and waits to be heard.
	poll(t, "follow is subscribed", func() bool { return subscribed(t) })
	for i := range 3000 {
		if err := netlink.LinkSetMTU(link, 1400+i%2); err != nil {
			t.Fatal(err)
		}
	}
	heard("the subscription")
	heard("the overflow")
	if err := netlink.LinkDel(link); err != nil {
		t.Fatal(err)
	}
	heard("the interface that went")
	cancel()
	for {
		select {
		case <-lost: // its address, and more
		case err := <-ended:
			if err != nil {
				t.Errorf("follow() = %v, want nil", err)
			}
			return
		case <-time.After(lookPeriod / 2):
			t.Fatal("follow() goes on after the end of its context")
		}
	}
}

// subscribed reports whether somebody in the namespace listens for changes.
func subscribed(t *testing.T) bool {
	t.Helper()
	b, err := os.ReadFile("/proc/self/net/netlink")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		// sk, protocol, port, groups
		if f := strings.Fields(line); len(f) > 3 && f[1] == "0" && f[3] == "00000111" {
			return true
		}
	}
	return false
}

func TestIsLoss(t *testing.T) {
	link := func(flags uint32) []byte {
		m := nl.NewIfInfomsg(unix.AF_UNSPEC)
		m.Flags = flags
		return m.Serialize()
	}
	for _, tc := range []struct {
		name string
		kind uint16
		data []byte
		want bool
	}{
		{"address gone", unix.RTM_DELADDR, nil, true},
		{"interface gone", unix.RTM_DELLINK, nil, true},
		{"interface down", unix.RTM_NEWLINK, link(unix.IFF_RUNNING), true},
		{"interface up", unix.RTM_NEWLINK, link(unix.IFF_UP | unix.IFF_RUNNING), false},
		{"too short", unix.RTM_NEWLINK, make([]byte, unix.SizeofIfInfomsg-1), false},
		{"new address", unix.RTM_NEWADDR, nil, false},
	} {
		m := syscall.NetlinkMessage{Header: syscall.NlMsghdr{Type: tc.kind}, Data: tc.data}
		if got := isLoss(m); got != tc.want {
			t.Errorf("isLoss(%s) = %v, want %v", tc.name, got, tc.want)
		}
	}
}
