// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"path/filepath"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

func TestNodeKnows(t *testing.T) {
	fs, key, server := memfs.New(), filepath.Join(t.TempDir(), "key"), newFakeServer()
	server.put("configmaps/a/c", "x")
	server.put("configmaps/a/d", "x")
	h := reopen(t, fs, server, key)
	gvr := schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	want := func(when, namespace, name, uid string, want bool) {
		t.Helper()
		if got := h.NodeKnows(gvr, namespace, name, uid); got != want {
			t.Errorf("%s: NodeKnows(%s/%s, %s) = %v, want %v", when, namespace, name, uid, got, want)
		}
	}
	want("nothing was asked", "a", "c", "u-c", false)
	h.body(alice, "/api/v1/configmaps")
	h.body(nodeUser, "/api/v1/namespaces/a/configmaps/c")
	h.body(nodeUser, "/api/v1/namespaces/a/configmaps")
	want("parts were asked, and all by another", "a", "c", "u-c", false)
	h.body(nodeUser, "/api/v1/configmaps")
	want("all was asked", "a", "c", "u-c", true)
	want("another uid", "a", "c", "u-0", false)
	want("no uid", "a", "c", "", false)
	want("another namespace", "b", "c", "u-c", false)
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	server.del("configmaps/a/c")
	h.body(nodeUser, "/api/v1/configmaps")
	want("gone", "a", "c", "u-c", false)
	want("from disk", "a", "d", "u-d", true)
}
