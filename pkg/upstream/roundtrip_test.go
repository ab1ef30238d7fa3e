// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// up starts a server with this handler and an Upstream that is up.
func up(t *testing.T, handler http.HandlerFunc) (*Upstream, *apiServer) {
	t.Helper()
	ca := newAuthority(t)
	server := newAPIServer(t, ca, handler)
	u := start(t, fast(newKeyDir(t, ca), server.url()))
	waitUp(t, u, true)
	return u, server
}

func TestRoundTripDoesNotTouchTheRequest(t *testing.T) {
	u, server := up(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s %s %s %s", r.Proto, r.Method, r.Host, r.URL.RequestURI(), b)
	})
	req := asNode(t, http.MethodPut, "/api/v1/pods/a%20b?watch=1&x=%2F", strings.NewReader("body"))
	req.Host = "localhost:10268"
	req.RequestURI = "/api"
	req.Header.Set("Accept-Encoding", "identity")
	header, url := req.Header.Clone(), req.URL.String()
	resp, err := u.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if want := "HTTP/2.0 PUT " + server.addr + " /api/v1/pods/a%20b?watch=1&x=%2F body"; err != nil || string(got) != want {
		t.Errorf("body = %q, %v, want %q", got, err, want)
	}
	if resp.Request != req {
		t.Errorf("resp.Request = %p, want the caller's %p", resp.Request, req)
	}
	if diff := cmp.Diff(header, req.Header); diff != "" {
		t.Errorf("request header changed (-want +got):\n%s", diff)
	}
	if req.URL.String() != url || req.Host != "localhost:10268" || req.RequestURI != "/api" {
		t.Errorf("request changed to %s, Host %q, RequestURI %q", req.URL, req.Host, req.RequestURI)
	}
}

func TestRoundTripUnpacksGzip(t *testing.T) {
	list := strings.Repeat("item ", 100_000)
	u, _ := up(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Accept-Encoding") != "gzip" {
			http.Error(w, "want gzip", http.StatusNotAcceptable)
			return
		}
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		defer z.Close()
		io.WriteString(z, list)
	})
	before := testutil.ToFloat64(u.metrics.receivedBytes)
	req := asNode(t, http.MethodGet, "/", nil)
	req.Header.Set("Accept-Encoding", "br, identity")
	if _, got, err := fetch(u, req); err != nil || got != list {
		t.Errorf("fetch() = %d bytes, %v, want %d", len(got), err, len(list))
	}
	if n := testutil.ToFloat64(u.metrics.receivedBytes) - before; n < 100 || n > 50_000 {
		t.Errorf("edgehub_upstream_received_bytes_total grew by %v, want what came over the link", n)
	}
}

func TestRoundTripRedirect(t *testing.T) {
	for _, test := range []struct {
		status  int
		wantErr bool
	}{{300, true}, {301, true}, {302, true}, {303, true}, {304, false}, {307, true}, {308, true}, {400, false}} {
		t.Run(fmt.Sprint(test.status), func(t *testing.T) {
			u, server := up(t, func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Location", "/elsewhere")
				w.WriteHeader(test.status)
			})
			status, _, err := fetch(u, asNode(t, http.MethodGet, "/", nil))
			if got := errors.Is(err, ErrRedirect); got != test.wantErr {
				t.Errorf("RoundTrip() = %v, want ErrRedirect: %v", err, test.wantErr)
			}
			if !test.wantErr && status != test.status {
				t.Errorf("RoundTrip() = status %d, want %d", status, test.status)
			}
			if errors.Is(err, ErrUnavailable) {
				t.Errorf("RoundTrip() = %v, want no ErrUnavailable", err)
			}
			if n := server.requests.Load(); n != 1 {
				t.Errorf("server got %d requests, want 1: none is followed", n)
			}
		})
	}
}

func TestRoundTripCallerErrors(t *testing.T) {
	reached := make(chan struct{}, 1)
	u, _ := up(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/body" {
			io.Copy(io.Discard, r.Body)
			return
		}
		if r.URL.Path == "/stream" {
			w.(http.Flusher).Flush()
		}
		reached <- struct{}{}
		<-r.Context().Done()
	})
	session := u.session()

	ctx, cancel := context.WithCancel(t.Context())
	req := asNode(t, http.MethodGet, "/", nil)
	req = req.WithContext(withUserOf(ctx, req))
	go func() { <-reached; cancel() }()
	if _, err := u.RoundTrip(req); !errors.Is(err, context.Canceled) || errors.Is(err, ErrUnavailable) {
		t.Errorf("RoundTrip() cancelled by the caller = %v, want context.Canceled alone", err)
	}

	ctx, cancel = context.WithCancel(t.Context())
	req = asNode(t, http.MethodGet, "/stream", nil)
	resp, err := u.RoundTrip(req.WithContext(withUserOf(ctx, req)))
	if err != nil {
		t.Fatal(err)
	}
	go func() { <-reached; cancel() }()
	if _, err := io.ReadAll(resp.Body); !errors.Is(err, context.Canceled) || errors.Is(err, ErrUnavailable) {
		t.Errorf("Body.Read() cancelled by the caller = %v, want context.Canceled alone", err)
	}
	resp.Body.Close()

	broken := errors.New("client went away")
	_, _, err = fetch(u, asNode(t, http.MethodPost, "/body", io.MultiReader(strings.NewReader("part"), failing{broken})))
	if !errors.Is(err, broken) || errors.Is(err, ErrUnavailable) {
		t.Errorf("RoundTrip() with a broken request body = %v, want its error alone", err)
	}
	if u.session() != session || u.servers[0].suspicions() != 0 {
		t.Errorf("the callers' errors were taken for the server's")
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

func TestUpgrade(t *testing.T) {
	u, server := up(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "echo" || r.Header.Get("Accept-Encoding") != "" || r.Proto != "HTTP/1.1" {
			http.Error(w, fmt.Sprint(r.Proto, r.Header), http.StatusBadRequest)
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		fmt.Fprintf(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\nhello ")
		rw.Flush()
		io.Copy(conn, rw)
	})
	for _, bearer := range []bool{false, true} {
		req := asNode(t, http.MethodPost, "/exec", nil)
		if bearer {
			req = asToken(t, "/exec")
		}
		req.Header.Set("Connection", "keep-alive, upgrade")
		req.Header.Set("Upgrade", "echo")
		resp, err := u.RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != http.StatusSwitchingProtocols || resp.Request != req {
			t.Fatalf("RoundTrip() = %d, Request %p, want 101, %p", resp.StatusCode, resp.Request, req)
		}
		stream, ok := resp.Body.(io.ReadWriteCloser)
		if !ok {
			t.Fatalf("Body is a %T, want an io.ReadWriteCloser", resp.Body)
		}
		if _, err := io.WriteString(stream, "world\n"); err != nil {
			t.Fatal(err)
		}
		if got, err := bufio.NewReader(stream).ReadString('\n'); err != nil || got != "hello world\n" {
			t.Errorf("stream = %q, %v, want %q", got, err, "hello world\n")
		}
		if bearer {
			// What hangs on the connection ends with the server.
			server.stop()
			if _, err := io.ReadAll(stream); err == nil {
				waitUp(t, u, false) // the peer's FIN came before it was known to be down
			} else if !errors.Is(err, ErrUnavailable) {
				t.Errorf("Read() after the server went = %v, want ErrUnavailable", err)
			}
		}
		if err := stream.Close(); err != nil && !bearer {
			t.Errorf("Close() = %v, want nil", err)
		}
		if _, err := stream.Read(make([]byte, 1)); err == nil || errors.Is(err, ErrUnavailable) {
			t.Errorf("Read() after Close = %v, want an error of the closed body", err)
		}
	}
}

func TestUpgradeRefusedClosesTheConnection(t *testing.T) {
	u, _ := up(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		io.WriteString(w, r.Proto+" "+r.RemoteAddr)
	})
	seen := map[string]bool{}
	for range 2 {
		req := asNode(t, http.MethodPost, "/exec", nil)
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", "SPDY/3.1")
		status, body, err := fetch(u, req)
		if status != http.StatusForbidden || !strings.HasPrefix(body, "HTTP/1.1 ") || err != nil || seen[body] {
			t.Errorf("RoundTrip() = %d %q, %v, want 403 over a new HTTP/1.1 connection", status, body, err)
		}
		seen[body] = true
	}
	eventually(t, "connections of refused upgrades are closed", func() bool {
		x := u.session()
		x.mu.Lock()
		defer x.mu.Unlock()
		return len(x.conns) == 0
	})
}

func TestMetrics(t *testing.T) {
	ca := newAuthority(t)
	server := newAPIServer(t, ca, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/404" {
			w.WriteHeader(http.StatusNotFound)
		}
	})
	k := newKeyDir(t, ca)
	cfg := fast(k, server.url())
	reg := prometheus.NewPedanticRegistry()
	cfg.Registerer = reg
	u := start(t, cfg)
	waitUp(t, u, true)
	for _, path := range []string{"/", "/", "/404"} {
		if _, _, err := fetch(u, asNode(t, http.MethodGet, path, nil)); err != nil {
			t.Fatal(err)
		}
	}
	problems, err := testutil.GatherAndLint(reg)
	if err != nil || len(problems) > 0 {
		t.Errorf("GatherAndLint() = %v, %v, want none", problems, err)
	}
	want := fmt.Sprintf(`
# HELP edgehub_upstream_changes_total How often the upstream as a whole became reachable or ceased to be.
# TYPE edgehub_upstream_changes_total counter
edgehub_upstream_changes_total 1
# HELP edgehub_upstream_certificate_expiration_timestamp_seconds When the node's client certificate expires, in seconds since 1970.
# TYPE edgehub_upstream_certificate_expiration_timestamp_seconds gauge
edgehub_upstream_certificate_expiration_timestamp_seconds %v
# HELP edgehub_upstream_healthy Whether the API server is known to be ready (1) or not (0).
# TYPE edgehub_upstream_healthy gauge
edgehub_upstream_healthy{server=%q} 1
`, float64(u.servers[0].creds.notAfter.Unix()), server.addr)
	if err := testutil.GatherAndCompare(reg, strings.NewReader(want), "edgehub_upstream_changes_total",
		"edgehub_upstream_certificate_expiration_timestamp_seconds", "edgehub_upstream_healthy"); err != nil {
		t.Error(err)
	}
	for code, want := range map[string]float64{"2xx": 2, "4xx": 1, "error": 0} {
		if got := testutil.ToFloat64(u.metrics.requests.WithLabelValues(code)); got != want {
			t.Errorf("edgehub_upstream_requests_total{code=%q} = %v, want %v", code, got, want)
		}
	}
	if n := testutil.CollectAndCount(u.metrics.probeDuration); n != 1 {
		t.Errorf("probe durations = %d, want 1", n)
	}
}

func TestLargeBodiesBothWays(t *testing.T) {
	u, _ := up(t, func(w http.ResponseWriter, r *http.Request) {
		http.NewResponseController(w).EnableFullDuplex()
		io.Copy(w, r.Body)
	})
	sent := bytes.Repeat([]byte("0123456789abcdef"), 200_000)
	if _, got, err := fetch(u, asNode(t, http.MethodPost, "/", bytes.NewReader(sent))); err != nil || got != string(sent) {
		t.Errorf("echo of %d bytes = %d bytes, %v", len(sent), len(got), err)
	}
}
