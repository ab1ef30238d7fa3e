// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package linklocal

import (
	"context"
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// Listen listens on a TCP address whether or not it is on an interface: connections
// come in once it is. So a listener for pods keeps nothing else from starting.
func Listen(ctx context.Context, address string) (net.Listener, error) {
	lc := net.ListenConfig{Control: func(network, _ string, c syscall.RawConn) error {
		level, option := unix.SOL_IP, unix.IP_FREEBIND
		if network == "tcp6" {
			level, option = unix.SOL_IPV6, unix.IPV6_FREEBIND
		}
		var err error
		return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, 1) }), err)
	}}
	return lc.Listen(ctx, "tcp", address)
}
