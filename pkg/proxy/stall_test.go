// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// endless is a body that says when it is closed.
type endless struct{ closed chan struct{} }

func (e endless) Read(p []byte) (int, error) { return len(p), nil }
func (e endless) Close() error               { close(e.closed); return nil }

// A client that does not read loses the response, and nothing else: neither the
// connection, where it has other requests, nor a watch that has nothing to say.
func TestStalledResponseIsEnded(t *testing.T) {
	for _, query := range []string{"", "?watch=1"} {
		bothProtocols(t, func(t *testing.T, http2 bool) {
			quiet, say := io.Pipe()
			body := endless{make(chan struct{})}
			reg := prometheus.NewPedanticRegistry()
			cfg := config(transportFunc(func(req *http.Request) (*http.Response, error) {
				resp := reply(200, "small")
				switch req.URL.Path {
				case "/api/v1/pods":
					resp.Body, resp.ContentLength = body, -1
				case "/api/v1/secrets":
					resp.Body, resp.ContentLength = quiet, -1
				}
				return resp, nil
			}))
			cfg.StallTimeout, cfg.Registerer = 200*time.Millisecond, reg
			r := start(t, cfg)
			c := r.client(http2)
			watch, err := c.Get(r.url("/api/v1/secrets?watch=1"))
			if err != nil {
				t.Fatal(err)
			}
			defer watch.Body.Close()
			resp, err := c.Get(r.url("/api/v1/pods" + query)) // and never read
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			<-body.closed
			if n, err := io.Copy(io.Discard, resp.Body); err == nil {
				t.Errorf("what was sent before the stall ends cleanly after %d bytes", n)
			}
			if resp, body := get(t, c, r.url("/api/v1/nodes")); resp.StatusCode != 200 || body != "small" {
				t.Errorf("GET after a stall = %d %q", resp.StatusCode, body)
			}
			go io.WriteString(say, "event\n")
			if event, err := bufio.NewReader(watch.Body).ReadString('\n'); err != nil || event != "event\n" {
				t.Errorf("watch beside a stalled response = %q, %v", event, err)
			}
			say.Close()
			r.stop()
			if got := counterSum(t, reg, "edgehub_proxy_stalled_total"); got != 1 {
				t.Errorf("edgehub_proxy_stalled_total = %v, want 1", got)
			}
			if got := counterSum(t, reg, "edgehub_proxy_panics_total"); got != 0 {
				t.Errorf("edgehub_proxy_panics_total = %v, want 0", got)
			}
		})
	}
}

// A client that does not even read its HTTP/2 connection loses that.
func TestStalledConnectionIsClosed(t *testing.T) {
	body := endless{make(chan struct{})}
	cfg := config(transportFunc(func(*http.Request) (*http.Response, error) {
		resp := reply(200, "")
		resp.Body, resp.ContentLength = body, -1
		return resp, nil
	}))
	cfg.StallTimeout = 200 * time.Millisecond
	r := start(t, cfg)
	f := http2.NewFramer(r.dialHTTP2(), nil)
	var headers bytes.Buffer
	encoder := hpack.NewEncoder(&headers)
	for _, h := range [][2]string{{":method", "GET"}, {":scheme", "https"}, {":authority", "x"}, {":path", "/api/v1/pods"}} {
		encoder.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: headers.Bytes(), EndHeaders: true, EndStream: true})
	<-body.closed
}

// An upgraded connection may be silent, and may be slow.
func TestUpgradesDoNotStall(t *testing.T) {
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n\r\n")
		io.Copy(conn, rw) // echo
	}))
	defer backend.Close()
	reg := prometheus.NewPedanticRegistry()
	cfg := config(toServer(backend))
	cfg.StallTimeout, cfg.Registerer = 50*time.Millisecond, reg
	r := start(t, cfg)
	conn := r.dial()
	fmt.Fprintf(conn, "POST /api/v1/namespaces/a/pods/b/exec HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0\r\n\r\n")
	in := bufio.NewReader(conn)
	if resp, err := http.ReadResponse(in, nil); err != nil || resp.StatusCode != 101 {
		t.Fatalf("upgrade = %v, %v, want 101", resp, err)
	}
	for began := time.Now(); time.Since(began) < 4*cfg.StallTimeout; {
		io.WriteString(conn, "line\n")
		if got, err := in.ReadString('\n'); err != nil || got != "line\n" {
			t.Fatalf("echo = %q, %v", got, err)
		}
	}
	conn.Close()
	r.stop()
	if got := counterSum(t, reg, "edgehub_proxy_stalled_total"); got != 0 {
		t.Errorf("edgehub_proxy_stalled_total = %v, want 0", got)
	}
}

// stuckWriter takes its time for each Write, unless it is told not to wait.
type stuckWriter struct {
	*httptest.ResponseRecorder
	takes    time.Duration
	deadline chan struct{}
}

func (w stuckWriter) Write(p []byte) (int, error) {
	select {
	case <-time.After(w.takes):
		return len(p), nil
	case <-w.deadline:
		return 0, os.ErrDeadlineExceeded
	}
}

func (w stuckWriter) SetWriteDeadline(time.Time) error { close(w.deadline); return nil }

// The limit is of one Write, not of a response.
func TestStallLimit(t *testing.T) {
	for _, tc := range []struct {
		takes time.Duration
		want  error
	}{{59 * time.Second, nil}, {time.Hour, os.ErrDeadlineExceeded}} {
		synctest.Test(t, func(t *testing.T) {
			s := newStalls(time.Minute, newMetrics(nil))
			go s.run(t.Context())
			var err error
			began, n := time.Now(), 0
			h := Chain(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				for ; n < 5 && err == nil; n++ {
					_, err = io.Copy(w, strings.NewReader("part"))
				}
			}), WithStallLimit(s))
			h.ServeHTTP(stuckWriter{httptest.NewRecorder(), tc.takes, make(chan struct{})}, httptest.NewRequestWithContext(t.Context(), "GET", "/", nil))
			took := time.Since(began)
			if !errors.Is(err, tc.want) || err != nil && (took < time.Minute || took > 70*time.Second) {
				t.Errorf("Writes of %v: %v in the %d. after %v, want %v after a minute", tc.takes, err, n, took, tc.want)
			}
			if len(s.open) != 0 {
				t.Errorf("%d responses are still looked at", len(s.open))
			}
		})
	}
}
