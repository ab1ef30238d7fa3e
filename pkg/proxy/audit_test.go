// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/edgehub/edgehub/pkg/identity"
)

// audited gives h requests and returns the audit lines, and all that is logged.
func audited(t *testing.T, h http.Handler, heads ...string) (lines []map[string]any, whole string) {
	t.Helper()
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.Verbosity(0), ktesting.BufferLogs(true)))
	for _, head := range heads {
		req, err := http.ReadRequest(bufio.NewReader(strings.NewReader(strings.ReplaceAll(head, "\n", "\r\n") + "\r\n\r\n")))
		if err != nil {
			t.Fatalf("ReadRequest: %v", err)
		}
		req.RemoteAddr = "127.0.0.1:4711"
		func() {
			defer func() { recover() }() // of a transport that breaks off
			h.ServeHTTP(httptest.NewRecorder(), req.WithContext(klog.NewContext(req.Context(), logger)))
		}()
	}
	buffer := logger.GetSink().(ktesting.Underlier).GetBuffer()
	for _, e := range buffer.Data() {
		line := map[string]any{}
		for i := 0; i < len(e.ParameterKVList); i += 2 {
			line[e.ParameterKVList[i].(string)] = e.ParameterKVList[i+1]
		}
		if kind, ok := strings.CutPrefix(e.Message, "Audit: "); ok {
			line["audit"] = kind
			lines = append(lines, line)
		}
	}
	return lines, buffer.String()
}

func TestAudit(t *testing.T) {
	const secret = "s3cr3t"
	from := func(source string, code int) http.RoundTripper {
		return transportFunc(func(*http.Request) (*http.Response, error) {
			resp := reply(code, `{"data":"`+secret+`"}`)
			resp.Header.Set(SourceHeader, source)
			return resp, nil
		})
	}
	down := transportFunc(func(*http.Request) (*http.Response, error) { return nil, errLinkDown })
	nobody := authFunc(func(*http.Request) (user.Info, error) { return nil, identity.ErrUnauthenticated })
	line := func(kind, user, verb, resource, namespace, name, source, code string) map[string]any {
		method := map[string]string{"create": "POST", "update": "PUT", "delete": "DELETE"}[verb]
		if method == "" {
			method = "GET"
		}
		return map[string]any{"audit": kind, "user": user, "from": "127.0.0.1", "client": "kubelet", "method": method,
			"verb": verb, "group": "", "resource": resource, "namespace": namespace, "name": name, "source": source, "code": code}
	}
	for _, tc := range []struct {
		name      string
		transport http.RoundTripper
		auth      Authenticator
		request   string
		want      map[string]any // nil: no line
	}{
		{"upstream's", from("upstream", 200), nil, "GET /api/v1/pods", nil},
		{"upstream's refusal", from("upstream", 403), nil, "GET /api/v1/pods", nil},
		{"a record", from("replay", 200), nil, "GET /api/v1/namespaces/a/secrets/s?resourceVersion=0", line("answered from this node", "someone", "get", "secrets", "a", "s", "replay", "200")},
		{"a live copy", from("feed", 200), nil, "GET /api/v1/pods?watch=true", line("answered from this node", "someone", "watch", "pods", "", "", "feed", "200")},
		{"the contract", from("local", 201), nil, "POST /api/v1/namespaces/a/events", line("answered from this node", "someone", "create", "events", "a", "", "local", "201")},
		{"nobody to ask", down, nil, "DELETE /api/v1/namespaces/a/pods/p", line("refused", "someone", "delete", "pods", "a", "p", "local", "503")},
		{"no credential", nil, nobody, "GET /api/v1/namespaces/a/pods/p/log", line("refused", "", "get", "pods/log", "a", "p", "local", "401")},
		{"not canonical", nil, nil, "GET /api/v1/../" + secret, map[string]any{"audit": "refused", "user": "", "from": "127.0.0.1", "client": "kubelet", "method": "GET", "source": "local", "code": "400"}},
		{"no resource", down, nil, "GET /version", map[string]any{"audit": "refused", "user": "someone", "from": "127.0.0.1", "client": "kubelet", "method": "GET", "verb": "get", "path": "/version", "source": "local", "code": "503"}},
		{"a long name", down, nil, "GET /" + strings.Repeat("x", 1000), map[string]any{"audit": "refused", "user": "someone", "from": "127.0.0.1", "client": "kubelet", "method": "GET", "verb": "get", "path": "/" + strings.Repeat("x", 255), "source": "local", "code": "503"}},
		{"a probe", nil, nobody, "GET /livez", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			transport := tc.transport
			if transport == nil {
				transport = from("upstream", 200)
			}
			cfg := config(transport)
			cfg.Audit = true
			if tc.auth != nil {
				cfg.Authenticator = tc.auth
			}
			lines, whole := audited(t, handler(t, cfg), tc.request+" HTTP/1.1\nHost: x\nUser-Agent: kubelet/v1\nAuthorization: Bearer "+secret)
			var want []map[string]any
			if tc.want != nil {
				want = append(want, tc.want)
			}
			if diff := cmp.Diff(want, lines); diff != "" {
				t.Errorf("audit of %s (-want +got):\n%s", tc.request, diff)
			}
			if strings.Contains(whole, secret) {
				t.Errorf("the log tells a secret: %s", whole)
			}
		})
	}
}

// A stream is told of when it begins, once.
func TestAuditOfStreams(t *testing.T) {
	begun := 0
	cfg := config(transportFunc(func(*http.Request) (*http.Response, error) {
		begun++
		resp := reply(200, "")
		resp.Header.Set(SourceHeader, "feed")
		resp.Body = breaksOff{}
		return resp, nil
	}))
	cfg.Audit = true
	lines, _ := audited(t, handler(t, cfg), "GET /api/v1/pods?watch=true HTTP/1.1\nHost: x", "GET /api/v1/pods HTTP/1.1\nHost: x")
	var codes []any
	for _, l := range lines {
		codes = append(codes, l["code"])
	}
	if diff := cmp.Diff([]any{"200", "aborted"}, codes); diff != "" || begun != 2 {
		t.Errorf("codes of a stream and a list that break off (-want +got):\n%s", diff)
	}
}

type breaksOff struct{}

func (breaksOff) Read([]byte) (int, error) { return 0, errLinkDown }
func (breaksOff) Close() error             { return nil }

// A flood is bounded, and hides neither what others do nor what the same user does beside
// it; what was left out is counted.
func TestAuditIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := config(transportFunc(func(req *http.Request) (*http.Response, error) {
			if req.URL.Path == "/version" || strings.HasSuffix(req.URL.Path, "/secrets") {
				resp := reply(200, "{}")
				resp.Header.Set(SourceHeader, "replay")
				return resp, nil
			}
			return nil, errLinkDown
		}))
		reg := prometheus.NewPedanticRegistry()
		cfg.Audit, cfg.Registerer = true, reg
		h := handler(t, cfg)
		const get = " HTTP/1.1\nHost: x"
		for _, path := range []string{"/version", "/api/v1/pods"} {
			if lines, _ := audited(t, h, slices.Repeat([]string{"GET " + path + get}, 1000)...); len(lines) != auditBurst {
				t.Errorf("%d lines of a flood of %s, want %d", len(lines), path, auditBurst)
			}
		}
		if lines, _ := audited(t, h, "GET /api/v1/namespaces/kube-system/secrets"+get); len(lines) != 1 {
			t.Error("noise pushes the line of a list of Secrets aside")
		}
		<-time.After(time.Second)
		lines, _ := audited(t, h, "GET /api/v1/pods"+get)
		if len(lines) != 1 || lines[0]["suppressed"] != int64(1000-auditBurst) {
			t.Errorf("after the flood: %v, want %d suppressed", lines, 1000-auditBurst)
		}
		if got := suppressed(t, reg); got != 2*(1000-auditBurst) {
			t.Errorf("suppressed = %v, want %v", got, 2*(1000-auditBurst))
		}
		var everything []string
		for i := range 2 * maxAuditSubjects {
			everything = append(everything, fmt.Sprintf("M%d /api/v1/pods", i)+get)
		}
		if lines, _ := audited(t, h, everything...); len(lines) > auditAllBurst {
			t.Errorf("%d lines of a flood of everything, want at most %d", len(lines), auditAllBurst)
		}
	})
}

func suppressed(t *testing.T, reg *prometheus.Registry) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "edgehub_proxy_audit_suppressed_total" {
			return f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	t.Fatal("no counter")
	return 0
}

func TestAuditIsOffUnlessAsked(t *testing.T) {
	h := handler(t, config(transportFunc(func(*http.Request) (*http.Response, error) { return nil, errLinkDown })))
	if lines, _ := audited(t, h, "GET /version HTTP/1.1\nHost: x"); len(lines) != 0 {
		t.Errorf("%d lines, want none", len(lines))
	}
}
