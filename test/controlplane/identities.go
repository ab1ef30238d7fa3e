// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"encoding/csv"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// issueAll makes both authorities and the certificates of the servers.
func (cp *ControlPlane) issueAll() (err error) {
	if cp.ca, err = newAuthority(cp.pki(""), "ca"); err != nil {
		return err
	}
	if cp.frontCA, err = newAuthority(cp.pki(""), "front-proxy-ca"); err != nil {
		return err
	}
	if _, err := newKey(cp.pki("sa.key")); err != nil {
		return err
	}
	hosts := []string{"127.0.0.1", "10.0.0.1", "localhost", "kubernetes", "kubernetes.default",
		"kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}
	masters := []string{"system:masters"}
	for name, l := range map[string]leaf{
		"apiserver":          {cn: "kube-apiserver", hosts: hosts},
		"etcd":               {cn: "etcd", hosts: []string{"127.0.0.1"}},
		"admin":              {cn: "admin", orgs: masters},
		"kubelet-client":     {cn: "kube-apiserver-kubelet-client", orgs: masters},
		"controller-manager": {cn: "system:kube-controller-manager"},
		"scheduler":          {cn: "system:kube-scheduler"},
	} {
		if _, _, err := cp.ca.issue(name, l); err != nil {
			return err
		}
	}
	_, _, err = cp.frontCA.issue("front-proxy-client", leaf{cn: "front-proxy-client"})
	if err != nil {
		return err
	}
	for _, name := range []string{"controller-manager", "scheduler"} {
		if err := WriteKubeconfig(cp.kubeconfigFor(name), cp.certConfig(cp.pki(name+".crt"), cp.pki(name+".key"))); err != nil {
			return err
		}
	}
	return nil
}

func (cp *ControlPlane) kubeconfigFor(name string) string {
	return filepath.Join(cp.dir, name+".kubeconfig")
}

func (cp *ControlPlane) usersFile() string { return filepath.Join(cp.dir, "tokens.csv") }

// writeUsers writes the static users' tokens as the API server reads them.
func (cp *ControlPlane) writeUsers() error {
	cp.users = map[string]StaticUser{}
	var b strings.Builder
	w := csv.NewWriter(&b)
	// The API server refuses an empty file.
	for _, u := range append([]StaticUser{{Name: "nobody"}}, cp.config.Users...) {
		if u.Token == "" {
			u.Token = randomToken()
		}
		cp.users[u.Name] = u
		if err := w.Write([]string{u.Token, u.Name, u.Name, strings.Join(u.Groups, ",")}); err != nil {
			return err
		}
	}
	w.Flush()
	if err := w.Error(); err != nil {
		return err
	}
	return os.WriteFile(cp.usersFile(), []byte(b.String()), 0o600)
}

// AdminConfig returns a client configuration of a member of system:masters, by
// certificate. The caller may change it.
func (cp *ControlPlane) AdminConfig() *rest.Config { return rest.CopyConfig(cp.admin) }

// AdminKubeconfig returns the path of a kubeconfig of the same, for kubectl.
func (cp *ControlPlane) AdminKubeconfig() string { return cp.kubeconfigFor("admin") }

// Token returns a static user's token. It panics for a user that Config.Users
// does not name.
func (cp *ControlPlane) Token(user string) string {
	u, ok := cp.users[user]
	if !ok {
		panic(fmt.Sprintf("controlplane: Config.Users has no user %q", user))
	}
	return u.Token
}

// TokenConfig returns a client configuration of a static user, see Token.
func (cp *ControlPlane) TokenConfig(user string) *rest.Config {
	c := cp.anonymous()
	c.BearerToken = cp.Token(user)
	return c
}

// NodeConfig returns a client configuration of a node, with a certificate made
// now.
func (cp *ControlPlane) NodeConfig(node string) (*rest.Config, error) {
	cert, key, err := cp.NodeCredentials(node)
	if err != nil {
		return nil, err
	}
	return cp.certConfig(cert, key), nil
}

// NodeCredentials makes a node's client certificate: CN system:node:NODE, O
// system:nodes.
func (cp *ControlPlane) NodeCredentials(node string) (certFile, keyFile string, err error) {
	return cp.NodeCredentialsUntil(node, time.Time{})
}

// NodeCredentialsUntil is NodeCredentials with an end, which may be in the past;
// zero: ten years.
func (cp *ControlPlane) NodeCredentialsUntil(node string, notAfter time.Time) (certFile, keyFile string, err error) {
	return cp.issue(leaf{cn: "system:node:" + node, orgs: []string{"system:nodes"}, notAfter: notAfter})
}

// ClientCert makes a client certificate with the common name and organizations
// given.
func (cp *ControlPlane) ClientCert(cn string, orgs ...string) (certFile, keyFile string, err error) {
	return cp.issue(leaf{cn: cn, orgs: orgs})
}

// issue makes a certificate in files of a name that no other has.
func (cp *ControlPlane) issue(l leaf) (certFile, keyFile string, err error) {
	cp.mu.Lock()
	cp.issued++
	n := cp.issued
	cp.mu.Unlock()
	name := strings.Map(func(r rune) rune {
		if strings.ContainsRune("/\\: ", r) {
			return '-'
		}
		return r
	}, l.cn)
	return cp.ca.issue(fmt.Sprintf("client-%d-%s", n, name), l)
}

// anonymous returns a client configuration without credentials.
func (cp *ControlPlane) anonymous() *rest.Config {
	return &rest.Config{
		Host: cp.URL(), QPS: -1, // no limit
		TLSClientConfig: rest.TLSClientConfig{CAFile: cp.CAFile()},
	}
}

func (cp *ControlPlane) certConfig(certFile, keyFile string) *rest.Config {
	c := cp.anonymous()
	c.CertFile, c.KeyFile = certFile, keyFile
	return c
}

// WriteKubeconfig writes what c says about the server, its certificate authority
// and the credentials, files by their path, as a kubeconfig.
func WriteKubeconfig(path string, c *rest.Config) error {
	k := clientcmdapi.NewConfig()
	k.Clusters["test"] = &clientcmdapi.Cluster{
		Server: c.Host, CertificateAuthority: c.CAFile, CertificateAuthorityData: c.CAData,
		TLSServerName: c.ServerName,
	}
	k.AuthInfos["test"] = &clientcmdapi.AuthInfo{
		ClientCertificate: c.CertFile, ClientCertificateData: c.CertData,
		ClientKey: c.KeyFile, ClientKeyData: c.KeyData,
		Token: c.BearerToken, TokenFile: c.BearerTokenFile,
	}
	k.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "test"}
	k.CurrentContext = "test"
	return clientcmd.WriteToFile(*k, path)
}
