// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package approver

import (
	"crypto/x509/pkix"
	"encoding/asn1"
	"net"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// What a node claims in its status that is somebody else's, though no Node has it: the
// address by which pods call the API server, or which a pod has.
func TestClaimsOfANode(t *testing.T) {
	meta := metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"}
	service := &corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1", "fd96::1"}}}
	slice := &discoveryv1.EndpointSlice{ObjectMeta: meta, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.100"}}}}
	for _, tc := range []struct {
		address  string
		approved int
	}{
		{"10.0.0.1", 1}, {"10.96.0.1", 0}, {"fd96::1", 0}, {"10.0.0.100", 0}, {"10.244.1.7", 0}, {"10.244.2.7", 0}, {"fd44:0:0:2::7", 0}, {"10.244.3.7", 1},
	} {
		claimant, other := nodeWith("n1", "10.0.0.1", tc.address), nodeWith("n2", "10.0.0.2")
		claimant.Spec.PodCIDRs, other.Spec.PodCIDRs = []string{"10.244.1.0/24", "junk"}, []string{"10.244.2.0/24", "fd44:0:0:2::/64"}
		a := hubs()
		a.template.IPAddresses = ips(tc.address)
		csr := a.csr()
		w := newWorld(t, csr, &claimant, &other, service, slice)
		if err := w.reconcile(csr.Name); err != nil {
			t.Fatal(err)
		}
		if len(w.approved) != tc.approved {
			t.Errorf("a node that claims %s gets %d certificates for it, want %d", tc.address, len(w.approved), tc.approved)
		}
	}
}

// A node that is called like a Service: whoever has a bootstrap token chooses the name.
func TestNodeCalledLikeAService(t *testing.T) {
	for _, tc := range []struct {
		name     string
		approved int
	}{
		{"n1", 1}, {"edge-7.example.com", 1}, {"kubernetes", 0}, {"kubernetes.default", 0}, {"kubernetes.default.svc", 0},
		{"kubernetes.default.svc.cluster.local", 0}, {"db.prod.svc", 0}, {"db.prod.svc.example.com", 0}, {"svc-7.example.com", 1},
	} {
		node := nodeWith(tc.name, tc.name, "10.0.0.1")
		a := hubs()
		a.username = "system:node:" + tc.name
		a.template.Subject.CommonName, a.template.DNSNames = a.username, []string{tc.name}
		csr := a.csr()
		w := newWorld(t, csr, &node)
		if err := w.reconcile(csr.Name); err != nil {
			t.Fatal(err)
		}
		if len(w.approved) != tc.approved {
			t.Errorf("the node %s gets %d certificates for its name, want %d", tc.name, len(w.approved), tc.approved)
		}
	}
}

// Names of kinds that crypto/x509 does not return, beside one that is the node's.
func TestOtherKindsOfNames(t *testing.T) {
	own := asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: 7, Bytes: net.ParseIP("127.0.0.1").To4()}
	for _, tc := range []struct {
		name string
		tag  int
		bad  bool
	}{{"an address", 7, false}, {"otherName", 0, true}, {"directoryName", 4, true}, {"registeredID", 8, true}} {
		another := asn1.RawValue{Class: asn1.ClassContextSpecific, Tag: tc.tag, IsCompound: tc.tag == 0 || tc.tag == 4, Bytes: []byte{6, 1, 42, 5}}
		if tc.tag == 7 {
			another = own
		}
		a := hubs()
		a.template.IPAddresses = nil
		a.template.ExtraExtensions = []pkix.Extension{{Id: asn1.ObjectIdentifier{2, 5, 29, 17}, Value: must(asn1.Marshal([]asn1.RawValue{own, another}))}}
		if err := clusterOfTests().judge(a.csr()); (err != nil) != tc.bad {
			t.Errorf("judge(127.0.0.1 and %s) = %v, want an error: %v", tc.name, err, tc.bad)
		}
	}
}
