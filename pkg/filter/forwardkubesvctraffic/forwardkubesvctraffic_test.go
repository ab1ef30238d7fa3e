// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package forwardkubesvctraffic

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/filter"
	"github.com/edgehub/edgehub/pkg/filter/filtertest"
)

func TestGoldens(t *testing.T) {
	for dir, hub := range map[string]string{"ipv4": "169.254.2.1:10268", "ipv6": "[fd00::1]:10268"} {
		t.Run(dir, func(t *testing.T) { filtertest.Run(t, "testdata/"+dir, New(netip.MustParseAddrPort(hub))) })
	}
}

func TestNoAddress(t *testing.T) {
	f := New(netip.MustParseAddrPort("127.0.0.1:10268"))
	if err := f.Usable(); err == nil || !strings.Contains(err.Error(), "--link-local-address") {
		t.Errorf("Usable() = %v, want what to do", err)
	}
	o := filter.NewObject(codec.Shape{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		[]byte(`{"metadata":{"namespace":"default","name":"kubernetes","labels":{"kubernetes.io/service-name":"kubernetes"}},"addressType":"IPv4","endpoints":[],"ports":[{"name":"https","port":6443}]}`))
	if v, err := f.Apply(t.Context(), o); err == nil {
		t.Errorf("Apply(slice of default/kubernetes) = %s, nil, want an error", v)
	}
}
