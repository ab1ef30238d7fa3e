// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestReadMeta(t *testing.T) {
	for _, c := range wireCases() {
		t.Run(c.String(), func(t *testing.T) {
			for _, obj := range c.objects {
				rep := c.shape.Representation
				_, bare, err := DecodeObject(rep, c.get(t, obj))
				if err != nil {
					t.Fatal(err)
				}
				m, err := meta.Accessor(obj)
				if err != nil {
					t.Fatal(err)
				}
				want := Meta{
					Namespace: m.GetNamespace(), Name: m.GetName(), UID: string(m.GetUID()), ResourceVersion: m.GetResourceVersion(),
					Generation: m.GetGeneration(), DeletionTimestamp: m.GetDeletionTimestamp() != nil,
				}
				got, err := ReadMeta(rep, bare)
				if err != nil {
					t.Fatalf("ReadMeta() error: %v", err)
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("ReadMeta() (-want +got):\n%s", diff)
				}
				for key, want := range m.GetAnnotations() {
					if got, found, err := ReadAnnotation(rep, bare, key); got != want || !found || err != nil {
						t.Errorf("ReadAnnotation(%q) = %q, %v, %v, want %q", key, got, found, err, want)
					}
				}
				if got, found, err := ReadAnnotation(rep, bare, "app"); found || err != nil {
					t.Errorf("ReadAnnotation(app) = %q, %v, %v, want none", got, found, err)
				}
			}
		})
	}
}

// TestSetResourceVersion checks that nothing but the resourceVersion changes: it is
// set to another one, and back.
func TestSetResourceVersion(t *testing.T) {
	for _, c := range wireCases() {
		t.Run(c.String(), func(t *testing.T) {
			for _, obj := range c.objects {
				rep := c.shape.Representation
				_, bare, err := DecodeObject(rep, c.get(t, obj))
				if err != nil {
					t.Fatal(err)
				}
				before, original := bytes.Clone(bare), obj.DeepCopyObject()
				stored, err := meta.Accessor(obj)
				if err != nil {
					t.Fatal(err)
				}
				for _, version := range []string{"", "7", strings.Repeat("9", 300)} {
					changed, err := SetResourceVersion(rep, bare, version)
					if err != nil {
						t.Fatalf("SetResourceVersion(%q) error: %v", version, err)
					}
					m, err := meta.Accessor(original)
					if err != nil {
						t.Fatal(err)
					}
					m.SetResourceVersion(version)
					if got := c.shape.AppendObject(nil, changed); version != "" && !bytes.Equal(got, c.get(t, original)) {
						t.Errorf("SetResourceVersion(%q) = %q, want %q", version, got, c.get(t, original))
					}
					if got, err := ReadMeta(rep, changed); err != nil || got.ResourceVersion != version {
						t.Errorf("ReadMeta() = %v, %v, want resourceVersion %q", got, err, version)
					}
					back, err := SetResourceVersion(rep, changed, stored.GetResourceVersion())
					if err != nil || !bytes.Equal(back, before) {
						t.Errorf("SetResourceVersion() and back = %q, %v, want %q", back, err, before)
					}
				}
				if !bytes.Equal(bare, before) {
					t.Errorf("SetResourceVersion() changed its argument")
				}
			}
		})
	}
}

func TestSetResourceVersionThatIsAbsent(t *testing.T) {
	for _, tc := range []struct {
		rep      Representation
		in, want string
	}{
		{Representation{}, `{"metadata":{}}`, `{"metadata":{"resourceVersion":"7"}}`},
		{Representation{}, `{"metadata":{ "labels":{} }}`, `{"metadata":{"resourceVersion":"7", "labels":{} }}`},
		{Representation{}, `{"metadata":{"name":"a","uid":"b" ,"labels":{}}}`, `{"metadata":{"name":"a","uid":"b","resourceVersion":"7" ,"labels":{}}}`},
		{Representation{}, `{"metadata":{"resourceVersion":null}}`, `{"metadata":{"resourceVersion":"7"}}`},
		{Representation{Protobuf: true}, field(1, field(1, "a")+field(11, "l")) + field(2, "s"), field(1, field(1, "a")+field(6, "7")+field(11, "l")) + field(2, "s")},
		{Representation{Protobuf: true}, field(1, ""), field(1, field(6, "7"))},
	} {
		if got, err := SetResourceVersion(tc.rep, []byte(tc.in), "7"); err != nil || string(got) != tc.want {
			t.Errorf("SetResourceVersion(%q) = %q, %v, want %q", tc.in, got, err, tc.want)
		}
	}
}

func TestMetaRefuses(t *testing.T) {
	const key = "k"
	protoRep := Representation{Protobuf: true}
	for _, tc := range []struct {
		name string
		rep  Representation
		in   string
		read func(rep Representation, in []byte) error
	}{
		{"truncated", Representation{}, `{"metadata":{}`, readMeta},
		{"garbage behind metadata", Representation{}, `{"metadata":{},"spec":tru}`, readMeta},
		{"metadata twice", Representation{}, `{"metadata":{},"metadata":{}}`, readMeta},
		{"metadata a list", Representation{}, `{"metadata":[]}`, readMeta},
		{"name twice", Representation{}, `{"metadata":{"name":"a","name":"b"}}`, readMeta},
		{"name twice, once escaped", Representation{}, `{"metadata":{"name":"a","n\u0061me":"b"}}`, readMeta},
		{"name a number", Representation{}, `{"metadata":{"name":1}}`, readMeta},
		{"generation a string", Representation{}, `{"metadata":{"generation":"1"}}`, readMeta},
		{"generation a fraction", Representation{}, `{"metadata":{"generation":1.5}}`, readMeta},
		{"generation too large", Representation{}, `{"metadata":{"generation":9223372036854775808}}`, readMeta},
		{"deletionTimestamp no time", Representation{}, `{"metadata":{"deletionTimestamp":"yesterday"}}`, readMeta},
		{"deletionTimestamp a bool", Representation{}, `{"metadata":{"deletionTimestamp":true}}`, readMeta},
		{"annotation twice", Representation{}, `{"metadata":{"annotations":{"k":"a","k":"b"}}}`, readAnnotation},
		{"annotations twice", Representation{}, `{"metadata":{"annotations":{"k":"a"},"annotations":{}}}`, readAnnotation},
		{"annotation a number", Representation{}, `{"metadata":{"annotations":{"k":1}}}`, readAnnotation},
		{"annotations a string", Representation{}, `{"metadata":{"annotations":"k"}}`, readAnnotation},
		{"no metadata to set", Representation{}, `{"spec":{}}`, setResourceVersion},
		{"resourceVersion twice", Representation{}, `{"metadata":{"resourceVersion":"1","resourceVersion":"2"}}`, setResourceVersion},

		{"protobuf truncated", protoRep, "\x0a\x05ab", readMeta},
		{"protobuf metadata twice", protoRep, field(1, "") + field(1, ""), readMeta},
		{"protobuf metadata a varint", protoRep, "\x08\x01", readMeta},
		{"protobuf name a varint", protoRep, field(1, "\x08\x01"), readMeta},
		{"protobuf generation a string", protoRep, field(1, field(7, "1")), readMeta},
		{"protobuf deletionTimestamp a varint", protoRep, field(1, "\x48\x01"), readMeta},
		{"protobuf field 0", protoRep, "\x02\x00", readMeta},
		{"protobuf field number too large", protoRep, "\xb2\x80\x80\x80\x80\x01\x00", readMeta},
		{"protobuf end of no group", protoRep, "\x1c", readMeta},
		{"protobuf group without end", protoRep, "\x1b\x08\x01", readMeta},
		{"protobuf wire type 7", protoRep, "\x1f", readMeta},
		{"protobuf huge length", protoRep, "\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f", readMeta},
		{"protobuf groups too deep", protoRep, strings.Repeat("\x1b", 20000) + strings.Repeat("\x1c", 20000), readMeta},
		{"protobuf annotation a varint", protoRep, field(1, "\x60\x01"), readAnnotation},
		{"protobuf annotation value a varint", protoRep, field(1, field(12, field(1, key)+"\x10\x01")), readAnnotation},
		{"protobuf no metadata to set", protoRep, field(2, ""), setResourceVersion},
		{"protobuf resourceVersion twice", protoRep, field(1, field(6, "1")+field(6, "2")), setResourceVersion},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := tc.read(tc.rep, []byte(tc.in)); !errors.Is(err, ErrMalformed) {
				t.Errorf("error = %v, want ErrMalformed", err)
			}
		})
	}
}

func readMeta(rep Representation, in []byte) error {
	_, err := ReadMeta(rep, in)
	return err
}

func readAnnotation(rep Representation, in []byte) error {
	_, _, err := ReadAnnotation(rep, in, "k")
	return err
}

func setResourceVersion(rep Representation, in []byte) error {
	_, err := SetResourceVersion(rep, in, "7")
	return err
}

func TestReadMetaTakes(t *testing.T) {
	for _, tc := range []struct {
		name string
		rep  Representation
		in   string
		want Meta
	}{
		{"no metadata", Representation{}, `{"spec":{}}`, Meta{}},
		{"null metadata", Representation{}, `{"metadata":null}`, Meta{}},
		{"nulls", Representation{}, `{"metadata":{"name":null,"generation":null,"deletionTimestamp":null}}`, Meta{}},
		{"escapes", Representation{}, `{"m\u0065tadata":{"n\u0061me":"\u0061\"\\\/\n\ud83d\ude00"}}`, Meta{Name: "a\"\\/\n😀"}},
		{"metadata elsewhere", Representation{}, `{"spec":{"metadata":{"name":"b"}},"metadata":{"x":{"name":"c"},"name":"a"}}`, Meta{Name: "a"}},
		{"negative generation", Representation{}, `{"metadata":{"generation":-3}}`, Meta{Generation: -3}},
		{"protobuf nothing", Representation{Protobuf: true}, "", Meta{}},
		{"protobuf last scalar counts", Representation{Protobuf: true}, field(1, field(1, "a")+field(1, "b")), Meta{Name: "b"}},
		{"protobuf unknown fields", Representation{Protobuf: true}, field(15, "x") + "\x1b\x08\x01\x1c" + field(1, "\x99\x06\x01\x02\x03\x04\x05\x06\x07\x08"+field(1, "a")), Meta{Name: "a"}},
		{"protobuf negative generation", Representation{Protobuf: true}, field(1, "\x38\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), Meta{Generation: -1}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got, err := ReadMeta(tc.rep, []byte(tc.in)); err != nil || got != tc.want {
				t.Errorf("ReadMeta(%q) = %+v, %v, want %+v", tc.in, got, err, tc.want)
			}
		})
	}
}

// TestReadStatus pins that an object without metadata of its own, a Status, is left
// alone.
func TestReadStatus(t *testing.T) {
	for _, rep := range allRepresentations {
		wire := AppendStatusFrame(nil, rep, &metav1.Status{Reason: metav1.StatusReasonExpired})
		frame, err := NewFrameReader(bytes.NewReader(wire), rep, testMaxBytes).Next()
		if err != nil {
			t.Fatal(err)
		}
		want := Shape{Representation: rep, APIVersion: "v1", Kind: "Status"}
		if shape, _, err := DecodeObject(rep, frame.Object); err != nil || shape != want {
			t.Errorf("DecodeObject() = %v, %v, want %v", shape, err, want)
		}
	}
}

// Labels in another order or encoding have the same hash, and others another one.
func TestHashLabels(t *testing.T) {
	hash := func(o *corev1.Node) (sums [2]uint64) {
		proto, err := o.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		js, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		for i, bare := range [][]byte{proto, js} {
			if sums[i], err = HashLabels(Representation{Protobuf: i == 0}, bare); err != nil {
				t.Fatal(err)
			}
		}
		return sums
	}
	labelled := func(labels map[string]string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n", Labels: labels, Annotations: map[string]string{"a": "b"}}}
	}
	seen := map[uint64]string{}
	for _, labels := range []map[string]string{nil, {"a": "b"}, {"a": "c"}, {"ab": ""}, {"a": "b", "c": "d"}, {"a": "d", "c": "b"}} {
		sums := hash(labelled(labels))
		if sums[0] != sums[1] {
			t.Errorf("HashLabels(%v) = %x in protobuf, %x in JSON", labels, sums[0], sums[1])
		}
		if other, ok := seen[sums[0]]; ok {
			t.Errorf("HashLabels(%v) = HashLabels(%s)", labels, other)
		}
		seen[sums[0]] = fmt.Sprint(labels)
	}
	rep := Representation{}
	a, err1 := HashLabels(rep, []byte(`{"metadata":{"labels":{"a":"b","c":"d"}}}`))
	b, err2 := HashLabels(rep, []byte(`{"metadata":{"labels":{"c":"d","a":"b"}}}`))
	if a != b || err1 != nil || err2 != nil {
		t.Errorf("HashLabels() in two orders = %x, %x, %v, %v", a, b, err1, err2)
	}
	if _, err := HashLabels(rep, []byte(`{"metadata":{"labels":{"a":1}}}`)); !errors.Is(err, ErrMalformed) {
		t.Errorf("HashLabels(a number) = %v, want ErrMalformed", err)
	}
}
