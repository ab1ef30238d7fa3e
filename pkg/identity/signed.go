// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/klog/v2"
)

const (
	signedFile  = "signed.pem"
	requestFile = "signed-request.pem" // of the request under way, with its key

	minDelay     = time.Second
	maxPollDelay = time.Minute
	maxTryDelay  = 5 * time.Minute
	// recheckAfter bounds how long nothing is looked at. A timer does not see
	// that the clock of a node without a battery is put right.
	recheckAfter = 10 * time.Minute
)

// SignedConfig is what a SignedCert works with. All fields but Registerer must
// be set.
type SignedConfig struct {
	// Dir holds signed.pem, the certificate and its key, and while a request is
	// under way signed-request.pem. Made with mode 0700 if need be; the files have
	// 0600.
	Dir string
	// Hosts are the DNS names and IP addresses that clients reach edgehub by. The
	// certificate is for these and no others, since an approver may refuse what it
	// does not expect. Unspecified addresses are left out; one must remain.
	Hosts []string
	// Node returns the identity of the node; nil: it is not known yet. Safe for
	// concurrent use.
	Node func() user.Info
	// Upstream carries the requests. It must send one that has no Authorization
	// header, and whose context has Node's user, with the node's certificate.
	Upstream http.RoundTripper
	// Fallback returns the certificate that is served while there is no signed
	// one: GetCertificate of a ServingCert. It is also called with nil, and what it
	// returns must have its Leaf.
	Fallback func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	// Registerer gets the metrics; nil means nobody.
	Registerer prometheus.Registerer
}

func (c SignedConfig) validate() error {
	var errs []error
	for _, f := range []struct {
		name    string
		missing bool
	}{
		{"Dir", c.Dir == ""},
		{"Node", c.Node == nil},
		{"Upstream", c.Upstream == nil},
		{"Fallback", c.Fallback == nil},
	} {
		if f.missing {
			errs = append(errs, fmt.Errorf("identity: %s is not set", f.name))
		}
	}
	return errors.Join(errs...)
}

// A SignedCert is a serving certificate that the cluster signs, at the node's own
// request, as it signs kubelet's: by the signer kubernetes.io/kubelet-serving.
// Requests for that signer are approved by a person or an approver, not by
// Kubernetes itself. Safe for concurrent use.
type SignedCert struct {
	dir      string
	signer   *signer
	fallback func(*tls.ClientHelloInfo) (*tls.Certificate, error)
	metrics  *signedMetrics
	inUse    atomic.Pointer[tls.Certificate] // nil: none yet

	// The rest is Run's alone, once it runs.
	unread  error // why signed.pem could not be used
	unsaved bool  // what is in use is not on the disk
	renewAt time.Time
	pending *signingRequest // nil: none
	polls   backoff         // of pending
	tries   backoff
	problem string // the last one reported
}

// SignedCertificate returns the signed certificate of a node, with what an
// earlier life left in cfg.Dir. An error names the field or the host that is
// wrong, or the directory. That signed.pem is damaged is none: another one is
// requested.
func SignedCertificate(cfg SignedConfig) (*SignedCert, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	names, err := parseHosts(cfg.Hosts)
	if err != nil {
		return nil, err
	}
	if len(names.dns)+len(names.ips) == 0 {
		return nil, fmt.Errorf("identity: no host in %q that a certificate can be for", cfg.Hosts)
	}
	if err := makeDir(cfg.Dir); err != nil {
		return nil, err
	}
	s := &SignedCert{
		dir: cfg.Dir, signer: &signer{upstream: cfg.Upstream, node: cfg.Node, names: names}, fallback: cfg.Fallback,
		polls: backoff{max: maxPollDelay}, tries: backoff{max: maxTryDelay},
	}
	s.metrics = newSignedMetrics(cfg.Registerer, s.present)
	cert, err := loadPair(s.file(signedFile))
	switch {
	case err == nil:
		s.use(cert)
	case !errors.Is(err, os.ErrNotExist):
		s.unread = err
	}
	return s, nil
}

func (s *SignedCert) file(name string) string { return filepath.Join(s.dir, name) }

// GetCertificate is for the field of that name of a tls.Config. It returns the
// signed certificate, also one that has expired or does not fit any more, since
// no answer would be worse; while there is none, the fallback's.
func (s *SignedCert) GetCertificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	if cert := s.signed(); cert != nil {
		return cert, nil
	}
	return s.fallback(hello)
}

// signed returns no certificate of the future: where the clock was lost no client
// accepts one, but the fallback's has been valid since 1970.
func (s *SignedCert) signed() *tls.Certificate {
	if cert := s.inUse.Load(); cert != nil && !time.Now().Before(cert.Leaf.NotBefore) {
		return cert
	}
	return nil
}

func (s *SignedCert) present() (*tls.Certificate, string) {
	if cert := s.signed(); cert != nil {
		return cert, issuerCluster
	}
	cert, err := s.fallback(nil)
	if err != nil {
		return nil, ""
	}
	return cert, issuerNode
}

// Run requests a certificate when there is none, when the one there is does not
// cover the hosts or is another node's, and when 70 to 90 % of its life have
// passed. It returns nil when ctx ends. Failures are logged, counted, and followed
// by another try, after 1 s at first and about 5 min at last; while the link is
// down there are only those.
//
// A request is waited for as long as the API server keeps it, which is a day if
// nobody decides: where people approve, a new one every few minutes would be no
// easier for them. It survives a restart, since its key is on the disk; a new
// request has a new key. Run must be called once.
func (s *SignedCert) Run(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	if s.unread != nil {
		logger.Error(s.unread, "Signed serving certificate on disk is not usable, another one will be requested", "file", s.file(signedFile))
	}
	if err := s.resume(); err != nil {
		logger.Error(err, "Request for a serving certificate on disk is not usable, another one will be made", "file", s.file(requestFile))
	}
	// Not at once: the link is hardly up when the program starts.
	for delay := s.tries.next(); pause(ctx, delay); {
		delay = s.step(ctx)
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// step does what is to be done now, and returns how long there is nothing more.
func (s *SignedCert) step(ctx context.Context) time.Duration {
	if s.unsaved {
		s.save(ctx)
	}
	if s.pending == nil {
		if d := s.untilDue(time.Now()); d > 0 {
			return min(d, recheckAfter)
		}
		if err := s.request(ctx); err != nil {
			s.failed(ctx, err)
			return s.tries.next()
		}
		s.polls.reset()
		return s.polls.next()
	}
	cert, err := s.signer.collect(ctx, s.pending)
	switch {
	case err == nil:
		s.issued(ctx, cert)
		s.tries.reset()
		return recheckAfter
	case errors.Is(err, errWaiting):
		return s.polls.next()
	case errors.Is(err, errDenied), errors.Is(err, errFailed), errors.Is(err, errInvalid):
		s.failed(ctx, err)
		s.forget(ctx)
		return s.tries.next()
	}
	s.failed(ctx, err) // to ask: the request is still there
	return s.polls.next()
}

func (s *SignedCert) request(ctx context.Context) error {
	r, err := s.signer.request(ctx)
	if err != nil {
		return err
	}
	s.pending = r
	logger := klog.FromContext(ctx)
	logger.Info("Serving certificate was requested, which somebody must approve", "csr", r.name)
	if err := r.save(s.file(requestFile)); err != nil {
		logger.Error(err, "Request for a serving certificate was not saved, it will not survive a restart", "csr", r.name)
	}
	return nil
}

// failed tells a problem once, as long as it does not change: a link may be down
// for days.
func (s *SignedCert) failed(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	s.metrics.requests.WithLabelValues(resultOf(err)).Inc()
	if err.Error() == s.problem {
		return
	}
	s.problem = err.Error()
	logger := klog.FromContext(ctx)
	if s.pending != nil {
		logger = klog.LoggerWithValues(logger, "csr", s.pending.name)
	}
	logger.Error(err, "Serving certificate could not be had from the cluster, will try again")
}

func (s *SignedCert) issued(ctx context.Context, cert *tls.Certificate) {
	s.metrics.requests.WithLabelValues(resultOf(nil)).Inc()
	klog.FromContext(ctx).Info("Serving certificate was issued", "csr", s.pending.name, "notAfter", cert.Leaf.NotAfter)
	s.problem = ""
	s.use(cert)
	s.save(ctx)
	s.forget(ctx)
}

// use makes new handshakes get cert; connections that are there never notice.
func (s *SignedCert) use(cert *tls.Certificate) {
	life := cert.Leaf.NotAfter.Sub(cert.Leaf.NotBefore)
	// With jitter, since the nodes of a site were set up together.
	s.renewAt = cert.Leaf.NotBefore.Add(time.Duration(float64(life) * (0.7 + 0.2*mathrand.Float64())))
	s.inUse.Store(cert)
}

// untilDue is 0 when another certificate is wanted.
func (s *SignedCert) untilDue(now time.Time) time.Duration {
	cert := s.inUse.Load()
	if cert == nil || s.signer.fits(cert.Leaf) != nil {
		return 0
	}
	return max(0, s.renewAt.Sub(now))
}

func (s *SignedCert) save(ctx context.Context) {
	err := savePair(s.file(signedFile), s.inUse.Load())
	s.unsaved = err != nil
	if err != nil {
		klog.FromContext(ctx).Error(err, "Signed serving certificate was not saved, will try again", "file", s.file(signedFile))
	}
}

// resume goes on with the request of an earlier life, if it is still wanted.
func (s *SignedCert) resume() error {
	file := s.file(requestFile)
	raw, err := readBounded(file, maxPEMBytes)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err == nil && s.untilDue(time.Now()) == 0 {
		s.pending, err = s.signer.parse(raw)
	}
	if s.pending == nil {
		err = errors.Join(err, os.Remove(file))
	}
	return err
}

func (s *SignedCert) forget(ctx context.Context) {
	s.pending = nil
	if err := os.Remove(s.file(requestFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		klog.FromContext(ctx).Error(err, "Request for a serving certificate was not removed", "file", s.file(requestFile))
	}
}

// A backoff is a delay that doubles, with jitter around it.
type backoff struct{ last, max time.Duration }

func (b *backoff) reset() { b.last = 0 }

func (b *backoff) next() time.Duration {
	b.last = min(max(2*b.last, minDelay), b.max)
	return b.last/2 + mathrand.N(b.last)
}

// Who signed the certificate that clients are shown: values of the issuer label.
const (
	issuerNode    = "node"
	issuerCluster = "cluster"
)

type signedMetrics struct {
	requests *prometheus.CounterVec
}

func newSignedMetrics(reg prometheus.Registerer, now presented) *signedMetrics {
	m := &signedMetrics{requests: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "edgehub_identity_serving_certificate_requests_total",
		Help: "Certificate signing requests by what became of them; invalid: what was issued cannot be used, error: the API server could not be asked, which does not end a request.",
	}, []string{"result"})}
	for _, err := range []error{nil, errDenied, errFailed, errInvalid, errors.ErrUnsupported} {
		m.requests.WithLabelValues(resultOf(err))
	}
	if reg != nil {
		reg.MustRegister(m.requests, now)
	}
	return m
}

func resultOf(err error) string {
	switch {
	case err == nil:
		return "issued"
	case errors.Is(err, errDenied):
		return "denied"
	case errors.Is(err, errFailed):
		return "failed"
	case errors.Is(err, errInvalid):
		return "invalid"
	}
	return "error"
}

// presented is a collector of when the certificate that clients are shown ends,
// and who issued it.
type presented func() (cert *tls.Certificate, issuer string)

var presentedDesc = prometheus.NewDesc("edgehub_identity_serving_certificate_not_after_seconds",
	"When the certificate that clients are shown ends, in seconds since 1970, by who issued it: node (the CA of this node) or cluster.", []string{"issuer"}, nil)

// Describe implements prometheus.Collector.
func (presented) Describe(ch chan<- *prometheus.Desc) { ch <- presentedDesc }

// Collect implements prometheus.Collector.
func (p presented) Collect(ch chan<- prometheus.Metric) {
	if cert, issuer := p(); cert != nil {
		ch <- prometheus.MustNewConstMetric(presentedDesc, prometheus.GaugeValue, float64(cert.Leaf.NotAfter.Unix()), issuer)
	}
}
