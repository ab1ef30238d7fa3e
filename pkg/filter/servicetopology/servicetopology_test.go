// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package servicetopology

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/filter/filtertest"
	"github.com/edgehub/edgehub/pkg/follow"
)

// change is what both fakes tell of changes with.
type change struct {
	mu sync.Mutex
	ch chan struct{}
}

func (c *change) Changed() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ch == nil {
		c.ch = make(chan struct{})
	}
	return c.ch
}

func (c *change) happens() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ch != nil {
		close(c.ch)
	}
	c.ch = nil
}

type fakePool struct {
	change
	nodes []string
	known bool
}

func (p *fakePool) Nodes() ([]string, bool) { return p.nodes, p.known }

type fakeServices struct {
	change
	rows map[string]string
	err  error
}

func (s *fakeServices) Get(namespace, name string) (string, bool) {
	topology, ok := s.rows[namespace+"/"+name]
	return topology, ok
}
func (s *fakeServices) All() map[string]string { return maps.Clone(s.rows) }
func (s *fakeServices) Err() error             { return s.err }

var (
	services = &fakeServices{rows: map[string]string{"shop/on-node": OnNode, "shop/in-pool": InPool, "shop/in-zone": InZone}}
	unknown  = &fakeServices{err: errors.New("services: not known yet")}
	hangzhou = &fakePool{nodes: []string{"edge-2", "edge-3"}, known: true} // the pool's status does not name edge-1 yet
	noPool   = &fakePool{known: true}
)

func TestGoldens(t *testing.T) {
	for dir, f := range map[string]*Filter{
		"in-pool":            New("edge-1", hangzhou, services),
		"in-no-pool":         New("edge-1", noPool, services),
		"pool-not-known":     New("edge-1", &fakePool{}, services),
		"services-not-known": New("edge-1", hangzhou, unknown),
	} {
		t.Run(dir, func(t *testing.T) { filtertest.Run(t, "testdata/"+dir, f) })
	}
}

func TestReady(t *testing.T) {
	onNode := &fakeServices{rows: map[string]string{"shop/on-node": OnNode}}
	inZone := &fakeServices{rows: map[string]string{"shop/on-node": OnNode, "shop/in-zone": InZone}}
	for _, tc := range []struct {
		name     string
		pool     *fakePool
		services *fakeServices
		want     bool
	}{
		{"all is known", hangzhou, services, true},
		{"in no pool", noPool, services, true},
		{"services are not known", hangzhou, unknown, false},
		{"the pool is not known", &fakePool{}, services, false},
		{"the pool is not known, zone", &fakePool{}, inZone, false},
		{"the pool is not known and not asked for", &fakePool{}, onNode, true},
		{"the pool is not known and no service annotated", &fakePool{}, &fakeServices{}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if err := New("edge-1", tc.pool, tc.services).Ready(); (err == nil) != tc.want {
				t.Errorf("Ready() = %v, want ready %t", err, tc.want)
			}
		})
	}
}

func closed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

func TestChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool, services := &fakePool{}, &fakeServices{}
		f := New("edge-1", pool, services)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- f.Run(ctx) }()
		synctest.Wait()
		for i, happens := range []func(){pool.happens, services.happens, services.happens, pool.happens} {
			before := f.Changed()
			synctest.Wait()
			if closed(before) {
				t.Fatalf("change %d: Changed() is closed before it", i)
			}
			happens()
			synctest.Wait()
			if !closed(before) {
				t.Fatalf("change %d: Changed() is not closed after it", i)
			}
		}
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run() = %v, want nil", err)
		}
	})
}

// A change before Run looks for the first time is not lost.
func TestChangedBeforeRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pool := &fakePool{}
		f := New("edge-1", pool, &fakeServices{})
		before := f.Changed()
		pool.happens()
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- f.Run(ctx) }()
		synctest.Wait()
		if !closed(before) {
			t.Error("Changed() is not closed")
		}
		cancel()
		<-done
	})
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func frame(kind, name, annotations string) string {
	return fmt.Sprintf(`{"type":%q,"object":{"kind":"Service","apiVersion":"v1","metadata":{"name":%q,"namespace":"shop","resourceVersion":"7","annotations":{%s}},"spec":{}}}`+"\n", kind, name, annotations)
}

func topology(value string) string { return fmt.Sprintf("%q:%q", Annotation, value) }

func TestNewServices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		body, server := io.Pipe()
		var asked []string
		source := follow.Source{
			Transport: roundTrip(func(r *http.Request) (*http.Response, error) {
				u, _ := request.UserFrom(r.Context())
				asked = append(asked, r.URL.Path+" by "+u.GetName())
				return &http.Response{StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: body, Request: r}, nil
			}),
			User:    func() user.Info { return &user.DefaultInfo{Name: "system:node:edge-1"} },
			Changed: func() <-chan struct{} { return nil },
		}
		table := NewServices(source)
		if table.Err() == nil {
			t.Error("Err() = nil before anything is known")
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- table.Run(ctx) }()
		send := func(frames ...string) {
			for _, f := range frames {
				if _, err := io.WriteString(server, f); err != nil {
					t.Fatal(err)
				}
			}
			synctest.Wait()
		}
		send(frame("ADDED", "web", `"a":"b"`), frame("ADDED", "on-node", topology(OnNode)), frame("ADDED", "in-pool", topology(InPool)),
			frame("ADDED", "in-zone", topology(InZone)), frame("ADDED", "two", topology(OnNode+","+InPool)), frame("ADDED", "empty", topology("")))
		send(frame("BOOKMARK", "", `"k8s.io/initial-events-end":"true"`))
		want := map[string]string{"shop/on-node": OnNode, "shop/in-pool": InPool, "shop/in-zone": InZone}
		if diff := cmp.Diff(want, table.All()); table.Err() != nil || diff != "" {
			t.Errorf("All(), Err() = %v (-want +got):\n%s", table.Err(), diff)
		}
		before := table.Changed()
		send(frame("MODIFIED", "web", `"a":"c"`))
		if closed(before) {
			t.Error("Changed() is closed by a Service without the annotation")
		}
		send(frame("MODIFIED", "on-node", `"a":"c"`))
		delete(want, "shop/on-node")
		if diff := cmp.Diff(want, table.All()); !closed(before) || diff != "" {
			t.Errorf("the annotation went away: Changed() is closed: %t; All() (-want +got):\n%s", closed(before), diff)
		}
		cancel()
		server.CloseWithError(io.ErrUnexpectedEOF)
		if err := <-done; err != nil {
			t.Errorf("Run() = %v, want nil", err)
		}
		if diff := cmp.Diff([]string{"/api/v1/services by system:node:edge-1"}, asked); diff != "" {
			t.Errorf("requests (-want +got):\n%s", diff)
		}
	})
}
