// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/klog/v2"
)

// A check is a line of /readyz?verbose.
type check struct {
	name  string
	state func() error
}

// admin is the metrics address. It shows; it changes nothing.
type admin struct {
	listener net.Listener // nil: there is no such address
	server   *http.Server
}

// newAdmin binds the address. Checks are told, and do not fail readiness: without
// a link or a disk edgehub still answers, which is what it is for.
func newAdmin(address string, reg *prometheus.Registry, pool http.Handler, checks []check) (*admin, error) {
	if address == "" {
		return &admin{}, nil
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("listen on %s for metrics: %w", address, err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, req *http.Request) { fmt.Fprint(w, readiness(req, checks)) })
	mux.Handle("GET /debug/pool", pool)
	return &admin{listener: l, server: &http.Server{
		Handler: mux, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10,
	}}, nil
}

func readiness(req *http.Request, checks []check) string {
	if !req.URL.Query().Has("verbose") {
		return "ok"
	}
	var b strings.Builder
	b.WriteString("[+]listeners ok\n") // Run ends when one of them fails
	for _, c := range checks {
		if err := c.state(); err != nil {
			fmt.Fprintf(&b, "[-]%s degraded: %v\n", c.name, err)
		} else {
			fmt.Fprintf(&b, "[+]%s ok\n", c.name)
		}
	}
	b.WriteString("readyz check passed\n")
	return b.String()
}

// Run serves until ctx ends.
func (a *admin) Run(ctx context.Context) error {
	if a.listener == nil {
		<-ctx.Done()
		return nil
	}
	klog.FromContext(ctx).Info("Serving metrics", "address", a.listener.Addr().String())
	ended := make(chan error, 1)
	go func() { ended <- a.server.Serve(a.listener) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	a.server.Close() // a scrape that is cut off is made again
	if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
