// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"debug/buildinfo"
	"errors"
	"fmt"
	"regexp"
	"time"

	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
)

const (
	user      = "bench"
	nodeName  = "bench-node"
	recorders = 16 // users whose first list of all is recorded
)

func recorder(i int) string { return fmt.Sprintf("recorder-%d", i) }

// A bench is what is measured on: one API server, and hubs as they are needed.
type bench struct {
	began  time.Time
	chosen *regexp.Regexp
	table  *table
	cp     *controlplane.ControlPlane
	server int // process ID of the API server
	seeded map[string]bool
	disks  *diskRun // nil: not chosen
	closes []func() error
}

func (b *bench) start(ctx context.Context) (err error) {
	say("starting a control plane")
	masters := []string{"system:masters"}
	users := []controlplane.StaticUser{{Name: user, Groups: masters}, {Name: proxyUser}}
	for i := range recorders {
		users = append(users, controlplane.StaticUser{Name: recorder(i), Groups: masters})
	}
	if b.cp, err = controlplane.Start(ctx, controlplane.Config{Users: users}); err != nil {
		return err
	}
	b.closes = append(b.closes, b.cp.Stop)
	b.seeded = map[string]bool{}
	if b.server, err = listenerOf(b.cp.Addr()); err != nil {
		return err
	}
	if b.chosen.MatchString("disk") {
		return b.background(ctx)
	}
	return nil
}

// close ends what was begun last first.
func (b *bench) close() error {
	var errs []error
	for i := len(b.closes) - 1; i >= 0; i-- {
		errs = append(errs, b.closes[i]())
	}
	return errors.Join(errs...)
}

// direct is the way of the bench's user to the API server.
func (b *bench) direct() *rest.Config { return b.cp.TokenConfig(user) }

// A hub is edgehub as a process.
type hub struct {
	*node.Hub
	link *link.Link // to the API server; nil: there is none in between
}

// newHub starts a hub with an empty data directory, straight on the API server or
// over a link that can be cut. A link is this process's work: only for what is not
// measured online.
func (b *bench) newHub(ctx context.Context, linked bool) (_ *hub, err error) {
	h, url := &hub{}, b.cp.URL()
	if linked {
		if h.link, err = link.New(ctx, b.cp.Addr()); err != nil {
			return nil, err
		}
		url = h.link.URL()
	}
	return b.startHub(ctx, h, url, []string{"-v=0"}) // the default; the rig's is more
}

func (b *bench) startHub(ctx context.Context, h *hub, url string, args []string) (*hub, error) {
	cert, key, err := b.cp.NodeCredentials(nodeName)
	if err == nil {
		h.Hub, err = node.NewHub(ctx, node.HubConfig{
			ServerURLs: []string{url}, ServerCAFile: b.cp.CAFile(), CertFile: cert, KeyFile: key,
			Args: args,
		})
	}
	if err == nil {
		err = h.Start(ctx)
	}
	if err == nil {
		err = errors.Join(h.checkBuild(), h.awaitUpstream(ctx, true))
	}
	if err != nil {
		return nil, errors.Join(err, h.close())
	}
	return h, nil
}

// checkBuild refuses a hub with the race detector in it, which another test of this
// tree may have put in the place of the one that was built for this run.
func (h *hub) checkBuild() error {
	info, err := buildinfo.ReadFile(fmt.Sprintf("/proc/%d/exe", h.PID()))
	if err != nil {
		return err
	}
	for _, s := range info.Settings {
		if s.Key == "-race" && s.Value == "true" {
			return errors.New("the hub is built with -race: something else builds in this tree")
		}
	}
	return nil
}

// close ends the hub. One that has panicked or died was not measured but broken.
func (h *hub) close() error {
	var err error
	if h.Hub != nil {
		if h.Running() {
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			panics, e := h.Metric(ctx, "edgehub_proxy_panics_total")
			if err = e; panics > 0 {
				err = fmt.Errorf("edgehub caught %v panics:\n%s", panics, h.LogTail())
			}
		} else {
			err = fmt.Errorf("edgehub has ended: %w\n%s", h.Exit(), h.LogTail())
		}
		err = errors.Join(err, h.Close())
	}
	if h.link != nil {
		h.link.Close()
	}
	return err
}

// cut cuts the link and waits until the hub knows.
func (h *hub) cut(ctx context.Context) error {
	h.link.Cut()
	return h.awaitUpstream(ctx, false)
}

// awaitUpstream waits until the hub says that the API server is healthy, or not.
func (h *hub) awaitUpstream(ctx context.Context, healthy bool) error {
	return process.Poll(ctx, fmt.Sprintf("edgehub knows that the API server is healthy: %v", healthy), func(ctx context.Context) error {
		up, err := h.Metric(ctx, "edgehub_upstream_healthy")
		if err == nil && (up != 0) != healthy {
			err = fmt.Errorf("edgehub_upstream_healthy is %v", up)
		}
		return err
	})
}

// answered returns how many requests were answered from a source.
func (h *hub) answered(ctx context.Context, verb, source string) (float64, error) {
	return h.Metric(ctx, "edgehub_proxy_requests_total", fmt.Sprintf("verb=%q", verb), fmt.Sprintf("source=%q", source), `code="200"`)
}
