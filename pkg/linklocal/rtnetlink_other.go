// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package linklocal

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
)

// elsewhere can do nothing of it.
type elsewhere struct{}

func newSystem(netip.Addr, string) system { return elsewhere{} }

func (elsewhere) put() (string, bool, error) { return "", false, errElsewhere() }

func (elsewhere) remove() error { return errElsewhere() }

func (elsewhere) follow(context.Context, func()) error { return errElsewhere() }

func errElsewhere() error {
	return fmt.Errorf("addresses of interfaces: %w on %s", errors.ErrUnsupported, runtime.GOOS)
}
