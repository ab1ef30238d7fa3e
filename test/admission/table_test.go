// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	jsonpatch "github.com/evanphx/json-patch/v5"
	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"

	"github.com/edgehub/edgehub/test/admission/cases"
)

// nameOf is the object of a case.
func nameOf(i int) string { return fmt.Sprintf("case-%03d", i) }

// createOld makes what is there before anybody looks at pods.
func (r *rig) createOld(table []cases.Case) {
	for i, c := range table {
		for _, mode := range modes {
			if old := c.OldObject(mode, nameOf(i)); old != nil {
				if _, err := r.dynamic.Resource(c.Resource()).Namespace(mode).Create(r.Context(), old, metav1.CreateOptions{}); err != nil {
					r.Fatalf("case %q: %v", c.Name, err)
				}
			}
		}
	}
}

// request sends the request of a case.
func (r *rig) request(ctx context.Context, c cases.Case, namespace, name string, dry bool) answer {
	old := c.OldObject(namespace, name)
	if old == nil {
		return r.create(ctx, c, namespace, name, dry)
	}
	return r.ask(ctx, c, namespace, func(ctx context.Context, api dynamic.ResourceInterface) (*unstructured.Unstructured, error) {
		was, err := old.MarshalJSON()
		if err != nil {
			return nil, err
		}
		is, err := c.Object(namespace, name).MarshalJSON()
		if err != nil {
			return nil, err
		}
		patch, err := jsonpatch.CreateMergePatch(was, is)
		if err != nil {
			return nil, err
		}
		return api.Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{DryRun: dryRun(dry)})
	})
}

// bare is an object without what differs from one namespace, moment and attempt to the
// next.
func bare(t *testing.T, o *unstructured.Unstructured) map[string]any {
	t.Helper()
	text, err := o.MarshalJSON()
	if err != nil {
		t.Fatal(err)
	}
	if uid := string(o.GetUID()); uid != "" {
		text = []byte(strings.ReplaceAll(string(text), uid, "UID"))
	}
	var m map[string]any
	if err := json.Unmarshal(text, &m); err != nil {
		t.Fatal(err)
	}
	delete(m, "status")
	metadata := m["metadata"].(map[string]any)
	for _, field := range []string{"creationTimestamp", "generation", "managedFields", "namespace", "resourceVersion"} {
		delete(metadata, field)
	}
	if annotations, ok := metadata["annotations"].(map[string]any); ok {
		delete(annotations, "deployment.kubernetes.io/revision")
	}
	if spec, ok := m["spec"].(map[string]any); ok {
		delete(spec, "volumes") // the token's has a random name
		for _, c := range append(slices.Clone(list(spec["containers"])), list(spec["initContainers"])...) {
			delete(c.(map[string]any), "volumeMounts")
		}
	}
	return m
}

func list(v any) []any {
	l, _ := v.([]any)
	return l
}

// normal is a value as JSON has it.
func normal(t *testing.T, v any) (n any) {
	t.Helper()
	text, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// testCase sends the request of a case in one mode, and returns what becomes of it.
func (r *rig) testCase(t *testing.T, c cases.Case, mode, name string) map[string]any {
	ctx := t.Context()
	dry, got := r.request(ctx, c, mode, name, true), r.request(ctx, c, mode, name, false)
	if c.Refused != "" {
		for _, a := range []answer{dry, got} {
			if a.err == nil || !strings.Contains(a.err.Error(), c.Refused) {
				t.Errorf("%s: err = %v, want %q", mode, a.err, c.Refused)
			}
		}
		return nil
	}
	if dry.err != nil || got.err != nil {
		t.Errorf("%s: err = %v, dry run %v", mode, got.err, dry.err)
		return nil
	}
	if diff := cmp.Diff(normal(t, c.WantAffinity()), normal(t, c.Affinity(got.object.Object))); diff != "" {
		t.Errorf("%s: affinity (-want +got):\n%s", mode, diff)
	}
	want := c.Warnings
	if mode != webhook && c.PolicyWarnings != nil {
		want = *c.PolicyWarnings
	}
	if mode == both { // from both, and client-go shows the policy's in its own words
		got.warnings, dry.warnings = slices.Compact(got.warnings), slices.Compact(dry.warnings)
		want = c.Warnings
	}
	want = append([]string{}, want...)
	slices.Sort(want)
	if diff := cmp.Diff(want, got.warnings); diff != "" {
		t.Errorf("%s: warnings (-want +got):\n%s", mode, diff)
	}
	is := bare(t, got.object)
	if diff := cmp.Diff(is, bare(t, dry.object)); diff != "" {
		t.Errorf("%s: a dry run differs (-real +dry):\n%s", mode, diff)
	}
	if diff := cmp.Diff(got.warnings, dry.warnings); diff != "" {
		t.Errorf("%s: warnings of a dry run differ (-real +dry):\n%s", mode, diff)
	}
	r.testAgain(t, c, mode, name, got.object)
	return is
}

// testAgain sends what has become of an object: nothing more may happen, and who has been
// told is not told again.
func (r *rig) testAgain(t *testing.T, c cases.Case, mode, name string, object *unstructured.Unstructured) {
	var again answer
	if c.Old != nil {
		if again = r.request(t.Context(), c, mode, name, true); len(again.warnings) > 0 {
			t.Errorf("%s: a second time there are warnings: %v", mode, again.warnings)
		}
	} else {
		again = r.ask(t.Context(), c, mode, func(ctx context.Context, api dynamic.ResourceInterface) (*unstructured.Unstructured, error) {
			second := c.Object(mode, name+"-again")
			c.SetAffinity(second.Object, c.Affinity(object.Object))
			return api.Create(ctx, second, metav1.CreateOptions{DryRun: dryRun(true)})
		})
	}
	if again.err != nil {
		t.Errorf("%s: a second time: %v", mode, again.err)
		return
	}
	if diff := cmp.Diff(normal(t, c.Affinity(object.Object)), normal(t, c.Affinity(again.object.Object))); diff != "" {
		t.Errorf("%s: affinity changes the second time (-once +twice):\n%s", mode, diff)
	}
}

// testTable: each case has the same effect in all modes, the one that the table has.
func (r *rig) testTable(t *testing.T, table []cases.Case) {
	for i, c := range table {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			name := nameOf(i)
			first := r.testCase(t, c, webhook, name)
			for _, mode := range []string{policy, both} {
				if diff := cmp.Diff(first, r.testCase(t, c, mode, name)); diff != "" && !t.Failed() {
					t.Errorf("webhook and %s differ (-webhook +%s):\n%s", mode, mode, diff)
				}
			}
		})
	}
}
