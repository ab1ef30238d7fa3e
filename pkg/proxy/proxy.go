// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package proxy is the door that every client on the node knocks at: listeners,
// the handler chain, the reverse proxy and the answers it gives by itself.
//
// [New] binds the listeners and [Proxy.Run] serves until its context ends. What
// answers a request is the [http.RoundTripper] in [Config]; whether that is the
// API server or a record of what it said is not this package's business. The
// offline contract for writes is in the package contract below this one, which
// is a RoundTripper too.
//
// Errors reach a client through writeError only, as a metav1.Status.
package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
)

const (
	// A kubelet keeps one HTTP/2 connection with a watch for each Secret and
	// ConfigMap of its pods; net/http's default of 250 streams would make the
	// watches above it wait for ever.
	maxConcurrentStreams = 2000

	// Bearer tokens are the largest thing in a header; etcd's limit on a Secret
	// does not apply to them, 64 KiB is eight times the largest seen.
	maxHeaderBytes = 64 << 10

	readHeaderTimeout = 10 * time.Second
	idleTimeout       = 3 * time.Minute // longer than client-go's 90 s, so that the client closes first

	pingAfter = time.Minute
)

// Config is what a Proxy needs. Transport, Authenticator, GetCertificate and
// Addresses are required; zero values elsewhere mean the default named beside.
type Config struct {
	// Addresses are bound by New, host:port. Each gets limits of its own, so that
	// clients of one cannot starve those of another.
	Addresses []string
	// Listen makes the listener of an address. Nil: net.Listen.
	Listen func(address string) (net.Listener, error)
	// GetCertificate is called for every TLS handshake.
	GetCertificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	// Authenticator says who is calling.
	Authenticator Authenticator
	// Transport answers. It may return an error that is an apierrors.APIStatus.
	// Scheme and host of the URLs that it gets mean nothing.
	Transport http.RoundTripper
	// Unavailable reports whether an error of Transport or Authenticator means
	// that the API server cannot be reached and nothing else can answer. Nil: none does.
	Unavailable func(error) bool
	// Ready is asked by /readyz; an error makes it answer 503. Nil: always ready.
	Ready func() error

	MaxRequestsInFlight int           // requests that end by themselves, per address; 400
	MaxStreamsInFlight  int           // watches, logs, upgrades, per address; 4000
	MaxBodyBytes        int64         // of a request; 3 MiB
	RequestTimeout      time.Duration // of requests that end by themselves; 60 s
	DrainTimeout        time.Duration // what such requests get at shutdown; 10 s
	StallTimeout        time.Duration // of a response of which the client takes nothing; 60 s

	// Audit logs what is answered from this node or refused.
	Audit bool

	// Registerer gets the metrics. Nil: they are counted and not shown.
	Registerer prometheus.Registerer
}

func (c *Config) setDefaults() {
	if c.Unavailable == nil {
		c.Unavailable = func(error) bool { return false }
	}
	if c.Listen == nil {
		c.Listen = func(address string) (net.Listener, error) { return net.Listen("tcp", address) }
	}
	if c.Ready == nil {
		c.Ready = func() error { return nil }
	}
	if c.MaxRequestsInFlight == 0 {
		c.MaxRequestsInFlight = 400
	}
	if c.MaxStreamsInFlight == 0 {
		c.MaxStreamsInFlight = 4000
	}
	if c.MaxBodyBytes == 0 {
		c.MaxBodyBytes = 3 << 20
	}
	if c.RequestTimeout == 0 {
		c.RequestTimeout = 60 * time.Second
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = 10 * time.Second
	}
	if c.StallTimeout == 0 {
		c.StallTimeout = time.Minute
	}
}

// A Proxy serves the Kubernetes API on the node.
type Proxy struct {
	cfg       Config
	metrics   *metrics
	audit     *audit // nil: none
	drain     *drain
	stalls    *stalls
	listeners []net.Listener
}

// New binds every address of cfg; a failure names the address and leaves none
// bound. Run must be called, or Close.
func New(cfg Config) (*Proxy, error) {
	cfg.setDefaults()
	if cfg.Transport == nil || cfg.Authenticator == nil || cfg.GetCertificate == nil || len(cfg.Addresses) == 0 {
		return nil, errors.New("proxy: Transport, Authenticator, GetCertificate and Addresses are required")
	}
	p := newProxy(cfg)
	for _, address := range cfg.Addresses {
		l, err := cfg.Listen(address)
		if err != nil {
			p.Close()
			return nil, fmt.Errorf("listen on %s: %w", address, err)
		}
		p.listeners = append(p.listeners, l)
	}
	return p, nil
}

// newProxy is a Proxy without listeners.
func newProxy(cfg Config) *Proxy {
	m := newMetrics(cfg.Registerer)
	p := &Proxy{cfg: cfg, metrics: m, drain: newDrain(), stalls: newStalls(cfg.StallTimeout, m)}
	if cfg.Audit {
		p.audit = newAudit(m)
	}
	return p
}

// Addrs are the bound addresses, in the order of Config.Addresses.
func (p *Proxy) Addrs() []net.Addr {
	var addrs []net.Addr
	for _, l := range p.listeners {
		addrs = append(addrs, l.Addr())
	}
	return addrs
}

// Close gives the listeners back. It is for a Proxy whose Run is never called.
func (p *Proxy) Close() {
	for _, l := range p.listeners {
		l.Close() // nothing was served, so nothing can be lost
	}
}

// handler is the chain that every request passes, outermost first.
func (p *Proxy) handler(errorLog *log.Logger) http.Handler {
	return Chain(p.reverseProxy(errorLog),
		WithPanicRecovery(p.metrics),                 // outermost: everything below may fail
		WithStallLimit(p.stalls),                     // whoever writes below
		WithAudit(p.audit),                           // whatever is refused below
		WithCanonicalRequest(p.metrics),              // one form of path and query, before anything decides by it
		WithRequestInfo(),                            // verb, resource, namespace, name for all below
		WithHealth(p.cfg.Ready),                      // a probe has no credential and must not wait for a limit
		WithDrain(p.drain),                           // whatever is below is waited for at shutdown, and is counted before it ends
		WithMetrics(p.metrics),                       // needs the verb; outside identity, so that 401s are counted too
		WithAccessLog(),                              // needs what WithMetrics notes; tells of refused callers too
		WithDeadline(p.cfg.RequestTimeout),           // bounds asking upstream who a caller is, too
		WithUser(p.cfg.Authenticator, p.unavailable), // identity, before anything that is owed to a caller
		WithMaxInFlight(p.cfg.MaxRequestsInFlight, p.cfg.MaxStreamsInFlight, p.metrics), // only callers with a name take places
		WithMaxBody(p.cfg.MaxBodyBytes), // innermost: nothing above reads a body
	)
}

func (p *Proxy) server(base context.Context) *http.Server {
	errorLog := log.New(&logWriter{klog.FromContext(base)}, "", 0)
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	return &http.Server{
		Handler:     p.handler(errorLog),
		BaseContext: func(net.Listener) context.Context { return base },
		ErrorLog:    errorLog,
		// OPTIONS * is a request like any other one.
		DisableGeneralOptionsHandler: true,
		Protocols:                    protocols,
		MaxHeaderBytes:               maxHeaderBytes,
		ReadHeaderTimeout:            readHeaderTimeout,
		IdleTimeout:                  idleTimeout,
		// No ReadTimeout and no WriteTimeout: they would end watches. Requests that
		// end by themselves have WithDeadline.
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxConcurrentStreams,
			SendPingTimeout:      pingAfter,
			// For a client that does not even read the connection, so that a response
			// cannot be ended by itself. Later than that, which is counted.
			WriteByteTimeout: p.cfg.StallTimeout + p.cfg.StallTimeout/2,
		},
		TLSConfig: &tls.Config{
			MinVersion:     tls.VersionTLS12,
			GetCertificate: p.cfg.GetCertificate,
			// Not verified here: an expired node certificate must still reach the
			// Authenticator, which has an answer for it while the link is down.
			ClientAuth: tls.RequestClientCert,
		},
	}
}

// Run serves until ctx ends or a listener fails, then shuts down in this order:
// stop accepting, let requests that end by themselves end (Config.DrainTimeout),
// end watches and other streams, close what is left. It returns when no handler
// runs any more, nil after an orderly shutdown.
func (p *Proxy) Run(ctx context.Context) error {
	base := context.WithoutCancel(ctx) // requests outlive ctx by the time they are given to drain
	looking, stopLooking := context.WithCancel(base)
	var looker sync.WaitGroup
	looker.Go(func() { p.stalls.run(looking) })
	defer looker.Wait()
	defer stopLooking()
	ended := make(chan error, len(p.listeners))
	var servers []*http.Server
	for _, l := range p.listeners {
		s := p.server(base)
		servers = append(servers, s)
		go func() { ended <- s.ServeTLS(l, "", "") }()
		klog.FromContext(ctx).Info("Serving", "address", l.Addr().String())
	}
	running, failed := len(servers), error(nil)
	select {
	case <-ctx.Done():
	case failed = <-ended:
		running--
	}
	p.shutdown(base, servers)
	for ; running > 0; running-- {
		if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
			failed = errors.Join(failed, err)
		}
	}
	if failed != nil {
		return fmt.Errorf("serve: %w", failed)
	}
	return nil
}

// shutdownGrace is what closing connections may take once no handler has work left.
const shutdownGrace = 2 * time.Second

func (p *Proxy) shutdown(base context.Context, servers []*http.Server) {
	ctx, cancel := context.WithTimeout(base, p.cfg.DrainTimeout+2*shutdownGrace)
	defer cancel()
	var closing sync.WaitGroup
	for _, s := range servers {
		closing.Go(func() {
			if err := s.Shutdown(ctx); err != nil {
				s.Close() // it only repeats what Shutdown said
			}
		})
	}
	draining, cancelDraining := context.WithTimeout(ctx, p.cfg.DrainTimeout)
	p.drain.waitRequests(draining)
	cancelDraining()
	p.drain.endStreams()
	ending, cancelEnding := context.WithTimeout(ctx, shutdownGrace)
	p.drain.waitStreams(ending)
	cancelEnding()
	// From here on only idle connections are left; Shutdown looks for them every
	// half second.
	time.AfterFunc(shutdownGrace, cancel)
	closing.Wait()
}

// logWriter brings net/http's own messages (TLS handshakes that fail, mostly) to klog.
type logWriter struct{ logger klog.Logger }

func (w *logWriter) Write(line []byte) (int, error) {
	w.logger.V(2).Info("HTTP server", "message", strings.TrimSpace(string(line)))
	return len(line), nil
}
