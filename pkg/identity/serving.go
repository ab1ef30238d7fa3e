// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"
)

const (
	servingFile = "serving.pem"
	// renewRetry is the time between two tries to renew.
	renewRetry = time.Minute
	// minGain is by how much a renewal must prolong: near the end of the CA
	// nothing is gained by one.
	minGain = 24 * time.Hour
)

// A ServingCert is the certificate that callers check edgehub by, signed by a CA
// of this node alone. Safe for concurrent use.
type ServingCert struct {
	dir   string
	names hostNames
	ca    *authority
	inUse atomic.Pointer[tls.Certificate]

	mu      sync.Mutex // guards tried and unsaved
	tried   time.Time
	unsaved error // why what is in use is not on the disk
}

// ServingCertificate returns the serving certificate of dir, which it makes with
// mode 0700 if need be. ca.crt there (mode 0644) is what clients are to trust,
// for 10 years; ca.key (0600) signs, serving.pem (0600) is the certificate of a
// year with its key. What is missing is made; serving.pem is made anew when
// hosts have changed, when it is damaged, and after two thirds of its life.
//
// hosts are DNS names and IP addresses; localhost, 127.0.0.1 and ::1 are always
// among them, unspecified addresses never.
//
// A CA that is there in part or damaged is an error that names the file, since
// clients would trust no new one. That serving.pem cannot be written is none:
// the certificate is then served from memory, and written later.
func ServingCertificate(dir string, hosts []string) (*ServingCert, error) {
	names, err := parseHosts(slices.Concat(loopback, hosts))
	if err != nil {
		return nil, err
	}
	if err := makeDir(dir); err != nil {
		return nil, err
	}
	ca, err := loadOrMakeAuthority(dir)
	if err != nil {
		return nil, err
	}
	s := &ServingCert{dir: dir, names: names, ca: ca}
	now := time.Now()
	if cert, err := s.load(); err == nil {
		s.inUse.Store(cert)
	}
	if s.due(now) {
		if err := s.renew(now); err != nil && s.inUse.Load() == nil {
			return nil, fmt.Errorf("serving certificate: %w", err)
		}
	}
	return s, nil
}

// GetCertificate is for the field of that name of a tls.Config. It renews the
// certificate in time; one that has expired and cannot be renewed is still
// returned, since no answer would be worse. It never returns an error.
func (s *ServingCert) GetCertificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	now := time.Now()
	// Whoever comes while another handshake renews gets what is in use.
	if s.mu.TryLock() {
		if s.due(now) || s.unsaved != nil {
			s.retry(loggerOf(hello), now)
		}
		s.mu.Unlock()
	}
	return s.inUse.Load(), nil
}

// Collector reports when the certificate ends, as
// edgehub_identity_serving_certificate_not_after_seconds{issuer="node"}. It is to be
// registered where clients get this certificate and no other: a SignedCert reports
// for its fallback, too.
func (s *ServingCert) Collector() prometheus.Collector {
	return presented(func() (*tls.Certificate, string) {
		cert, _ := s.GetCertificate(nil) // it never returns an error
		return cert, issuerNode
	})
}

// NotAfter is when the certificate in use ends.
func (s *ServingCert) NotAfter() time.Time { return s.inUse.Load().Leaf.NotAfter }

// CA is the certificate that clients have to trust, as PEM.
func (s *ServingCert) CA() []byte { return certPEM(s.ca.cert) }

// retry is called with mu held.
func (s *ServingCert) retry(logger klog.Logger, now time.Time) {
	if since := now.Sub(s.tried); since >= 0 && since < renewRetry {
		return
	}
	var err error
	if s.due(now) {
		err = s.renew(now)
	} else {
		s.tried = now
		s.unsaved = s.save(s.inUse.Load())
		err = s.unsaved
	}
	if err != nil {
		logger.Error(err, "Serving certificate was not renewed or not saved", "dir", s.dir, "notAfter", s.NotAfter())
		return
	}
	logger.Info("Serving certificate was renewed", "dir", s.dir, "notAfter", s.NotAfter())
}

func loggerOf(hello *tls.ClientHelloInfo) klog.Logger {
	if hello == nil || hello.Context() == nil { // not from a handshake
		return klog.Background()
	}
	return klog.FromContext(hello.Context())
}

// due says whether there is a better certificate to be had.
func (s *ServingCert) due(now time.Time) bool {
	cert := s.inUse.Load()
	if cert == nil {
		return true
	}
	end := cert.Leaf.NotAfter
	return end.Sub(now) < servingLife/3 && s.ca.end(now).Sub(end) >= minGain
}

// renew puts a new certificate to use, saved or not. The error of a certificate
// that could not be saved is kept: it is tried again.
func (s *ServingCert) renew(now time.Time) error {
	s.tried = now
	cert, err := s.ca.issue(s.names, now)
	if err != nil {
		return err
	}
	s.inUse.Store(cert)
	s.unsaved = s.save(cert)
	return s.unsaved
}

func (s *ServingCert) save(cert *tls.Certificate) error {
	return savePair(filepath.Join(s.dir, servingFile), cert)
}

// load returns the certificate on disk if it is whole, of this CA and for just
// these hosts; expired or not.
func (s *ServingCert) load() (*tls.Certificate, error) {
	cert, err := loadPair(filepath.Join(s.dir, servingFile))
	if err != nil {
		return nil, err
	}
	if err := cert.Leaf.CheckSignatureFrom(s.ca.cert); err != nil {
		return nil, err
	}
	if !s.names.equal(cert.Leaf.DNSNames, cert.Leaf.IPAddresses) {
		return nil, errors.New("it is for other hosts")
	}
	return cert, nil
}

// hostNames are the names of a certificate, sorted, each once.
type hostNames struct {
	dns []string
	ips []net.IP
}

// loopback are the hosts of every node.
var loopback = []string{"localhost", "127.0.0.1", "::1"}

// parseHosts takes DNS names and IP addresses, of which it leaves out those that
// are unspecified.
func parseHosts(hosts []string) (hostNames, error) {
	var names hostNames
	for _, host := range hosts {
		if addr, err := netip.ParseAddr(host); err == nil {
			if addr.Zone() != "" {
				return hostNames{}, fmt.Errorf("host %q has a zone, which a certificate cannot hold", host)
			}
			if !addr.IsUnspecified() {
				names.ips = append(names.ips, addr.Unmap().AsSlice())
			}
			continue
		}
		name := strings.ToLower(host)
		if len(validation.IsDNS1123Subdomain(name)) > 0 {
			return hostNames{}, fmt.Errorf("host %q is neither an IP address nor a DNS name", host)
		}
		names.dns = append(names.dns, name)
	}
	slices.Sort(names.dns)
	names.dns = slices.Compact(names.dns)
	slices.SortFunc(names.ips, compareIP)
	names.ips = slices.CompactFunc(names.ips, net.IP.Equal)
	return names, nil
}

func (n hostNames) equal(dns []string, ips []net.IP) bool {
	return slices.Equal(n.dns, dns) && slices.EqualFunc(n.ips, ips, net.IP.Equal)
}

// coveredBy returns nil if clients that ask for any of the names accept cert.
func (n hostNames) coveredBy(cert *x509.Certificate) error {
	var errs []error
	for _, name := range n.dns {
		errs = append(errs, cert.VerifyHostname(name))
	}
	for _, ip := range n.ips {
		errs = append(errs, cert.VerifyHostname(ip.String()))
	}
	return errors.Join(errs...)
}

func compareIP(a, b net.IP) int { return bytes.Compare(a.To16(), b.To16()) }
