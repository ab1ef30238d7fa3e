// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/client-go/rest"
)

// filteredPods are all on the node: what its kubelet lists.
var filteredPods = podSet{namespace: "filtered-5000", n: 5000, node: nodeName}

const configHead = "apiVersion: edgehub.io/v1alpha1\nkind: EdgehubConfiguration\n"

// filterChains are what is compared: no filter at all, the default, and one filter that
// changes every pod.
var filterChains = map[string]string{
	"none":     configHead + "filters:\n- name: hostnetworkpool\n  disabled: true\n",
	"observer": "",
	"mutating": configHead + "filters:\n- name: hostnetworkpool\n  disabled: true\n" +
		"cel:\n- name: mark\n  clients: [{program: Go-http-client}]\n  resources: [pods]\n  match: 'true'\n  set:\n  - path: metadata.labels[\"example.com/edge\"]\n    value: '\"true\"'\n",
}

// filters compares kubelet's list of 5,000 pods from a live feed through filters with the
// same list without any.
func (b *bench) filters(ctx context.Context) error {
	if err := b.seedNode(ctx); err != nil {
		return err
	}
	if err := b.seedPods(ctx, filteredPods); err != nil {
		return err
	}
	kubelet, err := b.cp.NodeConfig(nodeName)
	if err != nil {
		return err
	}
	hubs := map[string]*hub{}
	for name, text := range filterChains {
		h, err := b.newFilteredHub(ctx, text)
		if err != nil {
			return err
		}
		defer b.closing(h.close)
		hubs[name] = h
	}
	for _, accept := range []string{protobufType, jsonType} {
		if err := b.filterTimes(ctx, hubs, kubelet, accept); err != nil {
			return err
		}
	}
	_, plain, err := rss(hubs["none"].PID())
	if err != nil {
		return err
	}
	for _, name := range []string{"observer", "mutating"} {
		_, peak, err := rss(hubs[name].PID())
		if err != nil {
			return err
		}
		b.add(result{Name: "LIST of 5,000 pods, filters: peak RSS over none's, " + name, Value: peak - plain, Unit: "MB", Target: atMost(16),
			Versus: fmt.Sprintf("%.0f MB, none %.0f MB; the list is 25 MB in protobuf, 35 MB in JSON", peak, plain)})
	}
	return nil
}

func (b *bench) filterTimes(ctx context.Context, hubs map[string]*hub, kubelet *rest.Config, accept string) error {
	const path = "/api/v1/pods?fieldSelector=spec.nodeName%3D" + nodeName
	names := []string{"none", "observer", "mutating"}
	requests, s := map[string]request{}, samples{}
	for _, name := range names {
		through := hubs[name].Through(kubelet)
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
		if err := hubs[name].fromFeed(ctx, q); err != nil {
			return err
		}
		requests[name] = q
	}
	err := alternate(listRounds, names, func(name string) error {
		const n = 3
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
		s.add(name+" cpu", (after-before)*1000/n)
		return err
	})
	if err != nil {
		return err
	}
	encoding := map[string]string{protobufType: "protobuf", jsonType: "JSON"}[accept]
	for _, r := range []struct {
		name   string
		target *limit
	}{{"observer", atLeast(90)}, {"mutating", nil}} {
		b.add(result{Name: "LIST of 5,000 pods, " + encoding + ", filters: throughput, " + r.name + " of none", Value: 100 * s.median("none") / s.median(r.name), Unit: "%", Target: r.target,
			Versus: fmt.Sprintf("%.1f ms, none %.1f ms; CPU %.1f ms, %.1f ms", s.median(r.name), s.median("none"), mean(s[r.name+" cpu"]), mean(s["none cpu"]))})
	}
	return nil
}

// newFilteredHub starts a hub with a configuration of filters; "": none.
func (b *bench) newFilteredHub(ctx context.Context, text string) (_ *hub, err error) {
	args := []string{"-v=0"}
	if text != "" {
		dir, err := os.MkdirTemp(b.cp.Dir(), "filters-")
		if err != nil {
			return nil, err
		}
		file := filepath.Join(dir, "filters.yaml")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			return nil, err
		}
		args = append(args, "--filter-config="+file)
	}
	return b.startHub(ctx, &hub{}, b.cp.URL(), args)
}
