// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"

	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/pkg/identity"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
)

// A bare proxy is httputil.ReverseProxy and nothing else, as a process.
type bare struct {
	*process.Process
	dir    string
	config *rest.Config // the bench user's way through it
}

func (b *bench) newBare(ctx context.Context) (*bare, error) {
	p, err := port.Free()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "edgehub-bench-")
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	address := fmt.Sprintf("127.0.0.1:%d", p)
	r := &bare{dir: dir, config: b.direct()}
	r.config.Host, r.config.CAFile, r.config.CAData = "https://"+address, dir+"/ca.crt", nil
	r.Process = process.New(process.Command{
		Name: "reverseproxy", Path: self, Dir: dir, Args: []string{"reverseproxy", address, b.cp.URL(), b.cp.CAFile(), dir},
		Ready: func(ctx context.Context) error {
			once, err := to(ctx, r.config, "/version", jsonType)
			if err == nil {
				once.close()
			}
			return err
		},
	})
	if err := r.Start(ctx); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

func (r *bare) close() {
	_ = r.Close() // it keeps nothing
	_ = os.RemoveAll(r.dir)
}

// reverseProxy is the process: httputil's as it is, with TLS on both sides.
func reverseProxy(args []string) error {
	address, server, ca, dir := args[0], args[1], args[2], args[3]
	serving, err := identity.ServingCertificate(dir, []string{"127.0.0.1"})
	if err != nil {
		return err
	}
	to, err := url.Parse(server)
	if err != nil {
		return err
	}
	rt, err := rest.TransportFor(&rest.Config{Host: server, TLSClientConfig: rest.TLSClientConfig{CAFile: ca}})
	if err != nil {
		return err
	}
	s := &http.Server{
		Addr: address, TLSConfig: &tls.Config{GetCertificate: serving.GetCertificate}, ErrorLog: log.New(io.Discard, "", 0),
		Handler: &httputil.ReverseProxy{Transport: rt, FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) }},
	}
	return s.ListenAndServeTLS("", "")
}
