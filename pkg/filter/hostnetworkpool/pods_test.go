// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package hostnetworkpool

import (
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/filter"
)

func TestObserveConcernsKubelet(t *testing.T) {
	for _, tc := range []struct {
		name   string
		change func(*filter.Request)
		want   bool
	}{
		{"kubelet", func(*filter.Request) {}, true},
		{"its list", func(r *filter.Request) { r.Verb = "list" }, true},
		{"another spelling", func(r *filter.Request) { r.FieldSelector = "spec.nodeName==edge-1" }, true},
		{"whatever the program says", func(r *filter.Request) { r.Program = "x" }, true},
		{"a get", func(r *filter.Request) { r.Verb = "get" }, false},
		{"another user", func(r *filter.Request) { r.User = &user.DefaultInfo{Name: "system:node:edge-2"} }, false},
		{"nobody", func(r *filter.Request) { r.User = nil }, false},
		{"a namespace", func(r *filter.Request) { r.Namespace = "default" }, false},
		{"a name", func(r *filter.Request) { r.RequestInfo.Name = "a" }, false},
		{"labels", func(r *filter.Request) { r.LabelSelector = "a=b" }, false},
		{"all nodes", func(r *filter.Request) { r.FieldSelector = "" }, false},
		{"another node", func(r *filter.Request) { r.FieldSelector = "spec.nodeName=edge-2" }, false},
		{"all but this", func(r *filter.Request) { r.FieldSelector = "spec.nodeName!=edge-1" }, false},
		{"a part", func(r *filter.Request) { r.FieldSelector = "spec.nodeName=edge-1,status.phase=Running" }, false},
		{"no selector", func(r *filter.Request) { r.FieldSelector = "spec.nodeName" }, false},
		{"other objects", func(r *filter.Request) { r.Resource = "secrets" }, false},
		{"another group", func(r *filter.Request) { r.APIGroup = "metrics.k8s.io" }, false},
		{"a subresource", func(r *filter.Request) { r.Subresource = "log" }, false},
		{"no resource", func(r *filter.Request) { r.IsResourceRequest = false }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			req := kubelet("watch")
			tc.change(req)
			if got := newRig(t, &events{t: t}, known).Observe(req); (got != nil) != tc.want {
				t.Errorf("Observe() = %v, want an observation: %v", got, tc.want)
			}
		})
	}
}

// seen are the names and versions of the pods that are known.
func (r *rig) seen() (pods []string) {
	r.Observer.mu.Lock()
	defer r.Observer.mu.Unlock()
	for _, e := range r.pods {
		pods = append(pods, e.name+" "+e.resourceVersion)
	}
	slices.Sort(pods)
	return pods
}

func at(name, version string) *corev1.Pod {
	return with(newPodNamed(name, true, 0), func(p *corev1.Pod) { p.ResourceVersion = version })
}

func TestObservation(t *testing.T) {
	junk := filter.NewObject(protoPods, []byte("junk"))
	partial := filter.NewObject(codec.Shape{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"}, []byte(`{"metadata":{"name":"x","uid":"x"}}`))
	halfPod := filter.NewObject(jsonPods, []byte(`{"metadata":{"name":"a","uid":"uid-a","resourceVersion":"12"},"spec":1}`))
	for _, tc := range []struct {
		name string
		do   func(r *rig) // a and b are known by version 10
		want []string
	}{
		{"nothing", func(*rig) {}, []string{"a 10", "b 10"}},
		{"a list without b", func(r *rig) { r.list(at("a", "10"), at("c", "11")) }, []string{"a 10", "c 11"}},
		{"an empty list", func(r *rig) { r.list() }, nil},
		{"a list that breaks off", func(r *rig) {
			s := r.observe("list")
			s.See(watch.Added, object(at("a", "11")))
			s.End(false)
		}, []string{"a 11", "b 10"}},
		{"a watch with initial events", func(r *rig) {
			s := r.observe("watch")
			s.See(watch.Added, object(at("b", "10")))
			s.Synced()
			s.See(watch.Added, object(at("c", "12")))
			s.Synced() // once is enough
			s.See(watch.Modified, object(at("c", "13")))
			s.End(false)
		}, []string{"b 10", "c 13"}},
		{"a watch that goes on", func(r *rig) {
			s := r.observe("watch")
			s.See(watch.Modified, object(at("b", "11")))
			s.See(watch.Deleted, object(at("a", "12")))
			s.End(true)
		}, []string{"b 11"}},
		{"deleted and created anew", func(r *rig) {
			s := r.observe("watch")
			s.See(watch.Added, object(with(at("a", "12"), func(p *corev1.Pod) { p.UID = "second" })))
			s.See(watch.Deleted, object(at("a", "11")))
		}, []string{"a 12", "b 10"}},
		{"an older state", func(r *rig) { r.observe("watch").See(watch.Added, object(at("a", "9"))) }, []string{"a 10", "b 10"}},
		{"a state that cannot be compared", func(r *rig) { r.observe("watch").See(watch.Modified, object(at("a", "x"))) }, []string{"a x", "b 10"}},
		{"another answer saw it meanwhile", func(r *rig) {
			list, other := r.observe("list"), r.observe("watch")
			list.See(watch.Added, object(at("b", "10")))
			other.See(watch.Added, object(at("c", "11")))
			list.Synced()
		}, []string{"b 10", "c 11"}},
		{"another answer saw it deleted meanwhile", func(r *rig) {
			list, other := r.observe("list"), r.observe("watch")
			other.See(watch.Deleted, object(at("a", "11")))
			other.See(watch.Deleted, object(at("c", "11")))
			list.See(watch.Added, object(at("a", "10")))
			list.See(watch.Added, object(at("b", "10")))
			list.See(watch.Added, object(at("c", "10")))
			list.Synced()
			list.End(true)
		}, []string{"b 10"}},
		{"an object that is no pod at all", func(r *rig) {
			s := r.observe("list")
			s.See(watch.Added, junk)
			s.Synced()
		}, []string{"a 10", "b 10"}},
		{"half an object", func(r *rig) {
			s := r.observe("list")
			s.See(watch.Added, partial)
			s.Synced()
		}, []string{"a 10", "b 10"}},
		{"a pod that cannot be decoded", func(r *rig) {
			s := r.observe("list")
			s.See(watch.Added, halfPod)
			s.Synced()
		}, []string{"a 10", "b 10"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t, &events{t: t}, known)
			r.list(at("a", "10"), at("b", "10"))
			tc.do(r)
			if diff := cmp.Diff(tc.want, r.seen()); diff != "" {
				t.Errorf("known pods (-want +got):\n%s", diff)
			}
		})
	}
}

// What is remembered of deletions goes with those who may need it.
func TestDeletionsAreForgotten(t *testing.T) {
	r := newRig(t, &events{t: t}, known)
	one, two := r.observe("watch").(*observation), r.observe("watch").(*observation)
	for i := range 100 {
		one.See(watch.Deleted, object(at(strconv.Itoa(i), "10")))
	}
	if len(one.gone) != 0 || len(two.gone) != 100 {
		t.Errorf("%d and %d deletions are remembered, want 0 and 100", len(one.gone), len(two.gone))
	}
	for i := range 100 {
		two.See(watch.Deleted, object(at(strconv.Itoa(i), "10")))
	}
	if len(two.gone) != 0 {
		t.Errorf("%d deletions are remembered that were seen, want 0", len(two.gone))
	}
	one.End(false)
	two.End(true)
	if len(r.open) != 0 {
		t.Errorf("%d observations are open after their end", len(r.open))
	}
}

func TestFactsAreThoseOfBothEncodings(t *testing.T) {
	p := with(newPodNamed("a", true, 80), excluded)
	p.Spec.InitContainers = []corev1.Container{{Name: "s", RestartPolicy: new(corev1.ContainerRestartPolicyAlways), Ports: []corev1.ContainerPort{{ContainerPort: 81, Protocol: "UDP"}}}}
	b, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	var got []*pod
	for _, o := range []*filter.Object{object(p), filter.NewObject(jsonPods, b)} {
		r := newRig(t, &events{t: t}, known)
		r.observe("list").See(watch.Added, o)
		for _, e := range maps.Collect(maps.All(r.pods)) {
			got = append(got, e.pod)
		}
	}
	opt := cmp.AllowUnexported(pod{})
	if diff := cmp.Diff([]*pod{newPod(p), newPod(p)}, got, opt); diff != "" {
		t.Errorf("facts (-want +got):\n%s", diff)
	}
	if !got[0].excluded || !got[0].hostNetwork || len(got[0].ports) != 2 {
		t.Errorf("facts = %+v", got[0])
	}
}

// A pod whose version is known is not decoded: here it could not be.
func TestKnownPodsAreNotDecoded(t *testing.T) {
	r := newRig(t, &events{t: t}, known)
	r.list(at("a", "10"))
	same := filter.NewObject(jsonPods, []byte(`{"metadata":{"name":"a","namespace":"default","uid":"uid-a","resourceVersion":"10"},"spec":1}`))
	r.observe("list").See(watch.Added, same)
	if got := testutil.ToFloat64(r.metrics.unreadable); got != 0 {
		t.Errorf("%v objects were unreadable, want 0: the pod was decoded again", got)
	}
	newer := filter.NewObject(jsonPods, []byte(`{"metadata":{"name":"a","namespace":"default","uid":"uid-a","resourceVersion":"11"},"spec":1}`))
	r.observe("list").See(watch.Added, newer)
	if got := testutil.ToFloat64(r.metrics.unreadable); got != 1 {
		t.Errorf("%v objects were unreadable, want 1", got)
	}
}

func BenchmarkListOfKnownPods(b *testing.B) {
	const pods = 5000
	r := newRig(&testing.T{}, nil, known)
	bytes := make([][]byte, pods)
	s := r.observe("list")
	for i := range bytes {
		p := newPodNamed("pod-"+strconv.Itoa(i), true, 80)
		p.Status.Conditions = make([]corev1.PodCondition, 5)
		bytes[i], _ = p.Marshal()
		s.See(watch.Added, filter.NewObject(protoPods, bytes[i]))
	}
	b.ReportAllocs()
	for b.Loop() {
		s := r.observe("list")
		for _, o := range bytes {
			s.See(watch.Added, filter.NewObject(protoPods, o))
		}
		s.Synced()
	}
}
