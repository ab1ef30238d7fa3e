// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package linklocal

import (
	"net"
	"testing"
)

func TestListenBeforeTheAddressIsThere(t *testing.T) {
	for _, address := range []string{"169.254.99.98:0", "[fd00:ed9e::98]:0"} {
		if l, err := net.Listen("tcp", address); err == nil {
			l.Close()
			t.Skipf("%s is on an interface here", address)
		}
		l, err := Listen(t.Context(), address)
		if err != nil {
			t.Errorf("Listen(%s) = %v", address, err)
			continue
		}
		l.Close()
	}
}
