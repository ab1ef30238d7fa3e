// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

const signedLife = 100 * 24 * time.Hour // of what a cluster signs

// A cluster keeps certificate signing requests and decides about them.
type cluster struct {
	t  *testing.T
	ca *testCA

	mu      sync.Mutex // guards the fields below
	down    bool
	node    string                                          // who may ask
	decide  func(*certificatesv1.CertificateSigningRequest) // nil: nobody does
	answer  func(method string) (int, string, bool)         // in place of the right answer
	created []*certificatesv1.CertificateSigningRequest     // also those that are gone
	gone    map[string]bool
	asked   []time.Time
}

func newCluster(t *testing.T) *cluster {
	c := &cluster{t: t, ca: newTestCA(t, "cluster CA", nil), node: nodeName, gone: map[string]bool{}}
	c.decide = c.approve
	return c
}

// set changes the cluster while it is in use.
func (c *cluster) set(change func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change()
}

// requests are all that were created.
func (c *cluster) requests() []*certificatesv1.CertificateSigningRequest {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.created)
}

// times are those of all that was asked, also in vain.
func (c *cluster) times() []time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.asked)
}

func (c *cluster) RoundTrip(req *http.Request) (*http.Response, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.asked = append(c.asked, time.Now())
	if c.down {
		return nil, fmt.Errorf("send: %w", errCut)
	}
	u, _ := request.UserFrom(req.Context())
	if _, ok := req.Header["Authorization"]; ok || u == nil || u.GetName() != c.node {
		c.t.Errorf("%s %s was sent as %v, want the node without a token", req.Method, req.URL, u)
	}
	code, body := c.serve(req)
	if c.answer != nil {
		if other, text, ok := c.answer(req.Method); ok {
			return answer(other, text), nil
		}
	}
	return answer(code, body), nil
}

const csrPath = "/apis/certificates.k8s.io/v1/certificatesigningrequests"

func (c *cluster) serve(req *http.Request) (int, string) {
	if req.Method == http.MethodPost && req.URL.Path == csrPath {
		csr := &certificatesv1.CertificateSigningRequest{}
		if err := json.NewDecoder(req.Body).Decode(csr); err != nil {
			c.t.Errorf("request = %v, want JSON", err)
		}
		csr.Name = fmt.Sprintf("%s%05d", csr.GenerateName, len(c.created))
		c.created = append(c.created, csr)
		return http.StatusCreated, mustJSON(c.t, csr)
	}
	for _, csr := range c.created {
		if req.Method != http.MethodGet || req.URL.Path != csrPath+"/"+csr.Name || c.gone[csr.Name] {
			continue
		}
		if c.decide != nil && len(csr.Status.Conditions) == 0 {
			c.decide(csr)
		}
		return http.StatusOK, mustJSON(c.t, csr)
	}
	return http.StatusNotFound, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":404}`
}

func mustJSON(t *testing.T, v any) string {
	t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func condition(csr *certificatesv1.CertificateSigningRequest, c certificatesv1.RequestConditionType, reason string) {
	csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: c, Reason: reason, Message: "by the test"})
}

func parseCSR(t *testing.T, csr *certificatesv1.CertificateSigningRequest) *x509.CertificateRequest {
	t.Helper()
	block, rest := pem.Decode(csr.Spec.Request)
	if block == nil || block.Type != "CERTIFICATE REQUEST" || len(rest) > 0 {
		t.Fatalf("the request holds %q, want one PEM block", csr.Spec.Request)
	}
	parsed, err := x509.ParseCertificateRequest(block.Bytes)
	if err == nil {
		err = parsed.CheckSignature()
	}
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}

// approve signs what was asked for.
func (c *cluster) approve(csr *certificatesv1.CertificateSigningRequest) { c.sign(csr) }

// sign signs with changes.
func (c *cluster) sign(csr *certificatesv1.CertificateSigningRequest, edit ...func(*x509.Certificate)) {
	condition(csr, certificatesv1.CertificateApproved, "Test")
	asked := parseCSR(c.t, csr)
	template := &x509.Certificate{
		SerialNumber: c.ca.cert.SerialNumber, Subject: asked.Subject, DNSNames: asked.DNSNames, IPAddresses: asked.IPAddresses,
		NotBefore: time.Now().Add(-5 * time.Minute), NotAfter: time.Now().Add(signedLife - 5*time.Minute),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	for _, e := range edit {
		e(template)
	}
	der, err := x509.CreateCertificate(rand.Reader, template, c.ca.cert, asked.PublicKey, c.ca.key)
	if err != nil {
		c.t.Error(err)
	}
	csr.Status.Certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// A signedNode is a SignedCert with everything around it.
type signedNode struct {
	*SignedCert
	t        *testing.T
	cfg      SignedConfig
	cluster  *cluster
	fallback *ServingCert
	reg      *prometheus.Registry
	stop     func()
}

func newSignedNode(t *testing.T) *signedNode {
	t.Helper()
	n := &signedNode{t: t, cluster: newCluster(t), stop: func() {}}
	dir := filepath.Join(t.TempDir(), "pki")
	n.fallback = mustServe(t, dir)
	n.cfg = SignedConfig{
		Dir: dir, Hosts: []string{"169.254.2.1", "Edge-1.example.org", "127.0.0.1", "0.0.0.0"},
		Node:     func() user.Info { return &user.DefaultInfo{Name: nodeName, Groups: []string{"system:nodes"}} },
		Upstream: n.cluster, Fallback: n.fallback.GetCertificate,
	}
	return n
}

// load begins another life of the program, which does nothing yet.
func (n *signedNode) load() {
	n.t.Helper()
	n.stop()
	n.stop = func() {}
	n.reg = prometheus.NewPedanticRegistry()
	n.cfg.Registerer = n.reg
	s, err := SignedCertificate(n.cfg)
	if err != nil {
		n.t.Fatalf("SignedCertificate() = %v, want nil", err)
	}
	n.SignedCert = s
}

// start begins another life of the program.
func (n *signedNode) start() {
	n.t.Helper()
	n.load()
	ctx, cancel := context.WithCancel(n.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	n.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			n.t.Errorf("Run() = %v, want nil", err)
		}
	})
	synctest.Wait()
}

func (n *signedNode) leaf() *x509.Certificate {
	n.t.Helper()
	cert, err := n.GetCertificate(&tls.ClientHelloInfo{})
	if err != nil || cert == nil {
		n.t.Fatalf("GetCertificate() = %v, %v, want a certificate", cert, err)
	}
	return cert.Leaf
}

// wantIssuer is that of the certificate served, which the gauge must tell, too.
func (n *signedNode) wantIssuer(want string) {
	n.t.Helper()
	leaf, got := n.leaf(), issuerCluster
	if leaf.Equal(leafOf(n.t, n.fallback)) {
		got = issuerNode
	}
	if got != want {
		n.t.Fatalf("the certificate is from the %s, want it from the %s", got, want)
	}
	gauge := fmt.Sprintf("# HELP %s When the certificate that clients are shown ends, in seconds since 1970, by who issued it: node (the CA of this node) or cluster.\n# TYPE %[1]s gauge\n%[1]s{issuer=%q} %d\n",
		"edgehub_identity_serving_certificate_not_after_seconds", want, leaf.NotAfter.Unix())
	if err := testutil.GatherAndCompare(n.reg, strings.NewReader(gauge), "edgehub_identity_serving_certificate_not_after_seconds"); err != nil {
		n.t.Fatal(err)
	}
}

// wantResults compares the counter; what is not named is 0.
func (n *signedNode) wantResults(want map[string]float64) {
	n.t.Helper()
	all := map[string]float64{"issued": 0, "denied": 0, "failed": 0, "error": 0, "invalid": 0}
	maps.Copy(all, want)
	got := map[string]float64{}
	for result := range all {
		got[result] = testutil.ToFloat64(n.metrics.requests.WithLabelValues(result))
	}
	if diff := cmp.Diff(all, got); diff != "" {
		n.t.Fatalf("requests by result (-want +got):\n%s", diff)
	}
}

func (n *signedNode) pass(d time.Duration) {
	<-time.After(d) // of the bubble
	synctest.Wait()
}

// inBubble runs a test with a node that ends before the bubble does.
func inBubble(t *testing.T, test func(t *testing.T, n *signedNode)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		n := newSignedNode(t)
		defer func() { n.stop() }()
		test(t, n)
	})
}

// wantFiles compares modes; 0: there is no such file.
func (n *signedNode) wantFiles(want map[string]fs.FileMode) {
	n.t.Helper()
	for name, mode := range want {
		info, err := os.Stat(filepath.Join(n.cfg.Dir, name))
		if mode == 0 && err == nil {
			n.t.Errorf("%s is there", name)
		}
		if mode != 0 && (err != nil || info.Mode().Perm() != mode) {
			n.t.Errorf("mode of %s = %v, %v, want %v", name, info, err, mode)
		}
	}
}

func (n *signedNode) wantNewKeys() {
	n.t.Helper()
	seen := map[string]bool{}
	for _, csr := range n.cluster.requests() {
		key := fmt.Sprint(parseCSR(n.t, csr).PublicKey)
		if seen[key] {
			n.t.Error("a key was used for two requests")
		}
		seen[key] = true
	}
}

func (n *signedNode) hosts() hostNames {
	n.t.Helper()
	names, err := parseHosts(n.cfg.Hosts)
	if err != nil {
		n.t.Fatal(err)
	}
	return names
}
