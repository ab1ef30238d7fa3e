// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"flag"
	"io"
	"net/http"
	"os"
	"testing"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/edgehub/edgehub/test/process"
)

// asHub makes the test binary a hub that has only a metrics listener.
const asHub = "EDGEHUB_TEST_AS_HUB"

const metricsText = `# HELP requests_total Requests.
requests_total{code="200",verb="list"} 3
requests_total{code="200",verb="watch"} 1.5
requests_total{code="503",verb="list"} 4e+06
up 1
`

func TestMain(m *testing.M) {
	if os.Getenv(asHub) != "" {
		serveMetrics(os.Args[1:])
	}
	os.Exit(m.Run())
}

func serveMetrics(args []string) {
	flags := flag.NewFlagSet("hub", flag.ExitOnError)
	address := flags.String("metrics-listen-address", "", "")
	for _, name := range []string{"server-url", "server-ca-file", "client-ca-file", "node-cert-file", "node-key-file",
		"data-dir", "listen-address", "v", "more"} {
		flags.String(name, "", "")
	}
	if err := flags.Parse(args); err != nil {
		panic(err)
	}
	http.HandleFunc("/readyz", func(http.ResponseWriter, *http.Request) {})
	http.HandleFunc("/metrics", func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, metricsText) })
	panic(http.ListenAndServe(*address, nil))
}

// The runner alone; the real hub is what all end-to-end tests run.
func TestHubRunner(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv(asHub, "1")
	h, err := NewHub(t.Context(), HubConfig{
		ServerURLs: []string{"https://127.0.0.1:1"}, ServerCAFile: "ca", CertFile: "c", KeyFile: "k",
		Args: []string{"--more=1"}, Path: self,
	})
	if err != nil {
		t.Fatal(err)
	}
	process.Run(t, h)
	for range 2 {
		if got, err := h.Metric(t.Context(), "up"); got != 1 || err != nil {
			t.Errorf("Metric(up) = %v, %v, want 1", got, err)
		}
		if err := h.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := h.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	path, err := h.Kubeconfig("ann", &rest.Config{Host: "https://elsewhere", BearerToken: "secret"})
	if err != nil {
		t.Fatal(err)
	}
	c, err := clientcmd.LoadFromFile(path)
	if err != nil {
		t.Fatal(err)
	}
	cluster, user := c.Clusters["test"], c.AuthInfos["test"]
	if cluster.Server != h.URL() || cluster.CertificateAuthority != h.CAFile() || user.Token != "secret" {
		t.Errorf("Kubeconfig() has server %q, CA %q, token %q, want the hub's and the token",
			cluster.Server, cluster.CertificateAuthority, user.Token)
	}
	if want := h.DataDir() + "/pki/ca.crt"; h.CAFile() != want {
		t.Errorf("CAFile() = %q, want %q", h.CAFile(), want)
	}
}

func TestSumMetric(t *testing.T) {
	tests := []struct {
		name, metric string
		labels       []string
		want         float64
	}{
		{"no labels", "up", nil, 1},
		{"all series", "requests_total", nil, 4000004.5},
		{"some", "requests_total", []string{`verb="list"`}, 4000003},
		{"one", "requests_total", []string{`verb="list"`, `code="200"`}, 3},
		{"none of that name", "requests", nil, 0},
		{"no part of a value", "requests_total", []string{`code="20`}, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := sumMetric(metricsText, tt.metric, tt.labels)
			if got != tt.want || err != nil {
				t.Errorf("sumMetric(%s, %q) = %v, %v, want %v", tt.metric, tt.labels, got, err, tt.want)
			}
		})
	}
}
