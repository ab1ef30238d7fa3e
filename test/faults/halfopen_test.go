// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	findWithin    = 10 * time.Second      // a half-open link
	replayWithin  = 50 * time.Millisecond // 99 of 100 answers from then on
	replays       = 300                   // answers measured
	replayTries   = 5                     // the machine is not ours alone
	loadOfCallers = 4
)

// TestHalfOpen silences the link, both ways and each way alone, while lists are
// asked for and watches are open: no FIN, no RST. What counts is when the first
// answer comes from the node itself, how fast they come after that, that no watch
// on the node notices, and that nobody lists when the link is back.
func TestHalfOpen(t *testing.T) {
	s := newSlaughter(t)
	ctx, g := s.begin(t, 0)
	s.write(ctx, 50)
	readers := s.follow(ctx, g)
	s.converge(ctx, readers)
	for _, d := range []struct {
		name string
		link.Direction
	}{{"both ways", link.Both}, {"nothing to the server", link.ToServer}, {"nothing to the client", link.ToClient}} {
		t.Run(d.name, func(t *testing.T) {
			s.T = t
			defer func() {
				if t.Failed() {
					_ = s.Link.Heal() // for the next one; the failure has been told
				}
			}()
			s.silence(ctx, d.Direction, readers)
		})
	}
	s.T = t
}

// write has each writer do n things.
func (s *slaughter) write(ctx context.Context, n int) {
	s.T.Helper()
	for _, w := range s.writers {
		for range n {
			s.Must(w.step(ctx))
		}
	}
}

func (s *slaughter) silence(ctx context.Context, d link.Direction, readers []*reader) {
	began := time.Now()
	loading, stop := context.WithCancel(ctx)
	defer stop()
	var g errgroup.Group
	var online, slow, broken atomic.Int64
	first := make(chan time.Time, loadOfCallers)
	for i := range loadOfCallers {
		g.Go(func() error { return s.askUntilReplayed(loading, i, &online, &slow, &broken, first) })
	}
	s.Must(process.Poll(ctx, "lists come through", process.Until(func() bool { return online.Load() > 20 })))
	silent := time.Now()
	s.Link.BlackHole(d)
	s.write(ctx, 10) // nobody hears of it yet
	found := <-first
	if took := found.Sub(silent); took > findWithin {
		s.T.Errorf("the first answer without the link came after %v, want at most %v", took, findWithin)
	}
	s.Must(g.Wait()) // at most one more answer each
	all := time.Since(silent)
	fast := s.measureReplays(ctx)
	s.T.Logf("first answer without the link after %v, the last request under way answered after %v (%d were under way for more than a second, %d broke off); then p50 %v, p99 %v",
		found.Sub(silent).Round(time.Millisecond), all.Round(time.Millisecond), slow.Load(), broken.Load(), rig.Percentile(fast, 50), rig.Percentile(fast, 99))
	s.write(ctx, 10)
	healed := time.Now()
	s.Online()
	s.converge(ctx, readers)
	s.T.Logf("up to date %v after the link was back", time.Since(healed).Round(time.Millisecond))
	for _, r := range readers {
		if resumed, started := r.counts(); resumed != 0 || started != 1 {
			s.T.Errorf("%v was taken %d times and resumed %d times, want one watch that lasts", r.view, started, resumed)
		}
	}
	s.wantResumption(silent, healed, len(readers))
	s.T.Logf("took %v", time.Since(began).Round(time.Second))
}

// askUntilReplayed lists again and again, until an answer comes without the link.
func (s *slaughter) askUntilReplayed(ctx context.Context, i int, online, slow, broken *atomic.Int64, first chan<- time.Time) error {
	for n := i; ; n++ {
		e, path := s.user, "/api/v1/namespaces/a/configmaps"
		if n%2 == 0 {
			e, path = s.node, "/api/v1/configmaps"
		}
		start := time.Now()
		accept := rig.JSON
		if n%2 == 0 {
			accept = rig.Protobuf
		}
		replayed, err := askOnce(ctx, e, path, accept)
		if errors.Is(err, errBroken) {
			broken.Add(1) // in the middle, which the client sees: it asks again
			continue
		}
		if err != nil {
			return err
		}
		if time.Since(start) > time.Second {
			slow.Add(1)
		}
		if replayed {
			first <- time.Now()
			return nil
		}
		online.Add(1)
	}
}

var errBroken = errors.New("the answer broke off")

// askOnce wants 200, and says whether the answer came from the node itself.
func askOnce(ctx context.Context, e *rig.Endpoint, path, accept string) (replayed bool, err error) {
	resp, err := e.Get(ctx, path, accept)
	if err != nil && strings.Contains(err.Error(), "INTERNAL_ERROR") {
		return false, fmt.Errorf("%w: %w", errBroken, err) // its headers were still under way
	}
	if err != nil {
		return false, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return false, fmt.Errorf("%w: %w", errBroken, err)
	}
	if resp.StatusCode != http.StatusOK {
		return false, fmt.Errorf("%s: %d: %.200s", path, resp.StatusCode, body)
	}
	return strings.HasPrefix(resp.Header.Get("Warning"), "110"), nil
}

// measureReplays returns how long answers without the link take, of the first try
// of some that is fast enough, else of the last.
func (s *slaughter) measureReplays(ctx context.Context) (took []time.Duration) {
	for range replayTries {
		took = nil
		for i := range replays {
			e, accept := s.user, rig.JSON
			if i%2 == 0 {
				e, accept = s.node, rig.Protobuf
			}
			start := time.Now()
			replayed, err := askOnce(ctx, e, "/api/v1/namespaces/a/configmaps", accept)
			if err == nil && !replayed {
				err = errors.New("an answer without a warning, with the link silent")
			}
			s.Must(err)
			took = append(took, time.Since(start))
		}
		if rig.Percentile(took, 99) <= replayWithin {
			return took
		}
	}
	s.T.Errorf("answers without the link: p99 %v, want at most %v", rig.Percentile(took, 99), replayWithin)
	return took
}

// wantResumption looks at what the hub itself has asked for since the link went
// silent: one watch for each feed, which resumes, and no list.
func (s *slaughter) wantResumption(silent, healed time.Time, feeds int) {
	var own []auditv1.Event
	s.Must(process.Poll(s.T.Context(), "the feeds' watches are in the audit log", func(context.Context) error {
		events, err := s.ControlPlane.Requests(silent)
		if err != nil {
			return err
		}
		own = nil
		for _, e := range events {
			if strings.HasPrefix(e.UserAgent, "edgehub") && e.ObjectRef != nil && e.ObjectRef.APIGroup != "authentication.k8s.io" {
				own = append(own, e)
			}
		}
		if len(own) < feeds {
			return fmt.Errorf("%d of %d", len(own), feeds)
		}
		return nil
	}))
	for _, e := range own {
		switch {
		case e.Verb == "list" && e.ObjectRef.Resource != "nodes", strings.Contains(e.RequestURI, "sendInitialEvents"):
			s.T.Errorf("the hub asked for a whole state: %s %s", e.Verb, e.RequestURI)
		case e.Verb == "watch" && e.RequestReceivedTimestamp.After(healed) && !strings.Contains(e.RequestURI, "resourceVersion="):
			s.T.Errorf("the hub watches from nowhere: %s", e.RequestURI)
		}
	}
	s.T.Logf("%d watches for %d feeds, no list", len(own), feeds)
}
