// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	clientcmdv1 "k8s.io/client-go/tools/clientcmd/api/v1"
	"sigs.k8s.io/yaml"

	"github.com/edgehub/edgehub/pkg/cmdline"
	"github.com/edgehub/edgehub/pkg/datadir"
)

// A kubeconfigClient is a client of the hub that a kubeconfig can be made for.
type kubeconfigClient struct {
	name   string
	server string
	// certificate says that the client has the node's certificate, and no token.
	certificate bool
	tokenFile   string // default; empty: it must be given
	mode        fs.FileMode
	use         string // lines that say where the file belongs
}

const (
	onHost    = "https://127.0.0.1:10268"
	onLink    = "https://169.254.2.1:10268"
	podsToken = "/var/run/secrets/kubernetes.io/serviceaccount/token"

	// The hub's own defaults; a test compares.
	defaultDataDir      = "/var/lib/edgehub"
	defaultNodeCertFile = "/var/lib/kubelet/pki/kubelet-client-current.pem"
)

var kubeconfigClients = []kubeconfigClient{
	{"kubelet", onHost, true, "", 0o600,
		"kubelet's --kubeconfig, in place of the one it has; restart kubelet then.\n" +
			"Certificate and key are the files that kubelet itself renews."},
	{"kube-proxy", onHost, false, podsToken, 0o600,
		"clientConnection.kubeconfig of kube-proxy's configuration, for pods on the host's network.\n" +
			"The token is that of the pod's ServiceAccount, which kubelet renews."},
	{"cni", onHost, false, "", 0o600,
		"the kubeconfig that the CNI plugin's configuration in /etc/cni/net.d names.\n" +
			"Something on the node, such as the plugin's own DaemonSet, must keep the token fresh."},
	// CoreDNS is not root, and nothing in the file is secret.
	{"coredns", onLink, false, podsToken, 0o644,
		"the line `kubeconfig FILE` of the plugin kubernetes in the Corefile.\n" +
			"The token is that of the pod's ServiceAccount, which kubelet renews."},
}

func kubeconfigClientNames() string {
	var names []string
	for _, c := range kubeconfigClients {
		names = append(names, c.name)
	}
	return strings.Join(names, ", ")
}

// kubeconfigOptions are the flags of the subcommand.
type kubeconfigOptions struct {
	client, server, ca, dataDir          string
	embed                                bool
	nodeCertFile, nodeKeyFile, tokenFile string
	output                               string
	head                                 string // comment; empty: what kubeconfig writes
}

func (o *kubeconfigOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.client, "client", "", "Who the kubeconfig is for: "+kubeconfigClientNames()+". Required.")
	fs.StringVar(&o.server, "server", "", "Where the client reaches edgehub. Empty: "+onLink+" for coredns, which has a network of its own, and "+onHost+" for the others.")
	fs.StringVar(&o.dataDir, "data-dir", defaultDataDir, "edgehub's --data-dir.")
	fs.StringVar(&o.ca, "certificate-authority", "", "PEM file with the authorities that may have signed edgehub's certificate; with edgehub's --serving-certificate=csr the cluster's must be among them. Empty: pki/ca.crt in --data-dir.")
	fs.BoolVar(&o.embed, "embed-certs", true, "Put the contents of --certificate-authority into the kubeconfig, so that a pod need not mount the file; else its path. For kubelet, which is on the host, the default is false.")
	fs.StringVar(&o.nodeCertFile, "node-cert-file", defaultNodeCertFile, "For kubelet: PEM file with its client certificate. The path goes into the kubeconfig, since the file changes.")
	fs.StringVar(&o.nodeKeyFile, "node-key-file", defaultNodeCertFile, "For kubelet: PEM file with the key of its client certificate; may be the same file.")
	fs.StringVar(&o.tokenFile, "token-file", "", "For the others: file with the client's token, as the client sees it. The path goes into the kubeconfig, never the token. Empty: that of a pod's ServiceAccount; required for cni.")
	fs.StringVar(&o.output, "output", "-", "File to write, replaced as a whole. -: the standard output.")
}

// Kubeconfig is the subcommand that writes a kubeconfig for a client of the hub on
// this node, to out unless --output names a file. args are what follows its name. An
// error tells all that is wrong, each by its flag. Help is printed to out, and
// pflag.ErrHelp returned.
func Kubeconfig(args []string, out io.Writer) error {
	var o kubeconfigOptions
	flags := pflag.NewFlagSet("edgehub kubeconfig", pflag.ContinueOnError)
	flags.SetOutput(out)
	o.addFlags(flags)
	if err := cmdline.Parse(flags, args); err != nil {
		return err
	}
	i := slices.IndexFunc(kubeconfigClients, func(c kubeconfigClient) bool { return c.name == o.client })
	if i < 0 {
		return fmt.Errorf("--client: %q is none of %s", o.client, kubeconfigClientNames())
	}
	c := kubeconfigClients[i]
	o.complete(c, flags.Changed)
	if err := o.validate(c, flags.Changed); err != nil {
		return err
	}
	raw, err := o.kubeconfig(c)
	switch {
	case err != nil:
		return err
	case o.output == "-":
		_, err = out.Write(raw)
		return err
	}
	if err := datadir.WriteFile(o.output, raw, c.mode); err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	return nil
}

// complete fills in the client's defaults.
func (o *kubeconfigOptions) complete(c kubeconfigClient, given func(flag string) bool) {
	if o.server == "" {
		o.server = c.server
	}
	if o.ca == "" {
		o.ca = filepath.Join(o.dataDir, "pki", "ca.crt")
	}
	if c.certificate && !given("embed-certs") {
		o.embed = false
	}
	if o.tokenFile == "" {
		o.tokenFile = c.tokenFile
	}
}

func (o *kubeconfigOptions) validate(c kubeconfigClient, given func(flag string) bool) error {
	var problems []error
	wrong := func(flag, format string, args ...any) {
		problems = append(problems, fmt.Errorf("--%s: "+format, append([]any{flag}, args...)...))
	}
	u, err := url.Parse(o.server)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" || (u.Path != "" && u.Path != "/") || u.RawQuery != "" || u.User != nil {
		wrong("server", "%q is not of the form https://host:port", o.server)
	}
	// A relative path would count from where the kubeconfig lies.
	path := func(flag, file string) {
		if !filepath.IsAbs(file) {
			wrong(flag, "%q is not an absolute path", file)
		}
	}
	if !o.embed {
		path("certificate-authority", o.ca)
	}
	if c.certificate {
		path("node-cert-file", o.nodeCertFile)
		path("node-key-file", o.nodeKeyFile)
		if given("token-file") {
			wrong("token-file", "%s has a client certificate, and no token", c.name)
		}
	} else {
		if o.tokenFile == "" {
			wrong("token-file", "required for %s: it runs on the host, where no ServiceAccount is mounted; name a file in which something keeps a token fresh", c.name)
		} else {
			path("token-file", o.tokenFile)
		}
		for _, flag := range []string{"node-cert-file", "node-key-file"} {
			if given(flag) {
				wrong(flag, "the node's certificate is kubelet's; %s has a token", c.name)
			}
		}
	}
	if o.output == "" {
		wrong("output", "empty; - is the standard output")
	}
	return errors.Join(problems...)
}

// kubeconfig reads the authorities and returns the file.
func (o *kubeconfigOptions) kubeconfig(c kubeconfigClient) ([]byte, error) {
	authorities, err := os.ReadFile(o.ca)
	if err == nil {
		err = checkCertificates(authorities)
	}
	if err != nil {
		return nil, fmt.Errorf("--certificate-authority %s: %w", o.ca, err)
	}
	o.head = fmt.Sprintf("For %s, through edgehub on its node. Written by edgehub kubeconfig --client=%[1]s.\nUse: %s", c.name, c.use)
	return o.render(c, authorities)
}

// render makes the file. authorities are what is embedded, if that is wanted.
func (o *kubeconfigOptions) render(c kubeconfigClient, authorities []byte) ([]byte, error) {
	cluster := clientcmdv1.Cluster{Server: o.server}
	if o.embed {
		cluster.CertificateAuthorityData = authorities
	} else {
		cluster.CertificateAuthority = o.ca
	}
	credential := clientcmdv1.AuthInfo{TokenFile: o.tokenFile}
	if c.certificate {
		credential = clientcmdv1.AuthInfo{ClientCertificate: o.nodeCertFile, ClientKey: o.nodeKeyFile}
	}
	const hub = "edgehub"
	raw, err := yaml.Marshal(clientcmdv1.Config{
		APIVersion: "v1", Kind: "Config", CurrentContext: hub,
		Clusters:  []clientcmdv1.NamedCluster{{Name: hub, Cluster: cluster}},
		AuthInfos: []clientcmdv1.NamedAuthInfo{{Name: c.name, AuthInfo: credential}},
		Contexts:  []clientcmdv1.NamedContext{{Name: hub, Context: clientcmdv1.Context{Cluster: hub, AuthInfo: c.name}}},
	})
	if err != nil {
		return nil, err
	}
	return append([]byte("# "+strings.ReplaceAll(o.head, "\n", "\n# ")+"\n"), raw...), nil
}

// checkCertificates wants PEM certificates and nothing else: what is embedded is
// shown to others, and must not hold a key by mistake.
func checkCertificates(raw []byte) error {
	found := false
	for {
		block, rest := pem.Decode(raw)
		switch {
		case block == nil && bytes.Contains(raw, []byte("-----BEGIN")):
			return errors.New("it ends with an incomplete PEM block")
		case block == nil && !found:
			return errors.New("it holds no PEM certificate")
		case block == nil:
			return nil
		case block.Type != "CERTIFICATE":
			return fmt.Errorf("a PEM block is %q, not CERTIFICATE", block.Type)
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			return err
		}
		found, raw = true, rest
	}
}
