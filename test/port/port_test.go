// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package port_test

import (
	"net"
	"strconv"
	"testing"

	"github.com/edgehub/edgehub/test/port"
)

func TestFree(t *testing.T) {
	seen := map[int]bool{}
	for range 100 {
		p, err := port.Free()
		if err != nil {
			t.Fatal(err)
		}
		if seen[p] || p >= 30000 {
			t.Errorf("Free() = %d, want one below 30000 that it has not returned before", p)
		}
		seen[p] = true
		l, err := net.Listen("tcp", "127.0.0.1:"+strconv.Itoa(p))
		if err != nil {
			t.Errorf("Free() = %d, which is taken: %v", p, err)
			continue
		}
		l.Close()
	}
}
