// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

func TestHosts(t *testing.T) {
	for _, test := range []struct {
		name    string
		servers []string
		want    []string
		wantErr []string // all of these, each on its line
	}{
		{name: "port", servers: []string{"https://10.0.0.1:6443"}, want: []string{"10.0.0.1:6443"}},
		{name: "no port", servers: []string{"https://API.example.com/"}, want: []string{"api.example.com:443"}},
		{name: "IPv6", servers: []string{"https://[2001:db8::1]:6443"}, want: []string{"[2001:db8::1]:6443"}},
		{name: "order is kept", servers: []string{"https://b:1", "https://a:1"}, want: []string{"b:1", "a:1"}},
		{name: "none", wantErr: []string{"servers: at least one"}},
		{name: "http", servers: []string{"http://a:1"}, wantErr: []string{`servers[0] "http://a:1": http is not encrypted`}},
		{name: "no scheme", servers: []string{"a:6443"}, wantErr: []string{`servers[0] "a:6443": must begin with https://`}},
		{name: "address alone", servers: []string{"10.0.0.1:6443"}, wantErr: []string{`servers[0] "10.0.0.1:6443": is not a URL`}},
		{name: "empty", servers: []string{""}, wantErr: []string{`servers[0] "": must begin with https://`}},
		{name: "path", servers: []string{"https://a:1/k8s"}, wantErr: []string{`must not have a path, has "/k8s"`}},
		{name: "query", servers: []string{"https://a:1?x"}, wantErr: []string{"query"}},
		{name: "fragment", servers: []string{"https://a:1#"}, wantErr: []string{"fragment"}},
		{name: "no host", servers: []string{"https://:6443"}, wantErr: []string{"has no host"}},
		{name: "no port after colon", servers: []string{"https://a:"}, wantErr: []string{"no port after the colon"}},
		{name: "port 0", servers: []string{"https://a:0"}, wantErr: []string{`port "0"`}},
		{name: "port too large", servers: []string{"https://a:65536"}, wantErr: []string{`port "65536"`}},
		{name: "userinfo is not shown", servers: []string{"https://u:secret@a:1"}, wantErr: []string{`servers[0] "https://xxxxx@a:1": must not hold a user`}},
		{name: "broken userinfo is not shown", servers: []string{"https://u:secret@a:b"}, wantErr: []string{`servers[0] "https://xxxxx@a:b"`}},
		{name: "twice", servers: []string{"https://a", "https://A:443"}, wantErr: []string{"servers[1]", "is given twice"}},
		{name: "all at once", servers: []string{"http://a", "https://b", "https://c/d"}, wantErr: []string{"servers[0]", "servers[2]"}},
		{name: "too many", servers: make([]string, 17), wantErr: []string{"17 are more than the 16"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := Config{Servers: test.servers}.hosts()
			if len(test.wantErr) == 0 {
				if err != nil {
					t.Fatalf("hosts(%q) = %v, want nil", test.servers, err)
				}
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("hosts(%q) (-want +got):\n%s", test.servers, diff)
				}
				return
			}
			for _, want := range test.wantErr {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("hosts(%q) = %v, want an error with %q", test.servers, err, want)
				}
			}
			if err != nil && strings.Contains(err.Error(), "secret") {
				t.Errorf("hosts(%q) = %v, want no password in it", test.servers, err)
			}
		})
	}
}

func TestNewTellsAllErrors(t *testing.T) {
	ca := newAuthority(t)
	k := newKeyDir(t, ca)
	cfg := fast(k, "http://a", "https://b/c")
	cfg.CAFile, cfg.KeyFile = k.path("missing"), ""
	cfg.PingAfter, cfg.BackoffMin = -1, time.Hour
	_, err := New(cfg)
	for _, want := range []string{"servers[0]", "servers[1]", "CAFile", "missing", "KeyFile", "PingAfter", "BackoffMin"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("New() = %v, want an error with %q", err, want)
		}
	}
}

func TestNewFiles(t *testing.T) {
	ca := newAuthority(t)
	node, nodeKey := ca.client(nodeName, time.Time{}, "system:nodes")
	expired, expiredKey := ca.client(nodeName, time.Now().Add(-time.Hour), "system:nodes")
	admin, adminKey := ca.client("admin", time.Time{}, "system:masters")
	nameless, namelessKey := ca.client("", time.Time{}, "system:nodes")
	for _, test := range []struct {
		name          string
		ca, cert, key []byte
		wantErr       string
	}{
		{name: "good", ca: ca.pem, cert: node, key: nodeKey},
		{name: "expired still says who the node is", ca: ca.pem, cert: expired, key: expiredKey},
		{name: "two CAs", ca: append(ca.pem[:len(ca.pem):len(ca.pem)], ca.pem...), cert: node, key: nodeKey},
		{name: "another key", ca: ca.pem, cert: node, key: adminKey, wantErr: "key.pem: tls: private key does not match"},
		{name: "no certificate", ca: ca.pem, cert: nodeKey, key: nodeKey, wantErr: "cert.pem"},
		{name: "no node", ca: ca.pem, cert: admin, key: adminKey, wantErr: "is not a node"},
		{name: "no name", ca: ca.pem, cert: nameless, key: namelessKey, wantErr: "no common name"},
		{name: "no CA", ca: []byte("\n"), cert: node, key: nodeKey, wantErr: "has no PEM certificate"},
		{name: "half a CA", ca: ca.pem[:len(ca.pem)/2], cert: node, key: nodeKey, wantErr: "ca.pem"},
		{name: "CA and a half", ca: append(ca.pem[:len(ca.pem):len(ca.pem)], ca.pem[:len(ca.pem)/2]...), cert: node, key: nodeKey, wantErr: "only 1 of 2"},
		{name: "huge", ca: make([]byte, 2<<20), cert: node, key: nodeKey, wantErr: "is larger than"},
	} {
		t.Run(test.name, func(t *testing.T) {
			k := &keyDir{t: t, dir: t.TempDir()}
			k.write("ca.pem", test.ca)
			k.write("cert.pem", test.cert)
			k.write("key.pem", test.key)
			u, err := New(Config{Servers: []string{"https://a"}, CAFile: k.path("ca.pem"), CertFile: k.path("cert.pem"), KeyFile: k.path("key.pem")})
			if test.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), test.wantErr) {
					t.Fatalf("New() = %v, want an error with %q", err, test.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatalf("New() = %v, want nil", err)
			}
			if got := u.Node().GetName(); got != nodeName {
				t.Errorf("Node().GetName() = %q, want %q", got, nodeName)
			}
			if diff := cmp.Diff([]string{"system:nodes"}, u.Node().GetGroups()); diff != "" {
				t.Errorf("Node().GetGroups() (-want +got):\n%s", diff)
			}
		})
	}
}

func TestNewRegistersOnce(t *testing.T) {
	k := newKeyDir(t, newAuthority(t))
	cfg := fast(k, "https://a")
	cfg.Registerer = prometheus.NewRegistry()
	for i, wantErr := range []bool{false, true} {
		if _, err := New(cfg); (err != nil) != wantErr {
			t.Errorf("New() number %d = %v, want an error: %v", i, err, wantErr)
		}
	}
}
