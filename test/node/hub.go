// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"

	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
)

// HubConfig says what a hub is started with.
type HubConfig struct {
	Dir          string   // for its data and log; "": a temporary one, removed by Close
	ServerURLs   []string // of the API servers, or of links to them
	ServerCAFile string   // signs the API servers' certificates
	ClientCAFile string   // signs clients' certificates; "": ServerCAFile
	CertFile     string   // the node's certificate and key, for the hub's own requests
	KeyFile      string
	Args         []string // more flags, after the rig's own
	Path         string   // of the program; "": cmd/edgehub, built now
}

// A Hub is cmd/edgehub, built from this repository, as a process. Its data
// outlives Kill, Stop and Start; its ports do not change.
type Hub struct {
	*process.Process
	folder  folder
	address string
	metrics string
	client  *http.Client
}

// NewHub builds the hub, once in a test process, and returns one that is not
// started. Start waits until /readyz of its metrics listener answers 200.
func NewHub(ctx context.Context, c HubConfig) (*Hub, error) {
	var err error
	if c.Path == "" {
		if c.Path, err = BuildHub(ctx); err != nil {
			return nil, err
		}
	}
	h := &Hub{client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
	for _, a := range []*string{&h.address, &h.metrics} {
		p, err := port.Free()
		if err != nil {
			return nil, err
		}
		*a = net.JoinHostPort("127.0.0.1", strconv.Itoa(p))
	}
	if h.folder, err = newFolder(c.Dir, "hub"); err != nil {
		return nil, err
	}
	if c.ClientCAFile == "" {
		c.ClientCAFile = c.ServerCAFile
	}
	args := []string{
		"--server-ca-file=" + c.ServerCAFile, "--client-ca-file=" + c.ClientCAFile,
		"--node-cert-file=" + c.CertFile, "--node-key-file=" + c.KeyFile,
		"--data-dir=" + h.DataDir(),
		"--listen-address=" + h.address, "--metrics-listen-address=" + h.metrics,
		"-v=4",
	}
	for _, u := range c.ServerURLs {
		args = append(args, "--server-url="+u)
	}
	h.Process = process.New(process.Command{
		Path: c.Path, Args: append(args, c.Args...), Dir: h.folder.path, Ready: h.ready,
	})
	return h, nil
}

func (h *Hub) ready(ctx context.Context) error {
	_, err := h.fetch(ctx, "/readyz")
	return err
}

// fetch asks the metrics listener.
func (h *Hub) fetch(ctx context.Context, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+h.metrics+path, nil)
	if err != nil {
		return nil, err
	}
	return get(h.client, req)
}

// Metrics returns what /metrics says now.
func (h *Hub) Metrics(ctx context.Context) (string, error) {
	b, err := h.fetch(ctx, "/metrics")
	return string(b), err
}

// Metric returns the sum of all series of a metric whose labels contain all of
// the given ones, each as name="value". A metric without such a series is 0.
func (h *Hub) Metric(ctx context.Context, name string, labels ...string) (float64, error) {
	text, err := h.Metrics(ctx)
	if err != nil {
		return 0, err
	}
	return sumMetric(text, name, labels)
}

// sumMetric reads the text format, of which it knows what Go's client library
// writes.
func sumMetric(text, name string, labels []string) (sum float64, err error) {
	for line := range strings.Lines(text) {
		series, value, ok := cutLast(strings.TrimSpace(line), " ")
		if !ok || strings.HasPrefix(line, "#") {
			continue
		}
		metric, rest, _ := strings.Cut(series, "{")
		if metric != name || !containsAll(","+strings.TrimSuffix(rest, "}")+",", labels) {
			continue
		}
		v, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, fmt.Errorf("metric %s: %w", series, err)
		}
		sum += v
	}
	return sum, nil
}

func cutLast(s, sep string) (before, after string, found bool) {
	i := strings.LastIndex(s, sep)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(sep):], true
}

func containsAll(s string, parts []string) bool {
	for _, p := range parts {
		if !strings.Contains(s, ","+p+",") {
			return false
		}
	}
	return true
}

// Addr returns the address of the proxy listener, 127.0.0.1:port.
func (h *Hub) Addr() string { return h.address }

// URL returns the URL of the proxy listener.
func (h *Hub) URL() string { return "https://" + h.address }

// MetricsURL returns the URL of the metrics listener.
func (h *Hub) MetricsURL() string { return "http://" + h.metrics }

// DataDir returns the folder that the hub keeps its data in.
func (h *Hub) DataDir() string { return h.folder.join("data") }

// CAFile returns the certificate authority that the hub's clients trust. The hub
// makes it at its first start.
func (h *Hub) CAFile() string { return h.folder.join("data", "pki", "ca.crt") }

// Through returns a copy of c that goes through the hub, with the credentials of
// c.
func (h *Hub) Through(c *rest.Config) *rest.Config {
	c = rest.CopyConfig(c)
	c.Host = h.URL()
	c.CAFile, c.CAData = h.CAFile(), nil
	return c
}

// Kubeconfig writes c, gone through the hub, as a kubeconfig into the hub's
// folder and returns its path.
func (h *Hub) Kubeconfig(name string, c *rest.Config) (string, error) {
	path := h.folder.join(name + ".kubeconfig")
	return path, controlplane.WriteKubeconfig(path, h.Through(c))
}

// Close kills the hub and removes its data, if the folder is a temporary one.
func (h *Hub) Close() error { return errors.Join(h.Kill(), h.folder.remove()) }

// BuildHub builds cmd/edgehub into .bin, see controlplane.Build.
func BuildHub(ctx context.Context) (string, error) { return controlplane.Build(ctx, "edgehub") }
