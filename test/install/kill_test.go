// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/edgehub/edgehub/pkg/install"
)

// killAt runs a command as a process of its own that kills itself before a step.
func (n *fakeNode) killAt(command string, step int, change func(*install.Options)) error {
	n.t.Helper()
	o := n.options
	change(&o)
	told, err := json.Marshal(killedInstaller{command, o, step})
	n.must(err)
	self, err := os.Executable()
	n.must(err)
	cmd := exec.CommandContext(n.t.Context(), self)
	cmd.Env = append(os.Environ(), asInstaller+"="+string(told))
	out, err := cmd.CombinedOutput()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signal() == syscall.SIGKILL {
		return nil
	}
	return fmt.Errorf("it was not killed at step %d: %w\n%s", step, err, out)
}

// An installer is killed with SIGKILL before each of its steps, one at a time.
//
// Guards: at every such moment kubelet's kubeconfig works, and the next run ends well.
func TestKilled(t *testing.T) {
	t.Parallel()
	same := func(*install.Options) {}
	installed := func(n *fakeNode) { n.must(second(n.run("install"))) }
	for _, tc := range []struct {
		name, command string
		before        func(*fakeNode)
		change        func(*install.Options)
		from          string            // the first step that counts; "": all do
		after         func(n *fakeNode) // what the next run has to do
	}{
		{"install", "install", func(*fakeNode) {}, same, "", (*fakeNode).installed},
		{"install by systemd", "install", func(n *fakeNode) { n.options.Mode = install.ModeSystemd }, same, "Copy the program", (*fakeNode).installed},
		{"upgrade", "install", installed, image("good:2"), "", (*fakeNode).installed},
		{"upgrade that fails", "install", installed, func(o *install.Options) {
			image("bad")(o)
			soon(o)
			skipCandidate(o)
		}, "Wait until that version", (*fakeNode).installed},
		{"rollback", "rollback", func(n *fakeNode) {
			installed(n)
			n.must(second(n.run("install", image("good:2"))))
		}, same, "Put kubelet's kubeconfig back", nil},
		{"uninstall", "uninstall", installed, same, "", (*fakeNode).untouched},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			prepared := func(t *testing.T) *fakeNode {
				n := newFakeNode(t, cp.URL())
				n.programs["bad"] = n.program("bad", broken["ends"])
				tc.before(n)
				return n
			}
			whole := prepared(t)
			steps, _ := whole.run(tc.command, tc.change)
			whole.end()
			first := slices.IndexFunc(steps, func(s string) bool { return strings.HasPrefix(s, tc.from) })
			if first < 0 || len(steps)-first < 5 {
				t.Fatalf("the steps are %q, want at least 5 from %q", steps, tc.from)
			}
			for step, name := range steps[first:] {
				t.Run("before "+name, func(t *testing.T) {
					t.Parallel()
					n := prepared(t)
					if err := n.killAt(tc.command, first+step, tc.change); err != nil {
						t.Fatal(err)
					}
					n.works()
					n.again(tc.command, tc.change)
					if tc.after != nil {
						tc.after(n)
					}
					n.must(second(n.run("uninstall")))
					n.untouched()
				})
			}
		})
	}
}

// again runs a command that was killed.
func (n *fakeNode) again(command string, change func(*install.Options)) {
	n.t.Helper()
	_, err := n.run(command, change)
	switch {
	case errors.Is(err, install.ErrRolledBack), errors.Is(err, install.ErrFailedBefore): // as it should be
	case errors.Is(err, install.ErrNothing):
	case err != nil:
		n.t.Errorf("%s again = %v", command, err)
	}
}
