// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package linklocal

import (
	"context"
	"net"
)

// Listen listens on a TCP address.
func Listen(ctx context.Context, address string) (net.Listener, error) {
	return new(net.ListenConfig).Listen(ctx, "tcp", address)
}
