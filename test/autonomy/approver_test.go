// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package autonomy

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"net"
	"net/http"
	"os"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// servingCertificate: the hub asks, the companion approves, the cluster signs, and clients
// trust the hub by the cluster's CA. The Node comes after the request, as it does when a
// node starts for the first time.
func servingCertificate(w *world) {
	r := rig.On(w.T, w.cp)
	r.Hub = r.NewHub("--serving-certificate=csr")
	process.Run(w.T, r.Hub)
	w.soon("there is a request", func(ctx context.Context) error {
		return w.one(ctx, func(c *certificatesv1.CertificateSigningRequest) bool { return c.Spec.Username == rig.NodeUser })
	})
	w.node(rig.NodeName, "")
	w.soon("the certificate is issued", func(ctx context.Context) error {
		n, err := r.Hub.Metric(ctx, "edgehub_identity_serving_certificate_requests_total", `result="issued"`)
		if err == nil && n < 1 {
			err = fmt.Errorf("%v are", n)
		}
		return err
	})
	raw, err := os.ReadFile(w.cp.CAFile())
	w.must(err)
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(raw)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}}}
	w.soon("clients trust the hub by the cluster's CA", func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.Hub.URL()+"/version", nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err == nil {
			err = resp.Body.Close()
		}
		return err
	})
}

// one wants a hub's request that fits.
func (w *world) one(ctx context.Context, fits func(*certificatesv1.CertificateSigningRequest) bool) error {
	all, err := w.client().CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for i := range all.Items {
		if fits(&all.Items[i]) {
			return nil
		}
	}
	return fmt.Errorf("none of %d", len(all.Items))
}

// hostile makes requests with the credential of one node, which has written into its
// status that it has all addresses that it would like to have. They stay pending, each
// with an Event; and so do requests that are not hubs', without one.
func hostile(w *world) {
	const thief, victim = "thief", "victim"
	w.node(victim, "", "10.1.0.2")
	w.node(thief, "", "10.1.0.1")
	config, err := w.cp.NodeConfig(thief)
	w.must(err)
	as, err := kubernetes.NewForConfig(config)
	w.must(err)
	w.status(as, thief, corev1.NodeStatus{Addresses: addressesOf("10.1.0.1", "10.1.0.2", "*.svc", "db.prod.svc", victim, thief)})

	server := []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}
	own := []net.IP{net.IPv4(10, 1, 0, 1), net.IPv4(127, 0, 0, 1)}
	for _, a := range []struct {
		name   string
		dns    []string
		ips    []net.IP
		usages []certificatesv1.KeyUsage
		note   string // "": it is approved
	}{
		{"own", []string{thief, "localhost"}, own, server, ""},
		{"api-server", []string{thief, "kubernetes.default.svc"}, own, server, `the DNS name "kubernetes.default.svc"`},
		{"victims-address", nil, []net.IP{net.IPv4(10, 1, 0, 2)}, server, "which is also that of the node victim"},
		{"victims-name", []string{victim}, own, server, `the DNS name "victim"`},
		{"wildcard", []string{"*.svc"}, own, server, `the DNS name "*.svc"`},
		{"service", []string{"db.prod.svc"}, own, server, `the DNS name "db.prod.svc"`},
		{"client", nil, own, append(server[:2:2], certificatesv1.UsageClientAuth), "its usages are"},
	} {
		w.Run(a.name, func(t *testing.T) {
			t.Parallel()
			w := w.in(t)
			name := "edgehub-serving-thief-" + a.name
			w.request(as, name, thief, a.dns, a.ips, a.usages)
			if a.note != "" {
				w.event("CertificateSigningRequest", name, "NotApproved", a.note)
				if got := w.conditions(name); len(got) > 0 {
					t.Errorf("%s: conditions %v, want it pending", name, got)
				}
				return
			}
			w.soon(name+" is signed", func(ctx context.Context) error {
				return w.one(ctx, func(c *certificatesv1.CertificateSigningRequest) bool {
					return c.Name == name && len(c.Status.Certificate) > 0
				})
			})
		})
	}
	w.Run("kubelets", func(t *testing.T) {
		t.Parallel()
		w := w.in(t)
		w.request(as, "csr-thief", thief, nil, own, server)
		w.request(as, "edgehub-serving-thief-last", thief, []string{"*"}, own, server)
		w.event("CertificateSigningRequest", "edgehub-serving-thief-last", "NotApproved", `the DNS name "*"`) // after which the other one has been seen, too
		if got := w.conditions("csr-thief"); len(got) > 0 {
			t.Errorf("a request that is not a hub's: conditions %v, want it pending", got)
		}
	})
}

func (w *world) conditions(name string) []certificatesv1.CertificateSigningRequestCondition {
	w.Helper()
	csr, err := w.client().CertificatesV1().CertificateSigningRequests().Get(w.Context(), name, metav1.GetOptions{})
	w.must(err)
	return csr.Status.Conditions
}

// request asks for a certificate for a node. For another node than the one that asks the
// API server itself refuses.
func (w *world) request(as kubernetes.Interface, name, node string, dns []string, ips []net.IP, usages []certificatesv1.KeyUsage) {
	w.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	w.must(err)
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}}, DNSNames: dns, IPAddresses: ips,
	}, key)
	w.must(err)
	_, err = as.CertificatesV1().CertificateSigningRequests().Create(w.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}), SignerName: certificatesv1.KubeletServingSignerName, Usages: usages,
		},
	}, metav1.CreateOptions{})
	w.must(err)
}
