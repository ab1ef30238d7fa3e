// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"crypto/tls"
	"crypto/x509"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apiserver/pkg/authentication/user"
)

func life(from, until time.Duration) func(*x509.Certificate) {
	return func(c *x509.Certificate) { c.NotBefore, c.NotAfter = time.Now().Add(from), time.Now().Add(until) }
}

func serverOnly(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} }

func TestCertificate(t *testing.T) {
	f := newFixture(t)
	nodes := []string{"system:nodes"}
	past, future := life(-30*time.Minute, -time.Minute), life(2*time.Hour, 3*time.Hour)
	beforeCA := life(-3*time.Hour, -2*time.Hour)
	foreign := newTestCA(t, "client CA", nil)
	intermediate := newTestCA(t, "intermediate", f.ca)
	deep := intermediate.client(t, nodeName, nodes)
	deepPast := intermediate.client(t, nodeName, nodes, past)

	for _, tc := range []struct {
		name            string
		chain           []*x509.Certificate
		online, offline error // nil: the node
	}{
		{"node", []*x509.Certificate{f.ca.client(t, nodeName, nodes)}, nil, nil},
		{"node, group twice", []*x509.Certificate{f.ca.client(t, nodeName, []string{"system:nodes", "system:nodes"})}, nil, nil},
		{"through an intermediate", []*x509.Certificate{deep, intermediate.cert}, nil, nil},
		{"without the intermediate", []*x509.Certificate{deep}, ErrUnauthenticated, ErrUnauthenticated},
		{"chain too long", append([]*x509.Certificate{deep}, make([]*x509.Certificate, maxPeerCertificates)...), ErrUnauthenticated, ErrUnauthenticated},
		{"other name", []*x509.Certificate{f.ca.client(t, "system:node:edge-2", nodes)}, ErrUseToken, ErrUseToken},
		{"more groups", []*x509.Certificate{f.ca.client(t, nodeName, []string{"system:nodes", "system:masters"})}, ErrUseToken, ErrUseToken},
		{"no group", []*x509.Certificate{f.ca.client(t, nodeName, nil)}, ErrUseToken, ErrUseToken},
		{"no name", []*x509.Certificate{f.ca.client(t, "", nodes)}, ErrUnauthenticated, ErrUnauthenticated},
		{"not for clients", []*x509.Certificate{f.ca.client(t, nodeName, nodes, serverOnly)}, ErrUnauthenticated, ErrUnauthenticated},
		{"foreign CA of that name", []*x509.Certificate{foreign.client(t, nodeName, nodes)}, ErrUnauthenticated, ErrUnauthenticated},
		{"foreign CA in the chain", []*x509.Certificate{foreign.client(t, nodeName, nodes), foreign.cert}, ErrUnauthenticated, ErrUnauthenticated},
		{"none", nil, ErrUnauthenticated, ErrUnauthenticated},
		{"expired", []*x509.Certificate{f.ca.client(t, nodeName, nodes, past)}, ErrUnauthenticated, nil},
		{"expired through an intermediate", []*x509.Certificate{deepPast, intermediate.cert}, ErrUnauthenticated, nil},
		{"expired without the intermediate", []*x509.Certificate{deepPast}, ErrUnauthenticated, ErrUnauthenticated},
		{"never valid", []*x509.Certificate{f.ca.client(t, nodeName, nodes, beforeCA)}, ErrUnauthenticated, ErrUnauthenticated},
		{"not yet valid", []*x509.Certificate{f.ca.client(t, nodeName, nodes, future)}, ErrUnauthenticated, nil},
		{"expired, other name", []*x509.Certificate{f.ca.client(t, "bob", nodes, past)}, ErrUnauthenticated, ErrUnauthenticated},
		{"expired, other groups", []*x509.Certificate{f.ca.client(t, nodeName, nil, past)}, ErrUnauthenticated, ErrUnauthenticated},
		{"expired, foreign CA", []*x509.Certificate{foreign.client(t, nodeName, nodes, past)}, ErrUnauthenticated, ErrUnauthenticated},
		{"expired, not for clients", []*x509.Certificate{f.ca.client(t, nodeName, nodes, past, serverOnly)}, ErrUnauthenticated, ErrUnauthenticated},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for range 2 { // the second time from what was seen
				for offline, want := range map[bool]error{false: tc.online, true: tc.offline} {
					f.down.Store(offline)
					name := ""
					if want == nil {
						name = nodeName
					}
					f.want(t, newRequest(tc.chain...), name, want)
				}
			}
		})
	}
	f.wantReviews(t, 0)
}

func TestCertificateOfUnknownNode(t *testing.T) {
	f := newFixture(t)
	f.cfg.Node = func() user.Info { return nil }
	f.restart(t)
	f.want(t, newRequest(f.ca.client(t, nodeName, []string{"system:nodes"})), "", ErrUseToken)
	// A certificate without a name is not that of a node without one.
	f.cfg.Node = func() user.Info { return &user.DefaultInfo{} }
	f.restart(t)
	f.want(t, newRequest(f.ca.client(t, "", nil)), "", ErrUnauthenticated)
}

func TestCertificateOfExpiredCA(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		short := newTestCA(t, "short CA", nil, life(-2*time.Hour, time.Hour))
		writeTestFile(t, f.caFile, short.pem())
		f.restart(t)
		node := short.client(t, nodeName, []string{"system:nodes"}, life(-time.Hour, 5*time.Hour))
		f.want(t, newRequest(node), nodeName, nil)
		<-time.After(2 * time.Hour) // of the bubble
		f.want(t, newRequest(node), "", ErrUnauthenticated)
		f.down.Store(true)
		f.want(t, newRequest(node), nodeName, nil)
	})
}

func TestSeenCertificateExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		node := f.ca.client(t, nodeName, []string{"system:nodes"})
		f.want(t, newRequest(node), nodeName, nil)
		<-time.After(59 * time.Minute)
		f.want(t, newRequest(node), nodeName, nil)
		if got := f.Authenticator.ca.inUse.Load().seen.len(); got != 1 {
			t.Errorf("seen certificates = %d, want 1", got)
		}
		<-time.After(time.Minute + time.Second)
		f.want(t, newRequest(node), "", ErrUnauthenticated)
		f.down.Store(true)
		f.want(t, newRequest(node), nodeName, nil)
		<-time.After(24 * time.Hour)
		f.want(t, newRequest(node), nodeName, nil)
		f.down.Store(false)
		f.want(t, newRequest(node), "", ErrUnauthenticated)
	})
}

func TestSeenCertificatesAreBounded(t *testing.T) {
	f := newFixture(t)
	for range maxSeenCertificates + 5 {
		f.want(t, newRequest(f.ca.client(t, nodeName, []string{"system:nodes"})), nodeName, nil)
	}
	if got := f.Authenticator.ca.inUse.Load().seen.len(); got != maxSeenCertificates {
		t.Errorf("seen certificates = %d, want %d", got, maxSeenCertificates)
	}
}

func TestClientCAReload(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		reloads := func(success, failed float64) {
			t.Helper()
			for result, want := range map[string]float64{"success": success, "error": failed} {
				if got := testutil.ToFloat64(f.metrics.caReloads.WithLabelValues(result)); got != want {
					t.Fatalf("reloads with %s = %v, want %v", result, got, want)
				}
			}
		}
		second := newTestCA(t, "second CA", nil)
		before := f.ca.client(t, nodeName, []string{"system:nodes"})
		after := second.client(t, nodeName, []string{"system:nodes"})
		f.want(t, newRequest(before), nodeName, nil)

		// Both, as in a rotation; not looked at before a second has passed.
		writeTestFile(t, f.caFile, append(f.ca.pem(), second.pem()...))
		f.want(t, newRequest(after), "", ErrUnauthenticated)
		<-time.After(caCheckPeriod)
		f.want(t, newRequest(after), nodeName, nil)
		f.want(t, newRequest(before), nodeName, nil)
		reloads(1, 0)

		// Broken: cut in the second certificate, then empty, then gone. Each is
		// told once, and changes nothing.
		for i, raw := range [][]byte{append(f.ca.pem(), second.pem()[:100]...), {}, nil} {
			if raw == nil {
				if err := os.Remove(f.caFile); err != nil {
					t.Fatal(err)
				}
			} else {
				writeTestFile(t, f.caFile, raw)
			}
			for range 3 {
				<-time.After(caCheckPeriod)
				f.want(t, newRequest(after), nodeName, nil)
				f.want(t, newRequest(before), nodeName, nil)
			}
			reloads(1, float64(i+1))
		}

		// The first CA is withdrawn: what was seen under it no longer counts.
		writeTestFile(t, f.caFile, second.pem())
		<-time.After(caCheckPeriod)
		f.want(t, newRequest(before), "", ErrUnauthenticated)
		f.want(t, newRequest(after), nodeName, nil)
		reloads(2, 3)

		// Gone and back unchanged is told, too, also a second time.
		for range 2 {
			if err := os.Remove(f.caFile); err != nil {
				t.Fatal(err)
			}
			<-time.After(caCheckPeriod)
			f.want(t, newRequest(after), nodeName, nil)
			writeTestFile(t, f.caFile, second.pem())
			<-time.After(caCheckPeriod)
			f.want(t, newRequest(after), nodeName, nil)
		}
		reloads(4, 5)
	})
}

// An expired certificate must not end the handshake, and a certificate without
// its key must.
func TestHandshake(t *testing.T) {
	f := newFixture(t)
	f.down.Store(true)
	serving, err := ServingCertificate(t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		u, err := f.Authenticate(req)
		if err != nil {
			http.Error(w, err.Error(), http.StatusUnauthorized)
			return
		}
		_, _ = w.Write([]byte(u.GetName()))
	}))
	// Not StartTLS: its own certificate would go to clients without a server name.
	server.Listener = tls.NewListener(server.Listener, &tls.Config{GetCertificate: serving.GetCertificate, ClientAuth: tls.RequestClientCert})
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.Start()
	defer server.Close()

	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(serving.CA())
	get := func(cert *x509.Certificate, key any) (int, error) {
		t.Helper()
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
		defer transport.CloseIdleConnections()
		if cert != nil {
			transport.TLSClientConfig.Certificates = []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: key}}
		}
		resp, err := (&http.Client{Transport: transport}).Get("https://" + server.Listener.Addr().String())
		if err != nil {
			return 0, err
		}
		defer resp.Body.Close()
		return resp.StatusCode, nil
	}
	node, key := f.ca.clientKey(t, nodeName, []string{"system:nodes"}, life(-30*time.Minute, -time.Minute))
	if code, err := get(node, key); code != http.StatusOK || err != nil {
		t.Errorf("GET with an expired certificate = %d, %v, want 200", code, err)
	}
	if code, err := get(nil, nil); code != http.StatusUnauthorized || err != nil {
		t.Errorf("GET without a certificate = %d, %v, want 401", code, err)
	}
	_, other := f.ca.clientKey(t, nodeName, nil)
	if code, err := get(node, other); err == nil || !strings.Contains(err.Error(), "remote error: tls") {
		t.Errorf("GET with another's certificate = %d, %v, want the server to end the handshake", code, err)
	}
}
