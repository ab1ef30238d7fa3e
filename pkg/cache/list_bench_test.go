// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/codec"
)

const protobufType = "application/vnd.kubernetes.protobuf"

// A cannedServer answers each path with the same bytes, until it is down.
type cannedServer struct {
	bodies map[string][]byte
	types  map[string]string
	down   atomic.Bool
	never  chan struct{}
}

func (s *cannedServer) Up() bool                 { return !s.down.Load() }
func (s *cannedServer) Changed() <-chan struct{} { return s.never }

func (s *cannedServer) RoundTrip(req *http.Request) (*http.Response, error) {
	if s.down.Load() {
		return nil, errDown
	}
	body, ok := s.bodies[req.URL.Path]
	if !ok {
		return nil, fmt.Errorf("no answer to %s", req.URL.Path)
	}
	return &http.Response{
		StatusCode: 200, Status: "200 OK", Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: req, ContentLength: int64(len(body)),
		Header: http.Header{"Content-Type": {s.types[req.URL.Path]}}, Body: io.NopCloser(bytes.NewReader(body)),
	}, nil
}

// cannedPod is a pod of about 2 KB, as a cluster has them.
func cannedPod(n, rv int) *corev1.Pod {
	at := metav1.NewTime(time.Unix(1_700_000_000, 0).UTC())
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Name: fmt.Sprintf("web-%05d", n), Namespace: fmt.Sprintf("team-%02d", n%20), UID: types.UID(fmt.Sprintf("0b2f8a4e-7a6f-4c56-9a43-%012d", n)),
		ResourceVersion: fmt.Sprint(rv), CreationTimestamp: at, Generation: 1,
		Labels:          map[string]string{"app": "web", "pod-template-hash": "6d4cf56db6", "shard": fmt.Sprint(n % 10)},
		Annotations:     map[string]string{"prometheus.io/scrape": "true", "note": strings.Repeat("n", 300)},
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "web-6d4cf56db6", UID: "6c1f2f6e-0a53-4f7b-9a0f-1f4d1d6f9b11"}},
	}}
	p.Spec.NodeName = fmt.Sprintf("node-%d", n%50)
	for i := range 2 {
		c := corev1.Container{Name: fmt.Sprintf("c%d", i), Image: "registry.example.com/team/web:1.2.3", Args: []string{"--port=8080", "--verbosity=2"}}
		for k := range 6 {
			c.Env = append(c.Env, corev1.EnvVar{Name: fmt.Sprintf("SETTING_%d", k), Value: "some value of this setting"})
		}
		c.VolumeMounts = []corev1.VolumeMount{{Name: "token", MountPath: "/var/run/secrets/kubernetes.io/serviceaccount", ReadOnly: true}}
		p.Spec.Containers = append(p.Spec.Containers, c)
		p.Status.ContainerStatuses = append(p.Status.ContainerStatuses, corev1.ContainerStatus{Name: c.Name, Image: c.Image, Ready: true,
			ImageID:     "registry.example.com/team/web@sha256:" + strings.Repeat("ab", 32),
			ContainerID: "containerd://" + strings.Repeat("cd", 32), State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: at}}})
	}
	for _, t := range []corev1.PodConditionType{corev1.PodInitialized, corev1.PodReady, corev1.ContainersReady, corev1.PodScheduled} {
		p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: t, Status: corev1.ConditionTrue, LastTransitionTime: at})
	}
	p.Status.Phase, p.Status.PodIP, p.Status.HostIP = corev1.PodRunning, "10.0.0.1", "192.168.0.1"
	return p
}

// cannedShape is that of a resource in protobuf or JSON.
func cannedShape(kind string, protobuf bool) codec.Shape {
	return codec.Shape{Representation: codec.Representation{Protobuf: protobuf}, APIVersion: "v1", Kind: kind, ListKind: kind + "List"}
}

func cannedBare(tb testing.TB, n, rv int, kind string, protobuf bool) []byte {
	tb.Helper()
	var b []byte
	var err error
	pod := cannedPod(n, rv)
	switch {
	case kind == "Secret":
		s := &corev1.Secret{ObjectMeta: pod.ObjectMeta, Data: map[string][]byte{"token": bytes.Repeat([]byte("t"), 1200)}}
		if protobuf {
			b, err = s.Marshal()
		} else {
			b, err = json.Marshal(s)
		}
	case protobuf:
		b, err = pod.Marshal()
	default:
		b, err = json.Marshal(pod)
	}
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

// cannedList is the answer to a list of n objects in key order.
func cannedList(tb testing.TB, kind string, n int, protobuf bool) []byte {
	tb.Helper()
	type keyed struct {
		key  string
		bare []byte
	}
	var all []keyed
	for i := range n {
		p := cannedPod(i, 1000+i)
		all = append(all, keyed{objectKey(p.Namespace, p.Name), cannedBare(tb, i, 1000+i, kind, protobuf)})
	}
	slices.SortFunc(all, func(a, b keyed) int { return strings.Compare(a.key, b.key) })
	lens := func(yield func(int) bool) {
		for _, k := range all {
			if !yield(len(k.bare)) {
				return
			}
		}
	}
	s := cannedShape(kind, protobuf)
	list := s.AppendListHead(nil, "9000", lens)
	for i, k := range all {
		list = s.AppendListItem(list, k.bare, i == 0)
	}
	return s.AppendListTail(list, "9000")
}

// A bench is a cache before a cannedServer, over a journal on a real disk.
type bench struct {
	*Cache
	server *cannedServer
}

func newBench(tb testing.TB, options ...func(*journal.Options)) *bench {
	tb.Helper()
	dir, err := os.MkdirTemp(os.Getenv("JOURNAL_BENCH_DIR"), "cache-bench-")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { os.RemoveAll(dir) })
	o := journal.Options{Dir: dir + "/journal"}
	for _, f := range options {
		f(&o)
	}
	j, err := journal.Open(o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { j.Close() })
	b := &bench{server: &cannedServer{bodies: map[string][]byte{}, types: map[string]string{}, never: make(chan struct{})}}
	b.Cache, err = New(Config{
		Upstream: b.server, IsUnavailable: func(error) bool { return b.server.down.Load() }, Journal: j,
		Node: func() user.Info { return nodeUser }, Sealer: sealerOf(tb, dir+"/key"),
	})
	if err != nil {
		tb.Fatal(err)
	}
	return b
}

func (b *bench) serve(path string, protobuf bool, body []byte) {
	b.server.bodies[path] = body
	b.server.types[path] = "application/json"
	if protobuf {
		b.server.types[path] = protobufType
	}
}

// request makes a GET as alice.
func (b *bench) request(tb testing.TB, path string, protobuf bool) *http.Request {
	tb.Helper()
	req := httptest.NewRequestWithContext(context.Background(), http.MethodGet, path, nil)
	req.Header.Set("Accept", "application/json")
	if protobuf {
		req.Header.Set("Accept", protobufType)
	}
	info, err := fakeResolver.NewRequestInfo(req)
	if err != nil {
		tb.Fatal(err)
	}
	return req.WithContext(request.WithUser(request.WithRequestInfo(req.Context(), info), alice))
}

// get sends a request and reads the answer as a reverse proxy does.
func (b *bench) get(tb testing.TB, req *http.Request, buf []byte) int {
	tb.Helper()
	resp, err := b.RoundTrip(req)
	if err != nil {
		tb.Fatal(err)
	}
	defer resp.Body.Close()
	total := 0
	for {
		n, err := resp.Body.Read(buf)
		total += n
		if err == io.EOF {
			return total
		}
		if err != nil {
			tb.Fatal(err)
		}
	}
}

func (b *bench) flushNow(tb testing.TB) {
	tb.Helper()
	if err := b.flushAll(everything); err != nil {
		tb.Fatal(err)
	}
}

var cannedPaths = map[string]string{"Pod": "/api/v1/pods", "Secret": "/api/v1/secrets"}

// eachList runs a benchmark for lists of all sizes, kinds and encodings.
func eachList(b *testing.B, run func(b *testing.B, kind string, n int, protobuf bool)) {
	for _, kind := range []string{"Pod", "Secret"} {
		for _, n := range []int{500, 5000} {
			for _, protobuf := range []bool{true, false} {
				b.Run(fmt.Sprintf("%s/%d/protobuf=%t", kind, n, protobuf), func(b *testing.B) { run(b, kind, n, protobuf) })
			}
		}
	}
}

// BenchmarkListReplay is a list out of the journal.
func BenchmarkListReplay(b *testing.B) {
	eachList(b, func(b *testing.B, kind string, n int, protobuf bool) {
		h := newBench(b)
		path, buf := cannedPaths[kind], make([]byte, 32<<10)
		want := cannedList(b, kind, n, protobuf)
		h.serve(path, protobuf, want)
		req := h.request(b, path, protobuf)
		h.get(b, req, buf)
		h.flushNow(b)
		h.server.down.Store(true)
		resp, err := h.RoundTrip(req)
		if err != nil {
			b.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		if err != nil || !bytes.Equal(got, want) {
			b.Fatalf("replayed list differs: %d bytes, want %d, %v", len(got), len(want), err)
		}
		resp.Body.Close()
		b.SetBytes(int64(len(want)))
		b.ReportAllocs()
		for b.Loop() {
			h.get(b, req, buf)
		}
	})
}

// BenchmarkListRecord is a list that passes by and says nothing new.
func BenchmarkListRecord(b *testing.B) {
	eachList(b, func(b *testing.B, kind string, n int, protobuf bool) {
		h := newBench(b)
		path, buf := cannedPaths[kind], make([]byte, 32<<10)
		list := cannedList(b, kind, n, protobuf)
		h.serve(path, protobuf, list)
		req := h.request(b, path, protobuf)
		h.get(b, req, buf)
		h.flushNow(b)
		b.SetBytes(int64(len(list)))
		b.ReportAllocs()
		for b.Loop() {
			h.get(b, req, buf)
		}
	})
}

// BenchmarkGetRecord is a get that passes by and says nothing new.
func BenchmarkGetRecord(b *testing.B) {
	for _, protobuf := range []bool{true, false} {
		b.Run(fmt.Sprintf("protobuf=%t", protobuf), func(b *testing.B) {
			h := newBench(b)
			p, buf := cannedPod(1, 1000), make([]byte, 32<<10)
			path := "/api/v1/namespaces/" + p.Namespace + "/pods/" + p.Name
			h.serve(path, protobuf, cannedShape("Pod", protobuf).AppendObject(nil, cannedBare(b, 1, 1000, "Pod", protobuf)))
			req := h.request(b, path, protobuf)
			h.get(b, req, buf)
			h.flushNow(b)
			b.ReportAllocs()
			for b.Loop() {
				h.get(b, req, buf)
			}
		})
	}
}
