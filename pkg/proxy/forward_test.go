// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReads(t *testing.T) {
	for _, tc := range []struct {
		method, target, header string
		want                   bool
	}{
		{"GET", "/api/v1/pods", "", true},
		{"GET", "/version", "", true},
		{"GET", "/api/v1/pods?watch=1", "", true},
		{"GET", "/api/v1/namespaces/a/pods/b/log?follow=true", "", true},
		{"GET", "/api/v1/namespaces/a/services/b/proxy/c", "", false},
		{"GET", "/api/v1/namespaces/a/pods/b/exec", "\nConnection: Upgrade\nUpgrade: websocket", false},
		{"GET", "/api/v1/pods", "\nContent-Length: 2\n\n{}", false},
		{"GET", "/api/v1/pods", "\nTe: trailers", false},
		{"HEAD", "/api/v1/pods", "", false},
		{"DELETE", "/api/v1/namespaces/a/pods/b", "", false},
	} {
		var got bool
		h := Chain(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) { got = reads(req) }), WithRequestInfo())
		serveRaw(t, h, tc.method+" "+tc.target+" HTTP/1.1\nHost: localhost"+tc.header)
		if got != tc.want {
			t.Errorf("reads(%s %s%s) = %v, want %v", tc.method, tc.target, tc.header, got, tc.want)
		}
	}
}

// What a list is made of is sent when there is enough of it; what may be waited for
// is sent at once.
func TestFlushes(t *testing.T) {
	const json, protobuf = "application/json", "application/vnd.kubernetes.protobuf"
	for _, tc := range []struct {
		target, contentType string
		length              int64
		want                bool
	}{
		{"/api/v1/pods", json, 10, false},
		{"/api/v1/pods", json, -1, false},
		{"/api/v1/pods", protobuf, -1, false},
		{"/api/v1/pods", json + ";charset=utf-8", -1, false},
		{"/api/v1/pods", "text/plain", 10, false},
		{"/apis/x/v1/y", "text/event-stream", -1, true},
		{"/apis/x/v1/y", "", -1, true},
		{"/apis/x/v1/y", json + ";stream=watch", -1, true},
		{"/api/v1/pods?watch=1", json, -1, true},
		{"/api/v1/namespaces/a/pods/b/log", "text/plain", -1, true},
	} {
		h := handler(t, config(transportFunc(func(*http.Request) (*http.Response, error) {
			resp := reply(200, strings.Repeat("x", 10))
			resp.Header.Set("Content-Type", tc.contentType)
			resp.ContentLength = tc.length
			return resp, nil
		})))
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", tc.target, nil))
		if w.Flushed != tc.want || w.Body.Len() != 10 {
			t.Errorf("GET %s of %q, length %d: flushed %v, want %v; %d bytes", tc.target, tc.contentType, tc.length, w.Flushed, tc.want, w.Body.Len())
		}
	}
}

// pieces is a body that has so many bytes for each Read, or as many as fit.
type pieces struct {
	left  []int
	asked []int
}

func (p *pieces) Read(b []byte) (int, error) {
	p.asked = append(p.asked, len(b))
	if len(p.left) == 0 {
		return 0, io.EOF
	}
	n := min(p.left[0], len(b))
	if p.left[0] -= n; p.left[0] == 0 {
		p.left = p.left[1:]
	}
	return n, nil
}

// A stream holds the large buffer only while there is plenty to copy.
func TestStreamBuffers(t *testing.T) {
	const small, large = streamBufferBytes, copyBufferBytes
	p := &pieces{left: []int{100, small + 2*large + 10, 100}}
	w := httptest.NewRecorder()
	if err := copyStream(w, p); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]int{small, small, large, large, large, small, small}, p.asked); diff != "" {
		t.Errorf("sizes of reads (-want +got):\n%s", diff)
	}
	if want := 200 + small + 2*large + 10; w.Body.Len() != want {
		t.Errorf("%d bytes copied, want %d", w.Body.Len(), want)
	}
}

func TestForwardedAnswer(t *testing.T) {
	const hop = "Connection: X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		if req.Header.Get("Accept-Encoding") != "" || req.Header.Get("User-Agent") != "" {
			t.Errorf("headers sent on: %v", req.Header)
		}
		status := map[string]string{"/version": "200 OK", "/api": "101 Switching Protocols"}[req.URL.Path]
		io.WriteString(conn, "HTTP/1.1 "+status+"\r\n"+hop+"Warning: 299 - \"a\"\r\nWarning: 299 - \"b\"\r\nContent-Length: 2\r\n\r\n{}")
	}))
	defer backend.Close()
	tr := &http.Transport{DisableCompression: true}
	defer tr.CloseIdleConnections()
	backend.Client().Transport = tr
	h := handler(t, config(toServer(backend)))
	w := serveRaw(t, h, "GET /version HTTP/1.1\nHost: localhost\nAccept-Encoding: gzip")
	if diff := cmp.Diff(http.Header{"Warning": {`299 - "a"`, `299 - "b"`}, "Content-Length": {"2"}}, w.Header()); diff != "" || w.Body.String() != "{}" {
		t.Errorf("answer %q, headers (-want +got):\n%s", w.Body, diff)
	}
	if w := serveRaw(t, h, "GET /api HTTP/1.1\nHost: localhost"); w.Code != http.StatusBadGateway {
		t.Errorf("a 101 that nobody asked for = %d, want 502", w.Code)
	}
}
