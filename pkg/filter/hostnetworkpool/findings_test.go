// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package hostnetworkpool

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

// short is a finding without its message.
func short(findings []Finding) (s []string) {
	for _, f := range findings {
		line := strings.TrimSpace(fmt.Sprintf("%s %s %s", f.Kind, f.Pod, f.Detail))
		if f.Stale {
			line += " stale"
		}
		s = append(s, line)
	}
	return s
}

func TestFind(t *testing.T) {
	podNetwork := known
	podNetwork.HostNetwork = false
	drift := func(m nodepool.Membership, d nodepool.Drift) nodepool.Membership {
		m.Drift = d
		return m
	}
	ended := func(phase corev1.PodPhase) func(*corev1.Pod) { return func(p *corev1.Pod) { p.Status.Phase = phase } }
	twoPorts := func(p *corev1.Pod) {
		p.Spec.InitContainers = []corev1.Container{{Name: "s", RestartPolicy: new(corev1.ContainerRestartPolicyAlways), Ports: []corev1.ContainerPort{{ContainerPort: 80, HostIP: "127.0.0.1"}}}}
	}
	for _, tc := range []struct {
		name string
		m    nodepool.Membership
		pods []*corev1.Pod
		want []string
	}{
		{"nothing", known, nil, nil},
		{"a pod on the host network", known, []*corev1.Pod{newPodNamed("a", true, 80)}, nil},
		{"a pod with a network of its own", known, []*corev1.Pod{newPodNamed("a", false, 0)}, []string{"NoPodNetwork a"}},
		{"it has ended", known, []*corev1.Pod{with(newPodNamed("a", false, 0), ended(corev1.PodSucceeded)), with(newPodNamed("b", false, 0), ended(corev1.PodFailed))}, nil},
		{"it waits", known, []*corev1.Pod{with(newPodNamed("a", false, 0), ended(corev1.PodPending))}, []string{"NoPodNetwork a"}},
		{"stale", stale(), []*corev1.Pod{newPodNamed("a", false, 80), newPodNamed("b", true, 80)},
			[]string{"HostPortConflict a 80/TCP stale", "HostPortConflict b 80/TCP stale", "NoPodNetwork a stale"}},
		{"unknown", drift(nodepool.Membership{State: nodepool.Unknown, HostNetwork: true}, ""), []*corev1.Pod{with(newPodNamed("a", false, 80), excluded), newPodNamed("b", true, 80)},
			[]string{"HostPortConflict a 80/TCP", "HostPortConflict b 80/TCP"}},
		{"a pool with a pod network", podNetwork, []*corev1.Pod{with(newPodNamed("a", false, 0), excluded)}, nil},
		{"in no pool", nodepool.Membership{State: nodepool.Known}, []*corev1.Pod{newPodNamed("a", false, 0)}, nil},
		{"excluded", known, []*corev1.Pod{with(newPodNamed("a", true, 0), excluded)}, []string{"ExcludedPodOnHostNetworkPool a"}},
		{"excluded, in other letters", known, []*corev1.Pod{with(newPodNamed("a", true, 0), func(p *corev1.Pod) { p.Annotations = map[string]string{nodepool.ExcludeAnnotation: "True"} })}, nil},
		{"excluded, and no network", known, []*corev1.Pod{with(newPodNamed("a", false, 0), excluded)}, []string{"ExcludedPodOnHostNetworkPool a", "NoPodNetwork a"}},
		{"excluded, and ended", known, []*corev1.Pod{with(with(newPodNamed("a", true, 0), excluded), ended(corev1.PodFailed))}, nil},
		{"no port twice", known, []*corev1.Pod{newPodNamed("a", true, 80), newPodNamed("b", true, 81)}, nil},
		{"three want one port", podNetwork, []*corev1.Pod{newPodNamed("c", false, 80), newPodNamed("b", true, 80), newPodNamed("a", true, 80)},
			[]string{"HostPortConflict a 80/TCP", "HostPortConflict b 80/TCP", "HostPortConflict c 80/TCP"}},
		{"one has ended", known, []*corev1.Pod{newPodNamed("a", true, 80), with(newPodNamed("b", true, 80), ended(corev1.PodFailed))}, nil},
		{"within a pod, on the host network", known, []*corev1.Pod{with(newPodNamed("a", true, 80), twoPorts)}, []string{"HostPortConflict a 80/TCP"}},
		{"not within a pod with a network of its own", podNetwork, []*corev1.Pod{with(newPodNamed("a", false, 80), twoPorts)}, nil},
		{"drift", drift(known, nodepool.LabelMissing), nil, []string{"PoolLabelDrift  LabelMissing shore"}},
		{"drift, stale", drift(stale(), nodepool.LabelNotTrue), nil, []string{"PoolLabelDrift  LabelNotTrue shore stale"}},
		{"drift, in no pool", nodepool.Membership{State: nodepool.Known, Drift: nodepool.LabelLeftOver}, nil, []string{"PoolLabelDrift  LabelLeftOver"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var pods []*pod
			for _, p := range tc.pods {
				pods = append(pods, newPod(p))
			}
			if diff := gocmp.Diff(tc.want, short(find(pods, tc.m))); diff != "" {
				t.Errorf("find() (-want +got):\n%s", diff)
			}
		})
	}
}

func TestMessages(t *testing.T) {
	pods := func(names ...string) (pods []*pod) {
		for _, n := range names {
			pods = append(pods, newPod(newPodNamed(n, true, 80)))
		}
		return pods
	}
	message := func(kind Kind, pods []*pod, m nodepool.Membership) string {
		for _, f := range find(pods, m) {
			if f.Kind == kind {
				return f.Message
			}
		}
		t.Fatalf("no %s", kind)
		return ""
	}
	drift := func(d nodepool.Drift) string {
		m := known
		m.Drift = d
		return message(PoolLabelDrift, nil, m)
	}
	three := pods("a", "c", "b") // the first by name is not that by uid
	three[1].uid, three[2].uid = "x", "y"
	alone := pods("a")
	alone[0].ports = append(alone[0].ports, alone[0].ports[0])
	for _, tc := range []struct{ got, want string }{
		{message(NoPodNetwork, []*pod{newPod(newPodNamed("a", false, 0))}, known),
			`Pool shore has no pod network: set hostNetwork: true, or recreate the pod with annotation apps.openyurt.io/exclude-host-network-pool: "true".`},
		{message(ExcludedPodOnHostNetworkPool, []*pod{newPod(with(newPodNamed("a", true, 0), excluded))}, known),
			"The pod asks to stay off host-network pools, yet runs in pool shore: delete it, so that its owner creates one elsewhere."},
		{message(HostPortConflict, alone, known), "Two containers of the pod want host port 80/TCP: change the port of one of them."},
		{message(HostPortConflict, pods("a", "b"), known), "Host port 80/TCP is also wanted by default/b: change the port of all but one, or move them to other nodes."},
		{message(HostPortConflict, three, known), "Host port 80/TCP is also wanted by default/b and others: change the port of all but one, or move them to other nodes."},
		{drift(nodepool.LabelMissing), "Pool shore is a host-network pool: set the label nodepool.openyurt.io/hostnetwork=true on this node."},
		{drift(nodepool.LabelNotTrue), "Pool shore is a host-network pool: correct the label of this node to nodepool.openyurt.io/hostnetwork=true."},
		{drift(nodepool.LabelLeftOver), "The node is in no host-network pool: remove its label nodepool.openyurt.io/hostnetwork."},
		{drift(nodepool.PoolMissing), "The node's label names pool shore, which does not exist: create the NodePool, or move the node."},
	} {
		if tc.got != tc.want {
			t.Errorf("message = %q,\nwant      %q", tc.got, tc.want)
		}
	}
}

// However long names are, a message fits, and its end is there.
func TestMessagesFit(t *testing.T) {
	long := strings.Repeat("n", 253)
	m := known
	m.Pool = strings.Repeat("p", 63)
	a := with(newPodNamed("a"+long[1:], false, 65535), excluded)
	a.Spec.Containers[0].Ports[0].Protocol = "SCTP"
	b, c := a.DeepCopy(), a.DeepCopy()
	b.Namespace, b.UID, c.Namespace, c.UID = long[:63], "b", long[:63], "c"
	b.Name = "b" + long[1:]
	var found []Finding
	for _, d := range []nodepool.Drift{nodepool.LabelMissing, nodepool.LabelNotTrue, nodepool.LabelLeftOver, nodepool.PoolMissing} {
		m.Drift = d
		found = append(found, find([]*pod{newPod(a), newPod(b), newPod(c)}, m)...)
	}
	for _, f := range found {
		if len(f.Message) > 200 || !strings.HasSuffix(f.Message, ".") || strings.HasSuffix(f.Message, "..") || strings.Contains(strings.ReplaceAll(f.Message, "...", ""), ". ") {
			t.Errorf("message of %s has %d bytes: %q, want one sentence of at most 200", f.Kind, len(f.Message), f.Message)
		}
	}
	if len(found) != 4*10 {
		t.Errorf("%d findings, want 40", len(found))
	}
}

// naive computes findings from whole pods, each pair of containers compared.
func naive(pods map[string]*corev1.Pod, m nodepool.Membership) (want []string) {
	type port struct {
		pod, ip, proto string
		number         int32
	}
	var ports []port
	for _, p := range pods {
		if p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed" {
			continue
		}
		if m.HostNetwork && m.State != nodepool.Unknown && !p.Spec.HostNetwork {
			want = append(want, "NoPodNetwork "+p.Name)
		}
		if m.HostNetwork && m.State != nodepool.Unknown && p.Annotations["apps.openyurt.io/exclude-host-network-pool"] == "true" {
			want = append(want, "ExcludedPodOnHostNetworkPool "+p.Name)
		}
		for _, c := range p.Spec.Containers {
			for _, cp := range c.Ports {
				n := cp.HostPort
				if p.Spec.HostNetwork && n == 0 {
					n = cp.ContainerPort
				}
				if n > 0 {
					ports = append(ports, port{p.Name, cmp.Or(cp.HostIP, "0.0.0.0"), cmp.Or(string(cp.Protocol), "TCP"), n})
				}
			}
		}
	}
	for i, a := range ports {
		for j, b := range ports {
			if i != j && a.number == b.number && a.proto == b.proto && (a.ip == b.ip || a.ip == "0.0.0.0" || b.ip == "0.0.0.0") {
				want = append(want, fmt.Sprintf("HostPortConflict %s %d/%s", a.pod, a.number, a.proto))
			}
		}
	}
	for i := range want {
		if m.State == nodepool.Stale {
			want[i] += " stale"
		}
	}
	slices.Sort(want)
	return slices.Compact(want)
}

func TestFindingsAreExact(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	pick := func(of ...string) string { return of[random.IntN(len(of))] }
	r := newRig(t, &events{t: t}, known)
	pods := map[string]*corev1.Pod{} // what there is
	version, found := 0, 0
	mutate := func() *corev1.Pod {
		version++
		p := newPodNamed("pod-"+strconv.Itoa(random.IntN(12)), random.IntN(2) == 0, 0)
		p.ResourceVersion = strconv.Itoa(version)
		p.Status.Phase = corev1.PodPhase(pick("Running", "Running", "Pending", "Failed", "Succeeded"))
		p.Annotations = map[string]string{nodepool.ExcludeAnnotation: pick("true", "false", "")}
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "d"})
		for i := range random.IntN(3) {
			c := &p.Spec.Containers[i]
			c.Ports = append(c.Ports, corev1.ContainerPort{ContainerPort: 1 + random.Int32N(6), HostPort: random.Int32N(6), Protocol: corev1.Protocol(pick("", "TCP", "UDP")), HostIP: pick("", "::", "10.0.0.1")})
		}
		return p
	}
	for range 1500 {
		switch random.IntN(8) {
		case 0: // a list of all
			s := r.observe("list")
			if random.IntN(2) == 0 && len(pods) > 0 {
				delete(pods, pick(keys(pods)...)) // nobody was told
			}
			for _, name := range keys(pods) {
				s.See(watch.Added, object(pods[name]))
			}
			s.Synced()
			s.End(true)
		case 1:
			r.mu.Lock()
			r.membership.HostNetwork, r.membership.State = random.IntN(3) > 0, nodepool.State(pick("known", "stale", "unknown"))
			r.mu.Unlock()
		case 2:
			if len(pods) > 0 {
				name := pick(keys(pods)...)
				r.event(watch.Deleted, pods[name])
				delete(pods, name)
			}
		default:
			p := mutate()
			r.event(watch.Modified, p)
			pods[p.Name] = p
		}
		r.compute(quiet(t))
		got := short(r.Document().Findings)
		slices.Sort(got)
		if diff := gocmp.Diff(naive(pods, r.Document().membership()), got); diff != "" {
			t.Fatalf("findings of %v (-naive +got):\n%s", keys(pods), diff)
		}
		found += len(got)
	}
	if found < 1000 {
		t.Errorf("only %d findings were generated", found)
	}
}

func keys(pods map[string]*corev1.Pod) (names []string) {
	for name := range pods {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

func (d Document) membership() nodepool.Membership {
	return nodepool.Membership{HostNetwork: d.HostNetwork, State: d.State}
}
