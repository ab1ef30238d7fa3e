// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package webhook

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

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
)

// pair makes a certificate that has signed itself, and its key.
func pair(t *testing.T, name string) (certificate, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, DNSNames: []string{"localhost"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw})
}

func TestCertificateFiles(t *testing.T) {
	certificate, key := pair(t, "one")
	other, otherKey := pair(t, "two")
	c := &certificateFiles{dir: t.TempDir(), ready: make(chan struct{})}
	ready := func() bool {
		select {
		case <-c.ready:
			return true
		default:
			return false
		}
	}
	for _, tt := range []struct {
		what             string
		certificate, key []byte
		fails, ready     bool
		want             []byte
	}{
		{"nobody has made one", nil, nil, false, false, nil},
		{"half of one", certificate, nil, true, false, nil},
		{"halves of two", certificate, otherKey, true, false, nil},
		{"junk", []byte("x"), []byte("y"), true, false, nil},
		{"one", certificate, key, false, true, certificate},
		{"halves of two, later", other, key, true, true, certificate},
		{"emptied", nil, nil, false, true, certificate},
		{"another", other, otherKey, false, true, other},
	} {
		err := c.write(&corev1.Secret{Data: map[string][]byte{"tls.crt": tt.certificate, "tls.key": tt.key, "ca.key": []byte("not for files")}})
		if (err != nil) != tt.fails || ready() != tt.ready {
			t.Errorf("%s: write = %v, ready %v, want fails %v, ready %v", tt.what, err, ready(), tt.fails, tt.ready)
		}
		got, err := os.ReadFile(filepath.Join(c.dir, "tls.crt"))
		if d := cmp.Diff(string(tt.want), string(got)); d != "" || (err != nil) != (tt.want == nil) {
			t.Errorf("%s: tls.crt differs, %v (-want +got):\n%s", tt.what, err, d)
		}
	}
	entries, err := os.ReadDir(c.dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("%v in the directory, %v, want tls.crt and tls.key", entries, err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %v, %v, want 0600", e.Name(), info.Mode(), err)
		}
	}
}

func TestOnlyCallers(t *testing.T) {
	dir := t.TempDir()
	ca, caKey := pair(t, "apiserver")
	stranger, strangerKey := pair(t, "apiserver")
	file := filepath.Join(dir, "ca.crt")
	junk := filepath.Join(dir, "junk")
	for f, b := range map[string][]byte{file: ca, junk: []byte("x")} {
		if err := os.WriteFile(f, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	serving, servingKey := pair(t, "server")
	certificate, err := tls.X509KeyPair(serving, servingKey)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		what      string
		file      string
		names     []string
		cert, key []byte // the client's
		wanted    bool
	}{
		{"no file, no certificate", "", nil, nil, nil, true},
		{"no certificate", file, nil, nil, nil, false},
		{"of the authority", file, nil, ca, caKey, true},
		{"of another one of the same name", file, nil, stranger, strangerKey, false},
		{"with the name", file, []string{"x", "apiserver"}, ca, caKey, true},
		{"without the name", file, []string{"x"}, ca, caKey, false},
	} {
		only, err := onlyCallers(tt.file, tt.names)
		if err != nil {
			t.Fatal(err)
		}
		config := &tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}
		only(config)
		client := &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12}
		if tt.cert != nil {
			c, err := tls.X509KeyPair(tt.cert, tt.key)
			if err != nil {
				t.Fatal(err)
			}
			client.Certificates = []tls.Certificate{c}
		}
		near, far := net.Pipe()
		failed := make(chan error, 1)
		go func() { failed <- tls.Client(near, client).HandshakeContext(t.Context()); near.Close() }()
		err = tls.Server(far, config).HandshakeContext(t.Context())
		far.Close()
		<-failed
		if (err == nil) != tt.wanted {
			t.Errorf("%s: the server's handshake = %v, want accepted %v", tt.what, err, tt.wanted)
		}
	}
	for _, f := range []string{junk, filepath.Join(dir, "none")} {
		if _, err := onlyCallers(f, nil); err == nil {
			t.Errorf("onlyCallers(%s) = nil, want an error", filepath.Base(f))
		}
	}
}
