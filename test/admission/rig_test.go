// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package admission holds the companion's webhook and the chart's admission policies to
// one table of cases, before a real API server, and looks where the real scheduler and
// the real DaemonSet controller put pods then.
package admission

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/admission/cases"
	"github.com/edgehub/edgehub/test/companion"
	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
)

// The namespaces of the tests. In webhook only the webhook acts, in policy only the
// policies, in both both.
const webhook, policy, both = "webhook", "policy", "both"

var modes = []string{webhook, policy, both}

// callers is the common name that the API server shows to webhooks.
const callers = "apiserver-webhook-client"

func TestMain(m *testing.M) {
	rest.SetDefaultWarningHandler(rest.NoWarnings{}) // where nobody looks at them
	os.Exit(m.Run())
}

// A rig is a cluster with both releases of the chart.
type rig struct {
	*testing.T
	cp      *controlplane.ControlPlane
	dynamic dynamic.Interface
	release *companion.Release
	replica *companion.Replica
}

func (r *rig) must(err error) {
	r.Helper()
	if err != nil {
		r.Fatal(err)
	}
}

// newRig starts a cluster in which nobody looks at pods yet.
func newRig(t *testing.T) *rig {
	r := &rig{T: t}
	dir := t.TempDir()
	r.cp = controlplane.New(t, controlplane.Config{
		ControllerManager: true, Scheduler: true,
		APIServerArgs: []string{"--admission-control-config-file=" + r.clientConfiguration(dir)},
		// Nodes are objects only, so nobody may miss their kubelets; owners of some pods are
		// made up.
		ControllerManagerArgs: []string{"--controllers=*,-node-lifecycle-controller,-garbage-collector-controller"},
	})
	certificate, key, err := r.cp.ClientCert(callers)
	r.must(err)
	r.must(os.Rename(certificate, filepath.Join(dir, "webhook.crt")))
	r.must(os.Rename(key, filepath.Join(dir, "webhook.key")))

	config := r.cp.AdminConfig()
	config.WarningHandlerWithContext = collector{}
	r.dynamic, err = dynamic.NewForConfig(config)
	r.must(err)
	for _, mode := range modes {
		r.must(r.cp.CreateNamespace(t.Context(), mode))
	}
	for i := range 3 {
		r.createNode("plain-"+strconv.Itoa(i), map[string]string{cases.PoolLabel: cases.PlainPool})
		r.createNode("host-"+strconv.Itoa(i), map[string]string{cases.PoolLabel: cases.HostPool, cases.Label: "true"})
	}
	for _, kind := range []string{"DaemonSet v1beta1 v1alpha1", "CloneSet v1alpha1", "UnitedDeployment v1alpha1"} {
		r.createKruise(strings.Fields(kind))
	}
	return r
}

// clientConfiguration makes the API server show a certificate to webhooks, which is to
// be at webhook.crt and webhook.key by the first request.
func (r *rig) clientConfiguration(dir string) string {
	kubeconfig := filepath.Join(dir, "webhook.kubeconfig")
	r.must(os.WriteFile(kubeconfig, fmt.Appendf(nil, `apiVersion: v1
kind: Config
users: [{name: "*", user: {client-certificate: %s/webhook.crt, client-key: %[1]s/webhook.key}}]
`, dir), 0o600))
	file := filepath.Join(dir, "admission.yaml")
	r.must(os.WriteFile(file, fmt.Appendf(nil, `apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
- name: MutatingAdmissionWebhook
  configuration: {apiVersion: apiserver.config.k8s.io/v1, kind: WebhookAdmissionConfiguration, kubeConfigFile: %s}
`, kubeconfig), 0o600))
	return file
}

// createNode makes a Node that is Ready for as long as nobody looks after it. Pods of the
// table must not follow DaemonSets onto it: it is tainted.
func (r *rig) createNode(name string, labels map[string]string) {
	ctx, nodes := r.Context(), r.cp.Client.CoreV1().Nodes()
	_, err := nodes.Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{})
	r.must(err)
	// In the place of the taint not-ready, which every new node gets.
	_, err = nodes.Patch(ctx, name, types.MergePatchType, []byte(`{"spec":{"taints":[{"key":"test","effect":"NoSchedule"}]}}`), metav1.PatchOptions{})
	r.must(err)
	room := `{"pods":"100","cpu":"8","memory":"16Gi"}`
	status := `{"status":{"conditions":[{"type":"Ready","status":"True"}],"capacity":` + room + `,"allocatable":` + room + `}}`
	_, err = nodes.Patch(ctx, name, types.MergePatchType, []byte(status), metav1.PatchOptions{}, "status")
	r.must(err)
}

// createKruise installs a kind of OpenKruise's, versions after it, that takes anything.
func (r *rig) createKruise(kind []string) {
	plural := strings.ToLower(kind[0]) + "s"
	var versions []any
	for i, v := range kind[1:] {
		versions = append(versions, map[string]any{"name": v, "served": true, "storage": i == 0, "schema": map[string]any{"openAPIV3Schema": map[string]any{
			"type": "object", "properties": map[string]any{"spec": map[string]any{"type": "object", "x-kubernetes-preserve-unknown-fields": true}},
		}}})
	}
	crd := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": map[string]any{"name": plural + ".apps.kruise.io"},
		"spec": map[string]any{
			"group": "apps.kruise.io", "scope": "Namespaced", "versions": versions,
			"names": map[string]any{"plural": plural, "singular": strings.ToLower(kind[0]), "kind": kind[0], "listKind": kind[0] + "List"},
		},
	}}
	_, err := r.dynamic.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"}).
		Create(r.Context(), crd, metav1.CreateOptions{})
	r.must(err)
	for _, v := range kind[1:] {
		api := r.dynamic.Resource(schema.GroupVersionResource{Group: "apps.kruise.io", Version: v, Resource: plural})
		r.must(process.Poll(r.Context(), "OpenKruise's "+plural+" are served", func(ctx context.Context) error {
			_, err := api.List(ctx, metav1.ListOptions{})
			return err
		}))
	}
}

// install installs the chart twice, in mode webhook for all but the namespace policy, and
// in mode policy for all but the namespace webhook, and waits until both take effect.
func (r *rig) install() {
	others := []string{"approver.enabled=false", "nodePools.mode=off", "nodePools.crd.install=never", "hub.enabled=false"}
	r.release = companion.Install(r.T, r.cp, append(others, "admission.mode=webhook", "admission.exemptNamespaces={"+policy+"}")...)
	r.replica = r.release.Start(r.T, "--client-ca-file="+r.cp.CAFile(), "--client-names=someone-else,"+callers)

	objects, err := companion.Render(r.Context(), append(others, "fullnameOverride=edgehub-policy", "admission.mode=policy", "admission.exemptNamespaces={"+webhook+"}")...)
	r.must(err)
	created := 0
	for _, o := range objects {
		gvk := o.GroupVersionKind()
		if gvk.Group != "admissionregistration.k8s.io" {
			continue
		}
		plural := strings.ToLower(gvk.Kind) + "s"
		if stem, ok := strings.CutSuffix(plural, "policys"); ok {
			plural = stem + "policies"
		}
		_, err := r.dynamic.Resource(gvk.GroupVersion().WithResource(plural)).Create(r.Context(), o, metav1.CreateOptions{})
		r.must(err)
		created++
	}
	if created != 6 {
		r.Fatalf("the chart has %d policies and bindings, want 6", created)
	}
	c := probe("true", map[string]any{"hostNetwork": true})
	for _, mode := range modes {
		r.must(process.Poll(r.Context(), "pods in namespace "+mode+" are looked at", func(ctx context.Context) error {
			got := r.create(ctx, c, mode, "probe", true)
			if got.err == nil && c.Affinity(got.object.Object) == nil || len(got.warnings) == 0 {
				return fmt.Errorf("affinity %v, warnings %v: %w", c.Affinity(got.object.Object), got.warnings, got.err)
			}
			return got.err
		}))
	}
}

// probe is a case of a Pod.
func probe(value string, spec map[string]any) cases.Case {
	return cases.Case{Kind: "Pod", State: cases.State{Value: &value, Spec: spec}}
}

// collector collects warnings in the context that withWarnings makes.
type collector struct{}

type warnings struct {
	mu   sync.Mutex
	text []string
}

type warningsKey struct{}

func withWarnings(ctx context.Context) (context.Context, *warnings) {
	w := &warnings{}
	return context.WithValue(ctx, warningsKey{}, w), w
}

func (collector) HandleWarningHeaderWithContext(ctx context.Context, _ int, _, text string) {
	w, _ := ctx.Value(warningsKey{}).(*warnings)
	if w == nil {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	// A policy's warning names the policy first.
	if _, message, ok := strings.Cut(text, "with binding 'edgehub-policy-exclude': "); ok {
		text = message
	}
	w.text = append(w.text, text)
}

// reasons are those of the warnings that are ours, sorted.
func (w *warnings) reasons() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	found := []string{}
	for _, text := range w.text {
		ours := false
		for reason, known := range cases.Warnings {
			if text == known {
				found = append(found, reason)
				ours = true
			}
		}
		if !ours && (strings.Contains(text, "exclude-host-network-pool") || strings.Contains(text, "edgehub")) {
			found = append(found, text)
		}
	}
	slices.Sort(found)
	return found
}

// An answer is the API server's.
type answer struct {
	object   *unstructured.Unstructured // never nil
	warnings []string                   // reasons
	err      error
}

// ask sends a request.
func (r *rig) ask(ctx context.Context, c cases.Case, namespace string, do func(context.Context, dynamic.ResourceInterface) (*unstructured.Unstructured, error)) answer {
	ctx, w := withWarnings(ctx)
	o, err := do(ctx, r.dynamic.Resource(c.Resource()).Namespace(namespace))
	if o == nil {
		o = &unstructured.Unstructured{Object: map[string]any{}}
	}
	return answer{o, w.reasons(), err}
}

func dryRun(dry bool) []string {
	if dry {
		return []string{metav1.DryRunAll}
	}
	return nil
}

// create makes the object of a case.
func (r *rig) create(ctx context.Context, c cases.Case, namespace, name string, dry bool) answer {
	return r.ask(ctx, c, namespace, func(ctx context.Context, api dynamic.ResourceInterface) (*unstructured.Unstructured, error) {
		return api.Create(ctx, c.Object(namespace, name), metav1.CreateOptions{DryRun: dryRun(dry)})
	})
}

var errNotThere = errors.New("not there yet")
