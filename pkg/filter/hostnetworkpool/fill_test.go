// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package hostnetworkpool

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"k8s.io/apimachinery/pkg/watch"

	"github.com/edgehub/edgehub/pkg/codec"
)

// A kubelet that resumes its watch after a restart of the hub is told of no pod that it
// has already: the observer asks for them, until it has got them all.
func TestFill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, &events{t: t}, known)
		var asked atomic.Int32
		r.cfg.Pods = func(_ context.Context, see func(watch.EventType, codec.Shape, []byte)) error {
			n := asked.Add(1)
			bare, err := newPodNamed("p", false, 0).Marshal()
			if err != nil {
				t.Error(err)
			}
			see(watch.Added, protoPods, bare)
			if n == 1 {
				return errors.New("broken off")
			}
			return nil
		}
		r.run(func() {
			pass(10 * fillAfter)
			if asked.Load() != 0 {
				t.Errorf("pods were asked for %d times without a kubelet, want 0", asked.Load())
			}
			watching := r.Observe(kubelet("watch"))
			pass(fillAfter)
			settle()
			if d := r.Document(); asked.Load() != 1 || d.Pods != 1 || d.AllPods {
				t.Errorf("after a broken answer: asked %d times, %+v, want once and one pod, not all", asked.Load(), d)
			}
			pass(2 * fillAfter)
			settle()
			if d := r.Document(); asked.Load() != 2 || d.Pods != 1 || !d.AllPods || len(d.Findings) != 1 {
				t.Errorf("after a whole answer: asked %d times, %+v, want twice, and all pods", asked.Load(), d)
			}
			pass(10 * maxFillPeriod)
			if asked.Load() != 2 {
				t.Errorf("pods were asked for %d times, want 2", asked.Load())
			}
			watching.End(true)
		})
	})
}

// One that lists is listened to, and nothing more.
func TestNoFill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, &events{t: t}, known)
		var asked atomic.Int32
		r.cfg.Pods = func(context.Context, func(watch.EventType, codec.Shape, []byte)) error { asked.Add(1); return nil }
		r.run(func() {
			list := r.Observe(kubelet("list"))
			list.Synced()
			list.End(true)
			pass(maxFillPeriod)
			if asked.Load() != 0 || !r.Document().AllPods {
				t.Errorf("after kubelet's list pods were asked for %d times, want 0", asked.Load())
			}
		})
	})
}
