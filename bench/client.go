// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport"
)

const (
	jsonType     = "application/json"
	protobufType = "application/vnd.kubernetes.protobuf"
	// yurtHub begins what was measured of it on another day, on a machine like
	// this; see docs/BENCHMARKS.md.
	yurtHub = "YurtHub (measured elsewhere) "
)

// newClient returns an HTTP/2 client with connections of its own. With gzip it
// does what client-go does: ask for gzip, and unpack it.
func newClient(c *rest.Config, gzip bool) (*http.Client, error) {
	tc, err := c.TransportConfig()
	if err != nil {
		return nil, err
	}
	tlsConfig, err := transport.TLSConfigFor(tc)
	if err != nil {
		return nil, err
	}
	t := &http.Transport{TLSClientConfig: tlsConfig, ForceAttemptHTTP2: true, DisableCompression: !gzip}
	rt, err := transport.HTTPWrappersForConfig(tc, t)
	if err != nil {
		return nil, err
	}
	return &http.Client{Transport: closing{rt, t}}, nil
}

// closing makes Client.CloseIdleConnections reach the transport below client-go's.
type closing struct {
	http.RoundTripper
	t *http.Transport
}

func (c closing) CloseIdleConnections() { c.t.CloseIdleConnections() }

// A request is what is asked again and again.
type request struct {
	client *http.Client
	url    string
	accept string
}

// open returns an answer of 200.
func (r request) open(ctx context.Context) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.url, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", r.accept)
	resp, err := r.client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 1000)) // it is for the error's text
		resp.Body.Close()
		return nil, fmt.Errorf("GET %s: %s: %s", r.url, resp.Status, text)
	}
	return resp, nil
}

// do reads and forgets the whole answer; it returns its size.
func (r request) do(ctx context.Context) (int64, error) {
	resp, err := r.open(ctx)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	return io.Copy(io.Discard, resp.Body)
}

// times does it n times and returns the time of one in ms.
func (r request) times(ctx context.Context, n int) (float64, error) {
	start := time.Now()
	for range n {
		if _, err := r.do(ctx); err != nil {
			return 0, err
		}
	}
	return milliseconds(time.Since(start)) / float64(n), nil
}

// to makes a request with a connection of its own, and uses that once.
func to(ctx context.Context, c *rest.Config, path, accept string) (request, error) {
	return toAs(ctx, c, path, accept, false)
}

func toAs(ctx context.Context, c *rest.Config, path, accept string, gzip bool) (request, error) {
	client, err := newClient(c, gzip)
	if err != nil {
		return request{}, err
	}
	r := request{client, c.Host + path, accept}
	_, err = r.do(ctx)
	return r, err
}

func (r request) close() { r.client.CloseIdleConnections() }

// several makes the same request n times, each with a connection of its own.
func several(ctx context.Context, n int, c *rest.Config, path string) (requests []request, err error) {
	for range n {
		r, err := to(ctx, c, path, jsonType)
		if err != nil {
			return nil, err
		}
		requests = append(requests, r)
	}
	return requests, nil
}

// load does all of the requests again and again, side by side, for a time, and
// returns how many a second, and the median in µs.
func load(ctx context.Context, requests []request, d time.Duration) (perSecond, median float64, err error) {
	var g errgroup.Group
	took := make([][]float64, len(requests))
	start := time.Now()
	for i, r := range requests {
		g.Go(func() error {
			for time.Since(start) < d {
				t := time.Now()
				if _, err := r.do(ctx); err != nil {
					return err
				}
				took[i] = append(took[i], microseconds(time.Since(t)))
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return 0, 0, err
	}
	all := slices.Concat(took...)
	return float64(len(all)) / time.Since(start).Seconds(), quantile(all, .5), nil
}

func milliseconds(d time.Duration) float64 { return float64(d) / 1e6 }
func microseconds(d time.Duration) float64 { return float64(d) / 1e3 }

// samples are measurements by what was measured.
type samples map[string][]float64

func (s samples) add(key string, v float64) { s[key] = append(s[key], v) }

func (s samples) median(key string) float64 { return quantile(s[key], .5) }

// quantile sorts its argument.
func quantile(v []float64, q float64) float64 {
	if len(v) == 0 {
		return 0
	}
	slices.Sort(v)
	return v[min(int(q*float64(len(v))), len(v)-1)]
}

// alternate calls f for each of the names in turn, n times; each round begins with
// another one.
func alternate(n int, names []string, f func(name string) error) error {
	for round := range n {
		for i := range names {
			name := names[(round+i)%len(names)]
			if err := f(name); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return nil
}
