// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"context"
	"crypto/x509"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// TestKubeconfig writes a kubeconfig for each client that there is one for, and uses
// it as client-go's programs do: it leads to this hub and no other, as who it should
// be, online and while the link is cut.
//
// Guards: the kubeconfig names the hub's CA, and the credential of its client.
func TestKubeconfig(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	account := s.account("reader")
	s.start()
	impostor := s.NewHub()
	process.Run(t, impostor)
	tokenFile := filepath.Join(t.TempDir(), "token")
	s.Must(os.WriteFile(tokenFile, []byte(s.token("reader", authenticationv1.TokenRequestSpec{})), 0o600))
	byToken := []string{"--token-file=" + tokenFile}
	clients := map[string]*rest.Config{}
	for _, c := range []struct {
		client, user string
		args         []string
	}{
		{"kubelet", rig.NodeUser, []string{"--node-cert-file=" + s.Node.CertFile, "--node-key-file=" + s.Node.KeyFile}},
		{"kube-proxy", account, byToken},
		{"cni", account, byToken},
		{"coredns", account, byToken},
	} {
		config := s.kubeconfig(c.client, s.Hub, s.Hub.URL(), c.args)
		clients[c.client] = config
		review, err := s.clientset(config).AuthenticationV1().SelfSubjectReviews().Create(t.Context(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
		if err != nil || review.Status.UserInfo.Username != c.user {
			t.Errorf("by the kubeconfig of %s one is %q, %v, want %q", c.client, review.Status.UserInfo.Username, err, c.user)
		}
		_, err = s.clientset(s.kubeconfig(c.client, s.Hub, impostor.URL(), c.args)).Discovery().ServerVersion()
		if unknown := (x509.UnknownAuthorityError{}); !errors.As(err, &unknown) {
			t.Errorf("another hub, by the kubeconfig of %s: %v, want an unknown authority", c.client, err)
		}
	}
	read := func(ctx context.Context, client string) error {
		c := s.clientset(clients[client]).CoreV1()
		if client == "kubelet" {
			_, err := c.Nodes().Get(ctx, rig.NodeName, metav1.GetOptions{})
			return err
		}
		_, err := c.ConfigMaps(s.namespace).Get(ctx, "c", metav1.GetOptions{})
		return err
	}
	for client := range clients {
		s.Must(process.Poll(t.Context(), client+" reads", func(ctx context.Context) error { return read(ctx, client) }))
	}
	s.Settle()
	s.Offline()
	s.restart(false)
	for client := range clients {
		if err := read(t.Context(), client); err != nil {
			t.Errorf("%s, offline after a restart: %v", client, err)
		}
	}
}

// kubeconfig runs `edgehub kubeconfig` for a client of a hub and loads what it has
// written.
func (s *site) kubeconfig(client string, hub *node.Hub, url string, args []string) *rest.Config {
	s.T.Helper()
	program, err := node.BuildHub(s.T.Context())
	s.Must(err)
	file := filepath.Join(s.T.TempDir(), "kubeconfig")
	cmd := exec.CommandContext(s.T.Context(), program, append([]string{"kubeconfig", "--client=" + client, "--data-dir=" + hub.DataDir(), "--server=" + url, "--output=" + file}, args...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		s.T.Fatalf("edgehub kubeconfig --client=%s: %v\n%s", client, err, out)
	}
	config, err := clientcmd.BuildConfigFromFlags("", file)
	s.Must(err)
	return config
}

func (s *site) clientset(c *rest.Config) kubernetes.Interface {
	s.T.Helper()
	client, err := kubernetes.NewForConfig(c)
	s.Must(err)
	return client
}
