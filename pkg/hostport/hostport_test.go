// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package hostport

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
)

var always = corev1.ContainerRestartPolicyAlways

func container(name string, ports ...corev1.ContainerPort) corev1.Container {
	return corev1.Container{Name: name, Ports: ports}
}

func sidecar(name string, ports ...corev1.ContainerPort) corev1.Container {
	c := container(name, ports...)
	c.RestartPolicy = &always
	return c
}

func containers(c ...corev1.Container) []corev1.Container { return c }

func TestOf(t *testing.T) {
	onFailure := corev1.ContainerRestartPolicyOnFailure
	for _, tc := range []struct {
		name string
		spec corev1.PodSpec
		want []Port
	}{
		{"nothing", corev1.PodSpec{}, nil},
		{"host network, host port unset", corev1.PodSpec{HostNetwork: true, Containers: containers(container("a", corev1.ContainerPort{ContainerPort: 80}))},
			[]Port{{"a", "TCP", "0.0.0.0", 80}}},
		{"host network, host port the container's", corev1.PodSpec{HostNetwork: true, Containers: containers(container("a", corev1.ContainerPort{ContainerPort: 80, HostPort: 80}))},
			[]Port{{"a", "TCP", "0.0.0.0", 80}}},
		{"host network, the scheduler goes by another host port", corev1.PodSpec{HostNetwork: true, InitContainers: containers(sidecar("a", corev1.ContainerPort{ContainerPort: 80, HostPort: 81}))},
			[]Port{{"a", "TCP", "0.0.0.0", 81}}},
		{"own network, host port unset", corev1.PodSpec{Containers: containers(container("a", corev1.ContainerPort{ContainerPort: 80}))}, nil},
		{"own network, host port", corev1.PodSpec{Containers: containers(container("a", corev1.ContainerPort{ContainerPort: 80, HostPort: 8080}))},
			[]Port{{"a", "TCP", "0.0.0.0", 8080}}},
		{"protocol and IP", corev1.PodSpec{Containers: containers(container("a",
			corev1.ContainerPort{ContainerPort: 80, HostPort: 80, Protocol: "UDP", HostIP: "127.0.0.1"},
			corev1.ContainerPort{ContainerPort: 80, HostPort: 80, Protocol: "SCTP", HostIP: "::"}))},
			[]Port{{"a", "UDP", "127.0.0.1", 80}, {"a", "SCTP", "::", 80}}},
		{"negative", corev1.PodSpec{HostNetwork: true, Containers: containers(container("a",
			corev1.ContainerPort{ContainerPort: 80, HostPort: -1}, corev1.ContainerPort{ContainerPort: -1}, corev1.ContainerPort{}))}, nil},
		{"an init container is gone when containers start", corev1.PodSpec{HostNetwork: true, InitContainers: containers(container("i", corev1.ContainerPort{ContainerPort: 80}),
			corev1.Container{Name: "j", RestartPolicy: &onFailure, Ports: []corev1.ContainerPort{{HostPort: 81}}})}, nil},
		{"a sidecar keeps running", corev1.PodSpec{HostNetwork: true, InitContainers: containers(sidecar("s", corev1.ContainerPort{ContainerPort: 80})), Containers: containers(container("a", corev1.ContainerPort{ContainerPort: 80}))},
			[]Port{{"s", "TCP", "0.0.0.0", 80}, {"a", "TCP", "0.0.0.0", 80}}},
		{"an ephemeral container has no ports", corev1.PodSpec{HostNetwork: true, EphemeralContainers: []corev1.EphemeralContainer{{
			EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "e", Ports: []corev1.ContainerPort{{HostPort: 80}}}}}}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if diff := gocmp.Diff(tc.want, Of(&tc.spec)); diff != "" {
				t.Errorf("Of() (-want +got):\n%s", diff)
			}
		})
	}
}

func TestHeld(t *testing.T) {
	spec := corev1.PodSpec{HostNetwork: true, Containers: containers(container("a", corev1.ContainerPort{ContainerPort: 80}))}
	for phase, want := range map[corev1.PodPhase]int{"": 1, corev1.PodPending: 1, corev1.PodRunning: 1, corev1.PodUnknown: 1, corev1.PodSucceeded: 0, corev1.PodFailed: 0} {
		if got := Held(&corev1.Pod{Spec: spec, Status: corev1.PodStatus{Phase: phase}}); len(got) != want {
			t.Errorf("Held(%q) = %v, want %d ports", phase, got, want)
		}
	}
}

func TestConflicts(t *testing.T) {
	for _, tc := range []struct {
		name string
		p, q Port
		want bool
	}{
		{"the same", Port{"a", "TCP", "0.0.0.0", 80}, Port{"b", "TCP", "0.0.0.0", 80}, true},
		{"another port", Port{"a", "TCP", "0.0.0.0", 80}, Port{"b", "TCP", "0.0.0.0", 81}, false},
		{"another protocol", Port{"a", "TCP", "0.0.0.0", 80}, Port{"b", "UDP", "0.0.0.0", 80}, false},
		{"no protocol is TCP", Port{"a", "", "0.0.0.0", 80}, Port{"b", "TCP", "0.0.0.0", 80}, true},
		{"no protocol is not UDP", Port{"a", "", "0.0.0.0", 80}, Port{"b", "UDP", "0.0.0.0", 80}, false},
		{"no IP is all", Port{"a", "TCP", "", 80}, Port{"b", "TCP", "0.0.0.0", 80}, true},
		{"no IP and one", Port{"a", "TCP", "", 80}, Port{"b", "TCP", "127.0.0.1", 80}, true},
		{"all and one", Port{"a", "TCP", "0.0.0.0", 80}, Port{"b", "TCP", "127.0.0.1", 80}, true},
		{"all and an IPv6 one", Port{"a", "TCP", "0.0.0.0", 80}, Port{"b", "TCP", "::1", 80}, true},
		{"two IPs", Port{"a", "TCP", "10.0.0.1", 80}, Port{"b", "TCP", "127.0.0.1", 80}, false},
		{"the same IP", Port{"a", "UDP", "10.0.0.1", 80}, Port{"b", "UDP", "10.0.0.1", 80}, true},
		{":: is one IP", Port{"a", "TCP", "::", 80}, Port{"b", "TCP", "::1", 80}, false},
		{":: and all", Port{"a", "TCP", "::", 80}, Port{"b", "TCP", "", 80}, true},
		{"unspecified", Port{"a", "TCP", "", 0}, Port{"b", "TCP", "", 0}, false},
		{"negative", Port{"a", "TCP", "", -1}, Port{"b", "TCP", "", -1}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, ports := range [][2]Port{{tc.p, tc.q}, {tc.q, tc.p}} {
				if got := ports[0].Conflicts(ports[1]); got != tc.want {
					t.Errorf("%v.Conflicts(%v) = %v, want %v", ports[0], ports[1], got, tc.want)
				}
			}
		})
	}
}

func TestCollisions(t *testing.T) {
	holders := []Holder{
		{"b", []Port{{"x", "", "", 80}, {"y", "TCP", "127.0.0.1", 80}}},
		{"a", []Port{{"x", "TCP", "::", 80}, {"z", "UDP", "", 80}}},
		{"c", []Port{{"x", "TCP", "", 0}, {"x", "UDP", "10.0.0.1", 80}}},
	}
	want := []Collision{
		{Claim{"b", Port{"x", "TCP", "0.0.0.0", 80}}, Claim{"b", Port{"y", "TCP", "127.0.0.1", 80}}},
		{Claim{"b", Port{"x", "TCP", "0.0.0.0", 80}}, Claim{"a", Port{"x", "TCP", "::", 80}}},
		{Claim{"a", Port{"z", "UDP", "0.0.0.0", 80}}, Claim{"c", Port{"x", "UDP", "10.0.0.1", 80}}},
	}
	for range 2 {
		if diff := gocmp.Diff(want, slices.Collect(Collisions(holders))); diff != "" {
			t.Errorf("Collisions() (-want +got):\n%s", diff)
		}
		slices.Reverse(holders)
	}
	for c := range Collisions(holders) {
		if c != want[0] {
			t.Errorf("first of Collisions() = %v, want %v", c, want[0])
		}
		break
	}
}

// naive says the rules in other words, and looks at every pair.
func naive(holders []Holder) (pairs []string) {
	var claims []Claim
	for _, h := range holders {
		for _, p := range h.Ports {
			claims = append(claims, Claim{h.ID, p})
		}
	}
	place := func(c Claim) string { return fmt.Sprint(cmp.Or(c.Protocol, "TCP"), c.Port.Port) }
	for i, c := range claims {
		for _, d := range claims[i+1:] {
			ips := []string{c.IP, d.IP}
			if c.Port.Port <= 0 || place(c) != place(d) || ips[0] != ips[1] && !slices.Contains(ips, "") && !slices.Contains(ips, "0.0.0.0") {
				continue
			}
			pairs = append(pairs, pair(c, d))
		}
	}
	slices.Sort(pairs)
	return pairs
}

func pair(c, d Claim) string {
	c.Port, d.Port = c.Port.normal(), d.Port.normal()
	s := []string{fmt.Sprint(c), fmt.Sprint(d)}
	slices.Sort(s)
	return fmt.Sprint(s)
}

func TestCollisionsAreAllThereAre(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	pick := func(of ...string) string { return of[random.IntN(len(of))] }
	found := 0
	for range 1000 {
		holders := make([]Holder, random.IntN(8))
		for i := range holders {
			holders[i].ID = fmt.Sprint("pod-", i)
			for range random.IntN(5) {
				holders[i].Ports = append(holders[i].Ports, Port{
					pick("a", "b"), corev1.Protocol(pick("", "TCP", "UDP", "SCTP")), pick("", "0.0.0.0", "::", "::1", "10.0.0.1", "-", "127.0.0.1"), random.Int32N(4) - 1,
				})
			}
		}
		want := naive(holders)
		random.Shuffle(len(holders), func(i, j int) { holders[i], holders[j] = holders[j], holders[i] })
		var got []string
		all := slices.Collect(Collisions(holders))
		for _, c := range all {
			got = append(got, pair(c.First, c.Second))
		}
		slices.Sort(got)
		if diff := gocmp.Diff(want, got); diff != "" {
			t.Fatalf("Collisions(%v) (-naive +got):\n%s", holders, diff)
		}
		random.Shuffle(len(holders), func(i, j int) { holders[i], holders[j] = holders[j], holders[i] })
		if diff := gocmp.Diff(all, slices.Collect(Collisions(holders))); diff != "" {
			t.Fatalf("Collisions(%v) in another order (-before +after):\n%s", holders, diff)
		}
		found += len(got)
	}
	if found < 500 {
		t.Errorf("only %d collisions were generated", found)
	}
}

func TestCollisionsAreFast(t *testing.T) {
	const pods = 100_000 // in quadratic time that takes minutes
	holders := make([]Holder, pods)
	for i := range holders {
		holders[i] = Holder{fmt.Sprint(i), []Port{{"c", "TCP", fmt.Sprint("ip-", i), 80}}}
	}
	start := time.Now()
	if got := slices.Collect(Collisions(holders)); len(got) != 0 {
		t.Errorf("%d Collisions(), want none", len(got))
	}
	if took := time.Since(start); took > time.Minute {
		t.Errorf("Collisions() of %d pods took %v", pods, took)
	}
}
