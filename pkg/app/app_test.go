// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/klog/v2/ktesting"

	"github.com/edgehub/edgehub/pkg/cache"
	"github.com/edgehub/edgehub/pkg/seal"
)

// site is a folder with what a node has, and an API server that says little.
type site struct {
	options Options
	node    tls.Certificate
	down    atomic.Bool
}

func newSite(t testing.TB) *site {
	dir := t.TempDir()
	caKey, ca := certificate(t, &x509.Certificate{Subject: pkix.Name{CommonName: "ca"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}, nil, nil)
	serverKey, serverCert := certificate(t, &x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}, ca, caKey)
	nodeKey, nodeCert := certificate(t, &x509.Certificate{Subject: pkix.Name{CommonName: "system:node:n1", Organization: []string{"system:nodes"}},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, ca, caKey)
	s := &site{node: tls.Certificate{Certificate: [][]byte{nodeCert.Raw}, PrivateKey: nodeKey}}
	api := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if s.down.Load() {
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("Content-Type", "application/json")
		switch req.URL.Path {
		case "/readyz":
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			io.WriteString(w, "ok")
		case "/api/v1/nodes/n1":
			io.WriteString(w, `{"kind":"Node","apiVersion":"v1","metadata":{"name":"n1","uid":"u","resourceVersion":"7"}}`+"\n")
		default:
			w.WriteHeader(http.StatusNotFound)
			io.WriteString(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":404}`)
		}
	}))
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	api.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{serverCert.Raw}, PrivateKey: serverKey}}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}
	api.EnableHTTP2 = true
	api.StartTLS()
	t.Cleanup(api.Close)

	o := DefaultOptions()
	o.ServerURLs = []string{api.URL}
	o.ServerCAFile, o.ClientCAFile = filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.crt")
	o.NodeCertFile, o.NodeKeyFile = filepath.Join(dir, "node.pem"), filepath.Join(dir, "node.pem")
	o.DataDir = filepath.Join(dir, "data")
	o.ListenAddress, o.MetricsListenAddress = freePort(t), freePort(t)
	keyDER, err := x509.MarshalPKCS8PrivateKey(nodeKey)
	if err != nil {
		t.Fatal(err)
	}
	write(t, o.ServerCAFile, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Raw}))
	write(t, o.NodeCertFile, append(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: nodeCert.Raw}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})...))
	s.options = o
	if err := o.Validate(); err != nil {
		t.Fatal(err)
	}
	return s
}

func certificate(t testing.TB, template, parent *x509.Certificate, parentKey *ecdsa.PrivateKey) (*ecdsa.PrivateKey, *x509.Certificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber, template.NotBefore, template.NotAfter = big.NewInt(time.Now().UnixNano()), time.Now().Add(-time.Minute), time.Now().Add(time.Hour)
	if parent == nil {
		parent, parentKey = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), parentKey)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return key, cert
}

func write(t testing.TB, file string, data []byte) {
	t.Helper()
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
}

func freePort(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// start runs the agent until the test ends; stop ends it and returns what Run returned.
func (s *site) start(t testing.TB) (client *http.Client, stop func() error) {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, s.options) }()
	stopped := false
	stop = func() error { stopped = true; cancel(); return <-ended }
	t.Cleanup(func() {
		if !stopped {
			stop()
		}
	})
	tr := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{s.node}}, ForceAttemptHTTP2: true}
	t.Cleanup(tr.CloseIdleConnections)
	client = &http.Client{Transport: tr}
	until(t, ended, func() bool {
		resp, err := client.Get("https://" + s.options.ListenAddress + "/readyz")
		if err == nil {
			resp.Body.Close()
		}
		return err == nil && resp.StatusCode == http.StatusOK
	})
	return client, stop
}

// until polls over real sockets, where no virtual time can be.
func until(t testing.TB, ended <-chan error, f func() bool) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for !f() {
		select {
		case err := <-ended:
			t.Fatalf("Run() = %v", err)
		case <-deadline:
			t.Fatal("nothing after 20 s")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func fetch(t *testing.T, c *http.Client, url string) (int, string) {
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
	return resp.StatusCode, string(body)
}

// The whole agent: online, cut off, and started again while cut off.
func TestRun(t *testing.T) {
	s := newSite(t)
	hub, admin := "https://"+s.options.ListenAddress, "http://"+s.options.MetricsListenAddress
	client, stop := s.start(t)
	until(t, nil, func() bool { code, _ := fetch(t, client, hub+"/api/v1/nodes/n1"); return code == http.StatusOK })
	_, online := fetch(t, client, hub+"/api/v1/nodes/n1")
	if code, body := fetch(t, http.DefaultClient, admin+"/readyz?verbose"); code != 200 || !strings.Contains(body, "[+]upstream ok") || !strings.Contains(body, "[+]journal ok") {
		t.Errorf("GET /readyz?verbose = %d %q", code, body)
	}
	if _, body := fetch(t, http.DefaultClient, admin+"/metrics"); !strings.Contains(body, `edgehub_proxy_requests_total{code="200",resource="nodes",source="upstream",verb="get"}`) {
		t.Errorf("GET /metrics does not tell of the request:\n%s", body)
	}
	if err := stop(); err != nil {
		t.Fatalf("Run() = %v", err)
	}

	s.down.Store(true)
	client, stop = s.start(t)
	until(t, nil, func() bool { code, _ := fetch(t, client, hub+"/api/v1/nodes/n1"); return code == http.StatusOK })
	if _, offline := fetch(t, client, hub+"/api/v1/nodes/n1"); offline != online {
		t.Errorf("offline after a restart = %q, want %q", offline, online)
	}
	if code, body := fetch(t, client, hub+"/api/v1/nodes/n2"); code != http.StatusServiceUnavailable {
		t.Errorf("not recorded = %d %q, want 503", code, body)
	}
	if _, body := fetch(t, http.DefaultClient, admin+"/readyz?verbose"); !strings.Contains(body, "[-]upstream degraded") {
		t.Errorf("GET /readyz?verbose without a link = %q", body)
	}
	if err := stop(); err != nil {
		t.Errorf("Run() without a link = %v", err)
	}
}

// Whatever keeps the agent from starting is one error that names its cause.
func TestRunRefuses(t *testing.T) {
	for _, tc := range []struct {
		name  string
		spoil func(t *testing.T, o *Options) (want string)
	}{
		{"no certificate", func(t *testing.T, o *Options) string { o.NodeCertFile += ".missing"; return o.NodeCertFile }},
		{"a broken certificate", func(t *testing.T, o *Options) string { write(t, o.NodeCertFile, []byte("x")); return o.NodeCertFile }},
		{"no CA", func(t *testing.T, o *Options) string { o.ClientCAFile += ".missing"; return o.ClientCAFile }},
		{"a file where the data should be", func(t *testing.T, o *Options) string { write(t, o.DataDir, nil); return o.DataDir }},
		{"a link among the data", func(t *testing.T, o *Options) string {
			journal := filepath.Join(o.DataDir, "journal")
			if err := errors.Join(os.MkdirAll(o.DataDir, 0o700), os.Symlink(t.TempDir(), journal)); err != nil {
				t.Fatal(err)
			}
			return journal
		}},
		{"taken port", func(t *testing.T, o *Options) string { return take(t, &o.ListenAddress) }},
		{"taken port of metrics", func(t *testing.T, o *Options) string { return take(t, &o.MetricsListenAddress) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newSite(t)
			want := tc.spoil(t, &s.options)
			_, ctx := ktesting.NewTestContext(t)
			err := Run(ctx, s.options)
			if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("Run() = %v, want one error that names %s", err, want)
			}
			if l, err := net.Listen("tcp", s.options.ListenAddress); err == nil {
				l.Close()
			} else if want != s.options.ListenAddress {
				t.Errorf("Run() left %s bound", s.options.ListenAddress)
			}
		})
	}
	t.Run("second process", func(t *testing.T) {
		s := newSite(t)
		s.start(t)
		o := s.options
		o.ListenAddress, o.MetricsListenAddress = freePort(t), freePort(t)
		_, ctx := ktesting.NewTestContext(t)
		if err := Run(ctx, o); err == nil || !strings.Contains(err.Error(), "in use by another process") {
			t.Errorf("Run() beside another = %v, want ErrLocked", err)
		}
	})
}

func take(t *testing.T, address *string) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	*address = l.Addr().String()
	return *address
}

// A key that cannot be used keeps nothing from starting, and readiness tells of it.
func TestRunWithoutAKey(t *testing.T) {
	s := newSite(t)
	s.options.EncryptionKeyFile = filepath.Join(t.TempDir(), "key")
	write(t, s.options.EncryptionKeyFile, []byte("short"))
	_, stop := s.start(t)
	want := "[-]encryption degraded: encryption key file " + s.options.EncryptionKeyFile
	if code, body := fetch(t, http.DefaultClient, "http://"+s.options.MetricsListenAddress+"/readyz?verbose"); code != 200 || !strings.Contains(body, want) {
		t.Errorf("GET /readyz?verbose = %d %q, want %q", code, body, want)
	}
	if err := stop(); err != nil {
		t.Errorf("Run() = %v", err)
	}
	if b, _ := os.ReadFile(s.options.EncryptionKeyFile); string(b) != "short" {
		t.Errorf("the key file was changed to %q", b)
	}
}

// Events are the least of what is kept: without a place for them all else is served.
func TestRunWithoutAnOutbox(t *testing.T) {
	s := newSite(t)
	if err := os.MkdirAll(s.options.DataDir, 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(s.options.DataDir, "outbox"), nil)
	client, stop := s.start(t)
	if code, body := fetch(t, http.DefaultClient, "http://"+s.options.MetricsListenAddress+"/readyz?verbose"); code != 200 || !strings.Contains(body, "[-]outbox degraded") {
		t.Errorf("GET /readyz?verbose = %d %q", code, body)
	}
	s.down.Store(true)
	resp, err := client.Post("https://"+s.options.ListenAddress+"/api/v1/namespaces/a/events", "application/json", strings.NewReader(`{"metadata":{"name":"e"}}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode/100 == 2 {
		t.Errorf("POST of an Event = %d, and it is nowhere", resp.StatusCode)
	}
	if err := stop(); err != nil {
		t.Errorf("Run() = %v", err)
	}
}

func TestEncryptionKeyFile(t *testing.T) {
	o := DefaultOptions()
	o.DataDir = "/data"
	want := func(when, want string) {
		t.Helper()
		if got := o.encryptionKeyFile(); got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
	}
	t.Setenv("CREDENTIALS_DIRECTORY", "")
	want("by default", "/data/encryption.key")
	dir := t.TempDir()
	t.Setenv("CREDENTIALS_DIRECTORY", dir)
	want("with other credentials of systemd's", "/data/encryption.key")
	write(t, filepath.Join(dir, "edgehub.encryption-key"), nil)
	want("with systemd's", filepath.Join(dir, "edgehub.encryption-key"))
	o.EncryptionKeyFile = "/key"
	want("with the flag", "/key")
}

func TestMaxAges(t *testing.T) {
	o := DefaultOptions()
	if got, want := o.maxAges(), (cache.MaxAges{ServiceAccount: 24 * time.Hour, User: 24 * time.Hour}); got != want {
		t.Errorf("maxAges() = %v, want %v", got, want)
	}
	if err := o.Parse([]string{"--server-url=https://10.0.0.1", "--offline-max-age=user=1h,node=720h"}); err != nil {
		t.Fatal(err)
	}
	if got, want := o.maxAges(), (cache.MaxAges{Node: 720 * time.Hour, ServiceAccount: 24 * time.Hour, User: time.Hour}); got != want {
		t.Errorf("maxAges() = %v, want %v", got, want)
	}
}

// What is sealed opens with any key there is; what is in clear stays readable.
func TestEventsAreSealed(t *testing.T) {
	d := &disk{sealer: seal.Ephemeral()}
	event := []byte(`{"kind":"Event"}`)
	for _, all := range []bool{false, true} {
		b, err := d.sealEvent(all)(event, "here")
		if err != nil || bytes.Contains(b, event) == all {
			t.Errorf("sealEvent(%v) = %q, %v", all, b, err)
		}
		if now, other := d.sealedNow(all)(b), d.sealedNow(!all)(b); !now || other {
			t.Errorf("sealedNow(%v) = %v, sealedNow(%v) = %v, want true, false", all, now, !all, other)
		}
		if got, err := d.openEvent(b, "here"); err != nil || !bytes.Equal(got, event) {
			t.Errorf("openEvent() = %q, %v", got, err)
		}
		if _, err := d.openEvent(b, "there"); all != errors.Is(err, seal.ErrBroken) {
			t.Errorf("openEvent() of another place: %v", err)
		}
	}
	b, err := d.sealEvent(true)(event, "here")
	if d = (&disk{sealer: seal.Ephemeral()}); err != nil || d.sealedNow(true)(b) {
		t.Errorf("sealed with another key counts as sealed with this one, %v", err)
	}
	if len(d.sealer.Current()) != sealIDBytes {
		t.Errorf("the name of a key has %d bytes, want %d", len(d.sealer.Current()), sealIDBytes)
	}
}
