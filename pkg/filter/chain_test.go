// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/codec"
)

func TestNotReady(t *testing.T) {
	for _, verb := range allVerbs {
		t.Run(verb, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newServer(t)
				s.set("a", "red")
				d := newDependency("red")
				d.set("red", errors.New("pool unknown"))
				r := newRig(t, s, entry(withholding(d), true))
				start := time.Now()
				_, err := r.RoundTrip(ask{form: forms[0], verb: verb, name: "a"}.request(t.Context()))
				if err == nil {
					t.Fatal("request is answered by a filter that is not ready")
				}
				if st := status(t, err); st.Code != 503 || time.Since(start) != readyPatience || !strings.Contains(st.Message, "pool unknown") {
					t.Errorf("answered %d %s after %s, want 503 after %s", st.Code, st.Message, time.Since(start), readyPatience)
				}
				time.AfterFunc(time.Second, func() { d.set("blue", errors.New("still")) })
				time.AfterFunc(3*time.Second, func() { d.set("blue", nil) })
				start = time.Now()
				resp, err := r.RoundTrip(ask{form: forms[0], verb: verb, name: "a"}.request(t.Context()))
				if err != nil || time.Since(start) != 3*time.Second {
					t.Fatalf("answered %v after %s, want an answer after 3s", err, time.Since(start))
				}
				resp.Body.Close()
				ctx, cancel := context.WithCancel(t.Context())
				d.set("", errors.New("again"))
				cancel()
				if _, err = r.RoundTrip(ask{form: forms[0], verb: verb, name: "a"}.request(ctx)); err == nil {
					t.Error("request that was given up is answered")
				}
			})
		})
	}
}

func TestUse(t *testing.T) {
	r := newRig(t, newServer(t), entry(dropping("red"), true))
	for name, use := range map[string]func() error{
		"unknown rule": func() error { return r.Use([]Rule{{Name: "x"}}, nil) },
		"twice":        func() error { return r.Use(nil, []Entry{entry(dropping("blue"), true)}) },
	} {
		before := r.rules.Load()
		if err := use(); err == nil || r.rules.Load() != before {
			t.Errorf("Use() of %s = %v, want an error and no change", name, err)
		}
	}
	// What may not withhold fails if it does. Order, and what is not in force.
	s := newServer(t)
	s.set("a", "red")
	r = newRig(t, s, entry(dropping("red"), false))
	if code, _, _ := r.answer(ask{form: forms[0], verb: "get", name: "a"}); code != 500 {
		t.Errorf("filter that may not withhold answered %d, want 500", code)
	}
	r.use([]Rule{{Name: "drop", Disabled: true}})
	if code, _, _ := r.answer(ask{form: forms[0], verb: "get", name: "a"}); code != 200 {
		t.Errorf("disabled filter answered %d, want 200", code)
	}
	if got := testutil.ToFloat64(r.metrics.inForce.WithLabelValues("drop")); got != 0 {
		t.Errorf("edgehub_filter_in_force = %v, want 0", got)
	}
	first := fake{"first", func(o *Object) (Verdict, error) { return setMark(o, "1") }}
	second := fake{"second", func(o *Object) (Verdict, error) {
		typed, err := o.Decode()
		if err != nil {
			return Keep, err
		}
		if m := typed.(interface{ GetAnnotations() map[string]string }).GetAnnotations()["mark"]; m != "1" {
			return Keep, fmt.Errorf("mark is %q", m)
		}
		return setMark(o, "2")
	}}
	r = newRig(t, s, entry(first, false), entry(second, false))
	_, body, _ := r.answer(ask{form: forms[1], verb: "get", name: "a"})
	_, bare, err := codec.DecodeObject(protoRep, body)
	if o, err2 := decodeThing(protoRep, bare); err != nil || err2 != nil || o.mark != "2" {
		t.Errorf("two filters make %v, %v, %v, want mark 2", o, err, err2)
	}
	// A watch goes on from a list: there is no filter for one of the two.
	r.use([]Rule{{Name: "second", Disabled: true}, {Name: "first", Verbs: []string{"list"}}})
	for verb, want := range map[string]int{"get": 0, "list": 1, "watch": 1} {
		info := &request.RequestInfo{Verb: verb, Resource: "services"}
		if filters, _ := r.rules.Load().match(&Request{RequestInfo: info, User: &user.DefaultInfo{}}); len(filters) != want {
			t.Errorf("filter for list is in force %d times for %s, want %d", len(filters), verb, want)
		}
	}
}

func TestMetricsLint(t *testing.T) {
	s := newServer(t)
	s.set("a", "red")
	r := newRig(t, s, entry(wild, true))
	r.answer(ask{form: forms[0], verb: "list"})
	if problems, err := testutil.GatherAndLint(r.reg); err != nil || len(problems) > 0 {
		t.Errorf("GatherAndLint() = %v, %v, want none", problems, err)
	}
}
