// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package availability

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/retry"

	"github.com/edgehub/edgehub/test/companion"
)

// secretName is the chart's.
const secretName = companion.Name + "-webhook-certificate"

// edit changes the Secret with the certificate, as somebody might by hand.
func (s *stage) edit(t *testing.T, change func(*testing.T, *corev1.Secret)) {
	t.Helper()
	secrets := s.cp.Client.CoreV1().Secrets(companion.Namespace)
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		secret, err := secrets.Get(t.Context(), secretName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		change(t, secret)
		_, err = secrets.Update(t.Context(), secret, metav1.UpdateOptions{})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// expire replaces the certificate by one of the same key and authority that has expired.
func expire(t *testing.T, secret *corev1.Secret) {
	t.Helper()
	pair, err := tls.X509KeyPair(secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		t.Fatal(err)
	}
	authority, err := tls.X509KeyPair(secret.Data["ca.crt"], secret.Data["ca.key"])
	if err != nil {
		t.Fatal(err)
	}
	old := *pair.Leaf
	old.NotAfter = time.Now().Add(-time.Minute)
	der, err := x509.CreateCertificate(rand.Reader, &old, authority.Leaf, pair.Leaf.PublicKey, authority.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	secret.Data[corev1.TLSCertKey] = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// handshake makes a connection as the API server would: it returns the certificate if
// the caBundle of the webhooks is good for it.
func (s *stage) handshake(ctx context.Context) (*x509.Certificate, error) {
	c, err := s.cp.Client.AdmissionregistrationV1().MutatingWebhookConfigurations().Get(ctx, companion.Name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(c.Webhooks[0].ClientConfig.CABundle) {
		return nil, errors.New("there is no caBundle")
	}
	d := tls.Dialer{Config: &tls.Config{RootCAs: roots, ServerName: "localhost", NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS12}}
	conn, err := d.DialContext(ctx, "tcp", s.release.Address)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.(*tls.Conn).ConnectionState().PeerCertificates[0], nil
}

// served is the certificate that is served now.
func (s *stage) served() *x509.Certificate {
	s.t.Helper()
	c, err := s.handshake(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}
