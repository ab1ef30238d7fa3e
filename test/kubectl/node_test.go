// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
)

const megabyte = 1 << 20

// pods are what runs on the node.
var pods = []struct{ name, args, more string }{
	{"web", `["serve", ":8080"]`, ""},
	{"once", `["echo", "hello", "from", "once"]`, "restartPolicy: Never"},
	{"count", `["count", "100"]`, "restartPolicy: Never"},
	{"cat-direct", `["cat"]`, "restartPolicy: Never"},
	{"cat-edgehub", `["cat"]`, "restartPolicy: Never"},
}

// manifest makes a pod; those that copy want to be attached to, once.
func manifest(name, args, more string) string {
	stdin := ""
	if strings.HasPrefix(name, "cat") {
		stdin = ", stdin: true, stdinOnce: true"
	}
	return fmt.Sprintf("apiVersion: v1\nkind: Pod\nmetadata: {name: %s, namespace: team, labels: {app: %s}}\nspec:\n  nodeName: %s\n  terminationGracePeriodSeconds: 1\n  %s\n  containers: [{name: c, image: %q, args: %s%s}]\n",
		name, name, nodeName, more, node.Image, args, stdin)
}

// startNode starts a real kubelet, through the hub.
func (r *rig) startNode() {
	r.t.Helper()
	dir, err := os.MkdirTemp("", "edgehub-kubelet-")
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { os.RemoveAll(dir) })
	runtime, err := node.NewContainerd(r.t.Context(), "")
	if err != nil {
		r.t.Fatal(err)
	}
	process.Run(r.t, runtime)
	k, err := node.NewKubelet(r.t.Context(), node.KubeletConfig{Dir: dir, Name: nodeName, Client: r.hub.Through(r.node)}, runtime, r.cp.CAFile())
	if err != nil {
		r.t.Fatal(err)
	}
	process.Run(r.t, k)
	if err := r.cp.CreateNamespace(r.t.Context(), "team"); err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(r.t.Context(), 2*patience)
	defer cancel()
	if err := r.cp.WaitNodeReady(ctx, nodeName); err != nil {
		r.t.Fatal(err)
	}
}

// apply makes a pod through the hub, and waits with kubectl until it is what the
// condition says.
func (r *rig) apply(name, args, more, condition string) {
	r.t.Helper()
	for _, c := range []call{
		sh("apply -f -").with(manifest(name, args, more)),
		sh("-n team wait --timeout=100s --for=" + condition + " pod/" + name),
	} {
		if o := r.through.run(c); o.Exit != 0 {
			r.t.Fatalf("%s: %+v", c, o)
		}
	}
}

func TestNode(t *testing.T) {
	node.RequireContainerd(t)
	r := newRig(t)
	r.startNode()
	r.sub("logs -f", r.follow)
	for _, p := range pods {
		switch p.name {
		case "count":
		case "once":
			r.apply(p.name, p.args, p.more, "jsonpath={.status.phase}=Succeeded")
		default:
			r.apply(p.name, p.args, p.more, "condition=Ready")
		}
	}
	r.sub("logs", r.logs)
	start := time.Now()
	for _, transport := range []string{"KUBECTL_REMOTE_COMMAND_WEBSOCKETS=true", "KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false"} {
		r.sub("exec "+transport, func() { r.exec(transport) })
	}
	r.sub("attach", r.attach)
	for _, transport := range []string{"KUBECTL_PORT_FORWARD_WEBSOCKETS=true", "KUBECTL_PORT_FORWARD_WEBSOCKETS=false"} {
		r.sub("port-forward "+transport, func() { r.portForward(transport) })
	}
	r.sub("transports", func() { r.transports(start) })
	r.sub("delete", r.deletePod)
	pod := r.through.run(sh("-n team get pod web -o yaml"))
	r.cut()
	r.sub("offline", func() { r.offlineNode(pod) })
}

// follow follows a log through both doors from its beginning to the container's
// end.
func (r *rig) follow() {
	p := pods[2]
	r.apply(p.name, p.args, p.more, "condition=Ready")
	got := r.compare(sh("-n team logs -f count"), 0)
	if n := strings.Count(got.Stdout, "\n"); n != 100 || !strings.HasSuffix(got.Stdout, "\n100\n") {
		r.t.Errorf("logs -f printed %d lines, want 100: %q", n, got.Stdout)
	}
}

func (r *rig) logs() {
	for _, q := range []read{
		{"-n team logs web", 0}, {"-n team logs once", 0}, {"-n team logs once -f", 0}, {"-n team logs count --tail=3", 0}, {"-n team logs count --timestamps --tail=2", 0},
		{"-n team logs count --limit-bytes=7", 0}, {"-n team logs -l app=once --prefix", 0}, {"-n team logs once -c c", 0}, {"-n team logs once --all-containers", 0},
		{"-n team logs once -c none", 1}, {"-n team logs once --previous", 1}, {"-n team logs none", 1}, {"-n team get pods -o wide", 0}, {"-n team get pod web -o yaml", 0},
		{"get node " + nodeName, 0}, {"-n team describe pod once", 0}, {"get --raw /api/v1/nodes/" + nodeName + "/proxy/healthz", 0},
	} {
		r.compare(sh(q.words), q.exit)
	}
}

// exec runs programs in a container.
func (r *rig) exec(transport string) {
	much := strings.Repeat("0123456789abcde\n", megabyte/16)
	for _, c := range []struct {
		call
		exit           int
		stdout, stderr string
	}{
		{sh("-n team exec web -- /pause echo a b"), 0, "a b\n", ""},
		{sh("-n team exec web -c c -- /pause complain oh dear"), 0, "", "oh dear\n"},
		{sh("-n team exec web -- /pause exit 3"), 3, "", "command terminated with exit code 3\n"},
		{sh("-n team exec -i web -- /pause cat").with("some text\n"), 0, "some text\n", ""},
		{sh("-n team exec -i web -- /pause cat").with(much), 0, much, ""},
		{sh("-n team exec web -- /pause count 10"), 0, "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n", ""},
		{sh("-n team exec -i web -- /pause cat"), 0, "", ""},
	} {
		want := outcome{Exit: c.exit, Stdout: c.stdout, Stderr: c.stderr}
		if d := cmp.Diff(want, r.compare(c.under(transport), c.exit)); d != "" {
			r.t.Errorf("%s (-want +got):\n%.2000s", c.call, d)
		}
	}
	r.compareMoving(sh("-n team exec web -- /nothing").under(transport))
	r.compareMoving(sh("-n team exec none -- /pause").under(transport))
	r.compareMoving(sh("-n team exec web -c none -- /pause").under(transport))
	r.compareMoving(sh("-n team exec once -- /pause").under(transport))
}

// compareMoving wants the same failure but for ids.
func (r *rig) compareMoving(c call) {
	r.t.Helper()
	ids := regexp.MustCompile(`[0-9a-f]{64}`)
	want, got := r.both(c)
	want.Stderr, got.Stderr = ids.ReplaceAllString(want.Stderr, "ID"), ids.ReplaceAllString(got.Stderr, "ID")
	if d := cmp.Diff(want, got); d != "" || want.Exit == 0 {
		r.t.Errorf("%s: exit %d; differs through edgehub (-direct +edgehub):\n%s", c, want.Exit, d)
	}
}

// attach talks to a container's own program, which ends with its input.
func (r *rig) attach() {
	var got [2]outcome
	var wg sync.WaitGroup
	for i, d := range []*door{r.direct, r.through} {
		wg.Go(func() {
			got[i] = d.run(sh("-n team attach -i cat-" + d.name).with("one\ntwo\n"))
			got[i].Stderr = strings.ReplaceAll(got[i].Stderr, d.name, "NAME")
		})
	}
	wg.Wait()
	if d := cmp.Diff(got[0], got[1]); d != "" || got[0].Exit != 0 || !strings.Contains(got[0].Stdout, "one\ntwo\n") {
		r.t.Errorf("attach -i = %+v; differs through edgehub (-direct +edgehub):\n%s", got[0], d)
	}
	r.compare(sh("-n team logs cat-edgehub"), 0)
}

var forwarding = regexp.MustCompile(`Forwarding from 127\.0\.0\.1:(\d+) -> 8080\n`)

// portForward asks the container's server for something small and something big,
// on several connections.
func (r *rig) portForward(transport string) {
	for _, d := range []*door{r.direct, r.through} {
		w := d.start(sh("-n team port-forward --address=127.0.0.1 pod/web :8080").under(transport))
		m := forwarding.FindStringSubmatch(w.printed(1))
		if m == nil {
			r.t.Fatalf("%s: port-forward printed %q, %q", d.name, w.stdout.String(), w.stderr.String())
		}
		url := "http://127.0.0.1:" + m[1]
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
		for range 3 {
			if body, err := ask(client, url+"/", nil); err != nil || !strings.HasPrefix(string(body), "web [") {
				r.t.Errorf("%s: GET through port-forward = %q, %v, want the pod's name first", d.name, body, err)
			}
		}
		big := bytes.Repeat([]byte("0123456789abcdef"), 4*megabyte/16)
		if body, err := ask(client, url+"/echo", big); err != nil || !bytes.Equal(body, big) {
			r.t.Errorf("%s: %d bytes through port-forward came back as %d, %v", d.name, len(big), len(body), err)
		}
		w.stays(100 * time.Millisecond)
		w.end()
		if said := w.stderr.String(); said != "" {
			r.t.Errorf("%s: port-forward says %q", d.name, said)
		}
	}
}

// ask sends a request, POST if there is a body, and returns the answer's body.
func ask(c *http.Client, url string, body []byte) (answer []byte, err error) {
	method := http.MethodGet
	if body != nil {
		method = http.MethodPost
	}
	req, err := http.NewRequest(method, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	return io.ReadAll(resp.Body)
}

// transports wants that as many conversations were WebSockets (a GET) and SPDY (a
// POST) through edgehub as directly: kubectl falls back without a word.
func (r *rig) transports(start time.Time) {
	events, err := r.cp.Requests(start)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, resource := range []string{"pods/exec", "pods/attach", "pods/portforward"} {
		sockets, spdy := controlplane.Count(events, admin, "get", resource), controlplane.Count(events, admin, "create", resource)
		r.t.Logf("%s: %d by WebSocket, %d by SPDY", resource, sockets, spdy)
		if sockets == 0 || sockets%2 != 0 || spdy%2 != 0 || spdy == 0 && resource != "pods/attach" || spdy != sockets && resource != "pods/attach" {
			r.t.Errorf("%s: %d requests by WebSocket, %d by SPDY, want both, and an even number of each", resource, sockets, spdy)
		}
	}
}

// deletePod wants kubectl to wait until kubelet has ended the pod.
func (r *rig) deletePod() {
	for _, name := range []string{"cat-direct", "count"} {
		if o := r.through.run(sh("-n team delete pod " + name)); o.Exit != 0 || o.Stderr != "" {
			r.t.Errorf("delete pod %s = %+v", name, o)
		}
		r.compare(sh("-n team get pod "+name), 1)
	}
}

// offlineNode wants that nothing hangs that needs the API server between.
func (r *rig) offlineNode(pod outcome) {
	if got := r.offline(sh("-n team get pod web -o yaml")); got.Stdout != pod.Stdout || got.Exit != 0 {
		r.t.Errorf("get pod web offline: %s", cmp.Diff(pod, got))
	}
	for _, c := range []call{ // logs -f tries again until the timeout, 20 s by default
		sh("-n team logs web"), sh("-n team logs -f web --pod-running-timeout=1s"), sh("-n team exec web -- /pause echo"), sh("-n team exec web -- /pause echo").under("KUBECTL_REMOTE_COMMAND_WEBSOCKETS=false"),
		sh("-n team attach web"), sh("-n team delete pod web"),
	} {
		if got := r.offline(c); got.Exit != 1 || got.Stdout != "" || !refusals.MatchString(got.Stderr) {
			r.t.Errorf("%s offline = %+v, want no output, exit code 1 and %v", c, got, refusals)
		}
	}
	// port-forward only connects when somebody connects to it.
	for _, transport := range []string{"KUBECTL_PORT_FORWARD_WEBSOCKETS=true", "KUBECTL_PORT_FORWARD_WEBSOCKETS=false"} {
		got := r.offline(sh("-n team port-forward pod/web :8080").under(transport))
		if got.Exit != 1 || !refusals.MatchString(got.Stderr) {
			r.t.Errorf("%s port-forward offline = %+v, want exit code 1 and %v", transport, got, refusals)
		}
	}
}
