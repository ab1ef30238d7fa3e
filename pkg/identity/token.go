// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sync/singleflight"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/klog/v2"
)

const (
	acceptedFor = 2 * time.Minute  // how long an answer of the API server is good
	rejectedFor = 10 * time.Second // how long a 401 is

	maxTokenBytes = 64 << 10
	maxAccepted   = 4096 // tokens
	maxRejected   = 1024 // tokens; apart, so that junk does not push out what is good
	// maxReviews bounds the reviews under way, since anybody on the node can
	// make up tokens.
	maxReviews = 64
	// storedPart of OfflineMaxAge must pass before a verdict is stored again
	// only because it was verified again.
	storedPart = 24

	lastExp = 253402300799 // the end of the year 9999
)

// bearerToken returns the token of the Authorization values of one request.
func bearerToken(values []string) (string, error) {
	if len(values) != 1 {
		return "", fmt.Errorf("%w: %d Authorization headers", ErrUnauthenticated, len(values))
	}
	scheme, token, _ := strings.Cut(values[0], " ")
	if !strings.EqualFold(scheme, "Bearer") || !validToken(token) {
		return "", fmt.Errorf("%w: malformed Authorization header", ErrUnauthenticated)
	}
	return token, nil
}

// validToken is wider than the b64token of RFC 6750, since static and webhook
// tokens have other characters in them. Blanks and commas never: with one, the
// next hop might see another token, or two.
func validToken(token string) bool {
	if token == "" || len(token) > maxTokenBytes {
		return false
	}
	for i := range len(token) {
		if c := token[i]; c <= ' ' || c >= 0x7f || c == ',' || c == '"' || c == '\\' {
			return false
		}
	}
	return true
}

// A verdict is what the API server said about a token, and when.
type verdict struct {
	user     *user.DefaultInfo
	exp      int64     // Unix seconds, of the token; 0: it has none
	verified time.Time // by the API server
}

// storedVerdict is a verdict on disk.
type storedVerdict struct {
	Name     string              `json:"name"`
	UID      string              `json:"uid,omitempty"`
	Groups   []string            `json:"groups,omitempty"`
	Extra    map[string][]string `json:"extra,omitempty"`
	Exp      int64               `json:"exp,omitempty"`
	Verified int64               `json:"verified"`
}

// fresh says whether v is good without asking again.
func (v verdict) fresh(now time.Time) bool {
	age := now.Sub(v.verified)
	return age >= 0 && age < acceptedFor && (v.exp == 0 || now.Unix() < v.exp)
}

// offline returns nil if v is good while nobody can be asked.
func (v verdict) offline(now time.Time, maxAge time.Duration) error {
	if v.exp != 0 {
		if now.Unix() >= v.exp {
			return fmt.Errorf("%w: the token has expired", ErrUnauthenticated)
		}
		return nil
	}
	// A negative age passes: after a power cut a clock without a battery starts
	// in the past, and the pods have to come back all the same.
	if now.Sub(v.verified) > maxAge {
		return fmt.Errorf("%w: the token was last verified more than %v ago", ErrUnavailable, maxAge)
	}
	return nil
}

// tokens judges bearer tokens. It keeps hashes, never a token. Safe for
// concurrent use.
type tokens struct {
	review   func(ctx context.Context, token string) (*user.DefaultInfo, error)
	verdicts Verdicts
	issuer   *issuer
	maxAge   time.Duration
	slots    chan struct{}
	flights  singleflight.Group // by hash
	accepted *lru[string, verdict]
	rejected *lru[string, time.Time]
}

func newTokens(cfg Config, i *issuer, m *metrics) *tokens {
	r := &reviewer{upstream: cfg.Upstream, isUnavailable: cfg.IsUnavailable, metrics: m}
	return &tokens{
		review:   r.review,
		verdicts: cfg.Verdicts,
		issuer:   i,
		maxAge:   cfg.OfflineMaxAge,
		slots:    make(chan struct{}, maxReviews),
		accepted: newLRU[string, verdict](maxAccepted),
		rejected: newLRU[string, time.Time](maxRejected),
	}
}

// outcome is what the callers that share a review get.
type outcome struct {
	user *user.DefaultInfo
	how  string
}

func (t *tokens) user(ctx context.Context, token string) (user.Info, string, error) {
	sum := sha256.Sum256([]byte(token))
	key := hex.EncodeToString(sum[:])
	if o, ok, err := t.remembered(key); ok {
		return o.user, o.how, err
	}
	// The review is not its first caller's alone: it goes on when that one leaves.
	shared := context.WithoutCancel(ctx)
	done := t.flights.DoChan(key, func() (any, error) { return t.judge(shared, key, token) })
	select {
	case <-ctx.Done():
		return nil, "", fmt.Errorf("verify a token: %w", ctx.Err())
	case r := <-done:
		if r.Err != nil {
			return nil, "", r.Err
		}
		o := r.Val.(outcome)
		return o.user, o.how, nil
	}
}

// remembered answers from memory where that is recent enough.
func (t *tokens) remembered(key string) (o outcome, ok bool, err error) {
	now := time.Now()
	if v, ok := t.accepted.get(key); ok && v.fresh(now) {
		return outcome{user: v.user, how: byToken}, true, nil
	}
	if at, ok := t.rejected.get(key); ok {
		if age := now.Sub(at); age >= 0 && age < rejectedFor {
			return outcome{}, true, fmt.Errorf("%w: %w", ErrUnauthenticated, errRejected)
		}
		t.rejected.remove(key)
	}
	return outcome{}, false, nil
}

// judge asks the API server, and itself where there is none.
func (t *tokens) judge(ctx context.Context, key, token string) (outcome, error) {
	// Another flight may have landed between the caller's look and this one.
	if o, ok, err := t.remembered(key); ok {
		return o, err
	}
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	select {
	case t.slots <- struct{}{}:
		defer func() { <-t.slots }()
	case <-ctx.Done():
		return outcome{}, fmt.Errorf("%w: too many reviews under way", ErrUnavailable)
	}
	u, err := t.review(ctx, token)
	switch {
	case err == nil:
		t.accept(ctx, key, verdict{user: u, exp: expOf(token), verified: time.Now()})
		return outcome{user: u, how: byToken}, nil
	case errors.Is(err, errRejected):
		t.reject(ctx, key, token)
		return outcome{}, fmt.Errorf("%w: %w", ErrUnauthenticated, err)
	case errors.Is(err, errNoAnswer):
		return t.offline(ctx, key, token, err)
	}
	return outcome{}, fmt.Errorf("%w: %w", ErrUnavailable, err)
}

func (t *tokens) accept(ctx context.Context, key string, v verdict) {
	t.rejected.remove(key)
	t.accepted.put(key, v)
	now := storedVerdict{
		Name: v.user.Name, UID: v.user.UID, Groups: v.user.Groups, Extra: v.user.Extra,
		Exp: v.exp, Verified: v.verified.Unix(),
	}
	raw, err := json.Marshal(now)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Verdict cannot be stored")
		return
	}
	if old, ok := t.stored(key); ok && t.saysNothingNew(raw, now, old) {
		return
	}
	t.verdicts.Store(key, raw)
}

// saysNothingNew spares the disk: a token in daily use is verified 720 times a
// day. The time of the verification matters only for a token without exp.
func (t *tokens) saysNothingNew(raw []byte, now, old storedVerdict) bool {
	since := time.Duration(now.Verified-old.Verified) * time.Second
	if now.Exp == 0 && since.Abs() >= t.maxAge/storedPart {
		return false
	}
	old.Verified = now.Verified
	was, err := json.Marshal(old)
	return err == nil && bytes.Equal(raw, was)
}

func (t *tokens) reject(ctx context.Context, key, token string) {
	t.accepted.remove(key)
	t.rejected.put(key, time.Now())
	// Only what is there, or could be taken for good by its signature: made up tokens
	// must not cause writes.
	raw, ok := t.verdicts.Load(key)
	if ok && len(raw) > 0 || !ok && t.issuer.signed(ctx, token) {
		t.verdicts.Store(key, nil)
	}
}

// offline judges a token by what the API server once said about it, or, if it never
// has, by its signature.
func (t *tokens) offline(ctx context.Context, key, token string, cause error) (outcome, error) {
	v, ok := t.accepted.get(key)
	if !ok {
		if v, ok = t.load(key); !ok {
			return t.unknown(ctx, key, token, cause)
		}
		t.accepted.put(key, v)
	}
	if err := v.offline(time.Now(), t.maxAge); err != nil {
		return outcome{}, err
	}
	klog.FromContext(ctx).V(4).Info("Token was accepted by an earlier verdict", "user", v.user.Name, "verified", v.verified)
	return outcome{user: v.user, how: byTokenOffline}, nil
}

// unknown judges a token of which there is no verdict that holds.
func (t *tokens) unknown(ctx context.Context, key, token string, cause error) (outcome, error) {
	if raw, ok := t.verdicts.Load(key); ok && len(raw) == 0 {
		return outcome{}, fmt.Errorf("%w: the API server has refused the token before", ErrUnauthenticated)
	}
	u, err := t.issuer.user(token, time.Now())
	switch {
	case errors.Is(err, ErrUnauthenticated):
		return outcome{}, err
	case err != nil:
		return outcome{}, fmt.Errorf("%w: the token is not known: %w: %w", ErrUnavailable, err, cause)
	}
	klog.FromContext(ctx).V(4).Info("Token was accepted by its signature", "user", u.Name)
	return outcome{user: u, how: byTokenSignature}, nil
}

func (t *tokens) load(key string) (verdict, bool) {
	s, ok := t.stored(key)
	if !ok {
		return verdict{}, false
	}
	return verdict{
		user:     &user.DefaultInfo{Name: s.Name, UID: s.UID, Groups: s.Groups, Extra: s.Extra},
		exp:      s.Exp,
		verified: time.Unix(s.Verified, 0),
	}, true
}

func (t *tokens) stored(key string) (storedVerdict, bool) {
	raw, ok := t.verdicts.Load(key)
	if !ok {
		return storedVerdict{}, false
	}
	var s storedVerdict
	if err := json.Unmarshal(raw, &s); err != nil || s.Name == "" {
		return storedVerdict{}, false
	}
	return s, true
}

// expOf is the exp claim of a token in Unix seconds, 0 if it has none. The
// signature is the API server's to verify; its verdict is kept by the hash of
// the very bytes that are parsed here.
func expOf(token string) int64 {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return 0
	}
	raw, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return 0
	}
	// A map, since struct fields would also match EXP.
	var claims map[string]json.RawMessage
	if err := json.Unmarshal(raw, &claims); err != nil {
		return 0
	}
	exp, ok := claims["exp"]
	var seconds *float64
	if !ok || json.Unmarshal(exp, &seconds) != nil || seconds == nil {
		return 0
	}
	return int64(min(max(*seconds, 1), lastExp))
}
