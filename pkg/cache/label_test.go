// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/watch"

	"github.com/edgehub/edgehub/pkg/codec"
)

// That a Node is alive can be written down later; what it is labelled cannot: after a
// crash without a link it would be in another pool.
func TestLabelsOfANodeAreUrgent(t *testing.T) {
	h := startHub(t, t.TempDir(), newFakeServer())
	l := h.logOf(logName{User: nodeUser.GetName(), Identity: identityOf(nodeUser, nil), Version: "v1", Resource: "nodes"})
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.newScope(Key{}, false)
	event := func(rv int, labels string) int64 {
		o, _, err := newObject(codec.Representation{}, fmt.Appendf(nil, `{"metadata":{"name":"n1","resourceVersion":"%d","labels":{%s}}}`, rv, labels))
		if err != nil {
			t.Fatal(err)
		}
		s.apply(watch.Modified, o)
		return s.objects[o.key].generation
	}
	first := event(10, `"pool":"a"`)
	if alive := event(11, `"pool":"a"`); alive != first {
		t.Error("a Node that is alive has another generation, want the same")
	}
	if moved := event(12, `"pool":"b"`); moved == first {
		t.Error("a Node with another label has the same generation, want another one")
	}
}
