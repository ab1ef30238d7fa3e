// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/open-policy-agent/cert-controller/pkg/rotator"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	toolscache "k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/webhook"

	"github.com/edgehub/edgehub/pkg/datadir"
)

// certificateFiles keeps the certificate of the Secret in files, where controller-runtime's
// certificate watcher finds it. A volume of the Secret would be up to two minutes behind:
// too late for a caBundle that has changed, and for the first start.
type certificateFiles struct {
	cache cache.Cache // sees no Secret but the certificate's
	dir   string
	ready chan struct{} // closed when there is a certificate
	once  sync.Once
}

// NeedLeaderElection is false: every replica serves.
func (*certificateFiles) NeedLeaderElection() bool { return false }

// Start runs until ctx ends.
func (c *certificateFiles) Start(ctx context.Context) error {
	informer, err := c.cache.GetInformer(ctx, &corev1.Secret{})
	if err != nil {
		return fmt.Errorf("watch the certificate's Secret: %w", err)
	}
	use := func(object any) {
		secret, ok := object.(*corev1.Secret)
		if !ok {
			return
		}
		if err := c.write(secret); err != nil {
			klog.FromContext(ctx).Error(err, "The certificate of the Secret is not used", "secret", klog.KObj(secret))
		}
	}
	if _, err := informer.AddEventHandler(toolscache.ResourceEventHandlerFuncs{AddFunc: use, UpdateFunc: func(_, object any) { use(object) }}); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

// write replaces the files, the key first: the watcher takes a pair only when its two
// halves belong together.
func (c *certificateFiles) write(secret *corev1.Secret) error {
	certificate, key := secret.Data[corev1.TLSCertKey], secret.Data[corev1.TLSPrivateKeyKey]
	if len(certificate) == 0 && len(key) == 0 {
		return nil // nobody has made one yet
	}
	if _, err := tls.X509KeyPair(certificate, key); err != nil {
		return err
	}
	if err := datadir.WriteFile(filepath.Join(c.dir, corev1.TLSPrivateKeyKey), key, 0o600); err != nil {
		return err
	}
	if err := datadir.WriteFile(filepath.Join(c.dir, corev1.TLSCertKey), certificate, 0o600); err != nil {
		return err
	}
	c.once.Do(func() { close(c.ready) })
	return nil
}

// afterCertificate starts the server when there is something to serve with.
type afterCertificate struct {
	ready  <-chan struct{}
	server webhook.Server
}

// NeedLeaderElection is false: every replica serves.
func (*afterCertificate) NeedLeaderElection() bool { return false }

// Start runs until ctx ends.
func (a *afterCertificate) Start(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-a.ready:
		return a.server.Start(ctx)
	}
}

// addRotator makes and renews the certificate, and keeps the caBundles. Every replica does; the
// Secret is written only as it was read.
func addRotator(mgr manager.Manager, o Options) error {
	return rotator.AddRotator(mgr, &rotator.CertRotator{
		SecretKey: types.NamespacedName{Namespace: o.Namespace, Name: o.CertificateSecret},
		CertDir:   o.CertDir,
		CAName:    "edgehub-webhook-ca", CAOrganization: "edgehub",
		DNSName: o.CertificateNames[0], ExtraDNSNames: o.CertificateNames,
		IsReady:                make(chan struct{}),
		Webhooks:               []rotator.WebhookInfo{{Name: o.WebhookConfiguration, Type: rotator.Mutating}},
		FieldOwner:             "edgehub-webhook",
		RequireLeaderElection:  false, // the leader may be of a release that had no webhooks
		CaCertDuration:         10 * o.CertificateLifetime,
		ServerCertDuration:     o.CertificateLifetime,
		LookaheadInterval:      o.CertificateLifetime / 3,
		RotationCheckFrequency: min(o.CertificateLifetime/12, 12*time.Hour),
	})
}

// onlyCallers lets only clients with a certificate of the authorities in the file connect,
// and with one of the common names if there are any. Without a file anyone may.
func onlyCallers(file string, names []string) (func(*tls.Config), error) {
	if file == "" {
		return func(*tls.Config) {}, nil
	}
	authorities, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("--client-ca-file: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(authorities) {
		return nil, fmt.Errorf("--client-ca-file: %s holds no PEM certificate", file)
	}
	return func(c *tls.Config) {
		c.ClientCAs, c.ClientAuth = pool, tls.RequireAndVerifyClientCert
		c.VerifyConnection = func(s tls.ConnectionState) error {
			if len(names) > 0 && !slices.Contains(names, s.PeerCertificates[0].Subject.CommonName) {
				return errors.New("the client's certificate has none of the names of --client-names")
			}
			return nil
		}
	}, nil
}
