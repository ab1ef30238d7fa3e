// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// TestExpiredNodeCertificateIsAnsweredOffline has the node's certificate end. Online
// it counts as little as at the API server; offline kubelet, which would exit at a
// 401 and cannot renew it, gets what it was shown before, also from a hub that has
// been started since. Nobody else's does.
//
// Guards: certificate asks whether the link is up before it takes an expired
// certificate, and only for the node's own identity; verify wants its authority all
// the same; parseCertificate lets the hub start with one.
func TestExpiredNodeCertificateIsAnsweredOffline(t *testing.T) {
	t.Parallel()
	t.Run("the client's", func(t *testing.T) { t.Parallel(); testExpiredClient(t) })
	t.Run("the client's and the hub's", func(t *testing.T) { t.Parallel(); testExpiredHub(t) })
}

func testExpiredClient(t *testing.T) {
	s := newSite(t)
	s.pod("p", rig.NodeName, "default")
	s.start()
	good := s.Through(s.Node)
	expired := func(name string) *rig.Endpoint {
		cert, key, err := s.ControlPlane.NodeCredentialsUntil(name, time.Now().Add(-time.Minute))
		s.Must(err)
		return s.Through(withCertificate(s.Node, cert, key))
	}
	own, others := expired(rig.NodeName), expired(otherNode)
	forged := s.Through(newAuthority(t).config(s, rig.NodeUser, time.Now().Add(-time.Minute)))
	paths := []string{podsOfN1, nodeItself, s.path("configmaps/c")}
	shown := map[string]string{}
	for _, path := range paths {
		s.comes("the node", good, path, http.StatusOK)
		shown[path] = s.asks("the node", good, path, http.StatusOK)
		s.asks("the expired certificate", own, path, http.StatusUnauthorized)
	}
	s.Settle()
	s.Offline()
	check := func(state string) {
		t.Helper()
		for _, path := range paths {
			if got := s.asks("the expired certificate "+state, own, path, http.StatusOK); !sameItems(got, shown[path]) {
				t.Errorf("the expired certificate %s: GET %s =\n%.300s\nwant what the node was shown:\n%.300s", state, path, got, shown[path])
			}
			s.asks("another node's expired certificate "+state, others, path, http.StatusUnauthorized)
			s.asks("another authority's expired certificate "+state, forged, path, http.StatusUnauthorized)
		}
	}
	check("offline")
	s.restart(false)
	check("offline after a restart")
	s.Online()
	s.asks("the expired certificate online again", own, nodeItself, http.StatusUnauthorized)
}

// sameItems compares answers that are the same bytes, or lists of the same items.
func sameItems(a, b string) bool {
	x, err := rig.ReadList([]byte(a))
	y, err2 := rig.ReadList([]byte(b))
	if err != nil || err2 != nil || len(x.Items) != len(y.Items) {
		return a == b
	}
	for i := range x.Items {
		if string(x.Items[i]) != string(y.Items[i]) {
			return false
		}
	}
	return true
}

const certificateLife = 20 * time.Second

// testExpiredHub is the usual case: the hub has kubelet's own files. The API server
// refuses its probes as well then, so that for the hub the link goes down.
func testExpiredHub(t *testing.T) {
	s := newSite(t)
	s.pod("p", rig.NodeName, "default")
	files := s.newRotation()
	s.Hub = s.NewHub(files.args()...)
	end := time.Now().Add(certificateLife)
	own := files.renew(end)
	process.Run(t, s.Hub)
	s.WaitLink(true)
	through := s.Through(own)
	for _, path := range []string{podsOfN1, nodeItself} {
		s.comes("the node", through, path, http.StatusOK)
	}
	s.Settle()
	if !time.Now().Before(end) {
		t.Fatalf("it took more than %v to be shown something", certificateLife)
	}
	s.comes("the node, past the hub", s.Direct(own), nodeItself, http.StatusUnauthorized)
	refused := 0
	s.Must(process.Poll(t.Context(), "the hub's link goes down", func(ctx context.Context) error {
		healthy, err := s.Hub.Metric(ctx, "edgehub_upstream_healthy")
		if err != nil || healthy == 0 {
			return err
		}
		resp, err := through.Get(ctx, nodeItself, rig.JSON)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		switch resp.StatusCode {
		case http.StatusUnauthorized:
			refused++
		case http.StatusOK:
			if resp.Header.Get("Warning") == "" {
				t.Error("GET of the Node with an expired certificate = 200 from upstream, want 401 or an answer from the record")
			}
		default:
			t.Errorf("GET of the Node with an expired certificate = %d, want 401, or 200 from the record", resp.StatusCode)
		}
		return errors.New("it is up")
	}))
	t.Logf("%d times 401 until the hub's link went down", refused)
	check := func(state string) {
		t.Helper()
		for _, path := range []string{podsOfN1, nodeItself} {
			s.asks("the node "+state, through, path, http.StatusOK)
		}
	}
	check("when nothing is upstream for it any more")
	s.Offline()
	check("offline")
	s.restart(false)
	check("offline after a restart")
	s.Must(s.Link.Heal())
	s.restart(false)
	check("after a restart, when nothing is upstream for it")
}

// A rotation is the node's certificate and key in one file behind a symbolic link
// that is replaced, which is how kubelet keeps its own.
type rotation struct {
	s    *site
	dir  string
	made int
}

func (s *site) newRotation() *rotation { return &rotation{s: s, dir: s.T.TempDir()} }

func (r *rotation) file() string { return filepath.Join(r.dir, "kubelet-client-current.pem") }

// args are the flags of a hub.
func (r *rotation) args() []string {
	return []string{"--node-cert-file=" + r.file(), "--node-key-file=" + r.file()}
}

// renew puts a new certificate in place and returns a client configuration with it.
func (r *rotation) renew(end time.Time) *rest.Config {
	r.s.T.Helper()
	cert, key, err := r.s.ControlPlane.NodeCredentialsUntil(rig.NodeName, end)
	r.s.Must(err)
	a, err := os.ReadFile(cert)
	r.s.Must(err)
	b, err := os.ReadFile(key)
	r.s.Must(err)
	r.made++
	whole := filepath.Join(r.dir, fmt.Sprintf("kubelet-client-%d.pem", r.made))
	r.s.Must(os.WriteFile(whole, append(a, b...), 0o600))
	next := r.file() + ".next"
	r.s.Must(os.Symlink(whole, next))
	r.s.Must(os.Rename(next, r.file()))
	return withCertificate(r.s.Node, cert, key)
}

func withCertificate(c *rest.Config, cert, key string) *rest.Config {
	c = rest.CopyConfig(c)
	c.CertFile, c.KeyFile = cert, key
	return c
}

// TestNodeCertificateRotation replaces the node's certificate and lets the old one
// end: the hub goes upstream with the new one and takes it from kubelet, and what was
// under way goes on, watches that it feeds and such as only pass it.
//
// Guards: reload applies what it has read; a session takes new connections for new
// credentials, and leaves the old ones to who is on them.
func TestNodeCertificateRotation(t *testing.T) {
	t.Parallel()
	const life = 24 * time.Second // two looks at the files are 10 s apart
	s := newSite(t)
	s.Grant(s.namespace, rig.Group("system:nodes"), "events")
	files := s.newRotation()
	s.Hub = s.NewHub(files.args()...)
	old := files.renew(time.Now().Add(life))
	process.Run(t, s.Hub)
	s.WaitLink(true)
	before := s.Through(old)
	s.comes("the node", before, s.path("events"), http.StatusOK)
	fed, passed := s.watch(before, podsOfN1), s.watch(before, s.path("events"))
	renewed := files.renew(time.Time{})
	s.waitMetric(1, "edgehub_upstream_reloads_total", `result="success"`)
	s.comes("the old certificate, past the hub", s.Direct(old), nodeItself, http.StatusUnauthorized)

	s.pod("late", rig.NodeName, "default")
	s.makeEvent("late")
	body := s.asks("the new certificate", s.Through(renewed), podsOfN1, http.StatusOK)
	l, err := rig.ReadList([]byte(body))
	s.Must(err)
	if !holds(s, l, s.namespace+"/late") {
		t.Errorf("the new certificate is shown %d pods without the latest: they are not from upstream", len(l.Items))
	}
	s.asks("the old certificate", before, nodeItself, http.StatusUnauthorized)
	fed.until(s.namespace + "/late")
	passed.until(s.namespace + "/late")
	if n := s.metric("edgehub_upstream_changes_total"); n != 1 {
		t.Errorf("the link went up or down %v times, want once", n)
	}
}

func holds(s *site, l rig.List, key string) bool {
	s.T.Helper()
	for _, item := range l.Items {
		m, err := rig.ReadMeta(item, l.Protobuf)
		s.Must(err)
		if m.Key == key {
			return true
		}
	}
	return false
}

func (s *site) makeEvent(name string) {
	s.T.Helper()
	_, err := s.ControlPlane.Client.CoreV1().Events(s.namespace).Create(s.T.Context(), &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: name}, InvolvedObject: corev1.ObjectReference{Namespace: s.namespace},
	}, metav1.CreateOptions{})
	s.Must(err)
}

// A watch is one that is open.
type watch struct {
	s    *site
	path string
	next func() (rig.Event, error)
}

// watch opens a watch that ends with the test, or after a minute.
func (s *site) watch(e *rig.Endpoint, path string) *watch {
	s.T.Helper()
	ctx, cancel := context.WithTimeout(s.T.Context(), time.Minute)
	s.T.Cleanup(cancel)
	resp, err := e.Get(ctx, rig.With(path, rig.WatchList), rig.JSON)
	s.Must(err)
	s.T.Cleanup(func() { resp.Body.Close() })
	if resp.StatusCode != http.StatusOK {
		s.T.Fatalf("watch %s = %d, want 200", path, resp.StatusCode)
	}
	return &watch{s, path, rig.Frames(resp.Body, resp.Header.Get("Content-Type"))}
}

// until waits for an event of an object.
func (w *watch) until(key string) {
	w.s.T.Helper()
	for {
		e, err := w.next()
		if err != nil || e.Type == "ERROR" {
			w.s.T.Errorf("watch %s ended before %s had come: %v, code %d", w.path, key, err, e.Code)
			return
		}
		if e.Meta.Key == key {
			return
		}
	}
}

// An authority signs clients' certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  string
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "another authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, key := a.sign(t, template)
	var err error
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.key, a.pem = key, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	return a
}

// sign makes a key and a certificate for it, the authority's own first.
func (a *authority) sign(t testing.TB, template *x509.Certificate) ([]byte, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	return der, key
}

// config is a client of the hub with a certificate of a member of system:nodes.
func (a *authority) config(s *site, name string, end time.Time) *rest.Config {
	s.T.Helper()
	der, key := a.sign(s.T, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name, Organization: []string{"system:nodes"}},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: end, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	raw, err := x509.MarshalECPrivateKey(key)
	s.Must(err)
	c := withCertificate(s.Node, "", "")
	c.CertData = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	c.KeyData = pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: raw})
	return c
}

// TestClientCAReload changes the file of the authorities whose clients are known,
// while it is in use: clients on connections that are open are judged by what it
// says now, and a file that is broken changes nothing.
//
// Guards: reload of clientCA stores what it has read, with no certificate verified
// yet; parseCertificates takes a file as a whole or not at all.
func TestClientCAReload(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	raw, err := os.ReadFile(s.ControlPlane.CAFile())
	s.Must(err)
	a, b := string(raw), newAuthority(t)
	file := filepath.Join(t.TempDir(), "client-ca.crt")
	replace := func(content string) {
		t.Helper()
		s.Must(os.WriteFile(file+".next", []byte(content), 0o600))
		s.Must(os.Rename(file+".next", file))
	}
	replace(a)
	s.start("--client-ca-file=" + file)
	hour := time.Now().Add(time.Hour)
	first, second, stranger := s.Through(s.Node), s.Through(b.config(s, rig.NodeUser, hour)), s.Through(b.config(s, "system:node:"+otherNode, hour))
	judge := func(when string, ofFirst, ofSecond, ofStranger int) {
		t.Helper()
		s.asks("client of the first, "+when, first, nodeItself, ofFirst)
		s.asks("client of the second, "+when, second, nodeItself, ofSecond)
		s.asks("another client of the second, "+when, stranger, nodeItself, ofStranger)
	}
	judge("which is alone", http.StatusOK, http.StatusUnauthorized, http.StatusUnauthorized)
	var success, failure float64
	for _, c := range []struct {
		when, content                 string
		good                          bool
		ofFirst, ofSecond, ofStranger int
	}{
		{"with half of the second", a + b.pem[:len(b.pem)/2], false, http.StatusOK, http.StatusUnauthorized, http.StatusUnauthorized},
		{"with the second", a + b.pem, true, http.StatusOK, http.StatusOK, http.StatusForbidden},
		{"with nothing", "", false, http.StatusOK, http.StatusOK, http.StatusForbidden},
		{"with half of the first behind the second", b.pem + a[:len(a)/2], false, http.StatusOK, http.StatusOK, http.StatusForbidden},
		{"with the second alone", b.pem, true, http.StatusUnauthorized, http.StatusOK, http.StatusForbidden},
	} {
		replace(c.content)
		if c.good {
			success++
		} else {
			failure++
		}
		s.Must(process.Poll(t.Context(), "the hub has looked at the file "+c.when, func(ctx context.Context) error {
			// It looks when somebody asks.
			if _, _, err := second.Fetch(ctx, nodeItself, rig.JSON); err != nil {
				return err
			}
			good, err := s.Hub.Metric(ctx, "edgehub_identity_client_ca_reloads_total", `result="success"`)
			bad, err2 := s.Hub.Metric(ctx, "edgehub_identity_client_ca_reloads_total", `result="error"`)
			if err == nil && err2 == nil && (good != success || bad != failure) {
				err = fmt.Errorf("it has taken %v and refused %v, want %v and %v", good, bad, success, failure)
			}
			return errors.Join(err, err2)
		}))
		judge(c.when, c.ofFirst, c.ofSecond, c.ofStranger)
	}
	s.Settle()
	s.Offline()
	judge("which is gone, offline", http.StatusUnauthorized, http.StatusOK, http.StatusForbidden)
}
