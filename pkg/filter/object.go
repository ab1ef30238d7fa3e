// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bytes"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utiljson "k8s.io/apimachinery/pkg/util/json"

	"github.com/edgehub/edgehub/pkg/codec"
)

// An Object is one object on its way to a client. It is decoded only if somebody asks
// for more than its metadata, and once for all filters. It is not safe for concurrent use.
type Object struct {
	shape codec.Shape
	bare  []byte // as it came
	meta  *codec.Meta
	typed runtime.Object // what As decoded; filters change it
}

// NewObject wraps a bare object; see package codec.
func NewObject(shape codec.Shape, bare []byte) *Object { return &Object{shape: shape, bare: bare} }

// Shape is the object's kind and encoding.
func (o *Object) Shape() codec.Shape { return o.shape }

// Meta is the object's metadata as it came.
func (o *Object) Meta() (codec.Meta, error) {
	if o.meta == nil {
		m, err := codec.ReadMeta(o.shape.Representation, o.bare)
		if err != nil {
			return m, err
		}
		o.meta = &m
	}
	return *o.meta, nil
}

// Peek is which version of which object it is, at next to no cost; false where that is
// known from all of its metadata only. The bytes are the object's.
func (o *Object) Peek() (codec.Identity, bool) {
	return codec.PeekIdentity(o.shape.Representation, o.bare, false)
}

// Is reports whether the object has this namespace and name.
func (o *Object) Is(namespace, name string) (bool, error) {
	m, err := o.Meta()
	return err == nil && m.Namespace == namespace && m.Name == name, err
}

// Annotation is an annotation as it came.
func (o *Object) Annotation(key string) (value string, ok bool, err error) {
	return codec.ReadAnnotation(o.shape.Representation, o.bare, key)
}

// message is what the types of k8s.io/api are.
type message interface {
	runtime.Object
	Marshal() ([]byte, error)
	Unmarshal(b []byte) error
}

// types are the kinds that filters know in protobuf. Of all others they get JSON, as
// unstructured.Unstructured.
var types = map[schema.GroupVersionKind]func() message{
	{Version: "v1", Kind: "Service"}:                                  func() message { return &corev1.Service{} },
	{Version: "v1", Kind: "Endpoints"}:                                func() message { return &corev1.Endpoints{} }, //nolint:staticcheck // clients that are older than EndpointSlice
	{Version: "v1", Kind: "ConfigMap"}:                                func() message { return &corev1.ConfigMap{} },
	{Version: "v1", Kind: "Pod"}:                                      func() message { return &corev1.Pod{} },
	{Version: "v1", Kind: "Node"}:                                     func() message { return &corev1.Node{} },
	{Version: "v1", Kind: "Secret"}:                                   func() message { return &corev1.Secret{} },
	{Group: "discovery.k8s.io", Version: "v1", Kind: "EndpointSlice"}: func() message { return &discoveryv1.EndpointSlice{} },
}

// typedResources are those of types.
var typedResources = map[schema.GroupVersionResource]bool{
	{Version: "v1", Resource: "services"}:                                  true,
	{Version: "v1", Resource: "endpoints"}:                                 true,
	{Version: "v1", Resource: "configmaps"}:                                true,
	{Version: "v1", Resource: "pods"}:                                      true,
	{Version: "v1", Resource: "nodes"}:                                     true,
	{Version: "v1", Resource: "secrets"}:                                   true,
	{Group: "discovery.k8s.io", Version: "v1", Resource: "endpointslices"}: true,
}

var errType = errors.New("object is of another kind")

// As decodes the object as the Go type of its kind: Service, Endpoints, ConfigMap, Pod,
// Node, Secret or EndpointSlice. It is the same pointer every time, so that a filter sees
// what those before it have changed. Fields that the type does not have are not lost.
func As[T any, P interface {
	*T
	runtime.Object
}](o *Object) (P, error) {
	typed, err := o.Decode()
	if err != nil {
		return nil, err
	}
	p, ok := typed.(P)
	if !ok {
		return nil, fmt.Errorf("%s %s is not a %T: %w", o.shape.APIVersion, o.shape.Kind, p, errType)
	}
	return p, nil
}

// Decode decodes the object, as As does, into whatever type there is for it:
// *unstructured.Unstructured where there is none.
func (o *Object) Decode() (runtime.Object, error) {
	if o.typed != nil {
		return o.typed, nil
	}
	typed, err := o.decode()
	if err != nil {
		return nil, fmt.Errorf("decode %s %s: %w", o.shape.APIVersion, o.shape.Kind, err)
	}
	o.typed = typed
	return typed, nil
}

func (o *Object) decode() (runtime.Object, error) {
	gvk := schema.FromAPIVersionAndKind(o.shape.APIVersion, o.shape.Kind)
	if typed := types[gvk]; typed != nil {
		m := typed()
		if o.shape.Protobuf {
			return m, m.Unmarshal(o.bare)
		}
		return m, utiljson.Unmarshal(o.bare, m)
	}
	if o.shape.Protobuf {
		return nil, errType
	}
	u := &unstructured.Unstructured{}
	return u, utiljson.Unmarshal(o.bare, &u.Object)
}

// Encode returns the bare object as filters have changed it. What the Go type does not
// know stays as it came.
func (o *Object) Encode() ([]byte, error) {
	if o.typed == nil {
		return o.bare, nil
	}
	before, err := o.decode()
	if err != nil {
		return nil, err
	}
	was, err := o.marshal(before)
	if err != nil {
		return nil, err
	}
	is, err := o.marshal(o.typed)
	if err != nil || bytes.Equal(was, is) {
		return o.bare, err
	}
	if o.shape.Protobuf {
		return mergeProto(o.bare, was, is)
	}
	return mergeJSON(o.bare, was, is)
}

func (o *Object) marshal(typed runtime.Object) ([]byte, error) {
	switch t := typed.(type) {
	case *unstructured.Unstructured:
		return utiljson.Marshal(t.Object)
	case message:
		if o.shape.Protobuf {
			return t.Marshal()
		}
		return utiljson.Marshal(t)
	}
	return nil, errType
}
