// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/klog/v2"
)

const (
	// issuerPeriod is how often the keys are asked for while the link is up, and
	// issuerLook how often it is looked whether that is due.
	issuerPeriod   = 10 * time.Minute
	issuerLook     = 5 * time.Second
	maxIssuerBytes = 1 << 20
	maxIssuerKeys  = 64
	// clockLeeway is by how much this node's clock may differ from the issuer's.
	clockLeeway = 10 * time.Second
	// clockDoubt is by how much a clock may be wrong before a token that has expired by it
	// is not remembered as refused.
	clockDoubt = 24 * time.Hour
	// issuerRetry is the least time between fetches out of turn.
	issuerRetry = time.Minute
)

// issuerAlgorithms are those that an API server signs with, or an external signer
// for it. None of them is symmetric: a public key is no secret.
var issuerAlgorithms = []jose.SignatureAlgorithm{
	jose.RS256, jose.RS384, jose.RS512, jose.PS256, jose.PS384, jose.PS512, jose.ES256, jose.ES384, jose.ES512,
}

// issuerRecord is where the keys are among the verdicts: no token has this hash.
var issuerRecord = func() string {
	sum := sha256.Sum256([]byte("edgehub: the issuer's keys"))
	return hex.EncodeToString(sum[:])
}()

var (
	errNoIssuer = errors.New("the issuer's keys are not recorded")
	errNoKey    = errors.New("none of the recorded keys of the issuer is the token's")
	errNotBound = errors.New("what the token is bound to is not known on this node")
)

// issuerKeys is what the API server says of who signs its tokens.
type issuerKeys struct {
	Issuer string             `json:"issuer"`
	Set    jose.JSONWebKeySet `json:"set"`
}

// An issuer knows the public keys by which ServiceAccounts' tokens can be verified
// while nobody can be asked about them. Safe for concurrent use.
type issuer struct {
	upstream  http.RoundTripper
	up        func() bool
	node      func() user.Info
	verdicts  Verdicts
	audiences []string // accepted; empty: the issuer alone, as at the API server
	podOnNode func(namespace, name, uid string) bool
	metrics   *metrics

	mu     sync.Mutex  // guards what follows
	keys   *issuerKeys // nil: not known
	loaded bool        // from the record
	tried  time.Time   // to fetch them out of turn
}

func newIssuer(cfg Config, m *metrics) *issuer {
	return &issuer{
		upstream: cfg.Upstream, up: cfg.Up, node: cfg.Node, verdicts: cfg.Verdicts,
		audiences: cfg.Audiences, podOnNode: cfg.PodOnNode, metrics: m,
	}
}

// current are the keys that were fetched last, in this life or an earlier one.
func (i *issuer) current() *issuerKeys {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.keys == nil && !i.loaded {
		i.loaded = true
		if raw, ok := i.verdicts.Load(issuerRecord); ok {
			i.keys, _ = parseIssuer(raw) // what does not parse is fetched again
		}
	}
	return i.keys
}

func parseIssuer(raw []byte) (*issuerKeys, error) {
	var k issuerKeys
	if err := json.Unmarshal(raw, &k); err != nil {
		return nil, err
	}
	if err := k.check(); err != nil {
		return nil, err
	}
	return &k, nil
}

func (k *issuerKeys) check() error {
	if k.Issuer == "" || len(k.Set.Keys) == 0 || len(k.Set.Keys) > maxIssuerKeys {
		return fmt.Errorf("issuer %q with %d keys", k.Issuer, len(k.Set.Keys))
	}
	for _, key := range k.Set.Keys {
		if !key.Valid() || !key.IsPublic() {
			return fmt.Errorf("key %q is not a public key", key.KeyID)
		}
	}
	return nil
}

// run fetches the keys while the link is up, until ctx ends.
func (i *issuer) run(ctx context.Context) {
	logger := klog.FromContext(ctx)
	ticker := time.NewTicker(issuerLook)
	defer ticker.Stop()
	var due time.Time
	problem := ""
	for {
		if now := time.Now(); i.up() && (!now.Before(due) || due.Sub(now) > 2*issuerPeriod) {
			due = now.Add(issuerPeriod)
			err := i.fetch(ctx)
			switch {
			case ctx.Err() != nil:
				return
			case err == nil:
				problem = ""
				i.metrics.issuerFetches.WithLabelValues("success").Inc()
			default:
				i.metrics.issuerFetches.WithLabelValues("error").Inc()
				if text := err.Error(); text != problem {
					problem = text
					logger.Info("The issuer's keys cannot be read; offline, tokens that were not seen before are not accepted. The node needs the ClusterRole system:service-account-issuer-discovery", "reason", text)
				}
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// fetch asks the API server, as the node.
func (i *issuer) fetch(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	var k issuerKeys
	if err := i.get(ctx, "/.well-known/openid-configuration", &k); err != nil {
		return err
	}
	if err := i.get(ctx, "/openid/v1/jwks", &k.Set); err != nil {
		return err
	}
	if err := k.check(); err != nil {
		return err
	}
	raw, err := json.Marshal(k)
	if err != nil {
		return err
	}
	if old, ok := i.verdicts.Load(issuerRecord); !ok || string(old) != string(raw) {
		i.verdicts.Store(issuerRecord, raw)
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	i.keys, i.loaded = &k, true
	return nil
}

func (i *issuer) get(ctx context.Context, path string, into any) error {
	ctx = request.WithRequestInfo(request.WithUser(ctx, i.node()), &request.RequestInfo{Verb: "get", Path: path})
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://upstream.invalid"+path, nil)
	if err != nil {
		return err
	}
	req.Host = "" // that of the URL, once the upstream has filled it in
	req.Header.Set("Accept", "application/jwk-set+json, application/json")
	req.Header.Set("User-Agent", "edgehub")
	resp, err := i.upstream.RoundTrip(req)
	if err != nil {
		return fmt.Errorf("get %s: %w", path, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxIssuerBytes+1))
	switch {
	case err != nil:
		return fmt.Errorf("get %s: %w", path, err)
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("get %s: status %d", path, resp.StatusCode)
	case len(body) > maxIssuerBytes:
		return fmt.Errorf("get %s: more than %d bytes", path, maxIssuerBytes)
	}
	if err := json.Unmarshal(body, into); err != nil {
		return fmt.Errorf("get %s: %w", path, err)
	}
	return nil
}

// privateClaims are those of kube-apiserver's pkg/serviceaccount/claims.go.
type privateClaims struct {
	Kubernetes struct {
		Namespace string `json:"namespace"`
		Svcacct   ref    `json:"serviceaccount"`
		Pod       *ref   `json:"pod"`
		Secret    *ref   `json:"secret"`
		Node      *ref   `json:"node"`
	} `json:"kubernetes.io"`
}

type ref struct {
	Name string `json:"name"`
	UID  string `json:"uid"`
}

// signed reports whether the issuer has signed a token that, by whatever clock, may be
// good now or later. Where the keys are not known yet they are fetched for that, once a
// minute at most.
func (i *issuer) signed(ctx context.Context, token string) bool {
	if _, err := jwt.ParseSigned(token, issuerAlgorithms); err != nil {
		return false
	}
	now := time.Now()
	if i.current() == nil && i.mayFetch(now) {
		_ = i.fetch(ctx) // or run will
	}
	public, _, err := i.claims(token)
	return err == nil && public.Expiry != nil && now.Sub(public.Expiry.Time()) < clockDoubt
}

// mayFetch reports whether another fetch out of turn is due.
func (i *issuer) mayFetch(now time.Time) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if since := now.Sub(i.tried); since >= 0 && since < issuerRetry {
		return false
	}
	i.tried = now
	return true
}

// verify checks signature, issuer, audience and times of a ServiceAccount's token.
// ErrUnauthenticated: it is no good. errNoIssuer, errNoKey: nobody can say.
func (i *issuer) verify(token string, now time.Time) (*jwt.Claims, *privateClaims, error) {
	public, private, err := i.claims(token)
	if err != nil {
		return nil, nil, err
	}
	keys := i.current()
	audiences := i.audiences
	if len(audiences) == 0 {
		audiences = []string{keys.Issuer}
	}
	expected := jwt.Expected{Issuer: keys.Issuer, AnyAudience: audiences, Time: now}
	switch err := public.ValidateWithLeeway(expected, clockLeeway); {
	case public.Expiry == nil || public.NotBefore == nil:
		return nil, nil, errors.New("the token has no end or no beginning")
	case errors.Is(err, jwt.ErrNotValidYet), errors.Is(err, jwt.ErrIssuedInTheFuture):
		// More likely it is this node's clock that is wrong: it may be asked again.
		return nil, nil, err
	case errors.Is(err, jwt.ErrInvalidIssuer):
		return nil, nil, err // the API server may accept others beside the one it names
	case err != nil:
		return nil, nil, fmt.Errorf("%w: %w", ErrUnauthenticated, err)
	case !now.Before(public.Expiry.Time()):
		return nil, nil, fmt.Errorf("%w: the token has expired", ErrUnauthenticated)
	}
	return public, private, nil
}

// claims are what a token says, if one of the recorded keys has signed it.
func (i *issuer) claims(token string) (*jwt.Claims, *privateClaims, error) {
	keys := i.current()
	if keys == nil {
		return nil, nil, errNoIssuer
	}
	parsed, err := jwt.ParseSigned(token, issuerAlgorithms)
	if err != nil {
		return nil, nil, errors.New("the token is no signed JWT") // the text of the error may hold parts of it
	}
	matching := keys.Set.Key(parsed.Headers[0].KeyID)
	if len(matching) == 0 {
		return nil, nil, errNoKey
	}
	var (
		public  jwt.Claims
		private privateClaims
	)
	if !slices.ContainsFunc(matching, func(k jose.JSONWebKey) bool { return parsed.Claims(k.Key, &public, &private) == nil }) {
		return nil, nil, fmt.Errorf("%w: the token's signature is wrong", ErrUnauthenticated)
	}
	return &public, &private, nil
}

// user says whose an unknown token is while nobody can be asked: as the API server
// would, apart from what only its database knows. A token bound to a pod is good for
// as long as the pod is known on this node.
func (i *issuer) user(token string, now time.Time) (*user.DefaultInfo, error) {
	public, private, err := i.verify(token, now)
	if err != nil {
		return nil, err
	}
	k := &private.Kubernetes
	sa := &serviceaccount.ServiceAccountInfo{Namespace: k.Namespace, Name: k.Svcacct.Name, UID: k.Svcacct.UID}
	if k.Namespace == "" || sa.Name == "" || sa.UID == "" || public.Subject != serviceaccount.MakeUsername(sa.Namespace, sa.Name) {
		return nil, fmt.Errorf("%w: the token is not of a ServiceAccount", ErrUnauthenticated)
	}
	switch {
	case k.Secret != nil:
		return nil, errNotBound
	case k.Pod != nil:
		if !i.podOnNode(k.Namespace, k.Pod.Name, k.Pod.UID) {
			return nil, errNotBound
		}
		sa.PodName, sa.PodUID = k.Pod.Name, k.Pod.UID
	case k.Node != nil && nodeUserPrefix+k.Node.Name != i.node().GetName():
		return nil, errNotBound
	}
	if k.Node != nil {
		sa.NodeName, sa.NodeUID = k.Node.Name, k.Node.UID
	}
	if public.ID != "" {
		sa.CredentialID = "JTI=" + public.ID
	}
	u := sa.UserInfo().(*user.DefaultInfo) // which it has always been
	u.Groups = append(u.Groups, user.AllAuthenticated)
	return u, nil
}

const nodeUserPrefix = "system:node:"
