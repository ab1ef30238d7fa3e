// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package feeds

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	// First small events to all watchers, whose pace is measured; then large ones,
	// to fewer, for the hub's memory: 5 and 40 MB.
	slowSmall      = 1250
	slowSmallBytes = 4 << 10
	slowLarge      = 1280
	slowLargeBytes = 32 << 10
	slowEvents     = slowSmall + slowLarge
	slowPeriod     = 4 * time.Millisecond // between two events

	eagerWatchers  = 50 // through the hub
	directWatchers = 4
	lastingEager   = 4        // of them, for the large events
	maxGrowth      = 30 << 20 // of the hub
)

// stamps are when events were written, by their number.
type stamps [slowEvents]atomic.Int64

// An eager watcher reads as fast as it can.
type eager struct {
	next    int             // event that is due
	latency []time.Duration // of the small ones
	err     error
}

// follow reads until the last event. Each must come once, in order.
func (e *eager) follow(body io.Reader, contentType string, at *stamps, expect int) error {
	next := rig.Frames(body, contentType)
	for e.next < expect {
		ev, err := next()
		now := time.Now()
		if err != nil {
			return fmt.Errorf("after %d events: %w", e.next, err)
		}
		n, err := strconv.Atoi(ev.Meta.Labels["seq"])
		switch {
		case ev.Type == "ERROR":
			return fmt.Errorf("ERROR %d after %d events", ev.Code, e.next)
		case ev.Type == "BOOKMARK" || err != nil:
			continue
		case n != e.next:
			return fmt.Errorf("event %d where %d is due", n, e.next)
		}
		if e.next++; n < slowSmall {
			e.latency = append(e.latency, now.Sub(time.Unix(0, at[n].Load())))
		}
	}
	return nil
}

const slowPath = "/api/v1/namespaces/a/configmaps?labelSelector=load%3Dyes"

// oneProtocol is an endpoint that speaks HTTP/2, or does not, on connections of its
// own.
func oneProtocol(r *rig.Rig, c *rest.Config, http2 bool) *rig.Endpoint {
	r.T.Helper()
	config, err := rest.TLSConfigFor(c)
	r.Must(err)
	config.NextProtos = []string{"http/1.1"}
	transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: http2, TLSNextProto: map[string]func(string, *tls.Conn) http.RoundTripper{}}
	if http2 {
		config.NextProtos, transport.TLSNextProto = []string{"h2"}, nil
		// What is not read of it is not taken, so that the server feels it.
		transport.HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: 64 << 10}
	}
	r.T.Cleanup(transport.CloseIdleConnections)
	wrapped, err := rest.HTTPWrappersForConfig(c, transport)
	r.Must(err)
	return &rig.Endpoint{URL: c.Host, Client: &http.Client{Transport: wrapped}}
}

// slowRig is a hub with watchers of both sorts.
type slowRig struct {
	*rig.Rig
	at      stamps
	through []*eager
	direct  []*eager
	reading errgroup.Group
}

// watch opens a watch; the body is the caller's.
func (s *slowRig) watch(ctx context.Context, e *rig.Endpoint, wantMajor int) *http.Response {
	s.T.Helper()
	resp, err := e.Get(ctx, rig.With(slowPath, rig.WatchList), rig.Protobuf)
	s.Must(err)
	if resp.StatusCode != http.StatusOK || wantMajor != 0 && resp.ProtoMajor != wantMajor {
		s.T.Fatalf("watch: %s over %s, want 200 over HTTP/%d", resp.Status, resp.Proto, wantMajor)
	}
	return resp
}

// eager starts n watchers that read.
func (s *slowRig) eager(ctx context.Context, c *rest.Config, n int) (all []*eager) {
	s.T.Helper()
	var e *rig.Endpoint
	for i := range n {
		if i%10 == 0 { // several clients
			e = oneProtocol(s.Rig, c, true)
		}
		resp := s.watch(ctx, e, 2)
		w := &eager{}
		all = append(all, w)
		s.reading.Go(func() error {
			defer resp.Body.Close()
			expect := slowSmall
			if i < lastingEager {
				expect = slowEvents
			}
			w.err = w.follow(resp.Body, resp.Header.Get("Content-Type"), &s.at, expect)
			return nil
		})
	}
	return all
}

// rss returns what the hub has in memory.
func (s *slowRig) rss() (int64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.Hub.PID()))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kb, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return kb << 10, err
		}
	}
	return 0, errors.New("no VmRSS")
}

// load writes all events, and returns the most that the hub had in memory
// meanwhile.
func (s *slowRig) load(ctx context.Context) (most int64) {
	s.T.Helper()
	maps := s.ControlPlane.Client.CoreV1().ConfigMaps("a")
	small, large := strings.Repeat("0123456789abcde ", slowSmallBytes/16), strings.Repeat("0123456789abcde ", slowLargeBytes/16)
	tick := time.NewTicker(slowPeriod)
	defer tick.Stop()
	objects := map[string]bool{}
	for n := range slowEvents {
		name := fmt.Sprintf("load-%d", n%20)
		text := small
		if n >= slowSmall {
			text = large
		}
		m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"load": "yes", "seq": strconv.Itoa(n)}}, Data: map[string]string{"text": text}}
		s.at[n].Store(time.Now().UnixNano())
		var err error
		if objects[name] {
			_, err = maps.Update(ctx, m, metav1.UpdateOptions{})
		} else {
			_, err = maps.Create(ctx, m, metav1.CreateOptions{})
		}
		s.Must(err)
		objects[name] = true
		if n%50 == 0 {
			now, err := s.rss()
			s.Must(err)
			most = max(most, now)
		}
		<-tick.C
	}
	return most
}

// TestSlowWatcher has watchers that never read, over HTTP/2 and HTTP/1.1, beside
// fifty that do. The fifty get every event, about as fast as from the API server,
// and the hub does not grow.
func TestSlowWatcher(t *testing.T) {
	s := &slowRig{Rig: newRig(t)}
	process.Run(t, s.Hub)
	s.WaitLink(true)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	config := s.Hub.Through(s.ControlPlane.TokenConfig(agentUser))
	stuck := map[string]*http.Response{
		"HTTP/2":   s.watch(ctx, oneProtocol(s.Rig, config, true), 2),
		"HTTP/1.1": s.watch(ctx, oneProtocol(s.Rig, config, false), 1),
	}
	s.through = s.eager(ctx, config, eagerWatchers)
	s.direct = s.eager(ctx, s.ControlPlane.TokenConfig(agentUser), directWatchers)
	before, err := s.rss()
	s.Must(err)
	began := time.Now()
	most := s.load(ctx)
	took := time.Since(began)
	s.Must(s.reading.Wait())
	through, direct := s.latencies("through the hub", s.through), s.latencies("direct", s.direct)
	t.Logf("%d events in %v; the %d small ones to %d watchers through the hub p50 %v, p99 %v; direct p50 %v, p99 %v", slowEvents, took.Round(time.Second), slowSmall, eagerWatchers,
		rig.Percentile(through, 50), rig.Percentile(through, 99), rig.Percentile(direct, 50), rig.Percentile(direct, 99))
	if got, want := rig.Percentile(through, 99), 5*rig.Percentile(direct, 99)+50*time.Millisecond; got > want {
		t.Errorf("99 of 100 events took %v through the hub, want at most %v", got, want)
	}
	after, err := s.rss()
	s.Must(err)
	t.Logf("memory: %d MB before, %d MB at most, %d MB after", before>>20, most>>20, after>>20)
	if grown := max(most, after) - before; grown > maxGrowth {
		t.Errorf("the hub grew by %d MB, want at most %d", grown>>20, maxGrowth>>20)
	}
	overruns, err := s.Hub.Metric(ctx, "edgehub_cache_watcher_overruns_total")
	s.Must(err)
	if overruns != float64(len(stuck)) {
		t.Errorf("edgehub_cache_watcher_overruns_total = %v, want %d", overruns, len(stuck))
	}
	for name, resp := range stuck {
		s.drain(name, resp)
	}
}

func (s *slowRig) latencies(who string, watchers []*eager) (all []time.Duration) {
	for i, w := range watchers {
		if w.err != nil {
			s.T.Errorf("watcher %d %s: %v", i, who, w.err)
		}
		all = append(all, w.latency...)
	}
	return all
}

// drain reads at last what there is for a watcher that did not: events without a
// hole, and then the end.
func (s *slowRig) drain(name string, resp *http.Response) {
	defer resp.Body.Close()
	w := &eager{}
	err := w.follow(resp.Body, resp.Header.Get("Content-Type"), &s.at, slowEvents)
	s.T.Logf("the watcher over %s that did not read got %d events, and then %v", name, w.next, err)
	if err == nil || strings.Contains(err.Error(), "is due") {
		s.T.Errorf("the watcher over %s got %d events and then %v, want an end", name, w.next, err)
	}
}
