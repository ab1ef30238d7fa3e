// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// dribble sends something, and then a little each second, on many connections. The
// hub ends them, or does not.
func dribble(connections int, protocol, first, little string) func(context.Context, *attacker) (strain, error) {
	return func(ctx context.Context, a *attacker) (strain, error) {
		s := strain{Connections: connections}
		var mu sync.Mutex // guards s
		slots := make(chan struct{}, 16)
		var g errgroup.Group
		for range connections {
			g.Go(func() error {
				slots <- struct{}{}
				conn, err := a.connect(ctx, protocol)
				<-slots
				if err != nil {
					return err
				}
				defer conn.Close()
				start := time.Now()
				status, ended := dribbleOn(conn, a.fill(first), little)
				mu.Lock()
				defer mu.Unlock()
				s.saw(status)
				if ended {
					s.Ended++
					s.Longest = max(s.Longest, time.Since(start))
				}
				return nil
			})
		}
		return s, g.Wait()
	}
}

// dribbleOn returns the status that was seen, and whether the hub ended the
// connection.
func dribbleOn(conn net.Conn, first, little string) (status int, ended bool) {
	_ = conn.SetDeadline(time.Now().Add(slowPatience)) // a network connection takes one
	var answer bytes.Buffer
	over := make(chan error, 1)
	go func() {
		_, err := io.Copy(&answer, conn)
		over <- err
	}()
	_, _ = io.WriteString(conn, first) // the reading tells what became of it
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case err := <-over:
			if resp, err := http.ReadResponse(bufio.NewReader(&answer), nil); err == nil {
				status = resp.StatusCode
				resp.Body.Close()
			}
			return status, !errors.Is(err, os.ErrDeadlineExceeded)
		case <-tick.C:
			_, _ = io.WriteString(conn, little)
		}
	}
}

// pour writes first, and then more so many times, until the hub takes no more.
func pour(first, more string, times int) func(context.Context, *attacker) (strain, error) {
	return func(ctx context.Context, a *attacker) (strain, error) {
		conn, err := a.connect(ctx, "http/1.1")
		if err != nil {
			return strain{}, err
		}
		defer conn.Close()
		return pourOn(conn, a.fill(first), []byte(a.fill(more)), times), nil
	}
}

// pourOn stops at the first answer.
func pourOn(conn net.Conn, first string, more []byte, times int) strain {
	_ = conn.SetDeadline(time.Now().Add(slowPatience)) // a network connection takes one
	s := strain{Connections: 1}
	var answered atomic.Bool
	status := make(chan int, 1)
	go func() {
		defer answered.Store(true)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			status <- 0
			return
		}
		resp.Body.Close()
		status <- resp.StatusCode
	}()
	n, err := io.WriteString(conn, first)
	s.Written = int64(n)
	for range times {
		if err != nil || answered.Load() {
			break
		}
		n, err = conn.Write(more)
		s.Written += int64(n)
	}
	s.saw(<-status)
	return s
}

// bomb is small on the wire and 1 GiB for whoever unpacks it.
func bomb(headers string) func(context.Context, *attacker) (strain, error) {
	return func(ctx context.Context, a *attacker) (strain, error) {
		var b bytes.Buffer
		z, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
		if err != nil {
			return strain{}, err
		}
		zeros := make([]byte, mega)
		const members = 64 // of gzip, which may follow one another
		for range manyByte / mega / members {
			if _, err := z.Write(zeros); err != nil {
				return strain{}, err
			}
		}
		if err := z.Close(); err != nil {
			return strain{}, err
		}
		body := string(bytes.Repeat(b.Bytes(), members))
		return pour(headers+"Content-Length: "+strconv.Itoa(len(body))+"\r\n\r\n", body, 1)(ctx, a)
	}
}

// askWithUnknownTokens never sends a token twice.
func askWithUnknownTokens(ctx context.Context, a *attacker) (s strain, err error) {
	ctx, cancel := context.WithTimeout(ctx, unknownDuration)
	defer cancel()
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: a.hub.Clone(), MaxIdleConnsPerHost: unknownSenders}}
	var mu sync.Mutex // guards s
	var g errgroup.Group
	for range unknownSenders {
		g.Go(func() error {
			for ctx.Err() == nil {
				status, err := a.askWith(ctx, client, "unknown-"+rand.Text())
				if err != nil && ctx.Err() == nil {
					return err
				}
				if err == nil {
					mu.Lock()
					s.saw(status)
					s.Connections++
					mu.Unlock()
				}
			}
			return nil
		})
	}
	err = g.Wait()
	return s, err
}

func (a *attacker) askWith(ctx context.Context, c *http.Client, token string) (int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+a.floodJob.address+aSecret, nil)
	if err != nil {
		return 0, err
	}
	req.Header.Set("User-Agent", a.fill("{agent}"))
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := c.Do(req)
	if err != nil {
		return 0, err
	}
	return resp.StatusCode, resp.Body.Close()
}
