// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

const (
	reviewTimeout  = 10 * time.Second
	maxReviewBytes = 1 << 20
	// The host is the upstream's to fill in.
	reviewURL  = "https://upstream.invalid/apis/authentication.k8s.io/v1/selfsubjectreviews"
	reviewBody = `{"kind":"SelfSubjectReview","apiVersion":"authentication.k8s.io/v1"}`
)

var (
	// errRejected means that the API server does not accept the token.
	errRejected = errors.New("the API server refused the token")
	// errNoAnswer means that nobody could be asked.
	errNoAnswer = errors.New("no answer from the upstream")
)

// A reviewer asks the API server whose a token is, with that token as the only
// credential.
type reviewer struct {
	upstream      http.RoundTripper
	isUnavailable func(error) bool
	metrics       *metrics
}

// review returns errRejected, errNoAnswer, or another error where the answer
// says nothing about the token.
func (r *reviewer) review(ctx context.Context, token string) (*user.DefaultInfo, error) {
	// The context may hold what the caller asked for; this is another request.
	ctx = request.WithRequestInfo(ctx, &request.RequestInfo{
		IsResourceRequest: true, Verb: "create", APIPrefix: "apis", Resource: "selfsubjectreviews",
		APIGroup: authenticationv1.GroupName, APIVersion: "v1", Path: "/apis/authentication.k8s.io/v1/selfsubjectreviews",
	})
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, reviewURL, strings.NewReader(reviewBody))
	if err != nil {
		return nil, err
	}
	req.Host = "" // that of the URL, once the upstream has filled it in
	req.Header.Set("Authorization", "Bearer "+token)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "edgehub")
	resp, err := r.upstream.RoundTrip(req)
	if err != nil {
		r.metrics.reviews.WithLabelValues("error").Inc()
		if r.isUnavailable(err) || errors.Is(err, context.DeadlineExceeded) {
			return nil, fmt.Errorf("%w: %w", errNoAnswer, err)
		}
		return nil, fmt.Errorf("self subject review: %w", err)
	}
	defer resp.Body.Close()
	r.metrics.reviews.WithLabelValues(codeLabel(resp.StatusCode)).Inc()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxReviewBytes+1))
	switch {
	case resp.StatusCode == http.StatusUnauthorized: // whatever became of its body
		return nil, errRejected
	case resp.StatusCode != http.StatusCreated && resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("self subject review: status %d", resp.StatusCode)
	case err != nil:
		return nil, fmt.Errorf("%w: %w", errNoAnswer, err)
	case len(body) > maxReviewBytes:
		return nil, fmt.Errorf("self subject review: more than %d bytes", maxReviewBytes)
	}
	return parseReview(body)
}

func parseReview(body []byte) (*user.DefaultInfo, error) {
	var review authenticationv1.SelfSubjectReview
	if err := json.Unmarshal(body, &review); err != nil {
		return nil, fmt.Errorf("self subject review: %w", err)
	}
	info := review.Status.UserInfo
	if review.Kind != "SelfSubjectReview" || info.Username == "" {
		return nil, errors.New("self subject review: the answer names no user")
	}
	// Something on the way dropped the token: nothing was verified, and nothing
	// was refused either.
	if info.Username == user.Anonymous || slices.Contains(info.Groups, user.AllUnauthenticated) {
		return nil, errors.New("self subject review: the answer is about an anonymous user")
	}
	u := &user.DefaultInfo{Name: info.Username, UID: info.UID, Groups: info.Groups}
	for k, v := range info.Extra {
		if u.Extra == nil {
			u.Extra = make(map[string][]string, len(info.Extra))
		}
		u.Extra[k] = v
	}
	return u, nil
}
