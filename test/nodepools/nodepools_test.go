// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package nodepools

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/edgehub/edgehub/test/companion"
	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
)

const (
	poolLabel        = "apps.openyurt.io/nodepool"
	hostNetworkLabel = "nodepool.openyurt.io/hostnetwork"
	excludeKey       = "apps.openyurt.io/exclude-host-network-pool"
	appliedKey       = "nodepool.openyurt.io/previous-attributes"

	crdName = "nodepools.apps.openyurt.io"
)

var (
	v1beta1 = schema.GroupVersionResource{Group: "apps.openyurt.io", Version: "v1beta1", Resource: "nodepools"}
	v1beta2 = schema.GroupVersionResource{Group: "apps.openyurt.io", Version: "v1beta2", Resource: "nodepools"}
	crds    = schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}
)

// values leave the controller of NodePools, and admission.
var values = []string{"autonomy.enabled=false", "approver.enabled=false", "hub.enabled=false"}

// A scene is a cluster with a companion.
type scene struct {
	*testing.T
	cp      *controlplane.ControlPlane
	release *companion.Release
	replica *companion.Replica
	client  kubernetes.Interface
	dynamic dynamic.Interface
	version schema.GroupVersionResource
}

// in is the scene for a subtest.
func (s *scene) in(t *testing.T) *scene {
	c := *s
	c.T = t
	return &c
}

func (s *scene) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s *scene) eventually(what string, condition func(ctx context.Context) error) {
	s.Helper()
	ctx, cancel := context.WithTimeout(s.Context(), time.Minute)
	defer cancel()
	s.must(process.Poll(ctx, what, condition))
}

// TestNodePools follows one companion through what may become of a cluster: it has no
// NodePools, old ones, ours, and OpenYurt's manager.
func TestNodePools(t *testing.T) {
	t.Parallel()
	s := &scene{T: t, cp: controlplane.New(t, controlplane.Config{Audit: true})}
	config := s.cp.AdminConfig()
	config.QPS, config.WarningHandlerWithContext = -1, rest.NoWarnings{}
	var err error
	s.dynamic, err = dynamic.NewForConfig(config)
	s.must(err)
	s.client, err = kubernetes.NewForConfig(config)
	s.must(err)
	s.release = companion.Install(t, s.cp, append([]string{"nodePools.crd.install=never"}, values...)...)
	s.replica = s.release.Start(t)
	s.must(s.cp.CreateNamespace(t.Context(), "a"))

	s.version = v1beta2
	for _, phase := range []struct {
		name string
		run  func(*scene)
	}{
		{"the chart installs what is missing", (*scene).chartWithoutCRD},
		{"no CRD", (*scene).noCRD},
		{"v1beta1 alone", (*scene).onlyV1beta1},
		{"the chart leaves what is there", (*scene).chartWithCRD},
		{"v1beta2", (*scene).ours},
		{"nodes", (*scene).nodes},
		{"with yurt-manager", (*scene).yurtManager},
		{"nothing was refused", (*scene).nothingRefused},
	} {
		if !t.Run(phase.name, func(t *testing.T) { phase.run(s.in(t)) }) {
			return
		}
	}
}

// noCRD: the companion waits, and does nothing to nodes.
func (s *scene) noCRD() {
	s.createNode("early", "early", false, hostNetworkLabel, "true")
	s.eventually("the companion says that it waits", func(context.Context) error {
		log, err := os.ReadFile(s.replica.Log())
		if err == nil && !bytes.Contains(log, []byte("The API server has no NodePools, waiting")) {
			err = fmt.Errorf("not in %s", s.replica.Log())
		}
		return err
	})
	if !s.replica.Running() {
		s.Error("the companion has ended")
	}
	s.wantNoWrites(time.Time{})
}

// onlyV1beta1: OpenYurt's first CRD, without conditions in its status.
func (s *scene) onlyV1beta1() {
	s.applyCRD(`
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: nodepools.apps.openyurt.io}
spec:
  group: apps.openyurt.io
  scope: Cluster
  names: {kind: NodePool, listKind: NodePoolList, plural: nodepools, singular: nodepool}
  versions:
  - name: v1beta1
    served: true
    storage: true
    subresources: {status: {}}
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec:
            type: object
            properties: {type: {type: string}, hostNetwork: {type: boolean}}
          status:
            type: object
            properties:
              nodes: {type: array, items: {type: string}}
              readyNodeNum: {type: integer}
              unreadyNodeNum: {type: integer}
`)
	s.createNode("late", "late", true)
	s.createPool("early", map[string]any{"type": "Edge"}, nil)
	s.createPool("late", map[string]any{"type": "Edge"}, map[string]string{hostNetworkLabel: "True"})
	s.wantLabels(map[string]string{"early": "", "late": "true"})
	s.eventually("the status tells of the nodes", func(ctx context.Context) error {
		p, err := s.dynamic.Resource(v1beta1).Get(ctx, "late", metav1.GetOptions{})
		if err != nil {
			return err
		}
		got, err := json.Marshal(p.Object["status"])
		if want := `{"nodes":["late"],"readyNodeNum":1,"unreadyNodeNum":0}`; err == nil && string(got) != want {
			err = fmt.Errorf("status %s, want %s", got, want)
		}
		return err
	})
	since := time.Now()
	s.setReady("late", false)
	s.setReady("late", true)
	s.setReady("early", true) // of another pool, and so a sign that the first are through
	s.eventually("the other pool's status tells of its node", func(ctx context.Context) error {
		p, err := s.dynamic.Resource(v1beta1).Get(ctx, "early", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if n, _, _ := unstructured.NestedInt64(p.Object, "status", "readyNodeNum"); n != 1 {
			return fmt.Errorf("%d nodes are ready, want 1", n)
		}
		return nil
	})
	if all := s.writes(since); len(all) > 3 {
		s.Errorf("the companion has written %d times, want one write for each of 3 changes and not more: %q", len(all), all)
	}
	for _, node := range []string{"early", "late"} {
		s.must(s.client.CoreV1().Nodes().Delete(s.Context(), node, metav1.DeleteOptions{}))
		s.must(s.dynamic.Resource(v1beta1).Delete(s.Context(), node, metav1.DeleteOptions{}))
	}
}

// ours is the CRD of the chart.
func (s *scene) ours() {
	s.must(s.dynamic.Resource(crds).Delete(s.Context(), crdName, metav1.DeleteOptions{}))
	s.eventually("the old CRD is gone", func(ctx context.Context) error {
		_, err := s.dynamic.Resource(crds).Get(ctx, crdName, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("it is there: %w", err)
	})
	s.release.Upgrade(s.T, values...)
	s.waitServed(v1beta2)
	for name, test := range map[string]func(*scene){"rules": (*scene).rules, "labels": (*scene).labels, "attributes": (*scene).attributes, "status": (*scene).status} {
		s.Run(name, func(t *testing.T) {
			t.Parallel()
			test(s.in(t))
		})
	}
}

// nothingRefused: the chart's roles allow all that the companion has asked for.
func (s *scene) nothingRefused() {
	requests, err := s.cp.Requests(time.Time{})
	s.must(err)
	of := 0
	for _, r := range requests {
		if r.User.Username != companion.User {
			continue
		}
		of++
		if r.ResponseStatus != nil && r.ResponseStatus.Code == 403 {
			s.Errorf("refused: %s %s", r.Verb, r.RequestURI)
		}
	}
	if of < 20 {
		s.Errorf("the audit log has %d requests of the companion's", of)
	}
}

// writes are the companion's since then to nodes, NodePools and Events about nodes,
// refused ones included.
func (s *scene) writes(since time.Time) (all []string) {
	s.Helper()
	requests, err := s.cp.Requests(since)
	s.must(err)
	for _, r := range requests {
		if r.User.Username != companion.User || r.ObjectRef == nil || slices.Contains([]string{"get", "list", "watch"}, r.Verb) {
			continue
		}
		if o := r.ObjectRef; o.Resource == "nodes" || o.Resource == "nodepools" || o.Resource == "events" && o.Namespace == "default" {
			all = append(all, r.Verb+" "+r.RequestURI)
		}
	}
	return all
}

func (s *scene) wantNoWrites(since time.Time) {
	s.Helper()
	if all := s.writes(since); len(all) > 0 {
		s.Errorf("the companion has written: %q", all)
	}
}

func (s *scene) createNode(name, pool string, ready bool, labels ...string) {
	s.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"kept": "yes"}}}
	if pool != "" {
		n.Labels[poolLabel] = pool
	}
	for i := 0; i < len(labels); i += 2 {
		n.Labels[labels[i]] = labels[i+1]
	}
	_, err := s.client.CoreV1().Nodes().Create(s.Context(), n, metav1.CreateOptions{})
	s.must(err)
	s.setReady(name, ready)
}

func (s *scene) setReady(node string, ready bool) {
	s.Helper()
	is := "False"
	if ready {
		is = "True"
	}
	_, err := s.client.CoreV1().Nodes().Patch(s.Context(), node, types.StrategicMergePatchType,
		[]byte(`{"status":{"conditions":[{"type":"Ready","status":"`+is+`"}]}}`), metav1.PatchOptions{}, "status")
	s.must(err)
}

// patchNode applies a JSON merge patch.
func (s *scene) patchNode(node, patch string) {
	s.Helper()
	_, err := s.client.CoreV1().Nodes().Patch(s.Context(), node, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	s.must(err)
}

func (s *scene) setLabel(node, key, value string) {
	s.Helper()
	text := "null"
	if value != "" {
		text = `"` + value + `"`
	}
	s.patchNode(node, `{"metadata":{"labels":{"`+key+`":`+text+`}}}`)
}

func newPool(version schema.GroupVersionResource, name string, spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": version.GroupVersion().String(), "kind": "NodePool", "metadata": map[string]any{"name": name}, "spec": spec,
	}}
}

func (s *scene) createPool(name string, spec map[string]any, annotations map[string]string) {
	s.Helper()
	p := newPool(s.version, name, spec)
	p.SetAnnotations(annotations)
	_, err := s.dynamic.Resource(s.version).Create(s.Context(), p, metav1.CreateOptions{})
	s.must(err)
}

// wantLabels waits until nodes have the host-network label with a value, "": have it not.
func (s *scene) wantLabels(want map[string]string) {
	s.Helper()
	begin := time.Now()
	for node, value := range want {
		s.eventually(fmt.Sprintf("node %s has %q as its host-network label", node, value), func(ctx context.Context) error {
			n, err := s.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if got, ok := n.Labels[hostNetworkLabel]; got != value || ok != (value != "") {
				return fmt.Errorf("labels %v", n.Labels)
			}
			if n.Labels["kept"] != "yes" {
				return fmt.Errorf("labels %v lack those of others", n.Labels)
			}
			return nil
		})
	}
	s.Logf("labels were right after %v", time.Since(begin).Round(time.Millisecond))
}

func (s *scene) applyCRD(text string) {
	s.Helper()
	crd := &unstructured.Unstructured{}
	s.must(yaml.Unmarshal([]byte(text), &crd.Object))
	_, err := s.dynamic.Resource(crds).Create(s.Context(), crd, metav1.CreateOptions{})
	s.must(err)
	s.waitServed(v1beta1)
}

func (s *scene) waitServed(version schema.GroupVersionResource) {
	s.Helper()
	s.version = version
	s.eventually("NodePools are served in "+version.Version, func(ctx context.Context) error {
		_, err := s.dynamic.Resource(version).List(ctx, metav1.ListOptions{})
		return err
	})
}

// chartWithoutCRD: there is none in the cluster.
func (s *scene) chartWithoutCRD() {
	s.wantRendered(false, "nodePools.crd.install=never")
	for _, keep := range []bool{true, false} {
		text := s.render(fmt.Sprintf("nodePools.crd.keep=%v", keep))
		if !strings.Contains(text, crdName) || strings.Contains(text, "helm.sh/resource-policy: keep") != keep {
			s.Errorf("helm template with keep=%v renders:\n%s", keep, text)
		}
	}
}

// chartWithCRD: there is one, of somebody else or of this release.
func (s *scene) chartWithCRD() {
	annotate := func(namespace string) {
		patch := fmt.Sprintf(`{"metadata":{"annotations":{"meta.helm.sh/release-name":%q,"meta.helm.sh/release-namespace":%q}}}`, companion.Name, namespace)
		_, err := s.dynamic.Resource(crds).Patch(s.Context(), crdName, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
		s.must(err)
	}
	s.wantRendered(false)
	s.wantRendered(true, "nodePools.crd.install=always")
	annotate("elsewhere")
	s.wantRendered(false)
	annotate(companion.Namespace)
	s.wantRendered(true)
}

func (s *scene) wantRendered(want bool, values ...string) {
	s.Helper()
	if text := s.render(values...); strings.Contains(text, crdName) != want {
		s.Errorf("helm template with %v renders the CRD: %v, want %v", values, !want, want)
	}
}

// render is what helm makes of the template of the CRD, with a look at the cluster. As an
// upgrade: an installation would object to what is there without helm.
func (s *scene) render(values ...string) string {
	s.Helper()
	bin, err := controlplane.Binaries(s.Context(), "helm")
	s.must(err)
	root, err := controlplane.Root()
	s.must(err)
	args := []string{"template", companion.Name, filepath.Join(root, "charts", "edgehub"), "--namespace=" + companion.Namespace, "--dry-run=server", "--is-upgrade", "--kubeconfig=" + s.cp.AdminKubeconfig()}
	for _, v := range values {
		args = append(args, "--set", v)
	}
	cmd := exec.CommandContext(s.Context(), filepath.Join(bin, "helm"), args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		s.Fatalf("helm template: %v\n%s", err, stderr.Bytes())
	}
	_, crd, ok := strings.Cut(string(out), "# Source: edgehub/templates/nodepools-crd.yaml")
	if !ok {
		return ""
	}
	crd, _, _ = strings.Cut(crd, "# Source: ")
	return crd
}
