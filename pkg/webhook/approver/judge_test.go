// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package approver

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ask is what a node asks for; the tests change one thing each.
type ask struct {
	name, username string
	groups         []string
	usages         []certificatesv1.KeyUsage
	key            crypto.Signer
	template       x509.CertificateRequest
	raw            func([]byte) []byte // of the PEM
}

func ips(addresses ...string) (all []net.IP) {
	for _, a := range addresses {
		all = append(all, net.ParseIP(a))
	}
	return all
}

// mapped asks for an IPv4 address in the form ::ffff:a.b.c.d.
func mapped(address string) []pkix.Extension {
	san := must(asn1.Marshal([]asn1.RawValue{{Class: asn1.ClassContextSpecific, Tag: 7, Bytes: net.ParseIP(address).To16()}}))
	return []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: san}}
}

var keyOfTests = must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// hubs is what the hub of the node n1 asks for.
func hubs() *ask {
	return &ask{
		name: "edgehub-serving-x7k2p", username: "system:node:n1", groups: []string{"system:nodes", "system:authenticated"},
		usages: []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageServerAuth}, key: keyOfTests,
		template: x509.CertificateRequest{
			Subject:     pkix.Name{CommonName: "system:node:n1", Organization: []string{"system:nodes"}},
			IPAddresses: ips("127.0.0.1", "169.254.2.1"),
		},
	}
}

func (a *ask) csr() *certificatesv1.CertificateSigningRequest {
	der := must(x509.CreateCertificateRequest(rand.Reader, &a.template, a.key))
	raw := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der})
	if a.raw != nil {
		raw = a.raw(raw)
	}
	return &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{Name: a.name, UID: "u"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request: raw, SignerName: certificatesv1.KubeletServingSignerName, Username: a.username, Groups: a.groups, Usages: a.usages,
		},
	}
}

func nodeWith(name string, addresses ...string) corev1.Node {
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	for _, a := range addresses {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return n
}

// asks are requests, by what is wrong with them; "" is nothing. The node n1 has claimed
// all addresses that it could think of.
var asks = []struct {
	name string
	edit func(*ask)
	bad  string
}{
	{"the hub's", func(*ask) {}, ""},
	{"loopback of IPv6", func(a *ask) { a.template.IPAddresses = ips("::1") }, ""},
	{"its own, written as IPv6", func(a *ask) { a.template.IPAddresses, a.template.ExtraExtensions = nil, mapped("10.0.0.1") }, ""},
	{"the node's own address", func(a *ask) { a.template.IPAddresses = ips("10.0.0.1", "fd00::1") }, ""},
	{"the node's own name", func(a *ask) { a.template.DNSNames = []string{"n1"} }, ""},
	{"localhost", func(a *ask) { a.template.DNSNames = []string{"localhost"} }, ""},
	{"the API server's names", func(a *ask) {
		a.template.DNSNames = []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}
	}, ""},
	{"the API server's cluster IP", func(a *ask) { a.template.IPAddresses = ips("10.96.0.1") }, ""},
	{"names of the options", func(a *ask) {
		a.template.DNSNames, a.template.IPAddresses = []string{"hub.example.com"}, ips("192.0.2.7", "fc00::7")
	}, ""},
	{"key encipherment", func(a *ask) { a.usages = append(a.usages, certificatesv1.UsageKeyEncipherment) }, ""},
	{"Ed25519", func(a *ask) { _, a.key, _ = ed25519.GenerateKey(rand.Reader) }, ""},
	{"RSA of 2048 bits", func(a *ask) { a.key = must(rsa.GenerateKey(rand.Reader, 2048)) }, ""},
	{"in other groups as well", func(a *ask) { a.groups = append(a.groups, "other") }, ""},

	{"made by a ServiceAccount", func(a *ask) {
		a.username = "system:serviceaccount:default:x"
		a.template.Subject.CommonName = a.username
	}, badRequester},
	{"made by a node outside the group", func(a *ask) { a.groups = []string{"system:authenticated"} }, badRequester},
	{"made by a node without name", func(a *ask) { a.username, a.template.Subject.CommonName = "system:node:", "system:node:" }, badRequester},

	{"for another node", func(a *ask) { a.template.Subject.CommonName = "system:node:n2" }, badSubject},
	{"without common name", func(a *ask) { a.template.Subject.CommonName = "" }, badSubject},
	{"two common names", func(a *ask) {
		a.template.Subject.ExtraNames = []pkix.AttributeTypeAndValue{
			{Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "kubernetes"}, {Type: asn1.ObjectIdentifier{2, 5, 4, 3}, Value: "system:node:n1"},
			{Type: asn1.ObjectIdentifier{2, 5, 4, 10}, Value: "system:nodes"},
		}
	}, badSubject},
	{"system:masters", func(a *ask) { a.template.Subject.Organization = []string{"system:masters"} }, badSubject},
	{"system:masters as well", func(a *ask) { a.template.Subject.Organization = []string{"system:nodes", "system:masters"} }, badSubject},
	{"a unit", func(a *ask) { a.template.Subject.OrganizationalUnit = []string{"x"} }, badSubject},
	{"without organization", func(a *ask) { a.template.Subject.Organization = nil }, badSubject},

	{"client auth", func(a *ask) { a.usages = append(a.usages, certificatesv1.UsageClientAuth) }, badUsages},
	{"client auth alone", func(a *ask) { a.usages[1] = certificatesv1.UsageClientAuth }, badUsages},
	{"any usage", func(a *ask) { a.usages = append(a.usages, certificatesv1.UsageAny) }, badUsages},
	{"an authority", func(a *ask) { a.usages = append(a.usages, certificatesv1.UsageCertSign) }, badUsages},
	{"no usage of a server", func(a *ask) { a.usages = a.usages[:1] }, badUsages},

	{"ECDSA of 224 bits", func(a *ask) { a.key = must(ecdsa.GenerateKey(elliptic.P224(), rand.Reader)) }, badKey},
	{"RSA of 1024 bits", func(a *ask) { a.key = must(rsa.GenerateKey(rand.Reader, 1024)) }, badKey},
	{"a signature of another key", func(a *ask) {
		a.raw = func(raw []byte) []byte {
			block, _ := pem.Decode(raw)
			block.Bytes[len(block.Bytes)-1] ^= 1
			return pem.EncodeToMemory(block)
		}
	}, badKey},

	{"not PEM", func(a *ask) { a.raw = func([]byte) []byte { return []byte("x") } }, badRequest},
	{"a certificate", func(a *ask) {
		a.raw = func(raw []byte) []byte {
			return []byte(strings.ReplaceAll(string(raw), "CERTIFICATE REQUEST", "CERTIFICATE"))
		}
	}, badRequest},
	{"two requests", func(a *ask) { a.raw = func(raw []byte) []byte { return append(raw, raw...) } }, badRequest},
	{"huge", func(a *ask) {
		for i := range 2000 {
			a.template.DNSNames = append(a.template.DNSNames, fmt.Sprintf("n%d.example.com", i))
		}
	}, badRequest},

	{"no Node", func(a *ask) { a.username, a.template.Subject.CommonName = "system:node:n9", "system:node:n9" }, badNode},

	{"no names", func(a *ask) { a.template.IPAddresses = nil }, badNames},
	{"many names", func(a *ask) {
		for i := range 40 {
			a.template.IPAddresses = append(a.template.IPAddresses, net.IPv4(127, 0, 0, byte(i+2)))
		}
	}, badNames},
	{"another node's address, which it claims", func(a *ask) { a.template.IPAddresses = ips("10.0.0.2") }, badNames},
	{"another node's address, beside its own", func(a *ask) { a.template.IPAddresses = ips("127.0.0.1", "10.0.0.2") }, badNames},
	{"another node's address, as IPv6", func(a *ask) {
		a.template.IPAddresses, a.template.ExtraExtensions = nil, mapped("10.0.0.2")
	}, badNames},
	{"the API server's address, which it claims", func(a *ask) { a.template.IPAddresses = ips("10.0.0.100") }, badNames},
	{"an address that nobody has", func(a *ask) { a.template.IPAddresses = ips("8.8.8.8") }, badNames},
	{"unspecified", func(a *ask) { a.template.IPAddresses = ips("0.0.0.0") }, badNames},
	{"link-local of IPv6", func(a *ask) { a.template.IPAddresses = ips("fe80::1") }, badNames},
	{"another node's name", func(a *ask) { a.template.DNSNames = []string{"n2"} }, badNames},
	{"a Service's name, which it claims", func(a *ask) { a.template.DNSNames = []string{"db.prod.svc"} }, badNames},
	{"like the API server's name", func(a *ask) { a.template.DNSNames = []string{"kubernetes.default.svc.cluster.local."} }, badNames},
	{"a wildcard", func(a *ask) { a.template.DNSNames = []string{"*"} }, badNames},
	{"a wildcard that it claims", func(a *ask) { a.template.DNSNames = []string{"*.svc"} }, badNames},
	{"an address as a DNS name", func(a *ask) { a.template.DNSNames = []string{"10.0.0.2"} }, badNames},
	{"its own address as a DNS name", func(a *ask) { a.template.DNSNames = []string{"10.0.0.1"} }, badNames},
	{"an e-mail address", func(a *ask) { a.template.EmailAddresses = []string{"a@example.com"} }, badNames},
	{"a URI", func(a *ask) { a.template.URIs = []*url.URL{{Scheme: "spiffe", Host: "cluster.local", Path: "/x"}} }, badNames},
	{"an authority, by extension", func(a *ask) {
		a.template.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 19}, Critical: true, Value: []byte{0x30, 3, 1, 1, 0xff}}}
	}, badNames},
}

// clusterOfTests has the nodes n1, which lies, and n2.
func clusterOfTests() *cluster {
	return &cluster{
		allowed:   newNames(append([]string{"hub.example.com", "192.0.2.7", "fc00:0::7", "10.96.0.1"}, slices.Concat(always, apiServerNames)...)...),
		apiServer: newNames("10.0.0.100"),
		nodes: []corev1.Node{
			nodeWith("n1", "10.0.0.1", "fd00::1", "n1", "10.0.0.2", "10.0.0.100", "n2", "db.prod.svc", "*.svc", "kubernetes.kube-system"),
			nodeWith("n2", "10.0.0.2", "n2"),
		},
	}
}

// judge decides about a request as the reconciler does.
func (c *cluster) judge(csr *certificatesv1.CertificateSigningRequest) error {
	request, name, err := read(csr)
	if err != nil {
		return err
	}
	for i := range c.nodes {
		if c.nodes[i].Name == name {
			return c.checkNames(request, &c.nodes[i])
		}
	}
	return refuse(badNode, "none")
}

func TestJudge(t *testing.T) {
	for _, tc := range asks {
		t.Run(tc.name, func(t *testing.T) {
			a := hubs()
			tc.edit(a)
			err := clusterOfTests().judge(a.csr())
			got := ""
			var no *refusal
			if errors.As(err, &no) {
				got = no.reason
			}
			if got != tc.bad || (err == nil) != (tc.bad == "") {
				t.Errorf("judge(%s) = %v (%q), want %q", tc.name, err, got, tc.bad)
			}
			if err != nil && len(err.Error()) > 500 {
				t.Errorf("judge(%s) says %d bytes, which is no Event", tc.name, len(err.Error()))
			}
		})
	}
}

func TestOurs(t *testing.T) {
	for _, tc := range []struct {
		name, signer string
		want         bool
	}{
		{"edgehub-serving-x7k2p", "kubernetes.io/kubelet-serving", true},
		{"csr-x7k2p", "kubernetes.io/kubelet-serving", false},
		{"edgehub-serving-x7k2p", "kubernetes.io/kube-apiserver-client", false},
		{"edgehub-serving-x7k2p", "kubernetes.io/kube-apiserver-client-kubelet", false},
	} {
		csr := &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: tc.name}, Spec: certificatesv1.CertificateSigningRequestSpec{SignerName: tc.signer}}
		if got := ours(csr); got != tc.want {
			t.Errorf("ours(%s, %s) = %v, want %v", tc.name, tc.signer, got, tc.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add(hubs().csr().Spec.Request)
	f.Fuzz(func(t *testing.T, raw []byte) {
		csr := hubs().csr()
		csr.Spec.Request = raw
		err := clusterOfTests().judge(csr)
		if err != nil && len(err.Error()) > 500 {
			t.Errorf("judge says %d bytes, which is no Event", len(err.Error()))
		}
	})
}
