// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	quiet = 1200 * time.Millisecond // for which nothing may change any more; a hub gathers changes for 1 s
	// patience is how long a hub may take to see a change and to tell of it, with room for
	// a machine that is busy.
	patience = time.Minute
)

// An edge is a node with a hub and a kubelet.
type edge struct {
	*rig.Rig
	name    string
	kubelet *node.Kubemark
	offline *report // what it must go on saying while the link is cut
}

// A world is some edges of one cluster, on one link.
type world struct {
	*rig.Rig
	pools  nodePools
	edges  []*edge
	ever   map[said]bool        // all that was to be found until now
	events map[types.UID]string // all Events there were, with their resourceVersion
}

// said is what an Event says, and the detail of its finding, which it says in words only.
type said struct{ node, kind, object, uid, detail string }

// TestPools compares what three hubs find, in /debug/pool, metrics and Events, with what
// there is to find in the API server, through all that administrators, kubelets, links and
// crashes do to pools, nodes and pods.
func TestPools(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, step := range []struct {
		name string
		do   func(*world)
	}{
		{"start", (*world).start},
		{"collisions", (*world).collisions},
		{"restarts", (*world).restarts},
		{"moves", (*world).moves},
		{"drifts", (*world).drifts},
		{"pools come and go", (*world).poolsComeAndGo},
		{"cut", (*world).cut},
		{"healed", (*world).healed},
	} {
		start := time.Now()
		step.do(w)
		if t.Failed() {
			t.Fatalf("failed at step %q", step.name)
		}
		t.Logf("%s: %v", step.name, time.Since(start).Round(time.Millisecond))
	}
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{Rig: onShared(t, rig.NodeName), ever: map[said]bool{}, events: map[types.UID]string{}}
	w.pools = newNodePools(w.Rig)
	w.pools.create(w.Rig, "v1beta2", map[string]any{"name": "host"}, map[string]any{"type": "Edge", "hostNetwork": true})
	w.pools.create(w.Rig, "v1beta2", map[string]any{"name": "plain"}, map[string]any{"type": "Cloud"})
	for _, ns := range []string{"pools-a", "pools-b"} {
		w.Must(w.ControlPlane.CreateNamespace(t.Context(), ns))
	}
	for name, labels := range map[string]map[string]string{
		"n1": {poolLabel: "host", hostNetworkLabel: "true"}, "n2": {poolLabel: "host", hostNetworkLabel: "true"}, "n3": {poolLabel: "plain"},
	} {
		createNode(w.Rig, name, labels)
	}
	for _, name := range []string{"n1", "n2", "n3"} {
		e := &edge{Rig: new(*w.Rig), name: name}
		var err error
		e.Node, err = w.ControlPlane.NodeConfig(name)
		w.Must(err)
		e.Hub = e.NewHub()
		w.edges = append(w.edges, e)
	}
	return w
}

// start has some pods there before hubs and kubelets, and some after.
func (w *world) start() {
	w.T.Helper()
	for _, e := range w.edges {
		w.create(e.name, "before", pods()...)
	}
	for _, e := range w.edges {
		process.Run(w.T, e.Hub)
		e.WaitLink(true)
		var err error
		e.kubelet, err = node.NewKubemark(w.T.Context(), node.KubeletConfig{Name: e.name, Client: e.Hub.Through(e.Node)})
		w.Must(err)
		process.Run(w.T, e.kubelet)
	}
	w.check("hubs and kubelets have started")
	for _, e := range w.edges {
		w.create(e.name, "after", pods()...)
	}
	w.check("more pods")
	for _, e := range w.edges {
		r := w.truth(e)
		t := r.HostNetwork
		if got := r.count("HostPortConflict"); got < 6 {
			w.T.Errorf("%d conflicts are to be found on %s, the test is to have more", got, e.name)
		}
		if got := r.count("NoPodNetwork"); (got > 5) != t {
			w.T.Errorf("%d pods without a network are to be found on %s, host network %v", got, e.name, t)
		}
	}
}

// A podSpec is a pod in few words.
type podSpec struct {
	name        string
	hostNetwork bool
	exclude     string
	containers  []string // each a list of ports, HOST/PROTOCOL/IP
	sidecars    []string
	inits       []string
}

// pods are those that kubelet takes, whatever else there is: they want the same port as
// another one only where kubelet's admission and the scheduler do not look, within a pod.
func pods() []podSpec {
	return []podSpec{
		{name: "own-network", containers: []string{""}},
		{name: "host-network", hostNetwork: true, containers: []string{""}},
		{name: "sidecar", containers: []string{"9300/TCP/"}, sidecars: []string{"9300/TCP/127.0.0.1"}},
		{name: "ips", hostNetwork: true, containers: []string{"9400/UDP/10.0.0.1", "9400/UDP/"}},
		{name: "two-findings", containers: []string{"9500/TCP/0.0.0.0 9501/TCP/10.0.0.1", "9500/TCP/::1 9501/TCP/"}, exclude: "true"},
		{name: "no-collision", containers: []string{"9600/TCP/10.0.0.1 9601/TCP/", "9600/TCP/10.0.0.2 9601/UDP/"}, sidecars: []string{"9600/UDP/10.0.0.1"}},
		{name: "init", containers: []string{"9700/TCP/"}, inits: []string{"9700/TCP/"}},
		{name: "zero", containers: []string{"0/TCP/", "0/TCP/"}, sidecars: []string{"0/TCP/"}},
		{name: "excluded", hostNetwork: true, exclude: "true", containers: []string{""}},
		{name: "not-excluded", hostNetwork: true, exclude: "True", containers: []string{""}},
	}
}

// create makes pods on a node. Those of different sets do not want the same ports.
func (w *world) create(nodeName, set string, specs ...podSpec) {
	w.T.Helper()
	var g errgroup.Group
	g.SetLimit(8)
	for i, s := range specs {
		pod := s.pod(map[string]int32{"before": 0, "after": 2000}[set])
		pod.Name, pod.Spec.NodeName = strings.Join([]string{s.name, set, nodeName}, "-"), nodeName
		g.Go(func() error {
			_, err := w.ControlPlane.Client.CoreV1().Pods([]string{"pools-a", "pools-b"}[i%2]).Create(w.T.Context(), pod, metav1.CreateOptions{})
			return err
		})
	}
	w.Must(g.Wait())
}

func (s podSpec) pod(shift int32) *corev1.Pod {
	p := &corev1.Pod{Spec: corev1.PodSpec{HostNetwork: s.hostNetwork, TerminationGracePeriodSeconds: new(int64(1))}}
	if s.exclude != "" {
		p.Annotations = map[string]string{excludeAnnotation: s.exclude}
	}
	next := int32(1)
	for kind, list := range map[string][]string{"c": s.containers, "s": s.sidecars, "i": s.inits} {
		for i, text := range list {
			c := corev1.Container{Name: fmt.Sprint(kind, i), Image: node.Image}
			for port := range strings.FieldsSeq(text) {
				part := strings.Split(port, "/")
				var host int32
				_, _ = fmt.Sscan(part[0], &host) // it is written above
				cp := corev1.ContainerPort{ContainerPort: next, HostPort: host, Protocol: corev1.Protocol(part[1]), HostIP: part[2]}
				if next++; host != 0 {
					cp.HostPort += shift
				}
				if s.hostNetwork { // the API server makes it the host port
					cp.ContainerPort, cp.HostPort = cp.HostPort, 0
				}
				c.Ports = append(c.Ports, cp)
			}
			if kind == "c" {
				p.Spec.Containers = append(p.Spec.Containers, c)
				continue
			}
			if kind == "s" {
				c.RestartPolicy = new(corev1.ContainerRestartPolicyAlways)
			}
			p.Spec.InitContainers = append(p.Spec.InitContainers, c)
		}
	}
	return p
}

// truth is what is to be found, while the link is up.
func (w *world) truth(e *edge) report {
	w.T.Helper()
	r, err := truth(w.T.Context(), w.ControlPlane.Client, w.pools, e.name)
	w.Must(err)
	return r
}

// check waits until all hubs say what there is to say, and nothing changes any more. While
// the link is up, there is then one Event of each finding that there ever was, and none has
// been sent again.
func (w *world) check(when string) {
	w.T.Helper()
	ctx, cancel := context.WithTimeout(w.T.Context(), patience)
	defer cancel()
	var since time.Time
	var last []report
	w.Must(process.Poll(ctx, when+": hubs find what there is", func(ctx context.Context) error {
		wants, err := w.compare(ctx)
		if err == nil && w.edges[0].offline == nil {
			err = w.compareEvents(ctx, wants)
		}
		if err != nil {
			since = time.Time{}
			return err
		}
		if since.IsZero() || gocmp.Diff(last, wants) != "" {
			since, last = time.Now(), wants
		}
		if rest := time.Since(since); rest < quiet {
			return fmt.Errorf("it has been so for %v", rest)
		}
		return nil
	}))
	for s := range w.saidOf(last) {
		w.ever[s] = true
	}
}

// compare returns what is to be found, and how what hubs say differs.
func (w *world) compare(ctx context.Context) (wants []report, err error) {
	for _, e := range w.edges {
		want := report{}
		if e.offline != nil {
			want = *e.offline
		} else if want, err = truth(ctx, w.ControlPlane.Client, w.pools, e.name); err != nil {
			return nil, err
		}
		wants = append(wants, want)
		got, err := e.report(ctx)
		if err != nil {
			return nil, err
		}
		if diff := gocmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" {
			return nil, fmt.Errorf("/debug/pool of %s (-want +got):\n%s", e.name, diff)
		}
		shown, err := e.metrics(ctx)
		if err != nil {
			return nil, err
		}
		if diff := gocmp.Diff(want.metrics(), shown); diff != "" {
			return nil, fmt.Errorf("metrics of %s (-want +got):\n%s", e.name, diff)
		}
	}
	return wants, nil
}

// report is what the hub says.
func (e *edge) report(ctx context.Context) (r report, err error) {
	status, body, err := (&rig.Endpoint{URL: e.Hub.MetricsURL(), Client: http.DefaultClient}).Fetch(ctx, "/debug/pool", rig.JSON)
	if err != nil {
		return r, err
	}
	if status != http.StatusOK {
		return r, fmt.Errorf("/debug/pool: status %d", status)
	}
	if err := json.Unmarshal(body, &r); err != nil {
		return r, err
	}
	sortFindings(r.Findings)
	return r, nil
}

// metrics are those that the hub shows of pool and findings, but for what becomes of Events.
func (e *edge) metrics(ctx context.Context) (map[string]string, error) {
	text, err := e.Hub.Metrics(ctx)
	shown := map[string]string{}
	for line := range strings.Lines(text) {
		series, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.HasPrefix(series, "edgehub_nodepool_") && !strings.HasPrefix(series, "edgehub_nodepool_events_") {
			shown[series] = value
		}
	}
	return shown, err
}

// saidOf are the findings of all nodes as Events say them.
func (w *world) saidOf(reports []report) map[said]bool {
	all := map[said]bool{}
	for _, r := range reports {
		for _, f := range r.Findings {
			s := said{r.Node, f.Kind, "Pod " + f.Namespace + "/" + f.Pod, f.UID, f.Detail}
			if f.Pod == "" {
				s.object, s.uid = "Node /"+r.Node, r.Node
			}
			all[s] = true
		}
	}
	return all
}

// compareEvents says how the hubs' Events differ from one for each finding ever, those of
// today included.
func (w *world) compareEvents(ctx context.Context, today []report) error {
	all := maps.Clone(w.ever)
	maps.Copy(all, w.saidOf(today))
	want, got := map[said]int{}, map[said]int{}
	for s := range all {
		s.detail = ""
		want[s]++
	}
	list, err := w.ControlPlane.Client.CoreV1().Events("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	now := map[types.UID]string{}
	for _, e := range list.Items {
		if !strings.HasPrefix(e.Source.Host, "n") || e.Source.Component != "edgehub" {
			continue
		}
		got[said{e.Source.Host, e.Reason, e.InvolvedObject.Kind + " " + e.InvolvedObject.Namespace + "/" + e.InvolvedObject.Name, string(e.InvolvedObject.UID), ""}]++
		now[e.UID] = e.ResourceVersion
		if e.Count != 1 || e.Type != corev1.EventTypeWarning || e.Message == "" || e.Namespace != cmp.Or(e.InvolvedObject.Namespace, "default") {
			return fmt.Errorf("event %s/%s: count %d, type %s, message %q", e.Namespace, e.Name, e.Count, e.Type, e.Message)
		}
	}
	if diff := gocmp.Diff(want, got, gocmp.AllowUnexported(said{})); diff != "" {
		return fmt.Errorf("events (-want +got):\n%s", diff)
	}
	for uid, rv := range w.events {
		if now[uid] != rv {
			return fmt.Errorf("the Event %s was at resourceVersion %s, is at %q", uid, rv, now[uid])
		}
	}
	w.events = now
	return nil
}
