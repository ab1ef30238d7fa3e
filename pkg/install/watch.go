// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/klog/v2"
)

const (
	// maxRewrites is how often in an hour kubelet's kubeconfig is taken back from somebody
	// else who writes it: each time kubelet is restarted.
	maxRewrites = 3
	// sampleEvery is longer than kubelet lets its Lease be.
	sampleEvery = time.Minute
)

var (
	errNotYet    = errors.New("it has not looked yet")
	errRewritten = errors.New("somebody else writes kubelet's kubeconfig again and again; it is left alone until an hour after the first time")
	errFellBack  = errors.New("kubelet was pointed at the API server because the hub was silent")
)

// A watch looks at the node at intervals.
type watch struct {
	i       *installer
	reg     *prometheus.Registry
	metrics *metrics

	// silentSince and answersSince are when the hub began to be so; zero: it is not.
	silentSince, answersSince time.Time
	rewrites                  []time.Time // of the last hour
	fellBack                  int         // how often in this watch
	sample                    sample

	mu    sync.Mutex
	state error // guarded by mu: what the last look has found
}

// A sample is how often kubelet had renewed its Lease through the hub.
type sample struct {
	at      time.Time
	renewed float64
}

func newWatch(i *installer) *watch {
	w := &watch{i: i, reg: prometheus.NewRegistry(), state: errNotYet}
	w.metrics = newMetrics(w.reg)
	i.watching, i.mayPoint = true, w.mayPoint
	return w
}

// Run looks until ctx ends, and then undoes all if the DaemonSet is gone.
func (w *watch) Run(ctx context.Context) error {
	stop, err := w.serve()
	if err != nil {
		return err
	}
	defer stop()
	if w.i.o.DaemonSet != "" {
		// A runtime may signal again while leave restarts kubelet; that must not end it.
		again := make(chan os.Signal, 1)
		signal.Notify(again, syscall.SIGTERM)
		defer signal.Stop(again)
	}
	ticker := time.NewTicker(w.i.o.Interval)
	defer ticker.Stop()
	for ctx.Err() == nil {
		w.look(ctx)
		select {
		case <-ctx.Done():
		case <-ticker.C:
		}
	}
	return w.leave(ctx)
}

// look does what install does, and keeps the result.
func (w *watch) look(ctx context.Context) {
	err := w.tick(ctx)
	if ctx.Err() != nil || errors.Is(err, ErrBusy) {
		return // it is another one's turn
	}
	w.mu.Lock()
	before := w.state
	w.state = err
	w.mu.Unlock()
	w.metrics.looked(err)
	logger := klog.FromContext(ctx)
	switch {
	case err == nil && before != nil:
		logger.Info("All is as wanted", "version", w.i.state.Good)
	case err != nil && (before == nil || err.Error() != before.Error()):
		logger.Error(err, "Not all is as wanted", "version", w.i.state.Good, "failedVersion", w.i.state.Failed)
	}
}

func (w *watch) tick(ctx context.Context) error {
	err := w.i.install(ctx)
	if !errors.Is(err, ErrSilent) {
		w.silentSince = time.Time{}
		if err == nil {
			err = w.seeKubelet(ctx)
		}
		return err
	}
	w.answersSince = time.Time{}
	if w.silentSince.IsZero() {
		w.silentSince = time.Now()
	}
	if time.Since(w.silentSince) < w.i.o.FallbackAfter {
		return err
	}
	return errors.Join(err, w.fallBack(ctx))
}

// mayPoint is asked before kubelet is pointed at a hub that is no new one.
func (w *watch) mayPoint(k *kubelet) error {
	now, s := time.Now(), w.i.state
	if s.FellBack {
		// Who was silent for so long has to answer for as long, and longer each time.
		if w.answersSince.IsZero() {
			w.answersSince = now
		}
		if now.Sub(w.answersSince) < w.i.o.FallbackAfter<<min(max(w.fellBack-1, 0), 6) {
			return errFellBack
		}
		return nil
	}
	if k.points || !s.Pointed {
		return nil
	}
	if len(w.rewrites) > 0 && now.Sub(w.rewrites[0]) > time.Hour {
		w.rewrites = nil
	}
	if len(w.rewrites) == maxRewrites {
		return errRewritten
	}
	w.rewrites = append(w.rewrites, now)
	w.metrics.rewrites.Inc()
	return nil
}

// fallBack points kubelet at the API server, if that is there.
func (w *watch) fallBack(ctx context.Context) error {
	i := w.i
	unlock, err := i.begin()
	if err != nil {
		return err
	}
	defer unlock()
	k, err := i.readKubelet()
	if err != nil || !k.points && !i.state.Pointed {
		return err
	}
	if err := i.reachable(ctx, k.node); err != nil {
		return err
	}
	if err := i.save(func(s *state) { s.FellBack = true }); err != nil {
		return err
	}
	if err := i.pointBack(k); err != nil {
		return err
	}
	w.metrics.fallbacks.Inc()
	w.fellBack++
	return i.restartIfPointed(ctx, k)
}

// seeKubelet notices a kubelet that goes past the hub, such as one that was started while the
// hub was being replaced: it is restarted at the next look.
func (w *watch) seeKubelet(ctx context.Context) error {
	now := since()
	if now.Sub(w.sample.at) < max(sampleEvery, w.i.o.Interval) {
		return nil
	}
	unlock, err := w.i.begin()
	if err != nil {
		return err
	}
	defer unlock()
	k, err := w.i.readKubelet()
	if err != nil {
		return err
	}
	hub, err := w.i.throughHub(k.node)
	if err != nil {
		return err
	}
	renewed, err := hub.renewed(ctx, k.name)
	if err != nil {
		return err
	}
	m, err := w.i.hubMetrics(ctx)
	if err != nil {
		return err
	}
	before := w.sample
	w.sample = sample{now, m.renewed}
	if before.at.IsZero() || m.renewed != before.renewed || !renewed.After(before.at) {
		return nil
	}
	w.sample = sample{}
	return errors.Join(errPast, w.i.save(func(s *state) { s.Through = false }))
}

// serve answers probes and scrapes.
func (w *watch) serve() (stop func(), err error) {
	if w.i.o.ProbeListenAddress == "" {
		return func() {}, nil
	}
	l, err := net.Listen("tcp", w.i.o.ProbeListenAddress)
	if err != nil {
		return nil, fmt.Errorf("--probe-listen-address: %w", err)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(w.reg, promhttp.HandlerOpts{MaxRequestsInFlight: 4}))
	mux.HandleFunc("GET /livez", func(rw http.ResponseWriter, _ *http.Request) { fmt.Fprint(rw, "ok") })
	mux.HandleFunc("GET /readyz", func(rw http.ResponseWriter, _ *http.Request) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.state != nil {
			http.Error(rw, w.state.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprint(rw, "ok")
	})
	s := &http.Server{Handler: mux, ReadTimeout: 10 * time.Second, WriteTimeout: 30 * time.Second, IdleTimeout: time.Minute, MaxHeaderBytes: 16 << 10}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = s.Serve(l) // until Close
	}()
	return func() { s.Close(); <-ended }, nil
}

// leave undoes all if the DaemonSet does not want the hub on this node any more. Whatever
// else is the reason for this pod's end (an upgrade, a drain, a reboot), the hub stays.
func (w *watch) leave(ctx context.Context) error {
	i := w.i
	if i.o.DaemonSet == "" {
		return nil
	}
	logger := klog.FromContext(ctx)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), i.o.LeaveTimeout)
	defer cancel()
	why, err := i.unwanted(ctx)
	switch {
	case err != nil:
		logger.Error(err, "Whether the hub is wanted on this node is not known; it stays", "daemonSet", i.o.DaemonSet)
		return nil
	case why == "":
		logger.Info("The hub stays on this node", "daemonSet", i.o.DaemonSet)
		return nil
	}
	logger.Info("The hub is not wanted on this node any more; all is undone", "daemonSet", i.o.DaemonSet, "reason", why)
	return poll(ctx, i.o.LeaveTimeout, func(ctx context.Context) error { return again(cancel, i.uninstall(ctx)) })
}

// again lets a poll go on for what passes by itself.
func again(giveUp func(), err error) error {
	if err != nil && !errors.Is(err, ErrBusy) && !errors.Is(err, ErrLinkDown) {
		giveUp()
	}
	return err
}
