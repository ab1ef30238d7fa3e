// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package approver

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rsa"
	"crypto/x509"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/authentication/user"
)

const (
	// requestPrefix begins the names of hubs' requests, and of nobody else's: kubelet's
	// begin with csr-.
	requestPrefix = "edgehub-serving-"
	nodeUser      = "system:node:"

	// A hub's request has less than 1 KiB and two names.
	maxRequestBytes = 16 << 10
	maxNames        = 32
	maxRSABits      = 8192 // beyond, checking the signature is work
)

// What is wrong with a request: the values of the label result, with resultApproved.
const (
	badRequest   = "malformed"
	badRequester = "requester"
	badSubject   = "subject"
	badUsages    = "usages"
	badKey       = "key"
	badNode      = "node"
	badNames     = "names"
)

// A refusal is why a request is not approved.
type refusal struct{ reason, text string }

func (r *refusal) Error() string { return r.text }

func refuse(reason, format string, args ...any) error {
	return &refusal{reason, fmt.Sprintf(format, args...)}
}

// ours reports whether it is for this approver to say anything: other approvers may be in
// charge of kubelets' own requests, for the same signer. It makes nothing safe, since a
// node names its requests as it likes.
func ours(csr *certificatesv1.CertificateSigningRequest) bool {
	return csr.Spec.SignerName == certificatesv1.KubeletServingSignerName && strings.HasPrefix(csr.Name, requestPrefix)
}

// decided reports whether somebody has approved or denied the request, or it has failed.
func decided(csr *certificatesv1.CertificateSigningRequest) bool {
	return len(csr.Status.Conditions) > 0 || len(csr.Status.Certificate) > 0
}

// read returns the request for a certificate and the name of the node that makes it, if it
// is one such as a hub makes, whatever names it asks for.
func read(csr *certificatesv1.CertificateSigningRequest) (*x509.CertificateRequest, string, error) {
	node, ok := strings.CutPrefix(csr.Spec.Username, nodeUser)
	if !ok || node == "" || !slices.Contains(csr.Spec.Groups, user.NodesGroup) {
		return nil, "", refuse(badRequester, "it was made by %.64q, which is no node", csr.Spec.Username)
	}
	request, err := parse(csr.Spec.Request)
	if err != nil {
		return nil, "", refuse(badRequest, "%v", err)
	}
	if err := checkSubject(request, csr.Spec.Username); err != nil {
		return nil, "", err
	}
	if err := checkUsages(csr.Spec.Usages); err != nil {
		return nil, "", err
	}
	if err := checkKey(request); err != nil {
		return nil, "", err
	}
	return request, node, nil
}

func parse(raw []byte) (*x509.CertificateRequest, error) {
	if len(raw) > maxRequestBytes {
		return nil, fmt.Errorf("it has %d bytes, more than %d", len(raw), maxRequestBytes)
	}
	block, rest := pem.Decode(raw)
	if block == nil || block.Type != "CERTIFICATE REQUEST" || len(strings.TrimSpace(string(rest))) > 0 {
		return nil, errors.New("it is not one PEM block CERTIFICATE REQUEST")
	}
	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, err
	}
	return request, nil
}

// checkSubject wants a common name and an organization, and nothing that a reader of the
// certificate might take for another name.
func checkSubject(request *x509.CertificateRequest, username string) error {
	s := request.Subject
	if s.CommonName != username {
		return refuse(badSubject, "it is for %.64q, but was made by %.64q", s.CommonName, username)
	}
	if !slices.Equal(s.Organization, []string{user.NodesGroup}) || len(s.Names) != 2 {
		return refuse(badSubject, "its subject is not just the common name and the organization %s", user.NodesGroup)
	}
	return nil
}

// checkUsages wants those of a server. Key encipherment is for RSA keys.
func checkUsages(usages []certificatesv1.KeyUsage) error {
	wanted := sets.New(certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth)
	if !sets.New(usages...).Delete(certificatesv1.UsageKeyEncipherment).Equal(wanted) {
		return refuse(badUsages, "its usages are %.256q, not digital signature and server auth", usages)
	}
	return nil
}

// checkKey wants a key that nobody can guess, and that the requester has.
func checkKey(request *x509.CertificateRequest) error {
	strong := false
	switch key := request.PublicKey.(type) {
	case *ecdsa.PublicKey:
		strong = slices.Contains([]elliptic.Curve{elliptic.P256(), elliptic.P384(), elliptic.P521()}, key.Curve)
	case *rsa.PublicKey:
		strong = key.N.BitLen() >= 2048 && key.N.BitLen() <= maxRSABits
	case ed25519.PublicKey:
		strong = true
	}
	if !strong {
		return refuse(badKey, "its key is neither ECDSA of 256 bits and more, Ed25519, nor RSA of 2048 to %d bits", maxRSABits)
	}
	if err := request.CheckSignature(); err != nil {
		return refuse(badKey, "it is not signed with its key: %v", err)
	}
	return nil
}

// names are DNS names and addresses. They do not change once they are made.
type names struct {
	dns sets.Set[string]
	ips sets.Set[netip.Addr]
}

// newNames takes each value for an address if it can be one.
func newNames(values ...string) names {
	n := names{sets.New[string](), sets.New[netip.Addr]()}
	for _, v := range values {
		if ip, err := netip.ParseAddr(v); err == nil {
			n.ips.Insert(ip.Unmap())
		} else {
			n.dns.Insert(v)
		}
	}
	return n
}

// A cluster is what the names of a request are judged by.
type cluster struct {
	allowed   names // whatever the node
	apiServer names // by which clients call API servers
	nodes     []corev1.Node
}

// checkNames wants all names to be this machine's, or allowed.
//
// A node writes the addresses in its status itself. So what is there counts only as far as
// nobody else claims it, and of DNS names only the Node's own, unless that is a Service's: a
// node might else call itself like another node, or the API server.
func (c *cluster) checkNames(request *x509.CertificateRequest, node *corev1.Node) error {
	if n := len(request.DNSNames) + len(request.IPAddresses); n == 0 || n > maxNames {
		return refuse(badNames, "it asks for %d names, not 1 to %d", n, maxNames)
	}
	if len(request.EmailAddresses) > 0 || len(request.URIs) > 0 {
		return refuse(badNames, "it asks for e-mail addresses or URIs")
	}
	// RFC 5280 knows more kinds of names than crypto/x509 returns.
	subjectAltName := asn1.ObjectIdentifier{2, 5, 29, 17}
	if len(request.Extensions) != 1 || !request.Extensions[0].Id.Equal(subjectAltName) {
		return refuse(badNames, "it asks for other extensions than one subjectAltName")
	}
	var all []asn1.RawValue
	if _, err := asn1.Unmarshal(request.Extensions[0].Value, &all); err != nil || len(all) != len(request.DNSNames)+len(request.IPAddresses) {
		return refuse(badNames, "it asks for names that are neither DNS names nor addresses")
	}
	own := ownNames(node)
	for _, name := range request.DNSNames {
		if !c.allowed.dns.Has(name) && !(name == node.Name && own.dns.Has(name) && !ofService(name)) {
			return refuse(badNames, "it asks for the DNS name %.64q", name)
		}
	}
	for _, raw := range request.IPAddresses {
		ip, ok := netip.AddrFromSlice(raw)
		if ip = ip.Unmap(); !ok || !c.allowed.ips.Has(ip) && !onlyHere(ip) && !own.ips.Has(ip) {
			return refuse(badNames, "it asks for the address %v, which is not this node's", raw)
		}
		if c.allowed.ips.Has(ip) || onlyHere(ip) {
			continue
		}
		if c.apiServer.ips.Has(ip) {
			return refuse(badNames, "it asks for the address %v, which is an API server's", ip)
		}
		if other := c.hasPod(ip); other != "" {
			return refuse(badNames, "it asks for the address %v, which is for pods of the node %s", ip, other)
		}
		if other := c.claims(ip, node.Name); other != "" {
			return refuse(badNames, "it asks for the address %v, which is also that of the node %s", ip, other)
		}
	}
	return nil
}

// onlyHere reports whether an address means this machine to all that are on it.
func onlyHere(ip netip.Addr) bool { return ip.IsLoopback() || ip.Is4() && ip.IsLinkLocalUnicast() }

// ownNames are the addresses in the status of a Node.
func ownNames(node *corev1.Node) names {
	var values []string
	for _, a := range node.Status.Addresses {
		values = append(values, a.Address)
	}
	return newNames(values...)
}

// ofService reports whether pods may take a name for a Service's. Whoever has a bootstrap
// token chooses the name of its node.
func ofService(name string) bool {
	return slices.Contains(apiServerNames, name) || strings.HasSuffix(name, ".svc") || strings.Contains(name, ".svc.")
}

// hasPod returns the node whose pods get such an address, "" if there is none.
func (c *cluster) hasPod(ip netip.Addr) string {
	for i := range c.nodes {
		for _, cidr := range c.nodes[i].Spec.PodCIDRs {
			if prefix, err := netip.ParsePrefix(cidr); err == nil && prefix.Contains(ip) {
				return c.nodes[i].Name
			}
		}
	}
	return ""
}

// claims returns another node that says that it has the address, "" if there is none.
func (c *cluster) claims(ip netip.Addr, except string) string {
	for i := range c.nodes {
		node := &c.nodes[i]
		if node.Name != except && slices.ContainsFunc(node.Status.Addresses, func(a corev1.NodeAddress) bool {
			is, err := netip.ParseAddr(a.Address)
			return err == nil && is.Unmap() == ip
		}) {
			return node.Name
		}
	}
	return ""
}
