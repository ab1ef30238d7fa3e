// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"io"
	"math/big"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/admission/cases"
	"github.com/edgehub/edgehub/test/companion"
	"github.com/edgehub/edgehub/test/process"
)

// post asks the companion as anybody on the network could, with a certificate or without.
func (r *rig) post(t *testing.T, certificates ...tls.Certificate) (status int, body string, err error) {
	t.Helper()
	// Who answers is not the question.
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, Certificates: certificates}}
	defer transport.CloseIdleConnections()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+r.release.Address+"/exclude", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// selfSigned is a certificate that nobody has signed.
func selfSigned(t *testing.T, cn string) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: cn}, NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// signed is a certificate of the cluster's authority.
func (r *rig) signed(t *testing.T, cn string) tls.Certificate {
	t.Helper()
	certificate, key, err := r.cp.ClientCert(cn)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.LoadX509KeyPair(certificate, key)
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// testCallers: that the API server is let in the table shows; others are not.
func (r *rig) testCallers(t *testing.T) {
	for _, c := range []struct {
		name         string
		certificates []tls.Certificate
		want         bool
	}{
		{"the API server's certificate", []tls.Certificate{r.signed(t, callers)}, true},
		{"no certificate", nil, false},
		{"a certificate of another name", []tls.Certificate{r.signed(t, "system:admin")}, false},
		{"a certificate of another authority", []tls.Certificate{selfSigned(t, callers)}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			status, body, err := r.post(t, c.certificates...)
			if got := err == nil; got != c.want {
				t.Errorf("post() = %d %s, %v, want an answer: %v", status, body, err, c.want)
			}
		})
	}
}

// metrics returns the companion's.
func (r *rig) metrics(t *testing.T) string {
	t.Helper()
	text, err := r.replica.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// value is that of a series, 0 without it.
func value(t *testing.T, metrics, series string) (v float64) {
	t.Helper()
	for line := range strings.Lines(metrics) {
		if number, ok := strings.CutPrefix(line, series+" "); ok {
			var err error
			if v, err = strconv.ParseFloat(strings.TrimSpace(number), 64); err != nil {
				t.Fatal(err)
			}
		}
	}
	return v
}

// testMetrics: what is done is told, and counted once: no two webhooks take the same
// object.
func (r *rig) testMetrics(t *testing.T) {
	before := r.metrics(t)
	for i, c := range []struct {
		c      cases.Case
		series []string
	}{
		{probe("true", map[string]any{"hostNetwork": true}), []string{`edgehub_exclude_injections_total{resource="pods"}`, `edgehub_exclude_warnings_total{reason="host-network"}`}},
		{probe("True", nil), []string{`edgehub_exclude_warnings_total{reason="value"}`}},
		{cases.Case{Kind: "KruiseDaemonSet", State: probe("true", map[string]any{"nodeName": "plain-0"}).State}, []string{
			`edgehub_exclude_injections_total{resource="daemonsets.apps.kruise.io"}`, `edgehub_exclude_warnings_total{reason="node-name"}`,
		}},
	} {
		for _, dry := range []bool{true, false} {
			if a := r.create(t.Context(), c.c, webhook, "counted-"+strconv.Itoa(i), dry); a.err != nil {
				t.Fatal(a.err)
			}
			after := r.metrics(t)
			for _, series := range c.series {
				want := map[bool]float64{true: 0, false: 1}[dry]
				if got := value(t, after, series) - value(t, before, series); got != want {
					t.Errorf("%s counts %v more, want %v (dry run: %v)", series, got, want, dry)
				}
			}
			before = after
		}
	}
}

// testPolicyTypes: the API server's type checker knows nothing against the policy.
func (r *rig) testPolicyTypes(t *testing.T) {
	if err := process.Poll(t.Context(), "the policy's types are checked", func(ctx context.Context) error {
		p, err := r.cp.Client.AdmissionregistrationV1().ValidatingAdmissionPolicies().Get(ctx, "edgehub-policy-exclude", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if p.Status.TypeChecking == nil {
			return errNotThere
		}
		for _, w := range p.Status.TypeChecking.ExpressionWarnings {
			t.Errorf("%s: %s", w.FieldRef, w.Warning)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// testGone: without a companion only pods cannot be made that would need it, and policies
// go on.
func (r *rig) testGone(t *testing.T) {
	if err := r.replica.Kill(); err != nil {
		t.Fatal(err)
	}
	daemonSets := map[string]any{"ownerReferences": []any{map[string]any{"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u", "controller": true}}}
	none := ""
	for _, c := range []struct {
		name string
		c    cases.Case
		mode string
		want bool
	}{
		{"a pod with the annotation", probe("true", nil), webhook, false},
		{"a pod with the annotation, by policy", probe("true", nil), policy, true},
		{"a pod with another value", probe("True", nil), webhook, true},
		{"a pod without", cases.Case{Kind: "Pod"}, webhook, true},
		{"a pod with a node", probe("true", map[string]any{"nodeName": "plain-0"}), webhook, true},
		{"a pod of a DaemonSet", cases.Case{Kind: "Pod", State: cases.State{Value: &[]string{"true"}[0], Metadata: daemonSets}}, webhook, true},
		{"a Deployment", cases.Case{Kind: "Deployment", State: cases.State{Own: &[]string{"true"}[0], Value: &none}}, webhook, true},
		{"a DaemonSet with the annotation", cases.Case{Kind: "DaemonSet", State: cases.State{Value: &[]string{"true"}[0]}}, webhook, false},
		{"a DaemonSet without", cases.Case{Kind: "DaemonSet"}, webhook, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := r.create(t.Context(), c.c, c.mode, "gone", true)
			if ok := got.err == nil; ok != c.want {
				t.Errorf("create() = %v, want success: %v", got.err, c.want)
			}
			if got.err != nil && !strings.Contains(got.err.Error(), "exclude.edgehub.io") {
				t.Errorf("create() = %v, which does not name the webhook", got.err)
			}
		})
	}
	// Where the companion itself and the control plane's own pods live, nobody asks.
	for _, namespace := range []string{metav1.NamespaceSystem, companion.Namespace} {
		if err := r.cp.CreateNamespace(t.Context(), namespace); err != nil {
			t.Fatal(err)
		}
		template := podTemplate("a", "true")
		if _, err := r.cp.Client.CoreV1().Pods(namespace).Create(t.Context(), &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: template.Annotations}, Spec: template.Spec,
		}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
			t.Errorf("a pod in namespace %s: %v", namespace, err)
		}
	}
}
