// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"errors"
	"io"
	"net/http"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// whoami answers with the client certificate's name and the headers that matter.
func whoami(w http.ResponseWriter, r *http.Request) {
	name := "nobody"
	if len(r.TLS.PeerCertificates) > 0 {
		name = r.TLS.PeerCertificates[0].Subject.CommonName
	}
	io.WriteString(w, name+"|"+r.Header.Get("Authorization")+"|"+r.Header.Get("Impersonate-User"))
}

type closeTracker struct {
	io.Reader
	closed bool
}

func (c *closeTracker) Close() error { c.closed = true; return nil }

func TestCredentialRule(t *testing.T) {
	ca := newAuthority(t)
	server := newAPIServer(t, ca, whoami)
	u := start(t, fast(newKeyDir(t, ca), server.url()))
	waitUp(t, u, true)
	node := &user.DefaultInfo{Name: nodeName, Groups: []string{"system:nodes"}}
	for _, test := range []struct {
		name   string
		user   user.Info
		header http.Header
		want   string // "": refused
	}{
		{name: "node", user: node, want: nodeName + "||"},
		{name: "token", header: http.Header{"Authorization": {"Bearer t"}}, want: "nobody|Bearer t|"},
		{name: "token of the node's user", user: node, header: http.Header{"Authorization": {"Bearer t"}}, want: "nobody|Bearer t|"},
		{name: "token may impersonate", header: http.Header{"Authorization": {"Bearer t"}, "Impersonate-User": {"a"}}, want: "nobody|Bearer t|a"},

		{name: "nothing"},
		{name: "another user", user: &user.DefaultInfo{Name: "system:node:edge-2", Groups: []string{"system:nodes"}}},
		{name: "name without the group", user: &user.DefaultInfo{Name: nodeName, Groups: []string{"system:authenticated"}}},
		{name: "group without the name", user: &user.DefaultInfo{Groups: []string{"system:nodes"}}},
		{name: "no header value", user: node, header: http.Header{"Authorization": {}}},
		{name: "nil header value", user: node, header: http.Header{"Authorization": nil}},
		{name: "empty", user: node, header: http.Header{"Authorization": {""}}},
		{name: "blank", user: node, header: http.Header{"Authorization": {"  "}}},
		{name: "empty token", user: node, header: http.Header{"Authorization": {"Bearer "}}},
		{name: "no scheme", user: node, header: http.Header{"Authorization": {"token"}}},
		{name: "doubled", user: node, header: http.Header{"Authorization": {"Bearer a", "Bearer b"}}},
		{name: "not canonical", user: node, header: http.Header{"authorization": {"Bearer a"}}},
		{name: "node impersonates a user", user: node, header: http.Header{"Impersonate-User": {"admin"}}},
		{name: "node impersonates a group", user: node, header: http.Header{"Impersonate-Group": {"system:masters"}}},
		{name: "node impersonates, not canonical", user: node, header: http.Header{"impersonate-extra-a": {""}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			ctx := t.Context()
			if test.user != nil {
				ctx = request.WithUser(ctx, test.user)
			}
			body := &closeTracker{Reader: http.NoBody}
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://x/api", body)
			if err != nil {
				t.Fatal(err)
			}
			if test.header != nil {
				req.Header = test.header
			}
			before := server.requests.Load()
			_, got, err := fetch(u, req)
			if test.want == "" {
				if !errors.Is(err, ErrCredential) || errors.Is(err, ErrUnavailable) {
					t.Errorf("RoundTrip() = %v, want ErrCredential", err)
				}
				if n := server.requests.Load() - before; n != 0 {
					t.Errorf("server got %d requests, want 0", n)
				}
				if !body.closed {
					t.Error("request body is open, want it closed")
				}
				return
			}
			if err != nil || got != test.want {
				t.Errorf("RoundTrip() = %q, %v, want %q", got, err, test.want)
			}
		})
	}
	if got, want := testutil.ToFloat64(u.metrics.requests.WithLabelValues("refused")), 15.0; got != want {
		t.Errorf("edgehub_upstream_requests_total{code=refused} = %v, want %v", got, want)
	}
}

// TestNoCertificateWithToken looks at the handshakes: the server asked for a
// certificate each time.
func TestNoCertificateWithToken(t *testing.T) {
	ca := newAuthority(t)
	server := newAPIServer(t, ca, whoami)
	u := start(t, fast(newKeyDir(t, ca), server.url()))
	waitUp(t, u, true)
	without := func() (n int) {
		for _, name := range server.peers() {
			if name == "" {
				n++
			} else if name != nodeName {
				t.Errorf("certificate of %q, want only the node's", name)
			}
		}
		return n
	}
	if n := without(); n != 0 {
		t.Errorf("%d connections without certificate after a probe, want 0", n)
	}
	for range 3 {
		if _, _, err := fetch(u, asToken(t, "/a")); err != nil {
			t.Fatal(err)
		}
	}
	if n := without(); n != 1 {
		t.Errorf("%d connections without certificate after requests with a token, want 1", n)
	}
	for range 3 {
		if _, _, err := fetch(u, asNode(t, http.MethodGet, "/a", nil)); err != nil {
			t.Fatal(err)
		}
	}
	if n := without(); n != 1 {
		t.Errorf("%d connections without certificate after requests of the node, want still 1", n)
	}
}
