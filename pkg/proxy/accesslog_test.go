// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/edgehub/edgehub/pkg/identity"
)

// accessLog gives h a request and returns what is logged of it at a verbosity,
// each as its message and values, without the duration.
func accessLog(t *testing.T, h http.Handler, verbosity int, head string) (lines []map[string]any, whole string) {
	t.Helper()
	req, err := http.ReadRequest(bufio.NewReader(strings.NewReader(strings.ReplaceAll(head, "\n", "\r\n") + "\r\n\r\n")))
	if err != nil {
		t.Fatalf("ReadRequest: %v", err)
	}
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.Verbosity(verbosity), ktesting.BufferLogs(true)))
	func() {
		defer func() { recover() }() // of a transport that breaks off
		h.ServeHTTP(httptest.NewRecorder(), req.WithContext(klog.NewContext(req.Context(), logger)))
	}()
	buffer := logger.GetSink().(ktesting.Underlier).GetBuffer()
	for _, e := range buffer.Data() {
		line := map[string]any{"message": e.Message}
		for i := 0; i < len(e.ParameterKVList); i += 2 {
			line[e.ParameterKVList[i].(string)] = e.ParameterKVList[i+1]
		}
		if d, ok := line["duration"].(time.Duration); !ok || d < 0 {
			t.Errorf("duration = %v, want a time.Duration", line["duration"])
		}
		delete(line, "duration")
		lines = append(lines, line)
	}
	return lines, buffer.String()
}

func accessLine(message, verb, resource, namespace, name, user, client, source, code string) map[string]any {
	return map[string]any{"message": message, "verb": verb, "resource": resource, "namespace": namespace, "name": name,
		"user": user, "client": client, "source": source, "code": code}
}

func TestAccessLog(t *testing.T) {
	const agent = "\nUser-Agent: kubelet/v1.36.0 (linux/amd64)"
	from := func(source string) http.RoundTripper {
		return transportFunc(func(*http.Request) (*http.Response, error) {
			resp := reply(200, `{"secret":"s3cr3t"}`)
			resp.Header.Set(SourceHeader, source)
			return resp, nil
		})
	}
	down := transportFunc(func(*http.Request) (*http.Response, error) { return nil, errLinkDown })
	gone := transportFunc(func(*http.Request) (*http.Response, error) { panic(http.ErrAbortHandler) })
	for _, tc := range []struct {
		name      string
		transport http.RoundTripper
		request   string
		want      []map[string]any
	}{
		{"list", from("replay"), "GET /api/v1/namespaces/a/pods?labelSelector=app HTTP/1.1\nHost: x" + agent,
			[]map[string]any{accessLine("Answered", "list", "pods", "a", "", "someone", "kubelet", "replay", "200")}},
		{"subresource", from("local"), "PATCH /api/v1/nodes/n/status HTTP/1.1\nHost: x" + agent,
			[]map[string]any{accessLine("Answered", "patch", "nodes/status", "", "n", "someone", "kubelet", "local", "200")}},
		{"no resource, no User-Agent", from(""), "GET /version HTTP/1.1\nHost: x",
			[]map[string]any{accessLine("Answered", "get", "/version", "", "", "someone", "", "upstream", "200")}},
		{"nobody to ask", down, "DELETE /api/v1/namespaces/a/pods/p HTTP/1.1\nHost: x" + agent,
			[]map[string]any{accessLine("Answered", "delete", "pods", "a", "p", "someone", "kubelet", "local", "503")}},
		{"a stream, when it begins and when it ends", from("feed"), "GET /api/v1/pods?watch=true HTTP/1.1\nHost: x" + agent,
			[]map[string]any{accessLine("Streaming", "watch", "pods", "", "", "someone", "kubelet", "feed", "200"),
				accessLine("Answered", "watch", "pods", "", "", "someone", "kubelet", "feed", "200")}},
		{"broken off", gone, "GET /api/v1/pods HTTP/1.1\nHost: x" + agent,
			[]map[string]any{accessLine("Answered", "list", "pods", "", "", "someone", "kubelet", "local", "aborted")}},
		{"a User-Agent made to look like a log", from(""), "GET /api/v1/pods HTTP/1.1\nHost: x\nUser-Agent: " + strings.Repeat("x", 70) + " code=500",
			[]map[string]any{accessLine("Answered", "list", "pods", "", "", "someone", strings.Repeat("x", 64), "upstream", "200")}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, whole := accessLog(t, handler(t, config(tc.transport)), accessLogLevel, tc.request+"\nAuthorization: Bearer s3cr3t")
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("log of %s (-want +got):\n%s", tc.request, diff)
			}
			if strings.Contains(whole, "s3cr3t") {
				t.Errorf("the log tells a secret: %s", whole)
			}
		})
	}
}

func TestAccessLogOfRefusedCaller(t *testing.T) {
	cfg := config(nil)
	cfg.Authenticator = authFunc(func(*http.Request) (user.Info, error) { return nil, identity.ErrUnauthenticated })
	got, _ := accessLog(t, handler(t, cfg), accessLogLevel, "GET /api/v1/pods HTTP/1.1\nHost: x\nUser-Agent: curl/8")
	if diff := cmp.Diff([]map[string]any{accessLine("Answered", "list", "pods", "", "", "", "curl", "local", "401")}, got); diff != "" {
		t.Errorf("log (-want +got):\n%s", diff)
	}
}

func TestAccessLogIsOffByDefault(t *testing.T) {
	h := handler(t, config(transportFunc(func(*http.Request) (*http.Response, error) { return reply(200, "{}"), nil })))
	if got, _ := accessLog(t, h, accessLogLevel-1, "GET /api/v1/pods?watch=true HTTP/1.1\nHost: x"); len(got) != 0 {
		t.Errorf("log at verbosity %d = %v, want nothing", accessLogLevel-1, got)
	}
}
