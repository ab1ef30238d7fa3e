// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/klog/v2"
)

// An apiServer is an HTTP/2 TLS server that asks for client certificates, and
// can be stopped and started again on its address.
type apiServer struct {
	t       *testing.T
	cert    tls.Certificate
	clients *x509.CertPool
	addr    string
	handler http.Handler

	status   atomic.Int32 // of /readyz
	probes   atomic.Int32 // seen by /readyz
	requests atomic.Int32 // all others

	mu     sync.Mutex
	server *httptest.Server
	names  []string // of the client certificates of connections, "" without
}

func newAPIServer(t *testing.T, a *authority, handler http.HandlerFunc) *apiServer {
	t.Helper()
	clients := x509.NewCertPool()
	clients.AddCert(a.cert)
	s := &apiServer{t: t, cert: a.server(), clients: clients, addr: "127.0.0.1:0", handler: handler}
	s.status.Store(http.StatusOK)
	s.start()
	t.Cleanup(s.stop)
	return s
}

func (s *apiServer) url() string { return "https://" + s.addr }

func (s *apiServer) start() {
	s.t.Helper()
	l, err := net.Listen("tcp", s.addr)
	if err != nil {
		s.t.Fatal(err)
	}
	s.addr = l.Addr().String()
	server := httptest.NewUnstartedServer(http.HandlerFunc(s.serve))
	server.Listener.Close()
	server.Listener = l
	server.EnableHTTP2 = true
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.TLS = &tls.Config{
		Certificates: []tls.Certificate{s.cert}, ClientAuth: tls.VerifyClientCertIfGiven, ClientCAs: s.clients,
		VerifyConnection: func(c tls.ConnectionState) error {
			name := ""
			if len(c.PeerCertificates) > 0 {
				name = c.PeerCertificates[0].Subject.CommonName
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			s.names = append(s.names, name)
			return nil
		},
	}
	server.StartTLS()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.server = server
}

// stop breaks all connections and refuses new ones.
func (s *apiServer) stop() {
	s.mu.Lock()
	server := s.server
	s.server = nil
	s.mu.Unlock()
	if server == nil {
		return
	}
	server.Listener.Close()
	server.CloseClientConnections()
	server.Config.Close() // HTTP/2 and hijacked ones
	server.Close()
}

func (s *apiServer) serve(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/readyz" {
		s.probes.Add(1)
		status := int(s.status.Load())
		w.WriteHeader(status)
		if status == http.StatusOK {
			io.WriteString(w, "ok")
		}
		return
	}
	s.requests.Add(1)
	s.handler.ServeHTTP(w, r)
}

// peers returns the client certificates' names of all connections so far.
func (s *apiServer) peers() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.names...)
}

// fast has all times short, in the proportions of the defaults.
func fast(k *keyDir, servers ...string) Config {
	return Config{
		Servers: servers, CAFile: k.path("ca.crt"), CertFile: k.current(), KeyFile: k.current(),
		ProbePeriod: 500 * time.Millisecond, ProbeTimeout: 600 * time.Millisecond,
		BackoffMin: 10 * time.Millisecond, BackoffMax: 100 * time.Millisecond,
		PingAfter: 400 * time.Millisecond, PingTimeout: 400 * time.Millisecond,
		ReloadPeriod: 20 * time.Millisecond, Registerer: prometheus.NewPedanticRegistry(),
	}
}

// quiet has nothing logged.
func quiet(ctx context.Context) context.Context { return klog.NewContext(ctx, klog.Logger{}) }

// start makes an Upstream that runs until the test ends.
func start(t *testing.T, cfg Config) *Upstream {
	t.Helper()
	u, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(quiet(t.Context()))
	done := make(chan error, 1)
	go func() { done <- u.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run() = %v, want nil", err)
		}
		u.Close()
	})
	return u
}

// waitUp waits until Up is as wanted.
func waitUp(t *testing.T, u *Upstream, want bool) {
	t.Helper()
	deadline := time.After(15 * time.Second)
	for {
		changed := u.Changed()
		if u.Up() == want {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("Up() = %v after 15 s, want %v", !want, want)
		}
	}
}

// eventually polls a condition that has no channel of its own.
func eventually(t *testing.T, what string, condition func() bool) {
	t.Helper()
	deadline := time.After(15 * time.Second)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !condition() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not after 15 s: %s", what)
		}
	}
}

// asNode is a request of the node.
func asNode(t *testing.T, method, path string, body io.Reader) *http.Request {
	t.Helper()
	ctx := request.WithUser(t.Context(), &user.DefaultInfo{Name: nodeName, Groups: []string{"system:nodes", "system:authenticated"}})
	req, err := http.NewRequestWithContext(ctx, method, "https://upstream.invalid"+path, body)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// asToken is a request with a bearer token.
func asToken(t *testing.T, path string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://upstream.invalid"+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer token")
	return req
}

// fetch sends a request and reads the answer.
func fetch(u *Upstream, req *http.Request) (status int, body string, err error) {
	resp, err := u.RoundTrip(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// withUserOf puts the user of req into ctx.
func withUserOf(ctx context.Context, req *http.Request) context.Context {
	u, _ := request.UserFrom(req.Context())
	return request.WithUser(ctx, u)
}
