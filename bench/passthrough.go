// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"time"

	"k8s.io/client-go/rest"
)

// passRounds is how often each of the three ways has its turn.
const passRounds = 5

var threeWays = []string{"direct", "bare", "hub"}

// A passRun is the three ways to the API server.
type passRun struct {
	configs map[string]*rest.Config
	pids    map[string]int // of the proxies
	close   func() error
}

func (b *bench) newPassRun(ctx context.Context) (*passRun, error) {
	h, err := b.newHub(ctx, false)
	if err != nil {
		return nil, err
	}
	proxy, err := b.newBare(ctx)
	if err != nil {
		return nil, err
	}
	direct := b.direct()
	return &passRun{
		configs: map[string]*rest.Config{"direct": direct, "bare": proxy.config, "hub": h.Through(direct)},
		pids:    map[string]int{"bare": proxy.PID(), "hub": h.PID()},
		close:   func() error { proxy.close(); return h.close() },
	}, nil
}

// spent returns the CPU time of the proxy on a way; none is on the direct one.
func (p *passRun) spent(name string) (float64, error) {
	if p.pids[name] == 0 {
		return 0, nil
	}
	return cpuSeconds(p.pids[name])
}

// get measures the GET of a small object.
func (b *bench) get(ctx context.Context) error {
	if err := b.seedMaps(ctx, mapSet{namespace: "small", n: 1, bytes: 1000}); err != nil {
		return err
	}
	p, err := b.newPassRun(ctx)
	if err != nil {
		return err
	}
	defer b.closing(p.close)
	const path, conns, d = "/api/v1/namespaces/small/configmaps/map-00000", 8, 2 * time.Second
	requests := map[string][]request{}
	for name, c := range p.configs {
		if requests[name], err = several(ctx, conns, c, path); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	s := samples{}
	err = alternate(passRounds, threeWays, func(name string) error {
		before, err := p.spent(name)
		if err != nil {
			return err
		}
		rate, _, err := load(ctx, requests[name], d)
		if err != nil {
			return err
		}
		after, err := p.spent(name)
		if err != nil {
			return err
		}
		_, p50, err := load(ctx, requests[name][:1], time.Second)
		s.add(name+" rate", rate)
		s.add(name+" p50", p50)
		s.add(name+" cpu", (after-before)/(rate*d.Seconds())*1e6)
		return err
	})
	if err != nil {
		return err
	}
	b.addGet(s)
	return nil
}

func (b *bench) addGet(s samples) {
	of := func(what string) func(string) float64 {
		return func(name string) float64 { return s.median(name + " " + what) }
	}
	rate, p50, cpu := of("rate"), of("p50"), of("cpu")
	b.add(result{Name: "GET of 1 KB, 8 connections: part of a bare ReverseProxy's throughput", Value: 100 * rate("hub") / rate("bare"), Unit: "%", Target: atLeast(90),
		Versus: fmt.Sprintf("edgehub %.0f/s, bare %.0f/s, direct %.0f/s; %s83 %% of direct, 35 %% cached", rate("hub"), rate("bare"), rate("direct"), yurtHub)})
	b.add(result{Name: "GET of 1 KB, 1 connection: p50 over direct", Value: p50("hub") - p50("direct"), Unit: "µs", Target: atMost(150),
		Versus: fmt.Sprintf("edgehub %.0f µs, direct %.0f µs, bare +%.0f µs", p50("hub"), p50("direct"), p50("bare")-p50("direct"))})
	b.add(result{Name: "GET of 1 KB: CPU time of the hub a request", Value: cpu("hub"), Unit: "µs", Versus: fmt.Sprintf("bare ReverseProxy %.0f µs", cpu("bare"))})
}

// bigList measures a list of 10 MB that has to come from the API server, with gzip
// (what client-go asks for; the hub unpacks it in the client's stead) and without
// (the hub asks for gzip all the same). The hub records it: it has seen it before
// and finds nothing new.
func (b *bench) bigList(ctx context.Context) error {
	if err := b.seedMaps(ctx, bigMaps); err != nil {
		return err
	}
	p, err := b.newPassRun(ctx)
	if err != nil {
		return err
	}
	defer b.closing(p.close)
	for _, gzip := range []bool{true, false} {
		if err := b.bigListAs(ctx, p, gzip); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) bigListAs(ctx context.Context, p *passRun, gzip bool) error {
	const each = 4
	requests := map[string]request{}
	for name, c := range p.configs {
		r, err := toAs(ctx, c, "/api/v1/namespaces/"+bigMaps.namespace+"/configmaps", protobufType, gzip)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		defer r.close()
		requests[name] = r
	}
	s := samples{}
	err := alternate(passRounds, threeWays, func(name string) error {
		before, err := p.spent(name)
		if err != nil {
			return err
		}
		ms, err := requests[name].times(ctx, each)
		if err != nil {
			return err
		}
		after, err := p.spent(name)
		s.add(name, ms)
		s.add(name+" cpu", (after-before)*1000/each)
		return err
	})
	if err != nil {
		return err
	}
	form := map[bool]string{true: "gzip, as client-go asks", false: "a client without gzip"}[gzip]
	b.add(result{Name: "LIST of 10 MB passed through (" + form + "): part of a bare ReverseProxy's throughput", Value: 100 * s.median("bare") / s.median("hub"), Unit: "%", Target: atLeast(90),
		Versus: fmt.Sprintf("edgehub %.0f ms, bare %.0f ms, direct %.0f ms; CPU of the hub %.0f ms, of bare %.0f ms",
			s.median("hub"), s.median("bare"), s.median("direct"), s.median("hub cpu"), s.median("bare cpu"))})
	return nil
}

// closing closes at the end of a part; that a hub was broken fails the run.
func (b *bench) closing(f func() error) {
	if err := f(); err != nil {
		say("%v", err)
		b.closes = append(b.closes, func() error { return err })
	}
}
