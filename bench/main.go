// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Command bench measures edgehub beside what a user would take instead, on a real
// API server: straight requests, and a bare httputil.ReverseProxy. All of one
// table comes from one run, in which the things compared take turns. It prints the
// table and writes results.json and table.md into bench/out. EDGEHUB_BENCH, a
// regular expression, chooses among the parts.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"regexp"
	"strings"
	"syscall"
	"time"
)

// A part measures some lines of the table. What it needs in the cluster it makes
// itself, if no part before it has.
type part struct {
	name string
	run  func(*bench, context.Context) error
}

// The order is that of the table. What lasts long and takes no CPU time (disk) is
// begun before the others; see background.
var parts = []part{
	{"get", (*bench).get},
	{"bytes", (*bench).bigList},
	{"lists", (*bench).cachedLists},
	{"filters", (*bench).filters},
	{"informer", (*bench).informers},
	{"latency", (*bench).latency},
	{"watches", (*bench).watches},
	{"memory", (*bench).memory},
	{"start", (*bench).starts},
	{"disk", (*bench).disk},
	{"size", (*bench).size},
	{"admission", (*bench).admission},
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == "reverseproxy" {
		fail(reverseProxy(os.Args[2:]))
		return
	}
	if len(os.Args) > 1 && os.Args[1] == allowServer {
		fail(allowAll(context.Background(), os.Args[2:]))
		return
	}
	docs := flag.Bool("docs", false, "also replace the table in docs/BENCHMARKS.md")
	flag.Usage = usage
	flag.Parse()
	chosen, err := regexp.Compile(os.Getenv("EDGEHUB_BENCH"))
	fail(err)
	// The hub is measured as it is shipped.
	fail(os.Setenv("CGO_ENABLED", "0"))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	b := &bench{began: time.Now(), chosen: chosen, table: &table{machine: machine()}}
	err = errors.Join(b.run(ctx), b.close())
	stop()
	if *docs && (err != nil || os.Getenv("EDGEHUB_BENCH") != "") {
		say("docs/BENCHMARKS.md is left as it is: not every part was measured")
		*docs = false
	}
	err = errors.Join(err, b.table.report(*docs))
	say("took %v", time.Since(b.began).Round(time.Second))
	fail(err)
}

func usage() {
	var names []string
	for _, p := range parts {
		names = append(names, p.name)
	}
	fmt.Fprintf(os.Stderr, "usage: [EDGEHUB_BENCH=REGEXP] bench [-docs]\nparts: %s\n", strings.Join(names, " "))
	flag.PrintDefaults()
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func say(format string, args ...any) { fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...) }

// run goes on after a part that failed: the others' lines are worth having.
func (b *bench) run(ctx context.Context) error {
	say("%s", b.table.machine)
	if err := b.start(ctx); err != nil {
		return err
	}
	var errs []error
	for _, p := range parts {
		if !b.chosen.MatchString(p.name) {
			continue
		}
		say("== %s, after %v", p.name, time.Since(b.began).Round(time.Second))
		if err := p.run(b, ctx); err != nil {
			say("%s FAILED: %v", p.name, err)
			errs = append(errs, fmt.Errorf("%s: %w", p.name, err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

// wait is for what only time tells: that memory is given back, that the disk is
// written.
func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}
