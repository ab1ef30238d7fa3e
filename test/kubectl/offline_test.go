// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/edgehub/edgehub/test/process"
)

const (
	recordedState = "Warning: the link to the API server is down: this is the last recorded state\n"
	noEvents      = "Warning: the link to the API server is down: events are not recorded, so none are shown\n"
	unavailable   = "Error from server (ServiceUnavailable): "
)

// offlineReads wants what was printed online.
func (r *rig) offlineReads(recorded map[string]outcome) {
	start := time.Now()
	for _, q := range reads {
		got, want := r.offline(sh(q.words)), recorded[q.words]
		said := got.Stderr
		got.Stderr = strings.ReplaceAll(got.Stderr, recordedState, "")
		if d := cmp.Diff(want, got); d != "" {
			r.t.Errorf("kubectl %s differs offline (-online +offline):\n%s", q.words, d)
		}
		if strings.Contains(q.words, "team get") && said == got.Stderr {
			r.t.Errorf("kubectl %s: standard error %q offline, want the warning", q.words, said)
		}
	}
	r.t.Logf("%d reads offline in %v", len(reads), time.Since(start).Round(time.Millisecond))
}

// unknown is what describe shows of what is not recorded: events and other nodes'
// Leases.
var unknown = regexp.MustCompile(`(?s)(Failed to get lease: )[^\n]*|Events:.*`)

// offlineChanged wants that what is not recorded is not made up.
func (r *rig) offlineChanged(recorded map[string]outcome) {
	for _, q := range changed {
		got := r.offline(sh(q.words))
		if got.Exit != q.offline || !strings.Contains(got.Stderr, q.says) {
			r.t.Errorf("kubectl %s offline = %+v, want exit code %d and %q on standard error", q.words, got, q.offline, q.says)
		}
		want := unknown.ReplaceAllString(recorded[q.words].Stdout, "$1")
		if d := cmp.Diff(want, unknown.ReplaceAllString(got.Stdout, "$1")); got.Exit == 0 && d != "" {
			r.t.Errorf("kubectl %s differs offline (-online +offline):\n%s", q.words, d)
		}
	}
	for _, words := range []string{
		"get pv", "get leases -A", "-n default get endpointslices", "-n team get cm never-asked", "get --raw /metrics", "-n team get secret none", "get nodes -l none=none", "-n team get cm/one pvc/none",
	} {
		if got := r.offline(sh(words)); got.Exit != 1 || !strings.Contains(got.Stderr, unavailable) {
			r.t.Errorf("kubectl %s offline = %+v, want exit code 1 and %q", words, got, unavailable)
		}
	}
}

// refusals are what edgehub says offline; kubectl leaves out the reason,
// ServiceUnavailable, where it puts words of its own before it.
var refusals = regexp.MustCompile(`edgehub: the API server cannot be reached and nothing recorded on this node answers this request|Error from server \(ServiceUnavailable\): (?s:.*)the link to the API server is down, and .* is not recorded`)

// offlineWrites wants that every write is refused, soon and in words.
func (r *rig) offlineWrites() {
	start := time.Now()
	n := func(words string) call { return sh("-n team " + words) }
	calls := []call{
		sh("apply -f -").with(configMap("one", "9")), sh("apply -f -").with(configMap("a", "9")), sh("apply --server-side -f -").with(configMap("a", "9")),
		sh("create -f -").with(configMap("a", "9")), n("apply --dry-run=server -f -").with(configMap("a", "9")), sh("diff -f -").with(configMap("one", "9")),
		sh("replace -f -").with(configMap("one", "9")), sh("replace --force -f -").with(configMap("one", "9")), n("create cm a --from-literal=k=v"),
		n("delete cm one"), n("delete cm one --wait=false"), n("delete cm --all"), n("delete pod p --now"), n("delete pod p --force"), n("label cm one x=y"), n("annotate cm one x=y"),
		n("patch cm one -p {\"data\":{\"key\":\"2\"}}"), n("scale deploy web --replicas=9"), n("set image deploy/web c=x:2"), n("edit cm one").under("KUBE_EDITOR=sed -i s/value/changed/"),
		n("run r --image=example.invalid/r:1"), n("create token default --audience=other"), sh("taint node other k=v:NoSchedule"), sh("drain other --force"),
		n("rollout restart deploy/web"), n("expose deploy web --port=81 --name=other"), n("create ns other"),
		n("exec p -- true"), n("exec p -- true").under("KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false"), n("attach p"),
	}
	for _, c := range calls {
		if got := r.offline(c); got.Exit == 0 || got.Stdout != "" || !refusals.MatchString(got.Stderr) {
			r.t.Errorf("%s offline = %+v, want no output, exit code 1 and %v", c, got, refusals)
		}
	}
	// kubectl cordon ends with 0 whatever the API server says.
	if got := r.offline(sh("cordon other")); got.Stdout != "" || !refusals.MatchString(got.Stderr) {
		r.t.Errorf("cordon offline = %+v, want no output and %v", got, refusals)
	}
	r.t.Logf("%d writes offline in %v", len(calls)+1, time.Since(start).Round(time.Millisecond))
	for _, words := range []string{"-n team get cm one -o yaml", "-n team get cm", "get node other -o wide"} {
		if got := r.offline(sh(words)); strings.Contains(got.Stdout, "changed") || strings.Contains(got.Stdout, "SchedulingDisabled") || got.Exit != 0 {
			r.t.Errorf("kubectl %s after refused writes = %+v", words, got)
		}
	}
}

// offlineToken wants the token that was issued online, as long as it is valid.
func (r *rig) offlineToken(want outcome) {
	got := r.offline(sh("-n team create token default"))
	if got.Stdout != want.Stdout || got.Exit != 0 || !strings.Contains(got.Stderr, "Warning: the link to the API server is down: this is the last recorded answer") {
		r.t.Errorf("create token offline = %+v, want that of before, %+v, and a warning", got, want)
	}
}

// aboutX are the lines of a watch that tell of x, and the head lines above them.
var (
	ofX    = regexp.MustCompile(`(?m)^.*\bx\b.*\n`)
	aboutX = regexp.MustCompile(`(?m)^.*(\bx\b|NAME  AGE).*\n`)
)

// offlineWatches wants watches to print what is recorded, to stay, and to go on
// when the link is back.
//
// What is recorded of Tables is the list. If the same is recorded as JSON, the watch
// that follows is in JSON, for which kubectl has columns of its own; if not, it waits
// for the link. Both begin where the list was made, so they tell of x as it was after
// that, too.
func (r *rig) offlineWatches() {
	var running []*watch
	for _, w := range watched {
		x := r.through.start(sh(w.words))
		running = append(running, x)
		x.printed(w.begin)
	}
	for i, w := range watched {
		running[i].stays(500 * time.Millisecond)
		got := r.through.mask(running[i].stdout.String())
		if w.table() {
			got = aboutX.ReplaceAllString(got, "")
		}
		if d := cmp.Diff(w.first(r.followed[w.words]), got); d != "" {
			r.t.Errorf("kubectl %s differs offline (-online +offline):\n%s", w.words, d)
		}
		if said := running[i].stderr.String(); !strings.Contains(said, recordedState) {
			r.t.Errorf("kubectl %s: standard error %q offline, want the warning", w.words, said)
		}
	}
	if err := r.link.Heal(); err != nil {
		r.t.Fatal(err)
	}
	r.change()
	for i, w := range watched {
		switch {
		case !w.table():
			got := running[i].printed(w.begin + w.changes)
			if d := cmp.Diff(r.followed[w.words], got); d != "" {
				r.t.Errorf("kubectl %s differs after the link was healed (-online +healed):\n%s", w.words, d)
			}
		case w.changes > 0:
			ctx, cancel := context.WithTimeout(r.t.Context(), 30*time.Second)
			err := process.Poll(ctx, w.words+": the changes of x", func(context.Context) error {
				text := running[i].stdout.String()
				if n := len(ofX.FindAllString(text, -1)); n < w.changes {
					return fmt.Errorf("%d lines about x: %q, %q", n, text, running[i].stderr.String())
				}
				return nil
			})
			cancel()
			if err != nil {
				r.t.Error(err)
			}
		}
		running[i].stays(0)
	}
}
