// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// ensureAnswer waits for the version that is placed to answer; a watch does that by looking
// again.
func (i *installer) ensureAnswer(ctx context.Context, k *kubelet, v version) error {
	if i.o.DryRun || i.answers(ctx, k.node, v.hash) == nil {
		return nil
	}
	limit := i.o.ReadyTimeout
	if i.watching {
		limit = askAgain
	}
	if err := poll(ctx, limit, func(ctx context.Context) error { return i.answers(ctx, k.node, v.hash) }); err != nil {
		return fmt.Errorf("%w: %w", ErrSilent, err)
	}
	return nil
}

// answers wants that it is this version that answers, and that kubelet could use it.
func (i *installer) answers(ctx context.Context, n node, hash string) error {
	m, err := i.hubMetrics(ctx)
	if err != nil {
		return err
	}
	if m.hash != hash {
		return fmt.Errorf("version %q answers at %s, not %q", m.hash, i.at.Metrics, hash)
	}
	s, err := i.throughHub(n)
	if err != nil {
		return err
	}
	recorded, err := s.getNode(ctx, n.name)
	// What another version has recorded proves nothing of this one.
	if err == nil && recorded && i.state.Good != hash && i.reachable(ctx, n) == nil {
		err = errors.New("it answers from its record, although the API server answers")
	}
	return err
}

// swap puts a version in the place of what is there. If it does not answer in time, what was
// there comes back.
func (i *installer) swap(ctx context.Context, k *kubelet, v version) error {
	if err := i.store(v); err != nil {
		return err
	}
	err := i.save(func(s *state) {
		s.Mode, s.Placing, s.Paths = i.mode(), v.hash, i.o.paths()
		s.Pointed = s.Pointed || k.points // also where the state was lost
		if s.Good == "" {
			s.At = v.at
		}
	})
	if err != nil {
		return err
	}
	i.at = v.at
	if err := errors.Join(i.prepareDirs(), i.pointBack(k)); err != nil {
		return err
	}
	err = i.placement.place(ctx, v.content)
	placed := err == nil
	if placed {
		err = i.step("Wait until that version answers", func() error { return i.waitAnswer(ctx, k, v) })
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return err // the next run goes on from here
	case err != nil && i.state.Good == v.hash:
		// It has worked before, and may again. Without a link kubelet is no better off
		// without it.
		err = fmt.Errorf("%w: %w", ErrSilent, err)
		if i.reachable(ctx, k.node) != nil {
			return err
		}
		return errors.Join(err, i.restartIfPointed(ctx, k))
	case err != nil:
		// A version is not to blame for a full disk, nor for a link that went down.
		return i.wayBack(ctx, k, rejected{v, err, placed && i.reachable(ctx, k.node) == nil})
	}
	err = i.save(func(s *state) {
		if s.Good != v.hash {
			s.Previous = s.Good
		}
		s.Good, s.Placing, s.At = v.hash, "", v.at
	})
	if err != nil {
		return err
	}
	return i.prune()
}

func (i *installer) mode() string {
	if _, ok := i.placement.(unit); ok {
		return ModeSystemd
	}
	return ModeStaticPod
}

func (i *installer) waitAnswer(ctx context.Context, k *kubelet, v version) error {
	return poll(ctx, i.o.ReadyTimeout, func(ctx context.Context) error { return i.answers(ctx, k.node, v.hash) })
}

// store keeps a version as a way back.
func (i *installer) store(v version) error {
	if there, err := i.stored(v.hash); err == nil && bytes.Equal(there.content, v.content) {
		return nil
	}
	file := i.inState(versionsDir, v.hash)
	b, err := json.Marshal(storedVersion{v.at, string(v.content)})
	if err != nil {
		return err
	}
	return i.step("Keep the new version: "+file, func() error {
		if err := i.host.mkdir(i.inState(versionsDir), 0o700); err != nil {
			return err
		}
		return i.host.replace(file, b, 0o600)
	})
}

// prepareDirs makes what the hub does not make with the right mode by itself.
func (i *installer) prepareDirs() error {
	if i.host.exists(i.at.DataDir) {
		return nil
	}
	return i.step("Make the hub's directory: "+i.at.DataDir, func() error { return i.host.mkdir(i.at.DataDir, 0o700) })
}

// A rejected version has not answered.
type rejected struct {
	version
	why     error
	toBlame bool // it is not tried again
}

// wayBack puts back the version before, or nothing, and returns why.
func (i *installer) wayBack(ctx context.Context, k *kubelet, r rejected) error {
	i.progress("It does not work: " + r.why.Error())
	if i.state.Good == "" {
		// kubelet first: it may have the hub's address.
		if err := i.restartIfPointed(ctx, k); err != nil {
			return errors.Join(r.why, err)
		}
		if err := i.placement.remove(ctx); err != nil {
			return errors.Join(r.why, err)
		}
		return errors.Join(fmt.Errorf("%w to no edgehub: %w", ErrRolledBack, r.why), i.save(func(s *state) {
			r.remember(s)
			s.clear()
		}))
	}
	before, err := i.stored(i.state.Good)
	if err != nil {
		return errors.Join(r.why, fmt.Errorf("the version before: %w", err))
	}
	i.at = before.at
	if err := i.placement.place(ctx, before.content); err != nil {
		return errors.Join(r.why, err)
	}
	if err := i.save(r.remember); err != nil {
		return errors.Join(r.why, err)
	}
	if err := i.step("Wait until the version before answers", func() error { return i.waitAnswer(ctx, k, before) }); err != nil {
		return errors.Join(r.why, fmt.Errorf("the version before: %w", err), i.restartIfPointed(ctx, k))
	}
	return errors.Join(fmt.Errorf("%w to the version before: %w", ErrRolledBack, r.why), i.ensureKubelet(ctx, k, true), i.prune())
}

func (r rejected) remember(s *state) {
	s.Placing = ""
	if r.toBlame {
		s.Failed, s.Why = r.hash, firstLine(r.why.Error())
	}
}

func firstLine(s string) string {
	line, _, _ := bytes.Cut([]byte(s), []byte("\n"))
	return string(line[:min(len(line), 500)])
}

// prune removes versions that are no way back any more.
func (i *installer) prune() error {
	names, err := i.host.list(i.inState(versionsDir))
	if err != nil {
		return err
	}
	var kept [][]byte
	for _, name := range names {
		if !slices.Contains([]string{i.state.Good, i.state.Previous}, name) {
			if err := i.step("Forget version "+name, func() error { return i.host.remove(i.inState(versionsDir, name)) }); err != nil {
				return err
			}
			continue
		}
		v, err := i.stored(name)
		if err != nil {
			return err
		}
		kept = append(kept, v.content)
	}
	if i.o.DryRun {
		return nil // what is kept then is not known
	}
	return i.placement.prune(kept)
}
