// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package hostnetworkpool

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/filter"
)

const (
	// fillAfter is how long kubelet has to list all pods by itself.
	fillAfter     = 2 * time.Second
	maxFillPeriod = time.Minute
)

// fill asks for the pods that there are when kubelet goes on with a watch that it had
// before this process began, and so is told of changes alone.
func (o *Observer) fill(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-o.asked:
	}
	period := fillAfter
	for wait(ctx, period) && !o.hasAll() {
		if err := o.fillOnce(ctx); err != nil {
			klog.FromContext(ctx).V(4).Info("Pods of this node are not known", "reason", err)
		}
		period = min(2*period, maxFillPeriod)
	}
}

func (o *Observer) fillOnce(ctx context.Context) error {
	s := o.begin()
	err := o.cfg.Pods(ctx, func(kind watch.EventType, shape codec.Shape, bare []byte) { s.See(kind, filter.NewObject(shape, bare)) })
	if err == nil {
		s.Synced()
	}
	s.End(err == nil)
	return err
}

func (o *Observer) hasAll() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.whole
}
