// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cel

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/filter"
	"github.com/edgehub/edgehub/pkg/filter/filtertest"
)

const (
	pod = `{"kind":"Pod","apiVersion":"v1","metadata":{"name":"p","namespace":"ns","uid":"1","labels":{"b":"2","a":"1","c":"3"},` +
		`"managedFields":[{"manager":"m","fieldsV1":{"f:z":{},"f:a":{".":{}}}}]},` +
		`"spec":{"containers":[{"name":"c","image":"i:1","resources":{"requests":{"cpu":"100m"}}},{"name":"d","image":"i:2","resources":{}}],"nodeName":"n1"},"status":{"phase":"Running"}}`
	widget = `{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"w","namespace":"ns"},"spec":{"size":3,"ratio":0.5,"list":[{"a":1},{"a":2}],"map":{"z":1,"y":"x"},"none":null}}`
	secret = `{"kind":"Secret","apiVersion":"v1","metadata":{"name":"s","namespace":"ns"},"data":{"k":"aHVudGVyMg=="},"type":"Opaque"}`
)

// objects returns what a GET answered, in JSON and, if there is one, in protobuf.
func objects(t testing.TB, text string) (list []*filter.Object) {
	t.Helper()
	shape, bare, err := codec.DecodeObject(codec.Representation{}, []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	list = append(list, filter.NewObject(shape, bare))
	typed, err := filter.NewObject(shape, bare).Decode()
	if err != nil {
		t.Fatal(err)
	}
	if m, ok := typed.(interface{ Marshal() ([]byte, error) }); ok {
		wire, err := m.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		shape.Protobuf = true
		list = append(list, filter.NewObject(shape, wire))
	}
	return list
}

// encoding is for messages.
func encoding(o *filter.Object) string { return o.Shape().Representation.String() }

// field returns a field of the object as it was decoded, "-" if there is none.
func field(t *testing.T, o *filter.Object, path string) string {
	t.Helper()
	decoded, err := o.Decode()
	if err != nil {
		t.Fatal(err)
	}
	node, err := toMap(decoded, o.Shape())
	if err != nil {
		t.Fatal(err)
	}
	steps, err := parsePath(path)
	if err != nil {
		t.Fatal(err)
	}
	var v any = node
	for _, s := range steps {
		switch at := v.(type) {
		case map[string]any:
			var ok bool
			if v, ok = at[s.key]; !ok {
				return "-"
			}
		case []any:
			v = at[s.index]
		}
	}
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestMatch(t *testing.T) {
	for _, tc := range []struct {
		object, match string
		want          bool
	}{
		{pod, `true`, true},
		{pod, `object.kind == "Pod" && object.apiVersion == "v1"`, true},
		{pod, `object.metadata.name == "p" && object.metadata.namespace == "ns"`, true},
		{pod, `object.metadata.labels["a"] == "1"`, true},
		{pod, `object.metadata.?labels["zz"].orValue("") == ""`, true},
		{pod, `has(object.metadata.annotations) && object.metadata.annotations["a"] == "b"`, false},
		{pod, `object.metadata.annotations["a"] == "b" && false`, false},
		{pod, `object.spec.containers.exists(c, c.image.endsWith(":2"))`, true},
		{pod, `object.spec.containers.all(c, c.image.split(":")[1] == "1")`, false},
		{pod, `object.spec.containers[0].resources.requests.cpu == "100m"`, true},
		{pod, `object.spec.nodeName == node.name && node.pool == "shop"`, true},
		{pod, `sets.contains(["ns", "other"], [object.metadata.namespace])`, true},
		{pod, `[3, 1, 2].sort() == [1, 2, 3] && lists.range(3).size() == 3`, true},
		{pod, `"%s-%d".format([object.metadata.name, 1]).upperAscii() == "P-1"`, true},
		{pod, `object.metadata.name.matches("^p$")`, true},
		{pod, `timestamp("2026-01-02T03:04:05Z").getHours() == 3`, true},
		{pod, `has(object.spec.extraordinary)`, false},
		{pod, `object.metadata.labels.map(k, k) == ["a", "b", "c"]`, true},
		{widget, `object.kind == "Widget" && object.spec.size > 2.5 && object.spec.ratio < 1`, true},
		{widget, `object.spec.none == null && has(object.spec.none)`, true},
		{widget, `{"c": 1, "a": 2, "b": 3}.map(k, k).join("") == "abc"`, true},
		{widget, `{3: 1, 1: 2, 2: 3}.map(k, k) == [1, 2, 3]`, true},
		{widget, `{true: 1, false: 2, "a": 3, 2: 0}.map(k, string(k)).join("") == "falsetrue2a"`, true},
		{widget, `object.spec.list.filter(e, e.a == 2)[0].a == 2`, true},
		{widget, `optional.ofNonZeroValue(object.spec.map).hasValue() && !optional.ofNonZeroValue({}).hasValue()`, true},
	} {
		f := newFilter(t, Rule{Match: tc.match, Drop: true})
		want := filter.Keep
		if tc.want {
			want = filter.Drop
		}
		for _, o := range objects(t, tc.object) {
			if got, err := f.Apply(t.Context(), o); got != want || err != nil {
				t.Errorf("Apply(%s) of %s = %s, %v, want %s", encoding(o), tc.match, got, err, want)
			}
		}
	}
}

func TestSet(t *testing.T) {
	for _, tc := range []struct {
		object, path, value string
		want                string // the field's JSON after a Change; empty: Keep
	}{
		{pod, `metadata.labels["example.com/x"]`, `"y"`, `"y"`},
		{pod, `metadata.annotations["example.com/x"]`, `object.metadata.name + "-" + node.pool`, `"p-shop"`},
		{pod, `metadata.labels.a`, `"1"`, ""},
		{pod, `metadata.labels.a`, `null`, "-"},
		{pod, `metadata.labels`, `null`, "-"},
		{pod, `metadata.annotations.a.b`, `null`, ""},
		{pod, `spec.containers[1].image`, `"j:3"`, `"j:3"`},
		{pod, `spec.containers`, `object.spec.containers.filter(c, c.name != "c")`, `[{"image":"i:2","name":"d","resources":{}}]`},
		{pod, `spec.containers[0].resources.requests.cpu`, `"0.1"`, ""},
		{pod, `spec.containers[0].resources.requests.cpu`, `2`, `"2"`},
		{pod, `spec.terminationGracePeriodSeconds`, `30`, `30`},
		{pod, `spec.terminationGracePeriodSeconds`, `30.0`, `30`},
		{pod, `spec.terminationGracePeriodSeconds`, `null`, ""},
		{pod, `spec.activeDeadlineSeconds`, `uint(5)`, `5`},
		{pod, `spec.hostNetwork`, `false`, ""},
		{pod, `spec.tolerations`, `[{"key": "a", "tolerationSeconds": 5}]`, `[{"key":"a","tolerationSeconds":5}]`},
		{pod, `spec.nodeSelector`, `{}`, ""},
		{pod, `metadata.creationTimestamp`, `timestamp("2026-01-02T03:04:05Z")`, `"2026-01-02T03:04:05Z"`},
		{secret, `data.k`, `b"new"`, `"bmV3"`},
		{secret, `data.k2`, `object.data.k`, `"aHVudGVyMg=="`},
		{widget, `spec.new.map["a b"]`, `object.spec.map`, `{"y":"x","z":1}`},
		{widget, `spec.size`, `object.spec.size + 1`, `4`},
		{widget, `spec.size`, `3`, ""},
		{widget, `spec.size`, `null`, "-"},
		{widget, `spec.none`, `null`, "-"},
		{widget, `spec.none.a`, `1`, `1`},
		{widget, `spec.list[1].a`, `[1.5, true, null, duration("90s")]`, `[1.5,true,null,"90s"]`},
		{widget, `spec.list[1].a`, `null`, "-"},
	} {
		f := newFilter(t, Rule{Match: "true", Set: set(tc.path, tc.value)})
		for _, o := range objects(t, tc.object) {
			before, _ := o.Encode()
			want, wantField := filter.Change, tc.want
			if tc.want == "" {
				want, wantField = filter.Keep, field(t, o, tc.path)
			}
			got, err := f.Apply(t.Context(), o)
			if got != want || err != nil {
				t.Errorf("Apply(%s) with %s: %s = %s, %v, want %s", encoding(o), tc.path, tc.value, got, err, want)
				continue
			}
			if got := field(t, o, tc.path); got != wantField {
				t.Errorf("Apply(%s) with %s: %s made %s, want %s", encoding(o), tc.path, tc.value, got, wantField)
			}
			after, err := o.Encode()
			if err != nil {
				t.Fatal(err)
			}
			if changed := !bytes.Equal(before, after); changed != (want == filter.Change) {
				t.Errorf("Apply(%s) with %s: %s said %s and changed the bytes: %t", encoding(o), tc.path, tc.value, got, changed)
			}
		}
	}
}

// All values are of the object before the rule, the fields are set in order.
func TestSetInOrder(t *testing.T) {
	f := newFilter(t, Rule{Match: "true", Set: []Set{
		{"spec.size", "object.spec.size + 1"},
		{"spec.other", "object.spec.size + 1"},
		{"spec.map.z", "2"},
		{"spec.map", "{'z': 5}"},
		{"spec.map.q", "6"},
	}})
	o := objects(t, widget)[0]
	if v, err := f.Apply(t.Context(), o); v != filter.Change || err != nil {
		t.Fatalf("Apply() = %s, %v, want change", v, err)
	}
	want := `{"list":[{"a":1},{"a":2}],"map":{"q":6,"z":5},"none":null,"other":4,"ratio":0.5,"size":4}`
	if got := field(t, o, "spec"); got != want {
		t.Errorf("Apply() made %s, want %s", got, want)
	}
}

func TestApplyFails(t *testing.T) {
	for _, tc := range []struct {
		name, object string
		rule         Rule
		want         string
	}{
		{"no such key", pod, Rule{Match: `object.metadata.annotations["a"] == "b"`, Drop: true}, "match: 1:28: no such key"},
		{"no such key of an object", widget, Rule{Match: "true &&\n  object.spec.zone == 1", Drop: true}, "match: 2:14: no such key"},
		{"not bool after all", pod, Rule{Match: `object.metadata.name`, Drop: true}, "match: is string, not bool"},
		{"overload", pod, Rule{Match: `object.metadata.name > 5`, Drop: true}, "match: 1:22: no such overload"},
		{"index", pod, Rule{Match: `object.spec.containers[7].name == "a"`, Drop: true}, "match: 1:26: index out of bounds"},
		{"division", widget, Rule{Match: `1 / (object.spec.size - 3) == 1`, Drop: true}, "match: 1:3: division by zero"},
		{"a value in CEL's message", secret, Rule{Match: `int(object.data.k) == 1`, Drop: true}, "match: 1:4: type conversion error"},
		{"a key in CEL's message", secret, Rule{Match: `object[object.data.k] == 1`, Drop: true}, "match: 1:7: no such key"},
		{"cost", widget, Rule{Match: `lists.range(400).all(a, lists.range(400).all(b, a + b >= 0))`, Drop: true}, "match: costs more than 100000 units"},
		{"cost of format", widget, Rule{Match: `lists.range(4000).all(a, "%s%s%s%s".format([object, object, object, object]) != "")`, Drop: true}, "match: costs more than 100000 units"},
		{"value", pod, Rule{Match: "true", Set: set("spec.nodeName", "object.spec.zone")}, "set[0].value: 1:12: no such key"},
		{"second value", pod, Rule{Match: "true", Set: []Set{{"spec.nodeName", "''"}, {"spec.hostname", "dyn(int)"}}}, "set[1].value: is or holds type"},
		{"optional inside", widget, Rule{Match: "true", Set: set("spec.a", "[object.?spec]")}, "set[0].value: is or holds optional_type"},
		{"key of a map", widget, Rule{Match: "true", Set: set("spec.a", "{1: 2}")}, "set[0].value: has a key that is int"},
		{"not a number", widget, Rule{Match: "true", Set: set("spec.a", "0.0 / 0.0")}, "set[0].value: is not a number"},
		{"uint", widget, Rule{Match: "true", Set: set("spec.a", "18446744073709551615u")}, "set[0].value: is a number that is too large"},
		{"large value", widget, Rule{Match: "true", Set: set("spec.a", "lists.range(4000).map(i, lists.range(1000))")}, "set[0].value: costs more"},
		{"large value for nothing", widget, Rule{Match: "true", Set: set("spec.a", "[lists.range(2000)].map(l, lists.range(2000).map(i, l))[0]")}, "set[0].value: is larger than"},
		{"element", pod, Rule{Match: "true", Set: set("spec.containers[2].image", "''")}, "set[0].path: there is no element 2"},
		{"element of a map", pod, Rule{Match: "true", Set: set("spec[0]", "''")}, "set[0].path: there is no element 0"},
		{"removed element", pod, Rule{Match: "true", Set: set("spec.containers[1]", "null")}, "set[0].path: element 1 cannot be removed"},
		{"field of a string", pod, Rule{Match: "true", Set: set("spec.nodeName.a", "''")}, "set[0].path: a lies in what is no map"},
		{"unknown field", pod, Rule{Match: "true", Set: set("spec.extraordinary", "''")}, "set: there is no such field, or its type is another one: spec.extraordinary"},
		{"string for int", pod, Rule{Match: "true", Set: set("spec.priority", "'a'")}, "set: there is no such field, or its type is another one: spec.priority"},
		{"int for string", pod, Rule{Match: "true", Set: set("spec.nodeName", "5")}, "set: there is no"},
		{"map for list", pod, Rule{Match: "true", Set: set("spec.containers", "{}")}, "set: there is no"},
		{"fraction for int", pod, Rule{Match: "true", Set: set("spec.priority", "1.5")}, "set: there is no"},
		{"more than 32 bits", pod, Rule{Match: "true", Set: set("spec.priority", "4294967297")}, "set: there is no"},
		{"more than 32 bits in a list", pod, Rule{Match: "true", Set: set("spec.containers[0].ports", "[{'containerPort': 4294967376}]")}, "set: there is no"},
		{"more than 64 bits", pod, Rule{Match: "true", Set: set("spec.terminationGracePeriodSeconds", "1e300")}, "set: there is no"},
		{"bad quantity", pod, Rule{Match: "true", Set: set("spec.containers[0].resources.requests.cpu", "'hunter2'")}, "set: there is no"},
		{"bad time", pod, Rule{Match: "true", Set: set("metadata.creationTimestamp", "'hunter2'")}, "set: there is no"},
		{"bad base64", secret, Rule{Match: "true", Set: set("data.k", "'?'")}, "set: there is no"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFilter(t, tc.rule)
			for _, o := range objects(t, tc.object) {
				before, _ := o.Encode()
				v, err := f.Apply(t.Context(), o)
				if v != filter.Keep || err == nil || !strings.HasPrefix(err.Error(), tc.want) {
					t.Errorf("Apply(%s) = %s, %v, want error %q", encoding(o), v, err, tc.want)
				}
				if err != nil && (strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "aHVudGVyMg")) {
					t.Errorf("Apply(%s) = %v, which has a value in it", encoding(o), err)
				}
				if after, err := o.Encode(); err != nil || !bytes.Equal(before, after) {
					t.Errorf("Apply(%s) has changed the object and failed (%v)", encoding(o), err)
				}
			}
		})
	}
}

func TestApplyEndsWithItsClient(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	f := newFilter(t, Rule{Match: "lists.range(1000).all(a, a >= 0)", Drop: true})
	if v, err := f.Apply(ctx, objects(t, widget)[0]); !errors.Is(err, context.Canceled) {
		t.Errorf("Apply() = %s, %v, want %v", v, err, context.Canceled)
	}
}

// Objects in lists do not say what they are; nothing about that may change.
func TestKindsOfListItems(t *testing.T) {
	for kind, bare := range map[string]string{"Pod": `{"metadata":{"name":"p"},"spec":{"containers":null},"status":{}}`, "Widget": `{"metadata":{"name":"w"},"spec":{}}`} {
		shape := codec.Shape{APIVersion: "v1", Kind: kind}
		o := filter.NewObject(shape, []byte(bare))
		f := newFilter(t, Rule{Match: fmt.Sprintf("object.kind == %q && object.apiVersion == 'v1'", kind), Set: set("metadata.labels.a", "'b'")})
		if v, err := f.Apply(t.Context(), o); v != filter.Change || err != nil {
			t.Errorf("Apply(%s) = %s, %v, want change", kind, v, err)
		}
		got, err := o.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Contains(got, []byte(`"labels":{"a":"b"}`)) || bytes.Contains(got, []byte("apiVersion")) || bytes.Contains(got, []byte(`"kind"`)) {
			t.Errorf("Apply(%s) made %s, want the label and no kind", kind, got)
		}
	}
}

// The bytes of managed fields, which are JSON in protobuf, do not change with other fields.
func TestManagedFieldsStay(t *testing.T) {
	f := newFilter(t, Rule{Match: "true", Set: set("metadata.labels.x", "'y'")})
	o := objects(t, pod)[1]
	if v, err := f.Apply(t.Context(), o); v != filter.Change || err != nil {
		t.Fatalf("Apply(%s) = %s, %v, want change", encoding(o), v, err)
	}
	if got, _ := o.Encode(); !bytes.Contains(got, []byte(`{"f:z":{},"f:a":{".":{}}}`)) {
		t.Errorf("Apply(%s) made %q, want the managed fields as they were", encoding(o), got)
	}
}

// One filter serves all requests at once, and says the same of the same object.
func TestConcurrent(t *testing.T) {
	f := newFilter(t, Rule{Match: `object.metadata.labels.exists(k, k == "a") && node.pool == "shop"`, Set: set("metadata.annotations.all", `object.metadata.labels.map(k, k + object.metadata.labels[k]).join(",")`)})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 20 {
				for _, o := range objects(t, pod) {
					v, err := f.Apply(t.Context(), o)
					if v != filter.Change || err != nil {
						t.Errorf("Apply() = %s, %v, want change", v, err)
					}
					if got := field(t, o, "metadata.annotations.all"); got != `"a1,b2,c3"` {
						t.Errorf("Apply() made %s, want a1,b2,c3", got)
					}
				}
			}
		})
	}
	wg.Wait()
}

func TestGoldens(t *testing.T) {
	filtertest.Run(t, "testdata/registry", newFilter(t, Rule{
		Name:  "registry",
		Match: `object.spec.containers.exists(c, c.image.startsWith("registry.example.com/"))`,
		Set: []Set{
			{"spec.containers", `object.spec.containers.map(c, c.image.startsWith("registry.example.com/") ? dyn({"name": c.name, "image": c.image.replace("registry.example.com/", "mirror.local/", 1)}) : dyn(c))`},
			{`metadata.annotations["example.com/pool"]`, `node.pool`},
		},
	}))
	filtertest.Run(t, "testdata/hidden", newFilter(t, Rule{
		Name: "hidden", Match: `object.metadata.labels["example.com/hidden"] == "true"`, Drop: true,
	}))
}

func FuzzRule(f *testing.F) {
	for _, match := range []string{"true", `object.kind == "Pod"`, "object.metadata.labels.map(k, k)", "node.pool + 1", "[1, 'a', {2: 3u}].exists(x, x == b'\\x00')", "\"%s\".format([object])"} {
		f.Add(match, `metadata.labels["a"]`, "object.metadata.?labels.orValue({})")
		f.Add("true", "spec.containers[0].image", match)
	}
	rules := NewRules(Config{})
	all := append(objects(f, pod), objects(f, widget)...)
	f.Fuzz(func(t *testing.T, match, path, value string) {
		for _, rule := range []Rule{{Name: "a", Match: match, Drop: true}, {Name: "a", Match: match, Set: set(path, value), DryRun: true}, {Name: "a", Match: "true", Set: set(path, value)}} {
			c, err := rules.New(rule)
			if err != nil {
				for line := range strings.Lines(err.Error()) {
					if !strings.Contains(line, ": ") {
						t.Fatalf("New(%+v) = %q, want lines that begin with a field", rule, err)
					}
				}
				continue
			}
			for _, o := range all {
				bare, err := o.Encode()
				if err != nil {
					t.Fatal(err)
				}
				first, second := filter.NewObject(o.Shape(), bare), filter.NewObject(o.Shape(), bare)
				v, err := c.Apply(t.Context(), first)
				again, errAgain := c.Apply(t.Context(), second)
				if v != again || fmt.Sprint(err) != fmt.Sprint(errAgain) {
					t.Fatalf("Apply(%+v) = %s, %v, and then %s, %v", rule, v, err, again, errAgain)
				}
				a, err := first.Encode()
				b, errB := second.Encode()
				if err != nil || errB != nil || !bytes.Equal(a, b) {
					t.Fatalf("Apply(%+v) made two objects of one (-first +second): %v, %v\n%s", rule, err, errB, cmp.Diff(a, b))
				}
			}
		}
	})
}

func BenchmarkMatch(b *testing.B) {
	f := newFilter(b, Rule{Match: `object.metadata.?labels["app"].orValue("") == "web" && object.spec.containers.exists(c, c.image.startsWith("registry.example.com/"))`, Drop: true})
	for _, o := range objects(b, pod) {
		b.Run(encoding(o), func(b *testing.B) {
			bare, err := o.Encode()
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := f.Apply(b.Context(), filter.NewObject(o.Shape(), bare)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// What a rule takes until it is stopped.
func BenchmarkCostLimit(b *testing.B) {
	f := newFilter(b, Rule{Match: "lists.range(400).all(a, lists.range(400).all(b, a + b >= 0))", Drop: true})
	o := objects(b, widget)[0]
	for b.Loop() {
		if _, err := f.Apply(b.Context(), o); err == nil {
			b.Fatal("Apply() = nil, want an error")
		}
	}
}
