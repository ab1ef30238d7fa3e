// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package link is a TCP link in user space: a listener whose connections are
// carried to a target, and which tests cut, silence, slow down or break in the
// middle of a message while it runs. It needs no privileges.
//
// What it models and what it cannot:
//   - Cut is a host that refuses: RST on what exists, connection refused for what
//     is new.
//   - BlackHole is a route that loses packets without a word. As TCP sends again
//     what was not acknowledged, nothing is lost in the end: Heal delivers late,
//     in order, what either side has sent meanwhile, FIN and RST included. A
//     connection never comes back with a hole in its bytes. New connections are
//     accepted by this machine's kernel but not carried on, so a client sees a
//     handshake (TLS) that is never answered, where a real one would be left
//     with a SYN that is not answered.
//   - The TCP handshake itself is not delayed, and the target's refusal of a
//     connection arrives as RST after the accept.
package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/edgehub/edgehub/test/port"
)

// Direction says which way bytes go.
type Direction int

// The directions of a link. Both is ToServer and ToClient.
const (
	ToServer Direction = 1 << iota
	ToClient
	Both = ToServer | ToClient
)

// Stats counts since New.
type Stats struct {
	ToServer, ToClient int64 // bytes delivered
	Connections        int64 // carried to the target
	Open               int   // of these and of those that wait for it, now
}

// A Link carries TCP connections from its address to a target. All methods are
// safe for concurrent use and return when the new state is in force.
type Link struct {
	target string
	port   int
	ctx    context.Context // the link's life; not a request's
	cancel context.CancelFunc
	wg     sync.WaitGroup

	toServer, toClient *line
	carried            atomic.Int64 // connections

	mu       sync.Mutex // guards all below
	listener net.Listener
	conns    map[*conn]struct{}
	closed   bool
}

// New opens a link on a free port of 127.0.0.1 to target, a host:port. The link
// lives until Close, or until ctx ends.
func New(ctx context.Context, target string) (*Link, error) {
	p, err := port.Free()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	l := &Link{
		target: target, port: p, ctx: ctx, cancel: cancel,
		toServer: newLine(), toClient: newLine(),
		conns: map[*conn]struct{}{},
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.listen(); err != nil {
		cancel()
		return nil, err
	}
	context.AfterFunc(ctx, l.Close)
	return l, nil
}

// Addr returns the address of the link, 127.0.0.1:port; it stays the same
// through Cut and Heal.
func (l *Link) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(l.port)) }

// URL returns https:// and the address.
func (l *Link) URL() string { return "https://" + l.Addr() }

// listen is for callers that hold mu.
func (l *Link) listen() error {
	listener, err := net.Listen("tcp", l.Addr())
	if err != nil {
		return fmt.Errorf("link to %s: %w", l.target, err)
	}
	l.listener = listener
	l.wg.Go(func() { l.accept(listener) })
	return nil
}

func (l *Link) accept(listener net.Listener) {
	for {
		c, err := listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // the client is gone already, or there are no more descriptors
			if sleep(l.ctx, time.Now().Add(10*time.Millisecond)) != nil {
				return
			}
			continue
		}
		l.add(listener, c.(*net.TCPConn))
	}
}

// add starts to carry a new connection, unless the link was cut since.
func (l *Link) add(listener net.Listener, client *net.TCPConn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.listener != listener {
		reset(client)
		return
	}
	c := newConn(l, client)
	l.conns[c] = struct{}{}
	l.wg.Go(func() {
		c.carry()
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.conns, c)
	})
}

// Cut resets all connections at both ends and refuses new ones, until Heal.
func (l *Link) Cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cut()
}

// cut is for callers that hold mu.
func (l *Link) cut() {
	if l.listener != nil {
		_ = l.listener.Close() // only fails when it is closed already
		l.listener = nil
	}
	for c := range l.conns {
		c.reset()
	}
}

// BlackHole delivers nothing more in the direction given, FIN and RST included,
// and carries no new connections, until Heal. The other direction, if it was
// open, stays open: with ToClient, requests reach the server and their answers
// are missing.
func (l *Link) BlackHole(d Direction) {
	if d&ToServer != 0 {
		l.toServer.shut()
	}
	if d&ToClient != 0 {
		l.toClient.shut()
	}
}

// Heal ends Cut and BlackHole. Connections that were black-holed go on where
// they were, see the package comment. Delay and Throttle stay as they are.
func (l *Link) Heal() error {
	l.toServer.open()
	l.toClient.open()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.listener != nil || l.closed {
		return nil
	}
	return l.listen()
}

// Delay makes every byte that is sent from now on arrive d later, each way; 0
// ends it.
func (l *Link) Delay(d time.Duration) {
	l.toServer.setDelay(d)
	l.toClient.setDelay(d)
}

// Throttle limits the link to so many bytes a second each way, shared by all
// connections; 0 ends it.
func (l *Link) Throttle(bytesPerSecond int) {
	l.toServer.setRate(bytesPerSecond)
	l.toClient.setRate(bytesPerSecond)
}

// TruncateAfter lets n more bytes pass to clients, counted over all connections,
// and then resets the connection that carried the last of them at both ends: an
// answer that ends in the middle. It works once; a new call replaces the one
// before.
func (l *Link) TruncateAfter(n int64) { l.toClient.setBudget(n) }

// Stats returns the counters.
func (l *Link) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Stats{
		ToServer: l.toServer.delivered.Load(), ToClient: l.toClient.delivered.Load(),
		Connections: l.carried.Load(), Open: len(l.conns),
	}
}

// Close resets all connections and returns when all goroutines have ended.
func (l *Link) Close() {
	l.mu.Lock()
	l.closed = true
	l.cut()
	l.mu.Unlock()
	l.cancel()
	l.wg.Wait()
}
