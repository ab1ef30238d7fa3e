// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/identity"
)

func TestChainOrder(t *testing.T) {
	var order []string
	note := func(name string) Middleware {
		return func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				order = append(order, name)
				next.ServeHTTP(w, req)
			})
		}
	}
	end := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { order = append(order, "end") })
	Chain(end, note("first"), note("second")).ServeHTTP(nil, nil)
	if diff := cmp.Diff([]string{"first", "second", "end"}, order); diff != "" {
		t.Errorf("Chain order (-want +got):\n%s", diff)
	}
}

func TestUser(t *testing.T) {
	const secret = "Bearer s3cr3t"
	for _, tc := range []struct {
		name   string
		user   user.Info
		err    error
		code   int
		reason metav1.StatusReason
	}{
		{"known", someone, nil, 200, ""},
		{"nobody and no error", nil, nil, 401, metav1.StatusReasonUnauthorized},
		{"unauthenticated", nil, fmt.Errorf("%w: token %s", identity.ErrUnauthenticated, secret), 401, metav1.StatusReasonUnauthorized},
		{"certificate without a key", nil, fmt.Errorf("%w: %s", identity.ErrUseToken, secret), 403, metav1.StatusReasonForbidden},
		{"certificate that impersonates", nil, fmt.Errorf("%w: %s", identity.ErrImpersonation, secret), 403, metav1.StatusReasonForbidden},
		{"cannot be verified", nil, fmt.Errorf("%w: %s", identity.ErrUnavailable, secret), 503, metav1.StatusReasonServiceUnavailable},
		{"nobody to ask", nil, fmt.Errorf("%w: %s", errLinkDown, secret), 503, metav1.StatusReasonServiceUnavailable},
		{"anything else", nil, errors.New(secret), 500, metav1.StatusReasonInternalError},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got user.Info
			cfg := config(transportFunc(func(req *http.Request) (*http.Response, error) {
				got, _ = request.UserFrom(req.Context())
				return reply(200, "{}"), nil
			}))
			cfg.Authenticator = authFunc(func(*http.Request) (user.Info, error) { return tc.user, tc.err })
			w := serveRaw(t, handler(t, cfg), "GET /api/v1/pods HTTP/1.1\nHost: localhost")
			var status metav1.Status
			if err := json.Unmarshal(w.Body.Bytes(), &status); err != nil {
				t.Fatal(err)
			}
			if w.Code != tc.code || status.Reason != tc.reason || (got != nil) != (tc.code == 200) {
				t.Errorf("answer = %d %s, user %v, want %d %s", w.Code, status.Reason, got, tc.code, tc.reason)
			}
			if strings.Contains(w.Body.String(), "s3cr3t") {
				t.Errorf("answer tells the token: %s", w.Body)
			}
		})
	}
}

func TestHealthNeedsNoCredential(t *testing.T) {
	ready := errors.New("starting")
	cfg := config(nil)
	cfg.Ready = func() error { return ready }
	cfg.Authenticator = authFunc(func(*http.Request) (user.Info, error) { return nil, identity.ErrUnauthenticated })
	h := handler(t, cfg)
	for _, tc := range []struct {
		path  string
		ready error
		code  int
	}{
		{"/livez", ready, 200}, {"/readyz", ready, 503}, {"/readyz", nil, 200}, {"/livez/x", nil, 401}, {"/healthz", nil, 401}, {"/metrics", nil, 401},
	} {
		ready = tc.ready
		if w := serveRaw(t, h, "GET "+tc.path+" HTTP/1.1\nHost: localhost"); w.Code != tc.code || strings.Contains(w.Body.String(), "starting") {
			t.Errorf("GET %s (ready: %v) = %d %q, want %d", tc.path, tc.ready, w.Code, w.Body, tc.code)
		}
	}
}

func TestIsLongRunning(t *testing.T) {
	for _, tc := range []struct {
		method, target, header string
		want                   bool
	}{
		{"GET", "/api/v1/pods", "", false},
		{"GET", "/api/v1/pods?watch=true", "", true},
		{"GET", "/api/v1/pods?watch=1", "", true},
		{"GET", "/api/v1/watch/pods", "", true},
		{"GET", "/api/v1/pods?watch=0", "", false},
		{"POST", "/api/v1/namespaces/a/pods?watch=1", "", false},
		{"GET", "/api/v1/namespaces/a/pods/b/log?follow=true", "", true},
		{"GET", "/api/v1/namespaces/a/pods/b/log", "", true},
		{"POST", "/api/v1/namespaces/a/pods/b/exec", "", true},
		{"POST", "/api/v1/namespaces/a/pods/b/attach", "", true},
		{"POST", "/api/v1/namespaces/a/pods/b/portforward", "", true},
		{"GET", "/api/v1/namespaces/a/services/b/proxy/c", "", true},
		{"PUT", "/api/v1/namespaces/a/pods/b/status", "", false},
		{"GET", "/api/v1/namespaces/a/pods/exec", "", false},
		{"GET", "/version", "", false},
		{"GET", "/apis/kubevirt.io/v1/namespaces/a/vms/b/console", "\nConnection: Upgrade\nUpgrade: websocket", true},
		{"GET", "/api/v1/pods", "\nUpgrade: websocket", false},
	} {
		var got bool
		h := Chain(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) { got = isLongRunning(req) }), WithRequestInfo())
		serveRaw(t, h, tc.method+" "+tc.target+" HTTP/1.1\nHost: localhost"+tc.header)
		if got != tc.want {
			t.Errorf("isLongRunning(%s %s%s) = %v, want %v", tc.method, tc.target, tc.header, got, tc.want)
		}
	}
}

func TestDeadline(t *testing.T) {
	for _, tc := range []struct {
		target string
		want   time.Duration // 0: none
		code   int
	}{
		{"/api/v1/pods", time.Minute, 504},
		{"/api/v1/pods?timeout=5s", 5 * time.Second, 504},
		{"/api/v1/pods?timeout=1h", time.Minute, 504},
		{"/api/v1/pods?timeout=0s", time.Minute, 504},
		{"/api/v1/pods?timeout=soon", 0, 400},
		{"/api/v1/pods?timeout=-1s", 0, 400},
		{"/api/v1/pods?watch=1&timeout=5s", 0, 200},
	} {
		t.Run(tc.target, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				h := handler(t, config(transportFunc(func(req *http.Request) (*http.Response, error) {
					select {
					case <-req.Context().Done():
						return nil, req.Context().Err()
					case <-time.After(2 * time.Hour):
						return reply(200, "{}"), nil
					}
				})))
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", tc.target, nil))
				if took := time.Since(start); w.Code != tc.code || (tc.want > 0 && took != tc.want) {
					t.Errorf("GET %s = %d after %v, want %d after %v", tc.target, w.Code, took, tc.code, tc.want)
				}
			})
		})
	}
}

func TestMaxInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		free := make(chan struct{})
		cfg := config(transportFunc(func(*http.Request) (*http.Response, error) {
			<-free
			return reply(200, "{}"), nil
		}))
		cfg.MaxRequestsInFlight, cfg.MaxStreamsInFlight = 2, 1
		h := handler(t, cfg)
		serve := func(target string) *httptest.ResponseRecorder {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", target, nil))
			return w
		}
		for _, target := range []string{"/api/v1/pods", "/api/v1/nodes", "/api/v1/pods?watch=1"} {
			go serve(target)
		}
		synctest.Wait()
		for _, target := range []string{"/api/v1/pods", "/api/v1/pods?watch=1"} {
			if w := serve(target); w.Code != 429 || w.Header().Get("Retry-After") != "1" {
				t.Errorf("GET %s over the limit = %d, Retry-After %q, want 429, 1", target, w.Code, w.Header().Get("Retry-After"))
			}
		}
		if w := serve("/livez"); w.Code != 200 {
			t.Errorf("GET /livez over the limit = %d, want 200", w.Code)
		}
		close(free)
		synctest.Wait()
		if w := serve("/api/v1/pods"); w.Code != 200 {
			t.Errorf("GET below the limit again = %d, want 200", w.Code)
		}
	})
}

func TestMaxBody(t *testing.T) {
	for _, tc := range []struct {
		name, target, body string
		chunked, upgrade   bool
		code               int
	}{
		{"at the limit", "/api/v1/namespaces/a/pods", "12345678", false, false, 200},
		{"over it", "/api/v1/namespaces/a/pods", "123456789", false, false, 413},
		{"over it without saying so", "/api/v1/namespaces/a/pods", "123456789", true, false, 413},
		{"proxied", "/api/v1/namespaces/a/services/b/proxy/c", "123456789", true, false, 200},
		{"upgraded", "/api/v1/namespaces/a/pods/b/exec", "123456789", true, true, 200},
	} {
		t.Run(tc.name, func(t *testing.T) {
			cfg := config(transportFunc(func(req *http.Request) (*http.Response, error) {
				if _, err := io.ReadAll(req.Body); err != nil {
					return nil, fmt.Errorf("send: %w", err)
				}
				return reply(200, "{}"), nil
			}))
			cfg.MaxBodyBytes = 8
			req := httptest.NewRequestWithContext(t.Context(), "POST", tc.target, strings.NewReader(tc.body))
			if tc.chunked {
				req.ContentLength = -1
			}
			if tc.upgrade {
				req.Header.Set("Connection", "Upgrade")
				req.Header.Set("Upgrade", "SPDY/3.1")
			}
			w := httptest.NewRecorder()
			if handler(t, cfg).ServeHTTP(w, req); w.Code != tc.code {
				t.Errorf("POST = %d %s, want %d", w.Code, w.Body, tc.code)
			}
		})
	}
}

func TestPanicBecomesStatus(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	cfg := config(transportFunc(func(*http.Request) (*http.Response, error) { panic("a bug with s3cr3t") }))
	cfg.Registerer = reg
	w := httptest.NewRecorder()
	handler(t, cfg).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/api/v1/pods", nil))
	if w.Code != 500 || !strings.Contains(w.Body.String(), `"kind":"Status"`) || strings.Contains(w.Body.String(), "s3cr3t") {
		t.Errorf("panic = %d %s, want a 500 Status without the cause", w.Code, w.Body)
	}
	if got := counterSum(t, reg, "edgehub_proxy_panics_total"); got != 1 {
		t.Errorf("edgehub_proxy_panics_total = %v, want 1", got)
	}
}

// counterSum is the sum of a counter's values.
func counterSum(t *testing.T, reg prometheus.Gatherer, name string) (sum float64) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

func TestMetrics(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	cfg := config(transportFunc(func(req *http.Request) (*http.Response, error) {
		resp := reply(200, "12345")
		switch req.URL.Path {
		case "/api/v1/pods":
			resp.Header.Set(SourceHeader, "replay")
		case "/api/v1/nodes":
			resp.Header.Set(SourceHeader, "made up")
		case "/api/v1/secrets":
			return nil, errLinkDown
		}
		return resp, nil
	}))
	cfg.Registerer = reg
	h := handler(t, cfg)
	for _, target := range []string{"/api/v1/pods", "/api/v1/nodes", "/api/v1/secrets", "/apis/x/v1/madeup", "/version", "/a//b", "/livez"} {
		w := serveRaw(t, h, "GET "+target+" HTTP/1.1\nHost: localhost")
		if w.Header().Get(SourceHeader) != "" {
			t.Errorf("GET %s shows the client %s", target, SourceHeader)
		}
	}
	const want = `
# HELP edgehub_proxy_requests_total Requests answered, by where the answer came from: upstream, feed (a live copy), replay (a record, the link is down) or local (made here). Code aborted: the stream was broken off.
# TYPE edgehub_proxy_requests_total counter
edgehub_proxy_requests_total{code="200",resource="nodes",source="upstream",verb="list"} 1
edgehub_proxy_requests_total{code="200",resource="none",source="upstream",verb="get"} 1
edgehub_proxy_requests_total{code="200",resource="other",source="upstream",verb="list"} 1
edgehub_proxy_requests_total{code="200",resource="pods",source="replay",verb="list"} 1
edgehub_proxy_requests_total{code="503",resource="secrets",source="local",verb="list"} 1
# HELP edgehub_proxy_refused_total Requests refused before they were looked at: not_canonical (path, query or headers with more than one meaning), requests_limit and streams_limit (too many in flight).
# TYPE edgehub_proxy_refused_total counter
edgehub_proxy_refused_total{reason="not_canonical"} 1
`
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), "edgehub_proxy_requests_total", "edgehub_proxy_refused_total"); err != nil {
		t.Error(err)
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("GatherAndLint() = %v, %v", problems, err)
	}
	if got := counterSum(t, reg, "edgehub_proxy_response_bytes_total"); got < 20 {
		t.Errorf("edgehub_proxy_response_bytes_total = %v, want at least 20", got)
	}
}

func TestCounterWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCounter()
		c.wait(t.Context()) // nothing to wait for
		c.add()
		ended := make(chan struct{})
		go func() { c.wait(t.Context()); close(ended) }()
		synctest.Wait()
		select {
		case <-ended:
			t.Fatal("wait() returned while the count is 1")
		default:
		}
		c.done()
		<-ended
		c.add()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		c.wait(ctx)
		c.done()
	})
}
