// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"bytes"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"
)

// maxFileBytes is far above any bundle of certificates, so that a wrong path
// cannot fill the memory.
const maxFileBytes = 1 << 20

// errUnchanged says that the files are as they were when they were last read.
var errUnchanged = errors.New("files are unchanged")

// credentials is what the files hold; it is never modified.
type credentials struct {
	roots    *x509.CertPool
	cert     tls.Certificate
	node     *user.DefaultInfo
	notAfter time.Time
}

// files reads the CA, certificate and key. Methods must not run concurrently.
type files struct {
	ca, cert, key string

	seen [sha256.Size]byte // contents at the last load, good or not
	name string            // the node's, once known
}

// load reads the files. Contents that were read before, good or bad, give
// errUnchanged: a broken file is one error, not one a period. Contents decide,
// not names or times: kubelet replaces a symbolic link, others write in place.
func (f *files) load() (*credentials, error) {
	paths := []struct{ field, path string }{{"CAFile", f.ca}, {"CertFile", f.cert}, {"KeyFile", f.key}}
	contents := make([][]byte, len(paths))
	errs := make([]error, len(paths))
	sum := sha256.New()
	for i, p := range paths {
		contents[i], errs[i] = readFile(p.field, p.path)
		piece := sha256.Sum256(contents[i])
		if errs[i] != nil {
			piece = sha256.Sum256([]byte("error " + errs[i].Error()))
		}
		sum.Write(piece[:])
	}
	now := [sha256.Size]byte(sum.Sum(nil))
	if now == f.seen {
		return nil, errUnchanged
	}
	f.seen = now
	creds := &credentials{}
	if errs[0] == nil {
		creds.roots, errs[0] = parseRoots(f.ca, contents[0])
	}
	if errs[1] == nil && errs[2] == nil {
		errs[1] = creds.parseCertificate(f.cert, f.key, contents[1], contents[2])
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	if f.name != "" && creds.node.Name != f.name {
		return nil, fmt.Errorf("CertFile %s: is for %q, not for %q as before", f.cert, creds.node.Name, f.name)
	}
	f.name = creds.node.Name
	return creds, nil
}

func readFile(field, path string) ([]byte, error) {
	if path == "" {
		return nil, fmt.Errorf("%s: must be given", field)
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	defer file.Close()
	b, err := io.ReadAll(io.LimitReader(file, maxFileBytes+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", field, err)
	}
	if len(b) > maxFileBytes {
		return nil, fmt.Errorf("%s %s: is larger than %d bytes", field, path, maxFileBytes)
	}
	return b, nil
}

func parseRoots(path string, b []byte) (*x509.CertPool, error) {
	roots := x509.NewCertPool()
	begun := bytes.Count(b, []byte("-----BEGIN CERTIFICATE-----"))
	n := 0
	for {
		var block *pem.Block
		if block, b = pem.Decode(b); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			continue
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("CAFile %s: certificate %d: %w", path, n+1, err)
		}
		roots.AddCert(cert)
		n++
	}
	if n == 0 {
		return nil, fmt.Errorf("CAFile %s: has no PEM certificate", path)
	}
	if n != begun { // pem.Decode passes over what is damaged
		return nil, fmt.Errorf("CAFile %s: only %d of %d certificates are whole", path, n, begun)
	}
	return roots, nil
}

// parseCertificate accepts an expired certificate: without the link it still
// says who the node is, and with it the server will refuse it.
func (c *credentials) parseCertificate(path, keyPath string, cert, key []byte) error {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return fmt.Errorf("CertFile %s with KeyFile %s: %w", path, keyPath, err)
	}
	leaf := pair.Leaf
	if leaf.Subject.CommonName == "" {
		return fmt.Errorf("CertFile %s: has no common name", path)
	}
	if !slices.Contains(leaf.Subject.Organization, user.NodesGroup) {
		return fmt.Errorf("CertFile %s: %q is not a node: its organization is not %s", path, leaf.Subject.CommonName, user.NodesGroup)
	}
	c.cert, c.notAfter = pair, leaf.NotAfter
	c.node = &user.DefaultInfo{Name: leaf.Subject.CommonName, Groups: slices.Clone(leaf.Subject.Organization)}
	return nil
}
