// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package rig is what tests of the real program stand on: a real API server, a
// link to it, and a hub at the near end, which clients reach over HTTPS; and a
// reading of the wire that shares no code with the hub.
package rig

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
)

const (
	// NodeName is the node that the hub is on.
	NodeName = "n1"
	// NodeUser is its identity.
	NodeUser = "system:node:" + NodeName

	// linkPatience is how long a cut or healed link may take to be noticed, with
	// room for a machine that is busy.
	linkPatience = 30 * time.Second
)

// A Rig is a control plane, a link to it, and a hub at the near end. Its methods
// fail the test T when they cannot do what they say.
type Rig struct {
	T            testing.TB
	ControlPlane *controlplane.ControlPlane
	Link         *link.Link
	Hub          *node.Hub
	Node         *rest.Config // the node's own identity, directly
}

// New starts a control plane with audit, the namespaces a and b, the node and a
// custom resource, and a link to it. The hub is not started.
func New(t testing.TB, users []controlplane.StaticUser, hubArgs ...string) *Rig {
	t.Helper()
	ctx := t.Context()
	r := On(t, controlplane.New(t, controlplane.Config{Audit: true, Users: users}))
	r.Hub = r.NewHub(hubArgs...)
	for _, ns := range []string{"a", "b"} {
		r.Must(r.ControlPlane.CreateNamespace(ctx, ns))
	}
	_, err := r.ControlPlane.Client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: NodeName}}, metav1.CreateOptions{})
	r.Must(err)
	r.makeWidgets()
	return r
}

// On makes a rig of a control plane that is there, which may be shared with other
// tests: with a link of its own, and without a hub.
func On(t testing.TB, cp *controlplane.ControlPlane) *Rig {
	t.Helper()
	r := &Rig{T: t, ControlPlane: cp}
	var err error
	r.Link, err = link.New(t.Context(), cp.Addr())
	r.Must(err)
	t.Cleanup(r.Link.Close)
	r.Node, err = cp.NodeConfig(NodeName)
	r.Must(err)
	return r
}

// NewHub returns a hub behind the link that is not started, with data of its own,
// which a test that fails keeps with the control plane's.
func (r *Rig) NewHub(args ...string) *node.Hub {
	r.T.Helper()
	dir, err := os.MkdirTemp(r.ControlPlane.Dir(), "hub-")
	r.Must(err)
	hub, err := node.NewHub(r.T.Context(), node.HubConfig{
		Dir:        dir,
		ServerURLs: []string{r.Link.URL()}, ServerCAFile: r.ControlPlane.CAFile(), CertFile: r.Node.CertFile, KeyFile: r.Node.KeyFile, Args: args,
	})
	r.Must(err)
	return hub
}

// Must fails the test if err is not nil.
func (r *Rig) Must(err error) {
	r.T.Helper()
	if err != nil {
		r.T.Fatal(err)
	}
}

var (
	crds = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	// Widgets is a namespaced custom resource of which spec.color can be selected by.
	Widgets = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
)

func (r *Rig) makeWidgets() {
	ctx := r.T.Context()
	c, err := dynamic.NewForConfig(r.ControlPlane.AdminConfig())
	r.Must(err)
	crd := map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": "widgets.example.com"},
		"spec": map[string]any{
			"group": "example.com", "scope": "Namespaced",
			"names": map[string]any{"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
			"versions": []any{map[string]any{
				"name": "v1", "served": true, "storage": true,
				"selectableFields": []any{map[string]any{"jsonPath": ".spec.color"}},
				"schema": map[string]any{"openAPIV3Schema": map[string]any{
					"type": "object", "x-kubernetes-preserve-unknown-fields": true,
					"properties": map[string]any{"spec": map[string]any{
						"type": "object", "x-kubernetes-preserve-unknown-fields": true,
						"properties": map[string]any{"color": map[string]any{"type": "string"}},
					}},
				}},
			}},
		},
	}
	_, err = c.Resource(crds).Create(ctx, &unstructured.Unstructured{Object: crd}, metav1.CreateOptions{})
	r.Must(err)
	r.waitWidgets()
}

func (r *Rig) waitWidgets() {
	r.T.Helper()
	c, err := dynamic.NewForConfig(r.ControlPlane.AdminConfig())
	r.Must(err)
	r.Must(process.Poll(r.T.Context(), "the custom resource is served", func(ctx context.Context) error {
		_, err := c.Resource(Widgets).List(ctx, metav1.ListOptions{})
		return err
	}))
}

// User is a subject of Grant, and Group another.
func User(name string) rbacv1.Subject {
	return rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: name}
}

// Group is all users of a group.
func Group(name string) rbacv1.Subject {
	return rbacv1.Subject{Kind: rbacv1.GroupKind, APIGroup: rbacv1.GroupName, Name: name}
}

// Grant lets somebody read resources in a namespace, "" for everywhere.
func (r *Rig) Grant(namespace string, to rbacv1.Subject, resources ...string) {
	r.T.Helper()
	ctx := r.T.Context()
	meta := metav1.ObjectMeta{GenerateName: "rig-", Namespace: namespace}
	rules := []rbacv1.PolicyRule{{APIGroups: []string{"", "example.com", "discovery.k8s.io"}, Resources: resources, Verbs: []string{"get", "list", "watch"}}}
	rbac := r.ControlPlane.Client.RbacV1()
	if namespace == "" {
		role, err := rbac.ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: rules}, metav1.CreateOptions{})
		r.Must(err)
		_, err = rbac.ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: meta, Subjects: []rbacv1.Subject{to}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		}, metav1.CreateOptions{})
		r.Must(err)
		return
	}
	role, err := rbac.Roles(namespace).Create(ctx, &rbacv1.Role{ObjectMeta: meta, Rules: rules}, metav1.CreateOptions{})
	r.Must(err)
	_, err = rbac.RoleBindings(namespace).Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: meta, Subjects: []rbacv1.Subject{to}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name},
	}, metav1.CreateOptions{})
	r.Must(err)
}

// Revoke removes all bindings of somebody in a namespace, "" for the cluster's.
func (r *Rig) Revoke(namespace, name string) {
	r.T.Helper()
	ctx := r.T.Context()
	rbac := r.ControlPlane.Client.RbacV1()
	is := func(s rbacv1.Subject) bool { return s.Name == name }
	if namespace == "" {
		list, err := rbac.ClusterRoleBindings().List(ctx, metav1.ListOptions{})
		r.Must(err)
		for _, b := range list.Items {
			if slices.ContainsFunc(b.Subjects, is) {
				r.Must(rbac.ClusterRoleBindings().Delete(ctx, b.Name, metav1.DeleteOptions{}))
			}
		}
		return
	}
	list, err := rbac.RoleBindings(namespace).List(ctx, metav1.ListOptions{})
	r.Must(err)
	for _, b := range list.Items {
		if slices.ContainsFunc(b.Subjects, is) {
			r.Must(rbac.RoleBindings(namespace).Delete(ctx, b.Name, metav1.DeleteOptions{}))
		}
	}
}

// WaitLink waits until the hub knows whether the link is up.
func (r *Rig) WaitLink(up bool) {
	r.T.Helper()
	ctx, cancel := context.WithTimeout(r.T.Context(), linkPatience)
	defer cancel()
	r.Must(process.Poll(ctx, fmt.Sprintf("the hub knows that up=%v", up), func(ctx context.Context) error {
		v, err := r.Hub.Metric(ctx, "edgehub_upstream_healthy")
		if err == nil && (v == 1) != up {
			err = errors.New("it does not")
		}
		return err
	}))
}

// WaitFeeds waits until every feed follows the API server.
func (r *Rig) WaitFeeds() {
	r.T.Helper()
	r.Must(process.Poll(r.T.Context(), "all feeds are live", func(ctx context.Context) error {
		all, err := r.Hub.Metric(ctx, "edgehub_cache_feeds")
		if err != nil {
			return err
		}
		live, err := r.Hub.Metric(ctx, "edgehub_cache_feeds_live")
		if err == nil && live < all {
			err = fmt.Errorf("%v of %v", live, all)
		}
		return err
	}))
}

// Offline cuts the link and waits until the hub knows.
func (r *Rig) Offline() {
	r.T.Helper()
	r.Link.Cut()
	r.WaitLink(false)
}

// Online heals the link and waits until the hub knows.
func (r *Rig) Online() {
	r.T.Helper()
	r.Must(r.Link.Heal())
	r.WaitLink(true)
}

// Settle waits until all that is urgent is on disk: two flush periods with nothing
// written in between.
func (r *Rig) Settle() {
	r.T.Helper()
	last, since := -1.0, time.Now()
	r.Must(process.Poll(r.T.Context(), "the journal rests", func(ctx context.Context) error {
		n, err := r.Hub.Metric(ctx, "edgehub_cache_journal_written_bytes_total")
		if err != nil {
			return err
		}
		if n != last {
			last, since = n, time.Now()
		}
		if rest := time.Since(since); rest < 1500*time.Millisecond {
			return fmt.Errorf("it has rested for %v at %v bytes", rest, n)
		}
		return nil
	}))
}

// RestartAPIServer ends the API server, in order or by SIGKILL, and starts it
// again. It has no history then: a watch from before gets 410 unless nothing at
// all has happened since.
func (r *Rig) RestartAPIServer(kill bool) {
	r.T.Helper()
	end := r.ControlPlane.StopAPIServer
	if kill {
		end = r.ControlPlane.KillAPIServer
	}
	r.Must(end())
	r.Must(r.ControlPlane.StartAPIServer(r.T.Context()))
	r.waitWidgets()
}
