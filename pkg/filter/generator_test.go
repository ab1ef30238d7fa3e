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

	"google.golang.org/protobuf/encoding/protowire"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/edgehub/edgehub/pkg/codec"
)

// unknownField is one that no Go type has.
const unknownField = 3999

// A generator makes objects with elements that can be told apart, at random.
type generator struct{ *rand.Rand }

func (g generator) pod() *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: g.meta()}
	for i := range g.IntN(4) {
		c := corev1.Container{Name: fmt.Sprintf("c%d", i), Image: g.word()}
		for j := range g.IntN(4) {
			c.Env = append(c.Env, corev1.EnvVar{Name: fmt.Sprintf("E%d", j), Value: g.word()})
			c.Ports = append(c.Ports, corev1.ContainerPort{ContainerPort: int32(80 + j), Protocol: "TCP"})
			c.VolumeMounts = append(c.VolumeMounts, corev1.VolumeMount{Name: "v", MountPath: fmt.Sprintf("/m%d", j)})
		}
		c.Resources.Limits = corev1.ResourceList{"cpu": resource.MustParse("250m"), "memory": resource.MustParse("1Gi")}
		p.Spec.Containers = append(p.Spec.Containers, c)
	}
	p.Spec.Tolerations = []corev1.Toleration{{Key: g.word(), Operator: "Exists"}}
	p.Spec.NodeSelector = map[string]string{"zone": g.word()}
	p.Status.PodIPs = []corev1.PodIP{{IP: "10.0.0.1"}, {IP: "fd00::1"}}
	return p
}

func (g generator) service() *corev1.Service {
	s := &corev1.Service{ObjectMeta: g.meta(), Spec: corev1.ServiceSpec{ClusterIP: "10.0.0.1", Selector: map[string]string{"app": g.word()}}}
	for i := range g.IntN(4) {
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: fmt.Sprintf("p%d", i), Port: int32(i), TargetPort: intstr.FromInt32(int32(g.IntN(9)))})
		s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("1.1.1.%d", i))
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: fmt.Sprintf("2.2.2.%d", i)})
	}
	return s
}

func (g generator) slice() *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{ObjectMeta: g.meta(), AddressType: "IPv4"}
	for i := range g.IntN(5) {
		ready := g.IntN(2) == 0
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.1.0.%d", i)},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready},
			Hints:      &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "a"}, {Name: "b"}}},
		})
	}
	name, port := "http", int32(80)
	s.Ports = []discoveryv1.EndpointPort{{Name: &name, Port: &port}}
	return s
}

func (g generator) configMap() *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: g.meta(), Data: map[string]string{"a": g.word(), "b": "<&>\u2028"}, BinaryData: map[string][]byte{"c": {0, 1, 255}}}
}

func (g generator) meta() metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: "o", Namespace: "shop", ResourceVersion: "7", Labels: map[string]string{"a": g.word(), "b": g.word()}, Annotations: map[string]string{"c": g.word()},
		OwnerReferences: []metav1.OwnerReference{{Kind: "K", Name: "x", UID: "1"}, {Kind: "K", Name: "y", UID: "2"}}, Finalizers: []string{"f/a", "f/b"},
	}
}

func (g generator) word() string {
	return []string{"", "one", "two", "three", "1000m", "\n"}[g.IntN(6)]
}

func (g generator) object() message {
	switch g.IntN(4) {
	case 0:
		return g.pod()
	case 1:
		return g.service()
	case 2:
		return g.slice()
	}
	return g.configMap()
}

// mutate changes something at random, somewhere below v, by the Go type alone.
func (g generator) mutate(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() || g.IntN(8) == 0 && v.CanSet() {
			if v.CanSet() {
				v.SetZero()
			}
			return
		}
		g.mutate(v.Elem())
	case reflect.Struct:
		switch v.Interface().(type) {
		case resource.Quantity:
			v.Set(reflect.ValueOf(resource.MustParse([]string{"1", "2Gi", "100000000", "0"}[g.IntN(4)])))
			return
		case metav1.Time, metav1.TypeMeta, intstr.IntOrString:
			return
		}
		g.mutate(v.Field(g.IntN(v.NumField())))
	case reflect.Slice:
		g.mutateSlice(v)
	case reflect.Map:
		g.mutateMap(v)
	case reflect.String:
		v.SetString(v.String() + "x")
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.Int32, reflect.Int64:
		v.SetInt(v.Int() + 1)
	}
}

func (g generator) mutateSlice(v reflect.Value) {
	n := v.Len()
	if n == 0 {
		return
	}
	i := g.IntN(n)
	switch g.IntN(5) {
	case 0: // remove
		v.Set(reflect.AppendSlice(reflect.AppendSlice(reflect.Zero(v.Type()), v.Slice(0, i)), v.Slice(i+1, n)))
	case 1: // swap
		swap := reflect.Swapper(v.Interface())
		swap(i, g.IntN(n))
	case 2: // add
		v.Set(reflect.Append(v, reflect.New(v.Type().Elem()).Elem()))
	case 3: // clear
		v.SetZero()
	default:
		g.mutate(v.Index(i))
	}
}

func (g generator) mutateMap(v reflect.Value) {
	if v.Len() == 0 {
		return
	}
	keys := v.MapKeys()
	slices.SortFunc(keys, func(a, b reflect.Value) int { return bytes.Compare([]byte(a.String()), []byte(b.String())) })
	key := keys[g.IntN(len(keys))]
	elem := reflect.New(v.Type().Elem()).Elem()
	switch g.IntN(3) {
	case 0: // remove
		elem = reflect.Value{}
	case 1: // add
		key = reflect.ValueOf("new").Convert(v.Type().Key())
	default:
		elem.Set(v.MapIndex(key))
		g.mutate(elem)
	}
	v.SetMapIndex(key, elem)
}

// isMessage reports whether a length-delimited value is a message of ours rather than a
// text. The texts of the generator are none.
func isMessage(b []byte) bool {
	for len(b) > 0 {
		n, t, tag := protowire.ConsumeTag(b)
		if tag < 0 || n > 60 || t != protowire.BytesType && t != protowire.VarintType {
			return false
		}
		value := protowire.ConsumeFieldValue(n, t, b[tag:])
		if value < 0 {
			return false
		}
		b = b[tag+value:]
	}
	return true
}

// sprinkle adds an unknown field, numbered from 1 on, to every message in b.
func sprinkle(b []byte, next *uint64) []byte {
	var out []byte
	for rest := b; len(rest) > 0; {
		n, t, tag := protowire.ConsumeTag(rest)
		value := protowire.ConsumeFieldValue(n, t, rest[tag:])
		field := rest[tag : tag+value]
		out = append(out, rest[:tag]...)
		rest = rest[tag+value:]
		if inner, _ := protowire.ConsumeBytes(field); t == protowire.BytesType && len(inner) > 0 && isMessage(inner) {
			out = protowire.AppendBytes(out, sprinkle(inner, next))
		} else {
			out = append(out, field...)
		}
	}
	*next++
	return protowire.AppendVarint(protowire.AppendTag(out, unknownField, protowire.VarintType), *next)
}

// sprinkleJSON adds an unknown member to every object in v that is not a map of texts,
// which have the entry instead.
func sprinkleJSON(v any, next *int) {
	switch v := v.(type) {
	case []any:
		for _, e := range v {
			sprinkleJSON(e, next)
		}
	case map[string]any:
		texts := len(v) > 0
		for _, k := range slices.Sorted(mapKeys(v)) {
			sprinkleJSON(v[k], next)
			_, isText := v[k].(string)
			texts = texts && isText
		}
		if *next++; !texts {
			v["unknown"] = []any{json.Number(fmt.Sprintf("1234567890123456789%d", *next)), json.Number("1e3"), map[string]any{"n": json.Number("1.0")}}
		}
	}
}

func mapKeys(m map[string]any) func(func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// gvkOf is what the objects of the generator are called.
func shapeOf(t testing.TB, m message, protobuf bool) codec.Shape {
	t.Helper()
	for gvk, make := range types {
		if reflect.TypeOf(make()) == reflect.TypeOf(m) {
			apiVersion, kind := gvk.ToAPIVersionAndKind()
			return codec.Shape{Representation: codec.Representation{Protobuf: protobuf}, APIVersion: apiVersion, Kind: kind, ListKind: kind + "List"}
		}
	}
	t.Fatalf("%T is not in types", m)
	return codec.Shape{}
}
