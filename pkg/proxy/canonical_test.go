// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apiserver/pkg/endpoints/request"
)

func TestCanonicalRequest(t *testing.T) {
	const ok, refused = http.StatusOK, http.StatusBadRequest
	for _, tc := range []struct {
		name, target string
		code         int
		forwarded    string // path and query
	}{
		{"plain", "/api/v1/pods", ok, "/api/v1/pods"},
		{"trailing slash", "/api/v1/nodes/", ok, "/api/v1/nodes/"},
		{"root", "/", ok, "/"},
		{"query is sorted", "/api/v1/pods?watch=1&limit=2", ok, "/api/v1/pods?limit=2&watch=1"},
		{"repeated key keeps its order", "/api/v1/x?command=b&command=a", ok, "/api/v1/x?command=b&command=a"},
		{"empty query mark goes", "/api/v1/pods?", ok, "/api/v1/pods"},
		{"needless escape goes", "/api/v1/%70ods", ok, "/api/v1/pods"},
		{"colon escaped", "/api/v1/namespaces/a/services/https%3Ab%3A1/proxy/", ok, "/api/v1/namespaces/a/services/https:b:1/proxy/"},
		{"space", "/api/v1/namespaces/a/services/b/proxy/c%20d", ok, "/api/v1/namespaces/a/services/b/proxy/c%20d"},
		{"encoded percent stays encoded", "/api/v1/pods/%252f", ok, "/api/v1/pods/%252f"},
		{"dots in a name", "/api/v1/pods/a..b", ok, "/api/v1/pods/a..b"},

		{"absolute form", "http://other/api/v1/pods", refused, ""},
		{"encoded slash", "/api/v1/namespaces/a%2fb/pods", refused, ""},
		{"encoded slash, capital", "/api/v1/namespaces/a%2Fb/pods", refused, ""},
		{"dot dot", "/api/v1/../v1/pods", refused, ""},
		{"dot", "/api/v1/./pods", refused, ""},
		{"dot dot at the end", "/api/v1/pods/..", refused, ""},
		{"encoded dot dot", "/api/v1/%2e%2e/secrets", refused, ""},
		{"half encoded dot dot", "/api/v1/.%2E/secrets", refused, ""},
		{"double slash", "/api//v1/pods", refused, ""},
		{"double slash in front", "//evil/api/v1/pods", refused, ""},
		{"double slash at the end", "/api/v1/pods//", refused, ""},
		{"NUL", "/api/v1/pods/a%00b", refused, ""},
		{"newline", "/api/v1/pods/a%0ab", refused, ""},
		{"semicolon in the query", "/api/v1/pods?a=1;watch=1", refused, ""},
		{"broken escape in the query", "/api/v1/pods?a=%zz", refused, ""},
		{"half an escape in the query", "/api/v1/pods?a=%2", refused, ""},
		{"encoded semicolon in the query", "/api/v1/pods?a=%3B", ok, "/api/v1/pods?a=%3B"},
		{"watch without a resource", "/api/v1/watch", refused, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var forwarded string
			h := handler(t, config(transportFunc(func(req *http.Request) (*http.Response, error) {
				forwarded = req.URL.RequestURI()
				if info, _ := request.RequestInfoFrom(req.Context()); info.Path != req.URL.Path {
					t.Errorf("decided by path %q, forwarded %q", info.Path, req.URL.Path)
				}
				return reply(200, "{}"), nil
			})))
			w := serveRaw(t, h, "GET "+tc.target+" HTTP/1.1\nHost: localhost")
			if w.Code != tc.code || forwarded != tc.forwarded {
				t.Errorf("GET %s = %d, forwarded %q, want %d, %q", tc.target, w.Code, forwarded, tc.code, tc.forwarded)
			}
		})
	}
	for _, target := range []string{"CONNECT 10.0.0.1:443", "OPTIONS *"} {
		w := serveRaw(t, handler(t, config(nil)), target+" HTTP/1.1\nHost: localhost")
		if w.Code != refused {
			t.Errorf("%s = %d, want %d", target, w.Code, refused)
		}
	}
}

func TestCanonicalHeaders(t *testing.T) {
	var got http.Header
	h := handler(t, config(transportFunc(func(req *http.Request) (*http.Response, error) {
		got = req.Header.Clone()
		return reply(200, "{}"), nil
	})))
	serveRaw(t, h, `GET /api/v1/pods HTTP/1.1
Host: localhost
Accept: application/vnd.kubernetes.protobuf
User-Agent: kubelet/v1.36
Authorization: Bearer t
Impersonate-User: bob
X-Remote-User: admin
x-remote-group: system:masters
X-Remote-Extra-Scopes: all
X-Forwarded-For: 10.0.0.1
X-Forwarded-Proto: http
X-Forwarded-Port: 1
Forwarded: for=10.0.0.1
X-Real-Ip: 10.0.0.1
Edgehub-Source: upstream
Proxy-Authorization: Basic eA==
Keep-Alive: timeout=5
Te: trailers
Connection: keep-alive, TE`)
	want := http.Header{
		"Accept": {"application/vnd.kubernetes.protobuf"}, "User-Agent": {"kubelet/v1.36"},
		"Authorization": {"Bearer t"}, "Impersonate-User": {"bob"}, "Te": {"trailers"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("forwarded headers (-want +got):\n%s", diff)
	}
}

// A client must not be able to make ReverseProxy drop a header that identity was
// decided by.
func TestConnectionHeaderNamesOnlyHopHeaders(t *testing.T) {
	for _, tc := range []struct {
		value string
		code  int
	}{
		{"close", 200}, {"Keep-Alive", 200}, {"keep-alive, TE", 200}, {"", 200},
		{"Authorization", 400}, {"close, Impersonate-User", 400}, {"keep-alive,\tImpersonate-Group", 400}, {"accept", 400},
	} {
		h := handler(t, config(transportFunc(func(*http.Request) (*http.Response, error) { return reply(200, "{}"), nil })))
		if w := serveRaw(t, h, "GET /api/v1/pods HTTP/1.1\nHost: localhost\nConnection: "+tc.value); w.Code != tc.code {
			t.Errorf("Connection: %s = %d, want %d", tc.value, w.Code, tc.code)
		}
	}
}

func FuzzCanonicalURL(f *testing.F) {
	for _, s := range []string{"/api/v1/pods?watch=1", "/a%2fb", "/a/../b", "//a", "/a;b?c=%3B", "/a%00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, target string) {
		req, err := http.NewRequest(http.MethodGet, target, nil)
		if err != nil {
			t.Skip()
		}
		u, err := canonicalURL(req)
		if err != nil {
			return
		}
		// What is sent means, read again, what was decided by; and it is a fixed point.
		again, err := http.NewRequest(http.MethodGet, u.RequestURI(), nil)
		if err != nil {
			t.Fatalf("%q became %q, which is no request: %v", target, u.RequestURI(), err)
		}
		twice, err := canonicalURL(again)
		if err != nil || twice.Path != u.Path || twice.RequestURI() != u.RequestURI() {
			t.Fatalf("%q became %q, then %v, %v", target, u.RequestURI(), twice, err)
		}
	})
}
