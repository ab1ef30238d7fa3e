// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"fmt"
	"io"
	"slices"
	"testing"

	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
	"github.com/edgehub/edgehub/pkg/seal"
)

// A request that waits for the disk holds nobody else of its log up.
func TestStalledDiskHoldsNoLock(t *testing.T) {
	meta := responseMeta{Path: "/openapi/v3", ContentType: "application/json", Time: 1}
	body := func(h *hub, path string) func() string {
		return func() string {
			resp, err := h.do(t.Context(), alice, path)
			if err != nil {
				return err.Error()
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			return fmt.Sprint(resp.StatusCode, err, string(b))
		}
	}
	for _, tt := range []struct {
		name  string
		start func(h *hub, l *log) func() string
	}{
		{"list with a selector", func(h *hub, _ *log) func() string { return body(h, allMaps+"?labelSelector=text%3D1") }},
		{"list", func(h *hub, _ *log) func() string { return body(h, allMaps) }},
		{"get", func(h *hub, _ *log) func() string { return body(h, "/api/v1/namespaces/a/configmaps/one") }},
		{"whole response", func(_ *hub, l *log) func() string {
			return func() string { r, ok := l.response(meta); return fmt.Sprint(ok, string(r.Body)) }
		}},
		{"response that may be the same", func(_ *hub, l *log) func() string {
			return func() string { l.putResponse(meta, []byte(`{"same":1}`)); return fmt.Sprint(len(l.dirtyResp)) }
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server := newFakeServer()
			server.put("configmaps/a/one", "1")
			server.put("configmaps/a/two", "2")
			fs := memfs.New()
			h := coldHub(t, fs, server, t.TempDir()+"/key")
			h.body(alice, allMaps)
			l := theScope(t, h).log
			l.putResponse(meta, []byte(`{"same":1}`))
			if err := h.flushAll(everything); err != nil {
				t.Fatal(err)
			}
			server.setDown(true)
			ask := tt.start(h, l)
			want := ask()

			fs.SetStall(func(op memfs.Op) bool { return op.Name == "read" })
			got := make(chan string, 1)
			go func() { got <- ask() }()
			eventually(t, "the request reads the disk", func() bool { return fs.Stalled() == 1 })
			eventually(t, "somebody else gets the log's lock", func() bool {
				ok := l.mu.TryLock()
				if ok {
					l.mu.Unlock()
				}
				return ok
			})
			fs.SetStall(nil)
			if got := <-got; got != want {
				t.Errorf("after the stall: %s, want %s", got, want)
			}
		})
	}
}

// A log is written anew, and its objects change, while a list is under way: the list
// stays what it was at its beginning.
func TestListStaysAsItBegan(t *testing.T) {
	server := newFakeServer()
	want := []string{}
	for i := range 40 {
		server.put(fmt.Sprintf("configmaps/a/m%02d", i), fmt.Sprintf("old %d", i))
		want = append(want, fmt.Sprintf("a/m%02d=old %d", i, i))
	}
	fs := memfs.New()
	h := coldHub(t, fs, server, t.TempDir()+"/key")
	h.body(alice, allMaps)
	if err := h.flushAll(everything); err != nil {
		t.Fatal(err)
	}
	server.setDown(true)
	resp, err := h.do(t.Context(), alice, allMaps)
	if err != nil {
		t.Fatal(err)
	}
	head := make([]byte, 700)
	if _, err := io.ReadFull(resp.Body, head); err != nil {
		t.Fatal(err)
	}
	server.setDown(false)
	for i := range 40 {
		server.put(fmt.Sprintf("configmaps/a/m%02d", i), "new")
	}
	server.del("configmaps/a/m07")
	h.body(alice, allMaps)
	l := theScope(t, h).log
	for range 3 {
		l.mu.Lock()
		l.rewriteSoon()
		l.mu.Unlock()
		if err := h.flushAll(everything); err != nil {
			t.Fatal(err)
		}
	}
	rest, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	if got := texts(t, string(head)+string(rest)); !slices.Equal(got, want) {
		t.Errorf("list = %v, want %v", got, want)
	}
	if got := int64(len(head) + len(rest)); got != resp.ContentLength {
		t.Errorf("%d bytes, announced %d", got, resp.ContentLength)
	}
	if err := resp.Body.Close(); err != nil {
		t.Error(err)
	}
	if _, err := resp.Body.Read(head); err == nil {
		t.Error("read after Close = nil, want an error")
	}
	if n := fs.OpenFiles(); n > 64 {
		t.Errorf("%d files open", n)
	}
}

// Lists are in key order, with names coming and going between them.
func TestListsAreInOrder(t *testing.T) {
	server := newFakeServer()
	h := startHub(t, t.TempDir(), server)
	for i := range 30 {
		server.put(fmt.Sprintf("configmaps/%c/m%d", 'a'+i%3, (i*7)%30), "x")
		if i%4 == 3 {
			server.del(fmt.Sprintf("configmaps/%c/m%d", 'a'+(i-2)%3, ((i-2)*7)%30))
		}
		online := texts(t, h.body(alice, allMaps))
		server.setDown(true)
		if got := texts(t, h.body(alice, allMaps)); !slices.Equal(got, online) {
			t.Fatalf("offline list = %v, want %v", got, online)
		}
		server.setDown(false)
	}
}

// Sealed objects are as long as the listing says, or the list would end early.
func TestSealOverhead(t *testing.T) {
	h := newBench(t)
	for _, n := range []int{0, 1, 1000} {
		b, err := h.cfg.Sealer.Seal(h.cfg.Sealer.Current(), make([]byte, n), "here")
		if err != nil || len(b) != n+seal.Overhead {
			t.Errorf("seal of %d bytes: %d, %v, want %d", n, len(b), err, n+seal.Overhead)
		}
	}
}
