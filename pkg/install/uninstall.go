// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// ErrNothing means that there is nothing to roll back.
var ErrNothing = errors.New("edgehub is not installed on this node")

// uninstall takes kubelet off the hub, and then the hub off the node.
func (i *installer) uninstall(ctx context.Context) error {
	if i.o.DryRun && !i.host.exists(i.o.StateDir) {
		i.progress("Nothing to do: there is no " + i.o.StateDir)
		return nil
	}
	unlock, err := i.begin()
	if err != nil {
		return err
	}
	defer unlock()
	return i.leave(ctx)
}

func (i *installer) leave(ctx context.Context) error {
	k, err := i.readKubelet()
	switch {
	case err == nil:
		err = i.leaveKubelet(ctx, k)
	case i.state == (state{}) && !errors.Is(err, errNoWayBack):
		err = nil // nothing was ever done: kubelet's kubeconfig, whatever is wrong with it, is none of ours
	}
	if err != nil {
		return err
	}
	placements := []placement{i.placement}
	if i.state.Mode == "" { // the state was lost: what is there tells
		placements = i.strays()
	}
	for _, p := range placements {
		if err := p.remove(ctx); err != nil {
			return err
		}
	}
	if i.state.Mode != "" {
		if err := i.step("Wait until the hub has ended", func() error { return i.waitEnded(ctx) }); err != nil {
			return err
		}
	}
	if i.o.Purge {
		if err := i.step("Remove what the hub has recorded: "+i.at.DataDir, func() error { return i.host.removeAll(i.at.DataDir) }); err != nil {
			return err
		}
	}
	return i.removeState()
}

// strays are what an installer has placed on the node, by what is written there.
func (i *installer) strays() (found []placement) {
	for _, p := range []placement{staticPod{i}, unit{i}} {
		if b, err := p.placed(); err == nil && (bytes.Contains(b, []byte(placedAnnotation)) || bytes.HasPrefix(b, []byte(unitHead))) {
			found = append(found, p)
		}
	}
	return found
}

// leaveKubelet has kubelet work without the hub.
func (i *installer) leaveKubelet(ctx context.Context, k *kubelet) error {
	if !k.points && !i.state.Pointed {
		return nil
	}
	// With the hub it has at least what was recorded; without, nothing.
	if err := i.step("Ask the API server for Node "+k.name, func() error { return i.reachable(ctx, k.node) }); err != nil {
		return err
	}
	if err := i.save(func(s *state) { s.Pointed = true }); err != nil {
		return err
	}
	if err := i.pointBack(k); err != nil {
		return err
	}
	return i.restartIfPointed(ctx, k)
}

// endsWithin is longer than a kubelet takes to see that a manifest is gone (20 s) and to end
// its pod (30 s).
const endsWithin = time.Minute

// waitEnded waits until the hub has ended. A kubelet that was restarted a moment before the
// manifest went has been seen to run the pod on, and not to look again: it is restarted once
// more.
func (i *installer) waitEnded(ctx context.Context) error {
	err := i.waitGone(ctx, min(endsWithin, i.o.ReadyTimeout))
	if err == nil || ctx.Err() != nil || i.state.Mode != ModeStaticPod || i.o.KubeletRestart == restartByHand {
		return err
	}
	return i.restartKubelet(ctx, func() error { return i.waitGone(ctx, i.o.ReadyTimeout) })
}

// waitGone waits until nobody answers, so that nothing writes to what is removed.
func (i *installer) waitGone(ctx context.Context, limit time.Duration) error {
	return poll(ctx, limit, func(ctx context.Context) error {
		m, err := i.hubMetrics(ctx)
		if err != nil || !slices.Contains([]string{i.state.Good, i.state.Previous, i.state.Placing}, m.hash) {
			return nil
		}
		return errors.New("it answers yet")
	})
}

// removeState removes the state directory; the backup goes last.
func (i *installer) removeState() error {
	if !i.o.DryRun {
		if err := i.host.tidy(i.o.KubeletKubeconfig); err != nil {
			return err
		}
	}
	for _, name := range []string{credentialsDir, candidateDir, versionsDir, stateFile, backupFile} {
		path := i.inState(name)
		if !i.host.exists(path) {
			continue
		}
		if err := i.step("Remove "+path, func() error { return i.host.removeAll(path) }); err != nil {
			return err
		}
	}
	if !i.host.exists(i.o.StateDir) {
		return nil
	}
	return i.step("Remove "+i.o.StateDir, func() error { return i.host.removeAll(i.o.StateDir) })
}

// rollback goes back to the version before; without one, to no edgehub.
func (i *installer) rollback(ctx context.Context) error {
	unlock, err := i.begin()
	if err != nil {
		return err
	}
	defer unlock()
	if i.state.Mode == "" {
		return ErrNothing
	}
	if i.state.Previous == "" {
		return i.leave(ctx)
	}
	k, err := i.readKubelet()
	if err != nil {
		return err
	}
	to, err := i.stored(i.state.Previous)
	if err != nil {
		return fmt.Errorf("the version before: %w", err)
	}
	from := i.state.Good
	if err := i.preflight(ctx, k); err != nil {
		return err
	}
	if err := i.swap(ctx, k, to); err != nil {
		return err
	}
	err = i.save(func(s *state) { s.Failed, s.Why, s.Previous = from, "somebody has rolled it back", "" })
	if err != nil {
		return err
	}
	return errors.Join(i.ensureKubelet(ctx, k, true), i.prune())
}
