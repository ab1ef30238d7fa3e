// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/klog/v2/ktesting"
)

type transportFunc func(*http.Request) (*http.Response, error)

func (f transportFunc) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

type authFunc func(*http.Request) (user.Info, error)

func (f authFunc) Authenticate(req *http.Request) (user.Info, error) { return f(req) }

var someone = &user.DefaultInfo{Name: "someone"}

func everyoneIs(u user.Info) authFunc {
	return func(*http.Request) (user.Info, error) { return u, nil }
}

var errLinkDown = errors.New("link down")

// reply is a whole answer of a fake transport.
func reply(code int, body string) *http.Response {
	return &http.Response{StatusCode: code, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body))}
}

var testCertificate = sync.OnceValue(func() *tls.Certificate {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		panic(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		panic(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
})

// config is a Config that works, with its transport.
func config(transport http.RoundTripper) Config {
	return Config{
		Addresses:      []string{"127.0.0.1:0"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return testCertificate(), nil },
		Authenticator:  everyoneIs(someone),
		Transport:      transport,
		Unavailable:    func(err error) bool { return errors.Is(err, errLinkDown) },
		DrainTimeout:   10 * time.Second,
	}
}

// running is a Proxy that serves until the test ends.
type running struct {
	t    testing.TB
	addr string
	stop func() error // ends Run and returns what it returned
}

func start(t testing.TB, cfg Config) *running {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	return startWith(ctx, t, cfg)
}

// startWith takes the logger from ctx.
func startWith(ctx context.Context, t testing.TB, cfg Config) *running {
	t.Helper()
	p, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	stop := sync.OnceValue(func() error { cancel(); return <-ended })
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Errorf("Run() = %v", err)
		}
	})
	return &running{t: t, addr: p.Addrs()[0].String(), stop: stop}
}

// client has connections of its own; http2 tells which protocol it speaks.
func (r *running) client(http2 bool) *http.Client {
	protocols := new(http.Protocols)
	protocols.SetHTTP1(!http2)
	protocols.SetHTTP2(http2)
	tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, Protocols: protocols, DisableCompression: true}
	r.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr}
}

func (r *running) url(path string) string { return "https://" + r.addr + path }

func (r *running) dial() net.Conn {
	r.t.Helper()
	conn, err := tls.Dial("tcp", r.addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"http/1.1"}})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	return conn
}

// dialHTTP2 returns a connection that has said hello, and takes all that is sent.
func (r *running) dialHTTP2() net.Conn {
	r.t.Helper()
	conn, err := tls.Dial("tcp", r.addr, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	io.WriteString(conn, http2.ClientPreface)
	f := http2.NewFramer(conn, nil)
	f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<31 - 1})
	f.WriteWindowUpdate(0, 1<<30)
	return conn
}

// handler is the chain without a listener.
func handler(t *testing.T, cfg Config) http.Handler {
	t.Helper()
	cfg.setDefaults()
	return newProxy(cfg).handler(nil)
}

// serveRaw gives h a request as it stands on the wire.
func serveRaw(t *testing.T, h http.Handler, head string) *httptest.ResponseRecorder {
	t.Helper()
	req, err := http.ReadRequest(bufio.NewReader(strings.NewReader(strings.ReplaceAll(head, "\n", "\r\n") + "\r\n\r\n")))
	if err != nil {
		t.Fatalf("ReadRequest: %v", err)
	}
	_, ctx := ktesting.NewTestContext(t)
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req.WithContext(ctx))
	return w
}

func get(t *testing.T, c *http.Client, url string) (*http.Response, string) {
	t.Helper()
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp, string(body)
}

func bothProtocols(t *testing.T, f func(t *testing.T, http2 bool)) {
	for _, http2 := range []bool{false, true} {
		t.Run(fmt.Sprintf("http2=%v", http2), func(t *testing.T) { f(t, http2) })
	}
}
