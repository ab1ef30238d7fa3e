// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
)

// Paths that the capture answers by itself, with what an API server never says.
const (
	redirectPath = "/edgehub-test/redirect"  // 302 to landingPath
	landingPath  = "/edgehub-test/landing"   // nobody is to come here
	noSwitchPath = "/edgehub-test/no-switch" // 200 to an upgrade, on a connection that stays open
)

// A sent is a request as edgehub sent it upstream.
type sent struct {
	Method, URI, Host, Proto string
	Header                   http.Header
	Bytes                    *atomic.Int64 // of the body, so far
	Certificate              string        // common name of the client certificate, "" without one
	Node                     bool          // it is the node's, and whoever sent it has its key
	Conn                     int64         // which connection it came on
	Nth                      int64         // which request on that connection, from 1
}

// A capture stands between the link and the API server, in the API server's place:
// it has its serving certificate, notes every request, and sends it on with the
// credential that it came with. Bodies are counted and not kept.
type capture struct {
	server *httptest.Server
	node   []byte // DER of own
	own    tls.Certificate
	roots  *x509.CertPool
	conns  atomic.Int64

	mu      sync.Mutex // guards records
	records []sent
}

// newCapture serves until close is called.
func newCapture(cp *controlplane.ControlPlane, node *rest.Config) (*capture, error) {
	pki := func(name string) string { return filepath.Join(cp.Dir(), "pki", name) }
	serving, err := tls.LoadX509KeyPair(pki("apiserver.crt"), pki("apiserver.key"))
	if err != nil {
		return nil, err
	}
	target, err := url.Parse(cp.URL())
	if err != nil {
		return nil, err
	}
	own, err := tls.LoadX509KeyPair(node.CertFile, node.KeyFile)
	if err != nil {
		return nil, err
	}
	authority, err := os.ReadFile(cp.CAFile())
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority)
	c := &capture{node: own.Certificate[0], roots: roots, own: own}
	quiet := log.New(io.Discard, "", 0) // a link that is cut is no news
	proxy := &httputil.ReverseProxy{
		ErrorLog:       quiet,
		Rewrite:        func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport:      onward{},
		FlushInterval:  -1,
		ModifyResponse: endUnauthorized,
		ErrorHandler:   func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }, // it breaks off here, too
	}
	c.server = httptest.NewUnstartedServer(c.record(proxy))
	c.server.EnableHTTP2, c.server.Config.ErrorLog = true, quiet
	c.server.Config.ConnContext = func(ctx context.Context, _ net.Conn) context.Context {
		return context.WithValue(ctx, connKey{}, &connection{number: c.conns.Add(1)})
	}
	// A client proves in the handshake that it has the certificate's key.
	c.server.TLS = &tls.Config{Certificates: []tls.Certificate{serving}, MinVersion: tls.VersionTLS12, ClientAuth: tls.RequestClientCert}
	c.server.StartTLS()
	return c, nil
}

// endUnauthorized does what the API server does to those whom it does not know and
// who use HTTP/2: the answer is the last one on its connection (GOAWAY).
func endUnauthorized(resp *http.Response) error {
	if resp.StatusCode == http.StatusUnauthorized {
		resp.Header.Set("Connection", "close")
	}
	return nil
}

func (c *capture) addr() string { return c.server.Listener.Addr().String() }

func (c *capture) close() {
	c.server.CloseClientConnections()
	c.server.Close()
}

// all returns what has come until now.
func (c *capture) all() []sent {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.records)
}

type connKey struct{}

// A connection of edgehub's has one of its own to the API server, so that what ends
// the one is of no consequence for others.
type connection struct {
	number int64
	served atomic.Int64
	once   sync.Once
	onward *http.Transport // HTTP/2
	single *http.Transport // HTTP/1.1, for upgrades
}

// open prepares the way on, with the credential that edgehub has shown: the node's
// certificate, or none.
func (n *connection) open(roots *x509.CertPool, certificates []tls.Certificate) {
	transport := func(http2 bool) *http.Transport {
		t := &http.Transport{
			TLSClientConfig:    &tls.Config{RootCAs: roots, Certificates: certificates, MinVersion: tls.VersionTLS12},
			DisableCompression: true, DisableKeepAlives: !http2, IdleConnTimeout: 5 * time.Second, Protocols: new(http.Protocols),
		}
		t.Protocols.SetHTTP1(!http2)
		t.Protocols.SetHTTP2(http2)
		return t
	}
	n.onward, n.single = transport(true), transport(false)
}

func (c *capture) record(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		on := req.Context().Value(connKey{}).(*connection)
		s := sent{
			Method: req.Method, URI: req.RequestURI, Host: req.Host, Proto: req.Proto, Header: req.Header.Clone(),
			Bytes: new(atomic.Int64), Conn: on.number, Nth: on.served.Add(1),
		}
		if peer := req.TLS.PeerCertificates; len(peer) > 0 {
			s.Certificate = peer[0].Subject.CommonName
			s.Node = bytes.Equal(peer[0].Raw, c.node)
		}
		on.once.Do(func() {
			if s.Node {
				on.open(c.roots, []tls.Certificate{c.own})
			} else {
				on.open(c.roots, nil)
			}
		})
		c.mu.Lock()
		c.records = append(c.records, s)
		c.mu.Unlock()
		switch req.URL.Path {
		case redirectPath:
			http.Redirect(w, req, c.server.URL+landingPath, http.StatusFound)
			return
		case noSwitchPath:
			_, _ = io.WriteString(w, "no") // the link may be cut
			return
		}
		if err := countBody(req, s.Bytes); err != nil {
			panic(http.ErrAbortHandler)
		}
		next.ServeHTTP(w, req)
	})
}

// countBody counts what is read of a body. One that is small can be sent again, as
// edgehub's own can where the API server ends a connection.
func countBody(req *http.Request, n *atomic.Int64) error {
	const small = 16 << 10
	if req.ContentLength > 0 && req.ContentLength <= small {
		content, err := io.ReadAll(req.Body)
		if err != nil {
			return err
		}
		n.Store(int64(len(content)))
		req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil }
		req.Body, err = req.GetBody()
		return err
	}
	if req.Body != http.NoBody {
		req.Body = &countedBody{req.Body, n}
	}
	return nil
}

type countedBody struct {
	io.ReadCloser
	bytes *atomic.Int64
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.bytes.Add(int64(n))
	return n, err
}

// onward sends a request to the API server by the connection's own way on.
type onward struct{}

func (onward) RoundTrip(req *http.Request) (*http.Response, error) {
	on := req.Context().Value(connKey{}).(*connection)
	if req.Header.Get("Upgrade") != "" {
		return on.single.RoundTrip(req)
	}
	return on.onward.RoundTrip(req)
}

// headersLike returns the names of headers that begin with one of the prefixes.
func headersLike(h http.Header, prefixes ...string) (names []string) {
	for name := range h {
		for _, p := range prefixes {
			if len(name) >= len(p) && strings.EqualFold(name[:len(p)], p) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return names
}
