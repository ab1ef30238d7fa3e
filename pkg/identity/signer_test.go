// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	certificatesv1 "k8s.io/api/certificates/v1"
	"k8s.io/apiserver/pkg/authentication/user"
)

type csr = *certificatesv1.CertificateSigningRequest

// A refusal is what a cluster can answer instead of a good certificate.
type refusal struct {
	name, result string
	decide       func(*cluster, csr)
}

func refusals(t *testing.T) []refusal {
	t.Helper()
	edit := func(e func(*x509.Certificate)) func(*cluster, csr) {
		return func(c *cluster, r csr) { c.sign(r, e) }
	}
	raw := func(change func(good []byte, ca *testCA) []byte) func(*cluster, csr) {
		return func(c *cluster, r csr) {
			c.sign(r)
			r.Status.Certificate = change(r.Status.Certificate, c.ca)
		}
	}
	other := newTestCA(t, "somebody", nil)
	return []refusal{
		{"denied", "denied", func(_ *cluster, r csr) { condition(r, certificatesv1.CertificateDenied, "NoSuchNode") }},
		{"denied after all", "denied", func(c *cluster, r csr) { c.sign(r); condition(r, certificatesv1.CertificateDenied, "Late") }},
		{"failed", "failed", func(_ *cluster, r csr) {
			condition(r, certificatesv1.CertificateApproved, "Test")
			condition(r, certificatesv1.CertificateFailed, "SignerValidationFailure")
		}},
		{"another key", "invalid", raw(func(good []byte, ca *testCA) []byte {
			certs, err := parseCertificates(good)
			if err != nil {
				t.Error(err)
			}
			return certPEM(mustSign(t, certs[0], ca.cert, other.key, ca.key))
		})},
		{"expired", "invalid", edit(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) })},
		{"not yet valid", "invalid", edit(func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Hour) })},
		{"for clients", "invalid", edit(func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth} })},
		{"for everything unnamed", "invalid", edit(func(c *x509.Certificate) { c.ExtKeyUsage = nil })},
		{"a name missing", "invalid", edit(func(c *x509.Certificate) { c.DNSNames = nil })},
		{"an address missing", "invalid", edit(func(c *x509.Certificate) { c.IPAddresses = c.IPAddresses[1:] })},
		{"another node", "invalid", edit(func(c *x509.Certificate) { c.Subject.CommonName = "system:node:edge-2" })},
		{"no PEM", "invalid", raw(func([]byte, *testCA) []byte { return []byte("certificate") })},
		{"no certificate", "invalid", raw(func([]byte, *testCA) []byte {
			return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: []byte("certificate")})
		})},
		{"cut", "invalid", raw(func(good []byte, _ *testCA) []byte { return good[:len(good)-40] })},
		{"a key with it", "invalid", raw(func(good []byte, ca *testCA) []byte {
			key, _ := keyPEM(ca.key)
			return append(good, key...)
		})},
		{"the chain first", "invalid", raw(func(good []byte, ca *testCA) []byte { return append(ca.pem(), good...) })},
		{"a chain too long", "invalid", raw(func(good []byte, ca *testCA) []byte { return append(good, bytes.Repeat(ca.pem(), maxChain)...) })},
	}
}

// The node goes on with its own certificate, tries again, and takes the good one
// that it gets then.
func TestSignedCertificateRefusals(t *testing.T) {
	for _, tc := range refusals(t) {
		t.Run(tc.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, n *signedNode) {
				n.cluster.decide = func(r csr) { tc.decide(n.cluster, r) }
				n.start()
				for range 30 { // asked after at most 1.5 s, and looked after at most 1.5 s more
					if n.pass(100 * time.Millisecond); testutil.ToFloat64(n.metrics.requests.WithLabelValues(tc.result)) > 0 {
						break
					}
				}
				n.wantIssuer(issuerNode)
				n.wantResults(map[string]float64{tc.result: 1})
				n.pass(time.Hour)
				tries := len(n.cluster.requests())
				if tries < 8 || tries > 35 {
					t.Errorf("requests in an hour = %d, want one each 2.5 to 7.5 minutes, and some more at first", tries)
				}
				n.wantIssuer(issuerNode)
				n.cluster.set(func() { n.cluster.decide = n.cluster.approve })
				n.pass(maxTryDelay*3/2 + 2*time.Second)
				n.wantIssuer(issuerCluster)
				n.wantResults(map[string]float64{tc.result: float64(len(n.cluster.requests()) - 1), "issued": 1})
				n.wantNewKeys()
			})
		})
	}
}

// Answers that say nothing about the request end none that is there.
func TestSignedCertificateBadAnswers(t *testing.T) {
	csr := func(name string) string {
		return fmt.Sprintf(`{"kind":"CertificateSigningRequest","apiVersion":"certificates.k8s.io/v1","metadata":{"name":%q}}`, name)
	}
	for _, tc := range []struct {
		name, method string
		code         int
		body         string
	}{
		{"create: forbidden", "POST", 403, `{"kind":"Status","message":"not this node"}`},
		{"create: no such API", "POST", 404, ""},
		{"create: broken server", "POST", 500, "<html>"},
		{"create: no JSON", "POST", 201, "<html>"},
		{"create: another kind", "POST", 201, `{"kind":"Secret","metadata":{"name":"x"}}`},
		{"create: no name", "POST", 201, csr("")},
		{"create: a name that is a path", "POST", 201, csr("../../../api/v1/secrets")},
		{"create: huge", "POST", 201, csr("x") + strings.Repeat(" ", maxCSRBytes)},
		{"get: forbidden", "GET", 403, "{}"},
		{"get: too many", "GET", 429, ""},
		{"get: no JSON", "GET", 200, "{"},
		{"get: another kind", "GET", 200, `{"kind":"Status"}`},
		{"get: huge", "GET", 200, csr("x") + strings.Repeat(" ", maxCSRBytes)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, n *signedNode) {
				n.cluster.answer = func(method string) (int, string, bool) { return tc.code, tc.body, method == tc.method }
				n.start()
				n.pass(4 * time.Second)
				n.wantIssuer(issuerNode)
				if got := testutil.ToFloat64(n.metrics.requests.WithLabelValues("error")); got < 1 {
					t.Fatalf("errors = %v, want some", got)
				}
				n.pass(10 * time.Minute)
				n.wantIssuer(issuerNode)
				n.cluster.set(func() { n.cluster.answer = nil })
				n.pass(maxTryDelay*3/2 + 2*time.Second)
				n.wantIssuer(issuerCluster)
				if got := len(n.cluster.requests()); tc.method == "GET" && got != 1 {
					t.Errorf("requests = %d, want 1", got)
				}
			})
		})
	}
}

func TestSignedRequestThatIsGone(t *testing.T) {
	inBubble(t, func(t *testing.T, n *signedNode) {
		n.cluster.decide = nil
		n.start()
		n.pass(24 * time.Hour)
		n.cluster.set(func() {
			n.cluster.gone[n.cluster.created[0].Name] = true
			n.cluster.decide = n.cluster.approve
		})
		n.pass(2 * time.Minute)
		n.wantIssuer(issuerCluster)
		n.wantResults(map[string]float64{"failed": 1, "issued": 1})
		n.wantNewKeys()
	})
}

// The link is cut while a request waits: it is not made again.
func TestSignedRequestOutlivesTheLink(t *testing.T) {
	inBubble(t, func(t *testing.T, n *signedNode) {
		n.cluster.decide = nil
		n.start()
		n.pass(time.Minute)
		n.cluster.set(func() { n.cluster.down = true })
		n.pass(6 * time.Hour)
		n.cluster.set(func() { n.cluster.down, n.cluster.decide = false, n.cluster.approve })
		n.pass(maxPollDelay * 3 / 2)
		n.wantIssuer(issuerCluster)
		if got := len(n.cluster.requests()); got != 1 {
			t.Errorf("requests = %d, want 1", got)
		}
	})
}

// A restart while a request waits: it is gone on with, unless it is not what is
// wanted any more, or not whole.
func TestSignedRequestAfterRestart(t *testing.T) {
	damage := func(change func([]byte) []byte) func(*testing.T, *signedNode) {
		return func(t *testing.T, n *signedNode) {
			file := filepath.Join(n.cfg.Dir, requestFile)
			writeTestFile(t, file, change(readTestFile(t, file)))
		}
	}
	for _, tc := range []struct {
		name         string
		between      func(*testing.T, *signedNode)
		wantRequests int
	}{
		{"nothing changed", func(*testing.T, *signedNode) {}, 1},
		{"hosts in another order", func(_ *testing.T, n *signedNode) {
			n.cfg.Hosts = []string{"127.0.0.1", "edge-1.example.org", "169.254.2.1"}
		}, 1},
		{"other hosts", func(_ *testing.T, n *signedNode) { n.cfg.Hosts = []string{"169.254.2.1"} }, 2},
		{"another node", func(_ *testing.T, n *signedNode) {
			n.cluster.node = "system:node:edge-2"
			n.cfg.Node = func() user.Info { return &user.DefaultInfo{Name: "system:node:edge-2"} }
		}, 2},
		{"gone", func(_ *testing.T, n *signedNode) { n.cluster.gone[n.cluster.created[0].Name] = true }, 2},
		{"no file", func(t *testing.T, n *signedNode) {
			if err := os.Remove(filepath.Join(n.cfg.Dir, requestFile)); err != nil {
				t.Fatal(err)
			}
		}, 2},
		{"empty file", damage(func([]byte) []byte { return nil }), 2},
		{"cut file", damage(func(raw []byte) []byte { return raw[:len(raw)-60] }), 2},
		{"no key", damage(func(raw []byte) []byte { return raw[:bytes.Index(raw, []byte("-----BEGIN PRIVATE"))] }), 2},
		{"another's key", damage(func(raw []byte) []byte {
			key, _ := keyPEM(newTestCA(t, "x", nil).key)
			return append(raw[:bytes.Index(raw, []byte("-----BEGIN PRIVATE"))], key...)
		}), 2},
		{"a name that is a path", damage(func(raw []byte) []byte {
			return bytes.Replace(raw, []byte("Name: "), []byte("Name: ../"), 1)
		}), 2},
		{"no name", damage(func(raw []byte) []byte { return bytes.Replace(raw, []byte("Name: "), []byte("Other: "), 1) }), 2},
	} {
		t.Run(tc.name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, n *signedNode) {
				n.cluster.decide = nil
				n.start()
				n.pass(time.Minute)
				n.stop()
				n.cluster.decide = n.cluster.approve // while the node is away
				tc.between(t, n)
				n.start()
				n.pass(10 * time.Second)
				n.wantIssuer(issuerCluster)
				if got := len(n.cluster.requests()); got != tc.wantRequests {
					t.Errorf("requests = %d, want %d", got, tc.wantRequests)
				}
				n.wantResults(map[string]float64{"issued": 1, "failed": float64(len(n.cluster.gone))})
				n.wantNewKeys()
				n.wantFiles(map[string]fs.FileMode{requestFile: 0})
			})
		})
	}
}

// A crash after the certificate was saved leaves the request.
func TestSignedRequestThatIsNotWantedAnyMore(t *testing.T) {
	inBubble(t, func(t *testing.T, n *signedNode) {
		n.cluster.decide = nil
		n.start()
		n.pass(time.Minute)
		left := readTestFile(t, n.cfg.Dir, requestFile)
		n.cluster.set(func() { n.cluster.decide = n.cluster.approve })
		n.pass(2 * time.Minute)
		n.wantIssuer(issuerCluster)
		writeTestFile(t, filepath.Join(n.cfg.Dir, requestFile), left)
		n.start()
		n.wantFiles(map[string]fs.FileMode{requestFile: 0})
		asked := len(n.cluster.times())
		n.pass(time.Hour)
		if got := len(n.cluster.times()); got != asked {
			t.Errorf("%d questions about a request that is not wanted, want none", got-asked)
		}
	})
}
