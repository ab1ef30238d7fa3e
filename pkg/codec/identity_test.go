// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec_test

import (
	"encoding/json"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/pkg/codec"
)

// What PeekIdentity says is what ReadMeta says, or it says nothing: of every object
// in every form, cut off anywhere, and with each byte changed it does not panic.
func TestPeekIdentity(t *testing.T) {
	meta := metav1.ObjectMeta{Name: "n", GenerateName: "g", Namespace: "ns", UID: "u", ResourceVersion: "123", Generation: 4,
		Labels: map[string]string{"a": "b"}, ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}}}
	pod := &corev1.Pod{ObjectMeta: meta, Spec: corev1.PodSpec{NodeName: "x"}}
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", ResourceVersion: "7"}}
	asJSON := func(v any) []byte {
		b, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	asProto := func(v interface{ Marshal() ([]byte, error) }) []byte {
		b, err := v.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	custom := []byte(`{"apiVersion":"example.com/v1","kind":"Thing","metadata":{"annotations":{"name":"no","resourceVersion":"0"},"name":"c","namespace":"ns","resourceVersion":"9","uid":"u"},"spec":{}}`)
	rep := func(protobuf bool) codec.Representation { return codec.Representation{Protobuf: protobuf} }
	shape := func(kind string, protobuf bool) codec.Shape {
		return codec.Shape{Representation: rep(protobuf), APIVersion: "v1", Kind: kind, ListKind: kind + "List"}
	}
	for _, tt := range []struct {
		name     string
		protobuf bool
		bare     []byte
		wire     []byte
		want     string
	}{
		{"pod", true, asProto(pod), shape("Pod", true).AppendObject(nil, asProto(pod)), "ns/n@123"},
		{"pod", false, asJSON(pod), shape("Pod", false).AppendObject(nil, asJSON(pod)), "ns/n@123"},
		{"node", true, asProto(node), shape("Node", true).AppendObject(nil, asProto(node)), "/n1@7"},
		{"node", false, asJSON(node), shape("Node", false).AppendObject(nil, asJSON(node)), "/n1@7"},
		{"custom resource", false, custom, custom, "ns/c@9"},
		{"status", false, []byte(`{"metadata":{},"status":"Failure"}`), []byte(`{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure"}`), ""},
		{"escapes", false, []byte(`{"metadata":{"name":"\u0061","resourceVersion":"1"}}`), nil, ""},
		{"no name", false, []byte(`{"metadata":{"resourceVersion":"1"}}`), nil, ""},
		{"number", false, []byte(`{"metadata":{"name":"n","resourceVersion":1}}`), nil, ""},
	} {
		for _, wire := range []bool{false, true} {
			b := tt.bare
			if wire {
				b = tt.wire
			}
			t.Run(fmt.Sprintf("%s/protobuf=%t/wire=%t", tt.name, tt.protobuf, wire), func(t *testing.T) {
				peek := func(b []byte) string {
					id, ok := codec.PeekIdentity(rep(tt.protobuf), b, wire)
					if !ok {
						return ""
					}
					return fmt.Sprintf("%s/%s@%s", id.Namespace, id.Name, id.ResourceVersion)
				}
				if b == nil {
					return
				}
				if got := peek(b); got != tt.want {
					t.Errorf("PeekIdentity = %q, want %q", got, tt.want)
				}
				for n := range b {
					if got := peek(b[:n]); got != "" && got != tt.want {
						t.Errorf("of the first %d bytes: %q", n, got)
					}
					changed := append([]byte{}, b...)
					changed[n] ^= 0x55
					peek(changed)
				}
				if n := testing.AllocsPerRun(10, func() { codec.PeekIdentity(rep(tt.protobuf), b, wire) }); n > 0 && tt.want != "" {
					t.Errorf("%.0f allocations", n)
				}
			})
		}
	}
}
