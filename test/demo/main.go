// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Command demo shows what edgehub is for, with a real control plane and the real
// kubelet code: a node runs pods through edgehub, its link is cut without a word,
// kubelet and edgehub are killed and started again meanwhile, and the link comes
// back. It tells what was asked and from where it was answered, and checks what
// it tells.
//
// It needs no root and no terminal; colours are for terminals, unless NO_COLOR is
// set. It exits with 0 only if all checks held, with 130 after SIGINT or SIGTERM.
// What it has started it ends, and what it has written it removes, in any case.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// longest is for the first time, when Kubernetes is built.
const longest = 30 * time.Minute

func main() { os.Exit(run()) }

func run() int {
	signalled, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop() // not before: a second signal must not interrupt the cleaning up
	ctx, cancel := context.WithTimeout(signalled, longest)
	defer cancel()

	signal.Ignore(syscall.SIGPIPE) // a reader that has gone is no reason not to clean up
	s := newScreen(os.Stdout)
	s.lost = cancel
	r, err := newRig()
	if err != nil {
		s.say("%v", err)
		return 1
	}
	d := &demo{screen: s, rig: r, checks: &checks{screen: s}, endFeed: func() {}}
	err = d.play(ctx)
	d.endFeed()
	interrupted := signalled.Err() != nil
	if err != nil && !interrupted {
		d.checks.add(false, "the demo got to its end", "yes", "%v", err)
		s.line(r.logs())
	}
	if interrupted {
		s.say("A signal: everything is ended and removed.")
	}
	stopErr := r.stop()
	if interrupted {
		if stopErr != nil {
			s.say("%v", stopErr)
		}
		return 128 + int(syscall.SIGINT)
	}
	_, statErr := os.Stat(r.dir)
	d.checks.add(stopErr == nil && errors.Is(statErr, os.ErrNotExist), "all is ended and removed", "yes", "%s", yes(stopErr))
	return d.sum()
}

func yes(err error) string {
	if err != nil {
		return err.Error()
	}
	return "yes"
}

// sum shows all checks and returns the exit code.
func (d *demo) sum() int {
	d.screen.act(7, "What was checked")
	d.screen.raw(d.checks.table())
	if !d.checks.held() {
		d.screen.raw("\n" + d.screen.paint(red, "NOT ALL OF IT HELD") + "\n")
		return 1
	}
	d.screen.raw(fmt.Sprintf("\n%s in %.0f s\n", d.screen.paint(green, "All of it held"), time.Since(d.screen.began).Seconds()))
	return 0
}
