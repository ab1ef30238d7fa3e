// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

const testMaxBytes = 1 << 20

// chunkings cut b in ways in which a network may.
func chunkings(b []byte) map[string][][]byte {
	r := rand.New(rand.NewPCG(1, uint64(len(b))))
	random := [][]byte{}
	for rest := b; len(rest) > 0; {
		n := min(1+r.IntN(40), len(rest))
		random = append(random, rest[:n])
		rest = rest[n:]
	}
	return map[string][][]byte{
		"whole":    {b},
		"bytes":    slices.Collect(slices.Chunk(b, 1)),
		"sevens":   slices.Collect(slices.Chunk(b, 7)),
		"randomly": random,
	}
}

type decodedList struct {
	List  List
	Items []string
}

func decodeList(rep Representation, chunks [][]byte) (decodedList, error) {
	var got decodedList
	var shapes []Shape
	d := NewListDecoder(rep, testMaxBytes, func(shape Shape, bare []byte) error {
		shapes = append(shapes, shape)
		got.Items = append(got.Items, string(bare))
		return nil
	})
	for _, chunk := range chunks {
		if n, err := d.Write(chunk); err != nil {
			return decodedList{}, err
		} else if n != len(chunk) {
			return decodedList{}, io.ErrShortWrite
		}
	}
	list, err := d.Close()
	if err != nil {
		return decodedList{}, err
	}
	for _, shape := range shapes {
		shape.ListKind = list.Shape.ListKind
		if shape != list.Shape {
			return decodedList{}, errors.New("items of different shapes")
		}
	}
	if list.Items != len(got.Items) {
		return decodedList{}, errors.New("wrong count of items")
	}
	got.List = list
	return got, nil
}

func buildList(s Shape, resourceVersion string, bares []string) []byte {
	lens := func(yield func(int) bool) {
		for _, bare := range bares {
			if !yield(len(bare)) {
				return
			}
		}
	}
	b := s.AppendListHead(nil, resourceVersion, lens)
	for i, bare := range bares {
		b = s.AppendListItem(b, []byte(bare), i == 0)
	}
	b = s.AppendListTail(b, resourceVersion)
	if want := s.ListLen(resourceVersion, lens); int64(len(b)) != want {
		panic("ListLen is wrong")
	}
	return b
}

func TestGetRoundTrip(t *testing.T) {
	for _, c := range wireCases() {
		t.Run(c.String(), func(t *testing.T) {
			for _, obj := range c.objects {
				wire := c.get(t, obj)
				before := bytes.Clone(wire)
				shape, bare, err := DecodeObject(c.shape.Representation, wire)
				if err != nil {
					t.Fatalf("DecodeObject() error: %v", err)
				}
				if diff := cmp.Diff(c.shape, shape); diff != "" {
					t.Errorf("DecodeObject() shape (-want +got):\n%s", diff)
				}
				if got := shape.AppendObject(nil, bare); !bytes.Equal(got, before) {
					t.Errorf("AppendObject() = %q, want %q", got, before)
				}
				if got, want := shape.ObjectLen(len(bare)), len(wire); got != want {
					t.Errorf("ObjectLen() = %d, want %d", got, want)
				}
			}
		})
	}
}

func TestListRoundTrip(t *testing.T) {
	for _, c := range wireCases() {
		for n := range len(c.objects) + 1 {
			wire := c.listOf(t, n, metav1.ListMeta{ResourceVersion: "12"})
			for name, chunks := range chunkings(wire) {
				t.Run(c.String()+"/"+name, func(t *testing.T) {
					got, err := decodeList(c.shape.Representation, chunks)
					if err != nil {
						t.Fatalf("ListDecoder error: %v\n%q", err, wire)
					}
					want := List{Shape: c.shape, ResourceVersion: "12", Items: n}
					if diff := cmp.Diff(want, got.List); diff != "" {
						t.Errorf("List (-want +got):\n%s", diff)
					}
					for i, bare := range got.Items {
						_, fromGet, err := DecodeObject(c.shape.Representation, c.get(t, c.objects[i]))
						if err != nil {
							t.Fatal(err)
						}
						if bare != string(fromGet) {
							t.Errorf("item %d = %q, want %q", i, bare, fromGet)
						}
					}
					if built := buildList(got.List.Shape, "12", got.Items); !bytes.Equal(built, wire) {
						t.Errorf("AppendList = %q, want %q", built, wire)
					}
				})
			}
		}
	}
}

func TestListPage(t *testing.T) {
	remaining := int64(7)
	listMeta := metav1.ListMeta{ResourceVersion: "99", Continue: "eyJ2IjoibWV0YSJ9", RemainingItemCount: &remaining}
	for _, c := range wireCases() {
		t.Run(c.String(), func(t *testing.T) {
			got, err := decodeList(c.shape.Representation, [][]byte{c.listOf(t, 1, listMeta)})
			if err != nil {
				t.Fatalf("ListDecoder error: %v", err)
			}
			want := List{Shape: c.shape, ResourceVersion: "99", Continue: listMeta.Continue, RemainingItemCount: &remaining, Items: 1}
			if diff := cmp.Diff(want, got.List); diff != "" {
				t.Errorf("List (-want +got):\n%s", diff)
			}
		})
	}
}

func TestListSharded(t *testing.T) {
	listMeta := metav1.ListMeta{ResourceVersion: "99", ShardInfo: &metav1.ShardInfo{Selector: "x"}}
	for _, c := range wireCases() {
		if c.shape.Unstructured {
			continue
		}
		t.Run(c.String(), func(t *testing.T) {
			got, err := decodeList(c.shape.Representation, [][]byte{c.listOf(t, 1, listMeta)})
			if err != nil || !got.List.Sharded {
				t.Errorf("ListDecoder: Sharded = %v, error %v, want true", got.List.Sharded, err)
			}
		})
	}
}

func TestWatchRoundTrip(t *testing.T) {
	status := &metav1.Status{
		Status: metav1.StatusFailure, Code: 410, Reason: metav1.StatusReasonExpired,
		Message: "too old resource version: 1 (<2>)",
	}
	for _, c := range wireCases() {
		t.Run(c.String(), func(t *testing.T) {
			var stream []byte
			var frames [][]byte
			var objects [][]byte
			add := func(event watch.EventType, obj runtime.Object) {
				frames = append(frames, c.frame(t, event, obj))
				objects = append(objects, c.get(t, obj))
				stream = append(stream, frames[len(frames)-1]...)
			}
			for _, obj := range c.objects {
				add(watch.Added, obj)
				add(watch.Modified, obj)
				add(watch.Deleted, obj)
			}
			if !c.shape.Unstructured { // there the encoder of this test cannot set the type
				add(watch.Error, status)
				if got, want := AppendStatusFrame(nil, c.shape.Representation, status), frames[len(frames)-1]; !bytes.Equal(got, want) {
					t.Errorf("AppendStatusFrame() = %q, want %q", got, want)
				}
			}
			for name, r := range map[string]io.Reader{
				"whole": bytes.NewReader(stream), "bytes": iotest.OneByteReader(bytes.NewReader(stream)),
				"eof with data": iotest.DataErrReader(bytes.NewReader(stream)),
			} {
				reader := NewFrameReader(r, c.shape.Representation, testMaxBytes)
				for i, want := range frames {
					frame, err := reader.Next()
					if err != nil {
						t.Fatalf("%s: Next() error: %v", name, err)
					}
					if got, want := frame.Object, bytes.TrimSuffix(objects[i], []byte("\n")); !bytes.Equal(got, want) {
						t.Errorf("%s: Object = %q, want %q", name, got, want)
					}
					shape, bare, err := DecodeObject(c.shape.Representation, frame.Object)
					if err != nil {
						t.Fatalf("%s: DecodeObject() error: %v", name, err)
					}
					if frame.Type != watch.Error && shape != c.shape {
						t.Errorf("%s: shape = %v, want %v", name, shape, c.shape)
					}
					if got := shape.AppendFrame(nil, frame.Type, bare); !bytes.Equal(got, want) {
						t.Errorf("%s: AppendFrame() = %q, want %q", name, got, want)
					}
				}
				if _, err := reader.Next(); err != io.EOF { //nolint:errorlint // exactly this
					t.Errorf("%s: Next() error = %v, want io.EOF", name, err)
				}
			}
		})
	}
}
