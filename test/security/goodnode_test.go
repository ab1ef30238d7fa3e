// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/edgehub/edgehub/test/rig"
)

const (
	ownPods = "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1"
	ownNode = "/api/v1/nodes/n1"
	// goodPatience is what kubelet may have to wait beside an attack.
	goodPatience = 5 * time.Second
)

// goodPaths are what the node asks for.
func goodPaths() []string { return []string{aSecret, ownNode, ownPods} }

// A goodNode is a client with the node's certificate, as kubelet is.
type goodNode struct {
	agent  string
	url    string
	value  []byte // of aSecret, as JSON has it
	kept   *http.Client
	single *http.Client // a connection for each request
}

func newGoodNode(s *stage) *goodNode {
	s.T.Helper()
	authority, err := os.ReadFile(s.Hub.CAFile())
	s.Must(err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(authority)
	own, err := tls.LoadX509KeyPair(s.Rig.Node.CertFile, s.Rig.Node.KeyFile)
	s.Must(err)
	client := func(keep bool) *http.Client {
		return &http.Client{
			Transport: &http.Transport{
				TLSClientConfig:   &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{own}, MinVersion: tls.VersionTLS12},
				ForceAttemptHTTP2: true, DisableKeepAlives: !keep,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		}
	}
	return &goodNode{
		agent: "good-node-" + rand.Text(), url: s.Hub.URL(), kept: client(true), single: client(false),
		value: []byte(base64.StdEncoding.EncodeToString([]byte(s.plan.Secrets[0]))),
	}
}

func (g *goodNode) get(ctx context.Context, c *http.Client, path string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, g.url+path, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("User-Agent", g.agent)
	req.Header.Set("Accept", rig.JSON)
	return c.Do(req)
}

// ask wants a path answered in time and with 200.
func (g *goodNode) ask(ctx context.Context, path string) error {
	return errors.Join(g.askBy(ctx, g.kept, path), g.askBy(ctx, g.single, path))
}

func (g *goodNode) askBy(ctx context.Context, c *http.Client, path string) error {
	ctx, cancel := context.WithTimeout(ctx, goodPatience)
	defer cancel()
	resp, err := g.get(ctx, c, path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	switch {
	case err != nil:
		return fmt.Errorf("GET %s: %w", path, err)
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("GET %s = %d: %.200s", path, resp.StatusCode, body)
	case path == aSecret && !bytes.Contains(body, g.value):
		return fmt.Errorf("GET %s is without the secret", path)
	}
	return nil
}

// status returns what the node is answered with.
func (g *goodNode) status(ctx context.Context, path string) (int, error) {
	resp, err := g.get(ctx, g.kept, path)
	if err != nil {
		return 0, err
	}
	return resp.StatusCode, resp.Body.Close()
}

// watch makes the hub open feeds of its own, which go on for a while.
func (g *goodNode) watch(ctx context.Context) error {
	for _, path := range []string{ownPods, secrets + "?fieldSelector=metadata.name%3Ds-0"} {
		resp, err := g.get(ctx, g.kept, rig.With(path, rig.WatchList))
		if err != nil {
			return err
		}
		next := rig.Frames(resp.Body, resp.Header.Get("Content-Type"))
		for synced := false; !synced && err == nil; {
			var e rig.Event
			e, err = next()
			synced = e.Synced
		}
		if err = errors.Join(err, resp.Body.Close()); err != nil {
			return fmt.Errorf("watch %s: %w", path, err)
		}
	}
	return nil
}

// A witness asks again and again beside an attack, until it is told to stop.
type witness struct {
	mu      sync.Mutex // guards what follows
	took    []time.Duration
	problem []error
}

// An ask is the n-th question of a witness, which is to be answered in time.
type ask func(ctx context.Context, n int) error

// run asks until ctx ends. What has begun by then it waits for.
func (w *witness) run(ctx context.Context, asks ...ask) {
	var wg sync.WaitGroup
	for _, one := range asks {
		wg.Go(func() {
			tick := time.NewTicker(50 * time.Millisecond)
			defer tick.Stop()
			for n := 0; ; n++ {
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
				}
				start := time.Now()
				err := one(context.WithoutCancel(ctx), n)
				w.note(time.Since(start), err)
			}
		})
	}
	wg.Wait()
}

func (w *witness) note(took time.Duration, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.took = append(w.took, took)
	if err != nil {
		w.problem = append(w.problem, fmt.Errorf("after %v: %w", took, err))
	}
}

// asks are kubelet's, on a connection that is kept and on new ones.
func (g *goodNode) asks() (asks []ask) {
	for _, c := range []*http.Client{g.kept, g.single} {
		asks = append(asks, func(ctx context.Context, n int) error { return g.askBy(ctx, c, goodPaths()[n%len(goodPaths())]) })
	}
	return asks
}
