// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package exclude

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/edgehub/edgehub/test/admission/cases"
)

// A generator makes pods of what the API knows of affinity, and of fields that it does
// not know.
type generator struct{ *rand.Rand }

func (g generator) one(in int) bool { return g.IntN(in) == 0 }

func (g generator) requirement(keys ...string) map[string]any {
	r := map[string]any{"key": keys[g.IntN(len(keys))]}
	var values []any
	for range 1 + g.IntN(3) {
		values = append(values, []any{"true", "false", "a"}[g.IntN(3)])
	}
	switch operators := []string{"In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"}; operators[g.IntN(len(operators))] {
	case "In":
		r["operator"], r["values"] = "In", values
	case "NotIn":
		r["operator"], r["values"] = "NotIn", values
	case "Exists":
		r["operator"] = "Exists"
	case "DoesNotExist":
		r["operator"] = "DoesNotExist"
	case "Gt":
		r["operator"], r["values"] = "Gt", []any{"1"}
	case "Lt":
		r["operator"], r["values"] = "Lt", []any{"9"}
	}
	return g.unknown(r)
}

// unknown adds a field that nobody knows, now and then.
func (g generator) unknown(m map[string]any) map[string]any {
	if g.one(4) {
		m["future"] = map[string]any{"a": []any{1.5, nil, "x"}}
	}
	return m
}

func (g generator) term() map[string]any {
	t := map[string]any{}
	if !g.one(3) {
		all := []any{}
		for range g.IntN(3) {
			all = append(all, g.requirement(cases.Label, cases.Label, "zone"))
		}
		t["matchExpressions"] = all
	} else if g.one(3) {
		t["matchExpressions"] = nil
	}
	if g.one(3) {
		t["matchFields"] = []any{map[string]any{"key": "metadata.name", "operator": []any{"In", "NotIn"}[g.IntN(2)], "values": []any{"n1"}}}
	}
	return g.unknown(t)
}

// level returns what is at a level of the pod: nothing, null, or what inner adds to.
func (g generator) level(parent map[string]any, field string, inner func(map[string]any)) {
	switch g.IntN(8) {
	case 0:
	case 1:
		parent[field] = nil
	default:
		m := map[string]any{}
		inner(m)
		parent[field] = g.unknown(m)
	}
}

func (g generator) pod() map[string]any {
	spec := map[string]any{"containers": []any{}}
	g.level(spec, "affinity", func(a map[string]any) {
		if g.one(3) {
			a["podAntiAffinity"] = map[string]any{"future": true}
		}
		g.level(a, "nodeAffinity", func(n map[string]any) {
			if g.one(3) {
				n["preferredDuringSchedulingIgnoredDuringExecution"] = []any{map[string]any{"weight": 1.0, "preference": g.term()}}
			}
			g.level(n, "requiredDuringSchedulingIgnoredDuringExecution", func(s map[string]any) {
				terms := []any{}
				for range g.IntN(4) {
					terms = append(terms, g.term())
				}
				s["nodeSelectorTerms"] = terms
			})
		})
	})
	return map[string]any{"metadata": g.unknown(map[string]any{"annotations": map[string]any{cases.Annotation: "true"}}), "spec": g.unknown(spec)}
}

// allNodes are all that generated requirements can tell apart.
var allNodes = func() (all []*corev1.Node) {
	for _, name := range []string{"n1", "n2"} {
		for _, zone := range []string{"", "true", "false", "a", "5"} {
			for _, label := range []string{"", "true", "false", "a", "5"} {
				n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{}}}
				for key, value := range map[string]string{"zone": zone, cases.Label: label} {
					if value != "" {
						n.Labels[key] = value
					}
				}
				all = append(all, n)
			}
		}
	}
	return all
}()

// admits asks the scheduler's judgement: it returns the nodes, by number, that a pod may go
// to.
func admits(t *testing.T, object []byte, nodes []*corev1.Node) []bool {
	t.Helper()
	var p corev1.Pod
	if err := json.Unmarshal(object, &p); err != nil {
		t.Fatal(err)
	}
	affinity := nodeaffinity.GetRequiredNodeAffinity(&p)
	found := make([]bool, len(nodes))
	for i, n := range nodes {
		var err error
		if found[i], err = affinity.Match(n); err != nil {
			t.Fatalf("Match(%s, %s) = %v", object, n.Labels, err)
		}
	}
	return found
}

// lost returns what of a document is not in another any more. Lists may have grown.
func lost(was, is any, path string) []string {
	switch was := was.(type) {
	case map[string]any:
		now, ok := is.(map[string]any)
		if !ok {
			return []string{path}
		}
		var found []string
		for field := range maps.Keys(was) {
			if was[field] != nil {
				found = append(found, lost(was[field], now[field], path+"."+field)...)
			}
		}
		return found
	case []any:
		now, ok := is.([]any)
		if !ok || len(now) < len(was) {
			return []string{path}
		}
		var found []string
		for i := range was {
			found = append(found, lost(was[i], now[i], fmt.Sprintf("%s[%d]", path, i))...)
		}
		return found
	default:
		if !reflect.DeepEqual(was, is) {
			return []string{path}
		}
		return nil
	}
}

// checkRule: where a pod could go it can go afterwards, but for host-network nodes;
// nothing is lost, and a second pass changes nothing.
func checkRule(t *testing.T, seed uint64) {
	before, err := json.Marshal(generator{rand.New(rand.NewPCG(seed, 1))}.pod())
	if err != nil {
		t.Fatal(err)
	}
	r := &admissionv1.AdmissionRequest{Operation: admissionv1.Create, Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"}, Object: runtime.RawExtension{Raw: before}}
	v, err := judge(r, hosts)
	if err != nil {
		t.Fatalf("judge(%s) = %v", before, err)
	}
	after := apply(t, v, before)
	was, is := admits(t, before, allNodes), admits(t, after, allNodes)
	for i, n := range allNodes {
		if want := was[i] && n.Labels[cases.Label] != "true"; is[i] != want {
			t.Fatalf("node %v admits the pod afterwards = %v, want %v\nbefore: %s\nafter:  %s", n.Labels, is[i], want, before, after)
		}
	}
	if l := lost(decode(t, before), decode(t, after), ""); l != nil {
		t.Fatalf("lost: %v\nbefore: %s\nafter:  %s", l, before, after)
	}
	r.Object.Raw = after
	if again, err := judge(r, hosts); err != nil || len(again.patches) > 0 {
		t.Fatalf("judge(%s) = %v, %v, want no patches", after, again.patches, err)
	}
}

func TestRule(t *testing.T) {
	for seed := range uint64(400) {
		checkRule(t, seed)
	}
}

func FuzzRule(f *testing.F) {
	f.Add(uint64(1))
	f.Fuzz(checkRule)
}

// FuzzJudge: nothing that anybody sends is refused, panics, or is patched in a way that
// cannot be applied.
func FuzzJudge(f *testing.F) {
	all, err := cases.All()
	if err != nil {
		f.Fatal(err)
	}
	for _, c := range all {
		r := request(f, c, c.Object("default", "o"))
		f.Add(r.Resource.Group, r.Resource.Resource, r.Object.Raw, r.OldObject.Raw)
	}
	f.Fuzz(func(t *testing.T, group, resource string, object, old []byte) {
		r := &admissionv1.AdmissionRequest{Operation: admissionv1.Create, Resource: metav1.GroupVersionResource{Group: group, Resource: resource}}
		r.Object.Raw, r.OldObject.Raw = object, old
		if len(old) > 0 {
			r.Operation = admissionv1.Update
		}
		v, err := judge(r, hosts)
		if err != nil || !json.Valid(object) {
			return
		}
		r.Object.Raw = apply(t, v, object)
		if again, err := judge(r, hosts); err != nil || len(again.patches) > 0 {
			t.Fatalf("judge(%s) = %v, %v, want no patches", r.Object.Raw, again.patches, err)
		}
	})
}
