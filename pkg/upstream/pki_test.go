// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

const nodeName = "system:node:edge-1"

// An authority signs the certificates of a test.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{t: t}
	a.cert, a.key, a.pem, _ = issue(t, nil, &x509.Certificate{
		Subject: pkix.Name{CommonName: "test-ca"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign,
	})
	return a
}

// client returns a client certificate and its key, PEM.
func (a *authority) client(name string, expires time.Time, groups ...string) (cert, key []byte) {
	_, _, cert, key = issue(a.t, a, &x509.Certificate{
		Subject: pkix.Name{CommonName: name, Organization: groups}, NotAfter: expires,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	return cert, key
}

// server returns a serving certificate for 127.0.0.1.
func (a *authority) server() tls.Certificate {
	a.t.Helper()
	_, _, cert, key := issue(a.t, a, &x509.Certificate{
		Subject: pkix.Name{CommonName: "kube-apiserver"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		a.t.Fatal(err)
	}
	return pair
}

func issue(t *testing.T, by *authority, template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey, []byte, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		t.Fatal(err)
	}
	template.NotBefore = time.Now().Add(-48 * time.Hour)
	if template.NotAfter.IsZero() {
		template.NotAfter = time.Now().Add(time.Hour)
	}
	parent, parentKey := template, key
	if by != nil {
		parent, parentKey = by.cert, by.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, parentKey)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: keyDER})
}

// A keyDir is the directory of a node's certificate and CA files, laid out as
// kubelet does: certificate and key in one file behind a symbolic link.
type keyDir struct {
	t   *testing.T
	dir string
	n   int
}

func newKeyDir(t *testing.T, a *authority) *keyDir {
	t.Helper()
	k := &keyDir{t: t, dir: t.TempDir()}
	k.write("ca.crt", a.pem)
	cert, key := a.client(nodeName, time.Time{}, "system:nodes")
	k.link(append(cert, key...))
	return k
}

func (k *keyDir) path(name string) string { return filepath.Join(k.dir, name) }

func (k *keyDir) write(name string, b []byte) {
	k.t.Helper()
	if err := os.WriteFile(k.path(name), b, 0o600); err != nil {
		k.t.Fatal(err)
	}
}

// link makes kubelet-client-current.pem another file with these contents.
func (k *keyDir) link(b []byte) {
	k.t.Helper()
	k.n++
	name := "kubelet-client-" + string(rune('a'+k.n)) + ".pem"
	k.write(name, b)
	next := k.path("next")
	if err := os.Symlink(name, next); err != nil {
		k.t.Fatal(err)
	}
	if err := os.Rename(next, k.current()); err != nil {
		k.t.Fatal(err)
	}
}

func (k *keyDir) current() string { return k.path("kubelet-client-current.pem") }
