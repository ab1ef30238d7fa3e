// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/transport"

	"github.com/edgehub/edgehub/pkg/identity"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
)

const protobuf = "application/vnd.kubernetes.protobuf"

// rss returns the resident memory of the hub in MB.
func (b *bench) rss() (float64, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", b.hub.PID()))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmRSS:" {
			kb, err := strconv.ParseFloat(f[1], 64)
			return kb * 1024 / 1e6, err
		}
	}
	return 0, fmt.Errorf("no VmRSS")
}

func (b *bench) idle(ctx context.Context) error {
	wait(ctx, 5*time.Second) // what starting took is given back
	mb, err := b.rss()
	b.atMost("RSS idle", mb, "MB", 20, "YurtHub 62–64")
	return err
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// client returns an HTTP/2 client with the bench user's token.
func client(c *rest.Config) (*http.Client, error) {
	rt, err := rest.TransportFor(c)
	return &http.Client{Transport: rt}, err
}

// load sends GETs on a number of connections for a time and returns requests per
// second and the median.
func load(ctx context.Context, c *rest.Config, path string, conns int, d time.Duration) (perSecond float64, median time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, d+30*time.Second)
	defer cancel()
	var g errgroup.Group
	times := make([][]time.Duration, conns)
	start := time.Now()
	for i := range conns {
		// A connection each: the TLS configurations must not be shared.
		tc, err := c.TransportConfig()
		if err != nil {
			return 0, 0, err
		}
		tlsConfig, err := transport.TLSConfigFor(tc)
		if err != nil {
			return 0, 0, err
		}
		h := &http.Client{Transport: &http.Transport{TLSClientConfig: tlsConfig, ForceAttemptHTTP2: true}}
		g.Go(func() error {
			defer h.CloseIdleConnections()
			for time.Since(start) < d {
				t := time.Now()
				if _, err := fetch(ctx, h, c.Host+path, c.BearerToken, "application/json"); err != nil {
					return err
				}
				times[i] = append(times[i], time.Since(t))
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return 0, 0, err
	}
	all := slices.Concat(times...)
	slices.Sort(all)
	return float64(len(all)) / time.Since(start).Seconds(), all[len(all)/2], nil
}

func fetch(ctx context.Context, h *http.Client, url, token, accept string) (int64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Accept", accept)
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := h.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	n, err := io.Copy(io.Discard, resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, resp.Status)
	}
	return n, err
}

// passThrough compares the hub with a bare reverse proxy, each a process, in
// alternating rounds.
func (b *bench) passThrough(ctx context.Context) error {
	if _, err := b.cp.Client.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "bench"}, Data: map[string]string{"text": strings.Repeat("x", 1000)},
	}, metav1.CreateOptions{}); err != nil {
		return err
	}
	direct := b.cp.TokenConfig(user)
	bare, stop, err := b.startReverseProxy(ctx, direct)
	if err != nil {
		return err
	}
	defer stop()
	targets := map[string]*rest.Config{"direct": direct, "bare": bare, "hub": b.hub.Through(direct)}
	rates, medians := map[string][]float64{}, map[string][]float64{}
	for range 4 {
		for _, name := range []string{"direct", "bare", "hub"} {
			rate, _, err := load(ctx, targets[name], "/api/v1/namespaces/default/configmaps/bench", 8, 2*time.Second)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			_, median, err := load(ctx, targets[name], "/api/v1/namespaces/default/configmaps/bench", 1, time.Second)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			rates[name], medians[name] = append(rates[name], rate), append(medians[name], float64(median.Microseconds()))
		}
	}
	best := func(m map[string][]float64, name string) float64 {
		slices.Sort(m[name])
		return m[name][len(m[name])/2]
	}
	b.atLeast("GET through edgehub, of a bare ReverseProxy's throughput", 100*best(rates, "hub")/best(rates, "bare"), "%", 90,
		fmt.Sprintf("%.0f/s; bare %.0f/s; direct %.0f/s", best(rates, "hub"), best(rates, "bare"), best(rates, "direct")))
	b.atMost("GET through edgehub, p50 over direct", best(medians, "hub")-best(medians, "direct"), "µs", 150,
		fmt.Sprintf("bare +%.0f µs", best(medians, "bare")-best(medians, "direct")))
	return nil
}

// startReverseProxy runs this program as a bare reverse proxy.
func (b *bench) startReverseProxy(ctx context.Context, direct *rest.Config) (*rest.Config, func(), error) {
	p, err := port.Free()
	if err != nil {
		return nil, nil, err
	}
	dir, err := os.MkdirTemp("", "edgehub-bench-")
	if err != nil {
		return nil, nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, nil, err
	}
	address := fmt.Sprintf("127.0.0.1:%d", p)
	cmd := exec.CommandContext(ctx, self, "reverseproxy", address, b.cp.URL(), b.cp.CAFile(), dir)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	stop := func() { _ = cmd.Process.Kill(); _ = cmd.Wait(); _ = os.RemoveAll(dir) }
	c := rest.CopyConfig(direct)
	c.Host, c.CAFile = "https://"+address, dir+"/ca.crt"
	c.CAData = nil
	err = process.Poll(ctx, "the bare reverse proxy answers", func(ctx context.Context) error {
		h, err := client(c)
		if err != nil {
			return err
		}
		_, err = fetch(ctx, h, c.Host+"/version", "", "application/json")
		return err
	})
	if err != nil {
		stop()
	}
	return c, stop, err
}

// reverseProxy is httputil's as it is, with TLS on both sides.
func reverseProxy(args []string) error {
	address, server, ca, dir := args[0], args[1], args[2], args[3]
	serving, err := identity.ServingCertificate(dir, []string{"127.0.0.1"})
	if err != nil {
		return err
	}
	to, err := url.Parse(server)
	if err != nil {
		return err
	}
	rt, err := rest.TransportFor(&rest.Config{Host: server, TLSClientConfig: rest.TLSClientConfig{CAFile: ca}})
	if err != nil {
		return err
	}
	s := &http.Server{
		Addr: address, TLSConfig: &tls.Config{GetCertificate: serving.GetCertificate}, ErrorLog: log.New(io.Discard, "", 0),
		Handler: &httputil.ReverseProxy{Transport: rt, FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(to) }},
	}
	return s.ListenAndServeTLS("", "")
}

func (b *bench) seed(ctx context.Context) error {
	say("creating %d pods and %d ConfigMaps", pods, maps)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(16)
	no := false
	for i := range pods {
		g.Go(func() error {
			_, err := b.cp.Client.CoreV1().Pods("default").Create(ctx, &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("pod-%05d", i), Labels: map[string]string{"app": "bench", "shard": fmt.Sprint(i % 10)}},
				Spec: corev1.PodSpec{NodeName: fmt.Sprintf("node-%d", i%50), AutomountServiceAccountToken: &no,
					Containers: []corev1.Container{{Name: "c", Image: "example.invalid/none:1"}}},
			}, metav1.CreateOptions{})
			return err
		})
	}
	for i := range maps {
		g.Go(func() error {
			_, err := b.cp.Client.CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{
				ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("map-%05d", i)}, Data: map[string]string{"text": strings.Repeat("x", 500)},
			}, metav1.CreateOptions{})
			return err
		})
	}
	return g.Wait()
}

// median runs f some times.
func median(n int, f func() (time.Duration, error)) (float64, error) {
	var all []float64
	for range n {
		d, err := f()
		if err != nil {
			return 0, err
		}
		all = append(all, float64(d.Microseconds())/1000)
	}
	slices.Sort(all)
	return all[len(all)/2], nil
}

func timed(ctx context.Context, c *rest.Config, path string) func() (time.Duration, error) {
	return func() (time.Duration, error) {
		h, err := client(c)
		if err != nil {
			return 0, err
		}
		start := time.Now()
		_, err = fetch(ctx, h, c.Host+path, "", protobuf)
		return time.Since(start), err
	}
}

func (b *bench) lists(ctx context.Context) error {
	direct := b.cp.TokenConfig(user)
	through := b.hub.Through(direct)
	before, err := median(5, timed(ctx, direct, podsURL))
	if err != nil {
		return err
	}
	first, err := median(1, timed(ctx, through, podsURL))
	if err != nil {
		return err
	}
	b.atMost("LIST of 5,000 pods, first, being recorded", first, "ms", 0, fmt.Sprintf("direct %.0f ms", before))
	wait(ctx, 3*time.Second) // until it is on disk
	mb, err := b.rss()
	if err != nil {
		return err
	}
	b.atMost("RSS after a LIST of 5,000 pods", mb, "MB", 60, "YurtHub 219–256")
	again, err := median(5, timed(ctx, through, podsURL))
	if err != nil {
		return err
	}
	b.atMost("LIST of 5,000 pods, recorded before", again, "ms", 0, fmt.Sprintf("direct %.0f ms", before))
	_, err = median(1, timed(ctx, through, "/api/v1/configmaps"))
	return err
}

// restart stops the API server and starts the hub on what it has recorded.
func (b *bench) restart(ctx context.Context) error {
	direct := b.cp.TokenConfig(user)
	before, err := median(5, timed(ctx, direct, podsURL))
	if err != nil {
		return err
	}
	if err := b.hub.Stop(); err != nil {
		return err
	}
	if err := b.cp.StopAPIServer(); err != nil {
		return err
	}
	through := b.hub.Through(direct)
	var starts []float64
	for range 5 {
		start := time.Now()
		if err := b.hub.Start(ctx); err != nil {
			return err
		}
		h, err := client(through)
		if err != nil {
			return err
		}
		if _, err := fetch(ctx, h, through.Host+"/api/v1/namespaces/default/configmaps/map-00042", "", protobuf); err != nil {
			return err
		}
		starts = append(starts, float64(time.Since(start).Milliseconds()))
		if len(starts) < 5 {
			if err := b.hub.Stop(); err != nil {
				return err
			}
		}
	}
	slices.Sort(starts)
	b.atMost("start with 10,000 objects, exec to first answer", starts[2], "ms", 300, "YurtHub ready after 2.7–2.9 s")
	offline, err := median(5, timed(ctx, through, podsURL))
	if err != nil {
		return err
	}
	b.atLeast("LIST of 5,000 pods offline, times as fast as the API server", before/offline, "×", 3, fmt.Sprintf("%.0f ms; API server %.0f ms", offline, before))
	mb, err := b.rss()
	b.atMost("RSS after offline LISTs of 5,000 pods", mb, "MB", 60, "YurtHub 529")
	log, _ := os.Open(b.hub.Log())
	if log != nil {
		defer log.Close()
		for s := bufio.NewScanner(log); s.Scan(); {
			if strings.Contains(s.Text(), "panic") {
				return fmt.Errorf("hub: %s", s.Text())
			}
		}
	}
	return err
}
