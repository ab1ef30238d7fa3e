// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package approver approves the certificates that clients check hubs by, where the cluster
// signs them (edgehub --serving-certificate=csr): requests to the signer
// kubernetes.io/kubelet-serving that a node makes for itself. It approves or is silent: what
// it does not approve stays pending, with an Event that says why, for a person to decide.
//
// Whoever has one node's credential can have that node's certificates approved, and no
// other's. See checkNames for what that means for names.
package approver

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	registry "sigs.k8s.io/controller-runtime/pkg/metrics"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"
)

// userIndex is of the manager's CertificateSigningRequests by the user, if they are for
// this approver and nobody has decided yet.
const userIndex = "edgehub.io/approver-user"

// apiServer is the Service that pods know the API server by, and what is behind it.
var apiServer = client.ObjectKey{Namespace: metav1.NamespaceDefault, Name: "kubernetes"}

// always are names that any hub's certificate may be for.
var always = []string{"localhost"}

// apiServerNames are those by which pods call the API server. The Service's cluster IPs
// come on top.
var apiServerNames = []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"}

// Options say what a certificate may be for besides the node's own names.
type Options struct {
	DNSNames []string
	IPs      []string // addresses, without a prefix length
	// APIServer adds the names and cluster IPs by which pods call the API server: the hub's
	// filters may send them to the hub. Who has such a certificate can be the API server to
	// every pod whose traffic it gets hold of.
	APIServer bool
}

// Add lets the leader approve. Metrics are controller-runtime's registry's, so it can be
// called once in a process.
func Add(mgr manager.Manager, o Options) error {
	for _, ip := range o.IPs {
		if _, err := netip.ParseAddr(ip); err != nil {
			return err
		}
	}
	m, err := newMetrics(registry.Registry)
	if err != nil {
		return err
	}
	//nolint:forbidigo // the manager does not run yet, so this waits for nothing
	if err := mgr.GetFieldIndexer().IndexField(context.Background(), &certificatesv1.CertificateSigningRequest{}, userIndex, openOf); err != nil {
		return fmt.Errorf("index requests by user: %w", err)
	}
	r := &reconciler{
		client: mgr.GetClient(), direct: mgr.GetAPIReader(), recorder: mgr.GetEventRecorder("edgehub-approver"), metrics: m,
		allowed: slices.Concat(always, o.DNSNames, o.IPs), asAPIServer: o.APIServer, said: map[string]string{},
	}
	if o.APIServer {
		r.allowed = append(r.allowed, apiServerNames...)
	}
	open := predicate.NewPredicateFuncs(func(o client.Object) bool {
		csr, ok := o.(*certificatesv1.CertificateSigningRequest)
		return ok && ours(csr)
	})
	return builder.ControllerManagedBy(mgr).Named("approver").
		For(&certificatesv1.CertificateSigningRequest{}, builder.WithPredicates(open)).
		Watches(&corev1.Node{}, handler.EnqueueRequestsFromMapFunc(r.requestsOf), builder.WithPredicates(addressChanges)).
		Complete(r)
}

func openOf(o client.Object) []string {
	if csr, ok := o.(*certificatesv1.CertificateSigningRequest); ok && ours(csr) && !decided(csr) {
		return []string{csr.Spec.Username}
	}
	return nil
}

// addressChanges are the events of a Node that may make a request acceptable: a hub starts
// before kubelet has made the Node.
var addressChanges = predicate.Funcs{
	UpdateFunc: func(e event.UpdateEvent) bool {
		before, ok1 := e.ObjectOld.(*corev1.Node)
		now, ok2 := e.ObjectNew.(*corev1.Node)
		return ok1 && ok2 && !slices.Equal(before.Status.Addresses, now.Status.Addresses)
	},
	DeleteFunc: func(event.DeleteEvent) bool { return false },
}

// A reconciler decides about requests.
type reconciler struct {
	client   client.Client
	direct   client.Reader // not the cache
	recorder events.EventRecorder
	metrics  *metrics
	allowed  []string

	asAPIServer bool // the API server's cluster IPs are allowed, too

	mu   sync.Mutex
	said map[string]string // why requests are not approved, by name and UID
}

// requestsOf returns the requests that wait for a Node.
func (r *reconciler) requestsOf(ctx context.Context, node client.Object) (requests []reconcile.Request) {
	var open certificatesv1.CertificateSigningRequestList
	if err := r.client.List(ctx, &open, client.MatchingFields{userIndex: nodeUser + node.GetName()}, client.UnsafeDisableDeepCopy); err != nil {
		return nil // only if ctx has ended: it is the cache's
	}
	for i := range open.Items {
		requests = append(requests, reconcile.Request{NamespacedName: types.NamespacedName{Name: open.Items[i].Name}})
	}
	return requests
}

// Reconcile looks at one request.
func (r *reconciler) Reconcile(ctx context.Context, req reconcile.Request) (reconcile.Result, error) {
	var csr certificatesv1.CertificateSigningRequest
	err := r.client.Get(ctx, req.NamespacedName, &csr)
	if apierrors.IsNotFound(err) || err == nil && (!ours(&csr) || decided(&csr)) {
		r.change(req.Name, "")
		return reconcile.Result{}, nil
	}
	if err != nil {
		return reconcile.Result{}, err
	}
	var no *refusal
	switch err := r.judge(ctx, &csr); {
	case errors.As(err, &no):
		r.leave(ctx, &csr, no)
		return reconcile.Result{}, nil
	case err != nil:
		return reconcile.Result{}, err
	}
	return reconcile.Result{}, r.approve(ctx, &csr)
}

// judge returns a refusal if the request must not be approved.
func (r *reconciler) judge(ctx context.Context, csr *certificatesv1.CertificateSigningRequest) error {
	request, name, err := read(csr)
	if err != nil {
		return err
	}
	var node corev1.Node
	switch err := r.client.Get(ctx, client.ObjectKey{Name: name}, &node); {
	case apierrors.IsNotFound(err):
		return refuse(badNode, "there is no Node %.64q", name)
	case err != nil:
		return err
	}
	c, err := r.cluster(ctx)
	if err != nil {
		return err
	}
	return c.checkNames(request, &node)
}

// cluster asks the API server itself: requests are rare, and a watch of all Services is
// much for the addresses of one.
func (r *reconciler) cluster(ctx context.Context) (*cluster, error) {
	var service corev1.Service
	if err := r.direct.Get(ctx, apiServer, &service); err != nil && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("get Service %s: %w", apiServer, err)
	}
	var slice discoveryv1.EndpointSlice
	if err := r.direct.Get(ctx, apiServer, &slice); err != nil && !apierrors.IsNotFound(err) {
		return nil, fmt.Errorf("get EndpointSlice %s: %w", apiServer, err)
	}
	var nodes corev1.NodeList
	if err := r.client.List(ctx, &nodes, client.UnsafeDisableDeepCopy); err != nil {
		return nil, err
	}
	allowed := newNames(r.allowed...)
	if r.asAPIServer {
		allowed = newNames(slices.Concat(r.allowed, service.Spec.ClusterIPs)...)
	}
	servers := slices.Clone(service.Spec.ClusterIPs) // pods call them by these
	for _, e := range slice.Endpoints {
		servers = append(servers, e.Addresses...)
	}
	return &cluster{allowed: allowed, apiServer: newNames(servers...), nodes: nodes.Items}, nil
}

// approve does so for just the request that was judged: the API server refuses the update
// of one that was made anew under the same name.
func (r *reconciler) approve(ctx context.Context, csr *certificatesv1.CertificateSigningRequest) error {
	csr.Status.Conditions = append(csr.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
		Type: certificatesv1.CertificateApproved, Status: corev1.ConditionTrue, LastUpdateTime: metav1.Now(),
		Reason: "EdgehubServingCertificate", Message: "Requested by the node for itself.",
	})
	err := r.client.SubResource("approval").Update(ctx, csr)
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // its change is on the way here
	}
	if err != nil {
		return fmt.Errorf("approve: %w", err)
	}
	r.change(csr.Name, "")
	r.metrics.requests.WithLabelValues(resultApproved).Inc()
	klog.FromContext(ctx).Info("Approved a hub's serving certificate", "csr", csr.Name, "user", csr.Spec.Username)
	return nil
}

// leave says once why a request stays pending.
func (r *reconciler) leave(ctx context.Context, csr *certificatesv1.CertificateSigningRequest, why *refusal) {
	if !r.change(csr.Name, string(csr.UID)+why.text) {
		return
	}
	r.metrics.requests.WithLabelValues(why.reason).Inc()
	r.recorder.Eventf(csr, nil, corev1.EventTypeWarning, "NotApproved", "Approve", "Not approved by edgehub: %s", why.text)
	klog.FromContext(ctx).Info("A hub's serving certificate is not approved", "csr", csr.Name, "user", csr.Spec.Username, "reason", why.text)
}

// change reports whether something else is said of a request than before.
func (r *reconciler) change(name, what string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	changed := r.said[name] != what
	if r.said[name] = what; what == "" {
		delete(r.said, name)
	}
	return changed
}
