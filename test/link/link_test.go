// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package link_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/process"
)

// silence is how long a connection is watched on which nothing must come.
const silence = 100 * time.Millisecond

// rig is a link to a listener, whose accepted connections come out of servers.
type rig struct {
	*link.Link
	servers chan net.Conn
}

func newRig(t *testing.T) *rig {
	t.Helper()
	target, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { target.Close() })
	l, err := link.New(context.Background(), target.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	servers := make(chan net.Conn, 100)
	go func() {
		for {
			c, err := target.Accept()
			if err != nil {
				return
			}
			servers <- c
		}
	}()
	return &rig{l, servers}
}

// dial opens a connection and returns both ends of it.
func (r *rig) dial(t *testing.T) (client, server net.Conn) {
	t.Helper()
	before := r.Stats().Connections
	client, err := net.Dial("tcp", r.Addr())
	if err != nil {
		t.Fatal(err)
	}
	select {
	case server = <-r.servers:
	case <-time.After(10 * time.Second):
		t.Fatal("the connection did not reach the target within 10 s")
	}
	t.Cleanup(func() { client.Close(); server.Close() })
	if err := process.Poll(t.Context(), "the link knows that", process.Until(func() bool {
		return r.Stats().Connections > before
	})); err != nil {
		t.Fatal(err)
	}
	return client, server
}

func send(t *testing.T, c net.Conn, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatalf("Write(%q) = %v", text, err)
	}
}

func expect(t *testing.T, c net.Conn, want string) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(want))
	if n, err := io.ReadFull(c, got); err != nil || string(got) != want {
		t.Fatalf("Read() = %q, %v, want %q", got[:n], err, want)
	}
}

// expectEnd wants the stream to end, in the way given, and nothing before.
func expectEnd(t *testing.T, c net.Conn, want error) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, want) {
		t.Fatalf("Read() = %d, %v, want %v", n, err, want)
	}
}

func expectSilence(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(silence)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 100)
	if n, err := c.Read(b); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("Read() = %q, %v, want nothing", b[:n], err)
	}
}

func TestCarriesBothWaysAndCounts(t *testing.T) {
	r := newRig(t)
	client, server := r.dial(t)
	send(t, client, "question")
	expect(t, server, "question")
	send(t, server, "answer")
	expect(t, client, "answer")
	if got, want := r.Stats(), (link.Stats{ToServer: 8, ToClient: 6, Connections: 1, Open: 1}); got != want {
		t.Errorf("Stats() = %+v, want %+v", got, want)
	}
	if err := client.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	expectEnd(t, server, io.EOF)
	send(t, server, "last words") // half-closed: still open this way
	expect(t, client, "last words")
	server.Close()
	expectEnd(t, client, io.EOF)
	waitOpen(t, r, 0)
}

func waitOpen(t *testing.T, r *rig, want int) {
	t.Helper()
	if err := process.Poll(t.Context(), "all connections are over", process.Until(func() bool {
		return r.Stats().Open == want
	})); err != nil {
		t.Fatal(err)
	}
}

func TestResetIsPassedOn(t *testing.T) {
	r := newRig(t)
	client, server := r.dial(t)
	if err := client.(*net.TCPConn).SetLinger(0); err != nil {
		t.Fatal(err)
	}
	client.Close()
	expectEnd(t, server, syscall.ECONNRESET)
	waitOpen(t, r, 0)
}

func TestTargetThatIsNotThere(t *testing.T) {
	l, err := link.New(t.Context(), "127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	c, err := net.Dial("tcp", l.Addr())
	if errors.Is(err, syscall.ECONNRESET) {
		return // the reset was faster than Dial
	}
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	expectEnd(t, c, syscall.ECONNRESET)
}

func TestCut(t *testing.T) {
	r := newRig(t)
	client, server := r.dial(t)
	r.Cut()
	expectEnd(t, client, syscall.ECONNRESET)
	expectEnd(t, server, syscall.ECONNRESET)
	if c, err := net.Dial("tcp", r.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("Dial() after Cut = %v, %v, want connection refused", c, err)
	}
	if err := r.Heal(); err != nil {
		t.Fatal(err)
	}
	client, server = r.dial(t)
	send(t, client, "again")
	expect(t, server, "again")
}

func TestBlackHole(t *testing.T) {
	tests := []struct {
		name               string
		direction          link.Direction
		toServer, toClient bool // pass
	}{
		{"both", link.Both, false, false},
		{"to server", link.ToServer, false, true},
		{"to client", link.ToClient, true, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t)
			client, server := r.dial(t)
			r.BlackHole(tt.direction)
			passes := func(from, to net.Conn, open bool) {
				send(t, from, "in between")
				if open {
					expect(t, to, "in between")
				} else {
					expectSilence(t, to)
				}
			}
			passes(client, server, tt.toServer)
			passes(server, client, tt.toClient)

			// Healed: late, in order, without a hole.
			if err := r.Heal(); err != nil {
				t.Fatal(err)
			}
			after := func(from, to net.Conn, open bool) {
				send(t, from, " and after")
				if !open {
					expect(t, to, "in between")
				}
				expect(t, to, " and after")
			}
			after(client, server, tt.toServer)
			after(server, client, tt.toClient)
		})
	}
}

func TestBlackHoleHidesTheEnd(t *testing.T) {
	tests := []struct {
		name   string
		linger int
		want   error
	}{
		{"FIN", -1, io.EOF},
		{"RST", 0, syscall.ECONNRESET},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t)
			client, server := r.dial(t)
			r.BlackHole(link.Both)
			if err := server.(*net.TCPConn).SetLinger(tt.linger); err != nil {
				t.Fatal(err)
			}
			server.Close()
			expectSilence(t, client)
			send(t, client, "anybody?") // the kernel takes it, nobody answers
			if err := r.Heal(); err != nil {
				t.Fatal(err)
			}
			expectEnd(t, client, tt.want)
		})
	}
}

func TestBlackHoleCarriesNothingNew(t *testing.T) {
	r := newRig(t)
	r.BlackHole(link.ToClient)
	client, err := net.Dial("tcp", r.Addr())
	if err != nil {
		t.Fatalf("Dial() through a black hole = %v, want nil: the kernel accepts", err)
	}
	defer client.Close()
	send(t, client, "hello")
	expectSilence(t, client)
	if got, want := r.Stats(), (link.Stats{Open: 1}); got != want {
		t.Errorf("Stats() = %+v, want %+v", got, want)
	}
	if err := r.Heal(); err != nil {
		t.Fatal(err)
	}
	server := <-r.servers
	defer server.Close()
	expect(t, server, "hello")
}

func TestDelay(t *testing.T) {
	const delay = 80 * time.Millisecond
	r := newRig(t)
	client, server := r.dial(t)
	r.Delay(delay)
	start := time.Now()
	send(t, client, "ping")
	expect(t, server, "ping")
	send(t, server, "pong")
	expect(t, client, "pong")
	if got := time.Since(start); got < 2*delay {
		t.Errorf("round trip = %v, want at least %v", got, 2*delay)
	}
}

// A delay is no limit: what is sent in a row arrives in a row.
func TestDelayIsPipelined(t *testing.T) {
	const delay, pieces = 100 * time.Millisecond, 20
	r := newRig(t)
	client, server := r.dial(t)
	r.Delay(delay)
	start := time.Now()
	for range pieces {
		send(t, client, "x")
	}
	expect(t, server, string(bytes.Repeat([]byte("x"), pieces)))
	if got := time.Since(start); got > pieces*delay/2 {
		t.Errorf("%d pieces took %v, want about %v", pieces, got, delay)
	}
}

func TestThrottle(t *testing.T) {
	r := newRig(t)
	client, server := r.dial(t)
	r.Throttle(100_000)
	start := time.Now()
	go server.Write(make([]byte, 30_000))
	expect(t, client, string(make([]byte, 30_000)))
	if got := time.Since(start); got < 290*time.Millisecond {
		t.Errorf("30 kB at 100 kB/s took %v, want 300 ms", got)
	}
	r.Throttle(0)
	go server.Write(make([]byte, 10<<20))
	expect(t, client, string(make([]byte, 10<<20)))
}

func TestTruncateAfter(t *testing.T) {
	r := newRig(t)
	client, server := r.dial(t)
	other, otherServer := r.dial(t)
	r.TruncateAfter(100_000)
	go io.Copy(server, bytes.NewReader(make([]byte, 1<<20)))
	expect(t, client, string(make([]byte, 100_000)))
	expectEnd(t, client, syscall.ECONNRESET)

	// Only that connection, only once.
	send(t, otherServer, "fine")
	expect(t, other, "fine")
	send(t, other, "thanks")
	expect(t, otherServer, "thanks")
}

func TestCloseEndsAll(t *testing.T) {
	r := newRig(t)
	client, server := r.dial(t)
	r.BlackHole(link.Both)
	waiting, err := net.Dial("tcp", r.Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer waiting.Close()
	send(t, client, "lost")
	r.Close() // returns when the last goroutine has ended
	expectEnd(t, client, syscall.ECONNRESET)
	expectEnd(t, server, syscall.ECONNRESET)
	expectEnd(t, waiting, syscall.ECONNRESET)
	if err := r.Heal(); err != nil {
		t.Errorf("Heal() after Close = %v, want nil", err)
	}
	if c, err := net.Dial("tcp", r.Addr()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("Dial() after Close = %v, %v, want connection refused", c, err)
	}
}
