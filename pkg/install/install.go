// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package install puts the hub onto a node, points kubelet at it, upgrades it, and takes it
// away: from a shell, or from a DaemonSet's pod in which the host's / is mounted elsewhere.
// It also writes kubeconfigs for the hub's other clients.
//
// # The order of steps
//
// At every moment kubelet's kubeconfig is one that works, so that a node that loses power, or
// an installer that is killed, leaves a kubelet that can start:
//
//   - The hub comes first, kubelet second. A new version is run as a candidate beside
//     everything else before anything is changed, and then placed; kubelet's kubeconfig
//     leads to the hub only after the one that is placed has answered kubelet's own question
//     to kubelet's own credential.
//   - While a version is replaced, the kubeconfig on the disk is the original one, that leads
//     to the API server. kubelet is not restarted for that: it goes on with the hub's address,
//     and finds a hub there again some seconds later, the new one or the one before.
//   - In the other direction kubelet comes first, the hub second: the original kubeconfig is
//     put back, kubelet is restarted and seen to renew its Lease, and only then the hub goes.
//   - The backup is on the disk before the kubeconfig is replaced, and goes last.
//   - Every file is replaced as a whole, and is on the disk before the next step.
//
// Nothing is a script with a position in it. Each run looks at what is there and does what is
// missing, so a run that was killed is just run again; what cannot be seen by looking is in
// the state file, which is written before what it tells of is done.
package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/coreos/go-systemd/v22/dbus"
	"github.com/spf13/pflag"

	"github.com/edgehub/edgehub/pkg/cmdline"
)

var (
	// ErrLinkDown means that the API server does not answer: nothing is changed then, since
	// nobody could tell whether the change is a good one.
	ErrLinkDown = errors.New("the API server does not answer; try again when the link is up")
	// ErrRolledBack means that a version did not work, and that what was there before is
	// there again.
	ErrRolledBack = errors.New("rolled back")
	// ErrFailedBefore means that this version has failed on this node, and is not tried again
	// without --retry.
	ErrFailedBefore = errors.New("this version has failed on this node before; --retry tries it again")
	// ErrSilent means that the hub that is wanted, and placed, does not answer.
	ErrSilent = errors.New("the hub does not answer")
	// ErrRestartKubelet means that somebody has to restart kubelet by hand.
	ErrRestartKubelet = errors.New("kubelet has not been restarted yet")
)

// An installer is one run, or the looks of a watch.
type installer struct {
	command     string
	o           Options
	host        host
	placement   placement
	state       state
	out         io.Writer
	programHash string
	at          hubAt // of the version that is, or is to be, placed
	// watching: a silent hub is not waited for, there will be another look.
	watching bool
	// mayPoint is asked before kubelet is pointed at a hub that is no new one. nil: it may be.
	mayPoint func(k *kubelet) error
}

// Commands are the words that Main takes first.
func Commands() []string { return []string{"install", "uninstall", "rollback"} }

// Main does what a command line says whose first word is one of Commands, and prints each
// step to out. checkHubFlags says what is wrong with a command line of the hub. Help is
// printed to out, and pflag.ErrHelp returned.
func Main(ctx context.Context, args []string, out io.Writer, checkHubFlags func([]string) error) error {
	command := args[0]
	o := DefaultOptions()
	o.CheckHubFlags = checkHubFlags
	flags := pflag.NewFlagSet("edgehub "+command, pflag.ContinueOnError)
	flags.SetOutput(out)
	flags.SortFlags = false
	o.AddFlags(flags, command)
	if err := cmdline.Parse(flags, args[1:]); err != nil {
		return err
	}
	if err := o.Validate(command); err != nil {
		return err
	}
	return Run(ctx, command, o, out)
}

// Run does one of Commands with options that have been validated. With Watch it goes on until
// ctx ends. Two at once on a node: the second gets ErrBusy.
func Run(ctx context.Context, command string, o Options, out io.Writer) error {
	i := &installer{o: o, host: host{o.Root}, out: out, command: command}
	switch command {
	case "uninstall":
		return i.uninstall(ctx)
	case "rollback":
		return i.rollback(ctx)
	}
	if o.Watch && !o.DryRun {
		return newWatch(i).Run(ctx)
	}
	return i.install(ctx)
}

// progress tells of a step.
func (i *installer) progress(step string) {
	if i.o.Progress != nil {
		i.o.Progress(step)
		return
	}
	fmt.Fprintln(i.out, step)
}

// step takes one that changes something, or waits for that; in a dry run it is only told of.
func (i *installer) step(name string, do func() error) error {
	if i.o.DryRun {
		i.progress("Would: " + name)
		return nil
	}
	i.progress(name)
	return do()
}

// begin loads what is known, and settles where the hub lives: where it is, else as wanted.
func (i *installer) begin() (unlock func(), err error) {
	if unlock, err = i.lock(); err != nil {
		return nil, err
	}
	if err := i.load(); err != nil {
		unlock()
		return nil, err
	}
	mode := i.state.Mode
	if mode == "" {
		mode = i.o.Mode
	}
	i.at = i.o.hubAt()
	if i.state.At != (hubAt{}) {
		i.at = i.state.At
	}
	if p := i.state.Paths; i.command != "install" && p != (paths{}) {
		i.o.KubeletKubeconfig, i.o.KubeletUnit, i.o.StaticPodDir, i.o.UnitDir, i.o.BinDir = p.KubeletKubeconfig, p.KubeletUnit, p.StaticPodDir, p.UnitDir, p.BinDir
	}
	i.placement = staticPod{i}
	if mode == ModeSystemd {
		i.placement = unit{i}
	}
	return unlock, nil
}

// install brings the node to what is wanted.
func (i *installer) install(ctx context.Context) error {
	unlock, err := i.begin()
	if err != nil {
		return err
	}
	defer unlock()
	if err := i.sameInstall(); err != nil {
		return err
	}
	k, err := i.readKubelet()
	if err != nil {
		return err
	}
	v, err := i.wanted(k)
	if err != nil {
		return err
	}
	if err := i.forget(k); err != nil {
		return err
	}
	if i.state.Failed != v.hash {
		err := i.ensure(ctx, k, v)
		if good := i.state.Good; errors.Is(err, ErrLinkDown) && good != "" && good != v.hash {
			// Until the link is back the present version is looked after.
			if g, e := i.stored(good); e == nil {
				err = errors.Join(err, i.ensure(ctx, k, g))
			}
		}
		return err
	}
	before := fmt.Errorf("%w: %s", ErrFailedBefore, i.state.Why)
	switch i.state.Good {
	case "":
		return before
	case v.hash: // a run was killed while it undid that
		return i.undoKubelet(ctx, k, before)
	}
	// What it was rolled back to is looked after as well.
	if v, err = i.stored(i.state.Good); err != nil {
		return errors.Join(before, err)
	}
	return errors.Join(before, i.ensure(ctx, k, v))
}

// sameInstall refuses what cannot be changed while kubelet has the hub to talk to.
func (i *installer) sameInstall() error {
	s, first := i.state, "; uninstall it first"
	switch now := i.o.paths(); {
	case s.Mode != "" && s.Mode != i.o.Mode:
		return fmt.Errorf("--mode: edgehub is installed as %s%s", s.Mode, first)
	case s.Paths != (paths{}) && s.Paths != now:
		return fmt.Errorf("edgehub is installed with other paths: %s, now %s%s", s.Paths, now, first)
	case s.Pointed && s.At.URL != i.o.hubAt().URL:
		return fmt.Errorf("--hub-flag: listen-address: kubelet reaches edgehub at %s%s", s.At.URL, first)
	}
	return nil
}

// forget drops what is not so any more: what is to be tried again, and that kubelet comes
// through the hub if somebody else has written its kubeconfig, as kubeadm does.
func (i *installer) forget(k *kubelet) error {
	retry := i.o.Retry
	i.o.Retry = false // a watch tries again once
	return i.save(func(s *state) {
		if retry {
			s.Failed, s.Why = "", ""
		}
		if s.Pointed && !k.points && s.Placing == "" {
			s.Through = false
		}
	})
}

// ensure brings the node to a version.
func (i *installer) ensure(ctx context.Context, k *kubelet, v version) error {
	changed, err := i.ensureHub(ctx, k, v)
	if err == nil && !changed && i.mayPoint != nil {
		err = i.mayPoint(k)
	}
	if err != nil {
		return err
	}
	return i.ensureKubelet(ctx, k, changed)
}

// ensureHub sees to it that a version is placed and answers.
func (i *installer) ensureHub(ctx context.Context, k *kubelet, v version) (changed bool, err error) {
	placed, err := i.placement.placed()
	if err != nil {
		return false, err
	}
	proved := i.state.Good == v.hash
	if proved {
		i.at = v.at
	}
	if proved && bytes.Equal(placed, v.content) {
		if err := i.writeInline(k.node); err != nil {
			return false, err
		}
		return false, i.ensureAnswer(ctx, k, v)
	}
	if !proved {
		// What somebody has removed needs no trial, and must come back while the link is
		// down, too.
		if err := i.preflight(ctx, k); err != nil {
			return false, err
		}
	}
	if err := i.writeInline(k.node); err != nil {
		return false, err
	}
	if !proved && !i.o.SkipCandidate {
		if err := i.step("Try this program as a hub beside everything else", func() error { return i.tryCandidate(ctx, k.node) }); err != nil {
			return false, err
		}
	}
	return true, i.swap(ctx, k, v)
}

// preflight finds out beforehand what would fail in the middle.
func (i *installer) preflight(ctx context.Context, k *kubelet) error {
	if err := i.step("Ask the API server for Node "+k.name, func() error { return i.reachable(ctx, k.node) }); err != nil {
		return err
	}
	if i.o.KubeletRestart == restartByHand {
		return nil
	}
	return i.step("Ask systemd for "+i.o.KubeletUnit, func() error {
		return i.bySystemd(ctx, func(ctx context.Context, c *dbus.Conn) error {
			p, err := c.GetUnitPropertyContext(ctx, i.o.KubeletUnit, "LoadState")
			if err == nil && p.Value.Value() != "loaded" {
				err = fmt.Errorf("--kubelet-unit: %s is %v", i.o.KubeletUnit, p.Value.Value())
			}
			return err
		})
	})
}

// tryCandidate blames the link for what the link has done.
func (i *installer) tryCandidate(ctx context.Context, n node) error {
	err := i.candidate(ctx, n)
	if err != nil && ctx.Err() == nil {
		if down := i.reachable(ctx, n); errors.Is(down, ErrLinkDown) {
			return down
		}
	}
	return err
}

// since is when something begins that a Lease is to be newer than; Leases have microseconds.
func since() time.Time { return time.Now().Truncate(time.Microsecond) }
