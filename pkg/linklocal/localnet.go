// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package linklocal

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
)

// IPv4Conf is where Linux keeps the IPv4 settings of the interfaces in the network
// namespace of the process, for RouteLocalnet and WatchRouteLocalnet.
const IPv4Conf = "/proc/sys/net/ipv4/conf"

const exposurePeriod = time.Minute

// RouteLocalnet returns the interfaces, sorted, by which packets from other
// machines may reach what listens on 127.0.0.0/8, as far as routing is concerned:
// those with <dir>/<interface>/route_localnet set; a packet filter may still drop
// them. If it is set for all, the answer is "all" and names no other: it would
// change with every pod. "default" does not count, since it opens nothing itself:
// an interface that is made later takes it over and is then named. lo does not
// count either, no other machine is behind it.
//
// It is an error if dir has no setting for all, and so is not what it should be.
func RouteLocalnet(dir string) ([]string, error) {
	all, err := routeLocalnet(dir, "all")
	if err != nil {
		return nil, err
	}
	if all {
		return []string{"all"}, nil
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	var found []string
	for _, e := range entries {
		if e.Name() == "default" || e.Name() == "lo" {
			continue
		}
		set, err := routeLocalnet(dir, e.Name())
		if errors.Is(err, fs.ErrNotExist) {
			continue // the interface has just gone
		}
		if err != nil {
			return nil, err
		}
		if set {
			found = append(found, e.Name())
		}
	}
	return found, nil
}

// routeLocalnet takes whatever is not 0 for set, as the kernel does.
func routeLocalnet(dir, iface string) (bool, error) {
	b, err := os.ReadFile(filepath.Join(dir, iface, "route_localnet"))
	if err != nil {
		return false, fmt.Errorf("read route_localnet: %w", err)
	}
	return strings.TrimSpace(string(b)) != "0", nil
}

// WatchRouteLocalnet calls RouteLocalnet for dir at once and then every minute,
// logs when the answer changes, and keeps a gauge of it on reg; nil: nowhere. A
// failure is logged when its text is new, and leaves the gauge as it was. The
// error is that of the registration; it returns nil when ctx ends.
func WatchRouteLocalnet(ctx context.Context, dir string, reg prometheus.Registerer) error {
	exposed, err := newExposedGauge(reg)
	if err != nil {
		return err
	}
	logger := klog.FromContext(ctx)
	failed := failures{}
	var before []string
	for ; ctx.Err() == nil; wait(ctx, exposurePeriod, nil) {
		found, err := RouteLocalnet(dir)
		if err != nil {
			failed.report(logger, err, "It is not known whether other machines may reach loopback addresses")
			continue
		}
		clear(failed)
		exposed.Set(float64(len(found)))
		switch {
		case slices.Equal(found, before):
		case len(found) == 0:
			logger.Info("Other machines no longer reach loopback addresses: route_localnet is not set")
		default:
			logger.Info("Other machines may reach loopback addresses: route_localnet is set", "interfaces", found)
		}
		before = found
	}
	return nil
}
