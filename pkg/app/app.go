// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package app wires the node agent together: it knows every agent package, and
// has no logic of its own. [Run] is all that main calls.
package app

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/cache"
	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/identity"
	"github.com/edgehub/edgehub/pkg/proxy"
	"github.com/edgehub/edgehub/pkg/proxy/contract"
	"github.com/edgehub/edgehub/pkg/upstream"
)

// What the garbage collector is told on a small node, unless GOGC and GOMEMLIMIT
// say something else: collect at half the usual growth, and earlier when the heap
// nears the limit. The limit is soft: a larger cluster costs time, not a crash.
const (
	gcPercent        = 50
	memoryLimitBytes = 128 << 20
)

// Run runs the agent until ctx ends or a part of it fails. Options must have been
// validated. At the end: the proxy stops accepting, drains requests, and ends
// watches; the cache ends its feeds and writes what is not on disk yet; probing
// ends; the metrics address goes last; then the journal is closed, and what is left
// of connections upstream.
func Run(ctx context.Context, o Options) (err error) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(memoryLimitBytes)
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), collectors.NewBuildInfoCollector())

	up, err := upstream.New(upstream.Config{Servers: o.ServerURLs, CAFile: o.ServerCAFile, CertFile: o.NodeCertFile, KeyFile: o.NodeKeyFile, Registerer: reg})
	if err != nil {
		return err
	}
	defer up.Close()
	serving, err := servingCertificate(o)
	if err != nil {
		return err
	}
	j, err := journal.Open(journal.Options{Dir: filepath.Join(o.DataDir, "journal")})
	if err != nil {
		return fmt.Errorf("open the journal: %w", err)
	}
	defer func() { err = errors.Join(err, j.Close()) }()
	isUnavailable := func(err error) bool { return errors.Is(err, upstream.ErrUnavailable) }
	store, err := cache.New(cache.Config{
		Upstream: up, IsUnavailable: isUnavailable, Journal: j, Node: up.Node, EncryptionKeyFile: o.encryptionKeyFile(),
		MaxBytes: o.CacheMaxBytes, MaxScopes: o.CacheMaxScopes, MaxObjects: o.CacheMaxObjectsPerScope, FeedLinger: o.FeedLinger,
		Shared: o.sharedResources(), StrictInitialList: o.StrictInitialList, Registerer: reg,
	})
	if err != nil {
		return err
	}
	p, err := newProxy(o, up, store, serving, isUnavailable, reg)
	if err != nil {
		return err
	}
	admin, err := newAdmin(o.MetricsListenAddress, reg, []check{
		{"upstream", func() error { return linkState(up) }},
		{"journal", store.Ready},
	})
	if err != nil {
		p.Close()
		return err
	}
	klog.FromContext(ctx).Info("Starting", "node", up.Node().GetName(), "servers", o.ServerURLs, "trustThisCA", filepath.Join(o.DataDir, "pki", "ca.crt"))
	return runAll(ctx,
		part{"proxy", p.Run}, // first to end: nothing may ask what follows any more
		part{"cache", store.Run},
		part{"upstream", up.Run},
		part{"metrics", admin.Run},
		part{"memory", giveBack},
	)
}

// newProxy puts the ways of a request together: proxy, offline contract, cache.
func newProxy(o Options, up *upstream.Upstream, store *cache.Cache, serving *identity.ServingCert, isUnavailable func(error) bool, reg prometheus.Registerer) (*proxy.Proxy, error) {
	authenticator, err := identity.New(identity.Config{
		ClientCAFile: o.ClientCAFile, Node: up.Node, Up: up.Up, Upstream: up, IsUnavailable: isUnavailable,
		Verdicts: verdicts{store, up.Node}, OfflineMaxAge: o.OfflineTokenMaxAge, Registerer: reg,
	})
	if err != nil {
		return nil, err
	}
	offline, err := contract.New(contract.Config{
		Next: store, Unavailable: isUnavailable, Responses: responses{store}, Node: up.Node, MaxVerdictAge: o.OfflineVerdictMaxAge, Registerer: reg,
	})
	if err != nil {
		return nil, err
	}
	return proxy.New(proxy.Config{
		Addresses: o.addresses(), GetCertificate: serving.GetCertificate, Authenticator: authenticator, Transport: offline, Unavailable: isUnavailable,
		MaxRequestsInFlight: o.MaxRequestsInFlight, MaxStreamsInFlight: o.MaxStreamsInFlight, MaxBodyBytes: o.MaxBodyBytes,
		RequestTimeout: o.RequestTimeout, DrainTimeout: o.ShutdownDrainTimeout, Registerer: reg,
	})
}

func servingCertificate(o Options) (*identity.ServingCert, error) {
	if err := os.MkdirAll(o.DataDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the data directory: %w", err)
	}
	var hosts []string
	for _, address := range o.addresses() {
		if a, err := netip.ParseAddrPort(address); err == nil { // as Validate has seen
			hosts = append(hosts, a.Addr().String())
		}
	}
	return identity.ServingCertificate(filepath.Join(o.DataDir, "pki"), hosts)
}

var errLinkDown = errors.New("the link to the API server is down; answers come from this node")

func linkState(up *upstream.Upstream) error {
	if up.Up() {
		return nil
	}
	return errLinkDown
}
