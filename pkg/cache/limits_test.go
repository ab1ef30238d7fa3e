// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

func TestLeastRecentlyUsedScopesAreEvicted(t *testing.T) {
	server := newFakeServer()
	for i := range 8 {
		server.put(fmt.Sprintf("configmaps/ns%d/m", i), "x")
	}
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.MaxScopes = 3 })
	w := h.watchAs(nodeUser, "/api/v1/namespaces/ns0/configmaps"+watchList)
	w.want("ADDED ns0/m=x@101", "SYNCED @108")
	for i := 1; i < 8; i++ {
		h.body(alice, fmt.Sprintf("/api/v1/namespaces/ns%d/configmaps", i))
	}
	eventually(t, "only three scopes are left", func() bool { return h.count(func(*scope) int { return 1 }) == 3 })
	server.setDown(true)
	h.refusedGet(http.StatusServiceUnavailable, alice, "/api/v1/namespaces/ns1/configmaps")
	h.body(alice, "/api/v1/namespaces/ns7/configmaps")
	h.body(nodeUser, "/api/v1/namespaces/ns0/configmaps") // watched: not evicted
}

func TestBytesOnDiskAreBounded(t *testing.T) {
	server := newFakeServer()
	const limit = 4 << 20
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.MaxBytes = limit })
	for i := range 30 {
		server.put(fmt.Sprintf("configmaps/ns%d/m", i), strings.Repeat("x", 500_000))
		h.body(alice, fmt.Sprintf("/api/v1/namespaces/ns%d/configmaps", i))
		if err := h.flushAll(func(*log) bool { return true }); err != nil {
			t.Fatal(err)
		}
		h.evict()
		if err := h.flushAll(func(*log) bool { return true }); err != nil {
			t.Fatal(err)
		}
	}
	if total, _ := h.journalSize(); total > limit+2<<20 {
		t.Errorf("journal has %d bytes, limit %d", total, limit)
	}
	server.setDown(true)
	h.body(alice, "/api/v1/namespaces/ns29/configmaps")
	h.refusedGet(http.StatusServiceUnavailable, alice, "/api/v1/namespaces/ns0/configmaps")
}

func TestTooLargeScopePassesThrough(t *testing.T) {
	server := newFakeServer()
	for i := range 20 {
		server.put(fmt.Sprintf("configmaps/a/m%02d", i), "x")
	}
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.MaxObjects = 10 })
	if got := texts(t, h.body(alice, allMaps)); len(got) != 20 {
		t.Errorf("list = %d items, want 20", len(got))
	}
	w := h.watchAs(alice, allMaps+watchList)
	for range 21 {
		if got := w.next(); strings.HasPrefix(got, "end") {
			break // the feed finds out; the client asks again, and is passed through
		}
	}
	w = h.watchAs(alice, allMaps+watchList)
	for i := range 20 {
		w.want(fmt.Sprintf("ADDED a/m%02d=x@%d", i, 101+i))
	}
	w.want("SYNCED @120")
	server.setDown(true)
	h.refusedGet(http.StatusServiceUnavailable, alice, allMaps)
}

func TestMetrics(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	registry := prometheus.NewPedanticRegistry()
	h := startHub(t, t.TempDir(), server, func(c *Config) { c.Registerer = registry })
	w := h.watchAs(nodeUser, allMaps+watchList)
	w.want("ADDED a/one=1@101", "SYNCED @101")
	if problems, err := testutil.GatherAndLint(registry); err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
	want := `
# HELP edgehub_cache_feeds_live Feeds that follow the API server now.
# TYPE edgehub_cache_feeds_live gauge
edgehub_cache_feeds_live 1
# HELP edgehub_cache_watchers Local watches served by feeds.
# TYPE edgehub_cache_watchers gauge
edgehub_cache_watchers 1
`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "edgehub_cache_feeds_live", "edgehub_cache_watchers"); err != nil {
		t.Error(err)
	}
}

// FuzzScopeKey holds keys to three things: two questions that differ have
// different keys, a key asks the API server for itself again, and it survives
// the disk.
func FuzzScopeKey(f *testing.F) {
	f.Add("a", "app=x", "metadata.name=one", "b", "app in (x,y)", "spec.nodeName=n1,status.phase!=Failed")
	f.Add("", "", "", "", "!x", "metadata.name==one,metadata.name=two")
	f.Add("a", "a=b,c=d", "a=b\\,c", "a", "c=d,a=b", "a=b\\=c")
	f.Fuzz(func(t *testing.T, ns1, labels1, fields1, ns2, labels2, fields2 string) {
		one, ok1 := keyOf(ns1, labels1, fields1)
		two, ok2 := keyOf(ns2, labels2, fields2)
		if !ok1 || !ok2 {
			return
		}
		text, err := json.Marshal(one)
		var back Key
		if err == nil {
			err = json.Unmarshal(text, &back)
		}
		if err == nil && strings.ToValidUTF8(ns1+labels1+fields1, "") == ns1+labels1+fields1 && back != one {
			t.Errorf("key after the disk: %v", cmp.Diff(one, back))
		}
		q := one.query()
		again, ok := keyOf(one.Namespace, q.Get("labelSelector"), q.Get("fieldSelector"))
		if !ok || again != one {
			t.Errorf("%q asks for %v, and that is the key %v", one, q, again)
		}
		if one == two && (ns1 != ns2) {
			t.Errorf("namespaces %q and %q have one key", ns1, ns2)
		}
		if !one.covers(one) || one.covers(two) && two.covers(one) && one != two {
			t.Errorf("covers is no order: %v, %v", one, two)
		}
	})
}

// keyOf reads a list's key.
func keyOf(namespace, labelSelector, fieldSelector string) (Key, bool) {
	v := url.Values{"labelSelector": {labelSelector}, "fieldSelector": {fieldSelector}}
	req := httptest.NewRequest(http.MethodGet, "/x?"+v.Encode(), nil)
	req.Header.Set("Accept", "application/json")
	ctx := request.WithUser(req.Context(), alice)
	q, err := parseQuery(req.WithContext(ctx), &request.RequestInfo{Verb: "list", Resource: "configmaps", APIVersion: "v1", Namespace: namespace})
	return q.key, err == nil && !q.opaque
}

// FuzzIdentity: two identities share a hash only if they are the same.
func FuzzIdentity(f *testing.F) {
	f.Add("alice", "", "g1", "g2", "alice", "", "g1g2", "")
	f.Add("a", "b", "", "", "ab", "", "", "")
	f.Fuzz(func(t *testing.T, name1, uid1, g1, h1, name2, uid2, g2, h2 string) {
		a := &user.DefaultInfo{Name: name1, UID: uid1, Groups: []string{g1, h1}}
		b := &user.DefaultInfo{Name: name2, UID: uid2, Groups: []string{g2, h2}}
		same := name1 == name2 && uid1 == uid2 && (g1 == g2 && h1 == h2 || g1 == h2 && h1 == g2)
		if got := identityOf(a, nil) == identityOf(b, nil); got != same {
			t.Errorf("identityOf(%v) == identityOf(%v) = %v, want %v", a, b, got, same)
		}
		if identityOf(a, http.Header{"Impersonate-User": {name2}}) == identityOf(a, nil) {
			t.Error("impersonation does not count")
		}
	})
}

func FuzzObjectMeta(f *testing.F) {
	f.Add(encodeObjectMeta(&object{key: "a/b", rv: "12", added: "7", generation: 3}))
	f.Fuzz(func(t *testing.T, b []byte) {
		o, err := decodeObjectMeta(b)
		if err != nil {
			return
		}
		again, err := decodeObjectMeta(encodeObjectMeta(o))
		if err != nil || again.key != o.key || again.rv != o.rv || again.added != o.added || again.generation != o.generation {
			t.Errorf("%+v, written and read again: %+v, %v", o, again, err)
		}
	})
}
