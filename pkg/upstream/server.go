// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A server is one API server and what is known about it.
//
// It is up from a good probe until probes fail, or a request is refused or
// reset. Each stretch of being up is a session with connections of its own.
//
// While it is up, the end of any connection raises a suspicion, for it may be
// that of the server: one that has just started may answer 403 to everything
// because it has not read its RBAC rules yet. Until a probe that began after
// that is good, no new connection of the session is used. Connections that still
// work lead to a process that still runs.
type server struct {
	name    string // host:port
	cfg     *Config
	metrics *metrics
	choose  func()        // tells the Upstream about a change; not under mu
	dialer  *net.Dialer   // of all connections
	poke    chan struct{} // holds one: probe now
	left    chan struct{} // closed when nobody probes any more
	started time.Time     // what life counts from
	life    atomic.Int64  // nanoseconds since started of the last byte received

	mu        sync.Mutex // guards all below
	creds     *credentials
	probe     *http.Transport
	session   *session // nil: down
	closed    bool
	suspected uint64        // suspicions so far
	cleared   uint64        // of these, when the last good probe began
	judged    chan struct{} // closed at the next good probe
	streak    int           // good probes in a row
	reason    error         // why it is down
}

// errNotProbed is the reason before the first probe and after the last.
var errNotProbed = errors.New("not probed")

func newServer(name string, cfg *Config, m *metrics, creds *credentials, choose func()) *server {
	s := &server{
		name: name, cfg: cfg, metrics: m, choose: choose, dialer: newDialer(cfg), creds: creds,
		poke: make(chan struct{}, 1), left: make(chan struct{}), judged: make(chan struct{}), started: time.Now(), reason: errNotProbed,
	}
	s.probe = probeTransport(cfg, creds, s.dialProbe)
	m.healthy.WithLabelValues(name).Set(0)
	return s
}

// standing says whether the server is up, and whether it has been for a while.
func (s *server) standing() (up, settled bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.session != nil, s.streak >= s.cfg.FailBackAfter
}

// current returns the session, nil while the server is down.
func (s *server) current() *session {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.session
}

// alive notes that bytes have come.
func (s *server) alive() { s.life.Store(int64(time.Since(s.started))) }

// lastLife is when bytes last came.
func (s *server) lastLife() time.Time { return s.started.Add(time.Duration(s.life.Load())) }

// suspect notes a sign that the server may be gone, or is a new process.
func (s *server) suspect() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session == nil {
		return // it is probed as it is
	}
	s.suspected++
	s.wake()
}

// wake has the server probed now.
func (s *server) wake() {
	select {
	case s.poke <- struct{}{}:
	default:
	}
}

// suspicions returns the number that a probe that begins now can clear.
func (s *server) suspicions() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.suspected
}

// good takes the verdict of a probe that began at so many suspicions. It returns
// whether there are none left, which is what it takes to come up.
func (s *server) good(ctx context.Context, suspected uint64) bool {
	s.mu.Lock()
	if s.closed || suspected != s.suspected {
		s.mu.Unlock()
		return false
	}
	s.cleared = suspected
	s.streak++
	close(s.judged)
	s.judged = make(chan struct{})
	if s.session == nil {
		s.session = newSession(context.WithoutCancel(ctx), s, s.creds)
		s.reason = nil
		s.metrics.healthy.WithLabelValues(s.name).Set(1)
	}
	s.mu.Unlock()
	s.choose()
	return true
}

// bad notes a probe that was answered, but not well: what this server says now
// is not to be trusted on a new connection.
func (s *server) bad() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.suspected++
	s.streak = 0
}

// down ends the session, if it is still the one given: its connections are
// closed and the requests on them fail.
func (s *server) down(session *session, reason error) {
	s.mu.Lock()
	if session == nil || s.session != session {
		s.mu.Unlock()
		return
	}
	s.session = nil
	s.suspected++
	s.streak = 0
	s.reason = reason
	s.metrics.healthy.WithLabelValues(s.name).Set(0)
	s.wake()
	s.mu.Unlock()
	// First choose: who is told that the link is down should find it so.
	s.choose()
	session.end(fmt.Errorf("%w: %s: %w", ErrUnavailable, s.name, reason))
}

// because notes why the server is still down.
func (s *server) because(reason error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session == nil && !s.closed {
		s.reason = reason
	}
}

// leave says that nobody probes any more.
func (s *server) leave() {
	close(s.left)
	s.probeTransport().CloseIdleConnections()
}

// why returns the reason for which the server is down.
func (s *server) why() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reason
}

// close ends the server for good.
func (s *server) close() {
	s.mu.Lock()
	s.closed = true
	session, probe := s.session, s.probe
	s.mu.Unlock()
	s.down(session, errors.New("closed"))
	probe.CloseIdleConnections()
}

// renew makes new connections use creds. Requests in flight stay where they are;
// their connections close when they become idle.
func (s *server) renew(creds *credentials) {
	s.mu.Lock()
	probe, session := s.probe, s.session
	s.creds = creds
	s.probe = probeTransport(s.cfg, creds, s.dialProbe)
	s.mu.Unlock()
	probe.CloseIdleConnections()
	if session != nil {
		session.renew(creds)
	}
}

func (s *server) probeTransport() *http.Transport {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.probe
}

func (s *server) dialProbe(ctx context.Context, network, address string) (net.Conn, error) {
	c, err := s.dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &conn{Conn: c, server: s}, nil
}

// wait returns when a probe that began after the last suspicion was good.
func (s *server) wait(ctx context.Context, session *session) error {
	for {
		s.mu.Lock()
		clear, judged := s.suspected == s.cleared, s.judged
		s.mu.Unlock()
		if clear {
			return nil
		}
		select {
		case <-judged:
		case <-ctx.Done():
			return ctx.Err()
		case <-session.ctx.Done():
			return context.Cause(session.ctx)
		case <-s.left:
			return errNotProbed
		}
	}
}

// A session is a stretch of time in which a server is up.
type session struct {
	server *server
	ctx    context.Context // the session's life, ends with its cause; not a request's
	cancel context.CancelCauseFunc

	mu    sync.Mutex // guards all below
	pools *pools
	conns map[*conn]struct{}
	ended bool
}

func newSession(ctx context.Context, s *server, creds *credentials) *session {
	x := &session{server: s, conns: map[*conn]struct{}{}}
	x.ctx, x.cancel = context.WithCancelCause(ctx)
	x.pools = newPools(s.cfg, creds, x.dial, s.suspect)
	return x
}

func (x *session) transport(bearer, upgrade bool) *http.Transport {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.pools.pick(bearer, upgrade)
}

func (x *session) renew(creds *credentials) {
	x.mu.Lock()
	old := x.pools
	x.pools = newPools(x.server.cfg, creds, x.dial, x.server.suspect)
	x.mu.Unlock()
	old.closeIdle()
}

// dial connects, and then waits until the server is above suspicion.
func (x *session) dial(ctx context.Context, network, address string) (net.Conn, error) {
	tcp, err := x.server.dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: tcp, server: x.server, gone: x.remove}
	x.mu.Lock()
	ended := x.ended
	if !ended {
		x.conns[c] = struct{}{}
	}
	x.mu.Unlock()
	if ended {
		c.abort()
		return nil, context.Cause(x.ctx)
	}
	if err := x.server.wait(ctx, x); err != nil {
		_ = c.Close() // nothing was sent
		return nil, err
	}
	return c, nil
}

func (x *session) remove(c *conn) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.conns, c)
}

// end closes all connections. The requests on them fail with cause.
func (x *session) end(cause error) {
	x.mu.Lock()
	x.ended = true
	conns, pools := x.conns, x.pools
	x.conns = map[*conn]struct{}{}
	x.mu.Unlock()
	x.cancel(cause)
	for c := range conns {
		c.abort()
	}
	pools.closeIdle()
}

// failed takes the error of a request that was not its caller's doing.
func (x *session) failed(err error) {
	if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) {
		x.server.down(x, err)
		return
	}
	if x.server.current() == x {
		x.server.suspect()
	}
}
