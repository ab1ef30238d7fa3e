// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package hostnetworkpool

import (
	"bytes"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/filter"
	"github.com/edgehub/edgehub/pkg/nodepool"
)

var update = flag.Bool("update", false, "write the goldens anew")

func TestDocument(t *testing.T) {
	drifted := stale()
	drifted.Drift = nodepool.LabelMissing
	for _, tc := range []struct {
		name string
		m    nodepool.Membership
		do   func(r *rig)
	}{
		{"start", unknown, func(*rig) {}},
		{"nopool", nodepool.Membership{Node: nodeName, State: nodepool.Known}, func(r *rig) { r.list(newPodNamed("a", false, 0)) }},
		{"findings", known, func(r *rig) {
			r.list(newPodNamed("b", true, 80), with(newPodNamed("a", false, 80), excluded), newPodNamed("c", true, 81))
		}},
		{"stale", drifted, func(r *rig) { r.observe("watch").See(watch.Added, object(newPodNamed("a", false, 0))) }},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, &events{t: t}, tc.m)
				r.run(func() {
					tc.do(r)
					settle()
					w := httptest.NewRecorder()
					r.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/debug/pool", nil))
					golden := filepath.Join("testdata", tc.name+".json")
					if *update {
						if err := os.WriteFile(golden, w.Body.Bytes(), 0o644); err != nil {
							t.Fatal(err)
						}
					}
					want, err := os.ReadFile(golden)
					if err != nil {
						t.Fatal(err)
					}
					if diff := cmp.Diff(string(want), w.Body.String()); diff != "" {
						t.Errorf("document; -update writes it anew (-want +got):\n%s", diff)
					}
					if got := w.Header().Get("Content-Type"); got != "application/json" {
						t.Errorf("Content-Type = %q", got)
					}
				})
			})
		})
	}
}

func TestDocumentIsReadOnly(t *testing.T) {
	r := newRig(t, &events{t: t}, known)
	w := httptest.NewRecorder()
	r.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/debug/pool", nil))
	if w.Code != http.StatusMethodNotAllowed || w.Header().Get("Allow") != "GET, HEAD" {
		t.Errorf("POST = %d, Allow %q, want 405", w.Code, w.Header().Get("Allow"))
	}
}

func TestFindingsFollowPodsAndMembership(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, &events{t: t}, unknown)
		want := func(when string, want ...string) {
			t.Helper()
			settle()
			if diff := cmp.Diff(want, short(r.Document().Findings)); diff != "" {
				t.Errorf("%s: findings (-want +got):\n%s", when, diff)
			}
		}
		r.run(func() {
			r.list(newPodNamed("a", false, 0))
			want("unknown")
			r.be(known)
			want("known", "NoPodNetwork a")
			changed := r.Document().Changed
			r.observe("watch").See(watch.Modified, object(with(newPodNamed("a", false, 0), func(p *corev1.Pod) { p.ResourceVersion = "11" })))
			want("the pod's status changes", "NoPodNetwork a")
			if got := r.Document().Changed; !got.Equal(changed) {
				t.Errorf("changed at %v, want %v: nothing has changed", got, changed)
			}
			r.be(stale())
			want("stale", "NoPodNetwork a stale")
			if got := r.Document().Changed; !got.After(changed) {
				t.Errorf("changed at %v, want it later than %v", got, changed)
			}
			r.observe("watch").See(watch.Modified, object(with(newPodNamed("a", false, 0), func(p *corev1.Pod) { p.ResourceVersion, p.Status.Phase = "12", "Failed" })))
			want("the pod fails")
			var got []string
			for line := range strings.Lines(r.log.String()) {
				line, _, _ = strings.Cut(strings.TrimSpace(line), " message=")
				_, pod, _ := strings.Cut(r.log.String(), " pod=")
				got = append(got, line+" pod="+strings.SplitN(pod, "\n", 2)[0])
			}
			if diff := cmp.Diff([]string{
				`INFO Finding appeared kind="NoPodNetwork" detail="" pod="default/a"`,
				`INFO Finding is gone kind="NoPodNetwork" detail="" pod="default/a"`,
			}, got); diff != "" {
				t.Errorf("log (-want +got):\n%s", diff)
			}
		})
	})
}

func TestBurstIsOneComputation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, &events{t: t}, known)
		r.run(func() {
			before := r.computations()
			s := r.observe("watch")
			for i := range 1000 {
				s.See(watch.Added, object(newPodNamed("pod-"+string(rune('a'+i%26))+strings.Repeat("x", i/26), true, 0)))
			}
			r.be(stale())
			settle()
			if got := r.computations() - before; got != 1 {
				t.Errorf("a burst led to %d computations, want 1", got)
			}
			s.See(watch.Modified, object(with(newPodNamed("pod-a", true, 0), func(p *corev1.Pod) { p.ResourceVersion = "11" })))
			settle()
			if got := r.computations() - before; got != 1 {
				t.Errorf("%d computations after a change that does not matter, want 1", got)
			}
		})
	})
}

func TestMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, &events{t: t}, known)
		r.run(func() {
			r.list(newPodNamed("a", false, 80), with(newPodNamed("b", true, 80), excluded))
			r.observe("watch").See(watch.Added, filter.NewObject(protoPods, []byte("junk")))
			settle()
			if problems, err := testutil.GatherAndLint(r.reg); err != nil || len(problems) > 0 {
				t.Errorf("GatherAndLint() = %v, %v", problems, err)
			}
			if err := testutil.GatherAndCompare(r.reg, strings.NewReader(`# HELP edgehub_nodepool_events_total Attempts to create an Event about a finding: created, accepted (it is sent when the link is back), exists (it had been sent before), or failed (it is tried again).
# TYPE edgehub_nodepool_events_total counter
edgehub_nodepool_events_total{result="accepted"} 0
edgehub_nodepool_events_total{result="created"} 4
edgehub_nodepool_events_total{result="exists"} 0
edgehub_nodepool_events_total{result="failed"} 0
# HELP edgehub_nodepool_events_waiting Findings of which no Event was created yet.
# TYPE edgehub_nodepool_events_waiting gauge
edgehub_nodepool_events_waiting 0
# HELP edgehub_nodepool_findings What is wrong with pods on this node, or with its labels, by the kind of finding; see /debug/pool.
# TYPE edgehub_nodepool_findings gauge
edgehub_nodepool_findings{kind="ExcludedPodOnHostNetworkPool"} 1
edgehub_nodepool_findings{kind="HostPortConflict"} 2
edgehub_nodepool_findings{kind="NoPodNetwork"} 1
edgehub_nodepool_findings{kind="PoolLabelDrift"} 0
# HELP edgehub_nodepool_unreadable_pods_total Objects in lists and watches of this node's pods that could not be read as pods.
# TYPE edgehub_nodepool_unreadable_pods_total counter
edgehub_nodepool_unreadable_pods_total 1
`)); err != nil {
				t.Error(err)
			}
			r.list()
			settle()
			if got := testutil.ToFloat64(r.metrics.findings.WithLabelValues(string(NoPodNetwork))); got != 0 {
				t.Errorf("findings{NoPodNetwork} = %v after the pods are gone, want 0", got)
			}
		})
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// listOf is the body of a list.
func listOf(t *testing.T, pods ...*corev1.Pod) []byte {
	var items [][]byte
	for _, p := range pods {
		b, err := p.Marshal()
		if err != nil {
			t.Fatal(err)
		}
		items = append(items, b)
	}
	list := protoPods.AppendListHead(nil, "10", func(yield func(int) bool) {
		for _, b := range items {
			if !yield(len(b)) {
				return
			}
		}
	})
	for i, b := range items {
		list = protoPods.AppendListItem(list, b, i == 0)
	}
	return protoPods.AppendListTail(list, "10")
}

// kubelet gets its pods byte for byte, whatever is found in them.
func TestPodsPassUnchanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		list := listOf(t, newPodNamed("a", false, 80), with(newPodNamed("b", true, 80), excluded))
		r := newRig(t, &events{t: t}, known)
		chain, err := filter.New(filter.Config{
			Entries: []filter.Entry{{Observer: r.Observer, Resources: []schema.GroupResource{{Resource: "pods"}}, Verbs: []string{"list", "watch"}, Clients: []filter.Client{{}}, Default: true}},
			Next: roundTripper(func(req *http.Request) (*http.Response, error) {
				return &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {protoPods.ContentType()}}, Body: io.NopCloser(bytes.NewReader(list)), Request: req}, nil
			}),
			Registerer: prometheus.NewRegistry(),
		})
		if err != nil {
			t.Fatal(err)
		}
		by := kubelet("list")
		ctx := request.WithUser(request.WithRequestInfo(t.Context(), by.RequestInfo), by.User)
		resp, err := chain.RoundTrip(httptest.NewRequestWithContext(ctx, http.MethodGet, "/api/v1/pods?fieldSelector=spec.nodeName%3Dedge-1", nil))
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		if err != nil || !bytes.Equal(got, list) {
			t.Errorf("kubelet got %d bytes (%v), want the %d of the API server", len(got), err, len(list))
		}
		resp.Body.Close()
		synctest.Wait() // observers look on their own time
		r.compute(quiet(t))
		want := []string{"ExcludedPodOnHostNetworkPool b", "HostPortConflict a 80/TCP", "HostPortConflict b 80/TCP", "NoPodNetwork a"}
		if diff := cmp.Diff(want, short(r.Document().Findings)); diff != "" || !r.Document().AllPods {
			t.Errorf("findings, all pods %v (-want +got):\n%s", r.Document().AllPods, diff)
		}
	})
}

func TestNewWantsItsParts(t *testing.T) {
	if _, err := New(Config{}); err == nil {
		t.Error("New(Config{}) = nil, want an error")
	}
	cfg := newRig(t, &events{t: t}, known).cfg
	cfg.Load, cfg.Store, cfg.Registerer = nil, nil, nil
	o, err := New(cfg)
	if err != nil || o.Name() != "hostnetworkpool" {
		t.Fatalf("New() = %v, %v", o, err)
	}
}
