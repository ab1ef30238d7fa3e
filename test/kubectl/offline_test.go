// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"strings"
	"time"

	"github.com/google/go-cmp/cmp"
)

const (
	warning     = "Warning: the link to the API server is down: this is the last recorded state\n"
	unavailable = "Error from server (ServiceUnavailable)"
)

// offlineReads wants what was printed online.
func (r *rig) offlineReads(recorded map[string]outcome) {
	start := time.Now()
	for _, q := range reads {
		got := r.offline(sh(q.words))
		want := recorded[q.words]
		if d := cmp.Diff(want.Stdout, got.Stdout); d != "" || got.Exit != want.Exit {
			r.t.Errorf("kubectl %s: exit %d, was %d; differs offline (-online +offline):\n%s\n%s", q.words, got.Exit, want.Exit, d, got.Stderr)
		}
		if rest := strings.ReplaceAll(got.Stderr, warning, ""); rest != want.Stderr {
			r.t.Errorf("kubectl %s: standard error %q offline, was %q", q.words, got.Stderr, want.Stderr)
		}
		if strings.HasPrefix(q.words, "-n work get") && !strings.Contains(got.Stderr, warning) {
			r.t.Errorf("kubectl %s: standard error %q offline, want the warning", q.words, got.Stderr)
		}
	}
	r.t.Logf("%d reads offline in %v", len(reads), time.Since(start).Round(time.Millisecond))
}

// offlineDescribe looks at what describe says without the events, which are not
// recorded.
func (r *rig) offlineDescribe(recorded map[string]outcome) {
	for _, q := range onlineReads {
		got := r.offline(sh(q.words))
		r.t.Logf("kubectl %s: %d\n%s\n%s\n%s", q.words, got.Exit, cmp.Diff(recorded[q.words].Stdout, got.Stdout), recorded[q.words].Stderr, got.Stderr)
	}
}

// offlineUnknown asks for what was never asked for online.
func (r *rig) offlineUnknown() {
	for _, words := range []string{
		"get pv", "get leases -A", "-n default get endpointslices", "-n work get cm never-asked", "get --raw /metrics", "-n work get secret none", "get nodes -l none=none -o yaml",
	} {
		got := r.offline(sh(words))
		r.t.Logf("kubectl %s: %+v", words, got)
	}
}

// offlineWrites wants that every write is refused, soon and in words.
func (r *rig) offlineWrites() {
	n := func(words string) call { return sh("-n work " + words) }
	for _, c := range []call{
		sh("apply -f -").with(configMap("one", "9")), sh("apply -f -").with(configMap("a", "9")), sh("apply --server-side -f -").with(configMap("a", "9")), sh("create -f -").with(configMap("a", "9")),
		n("apply --dry-run=server -f -").with(configMap("a", "9")), sh("diff -f -").with(configMap("a", "9")), sh("replace -f -").with(configMap("one", "9")), n("create cm a --from-literal=k=v"), n("delete cm one"), n("delete cm --all"), n("delete pod p --now"), n("label cm one x=y"), n("annotate cm one x=y"),
		n("patch cm one -p {\"data\":{\"key\":\"2\"}}"), n("scale deploy web --replicas=9"), n("set image deploy/web c=x:2"), n("edit cm one").under("KUBE_EDITOR=sed -i s/value/changed/"),
		n("run r --image=example.invalid/r:1"), n("create token default"), sh("cordon other"), sh("drain other --force"), n("rollout restart deploy/web"), n("auth can-i delete pods"),
		n("exec p -- true"), n("exec p -- true").under("KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false"), n("logs p"), n("port-forward pod/p :80"), n("attach p"),
	} {
		got := r.offline(c)
		r.t.Logf("%s: %+v", c, got)
	}
}

// offlineWatches wants watches to print what is recorded, and to stay.
func (r *rig) offlineWatches() {
	for _, w := range watched {
		if w.begin == 0 {
			continue
		}
		x := r.through.start(sh(w.words))
		r.t.Logf("%s: %s", w.words, x.printed(w.begin))
		x.stays(3 * time.Second)
		x.end()
		r.t.Logf("%s", x.stderr.String())
	}
}
