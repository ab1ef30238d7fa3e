// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/client-go/rest"
)

// filteredPods are all on the node: what its kubelet lists.
var filteredPods = podSet{namespace: "filtered-5000", n: 5000, node: nodeName, env: true}

const (
	configHead = "apiVersion: edgehub.io/v1alpha1\nkind: EdgehubConfiguration\nfilters:\n- name: hostnetworkpool\n  disabled: true\n"
	everybody  = "  clients: [{program: Go-http-client}]\n"
	// podsAddress is where the hub that leads pods to itself does so; it takes root.
	podsAddress = "169.254.88.1"
)

// A filterChain is one of those that are compared.
type filterChain struct {
	name, config string
	args         []string
	target       *limit
	rounds       int
}

// filterChains are no filter at all, the default, one that changes every pod, and one in
// CEL that does.
var filterChains = []filterChain{
	{name: "none", config: configHead, rounds: listRounds},
	{name: "observers", target: atLeast(90), rounds: listRounds},
	{name: "one that changes every pod (serviceenvupdater)", config: configHead + "- name: serviceenvupdater\n" + everybody, rounds: 2,
		args: []string{"--link-local-address=" + podsAddress + ":10268", "--link-local-interface=lo"}},
	{name: "one in CEL that does", config: configHead + "cel:\n- name: mark\n" + everybody + "  resources: [pods]\n  match: 'true'\n  set:\n  - path: metadata.labels[\"example.com/edge\"]\n    value: '\"true\"'\n", rounds: 1},
}

// filters compares kubelet's list of 5,000 pods from a live feed through filters with the
// same list without any.
func (b *bench) filters(ctx context.Context) error {
	if err := errors.Join(b.seedNode(ctx), b.seedPods(ctx, filteredPods)); err != nil {
		return err
	}
	kubelet, err := b.cp.NodeConfig(nodeName)
	if err != nil {
		return err
	}
	hubs := map[string]*hub{}
	var chains []filterChain
	for _, c := range filterChains {
		if c.args != nil && os.Geteuid() != 0 {
			say("%s is left out: it takes root", c.name)
			continue
		}
		h, err := b.newFilteredHub(ctx, c)
		if err != nil {
			return err
		}
		defer b.closing(h.close)
		hubs[c.name] = h
		chains = append(chains, c)
	}
	for _, accept := range []string{protobufType, jsonType} {
		if err := b.filterTimes(ctx, hubs, chains, kubelet, accept); err != nil {
			return err
		}
	}
	_, plain, err := rss(hubs[chains[0].name].PID())
	if err != nil {
		return err
	}
	for _, c := range chains[1:] {
		_, peak, err := rss(hubs[c.name].PID())
		if err != nil {
			return err
		}
		b.add(result{Name: "LISTs of 5,000 pods through filters, peak RSS over none's: " + c.name, Value: peak - plain, Unit: "MB", Target: atMost(16),
			Versus: fmt.Sprintf("%.0f MB, none %.0f MB; a list is some 25 MB in protobuf, 35 MB in JSON", peak, plain)})
	}
	return nil
}

func (b *bench) filterTimes(ctx context.Context, hubs map[string]*hub, chains []filterChain, kubelet *rest.Config, accept string) error {
	const path = "/api/v1/pods?fieldSelector=spec.nodeName%3D" + nodeName
	requests, s := map[string]request{}, samples{}
	rounds := map[string]int{}
	var names []string
	for _, c := range chains {
		through := hubs[c.name].Through(kubelet)
		w, err := hold(ctx, through, path+"&watch=1&resourceVersion=0", accept)
		if err != nil {
			return err
		}
		defer w.close()
		q, err := to(ctx, through, path+"&resourceVersion=0", accept)
		if err != nil {
			return err
		}
		defer q.close()
		if err := hubs[c.name].fromFeed(ctx, q); err != nil {
			return err
		}
		requests[c.name], rounds[c.name] = q, c.rounds
		names = append(names, c.name)
	}
	err := alternate(listRounds, names, func(name string) error {
		if rounds[name]--; rounds[name] < 0 {
			return nil
		}
		n := min(3, rounds[name]+1)
		before, err := cpuSeconds(hubs[name].PID())
		if err != nil {
			return err
		}
		ms, err := requests[name].times(ctx, n)
		if err != nil {
			return err
		}
		after, err := cpuSeconds(hubs[name].PID())
		s.add(name, ms)
		s.add(name+" cpu", (after-before)*1000/float64(n))
		return err
	})
	if err != nil {
		return err
	}
	encoding := map[string]string{protobufType: "protobuf", jsonType: "JSON"}[accept]
	for _, c := range chains[1:] {
		b.add(result{Name: "LIST of 5,000 pods, " + encoding + ", through filters, of the throughput without: " + c.name, Value: 100 * s.median("none") / s.median(c.name), Unit: "%", Target: c.target,
			Versus: fmt.Sprintf("%.1f ms, none %.1f ms; CPU %.1f ms, %.1f ms", s.median(c.name), s.median("none"), mean(s[c.name+" cpu"]), mean(s["none cpu"]))})
	}
	return nil
}

// newFilteredHub starts a hub with a chain of filters.
func (b *bench) newFilteredHub(ctx context.Context, c filterChain) (_ *hub, err error) {
	args := append([]string{"-v=0"}, c.args...)
	if c.config != "" {
		dir, err := os.MkdirTemp(b.cp.Dir(), "filters-")
		if err != nil {
			return nil, err
		}
		file := filepath.Join(dir, "filters.yaml")
		if err := os.WriteFile(file, []byte(c.config), 0o600); err != nil {
			return nil, err
		}
		args = append(args, "--filter-config="+file)
	}
	return b.startHub(ctx, &hub{}, b.cp.URL(), args)
}
