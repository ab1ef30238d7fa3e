// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
)

// TestGolden compares what is rendered with testdata/golden. What is the same by default
// is there but by name, and the CRD is charts/edgehub/files/nodepools.yaml.
func TestGolden(t *testing.T) {
	t.Parallel()
	sets := valueSets(t)
	byDefault, err := render(t, "--values", sets["default"])
	if err != nil {
		t.Fatal(err)
	}
	known := documents(byDefault)
	for name, values := range sets {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			manifests, err := render(t, "--values", values)
			if err != nil {
				t.Fatal(err)
			}
			var all strings.Builder
			for _, d := range documents(manifests) {
				o := objects(t, d)[0]
				switch {
				case name != "default" && slices.Contains(known, d):
					fmt.Fprintf(&all, "---\n# as in default.yaml: %s\n", describe(o))
				case o.GetKind() == "CustomResourceDefinition":
					fmt.Fprintf(&all, "---\n# %s, annotations %v\n", describe(o), o.GetAnnotations())
				default:
					fmt.Fprintf(&all, "---\n%s\n", d)
				}
			}
			golden(t, name+".yaml", all.String())
		})
	}
}

// documents takes manifests apart, as text.
func documents(manifests string) []string {
	var all []string
	for d := range strings.SplitSeq("\n"+manifests, "\n---\n") {
		if d = strings.TrimSpace(d); d != "" {
			all = append(all, d)
		}
	}
	return all
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", "golden", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s; if it is meant so, run go test ./test/chart -run Golden -update (-want +got):\n%s", file, diff)
	}
}

// TestLint has helm look at each set of values.
func TestLint(t *testing.T) {
	t.Parallel()
	for name, values := range valueSets(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if out, err := helm(t.Context(), t, "lint", "--strict", "--kube-version", "1.36.3", "--values", values, chartDir(t)); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// TestRefused is values that are refused, by a message that names them.
func TestRefused(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ set, want string }{
		{"webhok.enabled=true", "'webhok'"},
		{"webhook.replica=3", "'replica'"},
		{"webhook.replicas=0", "webhook/replicas"},
		{"webhook.ports.admission=70000", "webhook/ports/admission"},
		{"webhook.extraArgs={v=4}", "webhook/extraArgs/0"},
		{"webhook.podDisruptionBudget.maxUnavailable=half", "webhook/podDisruptionBudget/maxUnavailable"},
		{"webhook.networkPolicy.apiServerCIDRs={192.0.2.1}", "webhook/networkPolicy/apiServerCIDRs/0"},
		{"image.registry=https://registry.example.com", "image/registry"},
		{"image.repository=Edgehub", "image/repository"},
		{"image.digest=sha256:abc", "image/digest"},
		{"image.pullPolicy=Sometimes", "image/pullPolicy"},
		{"admission.mode=off", "admission/mode"},
		{"admission.failurePolicy=fail", "admission/failurePolicy"},
		{"admission.timeoutSeconds=10", "admission/timeoutSeconds"},
		{"admission.exemptNamespaces={Kube}", "admission/exemptNamespaces/0"},
		{"admission.clientCA=ca.crt", "admission/clientCA"},
		{"admission.clientNames={a}", "admission/clientCA"},
		{"certificates.mode=none", "certificates/mode"},
		{"certificates.lifetime=1y", "certificates/lifetime"},
		{"certificates.issuerRef.kind=Issuer", "certificates/issuerRef"},
		{"nodePools.mode=maybe", "nodePools/mode"},
		{"nodePools.crd.install=yes", "nodePools/crd/install"},
		{"autonomy.enabled=yes", "autonomy/enabled"},
		{"approver.ips={here}", "approver/ips/0"},
		{"hub.mode=pod", "hub/mode"},
		{"hub.mode=plain", "hub/serverURLs"},
		{"hub.serverURLs={http://192.0.2.1:6443}", "hub/serverURLs/0"},
		{"hub.flags.data-dir=/data", "hub/flags/data-dir"},
		{"hub.flags.--encrypt-all=true", "hub/flags"},
		{"hub.paths.data=var/lib/edgehub", "hub/paths/data"},
		{"hub.updateStrategy.type=Recreate", "hub/updateStrategy/type"},
		{"hub.installer.kubeletRestart=ssh", "hub/installer/kubeletRestart"},
		{"hub.installer.interval=5", "hub/installer/interval"},
		{"metrics.podMonitor.interval=often", "metrics/podMonitor/interval"},
		{"uninstall.timeoutSeconds=1", "uninstall/timeoutSeconds"},
	} {
		t.Run(tt.set, func(t *testing.T) {
			t.Parallel()
			_, err := render(t, "--set", tt.set)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("helm template --set %s: %v, want an error with %s", tt.set, err, tt.want)
			}
		})
	}
}

// TestPolicyNeedsItsAPI refuses admission policies where the API server has none.
func TestPolicyNeedsItsAPI(t *testing.T) {
	t.Parallel()
	for mode, refused := range map[string]bool{"webhook": false, "policy": true, "both": true} {
		_, err := helm(t.Context(), t, "template", chartDir(t), "--kube-version", "1.35.0", "--set", "admission.mode="+mode,
			"--api-versions", "admissionregistration.k8s.io/v1/MutatingWebhookConfiguration")
		if got := err != nil && strings.Contains(err.Error(), "MutatingAdmissionPolicy"); got != refused {
			t.Errorf("admission.mode=%s without MutatingAdmissionPolicy: refused = %v, want %v (%v)", mode, got, refused, err)
		}
	}
}

// TestKubernetesVersion refuses clusters that are too old.
func TestKubernetesVersion(t *testing.T) {
	t.Parallel()
	for version, refused := range map[string]bool{"1.29.9": true, "1.30.0-gke.1": false} {
		_, err := helm(t.Context(), t, "template", chartDir(t), "--kube-version", version)
		if got := err != nil && strings.Contains(err.Error(), ">=1.30.0-0"); got != refused {
			t.Errorf("Kubernetes %s: refused = %v, want %v (%v)", version, got, refused, err)
		}
	}
}

// TestNames keeps names within Kubernetes' limits and apart from each other.
func TestNames(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 53) // the longest release
	manifests, err := helm(t.Context(), t, append([]string{"template", long, chartDir(t)}, forCluster...)...)
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, o := range objects(t, manifests) {
		if len(o.GetName()) > 63 {
			t.Errorf("%s: %d characters, want 63 or fewer", describe(o), len(o.GetName()))
		}
		if seen[o.GetNamespace()+describe(o)] {
			t.Errorf("%s is there twice", describe(o))
		}
		seen[o.GetNamespace()+describe(o)] = true
	}
}

// TestEveryObject is what holds for all that is ever rendered.
func TestEveryObject(t *testing.T) {
	t.Parallel()
	for name, values := range valueSets(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			manifests, err := render(t, "--values", values)
			if err != nil {
				t.Fatal(err)
			}
			for _, o := range objects(t, manifests) {
				checkLabels(t, o)
				if slices.Contains([]string{"Role", "ClusterRole"}, o.GetKind()) {
					checkRules(t, o)
				}
				if template, ok, _ := unstructured.NestedMap(o.Object, "spec", "template"); ok {
					var pod corev1.PodTemplateSpec
					if err := runtime.DefaultUnstructuredConverter.FromUnstructured(template, &pod); err != nil {
						t.Fatal(err)
					}
					checkPod(t, describe(o), pod)
				}
			}
		})
	}
}

func checkLabels(t *testing.T, o *unstructured.Unstructured) {
	t.Helper()
	for k, want := range map[string]string{"app.kubernetes.io/instance": release, "app.kubernetes.io/managed-by": "Helm", "app.kubernetes.io/part-of": "edgehub"} {
		if got := o.GetLabels()[k]; got != want {
			t.Errorf("%s: label %s = %q, want %q", describe(o), k, got, want)
		}
	}
	if ns := o.GetNamespace(); ns != "" && ns != namespace && !strings.Contains(o.GetName(), "-events") {
		t.Errorf("%s is in namespace %s", describe(o), ns)
	}
}

// checkRules refuses rights that are wider than anybody needs.
func checkRules(t *testing.T, o *unstructured.Unstructured) {
	t.Helper()
	var role rbacv1.ClusterRole
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &role); err != nil {
		t.Fatal(err)
	}
	for _, r := range role.Rules {
		if all := slices.Concat(r.Verbs, r.APIGroups, r.Resources, r.NonResourceURLs); slices.ContainsFunc(all, func(s string) bool { return strings.Contains(s, "*") }) {
			t.Errorf("%s: %v has a wildcard", describe(o), r)
		}
		for _, verb := range []string{"escalate", "bind", "impersonate", "deletecollection"} {
			if slices.Contains(r.Verbs, verb) {
				t.Errorf("%s: %v has %s", describe(o), r, verb)
			}
		}
		if o.GetKind() == "ClusterRole" && slices.Contains(r.Resources, "secrets") {
			t.Errorf("%s: %v is for Secrets of all namespaces", describe(o), r)
		}
	}
}

// checkPod is what holds for all pods of the chart.
func checkPod(t *testing.T, of string, pod corev1.PodTemplateSpec) {
	t.Helper()
	spec := pod.Spec
	if s := spec.SecurityContext; s == nil || s.SeccompProfile == nil || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("%s: no seccomp profile", of)
	}
	if s := spec.SecurityContext; !strings.HasPrefix(of, "DaemonSet/") && (s == nil || s.RunAsNonRoot == nil || !*s.RunAsNonRoot) {
		t.Errorf("%s may run as root", of)
	}
	if !strings.HasPrefix(spec.PriorityClassName, "system-") {
		t.Errorf("%s: priority class %q, want one of the system's", of, spec.PriorityClassName)
	}
	for _, c := range spec.Containers {
		s := c.SecurityContext
		if s == nil || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation ||
			s.Capabilities == nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || s.Privileged != nil {
			t.Errorf("%s: security context of container %s: %v", of, c.Name, s)
		}
		if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() || c.Resources.Limits.Memory().IsZero() {
			t.Errorf("%s: resources of container %s: %v", of, c.Name, c.Resources)
		}
		if c.ReadinessProbe == nil && !strings.HasPrefix(of, "Job/") {
			t.Errorf("%s: container %s has no readiness probe", of, c.Name)
		}
	}
}
