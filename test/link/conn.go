// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package link

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	chunkBytes  = 32 << 10
	chunksAhead = 64 // on their way in one direction of one connection: 2 MiB
)

// errTruncated ends a connection that TruncateAfter has come to.
var errTruncated = errors.New("truncated")

// A chunk is what was read at once: bytes, or how the stream ended.
type chunk struct {
	bytes []byte
	end   error // io.EOF: FIN; any other: RST
	due   time.Time
}

// A conn is one client's connection and the one to the target that goes with it.
type conn struct {
	link   *Link
	ctx    context.Context // ends with the connection; not a request's
	cancel context.CancelFunc
	client *net.TCPConn

	mu     sync.Mutex // guards all below
	server *net.TCPConn
	dead   bool
}

func newConn(l *Link, client *net.TCPConn) *conn {
	ctx, cancel := context.WithCancel(l.ctx)
	return &conn{link: l, ctx: ctx, cancel: cancel, client: client}
}

// reset ends the connection with RST at both ends.
func (c *conn) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dead = true
	reset(c.client)
	if c.server != nil {
		reset(c.server)
	}
	c.cancel()
}

// carry runs the connection to its end.
func (c *conn) carry() {
	defer c.cancel()
	defer c.client.Close()
	server, err := c.dial()
	if err != nil {
		_ = c.link.toClient.passable(c.ctx) // the refusal, too; if ctx has ended, at once
		reset(c.client)
		return
	}
	defer server.Close()
	var wg sync.WaitGroup
	wg.Go(func() { c.pump(server, c.client, c.link.toServer) })
	wg.Go(func() { c.pump(c.client, server, c.link.toClient) })
	wg.Wait()
}

// dial opens the connection to the target, once packets pass both ways.
func (c *conn) dial() (*net.TCPConn, error) {
	for _, l := range []*line{c.link.toServer, c.link.toClient} {
		if err := l.passable(c.ctx); err != nil {
			return nil, err
		}
	}
	d, err := new(net.Dialer).DialContext(c.ctx, "tcp", c.link.target)
	if err != nil {
		return nil, err
	}
	server := d.(*net.TCPConn)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead {
		reset(server)
		return nil, net.ErrClosed
	}
	c.server = server
	c.link.carried.Add(1)
	return server, nil
}

// pump carries one direction: a reader that stamps what comes with the time at
// which it is due, a writer that delivers it then. It ends with the stream.
func (c *conn) pump(dst, src *net.TCPConn, l *line) {
	chunks := make(chan chunk, chunksAhead)
	ctx, cancel := context.WithCancel(c.ctx)
	var wg sync.WaitGroup
	wg.Go(func() { read(ctx, src, l, chunks) })
	err := deliver(ctx, dst, l, chunks)
	if errors.Is(err, errTruncated) {
		c.reset()
	}
	cancel()
	if err != nil {
		// What else comes has nowhere to go; wake the reader.
		_ = src.SetReadDeadline(time.Now())
	}
	wg.Wait()
}

func read(ctx context.Context, src *net.TCPConn, l *line, chunks chan<- chunk) {
	for {
		b := make([]byte, chunkBytes)
		n, err := src.Read(b)
		for _, ch := range []chunk{{bytes: b[:n]}, {end: err}} {
			if len(ch.bytes) == 0 && ch.end == nil {
				continue
			}
			ch.due = l.due()
			select {
			case chunks <- ch:
			case <-ctx.Done():
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// deliver writes what comes until the stream has ended, which it passes on: nil
// if so.
func deliver(ctx context.Context, dst *net.TCPConn, l *line, chunks <-chan chunk) error {
	for {
		var ch chunk
		select {
		case ch = <-chunks:
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := sleep(ctx, ch.due); err != nil {
			return err
		}
		if err := write(ctx, dst, l, ch.bytes); err != nil {
			return err
		}
		if ch.end == nil {
			continue
		}
		if err := l.passable(ctx); err != nil {
			return err
		}
		if errors.Is(ch.end, io.EOF) {
			return dst.CloseWrite()
		}
		reset(dst)
		return nil
	}
}

// write delivers b as the line admits it.
func write(ctx context.Context, dst *net.TCPConn, l *line, b []byte) error {
	for len(b) > 0 {
		n, passed := l.admit(len(b))
		if err := sleep(ctx, passed); err != nil {
			return err
		}
		if err := l.passable(ctx); err != nil {
			return err
		}
		n, last := l.spend(n)
		l.delivered.Add(int64(n)) // before it: who has the bytes finds them counted
		written, err := dst.Write(b[:n])
		if err != nil {
			l.delivered.Add(int64(written - n))
			return err
		}
		if last {
			return errors.Join(errTruncated, flush(ctx, dst))
		}
		b = b[n:]
	}
	return nil
}

// flush waits until the peer's kernel has all that was written: RST throws away
// what is still on its way.
func flush(ctx context.Context, c *net.TCPConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	for deadline := time.Now().Add(time.Second); time.Now().Before(deadline); {
		var queued int
		err := raw.Control(func(fd uintptr) { queued, _ = unix.IoctlGetInt(int(fd), unix.TIOCOUTQ) })
		if err != nil || queued == 0 {
			return err
		}
		if err := sleep(ctx, time.Now().Add(time.Millisecond)); err != nil {
			return err
		}
	}
	return nil
}

// reset closes c with RST instead of FIN.
func reset(c *net.TCPConn) {
	_ = c.SetLinger(0) // only fails when it is closed already
	_ = c.Close()
}
