// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protowire"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/pkg/codec"
)

// mutated is an object that came as whole and was changed like m.
func mutated(t *testing.T, shape codec.Shape, whole []byte, change func(message)) []byte {
	t.Helper()
	o := NewObject(shape, whole)
	typed, err := o.Decode()
	if err != nil {
		t.Fatal(err)
	}
	change(typed.(message))
	b, err := o.Encode()
	if err != nil {
		t.Fatalf("Encode() = %v", err)
	}
	return b
}

func decoded(t *testing.T, shape codec.Shape, bare []byte) message {
	t.Helper()
	typed, err := NewObject(shape, bare).Decode()
	if err != nil {
		t.Fatalf("decode what Encode() has made: %v\n%q", err, bare)
	}
	return typed.(message)
}

// TestEncodeIsDecodeMutateDecode: whatever a filter does to the Go type, decoding what
// encode makes of it gives that, in both encodings, with unknown fields everywhere.
func TestEncodeIsDecodeMutateDecode(t *testing.T) {
	s := seed(t)
	for n := range uint64(1000) {
		g := generator{rand.New(rand.NewPCG(s, n))}
		m := g.object()
		times := 1 + g.IntN(4)
		mutate := func(m message) {
			r := generator{rand.New(rand.NewPCG(s, n+1<<32))}
			for range times {
				r.mutate(reflect.ValueOf(m))
			}
		}
		for _, protobuf := range []bool{true, false} {
			shape := shapeOf(t, m, protobuf)
			whole := unknowns(t, m, protobuf)
			want := decoded(t, shape, whole)
			mutate(want)
			got := mutated(t, shape, bytes.Clone(whole), mutate)
			if back := decoded(t, shape, got); !equality.Semantic.DeepEqual(back, want) {
				t.Fatalf("round %d, protobuf %t: decoded after Encode() (-want +got):\n%s", n, protobuf, cmp.Diff(want, back, cmp.Exporter(func(reflect.Type) bool { return true })))
			}
			if plain := decoded(t, shape, whole); equality.Semantic.DeepEqual(plain, want) && !bytes.Equal(got, whole) {
				t.Fatalf("round %d, protobuf %t: Encode() without a change is not the object as it came", n, protobuf)
			}
		}
	}
}

// unknowns encodes an object with unknown fields everywhere.
func unknowns(t *testing.T, m message, protobuf bool) []byte {
	t.Helper()
	if protobuf {
		b, err := m.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		var next uint64
		return sprinkle(b, &next)
	}
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var v any
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		t.Fatal(err)
	}
	var next int
	sprinkleJSON(v, &next)
	if b, err = json.Marshal(v); err != nil {
		t.Fatal(err)
	}
	return b
}

// marks finds the unknown fields of the elements of a list, by the elements' identity:
// path names fields down to the list.
func marks(t *testing.T, b []byte, path ...protowire.Number) map[string]uint64 {
	t.Helper()
	found := map[string]uint64{}
	fields, err := protoFields(b)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range fields[path[0]] {
		if len(path) > 1 {
			for id, n := range marks(t, f.bytes, path[1:]...) {
				found[id] = n
			}
			continue
		}
		inner, err := protoFields(f.bytes)
		if err != nil {
			t.Fatal(err)
		}
		if u := inner[unknownField]; len(u) == 1 {
			found[f.identity()], _ = protowire.ConsumeVarint(u[0].value)
		} else {
			found[f.identity()] = 0
		}
	}
	return found
}

func jsonMarks(t *testing.T, b []byte, path ...string) map[string]string {
	t.Helper()
	var v any
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		t.Fatal(err)
	}
	for _, p := range path {
		v = v.(map[string]any)[p]
	}
	found := map[string]string{}
	if v == nil {
		return found
	}
	for _, e := range v.([]any) {
		text, _ := json.Marshal(e.(map[string]any)["unknown"])
		found[jsonValue{e}.identity()] = string(text)
	}
	return found
}

func endpoint(i int) discoveryv1.Endpoint {
	ready := true
	return discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.0.0.%d", i)}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}
}

// TestUnknownFieldsStayWithTheirElement: an element of a list that is still there has its
// own unknown fields, and a new one has none.
func TestUnknownFieldsStayWithTheirElement(t *testing.T) {
	no := false
	for _, tc := range []struct {
		name   string
		change func(e []discoveryv1.Endpoint) []discoveryv1.Endpoint
		want   []int // whose there are; -1: a new one
	}{
		{"first removed", func(e []discoveryv1.Endpoint) []discoveryv1.Endpoint { return e[1:] }, []int{1, 2, 3}},
		{"middle removed", func(e []discoveryv1.Endpoint) []discoveryv1.Endpoint { return slices.Delete(e, 1, 2) }, []int{0, 2, 3}},
		{"last removed", func(e []discoveryv1.Endpoint) []discoveryv1.Endpoint { return e[:3] }, []int{0, 1, 2}},
		{"reversed", func(e []discoveryv1.Endpoint) []discoveryv1.Endpoint { slices.Reverse(e); return e }, []int{0, 1, 2, 3}},
		{"one removed, one added", func(e []discoveryv1.Endpoint) []discoveryv1.Endpoint { return append(e[1:], endpoint(9)) }, []int{1, 2, 3, -1}},
		{"one added in front", func(e []discoveryv1.Endpoint) []discoveryv1.Endpoint { return slices.Insert(e, 0, endpoint(9)) }, []int{0, 1, 2, 3, -1}},
		{"one removed, the others changed", func(e []discoveryv1.Endpoint) []discoveryv1.Endpoint {
			for i := range e {
				e[i].Conditions.Ready = &no
			}
			return e[1:]
		}, []int{1, 2, 3}},
		{"reversed and changed", func(e []discoveryv1.Endpoint) []discoveryv1.Endpoint {
			for i := range e {
				e[i].Conditions.Ready = &no
			}
			slices.Reverse(e)
			return e
		}, []int{0, 1, 2, 3}},
		{"all removed", func([]discoveryv1.Endpoint) []discoveryv1.Endpoint { return nil }, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			m := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: "s"}, AddressType: "IPv4", Endpoints: []discoveryv1.Endpoint{endpoint(0), endpoint(1), endpoint(2), endpoint(3)}}
			change := func(m message) { s := m.(*discoveryv1.EndpointSlice); s.Endpoints = tc.change(s.Endpoints) }

			stayProto(t, m, change, tc.want)
			stayJSON(t, m, change, tc.want)
		})
	}
}

func stayProto(t *testing.T, m message, change func(message), stay []int) {
	t.Helper()
	whole := unknowns(t, m, true)
	had := marks(t, whole, 2)
	want := map[string]uint64{}
	for _, i := range stay {
		want[fmt.Sprintf("10.0.0.%d", i)] = had[fmt.Sprintf("10.0.0.%d", i)]
		if i < 0 {
			delete(want, "10.0.0.-1")
			want["10.0.0.9"] = 0
		}
	}
	got := mutated(t, shapeOf(t, m, true), whole, change)
	if diff := cmp.Diff(want, marks(t, got, 2)); diff != "" {
		t.Errorf("unknown fields in protobuf (-want +got):\n%s", diff)
	}
	if top, _ := protoFields(got); len(top[unknownField]) != 1 {
		t.Error("the object's own unknown field is gone")
	}
}

func stayJSON(t *testing.T, m message, change func(message), stay []int) {
	t.Helper()
	whole := unknowns(t, m, false)
	hadJSON := jsonMarks(t, whole, "endpoints")
	wantJSON := map[string]string{}
	for _, i := range stay {
		if i < 0 {
			wantJSON["10.0.0.9"] = "null"
		} else {
			wantJSON[fmt.Sprintf("10.0.0.%d", i)] = hadJSON[fmt.Sprintf("10.0.0.%d", i)]
		}
	}
	if diff := cmp.Diff(wantJSON, jsonMarks(t, mutated(t, shapeOf(t, m, false), whole, change), "endpoints")); diff != "" {
		t.Errorf("unknown members in JSON (-want +got):\n%s", diff)
	}
}

// TestUnknownFieldsInsideWhatChanges: a change deep inside leaves the unknown fields of
// all messages on the way, and elements without a name keep theirs by their place.
func TestUnknownFieldsInsideWhatChanges(t *testing.T) {
	m := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{
		{Name: "a", Ports: []corev1.ContainerPort{{ContainerPort: 1}, {ContainerPort: 2}}, VolumeMounts: []corev1.VolumeMount{{Name: "v", MountPath: "/a"}, {Name: "v", MountPath: "/b"}}},
		{Name: "b"},
	}}}
	whole := unknowns(t, m, true)
	got := mutated(t, shapeOf(t, m, true), whole, func(m message) {
		c := &m.(*corev1.Pod).Spec.Containers[0]
		c.Image = "new"
		c.Ports[1].HostPort = 7
		c.VolumeMounts = c.VolumeMounts[1:]
	})
	count := func(b []byte) int {
		return bytes.Count(b, protowire.AppendTag(nil, unknownField, protowire.VarintType))
	}
	if a, b := count(whole), count(got); b != a-1 {
		t.Errorf("unknown fields: %d of %d are left, want all but that of the mount that is gone", b, a)
	}
	mount := func(b []byte) uint64 { // of the last mount
		f, _ := protoFields(b)
		f, _ = protoFields(f[2][0].bytes)
		f, _ = protoFields(f[2][0].bytes)
		f, _ = protoFields(f[9][len(f[9])-1].bytes)
		n, _ := protowire.ConsumeVarint(f[unknownField][0].value)
		return n
	}
	if a, b := mount(whole), mount(got); a != b {
		t.Errorf("the mount that is left has the unknown field %d, want its own, %d", b, a)
	}
}

func TestMergeJSONKeepsSpelling(t *testing.T) {
	for _, tc := range []struct{ name, whole, was, is, want string }{
		{"numbers", `{"a":1e3,"b":123456789012345678901,"c":-0,"d":1.50,"x":1}`, `{"x":1}`, `{"x":2}`, `{"a":1e3,"b":123456789012345678901,"c":-0,"d":1.50,"x":2}`},
		{"known numbers", `{"a":1e3,"x":1}`, `{"a":1000,"x":1}`, `{"a":1000,"x":2}`, `{"a":1e3,"x":2}`},
		{"in a list", `{"l":[1e3,2e3,3]}`, `{"l":[1000,2000,3]}`, `{"l":[2000,3]}`, `{"l":[2e3,3]}`},
		{"spelt-out default", `{"x":1}`, `{"s":{},"x":1}`, `{"s":{},"x":2}`, `{"x":2}`},
		{"cleared", `{"u":1,"x":1}`, `{"x":1}`, `{}`, `{"u":1}`},
		{"null", `{"s":null,"x":1}`, `{"s":{"a":""},"x":1}`, `{"s":{"a":"b"},"x":1}`, `{"s":{"a":"b"},"x":1}`},
		{"another type", `{"s":{"u":1,"a":2}}`, `{"s":{"a":2}}`, `{"s":[1]}`, `{"s":[1]}`},
		{"HTML", `{"u":"<&>","x":1}`, `{"x":1}`, `{"x":2}`, `{"u":"<&>","x":2}`},
		{"list of lists", `{"l":[[1,{"u":1}],[2]]}`, `{"l":[[1,{}],[2]]}`, `{"l":[[1,{}],[3]]}`, `{"l":[[1,{"u":1}],[3]]}`},
		{"nothing to nothing", `{}`, `{}`, `{}`, `{}`},
		{"list to none", `{"l":[{"u":1}]}`, `{"l":[{}]}`, `{"l":null}`, `{"l":null}`},
		{"renamed in its place", `{"l":[{"name":"a","u":1},{"name":"b","u":2}]}`, `{"l":[{"name":"a"},{"name":"b"}]}`, `{"l":[{"name":"z"},{"name":"b"}]}`, `{"l":[{"name":"z","u":1},{"name":"b","u":2}]}`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := mergeJSON([]byte(tc.whole), []byte(tc.was), []byte(tc.is))
			if string(got) != tc.want || err != nil {
				t.Errorf("mergeJSON(%s, %s, %s) = %s, %v, want %s", tc.whole, tc.was, tc.is, got, err, tc.want)
			}
		})
	}
}

// TestTextThatLooksLikeAMessage: a quantity that is not spelt as the Go type spells it
// differs where it is no message.
func TestTextThatLooksLikeAMessage(t *testing.T) {
	for _, spelt := range []string{"1000m", "100000000", "0.5", "1024Mi"} {
		c := corev1.Container{Name: "c", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"cpu": resource.MustParse("8")}}}
		m := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{c}}}
		plain, _ := m.Marshal()
		quantity := func(s string) []byte {
			q := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), s)
			return q
		}
		// Rebuild the way down: pod.spec.containers.resources.limits[cpu].
		entry := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), "cpu")
		entry = protowire.AppendBytes(protowire.AppendTag(entry, 2, protowire.BytesType), quantity(spelt))
		limits := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), entry)
		container := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), "c")
		container = protowire.AppendBytes(protowire.AppendTag(container, 8, protowire.BytesType), limits)
		spec := protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), container)
		whole := protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), spec)
		shape := shapeOf(t, m, true)
		if bytes.Equal(plain, whole) {
			t.Fatal("the object is as the Go type writes it")
		}
		got := decoded(t, shape, mutated(t, shape, whole, func(m message) {
			m.(*corev1.Pod).Spec.Containers[0].Resources.Limits["cpu"] = resource.MustParse("7500m")
		})).(*corev1.Pod)
		if q := got.Spec.Containers[0].Resources.Limits["cpu"]; q.String() != "7500m" {
			t.Errorf("quantity %s changed to 7500m is decoded as %s", spelt, q.String())
		}
	}
}

func FuzzMergeProto(f *testing.F) {
	g := generator{rand.New(rand.NewPCG(1, 2))}
	for range 20 {
		m := g.object()
		was, _ := m.Marshal()
		g.mutate(reflect.ValueOf(m))
		is, _ := m.Marshal()
		var next uint64
		f.Add(sprinkle(was, &next), was, is)
	}
	f.Fuzz(func(t *testing.T, whole, was, is []byte) {
		got, err := mergeProto(whole, was, is)
		if err != nil {
			return
		}
		if _, err := protoFields(whole); err == nil && bytes.Equal(was, is) && !bytes.Equal(got, whole) {
			t.Errorf("mergeProto() without a change = %x, want %x", got, whole)
		}
		if bytes.Equal(whole, was) && !bytes.Equal(got, is) && !bytes.Equal(was, is) {
			t.Errorf("mergeProto() of what is known = %x, want %x", got, is)
		}
	})
}

func FuzzMergeJSON(f *testing.F) {
	f.Add([]byte(`{"a":1,"l":[{"name":"x","u":1}]}`), []byte(`{"a":1,"l":[{"name":"x"}]}`), []byte(`{"l":[{"name":"x","v":2},{}]}`))
	f.Add([]byte(`[1,[2],{"a":[]}]`), []byte(`[1,[2],{}]`), []byte(`[[2],1]`))
	f.Add([]byte(`null`), []byte(`{}`), []byte(`"x"`))
	f.Fuzz(func(t *testing.T, whole, was, is []byte) {
		got, err := mergeJSON(whole, was, is)
		if err == nil && !json.Valid(got) {
			t.Errorf("mergeJSON(%q, %q, %q) = %q, which is no JSON", whole, was, is, got)
		}
		if err != nil {
			return
		}
		if got, err = mergeJSON(was, was, is); err == nil {
			var a, b any
			_ = json.Unmarshal(got, &a)
			_ = json.NewDecoder(bytes.NewReader(is)).Decode(&b)
			if !reflect.DeepEqual(a, b) {
				t.Errorf("mergeJSON(%q, %q, %q) = %q, want what is", was, was, is, got)
			}
		}
	})
}
