// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package kubectl runs kubectl with the same token directly against the API server
// and through edgehub, and compares what it prints and how it ends; and, with the
// link cut and the hub restarted, what it prints then.
package kubectl

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
)

const (
	admin    = "kubectl-admin"
	nodeName = "edge"

	// patience is for one kubectl on a machine that does much else.
	patience = 2 * time.Minute
	// offlineLimit is how long kubectl may take for anything while the link is down.
	offlineLimit = 5 * time.Second
)

// A door is kubectl with one kubeconfig, and a cache of its own.
type door struct {
	t      *testing.T
	name   string
	binary string
	server string // URL, masked in what is printed
	env    []string
	dir    string // for caches
}

// An outcome is what one kubectl has printed and how it has ended.
type outcome struct {
	Exit           int
	Stdout, Stderr string
}

func newDoor(t *testing.T, name, binary string, c *rest.Config) *door {
	t.Helper()
	dir := t.TempDir()
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := controlplane.WriteKubeconfig(kubeconfig, c); err != nil {
		t.Fatal(err)
	}
	d := &door{t: t, name: name, binary: binary, server: c.Host, dir: dir, env: []string{"HOME=" + dir, "TMPDIR=" + dir, "PATH=" + os.Getenv("PATH"), "KUBECONFIG=" + kubeconfig}}
	d.forget()
	return d
}

// forget gives kubectl an empty cache: it asks for everything again.
func (d *door) forget() {
	d.t.Helper()
	cache, err := os.MkdirTemp(d.dir, "cache")
	if err != nil {
		d.t.Fatal(err)
	}
	d.env = append(d.env, "KUBECACHEDIR="+cache)
}

// A call is one kubectl.
type call struct {
	args  []string
	stdin string
	env   []string
}

// sh makes a call of words; a word may be quoted with '.
func sh(words string) call {
	var args []string
	for i, part := range strings.Split(words, "'") {
		if i%2 == 1 {
			args = append(args, part)
			continue
		}
		args = append(args, strings.Fields(part)...)
	}
	return call{args: args}
}

func (c call) with(stdin string) call   { c.stdin = stdin; return c }
func (c call) under(env ...string) call { c.env = env; return c }

func (c call) String() string {
	return strings.Join(append(append([]string{}, c.env...), "kubectl "+strings.Join(c.args, " ")), " ")
}

// command prepares a kubectl that gets SIGINT when ctx ends.
func (d *door) command(ctx context.Context, c call) *exec.Cmd {
	cmd := exec.CommandContext(ctx, d.binary, c.args...)
	cmd.Env = append(append([]string{}, d.env...), c.env...)
	cmd.Stdin = strings.NewReader(c.stdin)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) }
	cmd.WaitDelay = 10 * time.Second
	return cmd
}

// run runs kubectl to its end.
func (d *door) run(c call) outcome {
	ctx, cancel := context.WithTimeout(d.t.Context(), patience)
	defer cancel()
	cmd := d.command(ctx, c)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		d.t.Errorf("%s: %s: %v after %v", d.name, c, err, patience)
	}
	return outcome{Exit: cmd.ProcessState.ExitCode(), Stdout: d.mask(stdout.String()), Stderr: d.mask(stderr.String())}
}

// ages are what kubectl makes of the time that has gone by; a list is as new as the
// last change to anything.
var (
	ages   = regexp.MustCompile(`(?m)(^|[ (])(\d+[dhms]){1,2}( ago)?([ )]|$)`)
	spaces = regexp.MustCompile(`  +`)
	lists  = regexp.MustCompile(`^(\{"kind":"\w+List","apiVersion":"[\w./]+","metadata":\{"resourceVersion":)"\d+"`)
)

// mask hides the server's address, a list's resourceVersion, and ages with the width
// of their columns.
func (d *door) mask(text string) string {
	text = strings.ReplaceAll(text, d.server, "https://SERVER")
	text = strings.ReplaceAll(text, strings.TrimPrefix(d.server, "https://"), "SERVER")
	text = lists.ReplaceAllString(text, `${1}"N"`)
	if masked := ages.ReplaceAllString(text, "${1}AGE${4}"); masked != text {
		text = spaces.ReplaceAllString(masked, "  ")
	}
	return text
}

// moving is what differs when the same thing is done twice.
var moving = []struct {
	what *regexp.Regexp
	mask string
}{
	{regexp.MustCompile(`resourceVersion: "\d+"`), `resourceVersion: "N"`},
	{regexp.MustCompile(`\\?"resourceVersion\\?": ?\\?"\d+\\?"`), `"resourceVersion":"N"`},
	{regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`), "UID"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z`), "TIME"},
	{regexp.MustCompile(`\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ [+-]\d{4}`), "TIME"}, // diff
	{regexp.MustCompile(`\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d [+-]\d{4}`), "TIME"},
	{regexp.MustCompile(`ey[\w-]+\.[\w-]+\.[\w-]+`), "TOKEN"},
	{regexp.MustCompile(`\S*/(LIVE|MERGED)-\d+`), "/tmp/$1"},
	{regexp.MustCompile(`10\.0\.\d+\.\d+`), "CLUSTERIP"},
}

func (o outcome) maskMoving() outcome {
	for _, m := range moving {
		o.Stdout, o.Stderr = m.what.ReplaceAllString(o.Stdout, m.mask), m.what.ReplaceAllString(o.Stderr, m.mask)
	}
	return o
}

// A rig is a control plane, a hub in front of it, and the two doors.
type rig struct {
	t       *testing.T
	cp      *controlplane.ControlPlane
	link    *link.Link
	hub     *node.Hub
	node    *rest.Config // the node's, directly
	direct  *door
	through *door

	followed map[string]string // what watches through the hub have printed online
}

func newRig(t *testing.T) *rig {
	t.Helper()
	ctx := t.Context()
	bin, err := controlplane.Binaries(ctx, "kubectl")
	if err != nil {
		t.Fatal(err)
	}
	cp := controlplane.New(t, controlplane.Config{Audit: true, Users: []controlplane.StaticUser{{Name: admin, Groups: []string{"system:masters"}}}})
	r := &rig{t: t, cp: cp, followed: map[string]string{}}
	if r.link, err = link.New(ctx, cp.Addr()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.link.Close)
	if r.node, err = cp.NodeConfig(nodeName); err != nil {
		t.Fatal(err)
	}
	r.hub, err = node.NewHub(ctx, node.HubConfig{ServerURLs: []string{r.link.URL()}, ServerCAFile: cp.CAFile(), CertFile: r.node.CertFile, KeyFile: r.node.KeyFile})
	if err != nil {
		t.Fatal(err)
	}
	process.Run(t, r.hub)
	kubectl := filepath.Join(bin, "kubectl")
	r.direct = newDoor(t, "direct", kubectl, cp.TokenConfig(admin))
	r.through = newDoor(t, "edgehub", kubectl, r.hub.Through(cp.TokenConfig(admin)))
	return r
}

// during makes t the test that failures are of.
func (r *rig) during(t *testing.T) { r.t, r.direct.t, r.through.t = t, t, t }

// sub runs a part of the test.
func (r *rig) sub(name string, part func()) {
	whole := r.t
	defer r.during(whole)
	whole.Run(name, func(t *testing.T) { r.during(t); part() })
}

// both runs c through both doors at a time.
func (r *rig) both(c call) (direct, through outcome) {
	var wg sync.WaitGroup
	wg.Go(func() { direct = r.direct.run(c) })
	wg.Go(func() { through = r.through.run(c) })
	wg.Wait()
	return direct, through
}

// compare wants the same through both doors, and returns it.
func (r *rig) compare(c call, wantExit int) outcome {
	r.t.Helper()
	want, got := r.both(c)
	if d := cmp.Diff(want, got); d != "" {
		r.t.Errorf("%s differs through edgehub (-direct +edgehub):\n%s", c, d)
	}
	if want.Exit != wantExit {
		r.t.Errorf("%s = %+v, want exit code %d", c, want, wantExit)
	}
	return want
}

// cut cuts the link and restarts the hub, and kubectl forgets what it knows.
func (r *rig) cut() {
	r.t.Helper()
	r.link.Cut()
	if err := r.hub.Stop(); err != nil {
		r.t.Fatal(err)
	}
	if err := r.hub.Start(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	r.through.forget()
}

// offline runs c while the link is down, and wants an end soon.
func (r *rig) offline(c call) outcome {
	r.t.Helper()
	start := time.Now()
	o := r.through.run(c)
	if d := time.Since(start); d > offlineLimit {
		r.t.Errorf("%s took %v offline, want less than %v: %+v", c, d, offlineLimit, o)
	}
	return o
}
