// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Command bench measures edgehub beside what a user would take instead, on a real
// API server: straight requests, and a bare httputil.ReverseProxy. All of one
// table comes from one run. It prints the table and writes out/results.json.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"text/tabwriter"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/node"
)

const (
	pods    = 5000
	maps    = 5000
	user    = "bench"
	podsURL = "/api/v1/pods"
)

// A result is one line of the table. Target is what the project aims at.
type result struct {
	Name   string  `json:"name"`
	Value  float64 `json:"value"`
	Unit   string  `json:"unit"`
	Target float64 `json:"target"` // 0: none
	AtMost bool    `json:"at_most"`
	Met    bool    `json:"met"`
	Versus string  `json:"versus,omitempty"`
}

// A bench is what is measured on.
type bench struct {
	cp      *controlplane.ControlPlane
	link    *link.Link
	hub     *node.Hub
	results []result
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == "reverseproxy" {
		fail(reverseProxy(os.Args[2:]))
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	b := &bench{}
	err := b.run(ctx)
	b.close()
	fail(err)
	fail(b.report())
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func say(format string, args ...any) { fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...) }

func (b *bench) run(ctx context.Context) error {
	say("starting a control plane and edgehub")
	if err := b.start(ctx); err != nil {
		return err
	}
	for _, part := range []func(context.Context) error{b.idle, b.passThrough, b.seed, b.lists, b.restart} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) start(ctx context.Context) (err error) {
	if b.cp, err = controlplane.Start(ctx, controlplane.Config{Users: []controlplane.StaticUser{{Name: user, Groups: []string{"system:masters"}}}}); err != nil {
		return err
	}
	if b.link, err = link.New(ctx, b.cp.Addr()); err != nil {
		return err
	}
	cert, key, err := b.cp.NodeCredentials("bench-node")
	if err != nil {
		return err
	}
	// Straight to the API server while it is measured; the link is for the cut.
	b.hub, err = node.NewHub(ctx, node.HubConfig{ServerURLs: []string{b.cp.URL()}, ServerCAFile: b.cp.CAFile(), CertFile: cert, KeyFile: key})
	if err != nil {
		return err
	}
	return b.hub.Start(ctx)
}

func (b *bench) close() {
	if b.hub != nil {
		_ = b.hub.Close()
	}
	if b.link != nil {
		b.link.Close()
	}
	if b.cp != nil {
		_ = b.cp.Stop()
	}
}

// atMost and atLeast add a line; target 0 is none.
func (b *bench) atMost(name string, value float64, unit string, target float64, versus string) {
	b.add(result{name, value, unit, target, true, target == 0 || value <= target, versus})
}

func (b *bench) atLeast(name string, value float64, unit string, target float64, versus string) {
	b.add(result{name, value, unit, target, false, target == 0 || value >= target, versus})
}

func (b *bench) add(r result) {
	b.results = append(b.results, r)
	say("%s: %.4g %s", r.Name, r.Value, r.Unit)
}

func (b *bench) report() error {
	w := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "what\tvalue\ttarget\t\tversus")
	for _, r := range b.results {
		target, met := "", ""
		if r.Target != 0 {
			target = map[bool]string{true: "≤ ", false: "≥ "}[r.AtMost] + fmt.Sprintf("%.4g %s", r.Target, r.Unit)
			met = map[bool]string{true: "met", false: "MISSED"}[r.Met]
		}
		fmt.Fprintf(w, "%s\t%.4g %s\t%s\t%s\t%s\n", r.Name, r.Value, r.Unit, target, met, r.Versus)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	root, err := controlplane.Root()
	if err != nil {
		return err
	}
	out := filepath.Join(root, "bench", "out")
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	text, err := json.MarshalIndent(b.results, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(out, "results.json"), append(text, '\n'), 0o644)
}
