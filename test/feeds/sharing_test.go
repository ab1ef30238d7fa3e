// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package feeds

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	manySlices  = 2000
	fewSlices   = 10 // in the namespace b
	sharers     = 12 // users; more clients than that are the same users again
	slicePath   = "/apis/discovery.k8s.io/v1/endpointslices"
	slicesOfB   = "/apis/discovery.k8s.io/v1/namespaces/b/endpointslices"
	sliceEvents = 100

	// Who reads in the namespace b, and for how long.
	stayer   = "feeds-stayer"
	asker    = "feeds-asker"
	leaver   = "feeds-leaver"
	outsider = "feeds-outsider"

	// A right that ends is noticed within 2 min; the rest is for the machine.
	lossWithin   = 2 * time.Minute
	lossPatience = 130 * time.Second
	// perClient is what a client may cost the link by itself: reviews of its token
	// and of its right.
	perClient = 12 << 10
)

// sharing is a rig with many EndpointSlices, which the node may read as the chart
// has it.
type sharing struct {
	*rig.Rig
}

func newSharing(t *testing.T) *sharing {
	t.Helper()
	names := []string{stayer, asker, leaver, outsider}
	for i := range sharers {
		names = append(names, sharer(i))
	}
	s := &sharing{rig.New(t, users(names...), "-v=2")}
	s.Grant("", rig.Group("system:nodes"), "endpointslices")
	for i := range sharers {
		s.Grant("", rig.User(sharer(i)), "endpointslices")
	}
	for _, name := range []string{stayer, asker, leaver} {
		s.Grant("b", rig.User(name), "endpointslices")
	}
	s.fill(t.Context())
	return s
}

func sharer(i int) string { return fmt.Sprintf("feeds-sharer-%d", i%sharers) }

// fill makes the EndpointSlices.
func (s *sharing) fill(ctx context.Context) {
	s.T.Helper()
	var g errgroup.Group
	g.SetLimit(16)
	for i := range manySlices {
		ns, name := "a", fmt.Sprintf("slice-%04d", i)
		if i < fewSlices {
			ns = "b"
		}
		g.Go(func() error {
			ready, node := true, rig.NodeName
			slice := &discoveryv1.EndpointSlice{
				ObjectMeta:  metav1.ObjectMeta{Name: name, Namespace: ns, Labels: map[string]string{discoveryv1.LabelServiceName: name}},
				AddressType: discoveryv1.AddressTypeIPv4,
			}
			for n := range 5 {
				slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
					Addresses: []string{fmt.Sprintf("10.%d.%d.%d", n, i/250, i%250+1)}, NodeName: &node, Conditions: discoveryv1.EndpointConditions{Ready: &ready},
				})
			}
			_, err := s.ControlPlane.Client.DiscoveryV1().EndpointSlices(ns).Create(ctx, slice, metav1.CreateOptions{})
			return err
		})
	}
	s.Must(g.Wait())
}

// touch changes a slice and returns its resourceVersion.
func (s *sharing) touch(ctx context.Context, ns string, i int) int64 {
	s.T.Helper()
	client := s.ControlPlane.Client.DiscoveryV1().EndpointSlices(ns)
	slice, err := client.Get(ctx, fmt.Sprintf("slice-%04d", i), metav1.GetOptions{})
	s.Must(err)
	slice.Endpoints[0].Addresses[0] = fmt.Sprintf("10.99.%d.%d", i/250, time.Now().Nanosecond()%250+1)
	slice, err = client.Update(ctx, slice, metav1.UpdateOptions{})
	s.Must(err)
	_, rv := version(slice)
	return rv
}

// A reader of slices gets them all, and then follows.
type reader struct {
	name      string
	path      string
	endpoint  *rig.Endpoint
	watchList bool

	mu   sync.Mutex
	held map[string]int64
	rv   int64
	err  error // how it ended
}

func (s *sharing) reader(name, path string, watchList bool) *reader {
	s.T.Helper()
	return &reader{name: name, path: path, endpoint: s.Through(s.ControlPlane.TokenConfig(name)), watchList: watchList, held: map[string]int64{}}
}

// run follows until the watch ends; it does not come back.
func (r *reader) run(ctx context.Context) {
	err := r.follow(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.err = errors.Join(errEnded, err)
}

func (r *reader) follow(ctx context.Context) error {
	query := rig.WatchList
	if !r.watchList {
		l, status, err := r.endpoint.List(ctx, rig.With(r.path, "resourceVersion=0"), rig.Protobuf)
		if err != nil || status != http.StatusOK {
			return fmt.Errorf("list: status %d, %w", status, err)
		}
		for _, item := range l.Items {
			m, err := rig.ReadMeta(item, true)
			if err != nil {
				return err
			}
			r.take(m.Key, m.ResourceVersion)
		}
		query = fmt.Sprintf("watch=1&allowWatchBookmarks=true&timeoutSeconds=3000&resourceVersion=%d", l.ResourceVersion)
	}
	resp, err := r.endpoint.Get(ctx, rig.With(r.path, query), rig.Protobuf)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	next := rig.Frames(resp.Body, resp.Header.Get("Content-Type"))
	for {
		ev, err := next()
		if err != nil {
			return err
		}
		if ev.Type == "ERROR" {
			return fmt.Errorf("ERROR %d", ev.Code)
		}
		if ev.Type != "BOOKMARK" {
			r.take(ev.Meta.Key, ev.Meta.ResourceVersion)
		}
	}
}

func (r *reader) take(key string, rv int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.held[key], r.rv = rv, max(r.rv, rv)
}

// has says what the reader lacks of n objects up to rv.
func (r *reader) has(n int, rv int64) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.err == nil && (len(r.held) < n || r.rv < rv) {
		return fmt.Errorf("%s has %d of %d, at %d of %d", r.name, len(r.held), n, r.rv, rv)
	}
	return r.err
}

func (r *reader) ended() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.err
}

// wait waits until all readers have n objects up to rv.
func (s *sharing) wait(ctx context.Context, readers []*reader, n int, rv int64) {
	s.T.Helper()
	for _, r := range readers {
		s.Must(process.Poll(ctx, r.name+" is up to date", func(context.Context) error {
			err := r.has(n, rv)
			if errors.Is(err, errEnded) {
				s.T.Fatalf("%s: %v", r.name, err)
			}
			return err
		}))
	}
}

// A cost is what clients cost the link and the API server.
type cost struct {
	bytes          int64
	watches, lists int
}

// cost has n clients watch all slices through a new hub, and some changes.
func (s *sharing) cost(t *testing.T, n int) (c cost) {
	t.Helper()
	s.T = t
	s.Hub = s.NewHub("-v=2")
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	since, before := time.Now(), s.Link.Stats()
	process.Run(t, s.Hub)
	s.WaitLink(true)
	var readers []*reader
	for i := range n {
		r := s.reader(sharer(i), slicePath, i%2 == 0)
		readers = append(readers, r)
		running.Go(func() { r.run(ctx) })
	}
	s.wait(ctx, readers, manySlices, 0)
	var rv int64
	for i := range sliceEvents {
		rv = s.touch(ctx, "a", fewSlices+i)
	}
	s.wait(ctx, readers, manySlices, rv)
	after := s.Link.Stats()
	c.bytes = after.ToClient + after.ToServer - before.ToClient - before.ToServer
	s.Must(process.Poll(ctx, "the watch is in the audit log", func(context.Context) error {
		events, err := s.ControlPlane.Requests(since)
		if err != nil {
			return err
		}
		c.watches, c.lists = controlplane.Count(events, "", "watch", "endpointslices"), controlplane.Count(events, "", "list", "endpointslices")
		if c.watches == 0 {
			return errors.New("it is not")
		}
		return nil
	}))
	t.Logf("%d clients: %d watches and %d lists of endpointslices, %d KB over the link", n, c.watches, c.lists, c.bytes>>10)
	return c
}

// TestSharing has 1, 4 and 16 clients of different users watch 2,000
// EndpointSlices: the link carries them once. Who loses the right to read them
// loses the watch, and what the hub keeps of it.
func TestSharing(t *testing.T) {
	t.Parallel()
	s := newSharing(t)
	var one cost
	for _, n := range []int{1, 4, 16} {
		t.Run(fmt.Sprintf("%d clients", n), func(t *testing.T) {
			c := s.cost(t, n)
			if n == 1 {
				one = c
			}
			if want := one.bytes*12/10 + int64(n)*perClient; c.bytes > want {
				t.Errorf("%d clients cost %d bytes, want at most %d; one costs %d", n, c.bytes, want, one.bytes)
			}
			if c.watches != 1 || c.lists > one.lists {
				t.Errorf("%d clients: %d watches and %d lists at the API server, want 1 and %d", n, c.watches, c.lists, one.lists)
			}
		})
	}
	t.Run("rights", func(t *testing.T) { s.rights(t) })
}

// questions are all ways to ask for the slices of b.
func questions() (all []view) {
	for _, accept := range []string{rig.Protobuf, rig.JSON} {
		for _, path := range []string{
			slicesOfB, slicesOfB + "?resourceVersion=0", slicesOfB + "?limit=3", slicesOfB + "/slice-0001", slicesOfB + "?fieldSelector=metadata.name%3Dslice-0001",
			slicesOfB + "?labelSelector=kubernetes.io%2Fservice-name%3Dslice-0001", slicePath, slicePath + "?resourceVersion=0",
			slicesOfB + "?watch=1&timeoutSeconds=1", slicesOfB + "?timeoutSeconds=1&" + strings.ReplaceAll(rig.WatchList, "&timeoutSeconds=3000", ""), slicesOfB + "?watch=1&timeoutSeconds=1&resourceVersion=1",
		} {
			all = append(all, view{path: path, accept: accept})
		}
	}
	return all
}

// wantNothing asks in all ways, and wants no word about a slice.
func (s *sharing) wantNothing(ctx context.Context, name string, codes ...int) {
	s.T.Helper()
	e := s.Through(s.ControlPlane.TokenConfig(name))
	for _, q := range questions() {
		status, body, err := e.Fetch(ctx, q.path, q.accept)
		s.Must(err)
		allowed := false
		for _, code := range codes {
			allowed = allowed || status == code
		}
		if !allowed || strings.Contains(string(body), "10.0.0.") {
			s.T.Errorf("%s: %s (%s) = %d, want %v and nothing of a slice: %.200q", name, q.path, q.accept, status, codes, body)
		}
	}
}

// wantAll wants the slices of b.
func (s *sharing) wantAll(ctx context.Context, name string) {
	s.T.Helper()
	e := s.Through(s.ControlPlane.TokenConfig(name))
	for _, path := range []string{slicesOfB, slicesOfB + "?resourceVersion=0"} {
		l, status, err := e.List(ctx, path, rig.Protobuf)
		s.Must(err)
		if status != http.StatusOK || len(l.Items) != fewSlices {
			s.T.Errorf("%s: %s = %d with %d slices, want 200 with %d", name, path, status, len(l.Items), fewSlices)
		}
	}
}

// rights has clients share the slices of b, and takes away the right from one who
// asks and from one who only watches.
func (s *sharing) rights(t *testing.T) {
	s.T = t
	s.Hub = s.NewHub("-v=2")
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	process.Run(t, s.Hub)
	s.WaitLink(true)
	start := func(name string) *reader {
		r := s.reader(name, slicesOfB, true)
		running.Go(func() { r.run(ctx) })
		return r
	}
	asks, stays := start(asker), start(stayer)
	first := []*reader{asks, stays, start(leaver)}
	s.wait(ctx, first, fewSlices, 0)
	for _, name := range []string{asker, stayer, leaver} {
		s.wantAll(ctx, name)
	}
	s.wantNothing(ctx, outsider, http.StatusForbidden)

	s.Revoke("b", asker)
	s.Must(process.Poll(ctx, "the API server refuses "+asker, func(ctx context.Context) error {
		status, _, err := s.Direct(s.ControlPlane.TokenConfig(asker)).Fetch(ctx, slicesOfB, rig.JSON)
		if err == nil && status != http.StatusForbidden {
			err = fmt.Errorf("status %d", status)
		}
		return err
	}))
	s.wantNothing(ctx, asker, http.StatusForbidden)
	s.Must(process.Poll(ctx, "the watch of "+asker+" ends, who was refused", func(context.Context) error {
		if asks.ended() == nil {
			return errors.New("it is open")
		}
		return nil
	}))
	s.wait(ctx, []*reader{stays}, fewSlices, s.touch(ctx, "b", 1))
	s.wantOffline(ctx, "offline")
	s.wait(ctx, []*reader{stays}, fewSlices, 0)
	s.Settle() // the scope may be younger than a second
	s.Must(s.Hub.Kill())
	s.Must(s.Hub.Start(ctx))
	s.wantOffline(ctx, "offline after a restart")
	s.Online()

	leaves, stays := start(leaver), start(stayer)
	s.wait(ctx, []*reader{leaves, stays}, fewSlices, s.touch(ctx, "b", 2))
	s.lose(ctx, leaves, stays)
}

// wantOffline cuts the link and sees who gets what.
func (s *sharing) wantOffline(ctx context.Context, when string) {
	s.T.Helper()
	s.Offline()
	s.T.Logf("%s", when)
	s.wantNothing(ctx, asker, http.StatusForbidden, http.StatusServiceUnavailable, http.StatusUnauthorized)
	s.wantNothing(ctx, outsider, http.StatusForbidden, http.StatusServiceUnavailable, http.StatusUnauthorized)
	s.wantAll(ctx, stayer)
	s.wantAll(ctx, leaver)
	s.Online()
}

// lose takes away the right of one who only watches.
func (s *sharing) lose(ctx context.Context, leaves, stays *reader) {
	s.T.Helper()
	s.Revoke("b", leaver)
	revoked := time.Now()
	within, cancel := context.WithTimeout(ctx, lossPatience)
	defer cancel()
	s.Must(process.Poll(within, "the watch of "+leaver+" ends", func(ctx context.Context) error {
		if leaves.ended() == nil {
			return errors.New("it is open")
		}
		return nil
	}))
	took := time.Since(revoked)
	s.T.Logf("%s lost the watch %v after the right: %v", leaver, took.Round(time.Second), leaves.ended())
	if took > lossWithin {
		s.T.Errorf("%s lost the watch %v after the right, want at most %v", leaver, took, lossWithin)
	}
	s.wait(ctx, []*reader{stays}, fewSlices, s.touch(ctx, "b", 3))
	s.wantNothing(ctx, leaver, http.StatusForbidden)
	s.Offline()
	s.wantNothing(ctx, leaver, http.StatusForbidden, http.StatusServiceUnavailable)
	s.wantAll(ctx, stayer)
	s.Online()
}
