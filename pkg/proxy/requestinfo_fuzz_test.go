// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// What edgehub decides by is what the API server will see: for every request that is let
// through, the RequestInfo in its context is the one that a kube-apiserver makes of the
// request line that goes upstream.
func FuzzRequestInfo(f *testing.F) {
	for _, target := range []string{
		"/", "/api", "/api/v1/pods", "/api/v1/namespaces/a/pods/p", "/api/v1/namespaces/a/pods/p/log?follow=1", "/api/v1/namespaces/a",
		"/api/v1/watch/namespaces/a/pods/p", "/api/v1/pods?watch=1&watch=0", "/api/v1/pods?watch=0&watch=1", "/api/v1/pods?watch", "/api/v1/pods?watch=", "/api/v1/pods?WATCH=1",
		"/api/v1/secrets?fieldSelector=metadata.name%3Da", "/api/v1/secrets?fieldSelector=metadata.name%3Da&fieldSelector=metadata.name%3Db", "/api/v1/secrets?fieldSelector=metadata.name%3D%2E%2E",
		"/api/v1/namespaces/a/services/s:http/proxy/x//y", "/api/v1/proxy/namespaces/a/services/s/x", "/apis/apps/v1/namespaces/a/deployments/d/scale",
		"//api/v1/pods", "/api//v1/pods", "/api/v1/./pods", "/api/v1/../v1/secrets", "/api/v1/%2e%2e/pods", "/api/v1/namespaces/a%2fb/pods", "/api/v1/pods/%70", "/%61pi/v1/pods", "/api/v1/pods;x", "/api/v1/pods%3Fwatch=1",
		"/api/v1/pods?a;b", "/api/v1/pods?%zz", "/api/v1/pods?watch=1%00", "/api/v1/pods#x", "http://x/api/v1/pods", "*", "/api/v1/pods/a%0ab", "/api/v1/namespaces/%F0%9F%92%A9/pods", "/api/v1/pods?limit=1&timeoutSeconds=x",
		"/api/v1/pods?sendInitialEvents=true&watch=true", "/api/v1/namespaces/a/pods?labelSelector=%", "/api/v1/pods/", "/api/v1/namespaces//pods", "/apis/", "/openid/v1/jwks",
	} {
		for _, method := range []string{"GET", "DELETE", "POST"} {
			f.Add(method, target)
		}
	}
	var sent *http.Request
	cfg := config(transportFunc(func(req *http.Request) (*http.Response, error) {
		sent = req
		return reply(200, "{}"), nil
	}))
	cfg.setDefaults()
	h := newProxy(cfg).handler(nil)
	apiServer := &request.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")}
	f.Fuzz(func(t *testing.T, method, target string) {
		if strings.ContainsAny(method+target, " \r\n") {
			t.Skip("not one request line")
		}
		req, err := http.ReadRequest(bufio.NewReader(strings.NewReader(method + " " + target + " HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")))
		if err != nil {
			t.Skip("net/http refuses it")
		}
		sent = nil
		h.ServeHTTP(httptest.NewRecorder(), req)
		if sent == nil {
			if target == "/api/v1/pods" {
				t.Fatal("what is good is not sent")
			}
			return // refused, or answered here
		}
		decided, ok := request.RequestInfoFrom(sent.Context())
		if !ok {
			t.Fatal("no RequestInfo")
		}
		line := sent.Method + " " + sent.URL.RequestURI()
		arrived, err := http.ReadRequest(bufio.NewReader(strings.NewReader(line + " HTTP/1.1\r\nHost: x\r\n\r\n")))
		if err != nil {
			t.Fatalf("%q becomes %q, which nobody can read: %v", method+" "+target, line, err)
		}
		seen, err := apiServer.NewRequestInfo(arrived)
		if err != nil {
			t.Fatalf("%q becomes %q, which the API server does not understand: %v", method+" "+target, line, err)
		}
		if diff := cmp.Diff(decided, seen, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("%q becomes %q: decided by (-), seen by the API server (+):\n%s", method+" "+target, line, diff)
		}
		if arrived.URL.RawPath != "" && strings.Contains(strings.ToLower(arrived.URL.RawPath), "%2f") {
			t.Errorf("%q becomes %q, with an encoded slash", method+" "+target, line)
		}
	})
}
