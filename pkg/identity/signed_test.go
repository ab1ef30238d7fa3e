// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
)

func TestSignedCertificate(t *testing.T) {
	inBubble(t, func(t *testing.T, n *signedNode) {
		n.cluster.set(func() { n.cluster.decide = nil })
		n.start()
		n.wantIssuer(issuerNode)
		n.pass(5 * time.Hour) // somebody has to be found
		n.wantIssuer(issuerNode)
		n.wantResults(nil)
		if got := len(n.cluster.requests()); got != 1 {
			t.Fatalf("requests = %d, want 1", got)
		}
		csr := n.cluster.requests()[0]
		want := certificatesv1.CertificateSigningRequest{
			TypeMeta:   metav1.TypeMeta{Kind: "CertificateSigningRequest", APIVersion: "certificates.k8s.io/v1"},
			ObjectMeta: metav1.ObjectMeta{GenerateName: "edgehub-serving-", Name: csr.Name},
			Spec: certificatesv1.CertificateSigningRequestSpec{
				Request: csr.Spec.Request, SignerName: "kubernetes.io/kubelet-serving", Usages: []certificatesv1.KeyUsage{"digital signature", "server auth"},
			},
		}
		if diff := cmp.Diff(want, *csr); diff != "" {
			t.Errorf("request (-want +got):\n%s", diff)
		}
		asked := parseCSR(t, csr)
		got := fmt.Sprint(asked.Subject, asked.DNSNames, asked.IPAddresses, asked.PublicKeyAlgorithm)
		if want := "CN=system:node:edge-1,O=system:nodes [edge-1.example.org] [127.0.0.1 169.254.2.1] ECDSA"; got != want {
			t.Errorf("request is for %s, want %s", got, want)
		}
		n.wantFiles(map[string]fs.FileMode{signedFile: 0, requestFile: 0o600})

		n.cluster.set(func() { condition(csr, certificatesv1.CertificateApproved, "Test") })
		n.pass(time.Hour) // the signer has a day off
		n.wantIssuer(issuerNode)
		n.wantResults(nil)
		n.cluster.set(func() { n.cluster.sign(csr) })
		n.pass(maxPollDelay * 3 / 2)
		n.wantIssuer(issuerCluster)
		n.wantResults(map[string]float64{"issued": 1})
		n.wantFiles(map[string]fs.FileMode{signedFile: 0o600, requestFile: 0})
		for _, host := range []string{"169.254.2.1", "127.0.0.1", "edge-1.example.org"} {
			if err := trusted(t, n.cluster.ca.pem(), n.leaf(), host, time.Now()); err != nil {
				t.Errorf("Verify(%s) = %v, want nil", host, err)
			}
		}
		if n.leaf().VerifyHostname("localhost") == nil {
			t.Error("the certificate is for localhost, which nobody asked for")
		}
		problems, err := testutil.GatherAndLint(n.reg)
		if err != nil || len(problems) > 0 {
			t.Errorf("GatherAndLint() = %v, %v, want nothing", problems, err)
		}
	})
}

func TestSignedCertificateRenewal(t *testing.T) {
	early, late := signedLife*7/10, signedLife*9/10
	ages := map[time.Duration]bool{}
	for range 5 {
		inBubble(t, func(t *testing.T, n *signedNode) {
			n.start()
			n.pass(time.Minute)
			first := n.leaf()
			n.pass(time.Until(first.NotBefore.Add(early - time.Second)))
			if !n.leaf().Equal(first) {
				t.Fatalf("the certificate was renewed before 70 %% of its life")
			}
			for n.leaf().Equal(first) && time.Since(first.NotBefore) < late+time.Hour {
				n.pass(time.Hour)
			}
			age := time.Since(first.NotBefore)
			if n.leaf().Equal(first) || age > late+time.Hour {
				t.Fatalf("the certificate was not renewed at 90 %% of its life")
			}
			ages[age] = true
			n.wantIssuer(issuerCluster)
			n.wantResults(map[string]float64{"issued": 2})
			n.wantNewKeys()
			second := n.leaf()
			n.cluster.set(func() { n.cluster.down = true })
			n.start()
			if !n.leaf().Equal(second) {
				t.Error("the renewed certificate was not saved")
			}
		})
	}
	if len(ages) < 2 {
		t.Errorf("five nodes renewed at the age of %v, want jitter", ages)
	}
}

func TestSignedCertificateOffline(t *testing.T) {
	inBubble(t, func(t *testing.T, n *signedNode) {
		n.cluster.down = true
		n.start()
		n.pass(20 * time.Second)
		if got := len(n.cluster.times()); got < 3 || got > 6 {
			t.Errorf("tries in the first 20 s = %d, want 3 to 6", got)
		}
		n.pass(3 * 24 * time.Hour)
		n.wantIssuer(issuerNode)
		asked := n.cluster.times()
		n.wantResults(map[string]float64{"error": float64(len(asked))})
		for i := range asked[1:] {
			if gap := asked[i+1].Sub(asked[i]); gap > maxTryDelay*3/2 || i > 12 && gap < maxTryDelay/2 {
				t.Errorf("gap before try %d = %v, want about %v", i+1, gap, maxTryDelay)
			}
		}
		const life = 24 * time.Hour
		n.cluster.set(func() {
			n.cluster.down = false
			n.cluster.decide = func(csr *certificatesv1.CertificateSigningRequest) {
				n.cluster.sign(csr, func(c *x509.Certificate) { c.NotAfter = time.Now().Add(life) })
			}
		})
		n.pass(maxTryDelay*3/2 + 2*time.Second)
		n.wantIssuer(issuerCluster)

		// It ends while the link is down, and is served all the same, also after a restart.
		n.cluster.set(func() { n.cluster.down = true })
		first, asked := n.leaf(), n.cluster.times()
		n.pass(3 * life)
		again := n.cluster.times()[len(asked):]
		if gap := again[2].Sub(again[0]); gap > 10*time.Second {
			t.Errorf("third try to renew %v after the first, want it soon", gap)
		}
		for range 2 {
			if !n.leaf().Equal(first) {
				t.Fatal("the expired certificate is not served")
			}
			n.wantIssuer(issuerCluster) // and the gauge lies in the past
			n.start()
		}
		n.cluster.set(func() { n.cluster.down = false })
		n.pass(10 * time.Second)
		if n.leaf().Equal(first) {
			t.Error("the expired certificate was not renewed when the link came back")
		}
	})
}

func TestSignedCertificateRestart(t *testing.T) {
	inBubble(t, func(t *testing.T, n *signedNode) {
		n.start()
		n.pass(time.Minute)
		first := n.leaf()
		// Offline, from the first moment; and nothing is asked when the link is back.
		n.cluster.set(func() { n.cluster.down = true })
		n.load()
		if !n.leaf().Equal(first) {
			t.Fatal("the certificate is not served after a restart")
		}
		n.cluster.set(func() { n.cluster.down = false })
		asked := len(n.cluster.times())
		n.start()
		n.pass(24 * time.Hour)
		if got := len(n.cluster.times()); got != asked {
			t.Errorf("%d questions after a restart with a good certificate, want none", got-asked)
		}

		// What does not fit any more is served until there is something better.
		for name, change := range map[string]func(){
			"another host": func() { n.cfg.Hosts = append(n.cfg.Hosts, "10.1.2.3") },
			"another node": func() {
				n.cluster.node = "system:node:edge-2"
				n.cfg.Node = func() user.Info { return &user.DefaultInfo{Name: "system:node:edge-2"} }
			},
		} {
			before := n.leaf()
			n.cluster.set(func() { n.cluster.decide = nil; change() })
			n.start()
			n.pass(time.Hour)
			if !n.leaf().Equal(before) {
				t.Errorf("%s: the certificate of before is not served until it is replaced", name)
			}
			n.cluster.set(func() { n.cluster.decide = n.cluster.approve })
			n.pass(maxPollDelay * 3 / 2)
			if n.leaf().Equal(before) {
				t.Errorf("%s: the certificate was not replaced", name)
			}
		}
		if err := n.leaf().VerifyHostname("10.1.2.3"); err != nil || n.leaf().Subject.CommonName != "system:node:edge-2" {
			t.Errorf("the certificate is for %v, %v, want it for the new host and node", n.leaf().Subject, err)
		}
		// One host less is no reason.
		before := n.leaf()
		n.cfg.Hosts = n.cfg.Hosts[:1]
		n.start()
		n.pass(time.Hour)
		if !n.leaf().Equal(before) {
			t.Error("a certificate that covers the hosts was replaced")
		}
	})
}

func TestSignedCertificateDamage(t *testing.T) {
	for name, change := range map[string]func([]byte) []byte{
		"empty": func([]byte) []byte { return nil },
		"cut":   func(raw []byte) []byte { return raw[:len(raw)-60] },
		"another's key": func(raw []byte) []byte {
			key, _ := keyPEM(newTestCA(t, "x", nil).key)
			return append(key, raw[bytes.Index(raw, []byte("-----BEGIN CERT")):]...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(t *testing.T, n *signedNode) {
				n.start()
				n.pass(time.Minute)
				file := filepath.Join(n.cfg.Dir, signedFile)
				writeTestFile(t, file, change(readTestFile(t, file)))
				n.start()
				n.wantIssuer(issuerNode)
				n.pass(time.Minute)
				n.wantIssuer(issuerCluster)
				n.load()
				n.wantIssuer(issuerCluster)
			})
		})
	}
}

func TestSignedCertificateThatCannotBeSaved(t *testing.T) {
	inBubble(t, func(t *testing.T, n *signedNode) {
		// Directories that are not empty stand in the way of the files.
		for _, name := range []string{signedFile, requestFile} {
			if err := os.MkdirAll(filepath.Join(n.cfg.Dir, name+".tmp", "x"), 0o700); err != nil {
				t.Fatal(err)
			}
		}
		n.start()
		n.pass(time.Minute)
		n.wantIssuer(issuerCluster)
		n.wantFiles(map[string]fs.FileMode{signedFile: 0, requestFile: 0})
		if err := os.RemoveAll(filepath.Join(n.cfg.Dir, signedFile+".tmp")); err != nil {
			t.Fatal(err)
		}
		n.pass(recheckAfter)
		want := n.leaf()
		n.load()
		if !n.leaf().Equal(want) {
			t.Error("the certificate was not saved later")
		}
	})
}

// A node without a battery begins in the past. Clients of that day accept what the
// node has signed, and nothing of the cluster's.
func TestSignedCertificateWithoutAClock(t *testing.T) {
	inBubble(t, func(t *testing.T, n *signedNode) {
		cert, key := n.cluster.ca.clientKey(t, nodeName, []string{"system:nodes"}, func(c *x509.Certificate) {
			c.NotBefore, c.NotAfter = time.Now().Add(24*30*time.Hour), time.Now().Add(24*365*time.Hour)
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
			c.IPAddresses, c.DNSNames = n.hosts().ips, n.hosts().dns
		})
		if err := savePair(filepath.Join(n.cfg.Dir, signedFile), &tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key}); err != nil {
			t.Fatal(err)
		}
		n.start()
		n.pass(time.Hour)
		n.wantIssuer(issuerNode)
		if got := len(n.cluster.times()); got != 0 {
			t.Errorf("%d questions while the clock is lost, want none", got)
		}
		n.pass(24 * 30 * time.Hour)
		n.wantIssuer(issuerCluster)
	})
}

func TestSignedCertificateWithAChain(t *testing.T) {
	n := newSignedNode(t)
	intermediate := newTestCA(t, "intermediate", n.cluster.ca)
	root := n.cluster.ca
	n.cluster.decide = func(csr *certificatesv1.CertificateSigningRequest) {
		n.cluster.ca = intermediate
		n.cluster.sign(csr)
		csr.Status.Certificate = append(csr.Status.Certificate, intermediate.pem()...)
	}
	n.load()
	for range 2 { // ask, and fetch
		n.step(t.Context())
	}
	if got := n.step(t.Context()); got != recheckAfter {
		t.Errorf("step() with a good certificate = %v, want %v", got, recheckAfter)
	}
	for range 2 { // also after a restart
		url := serveHTTP2(t, n.GetCertificate, func(http.ResponseWriter, *http.Request) {})
		roots := x509.NewCertPool()
		roots.AddCert(root.cert)
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
		resp, err := (&http.Client{Transport: transport}).Get(url)
		if err != nil {
			t.Fatalf("GET by a client that trusts the root = %v, want nil", err)
		}
		resp.Body.Close()
		transport.CloseIdleConnections()
		n.load()
	}
}

// A request that the end of the program cuts short is no error.
func TestSignedCertificateEndsInTheMiddle(t *testing.T) {
	inBubble(t, func(t *testing.T, n *signedNode) {
		asked := make(chan struct{})
		n.cfg.Upstream = roundTripper(func(req *http.Request) (*http.Response, error) {
			close(asked)
			<-req.Context().Done()
			return nil, req.Context().Err()
		})
		n.start()
		<-asked
		n.stop()
		n.wantResults(nil)
	})
}

// A stream goes on over the connection that it began on; who comes anew gets the
// new certificate.
func TestRotationDropsNoConnection(t *testing.T) {
	n := newSignedNode(t)
	n.load()
	issue := func() *x509.Certificate {
		for range 2 { // ask, and fetch
			n.step(t.Context())
		}
		n.wantIssuer(issuerCluster)
		return n.leaf()
	}
	first := issue()
	more := make(chan string)
	url := serveHTTP2(t, n.GetCertificate, func(w http.ResponseWriter, _ *http.Request) {
		for line := range more {
			_, _ = fmt.Fprintln(w, line)
			_ = http.NewResponseController(w).Flush()
		}
	})
	roots := x509.NewCertPool()
	roots.AddCert(n.cluster.ca.cert)
	open := func() *http.Response {
		t.Helper()
		transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true}
		t.Cleanup(transport.CloseIdleConnections)
		resp, err := (&http.Client{Transport: transport}).Get(url)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { resp.Body.Close() })
		if resp.ProtoMajor != 2 {
			t.Fatalf("the answer came over %s, want HTTP/2", resp.Proto)
		}
		return resp
	}
	say := func(s string) { more <- s }
	go say("before")
	stream := open()
	lines := bufio.NewReader(stream.Body)
	want := func(want string) {
		t.Helper()
		if got, err := lines.ReadString('\n'); err != nil || got != want+"\n" {
			t.Fatalf("the stream brought %q, %v, want %q", got, err, want)
		}
	}
	want("before")
	n.renewAt = time.Now()
	second := issue()
	if second.Equal(first) {
		t.Fatal("the certificate was not renewed")
	}
	say("after")
	want("after")
	if !stream.TLS.PeerCertificates[0].Equal(first) {
		t.Error("the stream did not begin with the first certificate")
	}
	close(more)
	if got := open().TLS.PeerCertificates[0]; !got.Equal(second) {
		t.Error("a new connection did not get the second certificate")
	}
}

func serveHTTP2(t *testing.T, get func(*tls.ClientHelloInfo) (*tls.Certificate, error), h http.HandlerFunc) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: h, TLSConfig: &tls.Config{GetCertificate: get}}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = server.ServeTLS(listener, "", "")
	}()
	t.Cleanup(func() {
		_ = server.Close()
		<-ended
	})
	return "https://" + listener.Addr().String()
}

func TestSignedCertificateErrors(t *testing.T) {
	if _, err := SignedCertificate(SignedConfig{Hosts: []string{"127.0.0.1"}}); err == nil {
		t.Error("SignedCertificate() of nothing = nil, want an error")
	} else {
		for _, want := range []string{"Dir", "Node", "Upstream", "Fallback"} {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("SignedCertificate() = %v, want it to name %s", err, want)
			}
		}
	}
	n := newSignedNode(t)
	for _, hosts := range [][]string{nil, {"0.0.0.0", "::"}, {"127.0.0.1", "a b"}, {"fe80::1%eth0"}} {
		n.cfg.Hosts = hosts
		if _, err := SignedCertificate(n.cfg); err == nil {
			t.Errorf("SignedCertificate(%q) = nil, want an error", hosts)
		}
	}
	file := filepath.Join(t.TempDir(), "file")
	writeTestFile(t, file, nil)
	n.cfg.Hosts, n.cfg.Dir = []string{"127.0.0.1"}, filepath.Join(file, "pki")
	if _, err := SignedCertificate(n.cfg); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("SignedCertificate() below a file = %v, want an error that names %s", err, file)
	}
}

// A node that does not know its name yet asks for nothing.
func TestSignedCertificateOfUnknownNode(t *testing.T) {
	inBubble(t, func(t *testing.T, n *signedNode) {
		n.cfg.Node = func() user.Info { return nil }
		n.start()
		n.pass(time.Minute)
		n.wantIssuer(issuerNode)
		if got := len(n.cluster.times()); got != 0 {
			t.Errorf("%d questions by nobody, want none", got)
		}
	})
}

func TestServingCertCollector(t *testing.T) {
	s := mustServe(t, t.TempDir())
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(s.Collector())
	families, err := reg.Gather()
	if err != nil || len(families) != 1 || families[0].GetName() != "edgehub_identity_serving_certificate_not_after_seconds" {
		t.Fatalf("Gather() = %v, %v, want one metric", families, err)
	}
	m := families[0].GetMetric()[0]
	if got, want := m.GetGauge().GetValue(), float64(s.NotAfter().Unix()); got != want || m.GetLabel()[0].GetValue() != issuerNode {
		t.Errorf("metric = %v, want %v by %s", m, want, issuerNode)
	}
}
