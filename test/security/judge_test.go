// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// judge returns what is wrong with what came of an attempt.
func judge(at attempt, o outcome, st state) (faults []string) {
	bad := func(format string, args ...any) {
		faults = append(faults, fmt.Sprintf("%s at %s, %s: ", at.name, o.Place, st)+fmt.Sprintf(format, args...))
	}
	first, direct := firstOf(o.Statuses), firstOf(o.Direct)
	want := at.online
	if st != online {
		want = at.offline
	}
	if at.genuine && st == online {
		if len(o.Direct) == 0 {
			bad("the API server was not asked")
		}
		if want == nil {
			want = []int{direct}
		}
	}
	if !slices.Contains(want, first) {
		bad("answered with %d, want one of %v (%s)", first, want, o.Error)
	}
	for _, more := range o.Statuses[min(1, len(o.Statuses)):] {
		if more < 400 {
			bad("what rode along was answered with %d", more)
		}
	}
	if o.Secret != "" {
		bad("the answer shows %s", o.Secret)
	}
	if first/100 == 2 && o.Length > 0 && !at.open && (!at.genuine || direct/100 != 2) {
		bad("%d bytes with %d, and the API server itself says %d", o.Length, first, direct)
	}
	return faults
}

func firstOf(statuses []int) int {
	if len(statuses) == 0 {
		return 0
	}
	return statuses[0]
}

// judgeAll judges every outcome, and misses those that are not there.
func judgeAll(p plan, outcomes []outcome, st state) (faults []string) {
	all := attempts()
	seen := map[string]int{}
	for _, o := range outcomes {
		seen[fmt.Sprint(o.Attempt, o.Place)]++
		faults = append(faults, judge(all[o.Attempt], o, st)...)
	}
	for _, n := range p.Attempts {
		for _, address := range addressesOf(all[n].to, p) {
			if seen[fmt.Sprint(n, address)] != 1 {
				faults = append(faults, fmt.Sprintf("%s at %s, %s: tried %d times", all[n].name, address, st, seen[fmt.Sprint(n, address)]))
			}
		}
	}
	return faults
}

// judgeFlood returns what is wrong with what came of a flood.
func judgeFlood(f flood, o outcome, st state) (faults []string) {
	bad := func(format string, args ...any) {
		faults = append(faults, fmt.Sprintf("%s, %s: ", f.name, st)+fmt.Sprintf(format, args...))
	}
	s := o.Strain
	if o.Error != "" || s.Connections == 0 {
		bad("it did not happen: %s", o.Error)
	}
	for _, status := range s.Statuses {
		if (f.statuses != nil && !slices.Contains(f.statuses, status)) || status/100 == 2 {
			bad("answered with %d, want one of %v", status, f.statuses)
		}
	}
	if f.maxWritten > 0 && s.Written > f.maxWritten {
		bad("%d bytes were taken, want %d at most", s.Written, f.maxWritten)
	}
	if f.within > 0 && (s.Ended < s.Connections || s.Longest > f.within) {
		bad("%d of %d connections were ended, the last after %v; want all within %v", s.Ended, s.Connections, s.Longest, f.within)
	}
	return faults
}

// TestTheAttackersJudgeCanSayNo doctors outcomes: whatever could be wrong with one
// is found, for every attempt.
func TestTheAttackersJudgeCanSayNo(t *testing.T) {
	names := map[string]bool{}
	for n, at := range attempts() {
		if names[at.name] {
			t.Errorf("two attempts are %q", at.name)
		}
		names[at.name] = true
		for _, st := range []state{online, offline, restarted} {
			good := goodOutcome(n, at, st)
			if faults := judge(at, good, st); len(faults) > 0 {
				t.Errorf("judge of what is right = %q, want nothing", faults)
			}
			for name, doctor := range map[string]func(*outcome){
				"another status": func(o *outcome) { o.Statuses = []int{299} },
				"no answer": func(o *outcome) {
					o.Statuses = nil
					if slices.Contains(at.online, 0) {
						o.Statuses = []int{299}
					}
				},
				"a secret":           func(o *outcome) { o.Secret = "value" },
				"a second answer":    func(o *outcome) { o.Statuses = append(o.Statuses, 0, 200) },
				"data":               func(o *outcome) { o.Statuses, o.Direct, o.Length = []int{201}, []int{403}, 1 },
				"more than directly": func(o *outcome) { o.Statuses, o.Direct, o.Length = []int{200}, []int{401}, 1 },
			} {
				if name == "more than directly" && (at.open || slices.Contains(at.offline, 200) && !at.genuine) {
					continue
				}
				o := good
				doctor(&o)
				if len(judge(at, o, st)) == 0 {
					t.Errorf("judge(%s, %s) with %s = nothing, want a fault", at.name, st, name)
				}
			}
		}
	}
	if len(names) < 500 {
		t.Errorf("there are %d attempts, want 500 at least", len(names))
	}
	p := plan{HTTPS: []string{"x", "y"}, Attempts: []int{0}}
	if faults := judgeAll(p, []outcome{goodAt(0, "x")}, online); len(faults) != 1 || !strings.Contains(faults[0], "at y, online: tried 0 times") {
		t.Errorf("judgeAll without an outcome = %q, want that it is missing", faults)
	}
}

func goodOutcome(n int, at attempt, st state) outcome {
	o := outcome{Attempt: n}
	want := at.online
	if st != online {
		want = at.offline
	}
	if at.genuine {
		o.Direct = []int{403}
		if len(want) == 0 {
			want = o.Direct
		}
	}
	if want[0] != 0 {
		o.Statuses = want[:1:1]
	}
	return o
}

func goodAt(n int, address string) outcome {
	o := goodOutcome(n, attempts()[n], online)
	o.Place = address
	return o
}

func TestTheFloodsJudgeCanSayNo(t *testing.T) {
	for _, f := range allFloods() {
		good := outcome{Flood: f.name, Strain: strain{Connections: 1, Ended: 1, Statuses: f.statuses[:min(1, len(f.statuses))]}}
		if faults := judgeFlood(f, good, online); len(faults) > 0 {
			t.Errorf("judgeFlood of what is right = %q, want nothing", faults)
		}
		for name, doctor := range map[string]func(*outcome){
			"a good answer":       func(o *outcome) { o.Strain.Statuses = []int{200} },
			"an error":            func(o *outcome) { o.Error = "no connection" },
			"no connection":       func(o *outcome) { o.Strain = strain{} },
			"too much written":    func(o *outcome) { o.Strain.Written = f.maxWritten + 1 },
			"a connection kept":   func(o *outcome) { o.Strain.Ended = 0 },
			"one kept for longer": func(o *outcome) { o.Strain.Longest = f.within + 1 },
		} {
			if name == "too much written" && f.maxWritten == 0 || strings.Contains(name, "kept") && f.within == 0 {
				continue
			}
			o := good
			doctor(&o)
			if len(judgeFlood(f, o, online)) == 0 {
				t.Errorf("judgeFlood(%s) with %s = nothing, want a fault", f.name, name)
			}
		}
	}
}
