// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metainternalversionscheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	metav1beta1 "k8s.io/apimachinery/pkg/apis/meta/v1beta1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	jsonserializer "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
)

// This file makes the bytes that kube-apiserver sends, with its own serializers,
// put together as in k8s.io/apiserver/pkg/endpoints/handlers (response.go,
// watch.go).

var serverCodecs = serializer.NewCodecFactory(clientscheme.Scheme,
	serializer.WithStreamingCollectionEncodingToJSON(), serializer.WithStreamingCollectionEncodingToProtobuf())

var widgetGVK = schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Widget"}

// wireCase is one kind in one representation, with its objects as they are in the
// server's storage.
type wireCase struct {
	name    string
	shape   Shape
	objects []runtime.Object
}

func wireCases() []wireCase {
	pods, deployments, widgets := testPods(3), testDeployments(2), testWidgets(3)
	var cases []wireCase
	for _, protobuf := range []bool{false, true} {
		rep := Representation{Protobuf: protobuf}
		cases = append(cases,
			wireCase{"pods", Shape{Representation: rep, APIVersion: "v1", Kind: "Pod", ListKind: "PodList"}, pods},
			wireCase{"deployments", Shape{Representation: rep, APIVersion: "apps/v1", Kind: "Deployment", ListKind: "DeploymentList"}, deployments})
		for _, version := range []string{"v1", "v1beta1"} {
			shape := Shape{
				Representation: Representation{Protobuf: protobuf, Partial: version},
				APIVersion:     "meta.k8s.io/" + version, Kind: "PartialObjectMetadata", ListKind: "PartialObjectMetadataList",
			}
			cases = append(cases, wireCase{"pods", shape, pods}, wireCase{"widgets", shape, widgets})
		}
	}
	return append(cases, wireCase{"widgets", Shape{
		APIVersion: "example.com/v1", Kind: "Widget", ListKind: "WidgetList", Unstructured: true,
	}, widgets})
}

func (c wireCase) String() string { return c.name + "/" + c.shape.Representation.String() }

// codecs are what the server uses for this kind, and the version it encodes to.
func (c wireCase) codecs() (runtime.NegotiatedSerializer, schema.GroupVersion) {
	gv, err := schema.ParseGroupVersion(c.shape.APIVersion)
	if err != nil {
		panic(err)
	}
	switch {
	case c.shape.Partial != "":
		return metainternalversionscheme.Codecs, gv
	case c.shape.Unstructured:
		return nil, gv
	}
	return serverCodecs, gv
}

func (c wireCase) info(codecs runtime.NegotiatedSerializer) runtime.SerializerInfo {
	info, ok := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), c.shape.ContentType())
	if !ok {
		panic("no serializer for " + c.shape.ContentType())
	}
	return info
}

func (c wireCase) encoder() runtime.Encoder {
	codecs, gv := c.codecs()
	if codecs == nil {
		return jsonserializer.NewSerializerWithOptions(jsonserializer.DefaultMetaFactory, nil, nil,
			jsonserializer.SerializerOptions{StreamingCollectionsEncoding: true})
	}
	return codecs.EncoderForVersion(c.info(codecs).Serializer, gv)
}

// transformed is the object as it is handed to the encoder.
func (c wireCase) transformed(obj runtime.Object) runtime.Object {
	if _, ok := obj.(*metav1.Status); ok || c.shape.Partial == "" {
		return obj
	}
	accessor, err := meta.Accessor(obj)
	if err != nil {
		panic(err)
	}
	partial := meta.AsPartialObjectMetadata(accessor)
	partial.SetGroupVersionKind(schema.FromAPIVersionAndKind(c.shape.APIVersion, c.shape.Kind))
	return partial
}

func (c wireCase) encode(tb testing.TB, obj runtime.Object) []byte {
	tb.Helper()
	b, err := runtime.Encode(c.encoder(), obj)
	if err != nil {
		tb.Fatalf("encode %T: %v", obj, err)
	}
	return b
}

// get is the body of a GET.
func (c wireCase) get(tb testing.TB, obj runtime.Object) []byte {
	return c.encode(tb, c.transformed(obj))
}

// listOf is the body of a LIST of n objects.
func (c wireCase) listOf(tb testing.TB, n int, listMeta metav1.ListMeta) []byte {
	var list runtime.Object
	switch {
	case c.shape.Partial == "v1":
		l := &metav1.PartialObjectMetadataList{ListMeta: listMeta, Items: []metav1.PartialObjectMetadata{}}
		for _, obj := range c.objects[:n] {
			l.Items = append(l.Items, *c.transformed(obj).(*metav1.PartialObjectMetadata))
		}
		list = l
	case c.shape.Partial == "v1beta1":
		l := &metav1beta1.PartialObjectMetadataList{ListMeta: listMeta, Items: []metav1.PartialObjectMetadata{}}
		for _, obj := range c.objects[:n] {
			l.Items = append(l.Items, *c.transformed(obj).(*metav1.PartialObjectMetadata))
		}
		list = l
	case c.name == "pods":
		l := &corev1.PodList{ListMeta: listMeta, Items: []corev1.Pod{}}
		for _, obj := range c.objects[:n] {
			l.Items = append(l.Items, *obj.(*corev1.Pod))
		}
		list = l
	case c.name == "deployments":
		l := &appsv1.DeploymentList{ListMeta: listMeta, Items: []appsv1.Deployment{}}
		for _, obj := range c.objects[:n] {
			l.Items = append(l.Items, *obj.(*appsv1.Deployment))
		}
		list = l
	default:
		l := &unstructured.UnstructuredList{}
		l.SetGroupVersionKind(widgetGVK.GroupVersion().WithKind("WidgetList"))
		l.SetResourceVersion(listMeta.ResourceVersion)
		l.SetContinue(listMeta.Continue)
		l.SetRemainingItemCount(listMeta.RemainingItemCount)
		for _, obj := range c.objects[:n] {
			l.Items = append(l.Items, *obj.(*unstructured.Unstructured))
		}
		list = l
	}
	return c.encode(tb, list)
}

// frame is one watch event, as watchEncoder writes it.
func (c wireCase) frame(tb testing.TB, t watch.EventType, obj runtime.Object) []byte {
	tb.Helper()
	event := &metav1.WatchEvent{Type: string(t), Object: runtime.RawExtension{Raw: c.get(tb, obj)}}
	// The event is encoded by the resource's serializer, also around partial objects.
	stream := c.info(serverCodecs).StreamSerializer
	b, err := runtime.Encode(serverCodecs.EncoderForVersion(stream.Serializer, corev1.SchemeGroupVersion), event)
	if err != nil {
		tb.Fatalf("encode watch event: %v", err)
	}
	var framed bytes.Buffer
	if _, err := stream.Framer.NewFrameWriter(&framed).Write(b); err != nil {
		tb.Fatal(err)
	}
	return framed.Bytes()
}

func testMeta(kind string, i int) metav1.ObjectMeta {
	created := metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	m := metav1.ObjectMeta{
		Name:              fmt.Sprintf("%s-%d", kind, i),
		Namespace:         "default",
		UID:               types.UID(fmt.Sprintf("8f7f6a2c-0000-4000-8000-%012d", i)),
		ResourceVersion:   fmt.Sprint(1000 + i),
		Generation:        int64(i),
		CreationTimestamp: created,
		Labels:            map[string]string{"app": kind, "index": fmt.Sprint(i)},
		Annotations:       map[string]string{"note": "a \"quoted\" <b>&\u2028 Grüße", "empty": ""},
		ManagedFields: []metav1.ManagedFieldsEntry{{
			Manager: "kubectl", Operation: metav1.ManagedFieldsOperationApply, APIVersion: "v1", Time: &created, FieldsType: "FieldsV1",
			FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{".":{},"f:app":{}}}}`),
		}},
	}
	if i%2 == 1 {
		m.DeletionTimestamp = &created
		m.Finalizers = []string{"example.com/wait"}
	}
	return m
}

func testPods(n int) []runtime.Object {
	objects := make([]runtime.Object, n)
	for i := range objects {
		objects[i] = &corev1.Pod{
			ObjectMeta: testMeta("pod", i),
			Spec: corev1.PodSpec{
				NodeName: fmt.Sprintf("node-%d", i), RestartPolicy: corev1.RestartPolicyAlways, SchedulerName: "default-scheduler",
				ServiceAccountName: "default", DeprecatedServiceAccount: "default", HostNetwork: i == 1,
				Containers: []corev1.Container{{
					Name: "c", Image: "registry.example.com/app:v1", Args: []string{"--flag", strings.Repeat("x", 100*i)},
					Env: []corev1.EnvVar{{Name: "PATH_LIKE", Value: "/a\\b\t\"c\""}},
					Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
						corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("128Mi"),
					}},
				}},
			},
			Status: corev1.PodStatus{
				Phase: corev1.PodRunning, PodIP: fmt.Sprintf("10.0.0.%d", i), NominatedNodeName: "other",
				PodIPs: []corev1.PodIP{{IP: fmt.Sprintf("10.0.0.%d", i)}, {IP: "fd00::1"}},
			},
		}
	}
	return objects
}

func testDeployments(n int) []runtime.Object {
	objects := make([]runtime.Object, n)
	for i := range objects {
		replicas := int32(i)
		objects[i] = &appsv1.Deployment{
			ObjectMeta: testMeta("deployment", i),
			Spec: appsv1.DeploymentSpec{
				Replicas: &replicas,
				Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "deployment"}},
			},
		}
	}
	return objects
}

func testWidgets(n int) []runtime.Object {
	objects := make([]runtime.Object, n)
	for i := range objects {
		m := testMeta("widget", i)
		u := &unstructured.Unstructured{Object: map[string]any{
			"spec": map[string]any{"color": "blue", "size": int64(i), "on": i == 0, "deep": map[string]any{"er": "x"}, "list": []any{int64(1)}},
		}}
		u.SetGroupVersionKind(widgetGVK)
		u.SetName(m.Name)
		u.SetNamespace(m.Namespace)
		u.SetUID(m.UID)
		u.SetResourceVersion(m.ResourceVersion)
		u.SetGeneration(m.Generation)
		u.SetCreationTimestamp(m.CreationTimestamp)
		u.SetDeletionTimestamp(m.DeletionTimestamp)
		u.SetLabels(m.Labels)
		u.SetAnnotations(m.Annotations)
		objects[i] = u
	}
	return objects
}
