// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package masterservice

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/filter"
	"github.com/edgehub/edgehub/pkg/filter/filtertest"
)

func TestGoldens(t *testing.T) {
	filtertest.Run(t, "testdata", New(netip.MustParseAddrPort("169.254.2.1:10268")))
}

func TestAddress(t *testing.T) {
	for _, tc := range []struct {
		address string
		ready   bool
	}{
		{"169.254.2.1:10268", true},
		{"[fd00::1]:10268", true},
		{"[::ffff:169.254.2.1]:10268", true},
		{"192.0.2.1:443", true},
		{"", false},
		{"169.254.2.1:0", false},
		{"127.0.0.1:10268", false},
		{"127.1.2.3:10268", false},
		{"[::1]:10268", false},
		{"[::ffff:127.0.0.1]:10268", false},
		{"0.0.0.0:10268", false},
		{"[::]:10268", false},
		{"224.0.0.1:10268", false},
		{"[fe80::1%eth0]:10268", false},
	} {
		t.Run(tc.address, func(t *testing.T) {
			var address netip.AddrPort
			if tc.address != "" {
				address = netip.MustParseAddrPort(tc.address)
			}
			f := New(address)
			err := f.Usable()
			if ready := err == nil; ready != tc.ready {
				t.Fatalf("New(%s).Usable() = %v, want ready %t", tc.address, err, tc.ready)
			}
			if err != nil && !strings.Contains(err.Error(), "--link-local-address") {
				t.Errorf("New(%s).Usable() = %v, want what to do", tc.address, err)
			}
			o := filter.NewObject(codec.Shape{APIVersion: "v1", Kind: "Service"}, []byte(`{"metadata":{"namespace":"default","name":"kubernetes"},"spec":{"ports":[{"name":"https","port":443}]}}`))
			if v, err := f.Apply(t.Context(), o); (err == nil) != tc.ready || (v == filter.Change) != tc.ready {
				t.Errorf("New(%s).Apply(default/kubernetes) = %s, %v, want ready %t", tc.address, v, err, tc.ready)
			}
		})
	}
}

// An address in IPv6's clothes is written as what it is.
func TestMappedAddress(t *testing.T) {
	h := NewHub(netip.MustParseAddrPort("[::ffff:169.254.2.1]:10268"))
	if got, want := h.String(), "169.254.2.1:10268"; got != want {
		t.Errorf("NewHub(mapped) = %s, want %s", got, want)
	}
}
