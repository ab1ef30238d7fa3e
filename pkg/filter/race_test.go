// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestAllAtOnce: lists, watches and their ends, changes of configuration and of what
// filters depend on, with nothing between them.
func TestAllAtOnce(t *testing.T) {
	s := newServer(t)
	d := newDependency("red")
	r := newRig(t, s, entry(withholding(d), true))
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	all.Go(func() { _ = r.Run(ctx) })
	var working sync.WaitGroup
	for i := range 4 {
		working.Go(func() {
			f := forms[i%2]
			for range 150 {
				_, err := r.RoundTrip(ask{form: f, verb: "list"}.request(ctx))
				if err != nil {
					t.Error(err)
				}
				resp, err := r.RoundTrip(ask{form: f, verb: "watch", query: watchList}.request(ctx))
				if err != nil {
					t.Error(err)
					continue
				}
				var closing sync.WaitGroup
				if i%2 == 0 {
					closing.Go(func() { resp.Body.Close() }) // in the middle of a Read
				} else {
					s.breakOff()
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				closing.Wait()
				resp.Body.Close()
			}
		})
	}
	working.Go(func() {
		for i := range 300 {
			s.set(fmt.Sprint(i%7), []string{"red", "green", "blue", ""}[i%4])
			d.set([]string{"red", "green"}[i%2], nil)
		}
	})
	working.Go(func() {
		for i := range 300 {
			if err := r.Use([]Rule{{Name: "pool", Disabled: i%2 == 0}}, nil); err != nil {
				t.Error(err)
			}
		}
	})
	working.Wait()
	cancel()
	all.Wait()
	r.accounts(t)
	if n := s.watches(); n != 0 || len(r.watches) != 0 {
		t.Errorf("%d watches of the server, %d of the chain go on after all", n, len(r.watches))
	}
}

// TestRunMissesNoChange: a dependency that changes in a tight loop ends every watch.
func TestRunMissesNoChange(t *testing.T) {
	s := newServer(t)
	d := newDependency("red")
	r := newRig(t, s, entry(withholding(d), true))
	stop := r.run(t)
	defer stop()
	for i := range 300 {
		resp, err := r.RoundTrip(ask{form: forms[0], verb: "watch", query: watchList}.request(t.Context()))
		if err != nil {
			t.Fatal(err)
		}
		go d.set(fmt.Sprint(i), nil)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}()
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			t.Fatalf("the watch goes on after change %d", i)
		}
	}
	r.accounts(t)
}

// TestChangeWhileAWatchBegins: one that Run has not seen yet ends, too.
func TestChangeWhileAWatchBegins(t *testing.T) {
	for _, filtered := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer(t)
			d := newDependency("red")
			var r *rig
			change := func() { d.set("green", nil) }
			if !filtered {
				change = func() { r.use(nil, entry(dropping("red"), true)) }
			}
			next := roundTrip(func(req *http.Request) (*http.Response, error) {
				resp, err := s.RoundTrip(req)
				change()
				synctest.Wait() // Run has looked
				return resp, err
			})
			if filtered {
				r = newRig(t, next, entry(withholding(d), true))
			} else {
				r = newRig(t, next)
			}
			stop := r.run(t)
			defer stop()
			w := r.mustWatch(ask{form: forms[0], query: watchList})
			want := "EOF"
			if filtered {
				want = gone
			}
			w.want(want)
			w.body.Close()
		})
	}
}

// TestListIsClosedDuringRead by whoever notices that the client has gone.
func TestListIsClosedDuringRead(t *testing.T) {
	_, next := large(t, forms[0], 20)
	r := newRig(t, next, entry(dropping("red"), true))
	for range 20 {
		resp, err := r.RoundTrip(ask{form: forms[0], verb: "list"}.request(t.Context()))
		if err != nil {
			t.Fatal(err)
		}
		var closing sync.WaitGroup
		closing.Go(func() { resp.Body.Close() })
		_, _ = io.Copy(io.Discard, resp.Body)
		closing.Wait()
	}
	if n := openIn(t, r.cfg.Dir); n != 0 {
		t.Errorf("%d files are open after Close(), want 0", n)
	}
}
