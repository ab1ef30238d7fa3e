// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// lifetime is that of every certificate that nobody asks to end earlier.
const lifetime = 10 * 365 * 24 * time.Hour

// An authority signs certificates and keeps them as files NAME.crt and NAME.key
// of one folder.
type authority struct {
	dir  string
	name string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(dir, name string) (*authority, error) {
	key, err := newKey(filepath.Join(dir, name+".key"))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: "edgehub test " + name},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(lifetime),
		IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageCRLSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("certificate authority %s: %w", name, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("certificate authority %s: %w", name, err)
	}
	a := &authority{dir: dir, name: name, cert: cert, key: key}
	return a, writePEM(a.file(), "CERTIFICATE", der)
}

// file returns the path of the authority's own certificate.
func (a *authority) file() string { return filepath.Join(a.dir, a.name+".crt") }

// A leaf says what a certificate is for.
type leaf struct {
	cn       string
	orgs     []string
	hosts    []string // a server's names and addresses
	notAfter time.Time
}

// issue makes a key and a certificate for clients and servers alike.
func (a *authority) issue(name string, l leaf) (certFile, keyFile string, err error) {
	certFile, keyFile = filepath.Join(a.dir, name+".crt"), filepath.Join(a.dir, name+".key")
	key, err := newKey(keyFile)
	if err != nil {
		return "", "", err
	}
	if l.notAfter.IsZero() {
		l.notAfter = time.Now().Add(lifetime)
	}
	notBefore := time.Now().Add(-time.Hour)
	if l.notAfter.Before(notBefore) { // one that has expired long ago
		notBefore = l.notAfter.Add(-time.Hour)
	}
	template := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: l.cn, Organization: l.orgs},
		NotBefore: notBefore, NotAfter: l.notAfter, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	for _, h := range l.hosts {
		if ip := net.ParseIP(h); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, h)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return "", "", fmt.Errorf("certificate of %s: %w", l.cn, err)
	}
	return certFile, keyFile, writePEM(certFile, "CERTIFICATE", der)
}

// newKey makes a key and writes it to file.
func newKey(file string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, writePEM(file, "EC PRIVATE KEY", der)
}

func writePEM(file, kind string, der []byte) error {
	return os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}

// serial returns a random serial number.
func serial() *big.Int {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails
	b[0] &= 0x7f        // positive, and at most 20 bytes
	return new(big.Int).SetBytes(b)
}
