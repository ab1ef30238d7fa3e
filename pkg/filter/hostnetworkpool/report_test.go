// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package hostnetworkpool

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/edgehub/edgehub/pkg/nodepool"
)

func TestEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &events{t: t}
		m := known
		m.Drift = nodepool.LabelMissing
		r := newRig(t, server, m)
		r.list(newPodNamed("a", false, 0))
		start := time.Now()
		r.run(settle)
		want := []*corev1.Event{{
			TypeMeta:       metav1.TypeMeta{APIVersion: "v1", Kind: "Event"},
			ObjectMeta:     metav1.ObjectMeta{Namespace: "default", Name: "a.493eb0e59296ca18"},
			InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: "default", Name: "a", UID: "uid-a"},
			Type:           "Warning", Reason: "NoPodNetwork",
			Message: `Pool shore has no pod network: set hostNetwork: true, or recreate the pod with annotation apps.openyurt.io/exclude-host-network-pool: "true".`,
			Source:  corev1.EventSource{Component: "edgehub", Host: "edge-1"},
			Count:   1, FirstTimestamp: metav1.NewTime(start), LastTimestamp: metav1.NewTime(start), ReportingController: "edgehub", ReportingInstance: "edge-1",
		}, {
			TypeMeta:       metav1.TypeMeta{APIVersion: "v1", Kind: "Event"},
			ObjectMeta:     metav1.ObjectMeta{Namespace: "default", Name: "edge-1.cfb5c8a756c60dd8"},
			InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: "edge-1", UID: "edge-1"},
			Type:           "Warning", Reason: "PoolLabelDrift",
			Message: "Pool shore is a host-network pool: set the label nodepool.openyurt.io/hostnetwork=true on this node.",
			Source:  corev1.EventSource{Component: "edgehub", Host: "edge-1"},
			Count:   1, FirstTimestamp: metav1.NewTime(start), LastTimestamp: metav1.NewTime(start), ReportingController: "edgehub", ReportingInstance: "edge-1",
		}}
		if diff := cmp.Diff(want, server.sent); diff != "" {
			t.Errorf("Events (-want +got):\n%s", diff)
		}
	})
}

func TestEventName(t *testing.T) {
	const id = "0123456789abcdef"
	for _, tc := range []struct{ object, want string }{
		{"a", "a." + id},
		{strings.Repeat("n", 253), strings.Repeat("n", 236) + "." + id},
		{strings.Repeat("n", 235) + "." + strings.Repeat("n", 17), strings.Repeat("n", 235) + "." + id},
	} {
		if got := eventName(tc.object, id); got != tc.want {
			t.Errorf("eventName(%s) = %s, want %s", tc.object, got, tc.want)
		}
	}
}

func TestIDsTellFindingsApart(t *testing.T) {
	ids := map[string]Finding{}
	for _, f := range []Finding{
		{UID: "a", Kind: NoPodNetwork}, {UID: "b", Kind: NoPodNetwork}, {UID: "a", Kind: HostPortConflict},
		{UID: "a", Kind: HostPortConflict, Detail: "80/TCP"}, {UID: "a", Kind: HostPortConflict, Detail: "80/UDP"},
		{UID: "aN", Kind: "oPodNetwork"}, {UID: "aNoPodNetwork"}, {Kind: "a", Detail: "NoPodNetwork"},
	} {
		if other, ok := ids[f.id()]; ok {
			t.Errorf("id of %+v and %+v are the same", f, other)
		}
		ids[f.id()] = f
	}
	if a, b := (&Finding{UID: "a", Message: "x", Stale: true}), (&Finding{UID: "a", Pod: "p"}); a.id() != b.id() {
		t.Errorf("id = %s and %s of the same finding", a.id(), b.id())
	}
}

func (r *rig) wantSent(when string, want ...string) {
	r.t.Helper()
	if diff := cmp.Diff(want, r.sentSince()); diff != "" {
		r.t.Errorf("%s: Events (-want +got):\n%s", when, diff)
	}
}

const noNetwork = "NoPodNetwork default/a"

func TestEventsAreSentOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, &events{t: t}, known)
		r.run(func() {
			r.list(newPodNamed("a", false, 0))
			settle()
			r.wantSent("at first", noNetwork)
			r.list(with(newPodNamed("a", false, 0), func(p *corev1.Pod) { p.ResourceVersion, p.Labels = "11", map[string]string{"x": "y"} }))
			r.be(stale())
			settle()
			r.be(known)
			pass(time.Hour)
			r.wantSent("all the same")
			r.list()
			settle()
			r.list(newPodNamed("a", false, 0))
			settle()
			r.wantSent("it was gone", noNetwork)
		})
	})
}

func TestEventsSurviveARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &events{t: t}
		r := newRig(t, server, known)
		r.run(func() {
			r.list(newPodNamed("a", false, 0))
			settle()
			r.event(watch.Added, newPodNamed("b", false, 0)) // too soon to be stored but at the end
			settle()
			r.wantSent("at first", noNetwork, "NoPodNetwork default/b")
		})
		r = newRig(t, server, unknown)
		r.run(func() {
			pass(time.Minute) // no pod has been seen, and the pool is not known
			r.list(newPodNamed("a", false, 0), newPodNamed("b", false, 0))
			settle()
			r.be(known)
			settle()
			r.wantSent("after a restart")
			r.list(newPodNamed("a", false, 0))
			settle()
		})
		r = newRig(t, server, known)
		r.run(func() {
			pass(time.Minute) // no pod has been seen
			r.list(newPodNamed("a", false, 0), newPodNamed("b", false, 0))
			settle()
			r.wantSent("b was not there for a while", "NoPodNetwork default/b")
		})
	})
}

// A restart between an Event and the note of it sends it again, and the API server has it.
func TestEventThatExists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := &events{t: t}
		for range 2 {
			server.stored = nil
			r := newRig(t, server, known)
			r.run(func() {
				r.list(newPodNamed("a", false, 0))
				settle()
			})
			server.setAnswer(func(*corev1.Event) int { return http.StatusConflict })
		}
		if a, b := server.sent[0], server.sent[1]; len(server.sent) != 2 || a.Name != b.Name {
			t.Errorf("Events are called %s and %s, want the same", a.Name, b.Name)
		}
	})
}

func TestEventsAreTriedAgain(t *testing.T) {
	for _, tc := range []struct {
		code   int
		result string
		again  bool
	}{
		{http.StatusCreated, created, false},
		{http.StatusAccepted, accepted, false},
		{http.StatusConflict, exists, false},
		{http.StatusOK, failed, true},
		{http.StatusForbidden, failed, true},
		{http.StatusTooManyRequests, failed, true},
		{http.StatusServiceUnavailable, failed, true},
		{0, failed, true},
	} {
		t.Run(fmt.Sprint(tc.code), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, &events{t: t}, known)
				r.setAnswer(func(*corev1.Event) int { return tc.code })
				r.run(func() {
					r.list(newPodNamed("a", false, 0))
					settle()
					r.sentSince()
					if got := testutil.ToFloat64(r.metrics.events.WithLabelValues(tc.result)); got != 1 {
						t.Errorf("%v attempts are counted as %s, want 1", got, tc.result)
					}
					if got, want := testutil.ToFloat64(r.metrics.waiting), map[bool]float64{true: 1}[tc.again]; got != want {
						t.Errorf("%v findings wait, want %v", got, want)
					}
					r.setAnswer(nil)
					pass(2 * minBackoff)
					if got := r.sentSince(); len(got) != map[bool]int{true: 1}[tc.again] {
						t.Errorf("after %d, then a 201: sent %q again, want %v", tc.code, got, tc.again)
					}
					pass(time.Hour)
					r.wantSent("at last")
				})
			})
		})
	}
}

func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, &events{t: t}, known)
		r.setAnswer(func(*corev1.Event) int { return http.StatusInternalServerError })
		r.run(func() {
			r.list(newPodNamed("a", false, 0))
			pass(2 * time.Hour)
			// 9 tries until the limit is reached, and then one in 2.5 to 5 minutes.
			if got := len(r.sentSince()); got < 28 || got > 58 {
				t.Errorf("%d attempts in two hours, want about 40", got)
			}
			r.list()
			pass(time.Minute)
			r.sentSince()
			pass(time.Hour)
			r.wantSent("the pod is gone")
		})
	})
	for tries := range 100 {
		if got := backoff(tries); got < minBackoff || got > maxBackoff {
			t.Errorf("backoff(%d) = %v, want %v to %v", tries, got, minBackoff, maxBackoff)
		}
	}
}

// One Event that the API server will not have does not stop the others.
func TestFailureIsNotInTheWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, &events{t: t}, known)
		r.setAnswer(func(e *corev1.Event) int {
			if e.InvolvedObject.Name == "a" {
				return http.StatusForbidden
			}
			return http.StatusCreated
		})
		r.run(func() {
			r.list(newPodNamed("a", false, 0), newPodNamed("b", false, 0), newPodNamed("c", false, 0))
			settle()
			r.wantSent("at once", noNetwork, "NoPodNetwork default/b", "NoPodNetwork default/c")
			if got := testutil.ToFloat64(r.metrics.waiting); got != 1 {
				t.Errorf("%v findings wait, want 1", got)
			}
		})
	})
}

func TestQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, &events{t: t}, known)
		r.setAnswer(func(*corev1.Event) int { return 0 })
		const all = 3*maxQueue + 1
		var pods []*corev1.Pod
		for i := range all {
			pods = append(pods, newPodNamed(fmt.Sprintf("pod-%04d", i), false, 0))
		}
		r.run(func() {
			r.list(pods...)
			pass(time.Minute)
			sent := r.sentSince()
			slices.Sort(sent)
			if got := len(slices.Compact(sent)); got != maxQueue {
				t.Errorf("%d Events were tried, want %d", got, maxQueue)
			}
			if got := testutil.ToFloat64(r.metrics.waiting); got != all {
				t.Errorf("%v findings wait, want %d", got, all)
			}
			r.setAnswer(nil)
			pass(2 * maxBackoff)
			if got := len(r.sentSince()); got != all {
				t.Errorf("%d Events were sent, want %d", got, all)
			}
			if got := testutil.ToFloat64(r.metrics.waiting); got != 0 {
				t.Errorf("%v findings wait, want 0", got)
			}
		})
		if r.stores < 2 || r.stores > 12 {
			t.Errorf("was stored %d times in eleven minutes and at the end, want 12 at most", r.stores)
		}
	})
}

func TestStoredIsJunk(t *testing.T) {
	for _, junk := range []string{"", "junk", `{"a":1}`, `["493eb0e59296ca18"` + strings.Repeat(" ", maxStoredBytes) + "]"} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, &events{t: t, stored: []byte(junk)}, known)
			r.run(func() {
				r.list(newPodNamed("a", false, 0))
				settle()
				r.wantSent("junk is nothing", noNetwork)
			})
			if got, want := string(r.stored), `["493eb0e59296ca18"]`; got != want {
				t.Errorf("stored = %s, want %s", got, want)
			}
		})
	}
}
