// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package faults does to the real program, between a real API server and real
// clients, what happens to edge nodes: it is killed, its link dies without a word,
// its disk is full, its configuration is wrong, and somebody tries to read what is
// not theirs.
package faults

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
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
	nodeName = "n1"
	nodeUser = "system:node:" + nodeName
	operator = "faults-operator" // a static user who may do everything

	js     = "application/json"
	pb     = "application/vnd.kubernetes.protobuf"
	metaPB = pb + ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

	// linkPatience is how long a cut or healed link may take to be noticed, with
	// room for a machine that is busy.
	linkPatience = 30 * time.Second
)

// A rig is a control plane, a link to it, and a hub at the near end.
type rig struct {
	t    *testing.T
	cp   *controlplane.ControlPlane
	link *link.Link
	hub  *node.Hub
	node *rest.Config // the node's own identity, directly
}

// newRig starts all but the hub. dir is the hub's folder, "" for a temporary one.
func newRig(t *testing.T, dir string, users []controlplane.StaticUser, args ...string) *rig {
	t.Helper()
	ctx := t.Context()
	r := &rig{t: t}
	r.cp = controlplane.New(t, controlplane.Config{Audit: true, Users: append(users, controlplane.StaticUser{Name: operator, Groups: []string{"system:masters"}})})
	var err error
	if r.link, err = link.New(ctx, r.cp.Addr()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.link.Close)
	if r.node, err = r.cp.NodeConfig(nodeName); err != nil {
		t.Fatal(err)
	}
	r.hub, err = node.NewHub(ctx, node.HubConfig{
		Dir: dir, ServerURLs: []string{r.link.URL()}, ServerCAFile: r.cp.CAFile(), CertFile: r.node.CertFile, KeyFile: r.node.KeyFile, Args: args,
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, ns := range []string{"a", "b"} {
		r.must(r.cp.CreateNamespace(ctx, ns))
	}
	_, err = r.cp.Client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName}}, metav1.CreateOptions{})
	r.must(err)
	r.makeWidgets()
	return r
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

var (
	crds    = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	widgets = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
)

// makeWidgets makes a custom resource.
func (r *rig) makeWidgets() {
	ctx := r.t.Context()
	c, err := dynamic.NewForConfig(r.cp.AdminConfig())
	r.must(err)
	crd := map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": "widgets.example.com"},
		"spec": map[string]any{
			"group": "example.com", "scope": "Namespaced",
			"names": map[string]any{"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
			"versions": []any{map[string]any{
				"name": "v1", "served": true, "storage": true,
				"schema": map[string]any{"openAPIV3Schema": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
			}},
		},
	}
	_, err = c.Resource(crds).Create(ctx, &unstructured.Unstructured{Object: crd}, metav1.CreateOptions{})
	r.must(err)
	r.must(process.Poll(ctx, "the custom resource is served", func(ctx context.Context) error {
		_, err := c.Resource(widgets).List(ctx, metav1.ListOptions{})
		return err
	}))
}

// letNodeRead gives the node more than the Node authorizer does, so that it has
// scopes worth looking at.
func (r *rig) letNodeRead() {
	r.grant("", nodeUser, "configmaps", "secrets", "pods", "widgets")
}

// grant lets a user read resources in a namespace, "" for everywhere, and returns
// the name of the binding.
func (r *rig) grant(namespace, user string, resources ...string) {
	r.t.Helper()
	ctx := r.t.Context()
	meta := metav1.ObjectMeta{GenerateName: "faults-", Namespace: namespace}
	rules := []rbacv1.PolicyRule{{APIGroups: []string{"", "example.com"}, Resources: resources, Verbs: []string{"get", "list", "watch"}}}
	subjects := []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: user}}
	rbac := r.cp.Client.RbacV1()
	if namespace == "" {
		role, err := rbac.ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: rules}, metav1.CreateOptions{})
		r.must(err)
		_, err = rbac.ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: meta, Subjects: subjects, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: role.Name},
		}, metav1.CreateOptions{})
		r.must(err)
		return
	}
	role, err := rbac.Roles(namespace).Create(ctx, &rbacv1.Role{ObjectMeta: meta, Rules: rules}, metav1.CreateOptions{})
	r.must(err)
	_, err = rbac.RoleBindings(namespace).Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: meta, Subjects: subjects, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: role.Name},
	}, metav1.CreateOptions{})
	r.must(err)
}

// revoke removes all bindings of a user in a namespace.
func (r *rig) revoke(namespace, user string) {
	r.t.Helper()
	ctx := r.t.Context()
	bindings := r.cp.Client.RbacV1().RoleBindings(namespace)
	list, err := bindings.List(ctx, metav1.ListOptions{})
	r.must(err)
	for _, b := range list.Items {
		if slices.ContainsFunc(b.Subjects, func(s rbacv1.Subject) bool { return s.Name == user }) {
			r.must(bindings.Delete(ctx, b.Name, metav1.DeleteOptions{}))
		}
	}
}

// waitLink waits until the hub knows whether the link is up.
func (r *rig) waitLink(up bool) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), linkPatience)
	defer cancel()
	r.must(process.Poll(ctx, fmt.Sprintf("the hub knows that up=%v", up), func(ctx context.Context) error {
		v, err := r.hub.Metric(ctx, "edgehub_upstream_healthy")
		if err == nil && (v == 1) != up {
			err = errors.New("it does not")
		}
		return err
	}))
}

// settle waits until all that is due is on disk: two flush periods with nothing
// written in between.
func (r *rig) settle() {
	r.t.Helper()
	last, since := -1.0, time.Now()
	r.must(process.Poll(r.t.Context(), "the journal rests", func(ctx context.Context) error {
		n, err := r.hub.Metric(ctx, "edgehub_cache_journal_written_bytes_total")
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

// offline cuts the link and waits until the hub knows.
func (r *rig) offline() {
	r.t.Helper()
	r.link.Cut()
	r.waitLink(false)
}

// online heals the link and waits until the hub knows.
func (r *rig) online() {
	r.t.Helper()
	r.must(r.link.Heal())
	r.waitLink(true)
}

// An endpoint is the API server, or the hub in front of it, for one identity.
type endpoint struct {
	url    string
	client *http.Client
}

func newEndpoint(c *rest.Config) (*endpoint, error) {
	rt, err := rest.TransportFor(c)
	if err != nil {
		return nil, err
	}
	return &endpoint{url: c.Host, client: &http.Client{Transport: rt}}, nil
}

// direct is an endpoint of the API server itself.
func (r *rig) direct(c *rest.Config) *endpoint {
	r.t.Helper()
	e, err := newEndpoint(c)
	r.must(err)
	return e
}

// through is an endpoint of the hub with the credentials of c. The hub must have
// been started once.
func (r *rig) through(c *rest.Config) *endpoint {
	r.t.Helper()
	return r.direct(r.hub.Through(c))
}

func (e *endpoint) do(ctx context.Context, method, path string, header http.Header, body []byte) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, e.url+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	return e.client.Do(req)
}

// get sends a GET; the body is the caller's to close.
func (e *endpoint) get(ctx context.Context, path, accept string) (*http.Response, error) {
	return e.do(ctx, http.MethodGet, path, http.Header{"Accept": {accept}}, nil)
}

// fetch sends a GET and reads the whole answer.
func (e *endpoint) fetch(ctx context.Context, path, accept string) (int, []byte, error) {
	resp, err := e.get(ctx, path, accept)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, b, err
}

// fingerprint returns the hash of every file below dir, by its path.
func fingerprint(dir string) (map[string]string, error) {
	sums := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		sum := sha256.Sum256(b)
		sums[path] = hex.EncodeToString(sum[:])
		return err
	})
	return sums, err
}

// percentile returns the p-th percentile of durations, p from 0 to 100.
func percentile(d []time.Duration, p int) time.Duration {
	if len(d) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(d))
	return s[min(len(s)*p/100, len(s)-1)]
}
