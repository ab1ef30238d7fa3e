// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	listPeriod  = 40 * time.Millisecond // of each user's lists, under load
	retryPeriod = 25 * time.Millisecond
	// flushPatience is how old a change may be that SIGKILL loses: a second, and
	// as much again for a machine that is busy.
	flushPatience = 2 * time.Second
	// killsAtFirst are the kills before everything has been recorded once.
	killsAtFirst = 10
)

// A slaughter is a hub under load that is killed again and again.
type slaughter struct {
	*rig.Rig
	rng     *rand.Rand
	views   []*view
	node    *rig.Endpoint
	user    *rig.Endpoint
	writers []*writer
	truths  map[string]*truth // by resource and form

	starts []time.Duration // from exec to the first answer
	lists  atomic.Int64    // answered online
	events atomic.Int64    // seen by watchers
}

// newSlaughter starts all but the hub.
func newSlaughter(t *testing.T, hubArgs ...string) *slaughter {
	t.Helper()
	s := &slaughter{Rig: newRig(t, nil, hubArgs...), views: views(), truths: map[string]*truth{}}
	// More than the Node authorizer gives it, so that it has scopes worth looking at.
	s.Grant("", rig.User(rig.NodeUser), "configmaps", "secrets", "pods", "widgets")
	return s
}

// begin starts the hub and makes what writes. What runs in the group ends with the
// test.
func (s *slaughter) begin(t *testing.T, seed uint64) (context.Context, *errgroup.Group) {
	t.Helper()
	g, ctx := errgroup.WithContext(t.Context())
	t.Cleanup(func() {
		if err := g.Wait(); err != nil {
			t.Error(err)
		}
	})
	s.startTruth(ctx, g)
	process.Run(t, s.Hub)
	s.WaitLink(true)
	s.node, s.user = s.Through(s.Node), s.Through(s.ControlPlane.TokenConfig(operator))
	client, err := dynamic.NewForConfig(s.ControlPlane.TokenConfig(operator))
	s.Must(err)
	for i, gvr := range []schema.GroupVersionResource{{Version: "v1", Resource: "configmaps"}, {Version: "v1", Resource: "secrets"}, {Version: "v1", Resource: "pods"}, rig.Widgets} {
		s.writers = append(s.writers, newWriter(client, gvr, seed+uint64(i)))
	}
	return ctx, g
}

// follow has a reader follow each view that is watched.
func (s *slaughter) follow(ctx context.Context, g *errgroup.Group) (readers []*reader) {
	for _, v := range s.views {
		if v.watched {
			r := &reader{view: v, endpoint: s.endpointOf(v), events: &s.events}
			readers = append(readers, r)
			g.Go(func() error { return r.run(ctx) })
		}
	}
	return readers
}

func (s *slaughter) endpointOf(v *view) *rig.Endpoint {
	if v.byNode {
		return s.node
	}
	return s.user
}

// truthOf returns what the API server had, in the form that a client which asked
// for v was given: its first, or another that it accepts.
func (s *slaughter) truthOf(v *view, l rig.List) *truth {
	form := v.form()
	if form == "protobuf" && !l.Protobuf && strings.Contains(v.accept, rig.JSON) {
		form = "json"
	}
	return s.truths[v.resource+" "+form]
}

// TestSIGKILL kills the hub at random moments under load. After each kill it is
// started with the link cut and asked for all that was asked before: each list
// must be what the API server had at the list's resourceVersion, byte for byte,
// or 503. In the end every watcher that has lived through all of it, resuming
// where it was each time, must hold what the API server holds.
func TestSIGKILL(t *testing.T) {
	const kills = 15
	n, seed := rig.Number(t, "EDGEHUB_KILLS", kills), rig.Seed(t)
	s := newSlaughter(t, "-v=2")
	s.rng = rand.New(rand.NewPCG(seed, 0))
	ctx, g := s.begin(t, seed)
	writing, stopWriting := context.WithCancel(ctx)
	defer stopWriting()
	var writes errgroup.Group
	for _, w := range s.writers {
		writes.Go(func() error { return w.run(writing) })
	}
	readers := s.follow(ctx, g)
	for _, byNode := range []bool{true, false} {
		g.Go(func() error { return s.listAll(ctx, byNode) })
	}
	began := time.Now()
	for k := range n {
		if k == killsAtFirst {
			s.waitRecorded(ctx)
		}
		if err := s.round(ctx, k); err != nil {
			t.Fatalf("kill %d: %v", k, err)
		}
		if t.Failed() {
			t.Fatalf("after kill %d", k)
		}
	}
	s.report(n, time.Since(began))
	stopWriting()
	if err := writes.Wait(); err != nil {
		t.Error(err)
	}
	s.converge(ctx, readers)
}

func (s *slaughter) startTruth(ctx context.Context, g *errgroup.Group) {
	direct := s.Direct(s.ControlPlane.TokenConfig(operator))
	for name, q := range map[string]struct{ path, accept string }{
		"configmaps json": {"/api/v1/configmaps", rig.JSON}, "configmaps protobuf": {"/api/v1/configmaps", rig.Protobuf},
		"secrets json": {"/api/v1/secrets", rig.JSON}, "secrets protobuf": {"/api/v1/secrets", rig.Protobuf},
		"pods json": {"/api/v1/pods", rig.JSON}, "pods protobuf": {"/api/v1/pods", rig.Protobuf}, "pods partial": {"/api/v1/pods", rig.MetadataProtobuf},
		"widgets json": {"/apis/example.com/v1/widgets", rig.JSON},
	} {
		truth, err := followTruth(ctx, g, direct, q.path, q.accept)
		s.Must(err)
		s.truths[name] = truth
	}
}

// waitRecorded waits until all that is listed and watched has been recorded.
func (s *slaughter) waitRecorded(ctx context.Context) {
	s.T.Helper()
	for _, v := range s.views {
		s.Must(process.Poll(ctx, v.String()+" is on disk", process.Until(v.settled)))
	}
}

// listAll lists what one user lists, until ctx ends. Only a wrong answer is an
// error: the hub is dead half of the time.
func (s *slaughter) listAll(ctx context.Context, byNode bool) error {
	tick := time.NewTicker(listPeriod)
	defer tick.Stop()
	for i := 0; ; i++ {
		v := s.views[i%len(s.views)]
		if v.byNode == byNode {
			life := v.now()
			if _, status, err := s.list(ctx, v, v.pages); err == nil && status == http.StatusOK {
				s.lists.Add(1)
				v.noteRecorded(life)
			}
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
		}
	}
}

// list asks for a view, in pages if limit is not 0.
func (s *slaughter) list(ctx context.Context, v *view, limit int) (rig.List, int, error) {
	var all rig.List
	path := v.path
	for {
		p := path
		if limit > 0 {
			p += fmt.Sprintf("&limit=%d&continue=%s", limit, all.Continue)
		}
		status, body, err := s.endpointOf(v).Fetch(ctx, strings.Replace(p, "?&", "?", 1), v.accept)
		if err != nil || status != http.StatusOK {
			return all, status, err
		}
		l, err := rig.ReadList(body)
		if err != nil {
			return all, status, err
		}
		l.Items = append(all.Items, l.Items...)
		if all = l; l.Continue == "" {
			return all, status, nil
		}
	}
}

// round lets the hub work for a moment, kills it, and looks at what it has kept.
func (s *slaughter) round(ctx context.Context, k int) error {
	online := time.Duration(s.rng.IntN(600)) * time.Millisecond
	if s.rng.IntN(5) == 0 {
		online = time.Duration(1000+s.rng.IntN(2000)) * time.Millisecond
	}
	select {
	case <-time.After(online):
	case <-ctx.Done():
		return ctx.Err()
	}
	killed := time.Now() // what is on disk by now counts
	if err := s.Hub.Kill(); err != nil {
		return err
	}
	s.Link.Cut()
	floors := map[*view]int64{}
	for _, v := range s.views {
		floors[v] = v.killed(killed)
	}
	if err := s.start(ctx); err != nil {
		return err
	}
	got := map[*view]rig.List{}
	for _, v := range s.views {
		l, status, err := s.list(ctx, v, 0)
		switch {
		case err != nil:
			return fmt.Errorf("%v offline: %w", v, err)
		case status == http.StatusOK:
			v.ok++
			got[v] = l
		case status == http.StatusServiceUnavailable:
			v.missing++
			if v.durable {
				v.missingDurable++
				s.T.Logf("kill %d: %v is not there any more", k, v)
			}
		default:
			return fmt.Errorf("%v offline = %d, want 200 or 503", v, status)
		}
	}
	if err := s.mark(ctx); err != nil {
		return err
	}
	for v, l := range got {
		if err := s.truthOf(v, l).compare(l, v.keep); err != nil {
			s.T.Errorf("kill %d after %v: %v: %v", k, online, v, err)
		}
		if l.ResourceVersion < floors[v] {
			s.T.Errorf("kill %d after %v: %v is at %d, but %d had been seen through the hub %v before", k, online, v, l.ResourceVersion, floors[v], flushPatience)
		}
	}
	return s.Link.Heal()
}

// mark waits until all that can have come through the hub is known to be true.
func (s *slaughter) mark(ctx context.Context) error {
	for _, w := range s.writers {
		rv, err := w.mark(ctx)
		if err != nil {
			return err
		}
		for name, truth := range s.truths {
			if strings.HasPrefix(name, w.gvr.Resource+" ") {
				if err := truth.wait(ctx, rv); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// start starts the hub and notes how long it takes until it answers.
func (s *slaughter) start(ctx context.Context) error {
	began := time.Now()
	answered := make(chan time.Duration, 1)
	probing, cancel := context.WithCancel(ctx)
	go func() {
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			req, err := http.NewRequestWithContext(probing, http.MethodGet, s.Hub.URL()+"/livez", nil)
			if err == nil {
				if resp, err := client.Do(req); err == nil {
					resp.Body.Close()
					answered <- time.Since(began)
					return
				}
			}
			select {
			case <-probing.Done():
				answered <- 0
				return
			case <-tick.C:
			}
		}
	}()
	err := s.Hub.Start(ctx)
	if err != nil {
		cancel()
	}
	took := <-answered
	cancel()
	s.starts = append(s.starts, took)
	return err
}

func (s *slaughter) report(n int, took time.Duration) {
	var ok, missing, missingDurable, writes int
	for _, v := range s.views {
		ok, missing, missingDurable = ok+v.ok, missing+v.missing, missingDurable+v.missingDurable
		s.T.Logf("%-80v %4d lists right, %3d times 503, %3d of these though recorded", v, v.ok, v.missing, v.missingDurable)
	}
	for _, w := range s.writers {
		writes += int(w.writes.Load())
	}
	s.T.Logf("%d kills in %v: %d offline lists right, %d times 503, %d of these though recorded more than a second before a kill; %d writes, %d lists and %d events through the hub",
		n, took.Round(time.Second), ok, missing, missingDurable, writes, s.lists.Load(), s.events.Load())
	s.T.Logf("start to first answer: p50 %v, p99 %v", rig.Percentile(s.starts, 50).Round(time.Millisecond), rig.Percentile(s.starts, 99).Round(time.Millisecond))
	if missingDurable*20 > ok {
		s.T.Errorf("%d of %d lists that had been recorded more than a second before were not answered", missingDurable, ok+missingDurable)
	}
	if want := (n - killsAtFirst) * len(s.views) * 9 / 10; ok < want {
		s.T.Errorf("only %d of %d offline lists were answered, want at least %d", ok, n*len(s.views), want)
	}
}

// converge waits until every watcher holds what the API server does.
func (s *slaughter) converge(ctx context.Context, readers []*reader) {
	s.Must(s.mark(ctx))
	for _, r := range readers {
		err := process.Poll(ctx, r.view.String()+" is up to date", func(context.Context) error {
			l, ok := r.state()
			if !ok {
				return errors.New("it has no state")
			}
			t := s.truthOf(r.view, l)
			_, l.ResourceVersion = t.span()
			return t.compare(l, r.view.keep)
		})
		if err != nil {
			s.T.Error(err)
		}
		resumed, started := r.counts()
		s.T.Logf("%v: %d resumptions, %d times from the start", r.view, resumed, started)
	}
}
