// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package upstream is the way to the API servers: their endpoints, TLS, the
// credentials and their rotation, and health. Upstream is an http.RoundTripper;
// the cache sends through it what it cannot answer itself.
//
// The one caveat: no request is ever queued for a link that is down. While no
// server is known to be ready, and so until Run has seen the first good /readyz,
// RoundTrip fails at once with ErrUnavailable.
package upstream

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/klog/v2"
)

var (
	// ErrUnavailable says that no answer of an API server could be had: none is
	// known to be ready, or the connection failed before the answer was whole. The
	// request may have been carried out all the same.
	ErrUnavailable = errors.New("upstream is not reachable")
	// ErrCredential says that a request was not sent because there is no credential
	// that it may use.
	ErrCredential = errors.New("request has no credential for the upstream")
	// ErrRedirect says that the API server answered with a redirect, which is
	// neither followed nor passed on.
	ErrRedirect = errors.New("upstream answered with a redirect")
)

// An Upstream sends requests to the first healthy one of the configured API
// servers. It is safe for concurrent use.
type Upstream struct {
	cfg     Config
	metrics *metrics
	servers []*server // in the configured order, never empty
	files   *files

	mu      sync.Mutex    // guards all below; taken before a server's
	chosen  *server       // nil: none is up
	changed chan struct{} // closed at the next change of Up
	node    *user.DefaultInfo
}

var _ http.RoundTripper = (*Upstream)(nil)

// New checks the configuration and reads the files that it names. The error
// tells all that is wrong at once, each by the name of its field, server or
// file. New starts no goroutine and opens no connection.
func New(cfg Config) (*Upstream, error) {
	cfg = cfg.withDefaults()
	hosts, err := cfg.hosts()
	files := &files{ca: cfg.CAFile, cert: cfg.CertFile, key: cfg.KeyFile}
	creds, fileErr := files.load()
	if err := errors.Join(err, cfg.check(), fileErr); err != nil {
		return nil, err
	}
	m, err := newMetrics(cfg.Registerer)
	if err != nil {
		return nil, err
	}
	u := &Upstream{cfg: cfg, metrics: m, files: files, node: creds.node, changed: make(chan struct{})}
	m.certificateExpiry.Set(float64(creds.notAfter.Unix()))
	for _, host := range hosts {
		u.servers = append(u.servers, newServer(host, &u.cfg, m, creds, u.choose))
	}
	return u, nil
}

// Up says whether a server is ready to take requests.
func (u *Upstream) Up() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.chosen != nil
}

// Changed returns a channel that is closed at the next change of Up. To miss
// none, take the channel before asking Up.
func (u *Upstream) Changed() <-chan struct{} {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.changed
}

// Server returns the host:port of the server that takes requests now, empty if
// none does.
func (u *Upstream) Server() string {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.chosen == nil {
		return ""
	}
	return u.chosen.name
}

// Node returns the node's identity, from its certificate: the common name and
// the organizations as groups. The name never changes. The caller must not
// modify what it gets.
func (u *Upstream) Node() user.Info {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.node
}

// choose picks the server for new requests: the first in the configured order
// that is up. One that came back takes over from a later one that works only
// when it has been good for a while, because a change costs all watches.
func (u *Upstream) choose() {
	u.mu.Lock()
	defer u.mu.Unlock()
	chosenUp := false
	if u.chosen != nil {
		chosenUp, _ = u.chosen.standing()
	}
	var next *server
	for _, s := range u.servers {
		up, settled := s.standing()
		if up && (!chosenUp || settled || s == u.chosen) {
			next = s
			break
		}
	}
	if (next == nil) != (u.chosen == nil) {
		close(u.changed)
		u.changed = make(chan struct{})
		u.metrics.changes.Inc()
	}
	u.chosen = next
}

// session returns the connections that new requests take, nil if none is up.
func (u *Upstream) session() *session {
	u.mu.Lock()
	chosen := u.chosen
	u.mu.Unlock()
	if chosen == nil {
		return nil
	}
	if s := chosen.current(); s != nil {
		return s
	}
	// It went down a moment ago and another may be up.
	u.choose()
	u.mu.Lock()
	chosen = u.chosen
	u.mu.Unlock()
	if chosen == nil {
		return nil
	}
	return chosen.current()
}

// Run probes the servers and reloads the files until ctx ends, and returns nil
// then. Requests in flight are left alone, so that they can be drained; Close
// ends them. Run must be called once.
func (u *Upstream) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, s := range u.servers {
		wg.Go(func() { newProber(s).run(ctx) })
	}
	wg.Go(func() { u.reload(ctx) })
	wg.Wait()
	return nil
}

// Close ends all connections and the requests on them, which fail with
// ErrUnavailable, as do all later ones. It is for after Run.
func (u *Upstream) Close() {
	for _, s := range u.servers {
		s.close()
	}
}

// reload takes up changed files until ctx ends.
func (u *Upstream) reload(ctx context.Context) {
	logger := klog.FromContext(ctx)
	ticker := time.NewTicker(u.cfg.ReloadPeriod)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		creds, err := u.files.load()
		switch {
		case errors.Is(err, errUnchanged):
			continue
		case err != nil:
			u.metrics.reloads.WithLabelValues("failure").Inc()
			logger.Error(err, "Changed certificate files are broken, the former contents stay in force")
			continue
		}
		u.apply(creds)
		logger.Info("Certificate files were reloaded", "node", creds.node.Name, "expires", creds.notAfter)
	}
}

// apply makes new connections use creds.
func (u *Upstream) apply(creds *credentials) {
	for _, s := range u.servers {
		s.renew(creds)
	}
	u.mu.Lock()
	u.node = creds.node
	u.mu.Unlock()
	u.metrics.certificateExpiry.Set(float64(creds.notAfter.Unix()))
	u.metrics.reloads.WithLabelValues("success").Inc()
}
