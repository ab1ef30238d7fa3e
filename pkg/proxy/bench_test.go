// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/edgehub/edgehub/pkg/identity"
	"github.com/edgehub/edgehub/pkg/proxy"
	"github.com/edgehub/edgehub/pkg/proxy/contract"
	"github.com/edgehub/edgehub/pkg/upstream"
)

const (
	objectPath = "/api/v1/namespaces/default/configmaps/bench"
	listPath   = "/api/v1/pods"
	listBytes  = 10 << 20
)

// BenchmarkPassThrough sends requests through all that is between a client and an
// API server but the cache, and through a bare httputil.ReverseProxy, over TLS and
// HTTP/2 both. "pair" asks both in turn: of all figures, its ratio is the one that
// a busy machine spoils least.
func BenchmarkPassThrough(b *testing.B) {
	server := newServer(b)
	targets := map[string]string{"bare": startBare(b, server), "hub": startHub(b, server)}
	for _, work := range []struct {
		name, path     string
		conns, atATime int
	}{
		{"get", objectPath, 8, 64}, {"alone", objectPath, 1, 16}, {"list", listPath, 1, 1},
	} {
		clients := map[string]*load{}
		for name, address := range targets {
			clients[name] = newLoad(b, address+work.path, work.conns)
		}
		for name, l := range clients {
			b.Run(work.name+"/"+name, func(b *testing.B) {
				for b.Loop() {
					l.send(b, work.atATime)
				}
				l.report(b, name)
			})
		}
		b.Run(work.name+"/pair", func(b *testing.B) {
			bare, hub := clients["bare"], clients["hub"]
			for b.Loop() {
				bare.send(b, work.atATime)
				hub.send(b, work.atATime)
			}
			b.ReportMetric(100*bare.took.Seconds()/hub.took.Seconds(), "%ofBare")
			bare.report(b, "bare")
			hub.report(b, "hub")
		})
	}
}

// A load is a target under load, and what it took.
type load struct {
	url     string
	clients []*http.Client

	sent, mallocs, bytes int
	took, cpu            time.Duration
	times                [][]time.Duration // by client
}

func newLoad(b *testing.B, url string, conns int) *load {
	l := &load{url: url, times: make([][]time.Duration, conns)}
	for range conns {
		tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true, DisableCompression: true}
		b.Cleanup(tr.CloseIdleConnections)
		l.clients = append(l.clients, &http.Client{Transport: tr})
	}
	l.send(b, 4*conns) // connections, pools, verdicts
	*l = load{url: l.url, clients: l.clients, times: make([][]time.Duration, conns)}
	return l
}

// send sends n requests over all connections at once.
func (l *load) send(b *testing.B, n int) {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	mallocs, bytes, cpu, start := m.Mallocs, m.TotalAlloc, cpuTime(), time.Now()
	var wg sync.WaitGroup
	for i, c := range l.clients {
		wg.Go(func() {
			for range n / len(l.clients) {
				t := time.Now()
				if err := fetch(c, l.url); err != nil {
					b.Error(err)
					return
				}
				l.times[i] = append(l.times[i], time.Since(t))
			}
		})
	}
	wg.Wait()
	l.took += time.Since(start)
	l.cpu += cpuTime() - cpu
	runtime.ReadMemStats(&m)
	l.mallocs += int(m.Mallocs - mallocs)
	l.bytes += int(m.TotalAlloc - bytes)
	l.sent += n
}

func fetch(c *http.Client, url string) error {
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set("Authorization", "Bearer token")
	req.Header.Set("User-Agent", "bench/v1.36.0 (linux/amd64) kubernetes/1234567")
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if n, err := io.Copy(io.Discard, resp.Body); err != nil || n == 0 || resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s, %d bytes, %w", url, resp.Status, n, err)
	}
	return nil
}

// report tells what a request took, client and server included, and begins anew.
func (l *load) report(b *testing.B, name string) {
	all := slices.Concat(l.times...)
	slices.Sort(all)
	b.ReportMetric(float64(l.took.Microseconds())/float64(l.sent), name+"-µs")
	b.ReportMetric(float64(all[len(all)/2].Microseconds()), name+"-p50-µs")
	b.ReportMetric(float64(l.cpu.Microseconds())/float64(l.sent), name+"-cpu-µs")
	b.ReportMetric(float64(l.mallocs)/float64(l.sent), name+"-allocs")
	b.ReportMetric(float64(l.bytes)/float64(l.sent), name+"-B")
	*l = load{url: l.url, clients: l.clients, times: make([][]time.Duration, len(l.clients))}
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// apiServer says one object and one list, at once.
type apiServer struct {
	*httptest.Server
	caFile, nodeFile string
	cert             tls.Certificate
}

func newServer(b *testing.B) *apiServer {
	dir := b.TempDir()
	caKey, ca := certificate(b, &x509.Certificate{Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}, nil, nil)
	key, cert := certificate(b, &x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}, ca, caKey)
	nodeKey, node := certificate(b, &x509.Certificate{Subject: pkix.Name{CommonName: "system:node:n1", Organization: []string{user.NodesGroup}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, ca, caKey)
	s := &apiServer{caFile: filepath.Join(dir, "ca.crt"), nodeFile: filepath.Join(dir, "node.pem"), cert: tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key}}
	write(b, s.caFile, &pem.Block{Type: "CERTIFICATE", Bytes: ca.Raw})
	der, err := x509.MarshalPKCS8PrivateKey(nodeKey)
	if err != nil {
		b.Fatal(err)
	}
	write(b, s.nodeFile, &pem.Block{Type: "CERTIFICATE", Bytes: node.Raw}, &pem.Block{Type: "PRIVATE KEY", Bytes: der})
	object, list := []byte(strings.Repeat("x", 1000)), []byte(strings.Repeat("x", listBytes))
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		h := w.Header()
		h.Set("Content-Type", "application/json")
		h.Set("Audit-Id", "6a3e0a83-1d1a-4f0e-8f0f-0c9bd8a9a7f1")
		h.Set("Cache-Control", "no-cache, private")
		h.Set("X-Kubernetes-Pf-Flowschema-Uid", "6a3e0a83-1d1a-4f0e-8f0f-0c9bd8a9a7f1")
		h.Set("X-Kubernetes-Pf-Prioritylevel-Uid", "6a3e0a83-1d1a-4f0e-8f0f-0c9bd8a9a7f1")
		switch {
		case req.URL.Path == "/readyz":
			h.Set("Content-Type", "text/plain; charset=utf-8")
			io.WriteString(w, "ok")
		case req.URL.Path == objectPath:
			w.Write(object)
		case req.URL.Path == listPath:
			w.Write(list)
		case req.Method == http.MethodPost: // a SelfSubjectReview
			w.WriteHeader(http.StatusCreated)
			io.WriteString(w, `{"kind":"SelfSubjectReview","apiVersion":"authentication.k8s.io/v1","status":{"userInfo":{"username":"bench","uid":"u","groups":["a","system:authenticated"]}}}`)
		}
	}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{s.cert}, ClientAuth: tls.RequestClientCert}
	s.EnableHTTP2 = true
	s.StartTLS()
	b.Cleanup(s.Close)
	return s
}

func certificate(b *testing.B, template, parent *x509.Certificate, parentKey *ecdsa.PrivateKey) (*ecdsa.PrivateKey, *x509.Certificate) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		b.Fatal(err)
	}
	template.SerialNumber, template.NotBefore, template.NotAfter = big.NewInt(time.Now().UnixNano()), time.Now().Add(-time.Minute), time.Now().Add(time.Hour)
	if parent == nil {
		parent, parentKey = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), parentKey)
	if err != nil {
		b.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		b.Fatal(err)
	}
	return key, cert
}

func write(b *testing.B, file string, blocks ...*pem.Block) {
	var text []byte
	for _, block := range blocks {
		text = append(text, pem.EncodeToMemory(block)...)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		b.Fatal(err)
	}
}

// startBare starts httputil's reverse proxy as it is.
func startBare(b *testing.B, s *apiServer) string {
	to, err := url.Parse(s.URL)
	if err != nil {
		b.Fatal(err)
	}
	tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, ForceAttemptHTTP2: true}
	b.Cleanup(tr.CloseIdleConnections)
	bare := httptest.NewUnstartedServer(&httputil.ReverseProxy{
		Transport: tr, FlushInterval: -1, ErrorLog: log.New(io.Discard, "", 0), Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) },
	})
	bare.EnableHTTP2 = true
	bare.StartTLS()
	b.Cleanup(bare.Close)
	return bare.URL
}

// startHub starts the chain as the agent has it, without the cache.
func startHub(b *testing.B, s *apiServer) string {
	reg := prometheus.NewRegistry()
	up, err := upstream.New(upstream.Config{Servers: []string{s.URL}, CAFile: s.caFile, CertFile: s.nodeFile, KeyFile: s.nodeFile, Registerer: reg})
	if err != nil {
		b.Fatal(err)
	}
	unavailable := func(err error) bool { return errors.Is(err, upstream.ErrUnavailable) }
	auth, err := identity.New(identity.Config{ClientCAFile: s.caFile, Node: up.Node, Up: up.Up, Upstream: up, IsUnavailable: unavailable, Registerer: reg})
	if err != nil {
		b.Fatal(err)
	}
	offline, err := contract.New(contract.Config{Next: up, Unavailable: unavailable, Responses: noResponses{}, Node: up.Node, Registerer: reg})
	if err != nil {
		b.Fatal(err)
	}
	p, err := proxy.New(proxy.Config{
		Addresses: []string{"127.0.0.1:0"}, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &s.cert, nil },
		Authenticator: auth, Transport: offline, Unavailable: unavailable, Registerer: reg,
	})
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	var running sync.WaitGroup
	for _, run := range []func(context.Context) error{p.Run, up.Run} {
		running.Go(func() {
			if err := run(ctx); err != nil {
				b.Error(err)
			}
		})
	}
	changed := up.Changed()
	if !up.Up() {
		<-changed
	}
	b.Cleanup(func() { cancel(); running.Wait(); up.Close() })
	return "https://" + p.Addrs()[0].String()
}

type noResponses struct{}

func (noResponses) PutResponse(user.Info, string, string, contract.Response) {}
func (noResponses) Response(user.Info, string, string) (contract.Response, bool) {
	return contract.Response{}, false
}
