// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/coreos/go-systemd/v22/dbus"
)

// ensureKubelet points kubelet at a hub that answers, and sees it come through. changed says
// that the hub is another one since, so that this is looked at anew.
func (i *installer) ensureKubelet(ctx context.Context, k *kubelet, changed bool) error {
	want, err := i.kubeconfigThroughHub(k.node)
	if err != nil {
		return err
	}
	if !bytes.Equal(k.raw, want) {
		changed = true
		if err := i.point(k, want); err != nil {
			return err
		}
	}
	if !changed && i.state.Through {
		return nil
	}
	err = i.step("Wait until kubelet comes through the hub", func() error { return i.ensureThrough(ctx, k) })
	if err != nil {
		return err
	}
	return i.save(func(s *state) { s.Through, s.FellBack = true, false })
}

// point replaces kubelet's kubeconfig, after it was kept.
func (i *installer) point(k *kubelet, want []byte) error {
	backup := i.inState(backupFile)
	if there, err := i.host.read(backup); !k.points && (err != nil || !bytes.Equal(there, k.raw)) {
		if err := i.step("Keep kubelet's kubeconfig: "+backup, func() error { return i.host.replace(backup, k.raw, 0o600) }); err != nil {
			return err
		}
	}
	err := i.save(func(s *state) {
		sum := sha256.Sum256(want)
		written := hex.EncodeToString(sum[:])
		// A kubelet that comes through by other words must read these.
		s.Through = s.Through && s.Written == written
		s.Pointed, s.Written = true, written
	})
	if err != nil {
		return err
	}
	return i.step("Point kubelet's kubeconfig at the hub: "+i.o.KubeletKubeconfig, func() error {
		return i.replaceKubeconfig(k, want, true)
	})
}

// replaceKubeconfig does not overwrite what somebody else has written since it was read.
func (i *installer) replaceKubeconfig(k *kubelet, with []byte, points bool) error {
	now, err := i.host.read(i.o.KubeletKubeconfig)
	if err == nil && !bytes.Equal(now, k.raw) {
		err = fmt.Errorf("%s: %w", i.o.KubeletKubeconfig, errMeddled)
	}
	if err == nil {
		err = i.host.replace(i.o.KubeletKubeconfig, with, 0)
	}
	if err == nil {
		k.raw, k.points = with, points
	}
	return err
}

// pointBack puts kubelet's kubeconfig back as it was, byte for byte, unless it is somebody
// else's by now. kubelet is not restarted.
func (i *installer) pointBack(k *kubelet) error {
	if !k.points {
		return nil
	}
	return i.step("Put kubelet's kubeconfig back: "+i.o.KubeletKubeconfig, func() error {
		return i.replaceKubeconfig(k, k.original, false)
	})
}

// ensureThrough restarts kubelet unless it comes through the hub already, and if it does not
// after that, undoes it.
func (i *installer) ensureThrough(ctx context.Context, k *kubelet) error {
	err := errPast
	if i.state.Through {
		// Without a link nothing can be seen, and nothing is to be gained by a restart.
		if errors.Is(i.reachable(ctx, k.node), ErrLinkDown) {
			return nil
		}
		err = i.waitThrough(ctx, k, false)
	}
	// Another look, or another run, does better than a restart.
	later := func() bool {
		return err == nil || ctx.Err() != nil || errors.Is(err, errMeddled) || i.watching && errors.Is(err, ErrSilent)
	}
	if later() {
		return err
	}
	err = i.restartKubelet(ctx, func() error { return i.waitThrough(ctx, k, true) })
	if later() {
		return err
	}
	switch down := i.reachable(ctx, k.node); {
	case errors.Is(down, ErrLinkDown):
		return down // the next run sees
	case i.o.KubeletRestart == restartByHand:
		return fmt.Errorf("%w: %w; its kubeconfig %s leads to edgehub now", ErrRestartKubelet, err, i.o.KubeletKubeconfig)
	}
	i.progress("It does not: " + err.Error())
	return i.undoKubelet(ctx, k, err)
}

var (
	errPast    = errors.New("it renews its Lease, but not through the hub")
	errMeddled = errors.New("somebody else has written kubelet's kubeconfig meanwhile")
)

const (
	// maxPast is how often in a row kubelet is seen to go past the hub until that counts: what
	// has just been renewed may not be counted yet.
	maxPast = 4
	// silentFor is longer than a hub takes to come back by itself.
	silentFor = 10 * time.Second
	// byHandFor is how long a look waits for somebody; kubelet renews its Lease every 10 s.
	byHandFor = 30 * time.Second
)

// waitThrough wants a Lease that was renewed after now, and through the hub. It gives up when
// somebody meddles; without patience when kubelet has gone past the hub; and in a watch, that
// has an answer to that, when the hub is silent.
func (i *installer) waitThrough(ctx context.Context, k *kubelet, patient bool) error {
	start, past := since(), 0
	heard := start
	before, err := i.hubMetrics(ctx)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrSilent, err)
	}
	hub, err := i.throughHub(k.node)
	if err != nil {
		return err
	}
	limit := i.o.ReadyTimeout
	if i.watching && i.o.KubeletRestart == restartByHand {
		limit = min(limit, byHandFor) // others want to look, too
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	err = poll(ctx, limit, func(ctx context.Context) error {
		if conf, err := i.host.read(i.o.KubeletKubeconfig); err == nil && !bytes.Equal(conf, k.raw) {
			cancel(errMeddled)
		}
		renewed, err := hub.renewed(ctx, k.name)
		now, err2 := i.hubMetrics(ctx)
		switch {
		case err2 != nil:
			if i.watching && time.Since(heard) > silentFor {
				cancel(ErrSilent)
			}
			return err2
		case err != nil:
			return err
		case !renewed.After(start):
			err = fmt.Errorf("the Lease of Node %s was last renewed at %v", k.name, renewed)
		case now.renewed > before.renewed:
			return nil
		default:
			if past++; past == maxPast && !patient {
				cancel(errPast)
			}
			err = errPast
		}
		heard = time.Now()
		before.renewed = min(before.renewed, now.renewed) // a hub that was started anew counts anew
		return err
	})
	if cause := context.Cause(ctx); err != nil && (errors.Is(cause, errPast) || errors.Is(cause, errMeddled) || errors.Is(cause, ErrSilent)) {
		return cause
	}
	return err
}

// undoKubelet takes kubelet off a hub that it does not get along with, and removes that.
func (i *installer) undoKubelet(ctx context.Context, k *kubelet, why error) error {
	r := rejected{version{hash: i.state.Good}, why, i.reachable(ctx, k.node) == nil}
	if err := i.pointBack(k); err != nil {
		return errors.Join(why, err)
	}
	if err := i.save(r.remember); err != nil {
		return errors.Join(why, err)
	}
	if err := i.restartIfPointed(ctx, k); err != nil {
		return errors.Join(why, err)
	}
	if err := i.placement.remove(ctx); err != nil {
		return errors.Join(why, err)
	}
	err := i.save(func(s *state) { s.Good, s.Previous = "", ""; s.clear() })
	return errors.Join(fmt.Errorf("%w to no edgehub: kubelet does not come through it: %w", ErrRolledBack, why), err)
}

// restartIfPointed makes a kubelet leave the hub whose kubeconfig does not lead there any
// more.
func (i *installer) restartIfPointed(ctx context.Context, k *kubelet) error {
	if !i.state.Pointed {
		return nil
	}
	// Without a link a restart takes kubelet what it has, and nothing can be seen of it.
	if !i.o.DryRun {
		if err := i.reachable(ctx, k.node); err != nil {
			return err
		}
	}
	err := i.step("Wait until kubelet works without the hub", func() error {
		return i.restartKubelet(ctx, func() error { return i.waitDirect(ctx, k) })
	})
	if err != nil {
		return fmt.Errorf("kubelet's kubeconfig %s leads to the API server again, but kubelet was not seen to work: %w", i.o.KubeletKubeconfig, err)
	}
	return i.save(func(s *state) { s.Pointed, s.Through = false, false })
}

// restartKubelet restarts it, or has somebody do it, and then waits.
func (i *installer) restartKubelet(ctx context.Context, wait func() error) error {
	if i.o.KubeletRestart == restartByHand {
		i.progress("RESTART KUBELET NOW, such as by: systemctl restart " + i.o.KubeletUnit)
		return wait()
	}
	i.progress("Restart kubelet by systemd: " + i.o.KubeletUnit)
	err := i.bySystemd(ctx, func(ctx context.Context, c *dbus.Conn) error { return job(ctx, c, dbusRestart, i.o.KubeletUnit) })
	if err != nil {
		return err
	}
	return wait()
}

// waitDirect wants a Lease that was renewed after now by the API server's own word, and not
// through the hub; twice if nobody knows whether kubelet was restarted, since the first
// time may not be counted yet.
func (i *installer) waitDirect(ctx context.Context, k *kubelet) error {
	s, err := i.direct(k.node)
	if err != nil {
		return err
	}
	start := since()
	times := 1
	if i.o.KubeletRestart == restartByHand {
		times = 2
	}
	missing := times
	before, hubErr := i.hubMetrics(ctx)
	return poll(ctx, i.o.ReadyTimeout, func(ctx context.Context) error {
		renewed, err := s.renewed(ctx, k.name)
		if err != nil {
			return err
		}
		if !renewed.After(start) {
			return fmt.Errorf("the Lease of Node %s was last renewed at %v", k.name, renewed)
		}
		// Nobody can come through a hub that is not there.
		if now, err := i.hubMetrics(ctx); hubErr == nil && err == nil && now.renewed != before.renewed {
			start, before, missing = renewed, now, times
			return errors.New("it comes through the hub yet")
		}
		if missing--; missing > 0 {
			start = renewed
			return errors.New("it has renewed its Lease only once")
		}
		return nil
	})
}
