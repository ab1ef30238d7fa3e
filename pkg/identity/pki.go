// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"time"

	"github.com/edgehub/edgehub/pkg/datadir"
)

const (
	caLife      = 10 * 365 * 24 * time.Hour
	servingLife = 365 * 24 * time.Hour
	maxPEMBytes = 1 << 20
	pemCert     = "CERTIFICATE"
	pemKey      = "PRIVATE KEY"
	publicMode  = 0o644
	privateMode = 0o600
	dirMode     = 0o700
)

var (
	// validFrom begins the life of all that is made here. Clients check it by
	// the clock of the same node, and one without a battery is back in the past
	// after a power cut: in 1970, or when its image was built.
	validFrom = time.Unix(0, 0).UTC()
	// saneClock is a time that has passed. A clock before it is wrong, and must
	// not make an authority that ends before the clock is put right.
	saneClock = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
)

// An authority is the node-local CA.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// loadOrMakeAuthority returns the CA of dir, and makes one only if there is no
// trace of any: clients trust the one that they were given, and would trust no
// other.
func loadOrMakeAuthority(dir string) (*authority, error) {
	crtFile, keyFile := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key")
	rawCrt, crtErr := readBounded(crtFile, maxPEMBytes)
	rawKey, keyErr := readBounded(keyFile, maxPEMBytes)
	hasCrt, hasKey := !errors.Is(crtErr, os.ErrNotExist), !errors.Is(keyErr, os.ErrNotExist)
	switch {
	case hasCrt && crtErr != nil:
		return nil, fmt.Errorf("CA certificate: %w", crtErr)
	case hasKey && keyErr != nil:
		return nil, fmt.Errorf("CA key: %w", keyErr)
	case hasCrt && !hasKey:
		return nil, fmt.Errorf("CA certificate %s has no key: restore %s, or remove the certificate and give the new one to all clients", crtFile, keyFile)
	case !hasCrt && !hasKey:
		key, err := makeKey(keyFile)
		if err != nil {
			return nil, err
		}
		return makeAuthority(crtFile, key)
	}
	key, err := parseKey(rawKey)
	if err != nil {
		return nil, fmt.Errorf("CA key %s: %w", keyFile, err)
	}
	if err := restrict(keyFile, privateMode); err != nil {
		return nil, err
	}
	if !hasCrt {
		// A crash between the two files, or somebody removed the certificate:
		// with the same key and name, who trusts the earlier one trusts this.
		return makeAuthority(crtFile, key)
	}
	cert, err := parseAuthority(rawCrt)
	if err != nil {
		return nil, fmt.Errorf("CA certificate %s: %w", crtFile, err)
	}
	if !key.PublicKey.Equal(cert.PublicKey) {
		return nil, fmt.Errorf("CA certificate %s is not of the key %s", crtFile, keyFile)
	}
	return &authority{cert: cert, key: key}, nil
}

func parseAuthority(raw []byte) (*x509.Certificate, error) {
	certs, err := parseCertificates(raw)
	if err != nil {
		return nil, err
	}
	if len(certs) != 1 || !certs[0].IsCA {
		return nil, errors.New("it does not hold just one CA certificate")
	}
	return certs[0], nil
}

// makeKey writes the key before there is a certificate, so that a crash never
// leaves a certificate without its key.
func makeKey(file string) (*ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	raw, err := keyPEM(key)
	if err != nil {
		return nil, err
	}
	return key, datadir.WriteFile(file, raw, privateMode)
}

func makeAuthority(file string, key *ecdsa.PrivateKey) (*authority, error) {
	id, err := keyID(key)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	if now.Before(saneClock) {
		now = saneClock
	}
	template := &x509.Certificate{
		// Of the key, so that the name is the node's alone and never changes.
		Subject:               pkix.Name{CommonName: "edgehub node CA " + hex.EncodeToString(id[:8])},
		SubjectKeyId:          id,
		NotBefore:             validFrom,
		NotAfter:              now.Add(caLife),
		KeyUsage:              x509.KeyUsageCertSign,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, // it can vouch for no client
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	cert, err := sign(template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	if err := datadir.WriteFile(file, certPEM(cert), publicMode); err != nil {
		return nil, err
	}
	return &authority{cert: cert, key: key}, nil
}

// issue makes a serving certificate that ends no later than the CA does.
func (a *authority) issue(names hostNames, now time.Time) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: "edgehub"},
		DNSNames:              names.dns,
		IPAddresses:           names.ips,
		NotBefore:             validFrom,
		NotAfter:              a.end(now),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	leaf, err := sign(template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key, Leaf: leaf}, nil
}

// end is when a serving certificate made now ends.
func (a *authority) end(now time.Time) time.Time {
	end := now.Add(servingLife).UTC().Truncate(time.Second)
	if end.After(a.cert.NotAfter) {
		return a.cert.NotAfter
	}
	return end
}

func sign(template, parent *x509.Certificate, public *ecdsa.PublicKey, key *ecdsa.PrivateKey) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 126))
	if err != nil {
		return nil, err
	}
	template.SerialNumber = serial.Add(serial, big.NewInt(1))
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, key)
	if err != nil {
		return nil, err
	}
	return x509.ParseCertificate(der)
}

func keyID(key *ecdsa.PrivateKey) ([]byte, error) {
	der, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(der)
	return sum[:20], nil
}

func certPEM(cert *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: pemCert, Bytes: cert.Raw})
}

func keyPEM(key any) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: pemKey, Bytes: der}), nil
}

func parseKey(raw []byte) (*ecdsa.PrivateKey, error) {
	block, rest := pem.Decode(raw)
	if block == nil || block.Type != pemKey || len(bytes.TrimSpace(rest)) > 0 {
		return nil, fmt.Errorf("it does not hold just one PEM block %q", pemKey)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("it is a %T, not an ECDSA key", parsed)
	}
	return key, nil
}

// savePair writes a certificate, with what leads from it to its authority, and its
// key into one file, so that they never part.
func savePair(file string, cert *tls.Certificate) error {
	raw, err := keyPEM(cert.PrivateKey)
	if err != nil {
		return err
	}
	for _, der := range cert.Certificate {
		raw = append(raw, pem.EncodeToMemory(&pem.Block{Type: pemCert, Bytes: der})...)
	}
	return datadir.WriteFile(file, raw, privateMode)
}

// loadPair reads what savePair has written, if it is whole and of one key.
func loadPair(file string) (*tls.Certificate, error) {
	raw, err := readBounded(file, maxPEMBytes)
	if err != nil {
		return nil, err
	}
	if err := restrict(file, privateMode); err != nil {
		return nil, err
	}
	cert, err := tls.X509KeyPair(raw, raw)
	if err != nil {
		return nil, err
	}
	return &cert, nil
}

// makeDir makes dir, if need be, for its owner alone.
func makeDir(dir string) error {
	if err := os.MkdirAll(dir, dirMode); err != nil {
		return err
	}
	return restrict(dir, dirMode)
}

// restrict takes away what permissions a file or directory has beyond mode.
func restrict(path string, mode os.FileMode) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Mode().Perm()&^mode == 0 {
		return nil
	}
	return os.Chmod(path, info.Mode().Perm()&mode)
}
