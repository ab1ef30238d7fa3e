// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	askTimeout     = 10 * time.Second // of one request
	askAgain       = 250 * time.Millisecond
	maxAnswerBytes = 8 << 20
	placedMetric   = "edgehub_install_placed_info"
)

// Placed is the metric by which a hub tells which version it is. It shows nothing in a hub
// that was not placed by an installer.
func Placed() prometheus.Collector {
	g := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: placedMetric, Help: "1, with the hash of what edgehub install has placed: image or program, and flags.",
	}, []string{"hash"})
	if hash := os.Getenv(placedVariable); hash != "" {
		g.WithLabelValues(hash).Set(1)
	}
	return g
}

// An answerError is an answer that is not 200.
type answerError struct {
	code   int
	status metav1.Status // if that is what was answered
}

func (e *answerError) Error() string {
	if e.status.Message == "" {
		return fmt.Sprintf("the answer is %d %s", e.code, http.StatusText(e.code))
	}
	return fmt.Sprintf("the answer is %d: %.300s", e.code, e.status.Message)
}

// A server is asked by one identity.
type server struct {
	url    string
	client *http.Client
	token  func() (string, error) // nil: none
}

// newServer trusts ca alone, and shows certificates if there are any.
func newServer(url string, ca []byte, certificates ...tls.Certificate) (*server, error) {
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, errors.New("the authority holds no PEM certificate")
	}
	return &server{url: strings.TrimSuffix(url, "/"), client: &http.Client{
		Timeout: askTimeout,
		// No proxy: kubelet's way has none either. A connection each, since what is at the
		// other end changes.
		Transport:     &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: certificates, MinVersion: tls.VersionTLS12}},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// get decodes an answer 200 into out, and says whether it is a record, made while the link
// was down.
func (s *server) get(ctx context.Context, path string, out any) (recorded bool, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, nil)
	if err != nil {
		return false, err
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "edgehub-install")
	if s.token != nil {
		token, err := s.token()
		if err != nil {
			return false, err
		}
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := s.client.Do(req)
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	if err != nil {
		return false, err
	}
	if resp.StatusCode != http.StatusOK {
		e := &answerError{code: resp.StatusCode}
		_ = json.Unmarshal(body, &e.status) // a proxy's answer is none
		return false, e
	}
	if err := json.Unmarshal(body, out); err != nil {
		return false, fmt.Errorf("the answer is no object: %w", err)
	}
	stale := func(w string) bool { return strings.HasPrefix(w, "110 ") }
	return slices.ContainsFunc(resp.Header.Values("Warning"), stale), nil
}

// getNode wants the node's own Node.
func (s *server) getNode(ctx context.Context, name string) (recorded bool, err error) {
	var n metav1.PartialObjectMetadata
	recorded, err = s.get(ctx, "/api/v1/nodes/"+name, &n)
	if err == nil && (n.Kind != "Node" || n.Name != name) {
		err = fmt.Errorf("the answer is %s %q, not Node %q", n.Kind, n.Name, name)
	}
	if err != nil {
		err = fmt.Errorf("GET Node %s at %s: %w", name, s.url, err)
	}
	return recorded, err
}

// renewed is when kubelet has last renewed the node's Lease, by what this server says.
func (s *server) renewed(ctx context.Context, name string) (time.Time, error) {
	var l coordinationv1.Lease
	_, err := s.get(ctx, "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/"+name, &l)
	if e := (*answerError)(nil); errors.As(err, &e) && e.code == http.StatusNotFound {
		return time.Time{}, nil
	}
	if err != nil {
		return time.Time{}, fmt.Errorf("GET the Lease of %s at %s: %w", name, s.url, err)
	}
	if l.Spec.RenewTime == nil {
		return time.Time{}, nil
	}
	return l.Spec.RenewTime.Time, nil
}

// direct asks the API server as the node does.
func (i *installer) direct(n node) (*server, error) {
	pair, ca, err := i.credential(n)
	if err != nil {
		return nil, err
	}
	return newServer(n.server, ca, pair)
}

// throughHub asks the hub with kubelet's credential, and trusts what kubelet is to trust.
func (i *installer) throughHub(n node) (*server, error) {
	pair, _, err := i.credential(n)
	if err != nil {
		return nil, err
	}
	authorities, err := i.trustedByClients(n)
	if err != nil {
		return nil, err
	}
	return newServer(i.at.URL, authorities, pair)
}

// reachable asks the API server whether it is there. Only an answer to the node itself
// counts: what else answers in between, such as a captive portal, has another authority.
func (i *installer) reachable(ctx context.Context, n node) error {
	s, err := i.direct(n)
	if err != nil {
		return err
	}
	_, err = s.getNode(ctx, n.name)
	if e := (*answerError)(nil); err != nil && (!errors.As(err, &e) || e.code >= 500) {
		return fmt.Errorf("%w: %w", ErrLinkDown, err)
	}
	return err
}

// hubMetrics are what a hub says about itself.
type hubMetrics struct {
	hash    string  // of the version; "": it does not say
	renewed float64 // how often kubelet has renewed its Lease through it, at the API server
}

func (i *installer) hubMetrics(ctx context.Context) (m hubMetrics, err error) {
	families, err := scrape(ctx, i.at.Metrics)
	if err != nil {
		return m, err
	}
	for _, metric := range families[placedMetric].GetMetric() {
		m.hash = label(metric, "hash")
	}
	for _, metric := range families["edgehub_proxy_node_lease_updates_total"].GetMetric() {
		m.renewed += metric.GetCounter().GetValue()
	}
	return m, nil
}

func label(m *dto.Metric, name string) string {
	for _, l := range m.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// scrape wants a hub that says that it is ready, and returns its metrics.
func scrape(ctx context.Context, url string) (map[string]*dto.MetricFamily, error) {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	client := &http.Client{
		Transport:     &http.Transport{DisableKeepAlives: true},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	var body []byte
	for _, path := range []string{"/readyz", "/metrics"} {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url+path, nil)
		if err != nil {
			return nil, err
		}
		resp, err := client.Do(req)
		if err != nil {
			return nil, err
		}
		body, err = io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
		resp.Body.Close()
		if err == nil && resp.StatusCode != http.StatusOK {
			err = fmt.Errorf("GET %s%s: %w", url, path, &answerError{code: resp.StatusCode})
		}
		if err != nil {
			return nil, err
		}
	}
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(strings.NewReader(string(body)))
	if err != nil {
		return nil, fmt.Errorf("GET %s/metrics: %w", url, err)
	}
	return families, nil
}

// poll calls condition until it returns nil, and then nil, or until limit is over or ctx
// ends, and then what condition said last.
func poll(ctx context.Context, limit time.Duration, condition func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	ticker := time.NewTicker(askAgain)
	defer ticker.Stop()
	var last error
	for {
		err := condition(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() == nil || last == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("after %v: %w", limit, errors.Join(last, interrupted(ctx)))
		case <-ticker.C:
		}
	}
}

// interrupted is nil if ctx has ended by its time limit alone.
func interrupted(ctx context.Context) error {
	if errors.Is(ctx.Err(), context.Canceled) {
		return context.Canceled
	}
	return nil
}
