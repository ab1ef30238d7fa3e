// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apiserver/pkg/authentication/user"
)

// toServer is a transport to a server over its own protocol, as upstream is one.
func toServer(s *httptest.Server) transportFunc {
	target, err := url.Parse(s.URL)
	if err != nil {
		panic(err)
	}
	return func(req *http.Request) (*http.Response, error) {
		out := req.Clone(req.Context())
		out.URL.Scheme, out.URL.Host = target.Scheme, target.Host
		return s.Client().Transport.RoundTrip(out)
	}
}

func TestNewNamesTheAddressThatIsTaken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cfg := config(transportFunc(nil))
	cfg.Addresses = []string{"127.0.0.1:0", l.Addr().String()}
	_, err = New(cfg)
	if err == nil || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("New() on a taken port = %v, want an error that names %s", err, l.Addr())
	}
	if _, err := New(Config{}); err == nil {
		t.Error("New(Config{}) = nil, want an error")
	}
}

func TestServesBothProtocols(t *testing.T) {
	bothProtocols(t, func(t *testing.T, http2 bool) {
		var seen user.Info
		cfg := config(transportFunc(func(req *http.Request) (*http.Response, error) { return reply(200, req.URL.RequestURI()), nil }))
		cfg.Authenticator = authFunc(func(req *http.Request) (user.Info, error) {
			if req.TLS == nil {
				t.Error("the Authenticator sees no TLS")
			}
			seen = someone
			return someone, nil
		})
		r := start(t, cfg)
		resp, body := get(t, r.client(http2), r.url("/api/v1/pods?limit=1"))
		if resp.StatusCode != 200 || body != "/api/v1/pods?limit=1" || (resp.ProtoMajor == 2) != http2 || seen == nil {
			t.Errorf("GET = %d %q over %s", resp.StatusCode, body, resp.Proto)
		}
	})
}

// A list that breaks off must break off at the client too, never end.
func TestBrokenBodyAborts(t *testing.T) {
	bothProtocols(t, func(t *testing.T, http2 bool) {
		for _, length := range []int64{-1, 1 << 20} {
			reg := prometheus.NewPedanticRegistry()
			cfg := config(transportFunc(func(*http.Request) (*http.Response, error) {
				resp := reply(200, "")
				resp.ContentLength = length
				if length > 0 {
					resp.Header.Set("Content-Length", fmt.Sprint(length))
				}
				resp.Body = io.NopCloser(io.MultiReader(strings.NewReader(`{"items":[`), errReader{}))
				return resp, nil
			}))
			cfg.Registerer = reg
			r := start(t, cfg)
			resp, err := r.client(http2).Get(r.url("/api/v1/pods"))
			if err != nil {
				continue // broken off before the headers were out: as good
			}
			body, err := io.ReadAll(resp.Body)
			if err == nil {
				t.Errorf("length %d: a broken list ended cleanly as %q", length, body)
			}
			resp.Body.Close()
			r.stop()
			if got := counterSum(t, reg, "edgehub_proxy_panics_total"); got != 0 {
				t.Errorf("edgehub_proxy_panics_total = %v, want 0", got)
			}
		}
	})
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errors.New("connection reset") }

// Each event of a watch, and before them the headers, arrive without waiting for
// more; and many watches fit one connection.
func TestWatchesStream(t *testing.T) {
	const watches = 600
	writers := make(chan *io.PipeWriter, watches)
	r := start(t, config(transportFunc(func(*http.Request) (*http.Response, error) {
		body, w := io.Pipe()
		writers <- w
		resp := reply(200, "")
		resp.Body, resp.ContentLength = body, -1
		return resp, nil
	})))
	client := r.client(true)
	var conns atomic.Int32
	client.Transport.(*http.Transport).DialTLSContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conns.Add(1)
		d := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}}
		return d.DialContext(ctx, network, addr)
	}
	var wg sync.WaitGroup
	for range watches {
		resp, err := client.Get(r.url("/api/v1/secrets?watch=1")) // returns: headers are flushed
		if err != nil {
			t.Fatal(err)
		}
		w := <-writers
		wg.Go(func() {
			defer resp.Body.Close()
			in := bufio.NewReader(resp.Body)
			for i := range 3 {
				event := fmt.Sprintf("event %d\n", i)
				io.WriteString(w, event)
				if got, err := in.ReadString('\n'); err != nil || got != event {
					t.Errorf("watch = %q, %v, want %q", got, err, event)
				}
			}
			w.Close()
			if rest, err := io.ReadAll(in); err != nil || len(rest) > 0 {
				t.Errorf("end of the watch = %q, %v, want a clean one", rest, err)
			}
		})
	}
	wg.Wait()
	if n := conns.Load(); n != 1 {
		t.Errorf("%d watches took %d connections, want 1", watches, n)
	}
}

func TestClientThatLeavesCancelsTheTransport(t *testing.T) {
	bothProtocols(t, func(t *testing.T, http2 bool) {
		cancelled := make(chan struct{})
		r := start(t, config(transportFunc(func(req *http.Request) (*http.Response, error) {
			body, w := io.Pipe()
			context.AfterFunc(req.Context(), func() { w.CloseWithError(req.Context().Err()); close(cancelled) })
			resp := reply(200, "")
			resp.Body, resp.ContentLength = body, -1
			return resp, nil
		})))
		ctx, cancel := context.WithCancel(t.Context())
		req, _ := http.NewRequestWithContext(ctx, "GET", r.url("/api/v1/pods?watch=1"), nil)
		resp, err := r.client(http2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		<-cancelled
		resp.Body.Close()
	})
}

func TestUpgrade(t *testing.T) {
	closed := make(chan struct{})
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Header.Get("Upgrade") != "SPDY/3.1" || req.Header.Get("X-Stream-Protocol-Version") != "v4.channel.k8s.io" {
			http.Error(w, "no upgrade", http.StatusBadRequest)
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\n"+SourceHeader+": upstream\r\n\r\n")
		io.Copy(conn, rw) // echo
		close(closed)
	}))
	defer backend.Close()
	reg := prometheus.NewPedanticRegistry()
	cfg := config(toServer(backend))
	cfg.Registerer = reg
	r := start(t, cfg)
	conn := r.dial()
	fmt.Fprintf(conn, "POST /api/v1/namespaces/a/pods/b/exec?command=sh HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\nContent-Length: 0\r\n\r\n")
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, nil)
	if err != nil || resp.StatusCode != 101 || resp.Header.Get(SourceHeader) != "" {
		t.Fatalf("upgrade = %v, %v, want 101 without %s", resp, err, SourceHeader)
	}
	for _, line := range []string{"one\n", "two\n"} {
		io.WriteString(conn, line)
		if got, err := in.ReadString('\n'); err != nil || got != line {
			t.Fatalf("echo = %q, %v, want %q", got, err, line)
		}
	}
	conn.Close()
	<-closed // the backend's side is closed with the client's
	r.stop()
	families, _ := reg.Gather()
	if text := fmt.Sprint(families); !strings.Contains(text, `value:"101"`) {
		t.Errorf("no request counted with code 101: %s", text)
	}
}

// What answers an upgrade with anything but 101 is an ordinary response, and its
// connection does not become the client's.
func TestRefusedUpgrade(t *testing.T) {
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusForbidden)
		io.WriteString(w, `{"kind":"Status"}`)
	}))
	defer backend.Close()
	r := start(t, config(toServer(backend)))
	conn := r.dial()
	request := "GET /api/v1/namespaces/a/pods/b/exec HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
	io.WriteString(conn, request)
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if resp.StatusCode != 403 || string(body) != `{"kind":"Status"}` || err != nil {
		t.Errorf("refused upgrade = %d %q, %v, want the 403 Status", resp.StatusCode, body, err)
	}
	// What follows on this connection is a request to the hub, with its own rules.
	io.WriteString(conn, "GET /api/v1/../secrets HTTP/1.1\r\nHost: x\r\n\r\n")
	if resp, err := http.ReadResponse(in, nil); err == nil && resp.StatusCode != 400 {
		t.Errorf("request smuggled after an upgrade = %d, want 400", resp.StatusCode)
	}
}

// Shutdown: a request that ends by itself gets its whole answer while nobody new
// is let in, then streams end, then Run returns.
func TestShutdownOrder(t *testing.T) {
	bothProtocols(t, func(t *testing.T, http2 bool) {
		finish, listing := make(chan struct{}), make(chan struct{})
		r := start(t, config(transportFunc(func(req *http.Request) (*http.Response, error) {
			if req.URL.RawQuery == "" {
				close(listing)
				<-finish
				return reply(200, "whole"), nil
			}
			body, w := io.Pipe()
			context.AfterFunc(req.Context(), func() { w.CloseWithError(req.Context().Err()) })
			resp := reply(200, "")
			resp.Body, resp.ContentLength = body, -1
			return resp, nil
		})))
		watch, err := r.client(http2).Get(r.url("/api/v1/pods?watch=1"))
		if err != nil {
			t.Fatal(err)
		}
		defer watch.Body.Close()
		watchEnded := make(chan struct{})
		go func() { io.ReadAll(watch.Body); close(watchEnded) }()
		listed := make(chan string, 1)
		go func() {
			_, body := get(t, r.client(http2), r.url("/api/v1/pods"))
			listed <- body
		}()
		<-listing
		stopped := make(chan error, 1)
		go func() { stopped <- r.stop() }()
		for { // until nobody new is let in
			conn, err := net.DialTimeout("tcp", r.addr, time.Second)
			if err != nil {
				break
			}
			conn.Close()
		}
		select {
		case <-watchEnded:
			t.Error("the watch ended before the list")
		default:
		}
		close(finish)
		if body := <-listed; body != "whole" {
			t.Errorf("list during shutdown = %q, want whole", body)
		}
		<-watchEnded
		if err := <-stopped; err != nil {
			t.Errorf("Run() = %v", err)
		}
	})
}

func TestListenerThatFailsEndsRun(t *testing.T) {
	p, err := New(config(transportFunc(nil)))
	if err != nil {
		t.Fatal(err)
	}
	p.Close()
	if err := p.Run(t.Context()); err == nil {
		t.Error("Run() on a closed listener = nil, want an error")
	}
}
