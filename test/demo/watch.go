// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
)

// startHub starts edgehub and tells how long it takes until it serves.
func (d *demo) startHub(ctx context.Context) error {
	begun := time.Now()
	if err := d.rig.hub.Start(ctx); err != nil {
		return err
	}
	d.screen.say("edgehub serves, %.2f s after it was started", time.Since(begun).Seconds())
	return nil
}

// startFeed shows from now on what edgehub is asked, also after it is restarted.
func (d *demo) startFeed() error {
	log, err := os.Open(d.rig.hub.Log())
	if err != nil {
		return err
	}
	d.screen.raw("        " + d.screen.paint(dim, pad("who", 18)+pad("asks what", 58)+" → "+pad("from", 8)+" "+pad("code", 7)+"     time (the longest, × how many)") + "\n")
	d.screen.raw("        " + d.screen.paint(dim, "upstream: the API server · feed: a live copy · replay: the record · local: made by edgehub") + "\n")
	d.feed = &feed{screen: d.screen, lines: lineReader{r: bufio.NewReader(log)}}
	d.screen.flush = func() { _ = d.feed.show() } // run meets the same error
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- d.feed.run(ctx) }()
	d.endFeed = func() {
		cancel()
		err := errors.Join(<-ended, log.Close())
		d.screen.flush = func() {}
		if err != nil {
			d.checks.add(false, "the feed follows edgehub's log", "yes", "%v", err)
		}
	}
	return nil
}

// linkIs is a condition to wait for: that the hub sees the link so.
func (d *demo) linkIs(up bool) func(context.Context) error {
	return func(ctx context.Context) error {
		readyz, got, err := d.rig.linkState(ctx)
		if err == nil && got != up {
			err = errors.New(readyz)
		}
		return err
	}
}

// tellLink shows what the hub says about the link.
func (d *demo) tellLink(ctx context.Context) error {
	readyz, up, err := d.rig.linkState(ctx)
	if err != nil {
		return err
	}
	stale, err := d.rig.hub.Metric(ctx, "edgehub_cache_staleness_seconds")
	if err != nil {
		return err
	}
	color, healthy := red, 0
	if up {
		color, healthy = green, 1
	}
	d.screen.line(d.screen.paint(color, "● link") + fmt.Sprintf("  /readyz: %s · edgehub_upstream_healthy %d · edgehub_cache_staleness_seconds %.0f", readyz, healthy, stale))
	return nil
}

// streams is how many watches clients on the node have open.
func (d *demo) streams(ctx context.Context) (float64, error) {
	return d.rig.hub.Metric(ctx, "edgehub_proxy_requests_in_flight", `kind="stream"`)
}

// showPods shows kubectl get pods, asked through edgehub with a token. offline:
// the answer has to say that it is a record.
func (d *demo) showPods(ctx context.Context, what string, offline bool) error {
	d.screen.say("$ kubectl get pods -o wide      (%s, with a token, through edgehub)", person)
	out, err := d.rig.runKubectl(ctx, "get", "pods", "-o", "wide")
	if ctx.Err() != nil {
		return ctx.Err()
	}
	d.screen.line(d.paintKubectl(out))
	pods, warned := 0, false
	for line := range strings.Lines(out) {
		if fields := strings.Fields(line); len(fields) > 2 && strings.HasPrefix(fields[0], appName+"-") && fields[2] == "Running" {
			pods++
		}
		warned = warned || strings.HasPrefix(line, "Warning:")
	}
	expected, seen := fmt.Sprintf("%d, no warning", podCount), fmt.Sprintf("%d, no warning", pods)
	if offline {
		expected = fmt.Sprintf("%d and a warning", podCount)
	}
	if warned {
		seen = fmt.Sprintf("%d and a warning", pods)
	}
	d.checks.add(err == nil && pods == podCount && warned == offline, what, expected, "%s", seen)
	return nil
}

func (d *demo) paintKubectl(out string) string {
	lines := strings.Split(out, "\n")
	for i, line := range lines {
		color := dim
		if strings.HasPrefix(line, "Warning:") {
			color = yellow
		}
		lines[i] = d.screen.paint(color, strings.TrimRight(line, " "))
	}
	return strings.Join(lines, "\n")
}
