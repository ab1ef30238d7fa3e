// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// What a request may not be. Each is refused with 400 before anything decides by it.
var (
	errTarget     = errors.New("the request target must be a path")
	errPath       = errors.New("the path must be absolute, without encoded slashes, dot segments, empty segments and control characters")
	errQuery      = errors.New("the query cannot be parsed")
	errConnection = errors.New("the Connection header names a header that is not hop-by-hop")
)

// WithCanonicalRequest lets only requests pass whose path and query have one
// meaning, and rewrites them into the one form that all below decide by and that
// is sent upstream. Headers by which a proxy in front would speak for a caller
// are removed; Impersonate-* belongs to the identity and is left to it.
func WithCanonicalRequest(m *metrics) Middleware {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			canonical, err := canonicalURL(req)
			if err == nil {
				err = checkConnection(req.Header["Connection"])
			}
			if err != nil {
				m.observeRefused()
				writeError(w, req, apierrors.NewBadRequest(err.Error()))
				return
			}
			r := *req
			r.URL = canonical
			r.Header = withoutForwarded(req.Header)
			next.ServeHTTP(w, &r)
		})
	}
}

func canonicalURL(req *http.Request) (*url.URL, error) {
	u := req.URL
	if req.Method == http.MethodConnect || u.Scheme != "" || u.Host != "" || u.Opaque != "" || u.User != nil || req.RequestURI == "*" {
		return nil, errTarget
	}
	if !strings.HasPrefix(u.Path, "/") || strings.Contains(strings.ToLower(u.RawPath), "%2f") {
		return nil, errPath
	}
	for rest, more := u.Path[1:], true; more; {
		var s string
		s, rest, more = strings.Cut(rest, "/")
		if s == "." || s == ".." || (s == "" && more) || strings.ContainsFunc(s, isControl) {
			return nil, errPath
		}
	}
	if u.RawQuery == "" {
		return &url.URL{Path: u.Path}, nil
	}
	query, err := url.ParseQuery(u.RawQuery) // refuses semicolons and broken escapes
	if err != nil {
		return nil, errQuery
	}
	return &url.URL{Path: u.Path, RawQuery: query.Encode()}, nil
}

func isControl(r rune) bool { return r < 0x20 || r == 0x7f }

// hopByHop are the options that clients put into Connection. Any other one names
// a header that ReverseProxy would drop after identity was decided by it, such as
// Authorization or Impersonate-User.
var hopByHop = []string{"close", "keep-alive", "upgrade", "te", "http2-settings"}

func checkConnection(values []string) error {
	for _, v := range values {
		for option := range strings.SplitSeq(v, ",") {
			option = strings.ToLower(strings.TrimSpace(option))
			if option != "" && !slices.Contains(hopByHop, option) {
				return errConnection
			}
		}
	}
	return nil
}

// withoutForwarded returns h without what speaksForCaller knows: h itself where
// there is nothing of that kind.
func withoutForwarded(h http.Header) http.Header {
	removed := false
	for name := range h {
		removed = removed || speaksForCaller(name)
	}
	if !removed {
		return h
	}
	h = maps.Clone(h)
	maps.DeleteFunc(h, func(name string, _ []string) bool { return speaksForCaller(name) })
	return h
}

// speaksForCaller reports whether a header is one by which a front proxy tells
// who or what it forwards, or one of edgehub's own.
func speaksForCaller(name string) bool {
	for _, prefix := range []string{"x-remote-", "x-forwarded-", "edgehub-"} {
		if len(name) >= len(prefix) && strings.EqualFold(name[:len(prefix)], prefix) {
			return true
		}
	}
	return strings.EqualFold(name, "forwarded") || strings.EqualFold(name, "x-real-ip")
}
