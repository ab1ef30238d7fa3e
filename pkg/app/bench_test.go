// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"crypto/tls"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"testing"
)

// BenchmarkGet sends GETs of one object over HTTP/2: straight to a server that
// says it at once, through a bare reverse proxy, and through the agent, which
// authenticates, records and counts.
func BenchmarkGet(b *testing.B) {
	s := newSite(b)
	client, _ := s.start(b)
	straight := &http.Client{Transport: &http.Transport{ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{s.node}}}}
	to, err := url.Parse(s.options.ServerURLs[0])
	if err != nil {
		b.Fatal(err)
	}
	bare := httptest.NewUnstartedServer(&httputil.ReverseProxy{
		Transport: straight.Transport, FlushInterval: -1, ErrorLog: log.New(io.Discard, "", 0),
		Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) },
	})
	bare.EnableHTTP2 = true
	bare.StartTLS()
	b.Cleanup(bare.Close)
	const path = "/api/v1/nodes/n1"
	for _, target := range []struct {
		name, url string
		client    *http.Client
	}{
		{"direct", s.options.ServerURLs[0], straight},
		{"bare", bare.URL, &http.Client{Transport: &http.Transport{ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}},
		{"edgehub", "https://" + s.options.ListenAddress, client},
	} {
		b.Run(target.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				resp, err := target.client.Get(target.url + path)
				if err != nil {
					b.Fatal(err)
				}
				if n, err := io.Copy(io.Discard, resp.Body); err != nil || n == 0 || resp.StatusCode != http.StatusOK {
					b.Fatal(resp.Status, n, err)
				}
				resp.Body.Close()
			}
		})
	}
}
