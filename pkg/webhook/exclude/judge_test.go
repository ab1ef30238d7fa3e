// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package exclude

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"github.com/google/go-cmp/cmp"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/edgehub/edgehub/test/admission/cases"
)

var allWarnings = []warning{
	badValue, misplaced, daemonSetPod, hostNetwork, nodeSelector, poolSelector, nodeAffinity, nodeName, tooLate, leftBehind, unreadable,
}

// request makes the case's, for the object given.
func request(t testing.TB, c cases.Case, object *unstructured.Unstructured) *admissionv1.AdmissionRequest {
	t.Helper()
	encode := func(o *unstructured.Unstructured) runtime.RawExtension {
		b, err := o.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		return runtime.RawExtension{Raw: b}
	}
	r := &admissionv1.AdmissionRequest{Operation: admissionv1.Create, Resource: metav1.GroupVersionResource(c.Resource()), Object: encode(object)}
	if old := c.OldObject("default", "o"); old != nil {
		r.Operation, r.OldObject = admissionv1.Update, encode(old)
	}
	return r
}

// apply does to an object what the API server does.
func apply(t testing.TB, v verdict, object []byte) []byte {
	t.Helper()
	if len(v.patches) == 0 {
		return object
	}
	b, err := json.Marshal(v.patches)
	if err != nil {
		t.Fatal(err)
	}
	p, err := jsonpatch.DecodePatch(b)
	if err != nil {
		t.Fatal(err)
	}
	if object, err = p.Apply(object); err != nil {
		t.Fatalf("Apply(%s) = %v", b, err)
	}
	return object
}

func decode(t testing.TB, b []byte) (o map[string]any) {
	t.Helper()
	if err := json.Unmarshal(b, &o); err != nil {
		t.Fatal(err)
	}
	return o
}

func reasons(v verdict) (found []string) {
	for _, w := range v.warnings {
		found = append(found, w.reason)
	}
	return found
}

func hosts(pool string) bool { return pool == cases.HostPool }

// TestJudge holds the rule to the table that webhook and policy are held to as well.
func TestJudge(t *testing.T) {
	all, err := cases.All()
	if err != nil {
		t.Fatal(err)
	}
	if len(all) < 100 {
		t.Fatalf("All() = %d cases", len(all))
	}
	for _, c := range all {
		t.Run(c.Name, func(t *testing.T) {
			r := request(t, c, c.Object("default", "o"))
			v, err := judge(r, hosts)
			if err != nil {
				t.Fatal(err)
			}
			after := apply(t, v, r.Object.Raw)
			got, want := decode(t, after), decode(t, r.Object.Raw)
			if diff := cmp.Diff(c.WantAffinity(), c.Affinity(got)); diff != "" {
				t.Errorf("affinity (-want +got):\n%s", diff)
			}
			// Nothing else: with the affinity put back, the object is the one that was sent.
			if len(v.patches) > 0 {
				c.SetAffinity(got, nil)
				c.SetAffinity(want, nil)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("but for the affinity (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.Warnings, reasons(v)); diff != "" {
				t.Errorf("warnings (-want +got):\n%s", diff)
			}
			r.Object.Raw = after
			if again, err := judge(r, hosts); err != nil || len(again.patches) > 0 {
				t.Errorf("judge(what it has patched) = %v, %v, want no patches", again.patches, err)
			}
		})
	}
}

func TestJudgeLeavesAlone(t *testing.T) {
	marked := []byte(`{"metadata":{"annotations":{"apps.openyurt.io/exclude-host-network-pool":"true"}},"spec":{}}`)
	pods := metav1.GroupVersionResource{Version: "v1", Resource: "pods"}
	for _, c := range []struct {
		name string
		r    admissionv1.AdmissionRequest
	}{
		{"a subresource", admissionv1.AdmissionRequest{Operation: admissionv1.Create, Resource: pods, SubResource: "binding"}},
		{"a deletion", admissionv1.AdmissionRequest{Operation: admissionv1.Delete, Resource: pods}},
		{"a connection", admissionv1.AdmissionRequest{Operation: admissionv1.Connect, Resource: pods}},
		{"pods of another group", admissionv1.AdmissionRequest{Operation: admissionv1.Create, Resource: metav1.GroupVersionResource{Group: "metrics.k8s.io", Version: "v1beta1", Resource: "pods"}}},
		{"DaemonSets of another group", admissionv1.AdmissionRequest{Operation: admissionv1.Create, Resource: metav1.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "daemonsets"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.r.Object.Raw = marked
			if v, err := judge(&c.r, hosts); err != nil || len(v.patches) > 0 {
				t.Errorf("judge(%s) = %v, %v, want no patches", c.name, v.patches, err)
			}
		})
	}
}

func TestJudgeUnreadable(t *testing.T) {
	kruise := metav1.GroupVersionResource{Group: kruiseGroup, Version: "v1beta1", Resource: "daemonsets"}
	for _, raw := range []string{``, `[]`, `{"metadata":3}`, `{"spec":{"template":{"spec":{"nodeSelector":[]}}}}`, `{"spec":{"template":{"spec":{"affinity":{"nodeAffinity":"x"}}}}}`} {
		r := admissionv1.AdmissionRequest{Operation: admissionv1.Create, Resource: kruise, Object: runtime.RawExtension{Raw: []byte(raw)}}
		if v, err := judge(&r, hosts); err == nil {
			t.Errorf("judge(%s) = %v, nil, want an error", raw, v)
		}
	}
	for _, raw := range []string{`{}`, `{"spec":null}`, `{"spec":[]}`, `{"spec":{"template":"x"}}`, `{"spec":{"template":{}}}`} {
		r := admissionv1.AdmissionRequest{Operation: admissionv1.Create, Resource: kruise, Object: runtime.RawExtension{Raw: []byte(raw)}}
		if v, err := judge(&r, hosts); err != nil || len(v.patches) > 0 || len(v.warnings) > 0 {
			t.Errorf("judge(%s) = %v, %v, want nothing", raw, v, err)
		}
	}
}

// TestWarnings: they are short, say what to do, and are the same in the chart's policy.
func TestWarnings(t *testing.T) {
	policy, err := os.ReadFile("../../../charts/edgehub/templates/admission/policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if len(allWarnings) != len(cases.Warnings) {
		t.Errorf("%d warnings, the table has %d", len(allWarnings), len(cases.Warnings))
	}
	for _, w := range allWarnings {
		if len(w.text) > 120 {
			t.Errorf("warning %s has %d characters, more than 120", w.reason, len(w.text))
		}
		if want := cases.Warnings[w.reason]; w.text != want {
			t.Errorf("warning %s = %q, want %q", w.reason, w.text, want)
		}
		if _, do, ok := strings.Cut(w.text, ": "); !ok || do == "" {
			t.Errorf("warning %s does not say what to do: %q", w.reason, w.text)
		}
		if w == poolSelector || w == unreadable {
			continue // these need more than the object
		}
		if !strings.Contains(string(policy), w.text) {
			t.Errorf("the chart's policy lacks the warning %q", w.text)
		}
	}
}
