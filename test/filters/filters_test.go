// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package filters shows what filters promise to those who read through them, with the
// real program between a real API server and real clients: each holds what the filters
// make of what there is, whatever happens to the objects, to what filters go by, to their
// configuration, to the link and to the hub; and nobody is ever shown anything else.
//
// EDGEHUB_STEPS is how long the random tests are, EDGEHUB_SEED makes their decisions (not
// their timing) again.
package filters

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	writerUser = "filters-writer" // may do everything, directly
	agentUser  = "filters-agent"  // a token user who reads through the hub

	poolLabel = "apps.openyurt.io/nodepool"
)

var (
	configMapsGVR = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	servicesGVR   = schema.GroupVersionResource{Version: "v1", Resource: "services"}
	poolsGVR      = schema.GroupVersionResource{Group: "apps.openyurt.io", Version: "v1beta2", Resource: "nodepools"}
	crdsGVR       = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
)

// A stage is a rig with filters: the node and a token user may read all that the tests
// write, and there are the NodePools p1 and p2.
type stage struct {
	*rig.Rig
	dynamic   dynamic.Interface // a writer's, directly
	file      string            // --filter-config
	documents int               // that have been written
}

// newStage starts a control plane. The hub is not started, and has d for its configuration.
func newStage(t *testing.T, d document, args ...string) *stage {
	t.Helper()
	s := &stage{file: filepath.Join(t.TempDir(), "filters.yaml")}
	args = append([]string{"--filter-config=" + s.file}, args...)
	s.Rig = rig.New(t, []controlplane.StaticUser{{Name: writerUser, Groups: []string{"system:masters"}}, {Name: agentUser}}, args...)
	s.write(d)
	var err error
	s.dynamic, err = dynamic.NewForConfig(s.ControlPlane.TokenConfig(writerUser))
	s.Must(err)
	for _, who := range []string{rig.NodeUser, agentUser} {
		s.Grant("", rig.User(who), "configmaps", "services", "endpoints", "endpointslices", "pods", "widgets")
	}
	s.Must(s.makePools(t.Context()))
	return s
}

// makePools makes the CRD of NodePools and two of them, which the node may read.
func (s *stage) makePools(ctx context.Context) error {
	anything := map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}
	crd := map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": map[string]any{"name": "nodepools.apps.openyurt.io", "annotations": map[string]any{"api-approved.kubernetes.io": "unapproved, a test"}},
		"spec": map[string]any{
			"group": poolsGVR.Group, "scope": "Cluster",
			"names": map[string]any{"plural": "nodepools", "singular": "nodepool", "kind": "NodePool", "listKind": "NodePoolList"},
			"versions": []any{map[string]any{
				"name": poolsGVR.Version, "served": true, "storage": true, "subresources": map[string]any{"status": map[string]any{}},
				"schema": map[string]any{"openAPIV3Schema": anything},
			}},
		},
	}
	if _, err := s.dynamic.Resource(crdsGVR).Create(ctx, &unstructured.Unstructured{Object: crd}, metav1.CreateOptions{}); err != nil {
		return err
	}
	for _, name := range []string{"p1", "p2"} {
		if err := process.Poll(ctx, "NodePool "+name+" is made", func(ctx context.Context) error { return s.makePool(ctx, name) }); err != nil {
			return err
		}
	}
	meta := metav1.ObjectMeta{Name: "filters-nodepools"}
	rbac := s.ControlPlane.Client.RbacV1()
	_, err := rbac.ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{poolsGVR.Group}, Resources: []string{poolsGVR.Resource}, Verbs: []string{"get", "list", "watch"}},
	}}, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	_, err = rbac.ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta, Subjects: []rbacv1.Subject{rig.User(rig.NodeUser)}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
	}, metav1.CreateOptions{})
	return err
}

func (s *stage) makePool(ctx context.Context, name string) error {
	pool := map[string]any{
		"apiVersion": poolsGVR.GroupVersion().String(), "kind": "NodePool", "metadata": map[string]any{"name": name}, "spec": map[string]any{"type": "Edge"},
	}
	_, err := s.dynamic.Resource(poolsGVR).Create(ctx, &unstructured.Unstructured{Object: pool}, metav1.CreateOptions{})
	return err
}

// join puts the node into a pool, "" for none.
func (s *stage) join(ctx context.Context, pool string) error {
	value := "null"
	if pool != "" {
		value = strconv.Quote(pool)
	}
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%s}}}`, poolLabel, value)
	_, err := s.ControlPlane.Client.CoreV1().Nodes().Patch(ctx, rig.NodeName, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}

// credential is that of the node or of the token user, of a program, through the hub, which
// must have been started once.
func (s *stage) credential(byNode bool, program string) *rest.Config {
	c := s.ControlPlane.TokenConfig(agentUser)
	if byNode {
		c = rest.CopyConfig(s.Node)
	}
	c = s.Hub.Through(c)
	c.UserAgent = program + "/v1.37.2 (linux/amd64) test"
	return c
}

// A document is a configuration of filters.
type document struct {
	Filters []entry `json:"filters,omitempty"`
	CEL     []rule  `json:"cel,omitempty"`
}

type entry struct {
	Name     string   `json:"name"`
	Disabled bool     `json:"disabled,omitempty"`
	Clients  []client `json:"clients,omitempty"`
}

type client struct {
	Program string `json:"program,omitempty"`
	User    string `json:"user,omitempty"`
}

type rule struct {
	Name      string   `json:"name"`
	Clients   []client `json:"clients"`
	Resources []string `json:"resources"`
	Match     string   `json:"match"`
	Drop      bool     `json:"drop,omitempty"`
	Set       []set    `json:"set,omitempty"`
	DryRun    bool     `json:"dryRun,omitempty"`

	// The same in Go, for the random walk.
	matches func(object map[string]any, pool string) bool
	change  func(object map[string]any, pool string)
}

type set struct {
	Path  string `json:"path"`
	Value string `json:"value"`
}

// text is the document as it is written, with a rule for nobody by whose name metrics tell
// that it is in force.
func (d document) text(mark string) ([]byte, error) {
	d.CEL = append(append([]rule{}, d.CEL...), rule{Name: mark, Clients: []client{{Program: "nobody"}}, Resources: []string{"secrets"}, Match: "false", Drop: true})
	return yaml.Marshal(struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		document
	}{"edgehub.io/v1alpha1", "EdgehubConfiguration", d})
}

// next names a document.
func (s *stage) next() (mark string) {
	s.documents++
	return fmt.Sprintf("document-%d", s.documents)
}

// write replaces the file, and returns the mark of the document.
func (s *stage) write(d document) (mark string) {
	s.T.Helper()
	mark = s.next()
	text, err := d.text(mark)
	s.Must(err)
	temporary := s.file + ".new"
	s.Must(os.WriteFile(temporary, text, 0o600))
	s.Must(os.Rename(temporary, s.file))
	return mark
}

// waitInForce waits until a document is in force.
func (s *stage) waitInForce(mark string) {
	s.T.Helper()
	s.Must(process.Poll(s.T.Context(), mark+" is in force", func(ctx context.Context) error {
		v, err := s.Hub.Metric(ctx, "edgehub_filter_in_force", fmt.Sprintf("filter=%q", "cel/"+mark))
		if err == nil && v != 1 {
			err = fmt.Errorf("edgehub_filter_in_force is %v", v)
		}
		return err
	}))
}

// waitPool waits until the hub knows that the node is in a pool, or in none.
func (s *stage) waitPool(pool string) {
	s.T.Helper()
	s.Must(process.Poll(s.T.Context(), fmt.Sprintf("the node is in the pool %q", pool), func(ctx context.Context) error {
		unknown, err := s.Hub.Metric(ctx, "edgehub_nodepool_membership", `state="unknown"`)
		if err != nil {
			return err
		}
		in, err := s.Hub.Metric(ctx, "edgehub_nodepool_info")
		if err != nil {
			return err
		}
		this, err := s.Hub.Metric(ctx, "edgehub_nodepool_info", fmt.Sprintf("pool=%q", pool))
		if err == nil && (unknown != 0 || pool == "" && in != 0 || pool != "" && this != 1) {
			err = fmt.Errorf("edgehub_nodepool_info is %v, %v for this pool; unknown is %v", in, this, unknown)
		}
		return err
	}))
}

// hubAddress is where pods would reach the hub, an address that nobody else uses.
var hubAddress = netip.MustParseAddr("169.254.87.21")
