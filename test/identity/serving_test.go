// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const servingRequests = "edgehub_identity_serving_certificate_requests_total"

// TestServingCertificateByCSR has the cluster sign the certificate that clients check
// the hub by. Until somebody has approved, and when somebody refuses, the one of the
// node's own CA is served; after it the cluster's, to new connections. The request
// survives a restart, and so does the certificate while the link is cut.
//
// Guards: GetCertificate prefers what was signed, and falls back; resume goes on with
// the request on disk; a denial is followed by another request; savePair's mode.
func TestServingCertificateByCSR(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	begin := s.signingRequests()
	s.start("--serving-certificate=csr")
	byLocal := s.Through(s.Node)
	s.asks("the node", byLocal, nodeItself, http.StatusOK)
	s.decide(s.waitRequest(), certificatesv1.CertificateDenied)
	s.waitMetric(1, servingRequests, `result="denied"`)
	s.servedBy("after a denial", "the node", s.Hub.CAFile())

	second := s.waitRequest()
	pods := s.watch(byLocal, podsOfN1)
	s.servedBy("while nobody decides", "the node", s.Hub.CAFile())
	s.decide(second, certificatesv1.CertificateApproved)
	s.waitMetric(1, servingRequests, `result="issued"`)
	s.servedBy("once it is approved", "the cluster", s.ControlPlane.CAFile())
	s.pod("p", rig.NodeName, "default")
	pods.until(s.namespace + "/p") // on the connection that was there
	s.checkSigned()

	s.Settle()
	s.Link.Cut()
	s.restart(false)
	s.servedBy("offline after a restart", "the cluster", s.ControlPlane.CAFile())
	s.Must(s.Link.Heal())
	s.WaitLink(true)
	s.resumeRequest()
	if n := s.signingRequests() - begin; n != 3 {
		t.Errorf("there were %d requests, want 3: denied, of the first hub, of the second", n)
	}
}

// signingRequests counts those that there have been.
func (s *site) signingRequests() int {
	s.T.Helper()
	all, err := s.ControlPlane.Client.CertificatesV1().CertificateSigningRequests().List(s.T.Context(), metav1.ListOptions{})
	s.Must(err)
	return len(all.Items)
}

// decide approves a request, or denies it.
func (s *site) decide(csr *certificatesv1.CertificateSigningRequest, as certificatesv1.RequestConditionType) {
	s.T.Helper()
	csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{Type: as, Status: corev1.ConditionTrue, Reason: "Test", Message: "by the test"})
	_, err := s.ControlPlane.Client.CertificatesV1().CertificateSigningRequests().UpdateApproval(s.T.Context(), csr.Name, csr, metav1.UpdateOptions{})
	s.Must(err)
}

// open are the requests about which nobody has decided.
func (s *site) open(ctx context.Context) (open []*certificatesv1.CertificateSigningRequest, err error) {
	all, err := s.ControlPlane.Client.CertificatesV1().CertificateSigningRequests().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for i := range all.Items {
		if len(all.Items[i].Status.Conditions) == 0 {
			open = append(open, &all.Items[i])
		}
	}
	return open, nil
}

// waitRequest waits for a request about which nobody has decided, which must be as
// the signer of kubelets' certificates wants it.
func (s *site) waitRequest() *certificatesv1.CertificateSigningRequest {
	s.T.Helper()
	var csr *certificatesv1.CertificateSigningRequest
	s.Must(process.Poll(s.T.Context(), "there is a request for a certificate", func(ctx context.Context) error {
		open, err := s.open(ctx)
		if err == nil && len(open) != 1 {
			return fmt.Errorf("there are %d", len(open))
		}
		if err == nil {
			csr = open[0]
		}
		return err
	}))
	block, _ := pem.Decode(csr.Spec.Request)
	request, err := x509.ParseCertificateRequest(block.Bytes)
	s.Must(err)
	if csr.Spec.SignerName != certificatesv1.KubeletServingSignerName || csr.Spec.Username != rig.NodeUser || request.Subject.CommonName != rig.NodeUser {
		s.T.Errorf("the request is of %s for %s by the signer %s, want %s for itself by %s", csr.Spec.Username, request.Subject.CommonName, csr.Spec.SignerName, rig.NodeUser, certificatesv1.KubeletServingSignerName)
	}
	return csr
}

// servedBy wants new connections to get a certificate that verifies for 127.0.0.1 by
// an authority, and no other.
func (s *site) servedBy(when, who, caFile string) {
	s.T.Helper()
	for _, file := range []string{s.Hub.CAFile(), s.ControlPlane.CAFile()} {
		err := handshake(s.T.Context(), s.Hub.Addr(), file)
		var unknown x509.UnknownAuthorityError
		switch {
		case file == caFile && err != nil:
			s.T.Errorf("%s: by the CA of %s: %v", when, who, err)
		case file != caFile && !errors.As(err, &unknown):
			s.T.Errorf("%s: by another CA than that of %s: %v, want an unknown authority", when, who, err)
		}
	}
}

// handshake connects to an address and trusts the authority in a file.
func handshake(ctx context.Context, address, caFile string) error {
	raw, err := os.ReadFile(caFile)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(raw)
	d := tls.Dialer{Config: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}} // the name is the address's
	c, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return c.Close()
}

// checkSigned looks at what is left on disk.
func (s *site) checkSigned() {
	s.T.Helper()
	signed := filepath.Join(s.Hub.DataDir(), "pki", "signed.pem")
	info, err := os.Stat(signed)
	s.Must(err)
	if mode := info.Mode(); mode != 0o600 {
		s.T.Errorf("%s has mode %v, want 0600", signed, mode)
	}
	request := filepath.Join(s.Hub.DataDir(), "pki", "signed-request.pem")
	s.Must(process.Poll(s.T.Context(), "the request is not on disk any more", func(context.Context) error {
		if _, err := os.Stat(request); err == nil {
			return errors.New("it is")
		}
		return nil
	}))
}

// resumeRequest kills another hub while its request is open: it goes on with that.
func (s *site) resumeRequest() {
	s.T.Helper()
	first := s.Hub
	s.Must(first.Stop())
	s.start("--serving-certificate=csr")
	before := s.waitRequest()
	s.Must(process.Poll(s.T.Context(), "the request is on disk", func(context.Context) error {
		_, err := os.Stat(filepath.Join(s.Hub.DataDir(), "pki", "signed-request.pem"))
		return err
	}))
	s.restart(true)
	s.servedBy("after a restart before it is approved", "the node", s.Hub.CAFile())
	s.decide(before, certificatesv1.CertificateApproved)
	s.waitMetric(1, servingRequests, `result="issued"`)
	s.servedBy("for the request of before the restart", "the cluster", s.ControlPlane.CAFile())
}
