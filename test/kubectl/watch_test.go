// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
)

// A watch is a kubectl that runs until it is stopped.
type watch struct {
	door           *door
	call           call
	cmd            *exec.Cmd
	stop           context.CancelFunc
	stdout, stderr output
	ended          chan struct{} // closed when it has ended
}

// output is what a running program has printed.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// start runs kubectl until stop, or the end of the test.
func (d *door) start(c call) *watch {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(d.t.Context(), patience)
	w := &watch{door: d, call: c, stop: cancel, cmd: d.command(ctx, c), ended: make(chan struct{})}
	w.cmd.Stdout, w.cmd.Stderr = &w.stdout, &w.stderr
	if err := w.cmd.Start(); err != nil {
		d.t.Fatal(err)
	}
	go func() { w.cmd.Wait(); close(w.ended) }() // how it has ended is in cmd
	d.t.Cleanup(w.end)
	return w
}

// end stops it.
func (w *watch) end() { w.stop(); <-w.ended }

// printed waits until it has printed so many lines, and returns them.
func (w *watch) printed(lines int) string {
	w.door.t.Helper()
	ctx, cancel := context.WithTimeout(w.door.t.Context(), 30*time.Second)
	defer cancel()
	err := process.Poll(ctx, fmt.Sprintf("%s: %s: %d lines", w.door.name, w.call, lines), func(context.Context) error {
		if text := w.stdout.String(); strings.Count(text, "\n") < lines {
			return fmt.Errorf("printed %q, %q", text, w.stderr.String())
		}
		return nil
	})
	if err != nil {
		w.door.t.Error(err)
	}
	return w.door.mask(w.stdout.String())
}

// stays wants that it still runs after d.
func (w *watch) stays(d time.Duration) {
	w.door.t.Helper()
	select {
	case <-w.ended:
		w.door.t.Errorf("%s: %s has ended with %d: %q, %q", w.door.name, w.call, w.cmd.ProcessState.ExitCode(), w.stdout.String(), w.stderr.String())
	case <-time.After(d):
	}
}

// A following is a watch, with the lines that it begins with and those that three
// changes to the ConfigMap x make: created, changed, deleted.
type following struct {
	words          string
	begin, changes int
}

// table reports whether it asks for Tables.
func (f following) table() bool {
	return !strings.Contains(f.words, "-o ") || strings.Contains(f.words, "-o wide")
}

// first returns the lines that it begins with.
func (f following) first(text string) string {
	return strings.Join(strings.SplitAfter(text, "\n")[:f.begin], "")
}

var watched = []following{
	{"-n team get cm -w", 4, 3}, {"-n team get cm -w -o name", 3, 3}, {"-n team get cm -w --output-watch-events", 4, 3}, {"-n team get cm --watch-only -o name", 0, 3},
	{"-n team get cm -w -o custom-columns=N:.metadata.name,K:.data.key", 4, 3}, {"-n team get cm one -w -o name", 1, 0}, {"-n team get cm -l w=1 -w -o name", 0, 3},
	{"-n team get cm -w -o jsonpath={.metadata.name}={.data.key}{\"\\n\"}", 3, 3}, {"get cm -A --watch-only --no-headers", 0, 3},
	{"-n team get widgets -w", 4, 0}, {"-n team get deploy -w -o wide", 2, 0},
}

// change makes the three changes.
func (r *rig) change() {
	r.t.Helper()
	for _, c := range []call{
		sh("-n team apply -f -").with(strings.Replace(configMap("x", "1"), "name: x", "name: x, labels: {w: \"1\"}", 1)),
		sh("-n team patch cm x -p {\"data\":{\"key\":\"2\"}}"), sh("-n team delete cm x"),
	} {
		if o := r.direct.run(c); o.Exit != 0 {
			r.t.Fatalf("%s: %+v", c, o)
		}
	}
}

// watches follows changes through both doors.
func (r *rig) watches() {
	type pair struct{ direct, through *watch }
	var pairs []pair
	start := time.Now()
	for _, w := range watched {
		p := pair{r.direct.start(sh(w.words)), r.through.start(sh(w.words))}
		pairs = append(pairs, p)
		p.direct.printed(w.begin)
		p.through.printed(w.begin)
	}
	// Those that print nothing yet have listed, too: they watch from there.
	err := process.Poll(r.t.Context(), "all have listed", func(context.Context) error {
		events, err := r.cp.Requests(start)
		n := controlplane.Count(events, admin, "list", "") + controlplane.Count(events, admin, "get", "configmaps")
		if err == nil && n < 2*len(watched) {
			err = fmt.Errorf("%d of %d have", n, 2*len(watched))
		}
		return err
	})
	if err != nil {
		r.t.Fatal(err)
	}
	r.change()
	for i, w := range watched {
		want, got := pairs[i].direct.printed(w.begin+w.changes), pairs[i].through.printed(w.begin+w.changes)
		if d := cmp.Diff(want, got); d != "" {
			r.t.Errorf("%s differs through edgehub (-direct +edgehub):\n%s", w.words, d)
		}
		r.followed[w.words] = got
		pairs[i].direct.end()
		pairs[i].through.end()
		if d := cmp.Diff(pairs[i].direct.stderr.String(), pairs[i].through.stderr.String()); d != "" {
			r.t.Errorf("%s: standard error differs (-direct +edgehub):\n%s", w.words, d)
		}
	}
}
