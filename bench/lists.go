// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/process"
)

// listRounds is how often each of the three has its turn.
const listRounds = 7

// A held watch keeps a feed open.
type held struct {
	cancel context.CancelFunc
	done   chan error
}

// hold opens a watch and reads and forgets what it says.
func hold(ctx context.Context, c *rest.Config, path, accept string) (*held, error) {
	client, err := newClient(c, false)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	resp, err := request{client, c.Host + path, accept}.open(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	h := &held{cancel, make(chan error, 1)}
	go func() {
		defer client.CloseIdleConnections()
		defer resp.Body.Close()
		_, err := io.Copy(io.Discard, resp.Body)
		h.done <- err
	}()
	return h, nil
}

func (h *held) close() {
	h.cancel()
	<-h.done
}

// fromFeed waits until a request is answered from the hub's live feed.
func (h *hub) fromFeed(ctx context.Context, r request) error {
	return process.Poll(ctx, "edgehub answers "+r.url+" from a feed", func(ctx context.Context) error {
		before, err := h.answered(ctx, "list", "feed")
		if err != nil {
			return err
		}
		if _, err := r.do(ctx); err != nil {
			return err
		}
		after, err := h.answered(ctx, "list", "feed")
		if err == nil && after == before {
			err = errors.New("it was answered from elsewhere")
		}
		return err
	})
}

// cachedLists compares lists with resourceVersion=0: the API server's own, from its
// watch cache, with edgehub's from a live feed, and edgehub's with the link cut. So
// that the three can take turns, the one that is cut is a second hub, which has
// recorded the same.
func (b *bench) cachedLists(ctx context.Context) error {
	online, err := b.newHub(ctx, false)
	if err != nil {
		return err
	}
	defer b.closing(online.close)
	offline, err := b.newHub(ctx, true)
	if err != nil {
		return err
	}
	defer b.closing(offline.close)
	if err := errors.Join(b.seedPods(ctx, somePods), b.seedPods(ctx, manyPods)); err != nil {
		return err
	}
	var runs []*listRun
	for _, p := range []podSet{somePods, manyPods} {
		for _, accept := range []string{protobufType, jsonType} {
			r, err := b.newListRun(ctx, listRun{pods: p, accept: accept, online: online, offline: offline})
			if err != nil {
				return err
			}
			defer r.watch.close()
			runs = append(runs, r)
		}
	}
	if err := offline.cut(ctx); err != nil {
		return err
	}
	var errs []error
	for _, r := range runs {
		errs = append(errs, b.listTimes(ctx, r))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	now, peak, err := rss(offline.PID())
	b.add(result{Name: "RSS after offline LISTs of 5,000 pods", Value: now, Unit: "MB", Target: atMost(60), Versus: fmt.Sprintf("peak %.0f MB; %s529 MB", peak, yurtHub)})
	return err
}

// A listRun is one form of list, three ways.
type listRun struct {
	pods            podSet
	accept          string
	online, offline *hub
	watch           *held
}

// newListRun lets both hubs record, and opens the feed of the one that stays
// online.
func (b *bench) newListRun(ctx context.Context, r listRun) (*listRun, error) {
	direct := b.direct()
	recorded, err := to(ctx, r.offline.Through(direct), r.pods.path(), r.accept)
	if err != nil {
		return nil, err
	}
	recorded.close()
	through := r.online.Through(direct)
	if r.watch, err = hold(ctx, through, r.pods.path()+"?watch=1&resourceVersion=0", r.accept); err != nil {
		return nil, err
	}
	list, err := to(ctx, through, r.pods.path()+"?resourceVersion=0", r.accept)
	if err == nil {
		err = r.online.fromFeed(ctx, list)
		list.close()
	}
	if err != nil {
		r.watch.close()
		return nil, err
	}
	return &r, nil
}

// maxStrays is which part of the lists may come from the API server after all, as
// when a busy machine makes a feed look dead for a moment.
const maxStrays = 0.05

func (b *bench) listTimes(ctx context.Context, r *listRun) error {
	s := samples{}
	for _, form := range []string{"plain", "gzip"} {
		if err := b.listForm(ctx, r, form, s); err != nil {
			return err
		}
	}
	b.addListTimes(r, s)
	if part := mean(s["strays"]); part > maxStrays {
		return fmt.Errorf("%.0f %% of the lists of %d pods with resourceVersion=0 came from the API server, not from the feed", 100*part, r.pods.n)
	}
	return nil
}

// listForm measures with or without gzip.
func (b *bench) listForm(ctx context.Context, r *listRun, form string, s samples) error {
	direct := b.direct()
	requests := map[string]request{}
	for name, c := range map[string]*rest.Config{"direct": direct, "online": r.online.Through(direct), "offline": r.offline.Through(direct)} {
		q, err := toAs(ctx, c, r.pods.path()+"?resourceVersion=0", r.accept, form == "gzip")
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		defer q.close()
		requests[name] = q
	}
	bytes, err := requests["direct"].do(ctx)
	if err != nil {
		return err
	}
	s.add("MB", float64(bytes)/1e6)
	pids := map[string]int{"direct": b.server, "online": r.online.PID(), "offline": r.offline.PID()}
	return alternate(listRounds, []string{"direct", "online", "offline"}, func(name string) error {
		n := max(1, 2000/r.pods.n)
		upstream, err := r.online.answered(ctx, "list", "upstream")
		if err != nil {
			return err
		}
		before, err := cpuSeconds(pids[name])
		if err != nil {
			return err
		}
		ms, err := requests[name].times(ctx, n)
		if err != nil {
			return err
		}
		after, err := cpuSeconds(pids[name])
		if err != nil {
			return err
		}
		s.add(name+" "+form, ms)
		s.add(name+" "+form+" cpu", (after-before)*1000/float64(n))
		strays, err := r.online.answered(ctx, "list", "upstream")
		if name == "online" {
			s.add("strays", (strays-upstream)/float64(n))
		}
		return err
	})
}

// addListTimes counts the worse of the two forms: it depends on the encoding and the
// machine whether the API server is faster with gzip or without.
func (b *bench) addListTimes(r *listRun, s samples) {
	encoding := map[string]string{protobufType: "protobuf", jsonType: "JSON"}[r.accept]
	peer := ""
	if r.pods.n == somePods.n {
		peer = "; " + yurtHub + "0.25 ×"
	}
	if strays := mean(s["strays"]); strays > 0 {
		peer += fmt.Sprintf("; %.1f %% of the online ones came from the API server", 100*strays)
	}
	for _, way := range []string{"online", "offline"} {
		name := map[string]string{"online": "online from a feed", "offline": "offline"}[way]
		plain := s.median("direct plain") / s.median(way+" plain")
		gzip := s.median("direct gzip") / s.median(way+" gzip")
		b.add(result{
			Name:  fmt.Sprintf("LIST of %d pods, %s, %s: times as fast as the API server's watch cache", r.pods.n, encoding, name),
			Value: min(plain, gzip), Unit: "×", Target: atLeast(3),
			Versus: fmt.Sprintf("%.1f MB; client with gzip, as client-go: edgehub %.1f ms, API server %.1f ms (%.1f ×); without: %.1f ms, %.1f ms (%.1f ×), CPU %.1f ms, %.1f ms%s", s.median("MB"),
				s.median(way+" gzip"), s.median("direct gzip"), gzip, s.median(way+" plain"), s.median("direct plain"), plain,
				mean(s[way+" plain cpu"]), mean(s["direct plain cpu"]), peer),
		})
	}
}

func mean(v []float64) (sum float64) {
	for _, x := range v {
		sum += x
	}
	return sum / float64(max(len(v), 1))
}
