// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
	"maps"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
	"github.com/google/go-cmp/cmp"
	"k8s.io/apiserver/pkg/authentication/user"
)

const testIssuer = "https://kubernetes.default.svc.cluster.local"

// A signer is a key of an issuer.
type testSigner struct {
	t   *testing.T
	key *ecdsa.PrivateKey
	id  string
}

func newTestSigner(t *testing.T, id string) testSigner {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return testSigner{t, key, id}
}

func (s testSigner) set(others ...testSigner) string {
	s.t.Helper()
	set := jose.JSONWebKeySet{}
	for _, o := range append([]testSigner{s}, others...) {
		set.Keys = append(set.Keys, jose.JSONWebKey{Key: &o.key.PublicKey, KeyID: o.id, Algorithm: "ES256", Use: "sig"})
	}
	raw, err := json.Marshal(set)
	if err != nil {
		s.t.Fatal(err)
	}
	return string(raw)
}

func (s testSigner) sign(claims map[string]any) string {
	s.t.Helper()
	signer, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: s.key, KeyID: s.id}}, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	token, err := jwt.Signed(signer).Claims(claims).Serialize()
	if err != nil {
		s.t.Fatal(err)
	}
	return token
}

// podClaims are those of a projected token.
func podClaims(changes map[string]any) map[string]any {
	now := time.Now()
	c := map[string]any{
		"iss": testIssuer, "aud": []string{testIssuer}, "sub": "system:serviceaccount:shop:till", "jti": "j-1",
		"iat": now.Unix(), "nbf": now.Unix(), "exp": now.Add(time.Hour).Unix(),
		"kubernetes.io": map[string]any{
			"namespace": "shop", "serviceaccount": map[string]any{"name": "till", "uid": "u-1"},
			"pod": map[string]any{"name": "till-0", "uid": "p-1"}, "node": map[string]any{"name": "edge-1", "uid": "n-1"},
		},
	}
	maps.Copy(c, changes)
	for k, v := range c {
		if v == nil {
			delete(c, k)
		}
	}
	return c
}

func private(changes map[string]any) map[string]any {
	p := podClaims(nil)["kubernetes.io"].(map[string]any)
	maps.Copy(p, changes)
	for k, v := range p {
		if v == nil {
			delete(p, k)
		}
	}
	return map[string]any{"kubernetes.io": p}
}

// issuerAnswers answers for the issuer; reviews are for others.
func issuerAnswers(set string, reviews roundTripper) roundTripper {
	return func(req *http.Request) (*http.Response, error) {
		switch req.URL.Path {
		case "/.well-known/openid-configuration":
			return answer(200, `{"issuer":"`+testIssuer+`","jwks_uri":"https://elsewhere.invalid/"}`), nil
		case "/openid/v1/jwks":
			return answer(200, set), nil
		}
		return reviews(req)
	}
}

func neverReviewed(*http.Request) (*http.Response, error) { return answer(500, "{}"), nil }

// withIssuer is a fixture that has fetched keys and then lost the link.
func withIssuer(t *testing.T, set string) *fixture {
	t.Helper()
	f := newFixture(t)
	f.cfg.PodOnNode = func(namespace, name, uid string) bool {
		return namespace == "shop" && name == "till-0" && uid == "p-1"
	}
	f.restart(t)
	f.answer(issuerAnswers(set, neverReviewed))
	if err := f.issuer.fetch(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.down.Store(true)
	return f
}

func TestUnknownTokenOffline(t *testing.T) {
	own, old, foreign := newTestSigner(t, "k1"), newTestSigner(t, "k0"), newTestSigner(t, "k1")
	rename := func(s testSigner, id string) testSigner { s.id = id; return s }
	f := withIssuer(t, own.set(old))
	hour := time.Hour
	at := func(d time.Duration) int64 { return time.Now().Add(d).Unix() }
	b64 := base64.RawURLEncoding.EncodeToString
	der, err := x509.MarshalPKIXPublicKey(&own.key.PublicKey)
	if err != nil {
		t.Fatal(err)
	}
	hmac, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.HS256, Key: jose.JSONWebKey{Key: pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: der}), KeyID: "k1"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	symmetric, err := jwt.Signed(hmac).Claims(podClaims(nil)).Serialize()
	if err != nil {
		t.Fatal(err)
	}
	payload, err := json.Marshal(podClaims(nil))
	if err != nil {
		t.Fatal(err)
	}
	good := own.sign(podClaims(nil))
	parts := strings.Split(good, ".")
	for _, tc := range []struct {
		name, token string
		want        error
	}{
		{"bound to a pod of this node", good, nil},
		{"signed with an older key", old.sign(podClaims(nil)), nil},
		{"bound to nothing", own.sign(podClaims(private(map[string]any{"pod": nil, "node": nil}))), nil},
		{"bound to this node", own.sign(podClaims(private(map[string]any{"pod": nil}))), nil},
		{"one audience of several", own.sign(podClaims(map[string]any{"aud": []string{"vault", testIssuer}})), nil},
		{"just issued, clocks differ", own.sign(podClaims(map[string]any{"nbf": at(5 * time.Second), "iat": at(5 * time.Second)})), nil},

		{"another signature", foreign.sign(podClaims(nil)), ErrUnauthenticated},
		{"another payload", parts[0] + "." + b64(payload[:len(payload)-1]) + "." + parts[2], ErrUnauthenticated},
		{"expired", own.sign(podClaims(map[string]any{"exp": at(-1 * time.Second)})), ErrUnauthenticated},
		{"long expired", own.sign(podClaims(map[string]any{"exp": at(-hour)})), ErrUnauthenticated},
		{"another audience", own.sign(podClaims(map[string]any{"aud": []string{"vault"}})), ErrUnauthenticated},
		{"no audience", own.sign(podClaims(map[string]any{"aud": nil})), ErrUnauthenticated},
		{"another subject", own.sign(podClaims(map[string]any{"sub": "system:serviceaccount:kube-system:admin"})), ErrUnauthenticated},
		{"a user's", own.sign(podClaims(map[string]any{"kubernetes.io": nil, "sub": "alice"})), ErrUnauthenticated},
		{"without the ServiceAccount's uid", own.sign(podClaims(private(map[string]any{"serviceaccount": map[string]any{"name": "till"}}))), ErrUnauthenticated},

		{"another issuer", own.sign(podClaims(map[string]any{"iss": "https://elsewhere.invalid"})), ErrUnavailable},
		{"not yet valid", own.sign(podClaims(map[string]any{"nbf": at(hour)})), ErrUnavailable},
		{"without an end", own.sign(podClaims(map[string]any{"exp": nil})), ErrUnavailable},
		{"without a beginning", own.sign(podClaims(map[string]any{"nbf": nil})), ErrUnavailable},
		{"a key that is not recorded", rename(own, "k9").sign(podClaims(nil)), ErrUnavailable},
		{"bound to a pod that is not here", own.sign(podClaims(private(map[string]any{"pod": map[string]any{"name": "till-0", "uid": "p-0"}}))), ErrUnavailable},
		{"bound to another node", own.sign(podClaims(private(map[string]any{"pod": nil, "node": map[string]any{"name": "edge-2"}}))), ErrUnavailable},
		{"bound to a Secret", own.sign(podClaims(private(map[string]any{"pod": nil, "secret": map[string]any{"name": "s", "uid": "s-1"}}))), ErrUnavailable},
		{"alg none", b64([]byte(`{"alg":"none","kid":"k1"}`)) + "." + b64(payload) + ".", ErrUnavailable},
		{"HMAC with the public key", symmetric, ErrUnavailable},
		{"junk", "junk", ErrUnavailable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			name := ""
			if tc.want == nil {
				name = "system:serviceaccount:shop:till"
			}
			f.want(t, withToken(tc.token), name, tc.want)
			if tc.want == nil {
				return
			}
			// What every error has in its chain is one of the two.
			_, err := f.Authenticate(withToken(tc.token))
			if errors.Is(err, ErrUnauthenticated) && errors.Is(err, ErrUnavailable) || strings.Contains(err.Error(), tc.token) {
				t.Errorf("Authenticate() = %v", err)
			}
		})
	}
}

// An unknown token is whose the API server would say, so that it is shown what that
// user was shown.
func TestUnknownTokenIsTheSameUser(t *testing.T) {
	own := newTestSigner(t, "k1")
	f := withIssuer(t, own.set())
	f.restart(t) // the keys are on record
	got, err := f.Authenticate(withToken(own.sign(podClaims(nil))))
	if err != nil {
		t.Fatal(err)
	}
	want := &user.DefaultInfo{
		Name: "system:serviceaccount:shop:till", UID: "u-1",
		Groups: []string{"system:serviceaccounts", "system:serviceaccounts:shop", "system:authenticated"},
		Extra: map[string][]string{
			"authentication.kubernetes.io/credential-id": {"JTI=j-1"},
			"authentication.kubernetes.io/pod-name":      {"till-0"}, "authentication.kubernetes.io/pod-uid": {"p-1"},
			"authentication.kubernetes.io/node-name": {"edge-1"}, "authentication.kubernetes.io/node-uid": {"n-1"},
		},
	}
	if diff := cmp.Diff(user.Info(want), got); diff != "" {
		t.Errorf("user (-want +got):\n%s", diff)
	}
}

func TestAudiences(t *testing.T) {
	own := newTestSigner(t, "k1")
	f := withIssuer(t, own.set())
	f.cfg.Audiences = []string{"api", "edge"}
	f.restart(t)
	f.want(t, withToken(own.sign(podClaims(map[string]any{"aud": []string{"edge"}}))), "system:serviceaccount:shop:till", nil)
	f.want(t, withToken(own.sign(podClaims(nil))), "", ErrUnauthenticated)
}

// A token that the API server has refused is not good by its signature later on, also
// after a restart; what it would refuse anyway costs no write.
func TestRefusedTokenOffline(t *testing.T) {
	own, foreign := newTestSigner(t, "k1"), newTestSigner(t, "k1")
	f := withIssuer(t, own.set())
	deleted, unseen := own.sign(podClaims(map[string]any{"jti": "a"})), own.sign(podClaims(map[string]any{"jti": "b"}))
	f.down.Store(false)
	f.answer(issuerAnswers(own.set(), func(*http.Request) (*http.Response, error) { return answer(401, "{}"), nil }))
	f.want(t, withToken(deleted), "", ErrUnauthenticated)
	writes := f.verdicts.stores
	for _, token := range []string{"junk", foreign.sign(podClaims(nil)), own.sign(podClaims(map[string]any{"exp": 1}))} {
		f.want(t, withToken(token), "", ErrUnauthenticated)
	}
	if f.verdicts.stores != writes {
		t.Errorf("%d writes for tokens that are no good", f.verdicts.stores-writes)
	}
	f.down.Store(true)
	f.restart(t)
	f.want(t, withToken(deleted), "", ErrUnauthenticated)
	f.want(t, withToken(unseen), "system:serviceaccount:shop:till", nil)
}

// Without keys, or with keys that are none, nobody can say.
func TestIssuerThatCannotBeRead(t *testing.T) {
	own := newTestSigner(t, "k1")
	privateKey, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: own.key, KeyID: "k1", Algorithm: "ES256"}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name string
		do   roundTripper
	}{
		{"forbidden", func(*http.Request) (*http.Response, error) { return answer(403, "{}"), nil }},
		{"no JSON", func(*http.Request) (*http.Response, error) { return answer(200, "<html>"), nil }},
		{"empty", func(*http.Request) (*http.Response, error) { return answer(200, "{}"), nil }},
		{"no keys", issuerAnswers(`{"keys":[]}`, neverReviewed)},
		{"a private key", issuerAnswers(string(privateKey), neverReviewed)},
		{"a symmetric key", issuerAnswers(`{"keys":[{"kty":"oct","kid":"k1","k":"c2VjcmV0"}]}`, neverReviewed)},
		{"large", issuerAnswers(`{"keys":[]`+strings.Repeat(" ", maxIssuerBytes)+`}`, neverReviewed)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFixture(t)
			f.answer(tc.do)
			if err := f.issuer.fetch(t.Context()); err == nil {
				t.Error("fetch() = nil, want an error")
			}
			f.down.Store(true)
			f.want(t, withToken(own.sign(podClaims(nil))), "", ErrUnavailable)
			if f.verdicts.stores != 0 {
				t.Error("something was recorded")
			}
		})
	}
}

// Keys are asked for as the node, when the link is up, again every ten minutes, and
// written down when they change.
func TestIssuerIsFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		own, next := newTestSigner(t, "k1"), newTestSigner(t, "k2")
		f := newFixture(t)
		var asked atomic.Int64
		serve := func(set string) {
			f.answer(issuerAnswers(set, neverReviewed))
			inner := *f.upstream.Load()
			f.answer(func(req *http.Request) (*http.Response, error) {
				asked.Add(1)
				if req.Header.Get("Authorization") != "" || req.Method != http.MethodGet {
					t.Errorf("%s with %v", req.Method, req.Header)
				}
				return inner(req)
			})
		}
		serve(own.set())
		f.down.Store(true)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- f.Run(ctx) }()
		wait := func(d time.Duration) { <-time.After(d); synctest.Wait() }
		wait(time.Hour)
		if asked.Load() != 0 {
			t.Errorf("asked %d times without a link", asked.Load())
		}
		f.down.Store(false)
		wait(issuerLook)
		if asked.Load() != 2 || f.verdicts.writes() != 1 {
			t.Errorf("asked %d times, %d writes, want 2 and 1", asked.Load(), f.verdicts.writes())
		}
		wait(3 * issuerPeriod)
		if asked.Load() != 8 || f.verdicts.writes() != 1 {
			t.Errorf("asked %d times, %d writes, want 8 and 1", asked.Load(), f.verdicts.writes())
		}
		serve(next.set(own))
		wait(issuerPeriod)
		if f.verdicts.writes() != 2 || len(f.issuer.current().Set.Keys) != 2 {
			t.Errorf("%d writes, %d keys, want 2 and 2", f.verdicts.writes(), len(f.issuer.current().Set.Keys))
		}
		f.answer(func(*http.Request) (*http.Response, error) { return answer(403, "{}"), nil })
		wait(issuerPeriod)
		if len(f.issuer.current().Set.Keys) != 2 {
			t.Error("an error has ended the keys")
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// A token that the API server refused before the keys were fetched (they are asked for when the
// program starts, clients come at the same moment; or the ClusterRole was bound later) stays refused.
func TestRefusedBeforeTheKeysWereKnown(t *testing.T) {
	own := newTestSigner(t, "k1")
	f := newFixture(t)
	token := own.sign(podClaims(private(map[string]any{"pod": nil, "node": nil})))
	f.answer(issuerAnswers(own.set(), func(*http.Request) (*http.Response, error) { return answer(401, "{}"), nil }))
	f.want(t, withToken(token), "", ErrUnauthenticated)
	if err := f.issuer.fetch(t.Context()); err != nil {
		t.Fatal(err)
	}
	f.down.Store(true)
	f.restart(t)
	f.want(t, withToken(token), "", ErrUnauthenticated)
}

// The same while this node's clock is still behind, as after a power cut: for the signature it does not matter.
func TestRefusedWhileTheClockIsBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		own := newTestSigner(t, "k1")
		f := withIssuer(t, own.set())
		f.down.Store(false)
		f.answer(issuerAnswers(own.set(), func(*http.Request) (*http.Response, error) { return answer(401, "{}"), nil }))
		nbf := time.Now().Add(clockLeeway + 2*time.Second)
		claims := private(map[string]any{"pod": nil, "node": nil})
		claims["nbf"], claims["iat"] = nbf.Unix(), nbf.Unix()
		token := own.sign(podClaims(claims))
		f.want(t, withToken(token), "", ErrUnauthenticated)
		<-time.After(4 * time.Second) // the clock is put right
		f.down.Store(true)
		f.restart(t)
		f.want(t, withToken(token), "", ErrUnauthenticated)
	})
}
