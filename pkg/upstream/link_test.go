// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"errors"
	"io"
	"net/http"
	"testing"
	"time"

	"github.com/edgehub/edgehub/test/link"
)

// watchOrHang holds /watch open after a first byte, sends without end on
// /stream, and answers / at once; all else never.
func watchOrHang(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/":
		io.WriteString(w, "fine")
		return
	case "/watch":
		io.WriteString(w, "x")
		w.(http.Flusher).Flush()
	case "/stream":
		for tick := time.NewTicker(10 * time.Millisecond); ; {
			io.WriteString(w, "x")
			w.(http.Flusher).Flush()
			select {
			case <-tick.C:
			case <-r.Context().Done():
				tick.Stop()
				return
			}
		}
	}
	<-r.Context().Done()
}

// behindLink starts a server, a link to it and an Upstream that is up.
func behindLink(t *testing.T, change func(*Config)) (*Upstream, *apiServer, *link.Link) {
	t.Helper()
	ca := newAuthority(t)
	server := newAPIServer(t, ca, watchOrHang)
	l, err := link.New(t.Context(), server.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	cfg := fast(newKeyDir(t, ca), l.URL())
	if change != nil {
		change(&cfg)
	}
	u := start(t, cfg)
	waitUp(t, u, true)
	return u, server, l
}

// watch opens a watch and reads its first byte. The channel gets the error that
// ends it.
func watch(t *testing.T, u *Upstream, req *http.Request) <-chan error {
	t.Helper()
	resp, err := u.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(resp.Body, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() {
		defer resp.Body.Close()
		for b := make([]byte, 512); ; {
			if _, err := resp.Body.Read(b); err != nil {
				ended <- err
				return
			}
		}
	}()
	return ended
}

// begin sends a request that is not answered.
func begin(t *testing.T, u *Upstream, server *apiServer, req *http.Request) <-chan error {
	t.Helper()
	before := server.requests.Load()
	ended := make(chan error, 1)
	go func() {
		_, _, err := fetch(u, req)
		ended <- err
	}()
	eventually(t, "request arrived", func() bool { return server.requests.Load() > before })
	return ended
}

func wantUnavailable(t *testing.T, what string, ended <-chan error, limit time.Duration) {
	t.Helper()
	select {
	case err := <-ended:
		if !errors.Is(err, ErrUnavailable) {
			t.Errorf("%s = %v, want ErrUnavailable", what, err)
		}
	case <-time.After(limit):
		t.Errorf("%s has not ended after %v", what, limit)
	}
}

func TestHalfOpenLink(t *testing.T) {
	for _, test := range []struct {
		name   string
		d      link.Direction
		change func(*Config)
		limit  time.Duration // cut to down
		heal   time.Duration // healed to up
	}{
		{name: "both", d: link.Both, limit: 3 * time.Second, heal: 3 * time.Second},
		{name: "to server", d: link.ToServer, limit: 3 * time.Second, heal: 3 * time.Second},
		{name: "to client", d: link.ToClient, limit: 3 * time.Second, heal: 3 * time.Second},
		{
			name: "found by probes alone", d: link.Both, limit: 3 * time.Second, heal: 3 * time.Second,
			change: func(c *Config) { c.PingAfter = time.Hour },
		},
		{
			name: "default times", d: link.Both, limit: 10 * time.Second, heal: 4 * time.Second,
			change: func(c *Config) {
				*c = Config{Servers: c.Servers, CAFile: c.CAFile, CertFile: c.CertFile, KeyFile: c.KeyFile}
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			if testing.Short() && test.limit > 5*time.Second {
				t.Skip("takes 10 s")
			}
			t.Parallel()
			u, server, l := behindLink(t, test.change)
			watching := watch(t, u, asNode(t, http.MethodGet, "/watch", nil))
			token := watch(t, u, asToken(t, "/watch"))
			hanging := begin(t, u, server, asNode(t, http.MethodGet, "/hang", nil))
			cut := time.Now()
			l.BlackHole(test.d)
			late := make(chan error, 1)
			go func() {
				_, _, err := fetch(u, asNode(t, http.MethodGet, "/", nil))
				late <- err
			}()
			waitUp(t, u, false)
			found := time.Since(cut)
			if found > test.limit {
				t.Errorf("down %v after the cut, want at most %v", found, test.limit)
			}
			for what, ended := range map[string]<-chan error{"watch": watching, "token's watch": token, "request": hanging, "request after the cut": late} {
				wantUnavailable(t, what, ended, time.Second)
			}
			now := time.Now()
			if _, _, err := fetch(u, asNode(t, http.MethodGet, "/", nil)); !errors.Is(err, ErrUnavailable) {
				t.Errorf("RoundTrip() while down = %v, want ErrUnavailable", err)
			}
			if took := time.Since(now); took > 100*time.Millisecond {
				t.Errorf("RoundTrip() while down took %v, want no wait", took)
			}
			now = time.Now()
			if err := l.Heal(); err != nil {
				t.Fatal(err)
			}
			waitUp(t, u, true)
			healed := time.Since(now)
			if healed > test.heal {
				t.Errorf("up %v after the link was, want at most %v", healed, test.heal)
			}
			if _, got, err := fetch(u, asNode(t, http.MethodGet, "/", nil)); got != "fine" || err != nil {
				t.Errorf("RoundTrip() after the link was healed = %q, %v, want fine", got, err)
			}
			t.Logf("down after %v, up after %v", found, healed)
		})
	}
}

// TestHalfOpenWhileBytesCome is the hardest case: the server streams on over a
// link on which nothing reaches it.
func TestHalfOpenWhileBytesCome(t *testing.T) {
	t.Parallel()
	u, _, l := behindLink(t, nil)
	streaming := watch(t, u, asNode(t, http.MethodGet, "/stream", nil))
	l.BlackHole(link.ToServer)
	waitUp(t, u, false)
	wantUnavailable(t, "stream", streaming, time.Second)
}

func TestStuckPoolIsNotALostLink(t *testing.T) {
	t.Parallel()
	// Probes are so rare that only pings can find out.
	u, server, l := behindLink(t, func(c *Config) { c.ProbePeriod = time.Hour })
	hanging := begin(t, u, server, asNode(t, http.MethodGet, "/hang", nil))
	session := u.session()
	l.BlackHole(link.Both)
	eventually(t, "the ping was missed", func() bool { return u.servers[0].suspicions() > 0 })
	if err := l.Heal(); err != nil {
		t.Fatal(err)
	}
	wantUnavailable(t, "request on the stuck connection", hanging, time.Second)
	if _, got, err := fetch(u, asNode(t, http.MethodGet, "/", nil)); got != "fine" || err != nil {
		t.Errorf("RoundTrip() after that = %q, %v, want fine", got, err)
	}
	if u.session() != session {
		t.Error("went down, want a new connection only")
	}
}

func TestRefusedAndReset(t *testing.T) {
	t.Parallel()
	// Without traffic nothing would be found for an hour.
	u, server, l := behindLink(t, func(c *Config) { c.ProbePeriod, c.PingAfter = time.Hour, time.Hour })
	hanging := begin(t, u, server, asNode(t, http.MethodGet, "/hang", nil))
	watching := watch(t, u, asToken(t, "/watch"))
	l.Cut()
	wantUnavailable(t, "request", hanging, 2*time.Second)
	wantUnavailable(t, "watch", watching, 2*time.Second)
	if u.Up() {
		t.Error("Up() after a reset = true, want false: it is known before the request's error")
	}
	if err := l.Heal(); err != nil {
		t.Fatal(err)
	}
	waitUp(t, u, true)
	if _, got, err := fetch(u, asNode(t, http.MethodGet, "/", nil)); got != "fine" || err != nil {
		t.Errorf("RoundTrip() after that = %q, %v, want fine", got, err)
	}
}

func TestTruncatedAnswer(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t)
	server := newAPIServer(t, ca, func(w http.ResponseWriter, r *http.Request) {
		w.Write(make([]byte, 1<<20))
	})
	l, err := link.New(t.Context(), server.addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	u := start(t, fast(newKeyDir(t, ca), l.URL()))
	waitUp(t, u, true)
	l.TruncateAfter(200_000)
	req := asNode(t, http.MethodGet, "/", nil)
	req.Header.Set("Range", "bytes=0-") // no gzip
	_, body, err := fetch(u, req)
	if !errors.Is(err, ErrUnavailable) || errors.Is(err, io.EOF) {
		t.Errorf("fetch() = %d bytes, %v, want ErrUnavailable", len(body), err)
	}
}

// TestRestart is an API server that answers 403 to all after its start, as long
// as it is not ready: nobody may see that.
func TestRestart(t *testing.T) {
	for _, test := range []struct {
		name     string
		idle     bool // no request is in flight when it goes
		notReady int32
	}{
		{"busy", false, http.StatusInternalServerError},
		{"idle", true, http.StatusInternalServerError},
		{"busy, 403", false, http.StatusForbidden},
		{"idle, 403", true, http.StatusForbidden},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			ca := newAuthority(t)
			server := newAPIServer(t, ca, nil)
			server.handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if server.status.Load() != http.StatusOK {
					w.WriteHeader(http.StatusForbidden)
					return
				}
				watchOrHang(w, r)
			})
			u := start(t, fast(newKeyDir(t, ca), server.url()))
			waitUp(t, u, true)
			for range 2 {
				if _, _, err := fetch(u, asNode(t, http.MethodGet, "/", nil)); err != nil {
					t.Fatal(err)
				}
			}
			var watching <-chan error
			if !test.idle {
				watching = watch(t, u, asNode(t, http.MethodGet, "/watch", nil))
			}
			server.stop()
			server.status.Store(test.notReady)
			probes := server.probes.Load()
			server.start()
			answered := server.requests.Load()
			for server.probes.Load() < probes+4 {
				status, _, err := fetch(u, asNode(t, http.MethodGet, "/", nil))
				if err == nil {
					t.Fatalf("RoundTrip() to a server that is not ready = %d, want an error", status)
				}
				if !errors.Is(err, ErrUnavailable) {
					t.Fatalf("RoundTrip() = %v, want ErrUnavailable", err)
				}
			}
			if n := server.requests.Load() - answered; n != 0 {
				t.Errorf("%d requests reached a server that is not ready, want 0", n)
			}
			if watching != nil {
				wantUnavailable(t, "watch", watching, time.Second)
			}
			server.status.Store(http.StatusOK)
			waitUp(t, u, true)
			if _, got, err := fetch(u, asNode(t, http.MethodGet, "/", nil)); got != "fine" || err != nil {
				t.Errorf("RoundTrip() after the restart = %q, %v, want fine", got, err)
			}
		})
	}
}

func TestFailOverAndBack(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t)
	first, second := newAPIServer(t, ca, watchOrHang), newAPIServer(t, ca, watchOrHang)
	cfg := fast(newKeyDir(t, ca), first.url(), second.url())
	cfg.ProbePeriod = 50 * time.Millisecond
	// A server that is stopped says so; one that is slow here is not to be taken for gone.
	cfg.PingTimeout, cfg.ProbeTimeout = 10*time.Second, 10*time.Second
	u := start(t, cfg)
	waitUp(t, u, true)
	eventually(t, "both are up, the first is chosen", func() bool {
		return u.Server() == first.addr && u.servers[1].current() != nil
	})
	watching := watch(t, u, asNode(t, http.MethodGet, "/watch", nil))
	first.stop()
	wantUnavailable(t, "watch", watching, 2*time.Second)
	eventually(t, "the second takes over", func() bool { return u.Server() == second.addr })
	before := second.requests.Load()
	if _, got, err := fetch(u, asNode(t, http.MethodGet, "/", nil)); got != "fine" || err != nil {
		t.Errorf("RoundTrip() to the second = %q, %v, want fine", got, err)
	}
	if n := second.requests.Load() - before; n != 1 {
		t.Errorf("the second got %d requests, want 1", n)
	}
	staying := watch(t, u, asNode(t, http.MethodGet, "/watch", nil))
	first.start()
	eventually(t, "the first is back", func() bool { return u.Server() == first.addr })
	before = first.requests.Load()
	if _, got, err := fetch(u, asNode(t, http.MethodGet, "/", nil)); got != "fine" || err != nil || first.requests.Load() != before+1 {
		t.Errorf("RoundTrip() to the first = %q, %v, want fine from it", got, err)
	}
	select {
	case err := <-staying:
		t.Errorf("watch at the second ended with %v, want it to stay", err)
	default:
	}
	first.stop()
	second.stop()
	waitUp(t, u, false)
	wantUnavailable(t, "watch", staying, 2*time.Second)
}

func TestWrongCertificateAuthority(t *testing.T) {
	t.Parallel()
	ca, other := newAuthority(t), newAuthority(t)
	server := newAPIServer(t, other, watchOrHang)
	u := start(t, fast(newKeyDir(t, ca), server.url()))
	eventually(t, "it was probed", func() bool { return !errors.Is(u.servers[0].why(), errNotProbed) })
	if u.Up() || server.probes.Load() != 0 {
		t.Errorf("Up() = %v after %d probes were answered, want nothing said to a stranger", u.Up(), server.probes.Load())
	}
	if _, _, err := fetch(u, asNode(t, http.MethodGet, "/", nil)); !errors.Is(err, ErrUnavailable) {
		t.Errorf("RoundTrip() = %v, want ErrUnavailable", err)
	}
}

func TestNotRunning(t *testing.T) {
	k := newKeyDir(t, newAuthority(t))
	u, err := New(fast(k, "https://127.0.0.1:1"))
	if err != nil {
		t.Fatal(err)
	}
	body := &closeTracker{Reader: http.NoBody}
	req := asNode(t, http.MethodPost, "/", body)
	if _, err := u.RoundTrip(req); !errors.Is(err, ErrUnavailable) || !body.closed {
		t.Errorf("RoundTrip() before Run = %v, body closed: %v, want ErrUnavailable, true", err, body.closed)
	}
	u.Close()
}
