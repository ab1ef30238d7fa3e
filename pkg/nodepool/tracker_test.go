// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package nodepool

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// A track is a Tracker that runs.
type track struct {
	*Tracker
	*server
	t   *testing.T
	reg *prometheus.Registry
	log ktesting.Buffer
}

// run starts a Tracker in a bubble, and do once it has settled.
func run(t *testing.T, prepare func(*server), do func(*track)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		prepare(s)
		begin(t, s, do)
	})
}

// begin is run for a server that there is, in a bubble that there is.
func begin(t *testing.T, s *server, do func(*track)) {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	tracker, err := NewTracker(Config{Source: s.source(), NodeName: func() string { return nodeName }, Up: s.isUp, LinkChanged: s.linkChanged, Registerer: reg})
	if err != nil {
		t.Fatal(err)
	}
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true), ktesting.Verbosity(0)))
	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), logger))
	done := make(chan error, 1)
	go func() { done <- tracker.Run(ctx) }()
	synctest.Wait()
	do(&track{tracker, s, t, reg, logger.GetSink().(ktesting.Underlier).GetBuffer()})
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run() = %v, want nil", err)
	}
	synctest.Wait()
	if open := s.watching(); open != nil {
		t.Errorf("watches %q are open after the end of Run", open)
	}
}

// want is what the membership must be once all is quiet.
func (k *track) want(when string, want Membership) {
	k.t.Helper()
	synctest.Wait()
	want.Node = nodeName
	if diff := cmp.Diff(want, k.Membership()); diff != "" {
		k.t.Errorf("%s: Membership() (-want +got):\n%s", when, diff)
	}
	if err := k.Ready(); (err == nil) != (want.State != Unknown) {
		k.t.Errorf("%s: Ready() = %v, with membership %s", when, err, want.State)
	}
}

// wait lets virtual time pass.
func (k *track) wait(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func (k *track) wantNodes(when string, known bool, want ...string) {
	k.t.Helper()
	if got, ok := k.Nodes(); !slices.Equal(got, want) || ok != known {
		k.t.Errorf("%s: Nodes() = %q, %v, want %q, %v", when, got, ok, want, known)
	}
}

func (k *track) wantAsked(when string, want ...string) {
	k.t.Helper()
	synctest.Wait()
	if diff := cmp.Diff(want, k.askedSince()); diff != "" {
		k.t.Errorf("%s: was asked (-want +got):\n%s", when, diff)
	}
}

const (
	hostSpec = `"spec":{"hostNetwork":true,"type":"Edge"},"status":{"nodes":["edge-2","edge-1"]}`
	edgeSpec = `"spec":{"hostNetwork":false,"type":"Edge"}`
	nodePath = nodes + "/" + nodeName
)

func host(state State) Membership {
	return Membership{Pool: "a", Type: Edge, HostNetwork: true, State: state, Origin: FromPool}
}

func labelled(state State) Membership {
	return Membership{Pool: "a", HostNetwork: true, State: state, Origin: FromLabel}
}

func inHostPool(s *server) {
	s.put(nodes, nodeName, s.node(PoolLabel, "a", HostNetworkLabel, True))
	s.put(v1beta2, "a", pool(v1beta2, "a", hostSpec))
}

func TestTrackerFollows(t *testing.T) {
	run(t, inHostPool, func(k *track) {
		k.want("at the start", host(Known))
		k.wantNodes("at the start", true, "edge-1", "edge-2")
		k.wantAsked("at the start", nodePath, v1beta2+"/a")

		changed := k.Changed()
		k.put(nodes, nodeName, k.node(PoolLabel, "a", HostNetworkLabel, True, "unrelated", "x"))
		synctest.Wait()
		select {
		case <-changed:
			t.Error("Changed is closed by a label that does not matter")
		default:
		}
		k.put(v1beta2, "a", pool(v1beta2, "a", strings.Replace(hostSpec, "edge-2", "edge-3", 1)))
		<-changed
		k.want("other nodes", host(Known))
		k.wantNodes("other nodes", true, "edge-1", "edge-3")

		changed = k.Changed()
		k.put(nodes, nodeName, k.node(PoolLabel, "a"))
		<-changed
		drifted := host(Known)
		drifted.Drift = LabelMissing
		k.want("the label is taken off", drifted)

		k.del(v1beta2, "a")
		k.want("the pool is gone", Membership{Pool: "a", State: Known, Origin: FromLabel, Drift: PoolMissing})
		k.wantNodes("the pool is gone", false)

		k.put(nodes, nodeName, k.node())
		k.want("the node leaves", Membership{State: Known})
		k.wantNodes("the node leaves", true)
		k.wantAsked("all the time")
		if diff := cmp.Diff([]string{nodePath}, k.watching()); diff != "" {
			t.Errorf("open watches (-want +got):\n%s", diff)
		}

		k.del(nodes, nodeName)
		k.want("the node is gone", Membership{State: Unknown})
		if err := k.Ready(); err == nil || err.Error() != "there is no Node edge-1" {
			t.Errorf("Ready() = %v", err)
		}
	})
}

func TestTrackerMovesToAnotherPool(t *testing.T) {
	run(t, inHostPool, func(k *track) {
		k.put(v1beta2, "b", pool(v1beta2, "b", edgeSpec))
		k.put(nodes, nodeName, k.node(PoolLabel, "b", HostNetworkLabel, True))
		k.want("moved", Membership{Pool: "b", Type: Edge, State: Known, Origin: FromPool, Drift: LabelLeftOver})
		if diff := cmp.Diff([]string{nodePath, v1beta2 + "/b"}, k.watching()); diff != "" {
			t.Errorf("open watches (-want +got):\n%s", diff)
		}
		k.put(v1beta2, "a", pool(v1beta2, "a", edgeSpec))
		k.want("the other pool changes", Membership{Pool: "b", Type: Edge, State: Known, Origin: FromPool, Drift: LabelLeftOver})
	})
}

// A place is left or changed, but not by the link coming and going.
func TestPlace(t *testing.T) {
	closed := func(c <-chan struct{}) bool {
		synctest.Wait()
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
	run(t, inHostPool, func(k *track) {
		p := k.Place()
		want := func(when, name string, known bool, nodes ...string) {
			t.Helper()
			gotName, ok := p.Name()
			got, nodesKnown := p.Nodes()
			if gotName != name || ok != known || nodesKnown != known || !slices.Equal(got, nodes) || (p.Ready() == nil) != known {
				t.Errorf("%s: Name() = %q, %v, Nodes() = %q, %v, Ready() = %v, want %q, %q, known %v", when, gotName, ok, got, nodesKnown, p.Ready(), name, nodes, known)
			}
		}
		want("at the start", "a", true, "edge-1", "edge-2")
		changed, all := p.Changed(), k.Changed()
		k.setUp(false)
		if closed(changed) || !closed(all) {
			t.Error("the link is down: Changed of the place is closed, or that of the tracker is not")
		}
		k.setUp(true)
		k.put(nodes, nodeName, k.node(PoolLabel, "a")) // drifts
		if closed(changed) {
			t.Error("Changed is closed by a label that says nothing of the place")
		}
		k.put(v1beta2, "a", pool(v1beta2, "a", strings.Replace(hostSpec, "edge-2", "edge-3", 1)))
		if !closed(changed) {
			t.Error("Changed is not closed by other nodes")
		}
		want("other nodes", "a", true, "edge-1", "edge-3")
		changed = p.Changed()
		k.put(nodes, nodeName, k.node())
		if !closed(changed) {
			t.Error("Changed is not closed as the node leaves")
		}
		want("in no pool", "", true)
		changed = p.Changed()
		k.del(nodes, nodeName)
		if !closed(changed) {
			t.Error("Changed is not closed as the node goes")
		}
		want("no node", "", false)
	})
}

func TestTrackerFindsTheVersion(t *testing.T) {
	run(t, func(s *server) {
		s.put(nodes, nodeName, s.node(PoolLabel, "a", HostNetworkLabel, True))
		s.put(v1alpha1, "a", pool(v1alpha1, "a", `"spec":{"type":"Edge"}`))
	}, func(k *track) {
		k.want("only the oldest", Membership{Pool: "a", Type: Edge, State: Known, Origin: FromPool, Drift: LabelLeftOver})
		k.wantAsked("only the oldest", nodePath, v1beta2+"/a", v1beta1+"/a", v1alpha1+"/a")
		k.put(v1beta2, "a", pool(v1beta2, "a", hostSpec))
		k.wait(recheckPeriod + time.Second)
		k.want("a newer one is installed", host(Known))
		k.wantAsked("a newer one is installed", v1beta2+"/a")
	})
}

func TestTrackerWithoutNodePool(t *testing.T) {
	for _, code := range []int{http.StatusNotFound, http.StatusForbidden} {
		run(t, func(s *server) {
			s.put(nodes, nodeName, s.node(PoolLabel, "a", HostNetworkLabel, True))
			for _, path := range []string{v1beta2, v1beta1, v1alpha1} {
				s.refuse(path, code)
			}
		}, func(k *track) {
			k.want("refused", labelled(Known))
			k.wantNodes("refused", false)
			k.wantAsked("refused", nodePath, v1beta2+"/a", v1beta1+"/a", v1alpha1+"/a")
			k.wait(recheckPeriod - time.Second)
			k.wantAsked("before the recheck")
			k.put(v1beta2, "a", pool(v1beta2, "a", hostSpec))
			k.wait(2 * time.Second)
			k.want("installed", host(Known))
			k.refuse(v1beta2, code)
			k.hangUp(v1beta2)
			k.wait(recheckPeriod)
			k.want("removed", labelled(Known))
		})
	}
}

// An API server that fails has refused nothing.
func TestTrackerWaitsForAnAnswer(t *testing.T) {
	run(t, func(s *server) {
		inHostPool(s)
		s.refuse(v1beta2, http.StatusInternalServerError)
	}, func(k *track) {
		k.want("500", Membership{State: Unknown})
		if err := k.Ready(); err == nil || !strings.Contains(err.Error(), "NodePool a in v1beta2: ") || !strings.Contains(err.Error(), "500") {
			t.Errorf("Ready() = %v, want it to name the NodePool and the answer", err)
		}
		k.wantNodes("500", false)
		k.wantAsked("500", nodePath, v1beta2+"/a")
		changed := k.Changed()
		k.refuse(v1beta2, http.StatusServiceUnavailable)
		k.wait(2 * time.Second)
		select {
		case <-changed:
			t.Error("Changed is closed by another failure")
		default:
		}
		if err := k.Ready(); err == nil || !strings.Contains(err.Error(), "503") {
			t.Errorf("Ready() = %v, want it to name the latest answer", err)
		}
		k.serve(v1beta2)
		k.wait(3 * time.Second)
		k.want("mended", host(Known))
	})
}

func TestTrackerWithoutLink(t *testing.T) {
	run(t, inHostPool, func(k *track) {
		changed := k.Changed()
		k.setUp(false)
		<-changed
		k.want("the link is down", host(Stale))
		k.wantNodes("the link is down", true, "edge-1", "edge-2")
		for _, path := range []string{v1beta2, v1beta1, v1alpha1} {
			k.refuse(path, 0)
		}
		k.hangUp(v1beta2)
		k.wait(3 * recheckPeriod)
		k.want("the cache has lost it", host(Stale))
		for _, path := range []string{v1beta2, v1beta1, v1alpha1} {
			k.refuse(path, http.StatusNotFound)
		}
		k.wait(3 * recheckPeriod)
		k.want("the cache says so", host(Stale))
		k.serve(v1beta2)
		k.setUp(true)
		k.want("the link is back", host(Known))
	})
}

func TestTrackerStartsWithoutLink(t *testing.T) {
	for _, tc := range []struct {
		name    string
		prepare func(*server)
		want    Membership
	}{
		{"the cache has all", func(*server) {}, host(Stale)},
		{"the cache has an old version", func(s *server) {
			s.put(v1alpha1, "a", pool(v1alpha1, "a", hostSpec))
			s.refuse(v1beta2, http.StatusServiceUnavailable)
			s.refuse(v1beta1, 0)
		}, host(Stale)},
		{"the cache has the node", func(s *server) {
			for _, path := range []string{v1beta2, v1beta1, v1alpha1} {
				s.refuse(path, 0)
			}
		}, labelled(Stale)},
		{"the cache has nothing", func(s *server) { s.refuse(nodes, 0) }, Membership{State: Unknown}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			run(t, func(s *server) {
				inHostPool(s)
				tc.prepare(s)
				s.setUp(false)
			}, func(k *track) {
				k.want("at the start", tc.want)
				for _, path := range []string{nodes, v1beta2, v1beta1, v1alpha1} {
					k.serve(path)
				}
				k.setUp(true)
				k.want("the link is up", host(Known))
			})
		})
	}
}

func TestTrackerComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		inHostPool(s)
		begin(t, s, func(k *track) { k.want("at first", host(Known)) })
		s.setUp(false)
		begin(t, s, func(k *track) { k.want("after a restart", host(Stale)) })
	})
}

func TestTrackerLogsChanges(t *testing.T) {
	run(t, inHostPool, func(k *track) {
		k.put(v1beta2, "a", pool(v1beta2, "a", strings.Replace(hostSpec, "edge-2", "edge-3", 1))) // no change of membership
		synctest.Wait()
		k.setUp(false)
		k.want("the link is down", host(Stale))
		var got []string
		for line := range strings.Lines(k.log.String()) {
			got = append(got, strings.TrimSpace(line))
		}
		const changed = `INFO Membership of this node changed node="edge-1" `
		want := []string{
			changed + `pool="a" type="Edge" hostNetwork=true state="known" source="NodePool" drift=""`,
			changed + `pool="a" type="Edge" hostNetwork=true state="stale" source="NodePool" drift=""`,
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("log (-want +got):\n%s", diff)
		}
	})
}

func TestTrackerMetrics(t *testing.T) {
	const help = `# HELP edgehub_nodepool_info The pool that this node is in; nothing if it is in none or that is unknown.
# TYPE edgehub_nodepool_info gauge
`
	run(t, inHostPool, func(k *track) {
		k.put(nodes, nodeName, k.node(PoolLabel, "a"))
		synctest.Wait()
		if problems, err := testutil.GatherAndLint(k.reg); err != nil || len(problems) > 0 {
			t.Errorf("GatherAndLint() = %v, %v", problems, err)
		}
		if err := testutil.GatherAndCompare(k.reg, strings.NewReader(help+`edgehub_nodepool_info{host_network="true",pool="a",type="Edge"} 1
# HELP edgehub_nodepool_label_drift Whether the NodePool and the labels of this node differ (1) or not (0).
# TYPE edgehub_nodepool_label_drift gauge
edgehub_nodepool_label_drift 1
# HELP edgehub_nodepool_membership How well the pool of this node is known: known, stale (known, but the link is down), or unknown. One of them is 1.
# TYPE edgehub_nodepool_membership gauge
edgehub_nodepool_membership{state="known"} 1
edgehub_nodepool_membership{state="stale"} 0
edgehub_nodepool_membership{state="unknown"} 0
`)); err != nil {
			t.Error(err)
		}
		k.put(nodes, nodeName, k.node())
		synctest.Wait()
		if err := testutil.GatherAndCompare(k.reg, strings.NewReader(""), "edgehub_nodepool_info"); err != nil {
			t.Errorf("in no pool: %v", err)
		}
	})
}

func TestNewTracker(t *testing.T) {
	if _, err := NewTracker(Config{}); err == nil {
		t.Error("NewTracker(Config{}) = nil, want an error")
	}
	s := newServer(t)
	cfg := Config{Source: s.source(), NodeName: func() string { return "" }, Up: s.isUp, LinkChanged: s.linkChanged}
	tracker, err := NewTracker(cfg)
	if err != nil {
		t.Fatal(err)
	}
	if m := tracker.Membership(); m != (Membership{State: Unknown}) || tracker.Ready() == nil {
		t.Errorf("before Run: Membership() = %v, Ready() = %v", m, tracker.Ready())
	}
	if err := tracker.Run(t.Context()); err == nil {
		t.Error("Run() of a node without a name = nil, want an error")
	}
}
