// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/edgehub/edgehub/pkg/install"
	"github.com/edgehub/edgehub/test/link"
)

// dryRun is a change of options.
func dryRun(o *install.Options) { o.DryRun = true }

func image(name string) func(*install.Options) {
	return func(o *install.Options) { o.Image = name }
}

// second is the error of a run whose steps do not matter.
func second(_ []string, err error) error { return err }

// Install, install again, uninstall, uninstall again; each first as a dry run, which must not
// touch anything.
//
// Guards: the kubeconfig is put back byte for byte, with its mode; nothing is left.
func TestInstall(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t, cp.URL())
	n.dry("install")
	n.must(second(n.run("install")))
	n.installed()
	for _, command := range []string{"install", "uninstall", "rollback"} {
		n.dry(command)
	}
	if steps, err := n.run("install"); err != nil || len(steps) > 0 {
		t.Errorf("install again = %q, %v, want no step", steps, err)
	}
	n.must(second(n.run("uninstall")))
	n.untouched()
	if _, err := os.Stat(n.at("/var/lib/edgehub/pki/ca.crt")); err != nil {
		t.Errorf("what the hub has recorded is gone: %v", err)
	}
	n.must(second(n.run("uninstall", func(o *install.Options) { o.Purge = true })))
	n.untouched()
	if _, err := os.Stat(n.at("/var/lib/edgehub")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("--purge has left what the hub has recorded: %v", err)
	}
}

// dry runs a command that must only say what it would do.
func (n *fakeNode) dry(command string) {
	n.t.Helper()
	before := n.tree()
	steps, err := n.run(command, dryRun)
	n.must(err)
	if diff := cmp.Diff(before, n.tree()); diff != "" {
		n.t.Errorf("%s --dry-run has changed files (-before +after):\n%s", command, diff)
	}
	for _, s := range steps {
		if !strings.HasPrefix(s, "Would: ") {
			n.t.Errorf("a step of %s --dry-run: %q", command, s)
		}
	}
}

// tree is what is in the scratch root but for what the hub writes: mode and content by path.
func (n *fakeNode) tree() map[string]string {
	n.t.Helper()
	all := map[string]string{}
	for _, dir := range []string{"/etc", "/var/lib/edgehub-install", "/usr"} {
		err := filepath.WalkDir(n.at(dir), func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			info, e := d.Info()
			if err = errors.Join(err, e); err != nil {
				return err
			}
			content := info.Mode().String()
			if info.Mode().IsRegular() {
				b, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				content += " " + string(b)
			}
			all[strings.TrimPrefix(path, n.root)] = content
			return nil
		})
		n.must(err)
	}
	return all
}

// broken are programs by what is wrong with them. They get the hub's arguments.
var broken = map[string]string{
	"ends":           "#!/bin/sh\necho it ends >&2\nexit 3\n",
	"is never ready": "#!/bin/sh\nexec sleep 1000\n",
}

func imageThat(what string) string { return "that-" + strings.ReplaceAll(what, " ", "-") }

// program writes a script, and returns its path.
func (n *fakeNode) program(name, text string) string {
	n.t.Helper()
	file := filepath.Join(n.t.TempDir(), strings.ReplaceAll(name, " ", "-"))
	n.must(os.WriteFile(file, []byte(text), 0o700))
	return file
}

// soon is enough for a version that works, and the time that a broken one costs.
func soon(o *install.Options) { o.ReadyTimeout = 8 * time.Second }

func skipCandidate(o *install.Options) { o.SkipCandidate = true }

// An upgrade to a version that works, then to such that do not; back by hand.
//
// Guards: a version that does not work is rolled back by itself, and not tried again.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t, cp.URL())
	n.programs["answers-500"] = n.answers500()
	for what, text := range broken {
		n.programs[imageThat(what)] = n.program(what, text)
	}
	n.must(second(n.run("install")))
	first := n.manifest()
	n.must(second(n.run("install", image("good:2"))))
	n.installed()
	good := n.manifest()
	if good == first {
		t.Fatal("an upgrade has not changed the manifest")
	}
	for name := range n.programs {
		if strings.HasPrefix(name, "good:") {
			continue
		}
		_, err := n.run("install", image(name), soon, skipCandidate)
		if !errors.Is(err, install.ErrRolledBack) {
			t.Fatalf("install of %s = %v, want ErrRolledBack", name, err)
		}
		n.installed()
		if n.manifest() != good {
			t.Errorf("after %s there is another manifest than before", name)
		}
		steps, err := n.run("install", image(name), soon, skipCandidate)
		if !errors.Is(err, install.ErrFailedBefore) || len(steps) > 0 {
			t.Errorf("install of %s again = %v with %q, want ErrFailedBefore and no step", name, err, steps)
		}
	}
	_, err := n.run("install", image("answers-500"), soon, skipCandidate, func(o *install.Options) { o.Retry = true })
	if !errors.Is(err, install.ErrRolledBack) {
		t.Errorf("install --retry of what has failed = %v, want ErrRolledBack", err)
	}
	n.installed()
	n.must(second(n.run("rollback")))
	n.installed()
	if n.manifest() != first {
		t.Error("rollback has not put back the version before")
	}
	if _, err := n.run("install", image("good:2")); !errors.Is(err, install.ErrFailedBefore) {
		t.Errorf("install of what was rolled back = %v, want ErrFailedBefore", err)
	}
	n.installed()
	n.must(second(n.run("rollback")))
	n.untouched()
}

func (n *fakeNode) manifest() string {
	n.t.Helper()
	b, err := os.ReadFile(n.at("/etc/kubernetes/manifests/edgehub.yaml"))
	n.must(err)
	return string(b)
}

// answers500 is a program that answers everything so, where the hub's metrics would be.
func (n *fakeNode) answers500() string {
	self, err := os.Executable()
	n.must(err)
	address := strings.TrimPrefix(n.options.HubFlags[1], "metrics-listen-address=")
	return n.program("answers500", "#!/bin/sh\nexec env "+as500+"="+address+" "+self+"\n")
}

// A first install that does not work leaves the node as it was.
func TestFirstInstallFails(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t, cp.URL())
	n.programs["bad"] = n.program("bad", broken["ends"])
	bad := n.programs["bad"]
	_, err := n.run("install", func(o *install.Options) { o.Executable = bad })
	if err == nil || !strings.Contains(err.Error(), "it ends") {
		t.Errorf("install with a candidate that ends = %v, want its last words", err)
	}
	if _, err := os.Stat(n.at("/etc/kubernetes/manifests/edgehub.yaml")); err == nil {
		t.Error("it was placed though the candidate has failed")
	}
	if _, err = n.run("install", image("bad"), soon, skipCandidate); !errors.Is(err, install.ErrRolledBack) {
		t.Errorf("install of what does not work = %v, want ErrRolledBack", err)
	}
	if n.starts != 1 {
		t.Errorf("kubelet was started %d times, want once", n.starts)
	}
	if _, err := n.run("install", func(o *install.Options) { o.KubeletUnit = "missing.service" }); err == nil || !strings.Contains(err.Error(), "missing.service is not-found") {
		t.Errorf("install with a unit that is not there = %v", err)
	}
	n.must(second(n.run("uninstall")))
	n.untouched()
}

// As a service of systemd's.
func TestSystemd(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t, cp.URL())
	n.options.Mode, n.options.Image = install.ModeSystemd, ""
	n.dry("install")
	n.must(second(n.run("install")))
	n.installed()
	if _, err := n.run("install", func(o *install.Options) { o.Mode, o.Image = install.ModeStaticPod, "good:1" }); err == nil || !strings.Contains(err.Error(), "uninstall it first") {
		t.Errorf("install in another mode = %v", err)
	}
	first := n.only("/usr/local/bin")
	other := n.program("other", "")
	b, err := os.ReadFile(hub)
	n.must(err)
	n.must(os.WriteFile(other, append(b, "another build"...), 0o700))
	n.must(second(n.run("install", func(o *install.Options) { o.Executable = other })))
	n.installed()
	if files := n.files("/usr/local/bin"); len(files) != 2 {
		t.Errorf("programs = %q, want the one before, too", files)
	}
	bad := n.program("bad", broken["is never ready"])
	if _, err := n.run("install", skipCandidate, soon, func(o *install.Options) { o.Executable = bad }); !errors.Is(err, install.ErrRolledBack) {
		t.Errorf("install of what does not work = %v, want ErrRolledBack", err)
	}
	n.installed()
	n.must(second(n.run("rollback")))
	n.installed()
	if files := n.files("/usr/local/bin"); !slices.Equal(files, first) {
		t.Errorf("programs after a rollback = %q, want %q", files, first)
	}
	n.must(second(n.run("uninstall")))
	n.untouched()
	n.systemd.mu.Lock()
	defer n.systemd.mu.Unlock()
	for _, want := range []string{"enable edgehub.service", "restart edgehub.service", "stop edgehub.service", "disable edgehub.service", "restart kubelet.service"} {
		if !slices.Contains(n.systemd.calls, want) {
			t.Errorf("systemd was never asked to %s: %q", want, n.systemd.calls)
		}
	}
}

func (n *fakeNode) files(dir string) (names []string) {
	n.t.Helper()
	entries, err := os.ReadDir(n.at(dir))
	n.must(err)
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

func (n *fakeNode) only(dir string) []string {
	n.t.Helper()
	names := n.files(dir)
	if len(names) != 1 {
		n.t.Fatalf("%s holds %q, want one file", dir, names)
	}
	return names
}

// Somebody restarts kubelet when told so.
func TestByHand(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t, cp.URL())
	byHand := func(o *install.Options) { o.KubeletRestart = "none" }
	_, err := n.run("install", byHand, soon)
	if !errors.Is(err, install.ErrRestartKubelet) {
		t.Errorf("install without a restart of kubelet = %v, want ErrRestartKubelet", err)
	}
	n.works()
	n.onStep = func(step string) {
		if strings.HasPrefix(step, "RESTART KUBELET NOW") {
			n.must(n.startKubelet())
		}
	}
	n.must(second(n.run("install", byHand)))
	n.installed()
	n.onStep = nil
	if _, err = n.run("uninstall", byHand, soon); err == nil || !strings.Contains(err.Error(), "not seen to work") {
		t.Errorf("uninstall without a restart of kubelet = %v", err)
	}
	n.works()
	if n.manifest() == "" {
		t.Error("the hub was removed under a kubelet that uses it")
	}
	n.must(n.startKubelet()) // by and by
	n.must(second(n.run("uninstall", byHand)))
	n.untouched()
}

// Without a link nothing is begun; what was removed comes back nevertheless.
func TestLinkDown(t *testing.T) {
	t.Parallel()
	l, err := link.New(t.Context(), cp.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	n := newFakeNode(t, l.URL())
	before := n.tree()
	l.Cut()
	if _, err := n.run("install"); !errors.Is(err, install.ErrLinkDown) {
		t.Errorf("install = %v, want ErrLinkDown", err)
	}
	n.must(l.Heal())
	delete(before, "/var/lib/edgehub-install")
	after := n.tree()
	for path := range after {
		if strings.HasPrefix(path, "/var/lib/edgehub-install") {
			delete(after, path)
		}
	}
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("install without a link has changed files (-before +after):\n%s", diff)
	}
	n.must(second(n.run("install")))
	n.installed()
	placed := n.manifest()
	l.Cut()
	for command, change := range map[string]func(*install.Options){"install": image("good:2"), "uninstall": soon, "rollback": soon} {
		if _, err := n.run(command, change, skipCandidate); !errors.Is(err, install.ErrLinkDown) {
			t.Errorf("%s = %v, want ErrLinkDown", command, err)
		}
	}
	if n.manifest() != placed {
		t.Error("something else was placed without a link")
	}
	n.must(os.Remove(n.at("/etc/kubernetes/manifests/edgehub.yaml")))
	n.must(second(n.run("install")))
	if n.manifest() != placed {
		t.Error("what was removed has come back as something else")
	}
	n.must(l.Heal())
	n.installed()
	n.must(second(n.run("uninstall")))
	n.untouched()
}

// Two at once.
func TestTwoInstallers(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t, cp.URL())
	n.hold(true)
	ended := make(chan error, 1)
	waits := make(chan struct{})
	o := n.options
	o.Progress = func(step string) {
		if step == "Wait until that version answers" {
			close(waits)
		}
	}
	go func() { ended <- install.Run(t.Context(), "install", o, nil) }()
	<-waits
	for _, command := range []string{"install", "uninstall", "rollback"} {
		if _, err := n.run(command); !errors.Is(err, install.ErrBusy) {
			t.Errorf("%s beside an install = %v, want ErrBusy", command, err)
		}
	}
	n.hold(false)
	n.must(<-ended)
	n.installed()
}

// What kubelet's kubeconfig must not be.
func TestRefuses(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t, cp.URL())
	n.must(second(n.run("install")))
	n.must(os.Remove(n.at("/var/lib/edgehub-install/kubelet.conf")))
	for _, command := range []string{"install", "uninstall", "rollback"} {
		if _, err := n.run(command); err == nil || !strings.Contains(err.Error(), "how it was before is not known") {
			t.Errorf("%s without a backup = %v", command, err)
		}
		n.works()
	}
	n.must(os.WriteFile(n.at("/var/lib/edgehub-install/kubelet.conf"), n.original, 0o600))
	n.must(second(n.run("uninstall")))
	n.untouched()
}
