// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	metav1beta1 "k8s.io/apimachinery/pkg/apis/meta/v1beta1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	utiljson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/watch"
)

// addSeeds adds one input for each case, made by the server's serializers, and a
// few that are not quite right.
func addSeeds(f *testing.F, wire func(c wireCase) []byte) {
	for _, c := range wireCases() {
		b := wire(c)
		f.Add(b, repIndex(c.shape.Representation))
		f.Add(b[:len(b)*2/3], repIndex(c.shape.Representation))
	}
}

func repIndex(rep Representation) uint8 {
	for i, r := range allRepresentations {
		if r == rep {
			return uint8(i)
		}
	}
	panic(rep)
}

func FuzzFrameReader(f *testing.F) {
	addSeeds(f, func(c wireCase) []byte {
		b := c.frame(f, watch.Added, c.objects[0])
		b = append(b, c.frame(f, watch.Deleted, c.objects[1])...)
		return c.shape.AppendBookmark(b, "7", true)
	})
	f.Fuzz(checkFrameReader)
}

func checkFrameReader(t *testing.T, in []byte, index uint8) {
	rep := allRepresentations[int(index)%len(allRepresentations)]
	read := func(r io.Reader) (frames []Frame, err error) {
		for reader := NewFrameReader(r, rep, 1<<16); ; {
			frame, err := reader.Next()
			if err != nil {
				return frames, err
			}
			frames = append(frames, frame)
		}
	}
	frames, err := read(bytes.NewReader(in))
	again, errAgain := read(iotest.OneByteReader(bytes.NewReader(in)))
	if diff := cmp.Diff(frames, again); diff != "" || errors.Is(err, io.EOF) != errors.Is(errAgain, io.EOF) {
		t.Fatalf("byte for byte %v and %v\n%s", err, errAgain, diff)
	}
	compareFrames(t, rep, in, frames)
	for _, frame := range frames {
		shape, bare, err := DecodeObject(rep, frame.Object)
		if err != nil {
			continue
		}
		back, err := NewFrameReader(bytes.NewReader(shape.AppendFrame(nil, frame.Type, bare)), rep, 1<<20).Next()
		if err != nil {
			t.Fatalf("AppendFrame() does not read back: %v", err)
		}
		shapeBack, bareBack, err := DecodeObject(rep, back.Object)
		if err != nil || shapeBack != shape || !bytes.Equal(bareBack, bare) || back.Type != frame.Type {
			t.Fatalf("AppendFrame() reads back as %v %q, %v, want %v %q", shapeBack, bareBack, err, shape, bare)
		}
	}
}

// compareFrames decodes the same stream with the packages of apimachinery.
func compareFrames(t *testing.T, rep Representation, in []byte, frames []Frame) {
	rest := in
	decoder := json.NewDecoder(bytes.NewReader(in))
	for i, frame := range frames {
		var event struct {
			Type   string          `json:"type"`
			Object json.RawMessage `json:"object"`
		}
		if rep.Protobuf {
			size := int(rest[2])<<8 | int(rest[3])
			var want metav1.WatchEvent
			if err := want.Unmarshal(rest[4 : 4+size]); err != nil {
				t.Fatalf("frame %d is taken, but not by Unmarshal: %v", i, err)
			}
			rest = rest[4+size:]
			event.Type, event.Object = want.Type, want.Object.Raw
		} else {
			var raw map[string]json.RawMessage
			if err := decoder.Decode(&raw); err != nil {
				t.Fatalf("frame %d is taken, but not by encoding/json: %v", i, err)
			}
			event.Object = raw["object"]
			if err := json.Unmarshal(raw["type"], &event.Type); err != nil {
				t.Fatal(err)
			}
		}
		if string(frame.Type) != event.Type || !bytes.Equal(frame.Object, event.Object) {
			t.Fatalf("frame %d = %s %q, want %s %q", i, frame.Type, frame.Object, event.Type, event.Object)
		}
	}
}

func FuzzListDecoder(f *testing.F) {
	addSeeds(f, func(c wireCase) []byte { return c.listOf(f, 2, metav1.ListMeta{ResourceVersion: "12", Continue: "c"}) })
	f.Fuzz(checkListDecoder)
}

func checkListDecoder(t *testing.T, in []byte, index uint8) {
	rep := allRepresentations[int(index)%len(allRepresentations)]
	got, err := decodeList(rep, [][]byte{in})
	for name, chunks := range chunkings(in) {
		again, errAgain := decodeList(rep, chunks)
		if diff := cmp.Diff(got, again); diff != "" || (err == nil) != (errAgain == nil) || errors.Is(err, ErrNotList) != errors.Is(errAgain, ErrNotList) {
			t.Fatalf("%s: %v and %v\n%s", name, err, errAgain, diff)
		}
	}
	if err != nil {
		return
	}
	compareList(t, in, got)
	built := buildList(got.List.Shape, got.List.ResourceVersion, got.Items)
	again, err := decodeList(rep, [][]byte{built})
	got.List.Continue, got.List.RemainingItemCount, got.List.Sharded = "", nil, false
	if diff := cmp.Diff(got, again); diff != "" || err != nil {
		t.Fatalf("AppendList does not read back: %v\n%s\n%q", err, diff, built)
	}
}

// compareList decodes the same list with encoding/json or as protobuf.
func compareList(t *testing.T, in []byte, got decodedList) {
	var list metav1.ListInterface
	var items []string
	switch {
	case !got.List.Shape.Protobuf:
		var raw struct {
			Metadata metav1.ListMeta   `json:"metadata"`
			Items    []json.RawMessage `json:"items"`
		}
		if err := utiljson.Unmarshal(in, &raw); err != nil {
			if json.Valid(in) {
				return // a wrong type in metadata that is not looked at
			}
			t.Fatalf("list is taken, but not by encoding/json: %v", err)
		}
		list = &raw.Metadata
		for _, item := range raw.Items {
			items = append(items, string(item))
		}
	default:
		_, _, raw, err := readUnknown(in)
		if err != nil {
			t.Fatalf("list is taken, but not its envelope: %v", err)
		}
		list, items = protoListOf(t, got.List.Shape, raw)
		if list == nil {
			return
		}
	}
	if list.GetResourceVersion() != got.List.ResourceVersion || list.GetContinue() != got.List.Continue {
		t.Fatalf("list = %+v, want %+v", got.List, list)
	}
	if len(items) != len(got.Items) {
		t.Fatalf("%d items, want %d", len(got.Items), len(items))
	}
	for i, item := range items {
		if s := got.List.Shape; !s.Protobuf && s.Partial != "" {
			_, bare, err := DecodeObject(s.Representation, []byte(item))
			if err != nil {
				t.Fatalf("item %d is not an object: %v", i, err)
			}
			item = string(bare)
		}
		if item != got.Items[i] && (got.List.Shape.Protobuf || string(bytes.TrimSpace([]byte(item[1:]))) != "}") {
			t.Fatalf("item %d = %q, want %q", i, got.Items[i], item)
		}
	}
}

// protoListOf splits a list with generated code: apimachinery's List has items of
// any type, the PartialObjectMetadataList of v1beta1 its own numbering.
func protoListOf(t *testing.T, shape Shape, raw []byte) (metav1.ListInterface, []string) {
	var items []string
	if shape.itemsFirst() {
		var list metav1beta1.PartialObjectMetadataList
		if list.Unmarshal(raw) != nil {
			return nil, nil // an item that is no object
		}
		for m := newProtoMessage(raw); ; {
			if ok, err := m.next(); err != nil {
				t.Fatal(err)
			} else if !ok {
				return &list, items
			}
			if m.num == 1 {
				items = append(items, string(m.bytes))
			}
		}
	}
	var partial metav1.PartialObjectMetadataList
	if partial.Unmarshal(raw) != nil {
		return nil, nil
	}
	for m := newProtoMessage(raw); ; {
		if ok, err := m.next(); err != nil {
			t.Fatal(err)
		} else if !ok {
			return &partial, items
		}
		if m.num == 2 {
			items = append(items, string(m.bytes))
		}
	}
}

// bareSeeds are objects of every kind and representation.
func bareSeeds(f *testing.F) {
	for _, c := range wireCases() {
		for _, obj := range c.objects[:2] {
			_, bare, err := DecodeObject(c.shape.Representation, c.get(f, obj))
			if err != nil {
				f.Fatal(err)
			}
			f.Add(bare, c.shape.Protobuf)
		}
	}
}

// typedMeta decodes an object that is valid for every decoder.
func typedMeta(protobuf bool, bare []byte) (metav1.Object, error) {
	var partial metav1.PartialObjectMetadata
	if protobuf {
		return &partial, partial.Unmarshal(bare)
	}
	return &partial, utiljson.Unmarshal(bare, &partial)
}

func FuzzReadMeta(f *testing.F) {
	bareSeeds(f)
	f.Fuzz(checkReadMeta)
}

func checkReadMeta(t *testing.T, bare []byte, protobuf bool) {
	rep := Representation{Protobuf: protobuf}
	got, err := ReadMeta(rep, bare)
	_, _, errAnnotation := ReadAnnotation(rep, bare, "note")
	if err != nil {
		return
	}
	if !protobuf && !json.Valid(bare) {
		t.Fatalf("ReadMeta() takes what is no JSON")
	}
	m, errTyped := typedMeta(protobuf, bare)
	if errTyped != nil {
		return
	}
	want := Meta{
		Namespace: m.GetNamespace(), Name: m.GetName(), UID: string(m.GetUID()), ResourceVersion: m.GetResourceVersion(),
		Generation: m.GetGeneration(), DeletionTimestamp: m.GetDeletionTimestamp() != nil,
	}
	if got != want {
		t.Fatalf("ReadMeta() = %+v, want %+v", got, want)
	}
	if errAnnotation != nil {
		return
	}
	for key, want := range m.GetAnnotations() {
		if got, found, err := ReadAnnotation(rep, bare, key); err == nil && (got != want || !found) {
			t.Fatalf("ReadAnnotation(%q) = %q, %v, want %q", key, got, found, want)
		}
	}
}

func FuzzSetResourceVersion(f *testing.F) {
	bareSeeds(f)
	f.Fuzz(checkSetResourceVersion)
}

func checkSetResourceVersion(t *testing.T, bare []byte, protobuf bool) {
	rep := Representation{Protobuf: protobuf}
	before, err := ReadMeta(rep, bare)
	original := bytes.Clone(bare)
	changed, errSet := SetResourceVersion(rep, bare, "4711")
	if !bytes.Equal(bare, original) {
		t.Fatal("SetResourceVersion() changed its argument")
	}
	if err != nil || errSet != nil {
		return
	}
	m, errTyped := typedMeta(protobuf, bare)
	after, err := ReadMeta(rep, changed)
	before.ResourceVersion = "4711"
	if err != nil || after != before {
		t.Fatalf("ReadMeta() = %+v, %v, want %+v", after, err, before)
	}
	back, err := SetResourceVersion(rep, changed, "")
	if err != nil {
		t.Fatalf("second SetResourceVersion() error: %v", err)
	}
	if again, err := SetResourceVersion(rep, back, "4711"); err != nil || !bytes.Equal(again, changed) {
		t.Fatalf("SetResourceVersion() and back = %q, %v, want %q", again, err, changed)
	}
	if errTyped != nil {
		return
	}
	want := m.(*metav1.PartialObjectMetadata)
	want.ResourceVersion = "4711"
	got, err := typedMeta(protobuf, changed)
	if err != nil {
		t.Fatalf("changed object does not decode: %v", err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Fatalf("SetResourceVersion() (-want +got):\n%s", diff)
	}
}

func FuzzSelector(f *testing.F) {
	for _, c := range wireCases() {
		_, bare, err := DecodeObject(c.shape.Representation, c.get(f, c.objects[1]))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(bare, c.shape.Protobuf, c.shape.Unstructured, "app=pod,index!=2", "metadata.name=pod-1,spec.nodeName!=x")
		f.Add(bare, c.shape.Protobuf, c.shape.Unstructured, "", "spec.color=blue,metadata.namespace=default")
	}
	f.Fuzz(checkSelector)
}

func checkSelector(t *testing.T, bare []byte, protobuf, custom bool, label, field string) {
	selector, err := ParseSelector(label, field)
	labelSelector, errLabel := labels.Parse(label)
	fieldSelector, errField := fields.ParseSelector(field)
	if (err == nil) != (errLabel == nil && errField == nil) {
		t.Fatalf("ParseSelector() error = %v, want %v, %v", err, errLabel, errField)
	}
	if err != nil {
		return
	}
	_ = selector.String()
	shape := Shape{Representation: Representation{Protobuf: protobuf}, APIVersion: "v1", Kind: "Pod"}
	if custom && !protobuf {
		shape = Shape{APIVersion: "example.com/v1", Kind: "Widget", Unstructured: true}
	}
	got, err := selector.Matches(shape, bare)
	if err != nil {
		return
	}
	set, own, ok := attributes(shape, bare)
	if !ok {
		return
	}
	if want := labelSelector.Matches(set) && fieldSelector.Matches(own); got != want {
		t.Fatalf("Matches() = %v, want %v", got, want)
	}
}

// attributes are what the API server matches selectors with.
func attributes(shape Shape, bare []byte) (labels.Set, fields.Fields, bool) {
	var obj runtime.Object = &corev1.Pod{}
	if shape.Unstructured {
		obj = &unstructured.Unstructured{}
	}
	var err error
	switch o := obj.(type) {
	case *corev1.Pod:
		if shape.Protobuf {
			err = o.Unmarshal(bare)
		} else {
			err = utiljson.Unmarshal(bare, o)
		}
		if err != nil {
			return nil, nil, false
		}
		own := podFields(o)
		own["metadata.name"], own["metadata.namespace"] = o.Name, o.Namespace
		return o.Labels, own, true
	case *unstructured.Unstructured:
		if err = utiljson.Unmarshal(bare, &o.Object); err != nil {
			return nil, nil, false
		}
		m, err := meta.Accessor(o)
		if err != nil {
			return nil, nil, false
		}
		if _, _, err := unstructured.NestedStringMap(o.Object, "metadata", "labels"); err != nil {
			return nil, nil, false
		}
		return m.GetLabels(), customFields{o}, true
	}
	return nil, nil, false
}

// customFields looks selectableFields of a custom resource up.
type customFields struct{ *unstructured.Unstructured }

func (c customFields) Has(string) bool { return true }

func (c customFields) Get(field string) string {
	switch field {
	case "metadata.name":
		return c.GetName()
	case "metadata.namespace":
		return c.GetNamespace()
	}
	value, err := pathOf(c.Object, field)
	if err != nil {
		return ""
	}
	return value
}

func pathOf(object map[string]any, field string) (string, error) {
	value, _, err := unstructured.NestedFieldNoCopy(object, strings.Split(field, ".")...)
	return fmt.Sprint(value), err
}
