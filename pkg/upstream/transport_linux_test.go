// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"context"
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

func TestDialerSetsUserTimeout(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cfg := Config{}.withDefaults()
	c, err := newDialer(&cfg).DialContext(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name             string
		level, opt, want int
	}{
		{"TCP_USER_TIMEOUT", unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 9000},
		{"SO_KEEPALIVE", unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
		{"TCP_KEEPIDLE", unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 5},
	} {
		var got int
		var optErr error
		if err := raw.Control(func(fd uintptr) { got, optErr = unix.GetsockoptInt(int(fd), test.level, test.opt) }); err != nil || optErr != nil {
			t.Fatal(err, optErr)
		}
		if got != test.want {
			t.Errorf("%s = %d, want %d", test.name, got, test.want)
		}
	}
}

// TestReplacedConnectionIsSuspicious: after GOAWAY a pool dials again before the
// end of the old connection was read.
func TestReplacedConnectionIsSuspicious(t *testing.T) {
	suspicions := 0
	dial := replacing(func(_ context.Context, network, _ string) (net.Conn, error) {
		if network == "refused" {
			return nil, unix.ECONNREFUSED
		}
		return nil, nil
	}, func() { suspicions++ })
	for i, step := range []struct {
		network string
		want    int
	}{{"refused", 0}, {"refused", 0}, {"tcp", 0}, {"tcp", 1}, {"tcp", 2}} {
		_, _ = dial(t.Context(), step.network, "") // the suspicion is what counts
		if suspicions != step.want {
			t.Errorf("suspicions after dial %d = %d, want %d", i+1, suspicions, step.want)
		}
	}
}
