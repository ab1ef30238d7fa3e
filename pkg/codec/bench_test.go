// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
)

// benchPod is about as large as a pod in a cluster: 4 KiB in JSON.
func benchPod(i int) *corev1.Pod {
	pod := testPods(2)[1].(*corev1.Pod)
	pod.Name = fmt.Sprintf("pod-%d", i)
	c := pod.Spec.Containers[0]
	for k := range 8 {
		c.Env = append(c.Env, corev1.EnvVar{Name: fmt.Sprintf("VARIABLE_%d", k), Value: "some value that means little"})
		c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: fmt.Sprintf("v%d", k), MountPath: fmt.Sprintf("/mnt/%d", k), ReadOnly: true})
		pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{
			Type: "Ready", Status: corev1.ConditionTrue, LastTransitionTime: pod.CreationTimestamp, Message: "containers with unready status: []",
		})
	}
	pod.Spec.Containers = []corev1.Container{c}
	pod.ManagedFields[0].FieldsV1 = metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{".":{},"f:note":{}},"f:labels":{".":{},"f:app":{}}},"f:spec":{"f:containers":{"k:{\"name\":\"c\"}":{".":{},"f:args":{},"f:env":{".":{},"k:{\"name\":\"A\"}":{".":{},"f:name":{},"f:value":{}}},"f:image":{},"f:name":{},"f:resources":{}}},"f:nodeName":{}}}`)
	return pod
}

func benchCase(protobuf bool, n int) wireCase {
	c := wireCase{"pods", Shape{Representation: Representation{Protobuf: protobuf}, APIVersion: "v1", Kind: "Pod", ListKind: "PodList"}, nil}
	for i := range n {
		c.objects = append(c.objects, benchPod(i))
	}
	return c
}

func eachEncoding(b *testing.B, run func(b *testing.B, protobuf bool)) {
	for _, protobuf := range []bool{false, true} {
		b.Run(Representation{Protobuf: protobuf}.String(), func(b *testing.B) { run(b, protobuf) })
	}
}

func BenchmarkListDecoder(b *testing.B) {
	eachEncoding(b, func(b *testing.B, protobuf bool) {
		c := benchCase(protobuf, 1000)
		wire := c.listOf(b, 1000, metav1.ListMeta{ResourceVersion: "12"})
		b.SetBytes(int64(len(wire)))
		b.ReportAllocs()
		for b.Loop() {
			d := NewListDecoder(c.shape.Representation, testMaxBytes, func(Shape, []byte) error { return nil })
			for rest := wire; len(rest) > 0; {
				n := min(len(rest), 32<<10)
				if _, err := d.Write(rest[:n]); err != nil {
					b.Fatal(err)
				}
				rest = rest[n:]
			}
			if _, err := d.Close(); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// BenchmarkListUnmarshal is what ListDecoder is to be compared with.
func BenchmarkListUnmarshal(b *testing.B) {
	b.Run("json raw items", func(b *testing.B) {
		wire := benchCase(false, 1000).listOf(b, 1000, metav1.ListMeta{ResourceVersion: "12"})
		b.SetBytes(int64(len(wire)))
		b.ReportAllocs()
		for b.Loop() {
			var list struct {
				Items []json.RawMessage `json:"items"`
			}
			if err := json.Unmarshal(wire, &list); err != nil {
				b.Fatal(err)
			}
		}
	})
	eachEncoding(b, func(b *testing.B, protobuf bool) {
		wire := benchCase(protobuf, 1000).listOf(b, 1000, metav1.ListMeta{ResourceVersion: "12"})
		b.SetBytes(int64(len(wire)))
		b.ReportAllocs()
		for b.Loop() {
			if _, err := runtime.Decode(serverCodecs.UniversalDeserializer(), wire); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkReadMeta(b *testing.B) {
	eachEncoding(b, func(b *testing.B, protobuf bool) {
		c := benchCase(protobuf, 1)
		_, bare, err := DecodeObject(c.shape.Representation, c.get(b, c.objects[0]))
		if err != nil {
			b.Fatal(err)
		}
		b.SetBytes(int64(len(bare)))
		b.ReportAllocs()
		for b.Loop() {
			if _, err := ReadMeta(c.shape.Representation, bare); err != nil {
				b.Fatal(err)
			}
		}
	})
}

func BenchmarkSelector(b *testing.B) {
	for name, s := range map[string][2]string{
		"labels": {"app=pod,index notin (7)", ""}, "name": {"", "metadata.name=pod-0"}, "nodeName": {"", "spec.nodeName=node-1"},
	} {
		eachEncoding(b, func(b *testing.B, protobuf bool) {
			b.Run(name, func(b *testing.B) {
				c := benchCase(protobuf, 1)
				_, bare, err := DecodeObject(c.shape.Representation, c.get(b, c.objects[0]))
				if err != nil {
					b.Fatal(err)
				}
				selector, err := ParseSelector(s[0], s[1])
				if err != nil {
					b.Fatal(err)
				}
				b.ReportAllocs()
				for b.Loop() {
					if ok, err := selector.Matches(c.shape, bare); err != nil || !ok {
						b.Fatal(ok, err)
					}
				}
			})
		})
	}
}

// BenchmarkWatch reads frames and decodes their objects, as a feed does.
func BenchmarkWatch(b *testing.B) {
	eachEncoding(b, func(b *testing.B, protobuf bool) {
		c := benchCase(protobuf, 1000)
		var stream []byte
		for _, obj := range c.objects {
			stream = append(stream, c.frame(b, watch.Added, obj)...)
		}
		b.SetBytes(int64(len(stream)))
		b.ReportAllocs()
		for b.Loop() {
			r := NewFrameReader(bytes.NewReader(stream), c.shape.Representation, testMaxBytes)
			for {
				frame, err := r.Next()
				if err == io.EOF { //nolint:errorlint // exactly this
					break
				}
				if err != nil {
					b.Fatal(err)
				}
				if _, _, err := DecodeObject(c.shape.Representation, frame.Object); err != nil {
					b.Fatal(err)
				}
			}
		}
	})
}

func BenchmarkAppendList(b *testing.B) {
	eachEncoding(b, func(b *testing.B, protobuf bool) {
		c := benchCase(protobuf, 1000)
		list, err := decodeList(c.shape.Representation, [][]byte{c.listOf(b, 1000, metav1.ListMeta{ResourceVersion: "12"})})
		if err != nil {
			b.Fatal(err)
		}
		lens := func(yield func(int) bool) {
			for _, bare := range list.Items {
				if !yield(len(bare)) {
					return
				}
			}
		}
		buf := make([]byte, 0, 64<<10)
		b.SetBytes(c.shape.ListLen("12", lens))
		b.ReportAllocs()
		for b.Loop() {
			buf = c.shape.AppendListHead(buf[:0], "12", lens)
			for i, bare := range list.Items {
				buf = append(c.shape.AppendListItem(buf[:0], nil, i == 0), bare...)
			}
		}
	})
}
