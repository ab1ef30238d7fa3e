// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package nodepools

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
)

type spec = map[string]any

// rules are what the CRD accepts and refuses.
func (s *scene) rules() {
	const long = "a123456789.123456789-123456789.123456789-123456789.123456789-123"
	dry := []string{metav1.DryRunAll}
	for _, tc := range []struct {
		name, pool string
		spec       spec
		refused    string // "": accepted
	}{
		{"nothing said", "p", spec{}, ""},
		{"edge", "p", spec{"type": "Edge"}, ""},
		{"cloud", "p", spec{"type": "Cloud"}, ""},
		{"another type", "p", spec{"type": "edge"}, "spec.type"},
		{"host network", "p", spec{"type": "Edge", "hostNetwork": true}, ""},
		{"host network, type by default", "p", spec{"hostNetwork": true}, ""},
		{"host network in the cloud", "p", spec{"type": "Cloud", "hostNetwork": true}, "a Cloud pool cannot be a host-network pool"},
		{"no host network in the cloud", "p", spec{"type": "Cloud", "hostNetwork": false}, ""},
		{"host network as a word", "p", spec{"hostNetwork": "true"}, "spec.hostNetwork"},
		{"longest name", long[:63], spec{}, ""},
		{"name too long", long, spec{}, "at most 63 characters"},
		{"name with capitals", "P", spec{}, "metadata.name"},
		{"all that OpenYurt has", "p", spec{
			"type": "Edge", "hostNetwork": true, "interConnectivity": true, "enableLeaderElection": true, "leaderElectionStrategy": "mark", "leaderReplicas": int64(3),
			"leaderNodeLabelSelector": spec{"a": "b"}, "labels": spec{"a.b/c": "d", "e": ""}, "annotations": spec{"a": "anything at all"},
			"taints":            []any{spec{"key": "k", "value": "v", "effect": "NoSchedule"}, spec{"key": "k", "effect": "NoExecute", "timeAdded": "2026-01-01T00:00:00Z"}},
			"poolScopeMetadata": []any{spec{"group": "", "version": "v1", "resource": "services"}, spec{"group": "discovery.k8s.io", "version": "v1", "kind": "EndpointSlice"}},
		}, ""},
		{"strategy", "p", spec{"leaderElectionStrategy": "first"}, "spec.leaderElectionStrategy"},
		{"taint without effect", "p", spec{"taints": []any{spec{"key": "k"}}}, "spec.taints[0].effect"},
		{"taint of no effect", "p", spec{"taints": []any{spec{"key": "k", "effect": "Never"}}}, "spec.taints[0].effect"},
		{"taint twice", "p", spec{"taints": []any{spec{"key": "k", "effect": "NoExecute"}, spec{"key": "k", "value": "v", "effect": "NoExecute"}}}, "Duplicate value"},
		{"value that is none of a label", "p", spec{"labels": spec{"a": "b c"}}, "spec.labels"},
	} {
		for _, version := range []schema.GroupVersionResource{v1beta1, v1beta2} {
			s.Run("create "+version.Version+" "+tc.name, func(t *testing.T) {
				p, err := s.dynamic.Resource(version).Create(t.Context(), newPool(version, tc.pool, tc.spec), metav1.CreateOptions{DryRun: dry, FieldValidation: "Strict"})
				s.in(t).wantRefused(err, tc.refused)
				if err != nil {
					return
				}
				got, _, _ := unstructured.NestedMap(p.Object, "spec")
				for field, value := range tc.spec { // none is lost
					if diff := cmp.Diff(value, got[field]); diff != "" {
						t.Errorf("spec.%s (-want +got):\n%s", field, diff)
					}
				}
				if got["type"] == nil || got["hostNetwork"] == nil {
					t.Errorf("spec = %v, want type and hostNetwork set", got)
				}
			})
		}
	}
	s.createPool("edge", spec{"labels": spec{"a": "b"}}, nil)
	s.createPool("cloud", spec{"type": "Cloud"}, nil)
	s.createPool("host", spec{"hostNetwork": true, "interConnectivity": true}, nil)
	for _, tc := range []struct{ name, pool, patch, refused string }{
		{"type", "edge", `{"spec":{"type":"Cloud"}}`, "the type of a pool cannot be changed"},
		{"type from what is set", "cloud", `{"spec":{"type":"Edge"}}`, "the type of a pool cannot be changed"},
		{"type to what holds without", "cloud", `{"spec":{"type":null}}`, "the type of a pool cannot be changed"},
		{"the same type", "edge", `{"spec":{"type":"Edge"}}`, ""},
		{"no spec any more", "cloud", `{"spec":null}`, "the type of a pool cannot be changed"},
		{"host network that was not set", "edge", `{"spec":{"hostNetwork":true}}`, "hostNetwork of a pool cannot be changed"},
		{"no host network, as it was without", "edge", `{"spec":{"hostNetwork":false}}`, ""},
		{"no host network any more", "host", `{"spec":{"hostNetwork":false}}`, "hostNetwork of a pool cannot be changed"},
		{"host network is no more set", "host", `{"spec":{"hostNetwork":null}}`, "hostNetwork of a pool cannot be changed"},
		{"the same host network", "host", `{"spec":{"hostNetwork":true}}`, ""},
		{"interConnectivity", "edge", `{"spec":{"interConnectivity":true}}`, "interConnectivity of a pool cannot be changed"},
		{"interConnectivity any more", "host", `{"spec":{"interConnectivity":null}}`, "interConnectivity of a pool cannot be changed"},
		{"labels", "edge", `{"spec":{"labels":{"a":"c"}}}`, ""},
		{"annotations of its own", "host", `{"metadata":{"annotations":{"a":"b"}}}`, ""},
		{"leaders", "host", `{"spec":{"leaderReplicas":2,"enableLeaderElection":true,"leaderElectionStrategy":"mark"}}`, ""},
	} {
		for _, version := range []schema.GroupVersionResource{v1beta1, v1beta2} {
			s.Run("update "+version.Version+" "+tc.name, func(t *testing.T) {
				_, err := s.dynamic.Resource(version).Patch(t.Context(), tc.pool, types.MergePatchType, []byte(tc.patch), metav1.PatchOptions{DryRun: dry})
				s.in(t).wantRefused(err, tc.refused)
			})
		}
	}
	for _, pool := range []string{"edge", "cloud", "host"} {
		old, err := s.dynamic.Resource(v1beta1).Get(s.Context(), pool, metav1.GetOptions{})
		s.must(err)
		is, err := s.dynamic.Resource(v1beta2).Get(s.Context(), pool, metav1.GetOptions{})
		s.must(err)
		if diff := cmp.Diff(is.Object["spec"], old.Object["spec"]); diff != "" {
			s.Errorf("spec of %s in v1beta1 is not that of v1beta2:\n%s", pool, diff)
		}
	}
	_, err := s.dynamic.Resource(v1beta2).Get(s.Context(), "edge", metav1.GetOptions{}, "status")
	s.must(err)
}

func (s *scene) wantRefused(err error, want string) {
	s.Helper()
	switch {
	case want == "" && err != nil:
		s.Errorf("refused: %v", err)
	case want != "" && (err == nil || !(apierrors.IsInvalid(err) || apierrors.IsBadRequest(err)) || !strings.Contains(err.Error(), want)):
		s.Errorf("error %v, want one that says %q", err, want)
	}
}

// canonical is a value as JSON, for a message and for comparing.
func canonical(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return err.Error()
	}
	return string(b)
}
