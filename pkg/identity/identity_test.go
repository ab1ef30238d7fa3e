// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"bytes"
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
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apiserver/pkg/authentication/user"
)

const nodeName = "system:node:edge-1"

var errCut = errors.New("the cable is cut")

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// memory is a Verdicts that counts what is written.
type memory struct {
	mu     sync.Mutex
	m      map[string]string
	stores int
}

func (m *memory) Load(key string) ([]byte, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v, ok := m.m[key]
	return []byte(v), ok
}

func (m *memory) writes() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.stores
}

func (m *memory) Store(key string, verdict []byte) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.m == nil {
		m.m = map[string]string{}
	}
	m.m[key] = string(verdict)
	m.stores++
}

func answer(code int, body string) *http.Response {
	return &http.Response{StatusCode: code, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body))}
}

func review(name string) string {
	return fmt.Sprintf(`{"kind":"SelfSubjectReview","apiVersion":"authentication.k8s.io/v1","metadata":{},"status":{"userInfo":{"username":%q,"uid":"u-1",`+
		`"groups":["system:serviceaccounts","system:authenticated"],"extra":{"authentication.kubernetes.io/credential-id":["JTI=x"]}}}}`, name)
}

func reviewed(name string) *user.DefaultInfo {
	return &user.DefaultInfo{
		Name: name, UID: "u-1", Groups: []string{"system:serviceaccounts", "system:authenticated"},
		Extra: map[string][]string{"authentication.kubernetes.io/credential-id": {"JTI=x"}},
	}
}

// fixture is an Authenticator with everything around it.
type fixture struct {
	*Authenticator
	ca       *testCA
	caFile   string
	cfg      Config
	down     atomic.Bool
	reviews  atomic.Int64
	upstream atomic.Pointer[roundTripper]
	verdicts *memory
	reg      *prometheus.Registry
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{ca: newTestCA(t, "client CA", nil), verdicts: &memory{}}
	f.caFile = filepath.Join(t.TempDir(), "ca.crt")
	writeTestFile(t, f.caFile, f.ca.pem())
	f.answer(func(*http.Request) (*http.Response, error) { return answer(201, review("alice")), nil })
	f.cfg = Config{
		ClientCAFile: f.caFile,
		Node:         func() user.Info { return &user.DefaultInfo{Name: nodeName, Groups: []string{"system:nodes"}} },
		Up:           func() bool { return !f.down.Load() },
		Upstream: roundTripper(func(req *http.Request) (*http.Response, error) {
			f.reviews.Add(1)
			if f.down.Load() {
				return nil, fmt.Errorf("send: %w", errCut)
			}
			return (*f.upstream.Load())(req)
		}),
		IsUnavailable: func(err error) bool { return errors.Is(err, errCut) },
		Verdicts:      f.verdicts,
	}
	f.restart(t)
	return f
}

// restart makes a new Authenticator, which remembers only what was stored.
func (f *fixture) restart(t *testing.T) {
	t.Helper()
	f.reg = prometheus.NewPedanticRegistry()
	f.cfg.Registerer = f.reg
	a, err := New(f.cfg)
	if err != nil {
		t.Fatalf("New() = %v, want nil", err)
	}
	f.Authenticator = a
}

func (f *fixture) answer(rt roundTripper) { f.upstream.Store(&rt) }

// want authenticates and compares name and error.
func (f *fixture) want(t *testing.T, req *http.Request, name string, want error) {
	t.Helper()
	u, err := f.Authenticate(req)
	if !errors.Is(err, want) {
		t.Fatalf("Authenticate() = %v, want %v", err, want)
	}
	got := ""
	if u != nil {
		got = u.GetName()
	}
	if got != name {
		t.Fatalf("Authenticate() = %q, want %q", got, name)
	}
}

func (f *fixture) wantReviews(t *testing.T, want int64) {
	t.Helper()
	if got := f.reviews.Load(); got != want {
		t.Fatalf("reviews = %d, want %d", got, want)
	}
}

func newRequest(chain ...*x509.Certificate) *http.Request {
	req := httptest.NewRequest(http.MethodGet, "https://127.0.0.1:10268/api/v1/pods", nil)
	req.TLS = &tls.ConnectionState{PeerCertificates: chain}
	return req
}

func withToken(token string, chain ...*x509.Certificate) *http.Request {
	req := newRequest(chain...)
	req.Header.Set("Authorization", "Bearer "+token)
	return req
}

// testCA is a certificate authority for tests.
type testCA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newTestCA(t *testing.T, name string, parent *testCA, edit ...func(*x509.Certificate)) *testCA {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(10000 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	for _, e := range edit {
		e(template)
	}
	ca := &testCA{key: key}
	signer, signerKey := template, key
	if parent != nil {
		signer, signerKey = parent.cert, parent.key
	}
	ca.cert = mustSign(t, template, signer, key, signerKey)
	return ca
}

func (ca *testCA) pem() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.cert.Raw})
}

// client makes a certificate of an hour; edit changes it before it is signed.
func (ca *testCA) client(t *testing.T, name string, groups []string, edit ...func(*x509.Certificate)) *x509.Certificate {
	t.Helper()
	cert, _ := ca.clientKey(t, name, groups, edit...)
	return cert
}

func (ca *testCA) clientKey(t *testing.T, name string, groups []string, edit ...func(*x509.Certificate)) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name, Organization: groups},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	for _, e := range edit {
		e(template)
	}
	return mustSign(t, template, ca.cert, key, ca.key), key
}

func mustSign(t *testing.T, template, parent *x509.Certificate, key, parentKey *ecdsa.PrivateKey) *x509.Certificate {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, parentKey)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

func writeTestFile(t *testing.T, file string, raw []byte) {
	t.Helper()
	if err := os.WriteFile(file, raw, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestNewNamesWhatIsMissing(t *testing.T) {
	_, err := New(Config{OfflineMaxAge: -1})
	for _, want := range []string{"ClientCAFile", "Node", "Up ", "Upstream", "IsUnavailable", "OfflineMaxAge"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("New() = %v, want it to name %s", err, want)
		}
	}
	f := newFixture(t)
	for name, raw := range map[string]string{
		"absent": "", "empty": "\n", "key": "-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
		"cut": string(f.ca.pem()[:200]), "huge": strings.Repeat("#", maxCAFileBytes+1),
	} {
		f.cfg.ClientCAFile = filepath.Join(t.TempDir(), name)
		if name != "absent" {
			writeTestFile(t, f.cfg.ClientCAFile, []byte(raw))
		}
		f.cfg.Registerer = nil
		if _, err := New(f.cfg); err == nil || !strings.Contains(err.Error(), f.cfg.ClientCAFile) {
			t.Errorf("New() = %v, want an error that names %s", err, f.cfg.ClientCAFile)
		}
	}
}

func TestCertificateWithToken(t *testing.T) {
	f := newFixture(t)
	node := f.ca.client(t, nodeName, []string{"system:nodes"})
	other := f.ca.client(t, "bob", nil)
	f.want(t, withToken("good", node), "alice", nil)
	f.want(t, withToken("good", other), "alice", nil)

	// With a bad token the request would be refused upstream: it is not the node's.
	f.answer(func(*http.Request) (*http.Response, error) { return answer(401, "{}"), nil })
	f.want(t, withToken("bad", node), "", ErrUnauthenticated)
	for _, values := range [][]string{nil, {}, {""}, {"Basic YTpi"}, {"Bearer good", "Bearer good"}} {
		req := newRequest(node)
		req.Header["Authorization"] = values
		f.want(t, req, "", ErrUnauthenticated)
	}
	f.down.Store(true)
	f.want(t, withToken("unknown", node), "", ErrUnavailable)
}

func TestImpersonation(t *testing.T) {
	f := newFixture(t)
	node := f.ca.client(t, nodeName, []string{"system:nodes"})
	for _, name := range []string{"Impersonate-User", "Impersonate-Group", "Impersonate-Uid", "Impersonate-Extra-Scopes", "impersonate-user"} {
		req := newRequest(node)
		req.Header[name] = []string{"admin"}
		f.want(t, req, "", ErrImpersonation)
		req = withToken("good", node)
		req.Header[name] = []string{"admin"}
		f.want(t, req, "alice", nil)
	}
	req := newRequest()
	req.Header.Set("Impersonate-User", "admin")
	f.want(t, req, "", ErrUnauthenticated)
}

func TestMetrics(t *testing.T) {
	f := newFixture(t)
	node := f.ca.client(t, nodeName, []string{"system:nodes"})
	f.want(t, newRequest(node), nodeName, nil)
	f.want(t, newRequest(), "", ErrUnauthenticated)
	f.want(t, newRequest(f.ca.client(t, "bob", nil)), "", ErrUseToken)
	f.want(t, withToken("a"), "alice", nil)
	for _, code := range []int{401, 403, 404, 418, 429, 500, 503} {
		f.answer(func(*http.Request) (*http.Response, error) { return answer(code, "{}"), nil })
		_, _ = f.Authenticate(withToken(fmt.Sprint("t", code)))
	}
	f.down.Store(true)
	_, _ = f.Authenticate(withToken("unknown"))
	want := `
# HELP edgehub_identity_authentications_total Requests by how their caller was authenticated, or why not.
# TYPE edgehub_identity_authentications_total counter
edgehub_identity_authentications_total{result="certificate"} 1
edgehub_identity_authentications_total{result="token"} 1
edgehub_identity_authentications_total{result="unauthenticated"} 2
edgehub_identity_authentications_total{result="unavailable"} 7
edgehub_identity_authentications_total{result="use_token"} 1
# HELP edgehub_identity_reviews_total Self subject reviews sent upstream by status code; error: there was no answer.
# TYPE edgehub_identity_reviews_total counter
edgehub_identity_reviews_total{code="201"} 1
edgehub_identity_reviews_total{code="401"} 1
edgehub_identity_reviews_total{code="403"} 1
edgehub_identity_reviews_total{code="404"} 1
edgehub_identity_reviews_total{code="429"} 1
edgehub_identity_reviews_total{code="5xx"} 2
edgehub_identity_reviews_total{code="error"} 1
edgehub_identity_reviews_total{code="other"} 1
`
	if err := testutil.GatherAndCompare(f.reg, bytes.NewBufferString(want)); err != nil {
		t.Error(err)
	}
	f.metrics.caReloads.WithLabelValues("error").Inc()
	problems, err := testutil.GatherAndLint(f.reg)
	if err != nil || len(problems) > 0 {
		t.Errorf("GatherAndLint() = %v, %v, want nothing", problems, err)
	}
}

func TestLRU(t *testing.T) {
	l := newLRU[int, string](2)
	l.put(1, "a")
	l.put(2, "b")
	l.get(1)
	l.put(3, "c") // 2 was not used for longest
	l.put(3, "d")
	l.remove(9)
	got := map[int]string{}
	for k := range 5 {
		if v, ok := l.get(k); ok {
			got[k] = v
		}
	}
	if diff := cmp.Diff(map[int]string{1: "a", 3: "d"}, got); diff != "" || l.len() != 2 {
		t.Errorf("len %d, entries (-want +got):\n%s", l.len(), diff)
	}
}
