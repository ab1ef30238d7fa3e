// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/klog/v2"
)

const (
	maxCAFileBytes      = 1 << 20
	caCheckPeriod       = time.Second
	maxSeenCertificates = 256
	maxPeerCertificates = 8
	// expiredRecheck is how long a chain that is out of time is not looked at
	// again.
	expiredRecheck = time.Minute
)

// certificate judges the client certificate of req.
func (a *Authenticator) certificate(req *http.Request) (user.Info, string, error) {
	now := time.Now()
	peer := req.TLS.PeerCertificates
	node := a.node()
	own := sameIdentity(peer[0], node)
	authorities := a.ca.current(req.Context(), now)
	inTime, err := authorities.verify(peer, now, own)
	switch {
	case err != nil:
		return nil, "", fmt.Errorf("%w: client certificate: %w", ErrUnauthenticated, err)
	case inTime && own:
		return node, byCertificate, nil
	case inTime && peer[0].Subject.CommonName == "":
		return nil, "", fmt.Errorf("%w: the client certificate names nobody", ErrUnauthenticated)
	case inTime:
		return nil, "", ErrUseToken
	case own && !a.up():
		// A kubelet that gets 401 exits, and offline it cannot renew its
		// certificate. What it gets now is what it was allowed before.
		return node, byExpiredCertificate, nil
	}
	return nil, "", fmt.Errorf("%w: the client certificate has expired or is not yet valid", ErrUnauthenticated)
}

// sameIdentity says whether a certificate names the node: the same common name
// and the same set of organizations.
func sameIdentity(cert *x509.Certificate, node user.Info) bool {
	if node == nil || node.GetName() == "" || cert.Subject.CommonName != node.GetName() {
		return false
	}
	return slices.Equal(sortedSet(cert.Subject.Organization), sortedSet(node.GetGroups()))
}

func sortedSet(s []string) []string {
	return slices.Compact(slices.Sorted(slices.Values(s)))
}

// A clientCA follows the client CA file. Safe for concurrent use.
type clientCA struct {
	file    string
	metrics *metrics
	inUse   atomic.Pointer[authorities]

	mu      sync.Mutex // guards the fields below
	checked time.Time
	raw     []byte // what was last read, good or bad
	problem string // the last one reported
}

func newClientCA(file string, m *metrics) (*clientCA, error) {
	raw, err := readBounded(file, maxCAFileBytes)
	if err != nil {
		return nil, fmt.Errorf("client CA file: %w", err)
	}
	auth, err := parseAuthorities(raw)
	if err != nil {
		return nil, fmt.Errorf("client CA file %s: %w", file, err)
	}
	c := &clientCA{file: file, metrics: m, raw: raw, checked: time.Now()}
	c.inUse.Store(auth)
	return c, nil
}

// current returns the authorities in use. It looks at the file at most once a
// second; a file that cannot be used changes nothing.
func (c *clientCA) current(ctx context.Context, now time.Time) *authorities {
	// Whoever comes while another request reads the file goes on with what is in use.
	if c.mu.TryLock() {
		if d := now.Sub(c.checked); d >= caCheckPeriod || d < 0 {
			c.checked = now
			c.reload(ctx)
		}
		c.mu.Unlock()
	}
	return c.inUse.Load()
}

// reload compares contents, not times: a file written twice within one tick of
// the clock of its file system keeps size and time.
func (c *clientCA) reload(ctx context.Context) {
	raw, err := readBounded(c.file, maxCAFileBytes)
	if err != nil {
		c.raw = nil // whatever comes back is news
	} else {
		if bytes.Equal(raw, c.raw) {
			return
		}
		c.raw = raw
		var auth *authorities
		if auth, err = parseAuthorities(raw); err == nil {
			c.inUse.Store(auth)
			c.problem = ""
			c.metrics.caReloads.WithLabelValues("success").Inc()
			klog.FromContext(ctx).Info("Client CA file was reloaded", "file", c.file)
			return
		}
	}
	if err.Error() == c.problem {
		return
	}
	c.problem = err.Error()
	c.metrics.caReloads.WithLabelValues("error").Inc()
	klog.FromContext(ctx).Error(err, "Client CA file is not usable, the earlier certificates stay in use", "file", c.file)
}

func readBounded(file string, maxBytes int64) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxBytes+1))
	if err != nil {
		return nil, err
	}
	if int64(len(raw)) > maxBytes {
		return nil, fmt.Errorf("%s is larger than %d bytes", file, maxBytes)
	}
	return raw, nil
}

// authorities is one state of the client CA file, with the certificates already
// verified against it: a reload starts without any. Safe for concurrent use.
type authorities struct {
	pool *x509.CertPool
	seen *lru[[sha256.Size]byte, seenChain]
}

// A seenChain is the outcome of a verification, good in [from, until).
type seenChain struct {
	from, until time.Time
	inTime      bool
}

func parseAuthorities(raw []byte) (*authorities, error) {
	certs, err := parseCertificates(raw)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	for _, c := range certs {
		pool.AddCert(c)
	}
	return &authorities{pool: pool, seen: newLRU[[sha256.Size]byte, seenChain](maxSeenCertificates)}, nil
}

// parseCertificates reads all of a PEM file or nothing: one that is being
// written ends inside a block, and half a bundle would lock callers out.
func parseCertificates(raw []byte) ([]*x509.Certificate, error) {
	var certs []*x509.Certificate
	rest := raw
	for {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("a PEM block is %q, not CERTIFICATE", block.Type)
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, err
		}
		certs = append(certs, cert)
	}
	switch {
	case bytes.Contains(rest, []byte("-----BEGIN")):
		return nil, errors.New("it ends with an incomplete PEM block")
	case len(certs) == 0:
		return nil, errors.New("it holds no PEM certificate")
	}
	return certs, nil
}

// verify checks the chain of a peer: an error, or whether it is valid now
// (true) or would be but for the time (false). The second is found out only if
// asked for by evenExpired.
func (a *authorities) verify(peer []*x509.Certificate, now time.Time, evenExpired bool) (bool, error) {
	if len(peer) > maxPeerCertificates {
		return false, fmt.Errorf("%d certificates in one chain", len(peer))
	}
	key := chainHash(peer)
	if s, ok := a.seen.get(key); ok {
		if !now.Before(s.from) && now.Before(s.until) && (s.inTime || evenExpired) {
			return s.inTime, nil
		}
		a.seen.remove(key)
	}
	opts := x509.VerifyOptions{
		Roots:         a.pool,
		Intermediates: x509.NewCertPool(),
		CurrentTime:   now,
		KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	for _, c := range peer[1:] {
		opts.Intermediates.AddCert(c)
	}
	chains, err := peer[0].Verify(opts)
	if err == nil {
		from, until := window(chains)
		a.seen.put(key, seenChain{from: from, until: until, inTime: true})
		return true, nil
	}
	if !evenExpired || !validOnce(peer[0], opts) {
		return false, err
	}
	a.seen.put(key, seenChain{from: now.Round(0), until: now.Round(0).Add(expiredRecheck)})
	return false, nil
}

// validOnce says whether the chain was valid at the end or at the beginning of
// the certificate's life: the certificate may be out of time, or what signed it,
// or the clock of a node without a battery may be years behind.
func validOnce(leaf *x509.Certificate, opts x509.VerifyOptions) bool {
	for _, t := range []time.Time{leaf.NotAfter, leaf.NotBefore} {
		opts.CurrentTime = t
		if _, err := leaf.Verify(opts); err == nil {
			return true
		}
	}
	return false
}

// window is when the longest lasting of the chains is valid.
func window(chains [][]*x509.Certificate) (from, until time.Time) {
	for _, chain := range chains {
		f, u := chain[0].NotBefore, chain[0].NotAfter
		for _, c := range chain[1:] {
			if c.NotBefore.After(f) {
				f = c.NotBefore
			}
			if c.NotAfter.Before(u) {
				u = c.NotAfter
			}
		}
		if u.After(until) {
			from, until = f, u
		}
	}
	return from, until
}

func chainHash(peer []*x509.Certificate) (key [sha256.Size]byte) {
	h := sha256.New()
	for _, c := range peer {
		// DER carries its own length, so two chains never hash the same bytes.
		h.Write(c.Raw)
	}
	h.Sum(key[:0])
	return key
}
