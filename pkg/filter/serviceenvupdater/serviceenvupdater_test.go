// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package serviceenvupdater

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

func TestNoAddress(t *testing.T) {
	f := New(netip.AddrPort{})
	if err := f.Usable(); err == nil || !strings.Contains(err.Error(), "--link-local-address") {
		t.Errorf("Usable() = %v, want what to do", err)
	}
	o := filter.NewObject(codec.Shape{APIVersion: "v1", Kind: "Pod"}, []byte(`{"metadata":{"namespace":"shop","name":"web"},"spec":{}}`))
	if v, err := f.Apply(t.Context(), o); err == nil {
		t.Errorf("Apply(pod) = %s, nil, want an error", v)
	}
}
