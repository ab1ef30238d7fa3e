// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	clientcmdv1 "k8s.io/client-go/tools/clientcmd/api/v1"
	"sigs.k8s.io/yaml"
)

// A node is what kubelet's kubeconfig says about it. Files are the host's.
type node struct {
	name   string // by its certificate
	server string
	caFile string
	// certFile and keyFile may be the same.
	certFile, keyFile string
	// inline are contents of the kubeconfig by the file that they are to be in.
	inline map[string][]byte
}

// A kubelet is its kubeconfig as it is, and as it was before it led to the hub.
type kubelet struct {
	node
	raw      []byte
	original []byte
	points   bool // at the hub
}

// errNoWayBack means that kubelet's kubeconfig leads to the hub, and there is no backup.
var errNoWayBack = errors.New("there is no way back")

// readKubelet reads kubelet's kubeconfig. If that leads to the hub, the backup is the truth.
func (i *installer) readKubelet() (*kubelet, error) {
	file := i.o.KubeletKubeconfig
	raw, err := i.host.read(file)
	if err != nil {
		return nil, fmt.Errorf("kubelet's kubeconfig: %w", err)
	}
	k := &kubelet{raw: raw, original: raw}
	c, err := parseKubeconfig(raw)
	if err != nil {
		return nil, fmt.Errorf("kubelet's kubeconfig: %s: %w", file, err)
	}
	if k.points = i.isHub(c.cluster.Server); k.points {
		file = i.inState(backupFile)
		if k.original, err = i.host.read(file); err != nil {
			return nil, fmt.Errorf("kubelet's kubeconfig %s points at edgehub (%s), and how it was before is not known: %w (%w); nothing is changed: put a kubeconfig that points at the API server there, or into the backup", i.o.KubeletKubeconfig, c.cluster.Server, err, errNoWayBack)
		}
		if c, err = parseKubeconfig(k.original); err == nil && i.isHub(c.cluster.Server) {
			err = fmt.Errorf("it points at edgehub (%s)", c.cluster.Server)
		}
		if err != nil {
			return nil, fmt.Errorf("the backup of kubelet's kubeconfig: %s: %w (%w)", file, err, errNoWayBack)
		}
	}
	if k.node, err = c.node(filepath.Dir(i.o.KubeletKubeconfig), i.inState(credentialsDir)); err == nil {
		err = i.identify(&k.node)
	}
	if err != nil {
		return nil, fmt.Errorf("kubelet's kubeconfig: %s: %w", file, err)
	}
	return k, nil
}

// isHub says whether a server is the hub that was or is to be installed.
func (i *installer) isHub(server string) bool {
	server = strings.TrimSuffix(server, "/")
	return server != "" && (server == i.at.URL || server == i.o.hubAt().URL)
}

// identify reads the files that are named, and takes the node's name from its certificate.
func (i *installer) identify(n *node) error {
	pair, ca, err := i.credential(*n)
	if err != nil {
		return err
	}
	if !x509.NewCertPool().AppendCertsFromPEM(ca) {
		return fmt.Errorf("certificate-authority: %s: it holds no PEM certificate", n.caFile)
	}
	cert := pair.Leaf
	name, ok := strings.CutPrefix(cert.Subject.CommonName, "system:node:")
	if !ok || name == "" || !slices.Contains(cert.Subject.Organization, "system:nodes") {
		return fmt.Errorf("client-certificate: it is of %q in %q, not of system:node:NAME in system:nodes", cert.Subject.CommonName, cert.Subject.Organization)
	}
	n.name = name
	return nil
}

// credential is what a node shows, and what it trusts.
func (i *installer) credential(n node) (pair tls.Certificate, ca []byte, err error) {
	read := func(field, file string) []byte {
		b, inline := n.inline[file]
		if !inline {
			var e error
			if b, e = i.host.read(file); e != nil {
				err = errors.Join(err, fmt.Errorf("%s: %w", field, e))
			}
		}
		return b
	}
	ca = read("certificate-authority", n.caFile)
	cert, key := read("client-certificate", n.certFile), read("client-key", n.keyFile)
	if err != nil {
		return pair, nil, err
	}
	if pair, err = tls.X509KeyPair(cert, key); err != nil {
		return pair, nil, fmt.Errorf("client-certificate and client-key: %s, %s: %w", n.certFile, n.keyFile, err)
	}
	return pair, ca, nil
}

// An access is what a kubeconfig's current context names.
type access struct {
	cluster clientcmdv1.Cluster
	user    clientcmdv1.AuthInfo
	// fields are what errors call them.
	clusterField, userField string
}

// parseKubeconfig finds what the current context leads to.
func parseKubeconfig(raw []byte) (w access, err error) {
	var c clientcmdv1.Config
	if err := yaml.Unmarshal(raw, &c); err != nil {
		return w, fmt.Errorf("it is no kubeconfig: %w", withoutContent(err))
	}
	if c.CurrentContext == "" {
		return w, errors.New("current-context: empty")
	}
	context, err := one(c.Contexts, "contexts", c.CurrentContext, func(n clientcmdv1.NamedContext) string { return n.Name })
	if err != nil {
		return w, err
	}
	cluster, err := one(c.Clusters, "clusters", context.Context.Cluster, func(n clientcmdv1.NamedCluster) string { return n.Name })
	if err != nil {
		return w, err
	}
	user, err := one(c.AuthInfos, "users", context.Context.AuthInfo, func(n clientcmdv1.NamedAuthInfo) string { return n.Name })
	if err != nil {
		return w, err
	}
	return access{
		cluster: cluster.Cluster, clusterField: fmt.Sprintf("clusters[%q].cluster", cluster.Name),
		user: user.AuthInfo, userField: fmt.Sprintf("users[%q].user", user.Name),
	}, nil
}

// withoutContent keeps an error's first line, where the parser does not quote the file.
func withoutContent(err error) error {
	line, _, _ := strings.Cut(err.Error(), "\n")
	if len(line) > 100 {
		line = line[:100]
	}
	return errors.New(line)
}

// one returns the element of that name, which must be there once.
func one[T any](all []T, field, name string, nameOf func(T) string) (found T, err error) {
	n := 0
	for _, e := range all {
		if nameOf(e) == name {
			found = e
			n++
		}
	}
	if n != 1 {
		return found, fmt.Errorf("%s: %d are named %q, want one", field, n, name)
	}
	return found, nil
}

// node refuses all that the hub could not do in kubelet's place. Relative paths count from
// dir; what is in the kubeconfig itself goes into files below credentials.
func (w access) node(dir, credentials string) (n node, err error) {
	var problems []error
	wrong := func(field, text string) { problems = append(problems, fmt.Errorf("%s: %s", field, text)) }
	c, u := w.cluster, w.user
	if err := checkServer(c.Server); err != nil {
		wrong(w.clusterField+".server", err.Error())
	}
	for _, f := range []struct {
		field string
		set   bool
	}{
		{w.clusterField + ".insecure-skip-tls-verify", c.InsecureSkipTLSVerify}, {w.clusterField + ".tls-server-name", c.TLSServerName != ""}, {w.clusterField + ".proxy-url", c.ProxyURL != ""},
		{w.userField + ".token", u.Token != ""}, {w.userField + ".tokenFile", u.TokenFile != ""}, {w.userField + ".exec", u.Exec != nil}, {w.userField + ".auth-provider", u.AuthProvider != nil},
		{w.userField + ".username", u.Username != ""}, {w.userField + ".password", u.Password != ""},
		{w.userField + ".as", u.Impersonate != "" || u.ImpersonateUID != "" || len(u.ImpersonateGroups) > 0 || len(u.ImpersonateUserExtra) > 0},
	} {
		if f.set {
			wrong(f.field, "not supported: edgehub speaks for the node with a client certificate, to a server whose authority it knows")
		}
	}
	n = node{server: strings.TrimSuffix(c.Server, "/"), inline: map[string][]byte{}}
	file := func(field, path string, data []byte, into string) string {
		switch {
		case len(data) > 0:
			n.inline[into] = data
			return into
		case path == "":
			wrong(field, "required")
			return ""
		case !filepath.IsAbs(path):
			path = filepath.Join(dir, path)
		}
		return filepath.Clean(path)
	}
	pemFile := filepath.Join(credentials, "client.pem")
	n.caFile = file(w.clusterField+".certificate-authority", c.CertificateAuthority, c.CertificateAuthorityData, filepath.Join(credentials, "ca.crt"))
	n.certFile = file(w.userField+".client-certificate", u.ClientCertificate, u.ClientCertificateData, filepath.Join(credentials, "client.crt"))
	n.keyFile = file(w.userField+".client-key", u.ClientKey, u.ClientKeyData, filepath.Join(credentials, "client.key"))
	if len(u.ClientCertificateData) > 0 && len(u.ClientKeyData) > 0 {
		// In one file, so that they are never of two times.
		delete(n.inline, n.certFile)
		delete(n.inline, n.keyFile)
		n.inline[pemFile] = slices.Concat(bytes.TrimSpace(u.ClientCertificateData), []byte("\n"), u.ClientKeyData)
		n.certFile, n.keyFile = pemFile, pemFile
	}
	return n, errors.Join(problems...)
}

// writeInline puts what the kubeconfig has in it where the hub can read it.
func (i *installer) writeInline(n node) error {
	for _, file := range []string{"ca.crt", "client.crt", "client.key", "client.pem"} {
		file = i.inState(credentialsDir, file)
		content, inline := n.inline[file]
		if there, err := i.host.read(file); !inline || err == nil && bytes.Equal(there, content) {
			continue
		}
		err := i.step("Write what kubelet's kubeconfig has in it to "+file, func() error {
			if err := i.host.mkdir(i.inState(credentialsDir), 0o700); err != nil {
				return err
			}
			return i.host.replace(file, content, 0o600)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// kubeconfigThroughHub is kubelet's kubeconfig that leads to the hub. The hub must have
// made its authority by then, unless this is a dry run.
func (i *installer) kubeconfigThroughHub(n node) ([]byte, error) {
	o := kubeconfigOptions{
		server: i.at.URL, ca: i.hubCAFile(), nodeCertFile: n.certFile, nodeKeyFile: n.keyFile,
		head: fmt.Sprintf("For kubelet, through edgehub on its node. Written by edgehub install.\nThe kubeconfig that was here before is %s; edgehub uninstall puts it back.", i.inState(backupFile)),
	}
	authorities, err := i.trustedByClients(n)
	if err != nil {
		if i.o.DryRun {
			return nil, nil
		}
		return nil, err
	}
	o.embed = i.at.ByCSR
	return o.render(kubeconfigClients[0], authorities)
}

func (i *installer) hubCAFile() string { return filepath.Join(i.at.DataDir, "pki", "ca.crt") }

// trustedByClients are the authorities that may have signed the hub's certificate.
func (i *installer) trustedByClients(n node) ([]byte, error) {
	authorities, err := i.host.read(i.hubCAFile())
	if err == nil {
		err = checkCertificates(authorities)
	}
	if err != nil {
		return nil, fmt.Errorf("the hub's authority: %w", err)
	}
	if !i.at.ByCSR {
		return authorities, nil
	}
	_, cluster, err := i.credential(n)
	if err != nil {
		return nil, err
	}
	// What else the file holds is nobody's business.
	for block, rest := pem.Decode(cluster); block != nil; block, rest = pem.Decode(rest) {
		if block.Type == "CERTIFICATE" {
			authorities = append(authorities, pem.EncodeToMemory(block)...)
		}
	}
	return authorities, nil
}
