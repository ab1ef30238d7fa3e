// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"k8s.io/klog/v2"
)

const (
	// maxTries limits the probes that wait at the same time for a server that is
	// down: each is a connection that may hang. One more, and the oldest is given
	// up.
	maxTries = 8
	// downPatience is how many times ProbeTimeout a probe of a server that is down
	// may take, for it needs a new connection over a link that may be slow.
	downPatience = 3
	// lifePatience is how many times ProbeTimeout a probe may take while other bytes
	// come from the server.
	lifePatience = 7
	// minProbeGap is the time between two probes that suspicions ask for.
	minProbeGap = 100 * time.Millisecond
)

var errProbeTimeout = errors.New("probe was not answered in time")

// An answerError is an answer to a probe that is not the right one.
type answerError struct{ status int }

func (e *answerError) Error() string {
	return fmt.Sprintf("/readyz answered with status %d, or not with ok", e.status)
}

// readyz asks the server, as the node, whether it is ready. Only 200 and "ok"
// from the pinned CA will do: whatever else a server says about itself, what it
// says about objects and rights is not to be trusted then.
func (s *server) readyz(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+s.name+"/readyz", nil)
	if err != nil {
		return err
	}
	req.Header.Set("User-Agent", "edgehub")
	resp, err := s.probeTransport().RoundTrip(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK || string(body) != "ok" {
		return &answerError{resp.StatusCode}
	}
	return nil
}

// A prober watches one server. It probes in rounds.
//
// While the server is up, a round begins each ProbePeriod, and when something
// is suspicious. It is one probe on the connection that is kept for it and, if
// that fails or has not been answered after a third of its time, one more on
// another connection: a slow answer, a lost connection or one bad answer are not
// the end. If both fail, whether not in time or by a wrong answer, the server is
// down: with the defaults no later than 5 + 1 + 3 s after a cut. Bytes that
// still come from the server (a list that fills a thin link) extend the time, up
// to lifePatience.
//
// While it is down, the round goes on until a probe is answered well. New probes
// do not wait for old ones, which may hang: a link that works again is found
// within BackoffMax.
type prober struct {
	server  *server
	try     func(context.Context) error // server.readyz
	results chan result
	timer   *time.Timer
	tries   sync.WaitGroup

	up      bool      // as far as this goroutine knows
	upSince time.Time // if up
	attempt int       // for the backoff

	round     int // results of other rounds do not count
	roundCtx  context.Context
	endTries  context.CancelFunc
	waiting   []context.CancelCauseFunc // what gives up a try of this round, the oldest first
	begun     int                       // tries of this round
	failed    int                       // of these
	again     bool
	lastBegun time.Time
}

type result struct {
	round     int
	suspected uint64 // suspicions when it began
	took      time.Duration
	err       error
}

func newProber(s *server) *prober {
	return &prober{server: s, try: s.readyz, results: make(chan result)}
}

// run probes until ctx ends.
func (p *prober) run(ctx context.Context) {
	logger := klog.FromContext(ctx).WithValues("server", p.server.name)
	ctx, cancel := context.WithCancel(ctx)
	defer p.server.leave()
	defer p.tries.Wait()
	defer cancel()
	p.timer = time.NewTimer(0)
	defer p.timer.Stop()
	p.next(ctx)
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.timer.C:
			p.tick(ctx)
		case <-p.server.poke:
			p.poked()
		case r := <-p.results:
			p.take(ctx, r)
		}
		p.observe(ctx, logger)
	}
}

// next ends the round.
func (p *prober) next(ctx context.Context) {
	if p.endTries != nil {
		p.endTries()
	}
	p.round++
	p.roundCtx, p.endTries = context.WithCancel(ctx)
	p.waiting, p.begun, p.failed, p.again = nil, 0, 0, false
}

func (p *prober) tick(ctx context.Context) {
	cfg := p.server.cfg
	switch {
	case !p.up:
		if len(p.waiting) >= maxTries {
			p.waiting[0](errProbeTimeout)
			p.waiting = p.waiting[1:]
		}
		p.begin(ctx, downPatience*cfg.ProbeTimeout)
		p.attempt++
		p.timer.Reset(p.backoff())
	case p.begun == 0:
		p.begin(ctx, cfg.ProbeTimeout)
		p.timer.Reset(cfg.ProbeTimeout / 3)
	case p.begun == 1:
		p.begin(ctx, cfg.ProbeTimeout)
	}
}

// poked is for a server that is up; another one is probed as it is.
func (p *prober) poked() {
	switch {
	case !p.up:
	case p.begun > 0:
		p.again = true
	default:
		p.soon()
	}
}

func (p *prober) soon() { p.timer.Reset(max(0, minProbeGap-time.Since(p.lastBegun))) }

// begin starts a try.
func (p *prober) begin(ctx context.Context, timeout time.Duration) {
	p.begun++
	p.lastBegun = time.Now()
	r := result{round: p.round, suspected: p.server.suspicions()}
	tryCtx, giveUp := context.WithCancelCause(p.roundCtx)
	p.waiting = append(p.waiting, giveUp)
	p.tries.Go(func() {
		defer giveUp(nil)
		start := time.Now()
		r.err = p.attend(tryCtx, giveUp, timeout)
		r.took = time.Since(start)
		select {
		case p.results <- r:
		case <-ctx.Done():
		}
	})
}

// attend tries until the timeout, counted from the last sign of life.
func (p *prober) attend(ctx context.Context, giveUp context.CancelCauseFunc, timeout time.Duration) error {
	start := time.Now()
	last := start.Add(lifePatience * p.server.cfg.ProbeTimeout)
	p.tries.Go(func() {
		for limit := start.Add(timeout); sleepUntil(ctx, limit); {
			limit = p.server.lastLife().Add(p.server.cfg.ProbeTimeout)
			if limit.After(last) {
				limit = last
			}
			if !limit.After(time.Now()) {
				giveUp(errProbeTimeout)
			}
		}
	})
	err := p.try(ctx)
	if err != nil && errors.Is(context.Cause(ctx), errProbeTimeout) {
		return errProbeTimeout
	}
	return err
}

// sleepUntil returns whether it has become t, not the end of ctx.
func sleepUntil(ctx context.Context, t time.Time) bool {
	timer := time.NewTimer(time.Until(t))
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return ctx.Err() == nil
	}
}

func (p *prober) take(ctx context.Context, r result) {
	switch {
	case r.round != p.round:
	case r.err == nil:
		p.server.metrics.probeDuration.Observe(r.took.Seconds())
		good := p.server.good(ctx, r.suspected)
		if !p.up {
			return // observe sees whether it came up
		}
		soon := p.again || !good
		p.next(ctx)
		if soon {
			p.soon()
		} else {
			p.timer.Reset(p.period())
		}
	case !p.up:
		p.server.because(r.err)
	default:
		p.miss(ctx, r.err)
	}
}

// miss takes a failed try of a server that is up.
func (p *prober) miss(ctx context.Context, err error) {
	p.failed++
	var answer *answerError
	if errors.As(err, &answer) {
		p.server.bad() // and the other try waits for its time, not to meet the same hiccup
	} else if p.begun == 1 {
		p.timer.Stop()
		p.begin(ctx, p.server.cfg.ProbeTimeout)
	}
	if p.failed == 2 {
		p.server.down(p.server.current(), err)
	}
}

// observe follows the server's state, which requests change too.
func (p *prober) observe(ctx context.Context, logger klog.Logger) {
	up := p.server.current() != nil
	if up == p.up {
		return
	}
	p.up = up
	p.next(ctx)
	if up {
		logger.Info("API server is ready")
		p.upSince = time.Now()
		p.timer.Reset(p.period())
		return
	}
	logger.Info("API server is not reachable", "reason", p.server.why())
	if time.Since(p.upSince) > 2*p.server.cfg.ProbePeriod {
		p.attempt = 0 // else it comes and goes, and the backoff goes on
	}
	p.timer.Reset(p.backoff())
}

// period is jittered, so that the nodes of a site do not probe in step.
func (p *prober) period() time.Duration {
	d := p.server.cfg.ProbePeriod
	return d - time.Duration(rand.Int64N(int64(d)/5+1))
}

// backoff is random between BackoffMin and a limit that doubles up to
// BackoffMax; less than BackoffMin for the first probe after a loss.
func (p *prober) backoff() time.Duration {
	cfg := p.server.cfg
	if p.attempt == 0 {
		return rand.N(cfg.BackoffMin)
	}
	limit := min(cfg.BackoffMin<<min(p.attempt, 16), cfg.BackoffMax)
	return cfg.BackoffMin + rand.N(limit-cfg.BackoffMin+1)
}
