// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/datadir"
)

const (
	// The host is the upstream's to fill in.
	csrURL      = "https://upstream.invalid/apis/certificates.k8s.io/v1/certificatesigningrequests"
	csrPrefix   = "edgehub-serving-"
	csrTimeout  = 30 * time.Second
	maxCSRBytes = 1 << 20 // of an answer
	pemCSR      = "CERTIFICATE REQUEST"
	pemName     = "Name" // the header of a stored request that holds its name
	maxChain    = 8      // certificates
)

var (
	// errWaiting means that nobody has decided about the request yet.
	errWaiting = errors.New("the request is neither approved nor denied, or not signed yet")
	// errDenied means that an approver refused the request.
	errDenied = errors.New("the request was denied")
	// errFailed means that the signer could not sign, or that the request is gone.
	errFailed = errors.New("the request failed")
	// errInvalid means that what was issued is not what was asked for.
	errInvalid = errors.New("the issued certificate cannot be used")
)

// A signer is the cluster's signer of kubelets' serving certificates, as the node
// sees it.
type signer struct {
	upstream http.RoundTripper
	node     func() user.Info
	names    hostNames
}

// A signingRequest is one that the API server has, and its key.
type signingRequest struct {
	name string
	key  *ecdsa.PrivateKey
	der  []byte // PKCS #10
}

// request asks for a certificate of a new key.
func (s *signer) request(ctx context.Context) (*signingRequest, error) {
	node := s.node()
	if node == nil {
		return nil, errors.New("the node's identity is not known yet")
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject:     pkix.Name{CommonName: node.GetName(), Organization: []string{user.NodesGroup}},
		DNSNames:    s.names.dns,
		IPAddresses: s.names.ips,
	}, key)
	if err != nil {
		return nil, err
	}
	body, err := json.Marshal(&certificatesv1.CertificateSigningRequest{
		TypeMeta:   metav1.TypeMeta{Kind: "CertificateSigningRequest", APIVersion: certificatesv1.SchemeGroupVersion.String()},
		ObjectMeta: metav1.ObjectMeta{GenerateName: csrPrefix},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: pemCSR, Bytes: der}),
			SignerName: certificatesv1.KubeletServingSignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth},
		},
	})
	if err != nil {
		return nil, err
	}
	csr, err := s.exchange(ctx, http.MethodPost, csrURL, body)
	if err != nil {
		return nil, fmt.Errorf("create a certificate signing request: %w", err)
	}
	if msgs := validation.IsDNS1123Subdomain(csr.Name); len(msgs) > 0 { // it becomes part of a path
		return nil, fmt.Errorf("create a certificate signing request: the answer names it %.64q", csr.Name)
	}
	return &signingRequest{name: csr.Name, key: key, der: der}, nil
}

// collect returns the certificate that was issued for r.
func (s *signer) collect(ctx context.Context, r *signingRequest) (*tls.Certificate, error) {
	csr, err := s.exchange(ctx, http.MethodGet, csrURL+"/"+r.name, nil)
	if err != nil {
		return nil, fmt.Errorf("get the certificate signing request: %w", err)
	}
	approved := false
	for _, c := range csr.Status.Conditions {
		switch c.Type {
		case certificatesv1.CertificateDenied:
			return nil, fmt.Errorf("%w: %.64s: %.256s", errDenied, c.Reason, c.Message)
		case certificatesv1.CertificateFailed:
			return nil, fmt.Errorf("%w: %.64s: %.256s", errFailed, c.Reason, c.Message)
		case certificatesv1.CertificateApproved:
			approved = true
		}
	}
	if !approved || len(csr.Status.Certificate) == 0 {
		return nil, errWaiting
	}
	cert, err := s.pair(csr.Status.Certificate, r.key)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errInvalid, err)
	}
	return cert, nil
}

// pair puts a certificate and its key together, if clients will accept it now.
// Whether they trust who signed it is theirs to say.
func (s *signer) pair(raw []byte, key *ecdsa.PrivateKey) (*tls.Certificate, error) {
	certs, err := parseCertificates(raw)
	if err != nil {
		return nil, err
	}
	leaf, now := certs[0], time.Now()
	switch {
	case len(certs) > maxChain:
		return nil, fmt.Errorf("%d certificates in one chain", len(certs))
	case !key.PublicKey.Equal(leaf.PublicKey):
		return nil, errors.New("it is for another key")
	case now.Before(leaf.NotBefore) || now.After(leaf.NotAfter):
		return nil, fmt.Errorf("it is valid from %v to %v", leaf.NotBefore, leaf.NotAfter)
	case !slices.Contains(leaf.ExtKeyUsage, x509.ExtKeyUsageServerAuth):
		return nil, errors.New("it is not for servers")
	}
	if err := s.fits(leaf); err != nil {
		return nil, err
	}
	cert := &tls.Certificate{PrivateKey: key, Leaf: leaf}
	for _, c := range certs {
		cert.Certificate = append(cert.Certificate, c.Raw)
	}
	return cert, nil
}

// fits returns nil if cert is this node's and covers its hosts.
func (s *signer) fits(cert *x509.Certificate) error {
	if node := s.node(); node != nil && node.GetName() != cert.Subject.CommonName {
		return fmt.Errorf("it is for %q, not for this node", cert.Subject.CommonName)
	}
	return s.names.coveredBy(cert)
}

// exchange sends one request as the node. A request that is gone is errFailed.
func (s *signer) exchange(ctx context.Context, method, url string, body []byte) (*certificatesv1.CertificateSigningRequest, error) {
	ctx, cancel := context.WithTimeout(request.WithUser(ctx, s.node()), csrTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Host = "" // that of the URL, once the upstream has filled it in
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "edgehub")
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := s.upstream.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxCSRBytes+1))
	switch {
	case method == http.MethodGet && resp.StatusCode == http.StatusNotFound:
		return nil, fmt.Errorf("%w: it is gone", errFailed)
	case resp.StatusCode != http.StatusOK && resp.StatusCode != http.StatusCreated:
		var status metav1.Status
		_ = json.Unmarshal(answer, &status) // without a message if it is none
		return nil, fmt.Errorf("status %d: %.256s", resp.StatusCode, status.Message)
	case err != nil:
		return nil, err
	case len(answer) > maxCSRBytes:
		return nil, fmt.Errorf("the answer has more than %d bytes", maxCSRBytes)
	}
	var csr certificatesv1.CertificateSigningRequest
	if err := json.Unmarshal(answer, &csr); err != nil {
		return nil, err
	}
	if csr.Kind != "CertificateSigningRequest" {
		return nil, fmt.Errorf("the answer is a %.64q", csr.Kind)
	}
	return &csr, nil
}

// save writes the request with its name as a header, and its key.
func (r *signingRequest) save(file string) error {
	raw, err := keyPEM(r.key)
	if err != nil {
		return err
	}
	block := &pem.Block{Type: pemCSR, Headers: map[string]string{pemName: r.name}, Bytes: r.der}
	return datadir.WriteFile(file, append(pem.EncodeToMemory(block), raw...), privateMode)
}

// parse returns a stored request, nil if what it asks for is not wanted.
func (s *signer) parse(raw []byte) (*signingRequest, error) {
	block, rest := pem.Decode(raw)
	if block == nil || block.Type != pemCSR {
		return nil, fmt.Errorf("it does not begin with a PEM block %q", pemCSR)
	}
	csr, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, err
	}
	key, err := parseKey(rest)
	if err != nil {
		return nil, err
	}
	name := block.Headers[pemName]
	if len(validation.IsDNS1123Subdomain(name)) > 0 || !key.PublicKey.Equal(csr.PublicKey) {
		return nil, errors.New("its parts do not belong together")
	}
	if node := s.node(); node == nil || node.GetName() != csr.Subject.CommonName || !s.names.equal(csr.DNSNames, csr.IPAddresses) {
		return nil, nil
	}
	return &signingRequest{name: name, key: key, der: block.Bytes}, nil
}
