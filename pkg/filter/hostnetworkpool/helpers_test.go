// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package hostnetworkpool

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/filter"
	"github.com/edgehub/edgehub/pkg/nodepool"
)

const (
	nodeName = "edge-1"
	nodeUser = "system:node:edge-1"
)

var (
	known   = nodepool.Membership{Node: nodeName, Pool: "shore", Type: nodepool.Edge, HostNetwork: true, State: nodepool.Known, Origin: nodepool.FromPool}
	unknown = nodepool.Membership{Node: nodeName, State: nodepool.Unknown}
)

func stale() nodepool.Membership {
	m := known
	m.State = nodepool.Stale
	return m
}

// An events is an API server that takes Events, and the disk that outlives a restart.
type events struct {
	t *testing.T

	mu     sync.Mutex
	answer func(e *corev1.Event) int // a status, 0 for an error; nil: 201
	sent   []*corev1.Event
	stored []byte
	stores int
}

func (s *events) RoundTrip(req *http.Request) (*http.Response, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	body, err := io.ReadAll(req.Body)
	e := &corev1.Event{}
	if err = errors.Join(err, json.Unmarshal(body, e)); err != nil {
		s.t.Errorf("body of an Event: %v", err)
	}
	info, _ := request.RequestInfoFrom(req.Context())
	u, _ := request.UserFrom(req.Context())
	if req.Method != http.MethodPost || req.URL.Path != "/api/v1/namespaces/"+e.Namespace+"/events" || req.URL.Path != info.Path || req.Header.Get("Content-Type") != "application/json" ||
		!info.IsResourceRequest || info.Verb != "create" || info.Resource != "events" || info.Namespace != e.Namespace || info.APIPrefix != "api" || info.APIVersion != "v1" || u.GetName() != nodeUser {
		s.t.Errorf("unexpected request %s %s %+v by %v", req.Method, req.URL, info, u)
	}
	if _, ok := req.Context().Deadline(); !ok {
		s.t.Error("a request without deadline")
	}
	code := http.StatusCreated
	if s.answer != nil {
		code = s.answer(e)
	}
	s.sent = append(s.sent, e)
	if code == 0 {
		return nil, errors.New("no link")
	}
	return &http.Response{StatusCode: code, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("{}")), Request: req}, nil
}

func (s *events) setAnswer(f func(e *corev1.Event) int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer = f
}

// sentSince returns what was sent since it was called last, as "reason namespace/object".
func (s *events) sentSince() (what []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.sent {
		what = append(what, fmt.Sprintf("%s %s/%s", e.Reason, e.Namespace, e.InvolvedObject.Name))
	}
	s.sent = nil
	return what
}

func (s *events) load() ([]byte, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stored, s.stored != nil
}

func (s *events) store(b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stored = b
	s.stores++
}

// A rig is an Observer with what is around it.
type rig struct {
	*Observer
	*events
	t   *testing.T
	reg *prometheus.Registry
	log ktesting.Buffer

	mu         sync.Mutex
	membership nodepool.Membership
	changed    chan struct{}
	computed   int // how often the membership was asked for
}

func newRig(t *testing.T, s *events, m nodepool.Membership) *rig {
	t.Helper()
	r := &rig{events: s, t: t, reg: prometheus.NewPedanticRegistry(), membership: m, changed: make(chan struct{})}
	cfg := Config{
		Node: func() user.Info { return &user.DefaultInfo{Name: nodeUser} }, NodeName: func() string { return nodeName },
		Membership: func() nodepool.Membership {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.computed++
			return r.membership
		},
		Changed: func() <-chan struct{} {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.changed
		},
		Events: s, Load: s.load, Store: s.store, Registerer: r.reg,
	}
	var err error
	if r.Observer, err = New(cfg); err != nil {
		t.Fatal(err)
	}
	return r
}

// run runs the Observer while do goes on.
func (r *rig) run(do func()) {
	logger := ktesting.NewLogger(r.t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	r.log = logger.GetSink().(ktesting.Underlier).GetBuffer()
	ctx, cancel := context.WithCancel(klog.NewContext(r.t.Context(), logger))
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	synctest.Wait()
	do()
	cancel()
	if err := <-done; err != nil {
		r.t.Errorf("Run() = %v, want nil", err)
	}
}

// quiet is a context without a log.
func quiet(t *testing.T) context.Context { return klog.NewContext(t.Context(), klog.Logger{}) }

// settle lets changes be computed, and what follows from them happen.
func settle() { pass(settlePeriod + time.Millisecond) }

// pass lets virtual time pass.
func pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func (r *rig) be(m nodepool.Membership) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.membership = m
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *rig) computations() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.computed
}

func kubelet(verb string) *filter.Request {
	return &filter.Request{
		RequestInfo: &request.RequestInfo{IsResourceRequest: true, Verb: verb, APIPrefix: "api", APIVersion: "v1", Resource: "pods", FieldSelector: "spec.nodeName=" + nodeName},
		User:        &user.DefaultInfo{Name: nodeUser}, Program: "kubelet",
	}
}

func (r *rig) observe(verb string) filter.Observation {
	s := r.Observe(kubelet(verb))
	if s == nil {
		r.t.Fatal("Observe() of kubelet's request = nil")
	}
	return s
}

// list is a whole answer.
func (r *rig) list(pods ...*corev1.Pod) {
	s := r.observe("list")
	for _, p := range pods {
		s.See(watch.Added, object(p))
	}
	s.Synced()
	s.End(true)
}

// event is a watch that says one thing.
func (r *rig) event(kind watch.EventType, p *corev1.Pod) {
	s := r.observe("watch")
	s.See(kind, object(p))
	s.End(true)
}

var (
	jsonPods  = codec.Shape{APIVersion: "v1", Kind: "Pod", ListKind: "PodList"}
	protoPods = codec.Shape{APIVersion: "v1", Kind: "Pod", ListKind: "PodList", Representation: codec.Representation{Protobuf: true}}
)

// object is a pod as kubelet gets it.
func object(p *corev1.Pod) *filter.Object {
	b, err := p.Marshal()
	if err != nil {
		panic(err)
	}
	return filter.NewObject(protoPods, b)
}

// newPodNamed makes a pod of the namespace default with a port, 0 for none.
func newPodNamed(name string, hostNetwork bool, port int32) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name), ResourceVersion: "10"},
		Spec:       corev1.PodSpec{NodeName: nodeName, HostNetwork: hostNetwork, Containers: []corev1.Container{{Name: "c"}}},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
	if port != 0 {
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: port, HostPort: port}}
	}
	return p
}

func with(p *corev1.Pod, change func(*corev1.Pod)) *corev1.Pod {
	p = p.DeepCopy()
	change(p)
	return p
}

func excluded(p *corev1.Pod) { p.Annotations = map[string]string{nodepool.ExcludeAnnotation: "true"} }
