// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package availability

import (
	"context"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/edgehub/edgehub/test/companion"
)

// probePeriod is how soon a balancer notices that a replica is gone that nobody took
// out: about what kubelet and the endpoints' controller need after a container died.
const probePeriod = 500 * time.Millisecond

// A balancer is what a Service is to the API server: each connection goes to one of the
// endpoints that were ready when last looked at, in turn, and is refused when there is
// none. It does not try another one when that does not answer.
type balancer struct {
	listener net.Listener
	next     atomic.Uint64

	mu        sync.Mutex
	endpoints map[*replica]bool // whether it is ready
	open      map[net.Conn]bool // from clients
	conns     sync.WaitGroup
}

// A replica is one of the companion's, at an address of its own.
type replica struct {
	*companion.Replica
	address string
}

func newBalancer(t *testing.T, address string) *balancer {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	b := &balancer{listener: l, endpoints: map[*replica]bool{}, open: map[net.Conn]bool{}}
	ctx, cancel := context.WithCancel(t.Context())
	var served sync.WaitGroup
	served.Go(func() { b.accept(ctx) })
	served.Go(func() { b.probe(ctx) })
	t.Cleanup(func() {
		cancel()
		l.Close()
		served.Wait()
		b.conns.Wait()
	})
	return b
}

// add makes a replica an endpoint, from when it is ready.
func (b *balancer) add(r *replica) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.endpoints[r] = false
}

// remove sends no more connections to a replica; those that are there stay.
func (b *balancer) remove(r *replica) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.endpoints, r)
}

// ready returns how many endpoints are.
func (b *balancer) ready() (n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, ready := range b.endpoints {
		if ready {
			n++
		}
	}
	return n
}

// cut ends all connections, so that the next request makes one and looks at certificates.
func (b *balancer) cut() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := range b.open {
		c.Close()
	}
}

func (b *balancer) probe(ctx context.Context) {
	for tick := time.NewTicker(probePeriod); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
		}
		b.mu.Lock()
		var all []*replica
		for r := range b.endpoints {
			all = append(all, r)
		}
		b.mu.Unlock()
		for _, r := range all {
			within, cancel := context.WithTimeout(ctx, 5*time.Second) // the chart's
			ready := r.Ready(within) == nil
			cancel()
			b.mu.Lock()
			if _, there := b.endpoints[r]; there {
				b.endpoints[r] = ready
			}
			b.mu.Unlock()
		}
	}
}

// choose returns the address of a ready endpoint.
func (b *balancer) choose() (string, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var ready []string
	for r, is := range b.endpoints {
		if is {
			ready = append(ready, r.address)
		}
	}
	if len(ready) == 0 {
		return "", false
	}
	return ready[b.next.Add(1)%uint64(len(ready))], true
}

func (b *balancer) accept(ctx context.Context) {
	for {
		c, err := b.listener.Accept()
		if err != nil {
			return
		}
		b.conns.Go(func() { b.forward(ctx, c) })
	}
}

func (b *balancer) forward(ctx context.Context, client net.Conn) {
	b.mu.Lock()
	b.open[client] = true
	b.mu.Unlock()
	defer func() {
		client.Close()
		b.mu.Lock()
		delete(b.open, client)
		b.mu.Unlock()
	}()
	address, ok := b.choose()
	if !ok {
		_ = client.(*net.TCPConn).SetLinger(0) // a refusal, as far as one is possible here
		return
	}
	server, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		_ = client.(*net.TCPConn).SetLinger(0) // the same
		return
	}
	defer server.Close()
	stop := context.AfterFunc(ctx, func() { client.Close(); server.Close() })
	defer stop()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(server, client) // an error ends the connection, as the end does
		server.Close()
	}()
	_, _ = io.Copy(client, server) // the same
	client.Close()
	<-done
}
