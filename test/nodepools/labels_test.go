// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package nodepools

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
)

// labels follow pools and nodes within seconds, and each finding is told once.
func (s *scene) labels() {
	s.createPool("l-host", spec{"hostNetwork": true}, nil)
	s.createPool("l-pods", spec{}, nil)
	for _, n := range []struct{ node, pool, label string }{
		{"l-1", "l-host", ""}, {"l-2", "l-host", "false"}, {"l-3", "l-pods", "true"}, {"l-4", "", "true"}, {"l-5", "l-later", ""}, {"l-6", "l-later", "true"}, {"l-7", "l-annotated", ""},
	} {
		labels := []string{}
		if n.label != "" {
			labels = []string{hostNetworkLabel, n.label}
		}
		s.createNode(n.node, n.pool, true, labels...)
	}
	s.wantLabels(map[string]string{"l-1": "true", "l-2": "true", "l-3": "", "l-4": ""})
	s.wantEvents("l-1", "LabelMissing")
	s.wantEvents("l-2", "LabelNotTrue")
	s.wantEvents("l-3", "LabelLeftOver")
	s.wantEvents("l-5", "PoolMissing")
	s.wantLabels(map[string]string{"l-5": "", "l-6": "true"}) // no such pool: left

	s.createPool("l-later", spec{"hostNetwork": true}, nil)
	s.createPool("l-annotated", spec{}, map[string]string{hostNetworkLabel: "true"})
	s.wantLabels(map[string]string{"l-5": "true", "l-6": "true", "l-7": "true"})

	s.setLabel("l-1", hostNetworkLabel, "")
	s.setLabel("l-2", hostNetworkLabel, "no")
	s.setLabel("l-4", hostNetworkLabel, "true")
	s.wantLabels(map[string]string{"l-1": "true", "l-2": "true", "l-4": ""})

	s.setLabel("l-1", poolLabel, "l-pods")
	s.setLabel("l-2", poolLabel, "")
	s.setLabel("l-3", poolLabel, "l-host")
	s.setLabel("l-4", poolLabel, "l-host")
	s.wantLabels(map[string]string{"l-1": "", "l-2": "", "l-3": "true", "l-4": "true"})
	s.setLabel("l-1", poolLabel, "l-host")
	s.setLabel("l-3", poolLabel, "l-pods")
	s.wantLabels(map[string]string{"l-1": "true", "l-3": ""})

	s.must(s.dynamic.Resource(v1beta2).Delete(s.Context(), "l-host", metav1.DeleteOptions{}))
	s.wantEvents("l-4", "LabelLeftOver", "LabelLeftOver", "LabelMissing", "PoolMissing")
	s.wantLabels(map[string]string{"l-1": "true", "l-4": "true"})
	s.createPool("l-host", spec{}, nil) // of another kind
	s.wantLabels(map[string]string{"l-1": "", "l-4": ""})

	since := time.Now()
	for range 3 {
		s.setReady("l-7", false)
		s.setReady("l-7", true)
	}
	s.wantEvents("l-6", "PoolMissing")
	s.eventually("the drift is counted", func(ctx context.Context) error {
		for drift, least := range map[string]float64{"LabelMissing": 6, "LabelNotTrue": 2, "LabelLeftOver": 5, "PoolMissing": 5} {
			if got := s.metric(ctx, `edgehub_pool_label_drift_total{drift="`+drift+`"}`); got < least {
				return fmt.Errorf("%s: %v, want at least %v", drift, got, least)
			}
		}
		return nil
	})
	requests, err := s.cp.Requests(since)
	s.must(err)
	for _, r := range requests {
		if r.Verb == "patch" && r.ObjectRef != nil && r.ObjectRef.Resource == "nodes" && r.ObjectRef.Name == "l-7" && r.ObjectRef.Subresource == "" {
			s.Errorf("a heartbeat has made the companion write: %s", r.RequestURI)
		}
	}
}

// wantEvents waits until a node has had just these Events, by their reasons in order.
func (s *scene) wantEvents(node string, reasons ...string) {
	s.Helper()
	s.eventually(fmt.Sprintf("node %s has Events %v", node, reasons), func(ctx context.Context) error {
		events, err := s.client.CoreV1().Events("default").List(ctx, metav1.ListOptions{
			FieldSelector: fields.Set{"involvedObject.kind": "Node", "involvedObject.name": node}.String(),
		})
		if err != nil {
			return err
		}
		var got []string
		for _, e := range events.Items {
			for range 1 + seriesOf(e) {
				got = append(got, e.Reason)
			}
		}
		slices.Sort(got)
		if !slices.Equal(got, reasons) {
			return fmt.Errorf("Events %v", got)
		}
		return nil
	})
}

// seriesOf is how often an Event came again.
func seriesOf(e corev1.Event) int {
	if e.Series == nil {
		return 0
	}
	return int(e.Series.Count) - 1
}

// attributes of pools are given to nodes, and taken away again.
func (s *scene) attributes() {
	s.createNode("t-1", "t-1", true, "mine", "1")
	s.patchNode("t-1", `{"spec":{"taints":[{"key":"own","effect":"NoSchedule"}]}}`)
	s.createPool("t-1", spec{
		"hostNetwork": true, "labels": spec{"mine": "2", "pool": "1", hostNetworkLabel: "false", poolLabel: "elsewhere"}, "annotations": spec{"pool": "1"},
		"taints": []any{spec{"key": "pool", "value": "1", "effect": "NoSchedule"}},
	}, nil)
	s.wantNode("t-1", map[string]string{"kept": "yes", "mine": "2", "pool": "1", poolLabel: "t-1", hostNetworkLabel: "true"}, map[string]string{"pool": "1"}, "own=:NoSchedule", "pool=1:NoSchedule")

	_, err := s.dynamic.Resource(v1beta2).Patch(s.Context(), "t-1", types.MergePatchType,
		[]byte(`{"spec":{"labels":{"mine":null,"pool":"2"},"annotations":null,"taints":[{"key":"other","effect":"NoSchedule"}]}}`), metav1.PatchOptions{})
	s.must(err)
	s.wantNode("t-1", map[string]string{"kept": "yes", "pool": "2", poolLabel: "t-1", hostNetworkLabel: "true"}, nil, "other=:NoSchedule", "own=:NoSchedule")

	s.createPool("t-2", spec{"labels": spec{"second": "1"}}, nil)
	s.setLabel("t-1", poolLabel, "t-2")
	s.wantNode("t-1", map[string]string{"kept": "yes", "second": "1", poolLabel: "t-2"}, nil, "own=:NoSchedule")
	s.setLabel("t-1", poolLabel, "")
	s.wantNode("t-1", map[string]string{"kept": "yes"}, nil, "own=:NoSchedule")
}

func (s *scene) wantNode(name string, labels, annotations map[string]string, taints ...string) {
	s.Helper()
	s.eventually("node "+name+" is as its pool has it", func(ctx context.Context) error {
		n, err := s.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		delete(n.Annotations, appliedKey)
		got := []string{}
		for _, t := range n.Spec.Taints {
			if t.Key != corev1.TaintNodeNotReady { // the API server's own
				got = append(got, fmt.Sprintf("%s=%s:%s", t.Key, t.Value, t.Effect))
			}
		}
		slices.Sort(got)
		if !maps.Equal(n.Labels, labels) || !maps.Equal(n.Annotations, annotations) || !slices.Equal(got, taints) {
			return fmt.Errorf("labels %v, annotations %v, taints %v", n.Labels, n.Annotations, got)
		}
		return nil
	})
}
