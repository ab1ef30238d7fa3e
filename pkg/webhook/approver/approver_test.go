// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package approver

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// A world is a reconciler with the objects that it sees. What it approves is counted, not
// kept: that is the API server's.
type world struct {
	*testing.T
	client.Client
	*reconciler
	registry *prometheus.Registry
	events   *events.FakeRecorder
	approved []string
	refuse   error // of the next approval
}

func newWorld(t *testing.T, objects ...client.Object) *world {
	t.Helper()
	w := &world{T: t, registry: prometheus.NewPedanticRegistry(), events: events.NewFakeRecorder(10)}
	w.Client = fake.NewClientBuilder().WithScheme(clientgoscheme.Scheme).WithObjects(objects...).
		WithIndex(&certificatesv1.CertificateSigningRequest{}, userIndex, openOf).
		WithInterceptorFuncs(interceptor.Funcs{SubResourceUpdate: func(ctx context.Context, c client.Client, subresource string, o client.Object, opts ...client.SubResourceUpdateOption) error {
			csr, ok := o.(*certificatesv1.CertificateSigningRequest)
			if !ok {
				return c.SubResource(subresource).Update(ctx, o, opts...)
			}
			if err := w.refuse; err != nil {
				w.refuse = nil
				return err
			}
			conditions := csr.Status.Conditions
			if subresource != "approval" || len(conditions) != 1 || conditions[0].Type != certificatesv1.CertificateApproved || conditions[0].Status != corev1.ConditionTrue || o.GetResourceVersion() == "" {
				t.Errorf("update of %s with %v, want one condition Approved of approval, with resourceVersion", subresource, conditions)
			}
			w.approved = append(w.approved, o.GetName())
			return nil
		}}).Build()
	m, err := newMetrics(w.registry)
	if err != nil {
		t.Fatal(err)
	}
	w.reconciler = &reconciler{client: w.Client, direct: w.Client, recorder: w.events, metrics: m, allowed: always, said: map[string]string{}}
	return w
}

func (w *world) reconcile(name string) error {
	w.Helper()
	result, err := w.Reconcile(w.Context(), reconcile.Request{NamespacedName: types.NamespacedName{Name: name}})
	if result != (reconcile.Result{}) {
		w.Errorf("Reconcile(%s) = %v, want nothing more to do", name, result)
	}
	return err
}

// wants looks at the approvals so far, and at the one Event since it was called last.
func (w *world) wants(when string, approvals int, note string) {
	w.Helper()
	if len(w.approved) != approvals {
		w.Errorf("%s: approved %v, want %d", when, w.approved, approvals)
	}
	select {
	case got := <-w.events.Events:
		if note == "" || !strings.HasPrefix(got, "Warning NotApproved") || !strings.Contains(got, note) {
			w.Errorf("%s: an Event says %q, want %q", when, got, note)
		}
	default:
		if note != "" {
			w.Errorf("%s: no Event, want %q", when, note)
		}
	}
	if len(w.events.Events) > 0 {
		w.Errorf("%s: another Event says %q", when, <-w.events.Events)
	}
}

func TestReconcile(t *testing.T) {
	node := nodeWith("n1", "10.0.0.1")
	a := hubs()
	a.template.IPAddresses = ips("127.0.0.1", "10.0.0.1")
	csr := a.csr()
	w := newWorld(t, csr)
	reconcile := func() {
		t.Helper()
		if err := w.reconcile(csr.Name); err != nil {
			t.Error(err)
		}
	}
	reconcile()
	w.wants("before the Node is there", 0, "there is no Node")
	reconcile()
	w.wants("the same again", 0, "")
	bare := nodeWith("n1")
	if err := w.Create(t.Context(), &bare); err != nil {
		t.Fatal(err)
	}
	reconcile()
	w.wants("before it has addresses", 0, "10.0.0.1")
	bare.Status = node.Status
	if err := w.Client.Status().Update(t.Context(), &bare); err != nil {
		t.Fatal(err)
	}
	w.reconciler.direct = client.NewNamespacedClient(w.Client, "elsewhere") // an API server that answers with an error
	if err := w.reconcile(csr.Name); err == nil {
		t.Error("Reconcile without an answer about the API server's Service = nil, want an error")
	}
	w.reconciler.direct = w.Client
	w.refuse = apierrors.NewConflict(schema.GroupResource{}, csr.Name, errors.New("changed"))
	reconcile()
	w.wants("changed meanwhile", 0, "")
	w.refuse = apierrors.NewForbidden(schema.GroupResource{}, csr.Name, errors.New("no"))
	if err := w.reconcile(csr.Name); err == nil {
		t.Error("Reconcile with a forbidden approval = nil, want an error")
	}
	reconcile()
	w.wants("at last", 1, "")
	for result, want := range map[string]float64{resultApproved: 1, badNode: 1, badNames: 1, badKey: 0} {
		if got := testutil.ToFloat64(w.metrics.requests.WithLabelValues(result)); got != want {
			t.Errorf("edgehub_approver_requests_total{result=%q} = %v, want %v", result, got, want)
		}
	}
	if problems, err := testutil.GatherAndLint(w.registry); err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
}

// TestReconcileLeavesAlone: what others have decided, or are to decide.
func TestReconcileLeavesAlone(t *testing.T) {
	node := nodeWith("n1", "10.0.0.1")
	is := func(c certificatesv1.RequestConditionType) func(*certificatesv1.CertificateSigningRequest) {
		return func(csr *certificatesv1.CertificateSigningRequest) {
			csr.Status.Conditions = []certificatesv1.CertificateSigningRequestCondition{{Type: c, Status: corev1.ConditionTrue}}
		}
	}
	for name, edit := range map[string]func(*certificatesv1.CertificateSigningRequest){
		"approved": is(certificatesv1.CertificateApproved), "denied": is(certificatesv1.CertificateDenied), "failed": is(certificatesv1.CertificateFailed),
		"issued":         func(csr *certificatesv1.CertificateSigningRequest) { csr.Status.Certificate = []byte("x") },
		"kubelet's":      func(csr *certificatesv1.CertificateSigningRequest) { csr.Name = "csr-x7k2p" },
		"another signer": func(csr *certificatesv1.CertificateSigningRequest) { csr.Spec.SignerName = "example.com/x" },
	} {
		csr := hubs().csr()
		edit(csr)
		w := newWorld(t, csr, &node)
		if err := w.reconcile(csr.Name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		w.wants(name, 0, "")
		if got := openOf(csr); got != nil {
			t.Errorf("openOf(%s) = %v, want none", name, got)
		}
	}
	w := newWorld(t)
	if err := w.reconcile("gone"); err != nil {
		t.Errorf("gone: %v", err)
	}
	w.wants("gone", 0, "")
}

// TestCluster takes the API server's addresses from the cluster.
func TestCluster(t *testing.T) {
	meta := metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"}
	w := newWorld(t,
		&corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{ClusterIPs: []string{"10.96.0.1", "fd96::1"}}},
		&discoveryv1.EndpointSlice{ObjectMeta: meta, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.100"}}, {Addresses: []string{"10.0.0.101"}}}})
	c, err := w.cluster(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := newNames(always...); !c.allowed.ips.Equal(want.ips) || !c.allowed.dns.Equal(want.dns) {
		t.Errorf("cluster allows %v, want %v", c.allowed, want)
	}
	w.asAPIServer = true
	asked, err := w.cluster(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if want := newNames(append([]string{"10.96.0.1", "fd96::1"}, always...)...); !asked.allowed.ips.Equal(want.ips) || !asked.allowed.dns.Equal(want.dns) {
		t.Errorf("cluster allows %v with the API server's names, want %v", asked.allowed, want)
	}
	if want := newNames("10.0.0.100", "10.0.0.101", "10.96.0.1", "fd96::1"); !c.apiServer.ips.Equal(want.ips) {
		t.Errorf("cluster has the API servers %v, want %v", c.apiServer, want)
	}
}

// TestRequestsOf: a Node that changes brings its open requests back.
func TestRequestsOf(t *testing.T) {
	var objects []client.Object
	for name, edit := range map[string]func(*certificatesv1.CertificateSigningRequest){
		"edgehub-serving-1": func(*certificatesv1.CertificateSigningRequest) {},
		"edgehub-serving-2": func(csr *certificatesv1.CertificateSigningRequest) { csr.Spec.Username = "system:node:n2" },
		"edgehub-serving-3": func(csr *certificatesv1.CertificateSigningRequest) { csr.Status.Certificate = []byte("x") },
		"csr-4":             func(*certificatesv1.CertificateSigningRequest) {},
	} {
		csr := hubs().csr()
		csr.Name = name
		edit(csr)
		objects = append(objects, csr)
	}
	node := nodeWith("n1")
	var got []string
	for _, r := range newWorld(t, objects...).requestsOf(t.Context(), &node) {
		got = append(got, r.Name)
	}
	slices.Sort(got)
	if d := cmp.Diff([]string{"edgehub-serving-1"}, got); d != "" {
		t.Errorf("requestsOf (-want +got):\n%s", d)
	}
	moved, labelled := nodeWith("n1", "10.0.0.1"), nodeWith("n1")
	labelled.Labels = map[string]string{"x": "y"}
	for name, tc := range map[string]struct {
		now  *corev1.Node
		want bool
	}{"addresses": {&moved, true}, "labels": {&labelled, false}} {
		if got := addressChanges.Update(event.UpdateEvent{ObjectOld: &node, ObjectNew: tc.now}); got != tc.want {
			t.Errorf("addressChanges(%s) = %v, want %v", name, got, tc.want)
		}
	}
}
