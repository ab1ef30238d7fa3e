// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
)

var (
	tokenRequestKind        = schema.GroupVersionKind{Group: "authentication.k8s.io", Version: "v1", Kind: "TokenRequest"}
	tokenReviewKind         = schema.GroupVersionKind{Group: "authentication.k8s.io", Version: "v1", Kind: "TokenReview"}
	subjectAccessReviewKind = schema.GroupVersionKind{Group: "authorization.k8s.io", Version: "v1", Kind: "SubjectAccessReview"}
)

// A question is a create that only asks, and whose answer can stand for the next
// one while the link is down. Bodies hold tokens: none of this is ever logged.
type question struct {
	class string
	// key is equal for equal questions; false: not understood, passed on.
	key func(info *request.RequestInfo, contentType string, body []byte) (string, bool)
	// good reports whether an answer may be recorded.
	good func(Response) bool
	// fresh reports whether a recorded answer is still as good as a new one, so
	// that it need not be written again.
	fresh func(Response) bool
	// usable reports whether a recorded answer may be given now.
	usable func(Response) bool
}

func (c *Contract) createTokenRequest(req *http.Request) (*http.Response, error) {
	return c.ask(req, question{
		class: ClassTokenRequest,
		key:   tokenRequestKey,
		good:  func(r Response) bool { return tokenOf(r) != "" },
		// kubelet asks again after 48 minutes for a token that is good for a year.
		fresh: func(r Response) bool {
			expiry, ok := jwtExpiry(tokenOf(r))
			return ok && expiry.Sub(c.now()) > 24*time.Hour && c.age(r) < 24*time.Hour
		},
		// An expired token grants nothing, a missing one keeps the pod from starting.
		usable: func(r Response) bool {
			if expiry, ok := jwtExpiry(tokenOf(r)); ok && expiry.Before(c.now()) {
				c.metrics.expired.Inc()
			}
			return true
		},
	})
}

func (c *Contract) createTokenReview(req *http.Request) (*http.Response, error) {
	return c.ask(req, question{
		class: ClassTokenReview,
		key: func(_ *request.RequestInfo, contentType string, body []byte) (string, bool) {
			var r authenticationv1.TokenReview
			err := decode(contentType, body, tokenReviewKind, &r)
			return hashKey(r.Spec), err == nil && r.Spec.Token != ""
		},
		good: func(r Response) bool {
			var review authenticationv1.TokenReview
			err := decode(r.ContentType, r.Body, tokenReviewKind, &review)
			return err == nil && review.Status.Authenticated && review.Status.Error == ""
		},
		fresh: c.freshVerdict,
		usable: func(r Response) bool {
			var review authenticationv1.TokenReview
			if err := decode(r.ContentType, r.Body, tokenReviewKind, &review); err != nil {
				return false
			}
			expiry, ok := jwtExpiry(review.Spec.Token)
			return c.age(r) <= c.cfg.MaxVerdictAge && !(ok && expiry.Before(c.now()))
		},
	})
}

func (c *Contract) createSubjectAccessReview(req *http.Request) (*http.Response, error) {
	return c.ask(req, question{
		class: ClassSubjectAccessReview,
		key: func(_ *request.RequestInfo, contentType string, body []byte) (string, bool) {
			var r authorizationv1.SubjectAccessReview
			err := decode(contentType, body, subjectAccessReviewKind, &r)
			return hashKey(r.Spec), err == nil
		},
		good: func(r Response) bool {
			var review authorizationv1.SubjectAccessReview
			err := decode(r.ContentType, r.Body, subjectAccessReviewKind, &review)
			return err == nil && review.Status.Allowed && review.Status.EvaluationError == ""
		},
		fresh:  c.freshVerdict,
		usable: func(r Response) bool { return c.age(r) <= c.cfg.MaxVerdictAge },
	})
}

// freshVerdict keeps kubelet's questions of every two to five minutes from
// becoming a write each.
func (c *Contract) freshVerdict(r Response) bool { return c.age(r) < c.cfg.MaxVerdictAge/8 }

// age is negative on a node without a clock of its own, until it is told the time;
// such a record counts as new.
func (c *Contract) age(r Response) time.Duration { return c.now().Sub(r.Time) }

// ask records a good answer, forgets it when the API server says otherwise, and
// gives it when nobody can be asked. Answers that are not good are never recorded:
// whoever can make kubelet ask (with a token made up, say) must not fill the disk.
func (c *Contract) ask(req *http.Request, q question) (*http.Response, error) {
	req, body, err := buffer(req, maxReviewBytes)
	if err != nil {
		return nil, err
	}
	info, _ := request.RequestInfoFrom(req.Context())
	key, ok := q.key(info, req.Header.Get("Content-Type"), body)
	if !ok {
		return c.cfg.Next.RoundTrip(req)
	}
	resp, err := c.cfg.Next.RoundTrip(req)
	switch {
	case c.unavailable(err):
		if recorded := c.replay(req, q, key); recorded != nil {
			return recorded, nil
		}
		return nil, err
	case err != nil || !online(resp):
		return resp, err
	}
	switch resp.StatusCode {
	case http.StatusCreated, http.StatusOK:
		return c.record(req, resp, q, key)
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound:
		for _, media := range []string{mediaJSON, mediaProtobuf} {
			c.forget(req, q, key+media)
		}
	}
	return resp, nil
}

func (c *Contract) record(req *http.Request, resp *http.Response, q question, key string) (*http.Response, error) {
	media := mediaType(resp.Header.Get("Content-Type"))
	if media != mediaJSON && media != mediaProtobuf {
		return resp, nil
	}
	body, err := readBody(resp, maxObjectBytes)
	if err != nil {
		return nil, err
	}
	key += media
	r := Response{ContentType: resp.Header.Get("Content-Type"), Body: body, Time: c.now()}
	if !q.good(r) {
		c.forget(req, q, key)
		return resp, nil
	}
	u, _ := request.UserFrom(req.Context())
	old, ok := c.cfg.Responses.Response(u, q.class, key)
	if !ok || !old.holds() || !q.fresh(old) {
		r.Body = slices.Clone(body)
		c.cfg.Responses.PutResponse(u, q.class, key, r)
	}
	return resp, nil
}

func (c *Contract) forget(req *http.Request, q question, key string) {
	u, _ := request.UserFrom(req.Context())
	if old, ok := c.cfg.Responses.Response(u, q.class, key); ok && old.holds() {
		c.cfg.Responses.PutResponse(u, q.class, key, Response{Body: []byte("-"), Time: c.now()})
	}
}

func (r Response) holds() bool { return r.ContentType != "" }

const replayWarning = "the link to the API server is down: this is the last recorded answer"

func (c *Contract) replay(req *http.Request, q question, key string) *http.Response {
	u, _ := request.UserFrom(req.Context())
	for _, media := range acceptable(req) {
		r, ok := c.cfg.Responses.Response(u, q.class, key+media)
		if ok && r.holds() && q.usable(r) {
			c.metrics.answers.WithLabelValues(q.class).Inc()
			return answer(req, http.StatusCreated, r.ContentType, r.Body, sourceReplay, replayWarning)
		}
	}
	return nil
}

// tokenRequestKey is what makes two requests ask for the same token.
func tokenRequestKey(info *request.RequestInfo, contentType string, body []byte) (string, bool) {
	var r authenticationv1.TokenRequest
	if err := decode(contentType, body, tokenRequestKind, &r); err != nil {
		return "", false
	}
	audiences := slices.Clone(r.Spec.Audiences)
	slices.Sort(audiences)
	if audiences == nil {
		audiences = []string{}
	}
	return hashKey([]any{info.Namespace, info.Name, audiences, r.Spec.ExpirationSeconds, r.Spec.BoundObjectRef}), true
}

// hashKey is equal for what is equal as JSON, which no two different values are.
func hashKey(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // strings and numbers
	}
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:]) + " "
}

func tokenOf(r Response) string {
	var t authenticationv1.TokenRequest
	if err := decode(r.ContentType, r.Body, tokenRequestKind, &t); err != nil {
		return ""
	}
	return t.Status.Token
}

// jwtExpiry reads the claim exp of a token without verifying it: it decides about
// nothing but whether to count, to write or to stop replaying.
func jwtExpiry(token string) (time.Time, bool) {
	parts := strings.Split(token, ".")
	if len(parts) != 3 {
		return time.Time{}, false
	}
	payload, err := base64.RawURLEncoding.DecodeString(parts[1])
	if err != nil {
		return time.Time{}, false
	}
	var claims struct {
		Exp float64 `json:"exp"`
	}
	if err := json.Unmarshal(payload, &claims); err != nil || claims.Exp <= 0 || claims.Exp > 1<<40 {
		return time.Time{}, false
	}
	return time.Unix(int64(claims.Exp), 0), true
}
