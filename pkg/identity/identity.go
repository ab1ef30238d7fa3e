// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package identity says who is calling edgehub: the node itself, by its client
// certificate, or anybody else, by a bearer token that the API server has
// vouched for. It also makes the serving certificate that callers check edgehub
// by. The proxy calls Authenticate once a request.
//
// Nothing here trusts the address a request comes from: every process of the
// node, and through probes every pod author, reaches loopback.
package identity

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apiserver/pkg/authentication/user"
)

var (
	// ErrUnauthenticated means that the request carries no credential, or one
	// that is malformed, unknown or expired: 401.
	ErrUnauthenticated = errors.New("no valid credential")
	// ErrUseToken means that the client certificate is valid, but not the
	// node's: edgehub has no key to act for it upstream: 403.
	ErrUseToken = errors.New("the client certificate is not the node's: use a bearer token")
	// ErrImpersonation means that a request with the node's certificate asks to
	// be somebody else: 403.
	ErrImpersonation = errors.New("impersonation needs a bearer token")
	// ErrUnavailable means that a token cannot be judged, because the upstream
	// does not answer or does not answer the question: 503, to be tried again.
	ErrUnavailable = errors.New("the credential cannot be verified now")
)

// defaultOfflineMaxAge is Config.OfflineMaxAge where it is zero.
const defaultOfflineMaxAge = 24 * time.Hour

// Verdicts keeps what the API server said about a token beyond a restart.
// Implementations must be safe for concurrent use and must encrypt what they
// keep on disk. Losing a verdict is allowed: its token is then unknown offline.
type Verdicts interface {
	// Load returns the verdict last stored under key. The result is not modified.
	Load(key string) ([]byte, bool)
	// Store keeps verdict under key, a hex SHA-256 of 64 bytes. An empty verdict
	// takes the place of one that no longer holds; Load then returns it. The verdict is the implementation's to keep.
	Store(key string, verdict []byte)
}

// Config is what an Authenticator works with. All fields without a default
// must be set.
type Config struct {
	// ClientCAFile holds the PEM certificates of the authorities whose client
	// certificates are accepted. Looked at again at most once a second, while
	// there are requests.
	ClientCAFile string
	// Node returns the identity of the node: name and groups as in its client
	// certificate. Nil means that it is not known yet. Called for each request
	// with a certificate; safe for concurrent use.
	Node func() user.Info
	// Up says whether the upstream is reachable. Safe for concurrent use.
	Up func() bool
	// Upstream carries the reviews. It must send a request that has an
	// Authorization header without any client certificate.
	Upstream http.RoundTripper
	// IsUnavailable says whether an error of Upstream means that the upstream
	// could not be reached.
	IsUnavailable func(error) bool
	// Verdicts survives a restart; nil: after one, all tokens are unknown offline.
	Verdicts Verdicts
	// Audiences are those that a ServiceAccount's token must be for to be accepted
	// offline without having been seen before; none: the issuer's own name, which is
	// the API server's default.
	Audiences []string
	// PodOnNode reports whether a pod is known on this node; nil: none is. Tokens bound
	// to a pod end with it. Safe for concurrent use.
	PodOnNode func(namespace, name, uid string) bool
	// OfflineMaxAge is how long after its last verification a token without an
	// exp claim is accepted offline; 0 means 24 h.
	OfflineMaxAge time.Duration
	// Registerer gets the metrics; nil means nobody.
	Registerer prometheus.Registerer
}

func (c Config) validate() error {
	var errs []error
	for _, f := range []struct {
		name    string
		missing bool
	}{
		{"ClientCAFile", c.ClientCAFile == ""},
		{"Node", c.Node == nil},
		{"Up", c.Up == nil},
		{"Upstream", c.Upstream == nil},
		{"IsUnavailable", c.IsUnavailable == nil},
	} {
		if f.missing {
			errs = append(errs, fmt.Errorf("identity: %s is not set", f.name))
		}
	}
	if c.OfflineMaxAge < 0 {
		errs = append(errs, fmt.Errorf("identity: OfflineMaxAge is negative: %v", c.OfflineMaxAge))
	}
	return errors.Join(errs...)
}

// noVerdicts is the Verdicts of a Config without any.
type noVerdicts struct{}

func (noVerdicts) Load(string) ([]byte, bool) { return nil, false }
func (noVerdicts) Store(string, []byte)       {}

// An Authenticator says who sent a request. Safe for concurrent use.
type Authenticator struct {
	node    func() user.Info
	up      func() bool
	ca      *clientCA
	tokens  *tokens
	issuer  *issuer
	metrics *metrics
}

// New returns an Authenticator. It reads the client CA file, and an error names
// that file or the field that is not set.
func New(cfg Config) (*Authenticator, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if cfg.OfflineMaxAge == 0 {
		cfg.OfflineMaxAge = defaultOfflineMaxAge
	}
	if cfg.Verdicts == nil {
		cfg.Verdicts = noVerdicts{}
	}
	if cfg.PodOnNode == nil {
		cfg.PodOnNode = func(string, string, string) bool { return false }
	}
	m := newMetrics(cfg.Registerer)
	ca, err := newClientCA(cfg.ClientCAFile, m)
	if err != nil {
		return nil, err
	}
	i := newIssuer(cfg, m)
	return &Authenticator{node: cfg.Node, up: cfg.Up, ca: ca, tokens: newTokens(cfg, i, m), issuer: i, metrics: m}, nil
}

// Run keeps the public keys of the tokens' issuer up to date until ctx ends; then it
// returns nil. Without it tokens that were not seen before are not accepted offline.
func (a *Authenticator) Run(ctx context.Context) error {
	a.issuer.run(ctx)
	return nil
}

// Authenticate returns who sent req, which it neither changes nor keeps. The
// listener must ask for client certificates with tls.RequestClientCert: they are
// verified here, so that an expired one does not end the handshake. The result
// may be shared between requests and must not be modified.
//
// Errors: ErrUnauthenticated, ErrUseToken, ErrImpersonation, ErrUnavailable, or
// that of a request whose context has ended.
func (a *Authenticator) Authenticate(req *http.Request) (user.Info, error) {
	u, how, err := a.authenticate(req)
	if err != nil {
		a.metrics.authentications.WithLabelValues(failure(err)).Inc()
		return nil, err
	}
	a.metrics.authentications.WithLabelValues(how).Inc()
	return u, nil
}

// authenticate prefers the token to the certificate, which is the other way
// round than kube-apiserver, where a verified certificate wins and the token is
// not even looked at. But a request with an Authorization header leaves here
// without the node's certificate, so for the API server it is the token's.
// To call it the node's would let one identity decide here (what is shared, what
// is recorded for whom) and another one there. Hence also no way back to the
// certificate where the token is bad: the request could only fail upstream.
func (a *Authenticator) authenticate(req *http.Request) (user.Info, string, error) {
	if values, ok := req.Header["Authorization"]; ok {
		token, err := bearerToken(values)
		if err != nil {
			return nil, "", err
		}
		return a.tokens.user(req.Context(), token)
	}
	if req.TLS == nil || len(req.TLS.PeerCertificates) == 0 {
		return nil, "", fmt.Errorf("%w: neither a client certificate nor a bearer token", ErrUnauthenticated)
	}
	u, how, err := a.certificate(req)
	if err != nil {
		return nil, "", err
	}
	// The node's credential is lent to the node for its own requests only: with
	// it, the API server would judge the impersonation by the node's rights.
	if impersonates(req.Header) {
		return nil, "", ErrImpersonation
	}
	return u, how, nil
}

func impersonates(h http.Header) bool {
	const prefix = "Impersonate-"
	for name := range h {
		if len(name) >= len(prefix) && strings.EqualFold(name[:len(prefix)], prefix) {
			return true
		}
	}
	return false
}

// failure is the result label of an error of Authenticate.
func failure(err error) string {
	switch {
	case errors.Is(err, ErrUnauthenticated):
		return "unauthenticated"
	case errors.Is(err, ErrUseToken):
		return "use_token"
	case errors.Is(err, ErrImpersonation):
		return "impersonation"
	case errors.Is(err, ErrUnavailable):
		return "unavailable"
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return "canceled"
	}
	return "error"
}
