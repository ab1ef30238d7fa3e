// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apiserver/pkg/authentication/user"
)

// A reflector keeps a copy by list or WatchList, then watches, like client-go's.
type reflector struct {
	h    *hub
	u    user.Info
	path string
	rng  *rand.Rand
	rv   int
	held map[string]string // namespace/name to text@rv
	bad  func(format string, args ...any)
}

func (r *reflector) run(ctx context.Context) {
	for ctx.Err() == nil {
		if r.rv == 0 {
			r.begin(ctx)
		} else {
			r.follow(ctx, r.path+"?watch=1&allowWatchBookmarks=true&resourceVersion="+strconv.Itoa(r.rv), nil)
		}
		select {
		case <-ctx.Done():
		case <-time.After(time.Millisecond):
		}
	}
}

func (r *reflector) begin(ctx context.Context) {
	if r.rng.IntN(2) == 0 {
		r.follow(ctx, r.path+watchList, map[string]string{})
		return
	}
	resp, err := r.h.do(ctx, r.u, r.path+[]string{"", "?resourceVersion=0"}[r.rng.IntN(2)])
	if err != nil {
		return
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return
	}
	var l struct {
		Metadata struct{ ResourceVersion string }
		Items    []fakeItem
	}
	if err := json.Unmarshal(b, &l); err != nil {
		r.bad("list: %v: %s", err, b)
		return
	}
	r.rv, _ = strconv.Atoi(l.Metadata.ResourceVersion)
	r.held = map[string]string{}
	for _, i := range l.Items {
		r.held[i.Metadata.Namespace+"/"+i.Metadata.Name] = i.Data.Text + "@" + i.Metadata.ResourceVersion
	}
	prefix := strings.TrimPrefix(r.path, "/api/v1/") + "/"
	if ns, ok := strings.CutPrefix(r.path, "/api/v1/namespaces/"); ok {
		prefix = "configmaps/" + strings.TrimSuffix(ns, "/configmaps") + "/"
	}
	if d := cmp.Diff(r.h.server.at(prefix, r.rv), texts(r.h.t, string(b))); d != "" {
		r.bad("list of %s at %d (-server +got):\n%s", prefix, r.rv, d)
	}
}

// follow reads one watch until it ends; initial is not nil for a WatchList.
func (r *reflector) follow(ctx context.Context, path string, initial map[string]string) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	resp, err := r.h.do(ctx, r.u, path)
	if err != nil {
		if s, ok := err.(apierrors.APIStatus); ok && s.Status().Code == http.StatusGone {
			r.rv = 0
		}
		return
	}
	defer resp.Body.Close()
	events := -1
	if r.rng.IntN(3) == 0 {
		events = 1 + r.rng.IntN(30) // leave early
	}
	d := json.NewDecoder(resp.Body)
	for ; events != 0; events-- {
		var e struct {
			Type   string
			Object struct {
				fakeItem
				Code int
			}
		}
		var o struct {
			Metadata struct {
				Namespace, Name, ResourceVersion string
				Annotations                      map[string]string
			}
			Code int
			Data struct{ Text string }
		}
		var raw struct {
			Type   string
			Object json.RawMessage
		}
		if d.Decode(&raw) != nil {
			return
		}
		if err := json.Unmarshal(raw.Object, &o); err != nil {
			r.bad("event %s: %v", raw.Object, err)
			return
		}
		e.Type = raw.Type
		rv, _ := strconv.Atoi(o.Metadata.ResourceVersion)
		key, is := o.Metadata.Namespace+"/"+o.Metadata.Name, o.Data.Text+"@"+o.Metadata.ResourceVersion
		if e.Type == "ERROR" {
			r.rv = 0
			return
		}
		if initial != nil {
			switch {
			case e.Type == "BOOKMARK" && o.Metadata.Annotations["k8s.io/initial-events-end"] == "true":
				r.held, r.rv, initial = initial, rv, nil
			case e.Type == "ADDED":
				initial[key] = is
			default:
				r.bad("%s before the initial events are over", e.Type)
			}
			continue
		}
		old, known := r.held[key]
		switch {
		case rv < r.rv, rv == r.rv && e.Type != "BOOKMARK" && e.Type != "DELETED":
			r.bad("%s %s@%d after %d", e.Type, key, rv, r.rv)
		case e.Type == "ADDED" && known:
			r.bad("ADDED %s %s, held %s", key, is, old)
		case e.Type == "MODIFIED" && !known:
			r.bad("MODIFIED %s %s, not held", key, is)
		}
		switch e.Type {
		case "ADDED", "MODIFIED":
			r.held[key] = is
		case "DELETED":
			delete(r.held, key)
		}
		r.rv = rv
	}
}

// Reflectors that come and go, lists, cuts, lost histories, flushes and
// compactions: in the end everybody has what the server has.
func TestStress(t *testing.T) {
	for seed := range uint64(2) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { stress(t, seed) })
	}
}

func stress(t *testing.T, seed uint64) {
	server := newFakeServer()
	h := startHub(t, t.TempDir(), server)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var wg sync.WaitGroup
	var reported atomic.Int32
	bad := func(format string, args ...any) {
		if reported.Add(1) < 8 {
			t.Errorf(format, args...)
		}
	}
	var all []*reflector
	for i := range 16 {
		r := &reflector{h: h, u: []user.Info{nodeUser, alice}[i%2], path: []string{allMaps, "/api/v1/namespaces/a/configmaps"}[i/2%2], rng: rand.New(rand.NewPCG(seed, uint64(i))), bad: bad}
		all = append(all, r)
		wg.Go(func() { r.run(ctx) })
	}
	wg.Go(func() {
		rng := rand.New(rand.NewPCG(seed, 100))
		for ctx.Err() == nil {
			for _, l := range h.allLogs() {
				if rng.IntN(2) == 0 {
					l.mu.Lock()
					l.rewriteSoon()
					l.mu.Unlock()
				}
			}
			if err := h.flushAll(everything); err != nil {
				bad("flush: %v", err)
			}
			select {
			case <-ctx.Done():
			case <-time.After(2 * time.Millisecond):
			}
		}
	})
	rng := rand.New(rand.NewPCG(seed, 200))
	for range 1000 {
		key := fmt.Sprintf("configmaps/%s/m%d", []string{"a", "b"}[rng.IntN(2)], rng.IntN(20))
		switch n := rng.IntN(100); {
		case n < 30:
			server.del(key)
		case n < 97:
			server.put(key, fmt.Sprint(rng.IntN(1000)))
		case n < 98:
			server.setDown(true)
		case n < 99:
			server.setDown(false)
		default:
			server.forget()
		}
		<-time.After(time.Millisecond)
	}
	server.setDown(false)
	server.put("configmaps/a/last", "x")
	server.put("configmaps/b/last", "x")
	<-time.After(4 * time.Second)
	cancel()
	wg.Wait()
	for i, r := range all {
		prefix := "configmaps/"
		if r.path != allMaps {
			prefix = "configmaps/a/"
		}
		got := []string{}
		for _, k := range sortedKeys(r.held) {
			got = append(got, k+"="+strings.Split(r.held[k], "@")[0])
		}
		if r.rv == 0 {
			continue // it was about to begin again
		}
		if d := cmp.Diff(server.at(prefix, r.rv), got); d != "" {
			bad("reflector %d of %s at %d (-server +got):\n%s", i, r.path, r.rv, d)
		}
		if r.rv < server.rv-1 {
			bad("reflector %d of %s is at %d, the server at %d", i, r.path, r.rv, server.rv)
		}
	}
}
