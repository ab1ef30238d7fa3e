// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package serving lets a real control plane sign the certificate that clients check
// the hub by.
package serving

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
)

const nodeName = "n1"

// shown returns the certificate that the hub shows to a client that trusts the
// authorities of a file.
func shown(ctx context.Context, hub *node.Hub, caFile string) (*x509.Certificate, error) {
	ca, err := os.ReadFile(caFile)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(ca)
	conn, err := (&tls.Dialer{Config: &tls.Config{RootCAs: roots}}).DialContext(ctx, "tcp", hub.Addr())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.(*tls.Conn).ConnectionState().PeerCertificates[0], nil
}

// approve waits for the hub's request, and says yes to it.
func approve(ctx context.Context, t *testing.T, admin kubernetes.Interface) {
	t.Helper()
	requests := admin.CertificatesV1().CertificateSigningRequests()
	var csr *certificatesv1.CertificateSigningRequest
	must(t, process.Poll(ctx, "the hub has asked for a certificate", func(ctx context.Context) error {
		list, err := requests.List(ctx, metav1.ListOptions{})
		if err == nil && len(list.Items) != 1 {
			err = fmt.Errorf("there are %d requests", len(list.Items))
		}
		if err == nil {
			csr = &list.Items[0]
		}
		return err
	}))
	if csr.Spec.Username != "system:node:"+nodeName || csr.Spec.SignerName != certificatesv1.KubeletServingSignerName {
		t.Fatalf("request is by %s for %s, want it by the node for kubelets' signer", csr.Spec.Username, csr.Spec.SignerName)
	}
	csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, Reason: "Test",
	})
	_, err := requests.UpdateApproval(ctx, csr.Name, csr, metav1.UpdateOptions{})
	must(t, err)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantLabel waits for a change of the node on a watch.
func wantLabel(ctx context.Context, t *testing.T, w watch.Interface, value string) {
	t.Helper()
	for {
		select {
		case e, ok := <-w.ResultChan():
			if !ok {
				t.Fatal("the watch has ended")
			}
			if n, ok := e.Object.(*corev1.Node); ok && n.Labels["turn"] == value {
				return
			}
		case <-ctx.Done():
			t.Fatalf("the watch has not brought turn=%s", value)
		}
	}
}

// start runs a hub of the node, behind a link.
func start(t *testing.T, cp *controlplane.ControlPlane) (*node.Hub, *link.Link, *rest.Config) {
	t.Helper()
	ctx := t.Context()
	l, err := link.New(ctx, cp.Addr())
	must(t, err)
	t.Cleanup(l.Close)
	self, err := cp.NodeConfig(nodeName)
	must(t, err)
	hub, err := node.NewHub(ctx, node.HubConfig{
		ServerURLs: []string{l.URL()}, ServerCAFile: cp.CAFile(), CertFile: self.CertFile, KeyFile: self.KeyFile, Args: []string{"--serving-certificate=csr"},
	})
	must(t, err)
	t.Cleanup(func() { must(t, hub.Close()) })
	must(t, hub.Start(ctx))
	return hub, l, self
}

// The cluster signs once somebody has approved. A watch that began before goes on,
// and the certificate outlives a restart without a link.
func TestSignedByTheCluster(t *testing.T) {
	ctx := t.Context()
	cp := controlplane.New(t, controlplane.Config{ControllerManager: true})
	hub, l, self := start(t, cp)
	nodes := cp.Client.CoreV1().Nodes()
	_, err := nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, metav1.CreateOptions{})
	must(t, err)
	label := func(value string) {
		t.Helper()
		_, err := nodes.Patch(ctx, nodeName, types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"labels":{"turn":%q}}}`, value), metav1.PatchOptions{})
		must(t, err)
	}

	// Before: by the node's own authority.
	_, err = shown(ctx, hub, hub.CAFile())
	must(t, err)
	var unknown x509.UnknownAuthorityError
	if _, err := shown(ctx, hub, cp.CAFile()); !errors.As(err, &unknown) {
		t.Fatalf("handshake of a client that trusts the cluster = %v, want %T", err, unknown)
	}
	client, err := kubernetes.NewForConfig(hub.Through(self))
	must(t, err)
	must(t, process.Poll(ctx, "the link is up", func(ctx context.Context) error {
		_, err := client.CoreV1().Nodes().Get(ctx, nodeName, metav1.GetOptions{})
		return err
	}))
	w, err := client.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=" + nodeName})
	must(t, err)
	t.Cleanup(w.Stop)
	label("before")
	wantLabel(ctx, t, w, "before")

	// After: by the cluster, for whoever comes now.
	approve(ctx, t, cp.Client)
	var signed *x509.Certificate
	must(t, process.Poll(ctx, "the hub shows what the cluster has signed", func(ctx context.Context) (err error) {
		signed, err = shown(ctx, hub, cp.CAFile())
		return err
	}))
	label("after")
	wantLabel(ctx, t, w, "after")

	// Also after a restart without a link.
	must(t, hub.Stop())
	l.Cut()
	must(t, hub.Start(ctx))
	again, err := shown(ctx, hub, cp.CAFile())
	must(t, err)
	if !again.Equal(signed) {
		t.Error("the hub shows another certificate after a restart")
	}
	issuedBy, err := hub.Metric(ctx, "edgehub_identity_serving_certificate_not_after_seconds", `issuer="cluster"`)
	if err != nil || int64(issuedBy) != signed.NotAfter.Unix() {
		t.Errorf("the certificate's end by its metric = %v, %v, want %v", issuedBy, err, signed.NotAfter.Unix())
	}
}
