// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"context"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/util/workqueue"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
)

type queue = workqueue.TypedRateLimitingInterface[request]

// add asks for looks; there is no pool without a name.
func add(q queue, requests []request) {
	for _, r := range requests {
		if r != (request{}) {
			q.Add(r)
		}
	}
}

// nodeHandler keeps the facts about nodes, and asks for a look at those whose metadata or
// taints have changed: most updates are heartbeats.
func (f *facts) nodeHandler() handler.TypedEventHandler[*corev1.Node, request] {
	return handler.TypedFuncs[*corev1.Node, request]{
		CreateFunc: func(_ context.Context, e event.TypedCreateEvent[*corev1.Node], q queue) {
			add(q, append(f.setNode(e.Object), request{node: e.Object.Name}))
		},
		UpdateFunc: func(_ context.Context, e event.TypedUpdateEvent[*corev1.Node], q queue) {
			add(q, f.setNode(e.ObjectNew))
			if was, is := e.ObjectOld, e.ObjectNew; was.UID != is.UID || !maps.Equal(was.Labels, is.Labels) || !maps.Equal(was.Annotations, is.Annotations) ||
				!slices.EqualFunc(was.Spec.Taints, is.Spec.Taints, sameTaint) {
				add(q, []request{{node: is.Name}})
			}
		},
		DeleteFunc: func(_ context.Context, e event.TypedDeleteEvent[*corev1.Node], q queue) {
			add(q, append(f.removeNode(e.Object.Name), request{node: e.Object.Name}))
		},
	}
}

// podHandler keeps the facts about pods.
func (f *facts) podHandler() handler.TypedEventHandler[*corev1.Pod, request] {
	return handler.TypedFuncs[*corev1.Pod, request]{
		CreateFunc: func(_ context.Context, e event.TypedCreateEvent[*corev1.Pod], q queue) {
			add(q, f.setPod(nil, e.Object))
		},
		UpdateFunc: func(_ context.Context, e event.TypedUpdateEvent[*corev1.Pod], q queue) {
			add(q, f.setPod(e.ObjectOld, e.ObjectNew))
		},
		DeleteFunc: func(_ context.Context, e event.TypedDeleteEvent[*corev1.Pod], q queue) {
			add(q, f.setPod(e.Object, nil))
		},
	}
}
