// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package pools holds the real hub, with its default chain of filters and before a real
// API server, to what is promised of pods, pools and configurations: pods pass byte for
// byte, what is wrong with them on a node of a host-network pool is reported exactly, and
// a bad configuration changes nothing.
package pools

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// admin may do everything, by a token.
const admin = "pools-admin"

// What NodePools, nodes and pods are marked with. They are a contract with OpenYurt, and
// written out here so that a slip in the hub shows.
const (
	poolGroup         = "apps.openyurt.io"
	poolLabel         = "apps.openyurt.io/nodepool"
	hostNetworkLabel  = "nodepool.openyurt.io/hostnetwork"
	excludeAnnotation = "apps.openyurt.io/exclude-host-network-pool"
)

var users = []controlplane.StaticUser{{Name: admin, Groups: []string{"system:masters"}}}

// shared is the control plane of all tests but the one that compares pods of the whole
// cluster, made by the first that asks.
var shared struct {
	once sync.Once
	dir  string
	cp   *controlplane.ControlPlane
	err  error
}

func TestMain(m *testing.M) {
	flag.Parse()
	rest.SetDefaultWarningHandler(rest.NoWarnings{}) // of the API server, about pods that nobody runs
	code := m.Run()
	if err := endShared(code == 0); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code) //nolint:forbidigo // TestMain is main here
}

// endShared keeps the logs after a failure.
func endShared(passed bool) (err error) {
	if shared.cp != nil {
		err = shared.cp.Stop()
	}
	switch {
	case shared.dir == "":
	case passed && err == nil:
		err = os.RemoveAll(shared.dir)
	default:
		fmt.Println("The logs are in", shared.dir)
	}
	return err
}

// onShared makes a rig of the shared control plane, with the identity of a node and a link
// of its own.
func onShared(t *testing.T, nodeName string) *rig.Rig {
	t.Helper()
	shared.once.Do(func() {
		if shared.dir, shared.err = os.MkdirTemp("", "edgehub-pools-"); shared.err != nil {
			return
		}
		ctx := context.WithoutCancel(t.Context())
		shared.cp, shared.err = controlplane.Start(ctx, controlplane.Config{Dir: filepath.Join(shared.dir, "controlplane"), Users: users})
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	r := rig.On(t, shared.cp)
	var err error
	r.Node, err = r.ControlPlane.NodeConfig(nodeName)
	r.Must(err)
	return r
}

// nodePools are those of a cluster, by version.
type nodePools map[string]dynamic.NamespaceableResourceInterface

// newNodePools installs the custom resource and lets nodes read it. Of the versions only
// one is stored and none is converted, as with OpenYurt, whose conversion knows nothing of
// spec.hostNetwork.
func newNodePools(r *rig.Rig) nodePools {
	r.T.Helper()
	ctx := r.T.Context()
	c, err := dynamic.NewForConfig(r.ControlPlane.AdminConfig())
	r.Must(err)
	keep := map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}
	object := map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true, "properties": map[string]any{"spec": keep, "status": keep}}
	var versions []any
	pools := nodePools{}
	for _, v := range []string{"v1beta2", "v1beta1", "v1alpha1"} {
		versions = append(versions, map[string]any{
			"name": v, "served": true, "storage": v == "v1beta2", "schema": map[string]any{"openAPIV3Schema": object},
			"subresources": map[string]any{"status": map[string]any{}},
		})
		pools[v] = c.Resource(schema.GroupVersionResource{Group: poolGroup, Version: v, Resource: "nodepools"})
	}
	crd := map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": "nodepools." + poolGroup},
		"spec": map[string]any{
			"group": poolGroup, "scope": "Cluster", "versions": versions, "conversion": map[string]any{"strategy": "None"},
			"names": map[string]any{"plural": "nodepools", "singular": "nodepool", "kind": "NodePool", "listKind": "NodePoolList"},
		},
	}
	crds := schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
	_, err = c.Resource(crds).Create(ctx, &unstructured.Unstructured{Object: crd}, metav1.CreateOptions{})
	r.Must(err)
	letNodesRead(r, poolGroup, "nodepools")
	reader, err := dynamic.NewForConfig(r.Node)
	r.Must(err)
	r.Must(process.Poll(ctx, "nodes may read NodePools of all versions", func(ctx context.Context) (err error) {
		for v := range pools {
			_, e := reader.Resource(schema.GroupVersionResource{Group: poolGroup, Version: v, Resource: "nodepools"}).List(ctx, metav1.ListOptions{})
			err = errors.Join(err, e)
		}
		return err
	}))
	return pools
}

// letNodesRead gives all nodes a right that they do not have by themselves.
func letNodesRead(r *rig.Rig, group, resource string) {
	r.T.Helper()
	meta := metav1.ObjectMeta{Name: "nodes-read-" + resource}
	rbac := r.ControlPlane.Client.RbacV1()
	_, err := rbac.ClusterRoles().Create(r.T.Context(), &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{group}, Resources: []string{resource}, Verbs: []string{"get", "list", "watch"}},
	}}, metav1.CreateOptions{})
	r.Must(err)
	_, err = rbac.ClusterRoleBindings().Create(r.T.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta, Subjects: []rbacv1.Subject{rig.Group("system:nodes")}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
	}, metav1.CreateOptions{})
	r.Must(err)
}

// create makes a NodePool in one of its versions.
func (p nodePools) create(r *rig.Rig, version string, metadata, spec map[string]any) {
	r.T.Helper()
	_, err := p[version].Create(r.T.Context(), &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": poolGroup + "/" + version, "kind": "NodePool", "metadata": metadata, "spec": spec,
	}}, metav1.CreateOptions{})
	r.Must(err)
}

// createNode makes a Node with labels.
func createNode(r *rig.Rig, name string, labels map[string]string) {
	r.T.Helper()
	_, err := r.ControlPlane.Client.CoreV1().Nodes().Create(r.T.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{})
	r.Must(err)
}
