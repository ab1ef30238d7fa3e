// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package app wires the node agent together: it knows every agent package, and
// has no logic of its own. [Main] is all that main calls.
package app

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/cache"
	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/datadir"
	"github.com/edgehub/edgehub/pkg/identity"
	"github.com/edgehub/edgehub/pkg/install"
	"github.com/edgehub/edgehub/pkg/linklocal"
	"github.com/edgehub/edgehub/pkg/outbox"
	"github.com/edgehub/edgehub/pkg/proxy"
	"github.com/edgehub/edgehub/pkg/proxy/contract"
	"github.com/edgehub/edgehub/pkg/seal"
	"github.com/edgehub/edgehub/pkg/upstream"
)

// What the garbage collector is told on a small node, unless GOGC and GOMEMLIMIT
// say something else: collect at half the usual growth, and earlier when the heap
// nears the limit. The limit is soft: a larger cluster costs time, not a crash.
const (
	gcPercent        = 50
	memoryLimitBytes = 128 << 20
)

// Main does what the command line says, without the program's name: runs the agent, or, with
// kubeconfig as the first word, writes a kubeconfig to out, or, with install, uninstall or
// rollback, puts the agent onto the node or takes it away. Help is printed and pflag.ErrHelp
// returned.
func Main(ctx context.Context, args []string, out io.Writer) error {
	switch {
	case len(args) == 0:
	case args[0] == "kubeconfig":
		return install.Kubeconfig(args[1:], out)
	case slices.Contains(install.Commands(), args[0]):
		return install.Main(ctx, args, out, func(flags []string) error {
			o := DefaultOptions()
			return o.Parse(flags)
		})
	}
	options := DefaultOptions()
	if err := options.Parse(args); err != nil {
		return err
	}
	return Run(ctx, options)
}

// Run runs the agent until ctx ends or a part of it fails. Options must have been
// validated. At the end: the proxy stops accepting, drains requests, and ends
// watches; what is kept beside requests follows; the cache ends its feeds and writes
// what is not on disk yet; probing ends; the metrics address goes last; then the
// journals are closed, and what is left of connections upstream.
func Run(ctx context.Context, o Options) (err error) {
	limitMemory()
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), collectors.NewBuildInfoCollector(), install.Placed())
	if err := datadir.Prepare(ctx, o.DataDir); err != nil {
		return fmt.Errorf("data directory: %w", err)
	}
	up, err := upstream.New(upstream.Config{Servers: o.ServerURLs, CAFile: o.ServerCAFile, CertFile: o.NodeCertFile, KeyFile: o.NodeKeyFile, Registerer: reg})
	if err != nil {
		return err
	}
	defer up.Close()
	serving, err := newServing(o, up, reg)
	if err != nil {
		return err
	}
	d, err := openDisk(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.close()) }()
	isUnavailable := func(err error) bool { return errors.Is(err, upstream.ErrUnavailable) }
	store, err := cache.New(cache.Config{
		Upstream: up, IsUnavailable: isUnavailable, Journal: d.journal, Node: up.Node, Sealer: d.sealer, SealAll: o.EncryptAll, MaxAges: o.maxAges(),
		MaxBytes: o.CacheMaxBytes, MaxScopes: o.CacheMaxScopes, MaxObjects: o.CacheMaxObjectsPerScope, FeedLinger: o.FeedLinger,
		Shared: o.sharedResources(), StrictInitialList: o.StrictInitialList, Registerer: reg,
	})
	if err != nil {
		return err
	}
	box, sendEvents, err := newOutbox(ctx, o, d, up, isUnavailable, reg)
	if err != nil {
		return err
	}
	authenticator, err := identity.New(identity.Config{
		ClientCAFile: o.ClientCAFile, Node: up.Node, Up: up.Up, Upstream: up, IsUnavailable: isUnavailable, Audiences: o.TokenAudiences, PodOnNode: podOnNode(store),
		Verdicts: verdicts{store, up.Node}, OfflineMaxAge: o.OfflineTokenMaxAge, Registerer: reg,
	})
	if err != nil {
		return err
	}
	address, listen, err := newLinkLocal(ctx, o, reg)
	if err != nil {
		return err
	}
	offline, err := contract.New(contract.Config{
		Next: store, Unavailable: isUnavailable, Responses: responses{store}, Outbox: box, Node: up.Node, MaxVerdictAge: o.OfflineVerdictMaxAge, Registerer: reg,
	})
	if err != nil {
		return err
	}
	filters, err := newFilters(ctx, o, up, store, offline, reg)
	if err != nil {
		return err
	}
	p, err := newProxy(o, ways{filters.chain, authenticator, serving.get, listen, isUnavailable}, reg)
	if err != nil {
		return err
	}
	admin, err := newAdmin(o.MetricsListenAddress, reg, filters.report, []check{
		{"upstream", func() error { return linkState(up) }},
		{"journal", store.Ready},
		{"encryption", func() error { return d.problem }},
		{"outbox", func() error { return d.outboxProblem }},
		{"filter configuration", filters.state},
	})
	if err != nil {
		p.Close()
		return err
	}
	klog.FromContext(ctx).Info("Starting", "node", up.Node().GetName(), "servers", o.ServerURLs, "trustThisCA", filepath.Join(o.DataDir, "pki", "ca.crt"))
	parts := append([]part{{"proxy", p.Run}}, filters.parts()...) // first to end: nothing may ask what follows any more
	return runAll(ctx, append(parts,
		part{"outbox", sendEvents},
		part{"identity", authenticator.Run}, // which keeps things in the cache
		part{"serving certificate", serving.run},
		part{"link-local address", address},
		part{"route_localnet", func(ctx context.Context) error {
			return linklocal.WatchRouteLocalnet(ctx, linklocal.IPv4Conf, reg)
		}},
		part{"cache", store.Run},
		part{"upstream", up.Run},
		part{"metrics", admin.Run},
		part{"memory", giveBack},
	)...)
}

func limitMemory() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(memoryLimitBytes)
	}
}

// A disk is what is kept there, and the key that some of it is sealed with.
type disk struct {
	journal, outbox *journal.Journal
	sealer          *seal.Sealer
	problem         error // why the key file is not used; nil: it is
	outboxProblem   error // why there is no outbox; nil: there is one
}

// openDisk does not fail for want of an encryption key, since what is sealed is fetched
// again then, nor for want of an outbox, which is the least of what is kept.
func openDisk(ctx context.Context, o Options) (*disk, error) {
	d, file := &disk{}, o.encryptionKeyFile()
	datadir.PrepareFile(ctx, file)
	var err error
	if d.sealer, err = seal.New(file); err != nil {
		d.problem = err
		klog.FromContext(ctx).Error(err, "Encryption key is not usable; what is encrypted is fetched again, and lost with this process")
	}
	if d.journal, err = journal.Open(journal.Options{Dir: filepath.Join(o.DataDir, "journal")}); err != nil {
		return nil, fmt.Errorf("open the journal: %w", err)
	}
	if d.outbox, d.outboxProblem = journal.Open(journal.Options{Dir: filepath.Join(o.DataDir, "outbox")}); d.outboxProblem != nil {
		klog.FromContext(ctx).Error(d.outboxProblem, "Outbox is not usable; while the link is down kubelet's Events are refused")
	}
	return d, nil
}

func (d *disk) close() error {
	if d.outbox == nil {
		return d.journal.Close()
	}
	return errors.Join(d.journal.Close(), d.outbox.Close())
}

// ways are what a request passes.
type ways struct {
	transport      http.RoundTripper
	authenticator  *identity.Authenticator
	getCertificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	listen         func(address string) (net.Listener, error)
	isUnavailable  func(error) bool
}

func newProxy(o Options, w ways, reg prometheus.Registerer) (*proxy.Proxy, error) {
	return proxy.New(proxy.Config{
		Addresses: o.addresses(), Listen: w.listen, GetCertificate: w.getCertificate, Authenticator: w.authenticator, Transport: w.transport, Unavailable: w.isUnavailable,
		MaxRequestsInFlight: o.MaxRequestsInFlight, MaxStreamsInFlight: o.MaxStreamsInFlight, MaxBodyBytes: o.MaxBodyBytes,
		RequestTimeout: o.RequestTimeout, DrainTimeout: o.ShutdownDrainTimeout, Audit: o.AuditLog, Registerer: reg,
	})
}

// newOutbox returns what keeps Events, nil if there is no place for them, and what sends
// them.
func newOutbox(ctx context.Context, o Options, d *disk, up *upstream.Upstream, isUnavailable func(error) bool, reg prometheus.Registerer) (contract.Outbox, func(context.Context) error, error) {
	if d.outbox == nil {
		return nil, untilDone, nil
	}
	cfg := outbox.Config{
		Journal: d.outbox, Upstream: up, IsUnavailable: isUnavailable, Up: up.Up, Changed: up.Changed, Node: up.Node,
		MaxEvents: o.OutboxMaxEvents, MaxBytes: o.OutboxMaxBytes, Registerer: reg,
	}
	cfg.Seal, cfg.Open, cfg.Current = d.sealEvent(o.EncryptAll), d.openEvent, d.sealedNow(o.EncryptAll)
	box, err := outbox.New(cfg)
	if err != nil {
		return nil, nil, err
	}
	_ = box.Load(ctx) // before the first request; what fails is tried again, and logged, by its Run
	return events{box}, box.Run, nil
}

// serving is the serving certificate, and what keeps it.
type serving struct {
	get func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	run func(context.Context) error
}

// newServing makes the certificate of the node-local CA, which is also what is served
// until the cluster has signed another one, if that is wanted.
func newServing(o Options, up *upstream.Upstream, reg prometheus.Registerer) (serving, error) {
	dir, hosts := filepath.Join(o.DataDir, "pki"), o.hosts()
	local, err := identity.ServingCertificate(dir, hosts)
	if err != nil {
		return serving{}, err
	}
	if o.ServingCertificate != servingBySigner {
		reg.MustRegister(local.Collector())
		return serving{local.GetCertificate, untilDone}, nil
	}
	signed, err := identity.SignedCertificate(identity.SignedConfig{Dir: dir, Hosts: hosts, Node: up.Node, Upstream: up, Fallback: local.GetCertificate, Registerer: reg})
	if err != nil {
		return serving{}, err
	}
	return serving{signed.GetCertificate, signed.Run}, nil
}

// newLinkLocal puts the address for pods in place and returns what keeps it there, and how
// to listen on it: where it cannot be put in place yet, that must not keep kubelet from
// being served. An address of loopback is there anyway.
func newLinkLocal(ctx context.Context, o Options, reg prometheus.Registerer) (run func(context.Context) error, listen func(string) (net.Listener, error), err error) {
	at, err := netip.ParseAddrPort(o.LinkLocalAddress)
	if err != nil || o.LinkLocalInterface == "" || at.Addr().IsLoopback() {
		return untilDone, nil, nil //nolint:nilerr // there is none: Validate has seen it
	}
	a, err := linklocal.New(linklocal.Config{Addr: at.Addr(), Interface: o.LinkLocalInterface, Registerer: reg})
	if err != nil {
		return nil, nil, err
	}
	if err := a.Ensure(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Pods with a network of their own cannot reach this node's edgehub yet")
	}
	return a.Run, func(address string) (net.Listener, error) {
		if address == o.LinkLocalAddress {
			return linklocal.Listen(ctx, address)
		}
		return net.Listen("tcp", address)
	}, nil
}

func untilDone(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

var errLinkDown = errors.New("the link to the API server is down; answers come from this node")

func linkState(up *upstream.Upstream) error {
	if up.Up() {
		return nil
	}
	return errLinkDown
}
