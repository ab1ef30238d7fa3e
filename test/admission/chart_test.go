// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/edgehub/edgehub/test/companion"
	"github.com/edgehub/edgehub/test/controlplane"
)

// failurePolicies are those of what the chart renders for admission, by name. A webhook
// is named as such; what has none, a binding, has "".
func failurePolicies(t *testing.T, values ...string) map[string]string {
	t.Helper()
	objects, err := companion.Render(t.Context(), values...)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]string{}
	note := func(name string, o map[string]any) { found[name], _, _ = unstructured.NestedString(o, "failurePolicy") }
	for _, o := range objects {
		if o.GroupVersionKind().Group != "admissionregistration.k8s.io" {
			continue
		}
		if o.GetKind() != "MutatingWebhookConfiguration" {
			spec, _, _ := unstructured.NestedMap(o.Object, "spec")
			note(o.GetKind()+" "+o.GetName(), spec)
			continue
		}
		hooks, _, _ := unstructured.NestedSlice(o.Object, "webhooks")
		for _, h := range hooks {
			hook := h.(map[string]any)
			note(hook["name"].(string), hook)
			if bundle, ok, _ := unstructured.NestedFieldNoCopy(hook, "clientConfig", "caBundle"); ok {
				t.Errorf("webhook %s has the caBundle %v, which an upgrade would put back", hook["name"], bundle)
			}
		}
	}
	return found
}

func TestModes(t *testing.T) {
	hooks := map[string]string{
		"pods.exclude.edgehub.io": "Fail", "daemonsets.exclude.edgehub.io": "Fail", "workloads.exclude.edgehub.io": "Ignore", "pods.autonomy.edgehub.io": "Ignore",
	}
	policies := map[string]string{
		"MutatingAdmissionPolicy edgehub-exclude-pods": "Fail", "MutatingAdmissionPolicyBinding edgehub-exclude-pods": "",
		"MutatingAdmissionPolicy edgehub-exclude-daemonsets": "Fail", "MutatingAdmissionPolicyBinding edgehub-exclude-daemonsets": "",
	}
	warner := map[string]string{"ValidatingAdmissionPolicy edgehub-exclude": "Ignore", "ValidatingAdmissionPolicyBinding edgehub-exclude": ""}
	nodes := map[string]string{"ValidatingAdmissionPolicy edgehub-nodes": "Fail", "ValidatingAdmissionPolicyBinding edgehub-nodes": ""}
	join := func(all ...map[string]string) map[string]string {
		found := map[string]string{}
		for _, m := range all {
			for k, v := range m {
				found[k] = v
			}
		}
		return found
	}
	open := map[string]string{"pods.exclude.edgehub.io": "Ignore", "daemonsets.exclude.edgehub.io": "Ignore"}
	openPolicies := map[string]string{"MutatingAdmissionPolicy edgehub-exclude-pods": "Ignore", "MutatingAdmissionPolicy edgehub-exclude-daemonsets": "Ignore"}
	for _, c := range []struct {
		name   string
		values []string
		want   map[string]string
	}{
		{"default", nil, join(hooks, nodes)},
		{"policy", []string{"admission.mode=policy"}, join(policies, warner, nodes)},
		{"both", []string{"admission.mode=both"}, join(hooks, policies, nodes)},
		{"ignored failures", []string{"admission.mode=both", "admission.failurePolicy=Ignore"}, join(hooks, policies, open, openPolicies, nodes)},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(c.want, failurePolicies(t, c.values...)); diff != "" {
				t.Errorf("failure policies (-want +got):\n%s", diff)
			}
		})
	}
}

// TestModeNeedsAPI: where the API server has no MutatingAdmissionPolicy, the chart says so.
func TestModeNeedsAPI(t *testing.T) {
	bin, err := controlplane.Binaries(t.Context(), "helm")
	if err != nil {
		t.Fatal(err)
	}
	root, err := controlplane.Root()
	if err != nil {
		t.Fatal(err)
	}
	for mode, wantError := range map[string]bool{"webhook": false, "policy": true, "both": true} {
		args := []string{"template", "edgehub", filepath.Join(root, "charts", "edgehub"), "--namespace=edgehub-system", "--kube-version=1.35.0", "--set=admission.mode=" + mode}
		out, err := exec.CommandContext(t.Context(), filepath.Join(bin, "helm"), args...).CombinedOutput()
		if got := err != nil; got != wantError {
			t.Errorf("helm template with mode %s: %v, want an error: %v", mode, err, wantError)
		}
		if wantError && !slices.ContainsFunc(strings.Split(string(out), "\n"), func(line string) bool {
			return strings.Contains(line, "admission.mode "+mode) && strings.Contains(line, "Kubernetes 1.36") && strings.Contains(line, "use admission.mode webhook")
		}) {
			t.Errorf("helm template with mode %s says %s", mode, out)
		}
	}
}
