// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"context"
	"errors"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// checkStarted wants Events in the cluster by which kubelet tells of each boot since
// the cut that every pod has started, each once. They have waited in the hub, which was
// killed as often.
func (n *realNode) checkStarted(cut time.Time) {
	n.t.Helper()
	n.poll("kubelet's Events of the time without a link are in the cluster", func(ctx context.Context) error {
		list, err := n.cp.Client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "reason=Started"})
		if err != nil {
			return err
		}
		started := map[string]int{}
		for _, e := range list.Items {
			if !e.FirstTimestamp.Time.Before(cut.Truncate(time.Second)) {
				started[e.InvolvedObject.Name] += int(e.Count)
			}
		}
		var errs []error
		for _, p := range n.pods {
			if started[p.Name] != bootsEach {
				errs = append(errs, fmt.Errorf("pod %s started %d times by its Events, want %d", p.Name, started[p.Name], bootsEach))
			}
		}
		return errors.Join(errs...)
	})
}
