// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"io"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

// serial answers with the serial number of the client certificate.
func serial(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/watch" {
		watchOrHang(w, r)
		return
	}
	if len(r.TLS.PeerCertificates) > 0 {
		io.WriteString(w, r.TLS.PeerCertificates[0].SerialNumber.String())
	}
}

func reloads(u *Upstream, result string) float64 {
	return testutil.ToFloat64(u.metrics.reloads.WithLabelValues(result))
}

func TestReloadCertificate(t *testing.T) {
	ca := newAuthority(t)
	server := newAPIServer(t, ca, serial)
	k := newKeyDir(t, ca)
	u := start(t, fast(k, server.url()))
	waitUp(t, u, true)
	session := u.session()
	watching := watch(t, u, asNode(t, http.MethodGet, "/watch", nil))
	_, first, err := fetch(u, asNode(t, http.MethodGet, "/", nil))
	if err != nil {
		t.Fatal(err)
	}

	expires := time.Now().Add(77 * time.Hour).Truncate(time.Second)
	cert, key := ca.client(nodeName, expires, "system:nodes", "extra")
	k.link(append(cert, key...))
	eventually(t, "reloaded", func() bool { return reloads(u, "success") == 1 })
	_, second, err := fetch(u, asNode(t, http.MethodGet, "/", nil))
	if err != nil || second == first || second == "" {
		t.Errorf("serial number after the reload = %q, %v, want another than %q", second, err, first)
	}
	if got, want := testutil.ToFloat64(u.metrics.certificateExpiry), float64(expires.Unix()); got != want {
		t.Errorf("edgehub_upstream_certificate_expiration_timestamp_seconds = %v, want %v", got, want)
	}
	if got := u.Node().GetGroups(); len(got) != 2 {
		t.Errorf("Node().GetGroups() = %q, want those of the new certificate", got)
	}

	for n, broken := range [][]byte{
		[]byte("-----BEGIN CERTIFICATE-----\nhalf"),
		nil,
		key,
		func() []byte {
			cert, key := ca.client("system:node:edge-2", time.Time{}, "system:nodes")
			return append(cert, key...)
		}(),
	} {
		k.link(broken)
		eventually(t, "broken file was seen", func() bool { return reloads(u, "failure") == float64(n+1) })
		if _, got, err := fetch(u, asNode(t, http.MethodGet, "/", nil)); err != nil || got != second {
			t.Errorf("serial number with broken file %d = %q, %v, want %q", n, got, err, second)
		}
	}
	if err := os.Remove(k.current()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "missing file was seen", func() bool { return reloads(u, "failure") == 5 })
	k.link(append(cert, key...))
	eventually(t, "good file was seen", func() bool { return reloads(u, "success") == 2 })
	if n := reloads(u, "failure"); n != 5 {
		t.Errorf("edgehub_upstream_reloads_total{result=failure} = %v, want 5: once for each broken file", n)
	}
	if got := u.Node().GetName(); got != nodeName {
		t.Errorf("Node().GetName() = %q, want %q", got, nodeName)
	}
	if u.session() != session {
		t.Error("a reload brought the link down")
	}
	select {
	case err := <-watching:
		t.Errorf("watch ended with %v, want it to stay", err)
	default:
	}
}

func TestReloadCA(t *testing.T) {
	ca, next := newAuthority(t), newAuthority(t)
	server := newAPIServer(t, ca, serial)
	k := newKeyDir(t, ca)
	u := start(t, fast(k, server.url()))
	waitUp(t, u, true)
	k.write("ca.crt", append(ca.pem[:len(ca.pem):len(ca.pem)], next.pem...))
	eventually(t, "both CAs", func() bool { return reloads(u, "success") == 1 })
	if _, _, err := fetch(u, asNode(t, http.MethodGet, "/", nil)); err != nil {
		t.Errorf("RoundTrip() with both CAs = %v, want nil", err)
	}
	k.write("ca.crt", next.pem)
	waitUp(t, u, false) // this server is not trusted any more
	k.write("ca.crt", ca.pem)
	waitUp(t, u, true)
}
