// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"errors"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
)

func match(t *testing.T, shape Shape, bare []byte, labelSelector, fieldSelector string) (bool, error) {
	t.Helper()
	s, err := ParseSelector(labelSelector, fieldSelector)
	if err != nil {
		t.Fatalf("ParseSelector(%q, %q) error: %v", labelSelector, fieldSelector, err)
	}
	return s.Matches(shape, bare)
}

// TestSelectorMatches runs every row in every representation of the pod.
func TestSelectorMatches(t *testing.T) {
	for _, tc := range []struct {
		label, field string
		want         bool
	}{
		{"", "", true},
		{"app=pod", "", true},
		{"app==pod,index=1", "", true},
		{"app=other", "", false},
		{"app!=other", "", true},
		{"missing!=x", "", true},
		{"missing", "", false},
		{"!missing", "", true},
		{"app in (a,pod)", "", true},
		{"app notin (pod)", "", false},
		{"index>0", "", true},
		{"index<1", "", false},
		{"", "metadata.name=pod-1", true},
		{"", "metadata.name!=pod-1", false},
		{"", "metadata.name=pod-1,metadata.namespace=default", true},
		{"", "metadata.namespace=other", false},
		{"app=pod", "metadata.name=pod-2", false},
		{"app=other", "metadata.name=pod-1", false},
	} {
		for _, c := range wireCases() {
			if c.name != "pods" {
				continue
			}
			_, bare, err := DecodeObject(c.shape.Representation, c.get(t, c.objects[1]))
			if err != nil {
				t.Fatal(err)
			}
			if got, err := match(t, c.shape, bare, tc.label, tc.field); err != nil || got != tc.want {
				t.Errorf("%s: Matches(%q, %q) = %v, %v, want %v", c, tc.label, tc.field, got, err, tc.want)
			}
		}
	}
}

// TestSelectorFields goes through the fields that kube-apiserver 1.36 lets clients
// select by.
func TestSelectorFields(t *testing.T) {
	pod := testPods(2)[1].(*corev1.Pod)
	oldPod := pod.DeepCopy()
	oldPod.Status.PodIPs, oldPod.Spec.ServiceAccountName = nil, ""
	for _, tc := range []struct {
		name  string
		obj   runtime.Object
		match []string
		other []string // same fields, do not match
		err   []string // not supported
	}{
		{
			"pod", pod,
			[]string{
				"spec.nodeName=node-1", "spec.host=node-1", "spec.restartPolicy=Always", "spec.schedulerName=default-scheduler", "spec.serviceAccountName=default",
				"spec.hostNetwork=true", "status.phase=Running", "status.podIP=10.0.0.1", "status.podIPs=", "status.nominatedNodeName=other", "spec.nodeName!=node-2",
				"metadata.namespace=default,status.phase!=Failed,spec.nodeName=node-1",
			},
			[]string{"spec.nodeName=", "spec.hostNetwork=false", "status.phase!=Running", "status.podIPs=10.0.0.1", "metadata.name=pod-1,spec.nodeName=node-2"},
			[]string{"spec.priority=1", "status.hostIP=1.2.3.4", "name=pod-1", "metadata.labels=x", "spec.nodeName=node-1,spec.x=y"},
		},
		{
			"pod without podIPs", oldPod,
			[]string{"status.podIP=10.0.0.1", "spec.serviceAccountName=default"}, nil, nil,
		},
		{
			"empty pod", &corev1.Pod{},
			[]string{"spec.hostNetwork=false", "spec.nodeName=", "status.podIP="}, []string{"spec.hostNetwork=true"}, nil,
		},
		{
			"node", &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Spec: corev1.NodeSpec{Unschedulable: true}},
			[]string{"metadata.name=n", "spec.unschedulable=true"}, []string{"spec.unschedulable=false"}, []string{"metadata.namespace=", "spec.providerID=x"},
		},
		{
			"schedulable node", &corev1.Node{}, []string{"spec.unschedulable=false"}, []string{"spec.unschedulable=true"}, nil,
		},
		{
			"namespace", &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Status: corev1.NamespaceStatus{Phase: corev1.NamespaceActive}},
			[]string{"metadata.name=n", "status.phase=Active"}, []string{"status.phase=Terminating"}, []string{"name=n", "metadata.namespace="},
		},
		{
			"secret", &corev1.Secret{Type: corev1.SecretTypeOpaque, Data: map[string][]byte{"a": []byte("b")}},
			[]string{"type=Opaque", "metadata.namespace="}, []string{"type=kubernetes.io/tls"}, []string{"data=x"},
		},
		{
			"service", &corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, ClusterIP: "None"}},
			[]string{"spec.type=ClusterIP", "spec.clusterIP=None"}, []string{"spec.clusterIP!=None"}, []string{"spec.clusterIPs=None"},
		},
		{
			"replicationcontroller", &corev1.ReplicationController{Status: corev1.ReplicationControllerStatus{Replicas: 3}},
			[]string{"status.replicas=3"}, []string{"status.replicas=03"}, []string{"spec.replicas=3"},
		},
		{
			"job", &batchv1.Job{Status: batchv1.JobStatus{Succeeded: 2}},
			[]string{"status.successful=2"}, []string{"status.successful=1"}, []string{"status.succeeded=2"},
		},
		{
			"certificatesigningrequest", &certificatesv1.CertificateSigningRequest{Spec: certificatesv1.CertificateSigningRequestSpec{SignerName: "kubernetes.io/kubelet-serving"}},
			[]string{"spec.signerName=kubernetes.io/kubelet-serving"}, []string{"spec.signerName=x"}, []string{"metadata.namespace=", "spec.username=x"},
		},
		{"deployment", testDeployments(1)[0], []string{"metadata.name=deployment-0"}, nil, []string{"status.replicas=0"}},
		{"event", &corev1.Event{Reason: "x"}, []string{"metadata.name="}, nil, []string{"reason=x"}},
	} {
		for _, protobuf := range []bool{false, true} {
			t.Run(tc.name+"/"+Representation{Protobuf: protobuf}.String(), func(t *testing.T) {
				shape, bare := encodeBare(t, Representation{Protobuf: protobuf}, tc.obj)
				for _, field := range tc.match {
					if got, err := match(t, shape, bare, "", field); !got || err != nil {
						t.Errorf("Matches(%q) = %v, %v, want true", field, got, err)
					}
				}
				for _, field := range tc.other {
					if got, err := match(t, shape, bare, "", field); got || err != nil {
						t.Errorf("Matches(%q) = %v, %v, want false", field, got, err)
					}
				}
				for _, field := range tc.err {
					if got, err := match(t, shape, bare, "", field); got || !errors.Is(err, ErrUnsupportedField) {
						t.Errorf("Matches(%q) = %v, %v, want ErrUnsupportedField", field, got, err)
					}
					if got, err := match(t, shape, bare, "no=label", field); got || !errors.Is(err, ErrUnsupportedField) {
						t.Errorf("Matches(no=label, %q) = %v, %v, want ErrUnsupportedField", field, got, err)
					}
				}
			})
		}
	}
}

func encodeBare(t *testing.T, rep Representation, obj runtime.Object) (Shape, []byte) {
	t.Helper()
	kinds, _, err := clientscheme.Scheme.ObjectKinds(obj)
	if err != nil {
		t.Fatal(err)
	}
	c := wireCase{shape: Shape{Representation: rep, APIVersion: kinds[0].GroupVersion().String()}}
	shape, bare, err := DecodeObject(rep, c.get(t, obj))
	if err != nil {
		t.Fatal(err)
	}
	if gvk := schema.FromAPIVersionAndKind(shape.APIVersion, shape.Kind); gvk != kinds[0] {
		t.Fatalf("DecodeObject() = %v, want %v", gvk, kinds[0])
	}
	return shape, bare
}

func TestSelectorOfPartialObjects(t *testing.T) {
	for _, c := range wireCases() {
		if c.shape.Partial == "" {
			continue
		}
		_, bare, err := DecodeObject(c.shape.Representation, c.get(t, c.objects[0]))
		if err != nil {
			t.Fatal(err)
		}
		for _, field := range []string{"spec.nodeName=node-0", "status.phase=Running", "metadata.uid=x"} {
			if got, err := match(t, c.shape, bare, "", field); !errors.Is(err, ErrUnsupportedField) {
				t.Errorf("%s: Matches(%q) = %v, %v, want ErrUnsupportedField", c, field, got, err)
			}
		}
	}
}

func TestSelectorOfCustomResources(t *testing.T) {
	cases := wireCases()
	c := cases[len(cases)-1]
	shape, bare, err := DecodeObject(c.shape.Representation, c.get(t, c.objects[0]))
	if err != nil || !shape.Unstructured {
		t.Fatalf("DecodeObject() = %v, %v", shape, err)
	}
	for field, want := range map[string]bool{
		"spec.color=blue": true, "spec.color=red": false, "spec.color!=red": true, "spec.size=0": true, "spec.on=true": true,
		"spec.deep.er=x": true, "metadata.name=widget-0,spec.color=blue": true, "metadata.namespace=default": true, "metadata.uid!=x": true,
	} {
		if got, err := match(t, shape, bare, "", field); err != nil || got != want {
			t.Errorf("Matches(%q) = %v, %v, want %v", field, got, err, want)
		}
	}
	for _, field := range []string{"spec.missing=", "spec=x", "spec.deep=x", "spec.list=1", "spec.color.deeper=x", "spec..color=x", "x=y", "status.phase!=x"} {
		for _, label := range []string{"", "app=widget", "app=other"} {
			if got, err := match(t, shape, bare, label, field); got || !errors.Is(err, ErrUnsupportedField) {
				t.Errorf("Matches(%q, %q) = %v, %v, want ErrUnsupportedField", label, field, got, err)
			}
		}
	}
	for _, in := range []string{`{"spec":{"n":1.5}}`, `{"spec":{"n":null}}`, `{"spec":{"n":99999999999999999999}}`} {
		if got, err := match(t, shape, []byte(in), "", "spec.n=1"); !errors.Is(err, ErrUnsupportedField) {
			t.Errorf("Matches(%s) = %v, %v, want ErrUnsupportedField", in, got, err)
		}
	}
	if got, err := match(t, shape, []byte(`{"spec":{"n":1,"n":2}}`), "", "spec.n=1"); !errors.Is(err, ErrMalformed) {
		t.Errorf("Matches() = %v, %v, want ErrMalformed", got, err)
	}
}

func TestSelectorRefusesMalformed(t *testing.T) {
	pods := Shape{APIVersion: "v1", Kind: "Pod"}
	protoPods := Shape{Representation: Representation{Protobuf: true}, APIVersion: "v1", Kind: "Pod"}
	for _, tc := range []struct {
		shape        Shape
		in           string
		label, field string
	}{
		{pods, `{"metadata":{"labels":{"a":"1","a":"2"}}}`, "a=1", ""},
		{pods, `{"metadata":{"labels":{"a":1}}}`, "a=1", ""},
		{pods, `{"metadata":{"labels":{"b":1}}}`, "a=1", ""},
		{pods, `{"metadata":{"labels":{"a":"1"}},"metadata":{}}`, "a=1", ""},
		{pods, `{"spec":{"nodeName":1}}`, "", "spec.nodeName=1"},
		{pods, `{"spec":`, "", "spec.nodeName=1"},
		{protoPods, field(1, field(11, "\x08\x01")), "a=1", ""},
		{protoPods, field(2, "\x08"), "", "spec.nodeName=1"},
	} {
		if got, err := match(t, tc.shape, []byte(tc.in), tc.label, tc.field); got || !errors.Is(err, ErrMalformed) {
			t.Errorf("Matches(%q) = %v, %v, want ErrMalformed", tc.in, got, err)
		}
	}
}

func TestSelectorText(t *testing.T) {
	for _, tc := range []struct {
		label, field, want string
	}{
		{"", "", ""},
		{"b=2,a=1", "", "labelSelector=a%3D1%2Cb%3D2"},
		{"a in (y,x)", "metadata.name=n", "fieldSelector=metadata.name%3Dn&labelSelector=a+in+%28x%2Cy%29"},
	} {
		s, err := ParseSelector(tc.label, tc.field)
		if err != nil || s.String() != tc.want || s.Empty() != (tc.want == "") {
			t.Errorf("ParseSelector(%q, %q) = %q, %v, want %q", tc.label, tc.field, s, err, tc.want)
		}
	}
	for _, bad := range [][2]string{{"a=b=c", ""}, {"a in", ""}, {"", "a"}, {"", "a=\\x"}} {
		if s, err := ParseSelector(bad[0], bad[1]); err == nil {
			t.Errorf("ParseSelector(%q, %q) = %v, want an error", bad[0], bad[1], s)
		}
	}
}
