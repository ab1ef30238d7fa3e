// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package autonomy

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
)

func seconds(n int64) *int64 { return &n }

// tolerating is a toleration of everything named key, with the effect NoExecute.
func tolerating(key string, s *int64) corev1.Toleration {
	return corev1.Toleration{Key: key, Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoExecute, TolerationSeconds: s}
}

func both(s *int64) []corev1.Toleration {
	return []corev1.Toleration{tolerating("node.kubernetes.io/not-ready", s), tolerating("node.kubernetes.io/unreachable", s)}
}

func TestRaise(t *testing.T) {
	everything := corev1.Toleration{Operator: corev1.TolerationOpExists}
	equal := corev1.Toleration{Key: "node.kubernetes.io/unreachable", Value: "", Effect: corev1.TaintEffectNoExecute, TolerationSeconds: seconds(5)}
	valued := corev1.Toleration{Key: "node.kubernetes.io/unreachable", Value: "x", Effect: corev1.TaintEffectNoExecute, TolerationSeconds: seconds(5)}
	other := tolerating("example.com/maintenance", seconds(7))
	for _, tc := range []struct {
		name            string
		original        []corev1.Toleration
		seconds         *int64
		raised, changed []corev1.Toleration
	}{
		{"defaults, for ever", both(seconds(300)), nil, both(nil), both(seconds(300))},
		{"defaults, for a time", both(seconds(300)), seconds(900), both(seconds(900)), both(seconds(300))},
		{"none gets shorter", both(seconds(300)), seconds(60), both(seconds(300)), nil},
		{"for ever already", both(nil), seconds(60), both(nil), nil},
		{"none at all", nil, nil, both(nil), both(seconds(0))},
		{"none at all, for a time", nil, seconds(9), both(seconds(9)), both(seconds(0))},
		{"other taints are left", []corev1.Toleration{other}, nil, append([]corev1.Toleration{other}, both(nil)...), both(seconds(0))},
		{"everything is tolerated", []corev1.Toleration{everything}, nil, []corev1.Toleration{everything}, nil},
		{"everything, and one that is shorter",
			[]corev1.Toleration{both(seconds(3))[1], everything}, nil,
			[]corev1.Toleration{both(nil)[1], everything}, both(seconds(3))[1:]},
		{"every key, for a time", []corev1.Toleration{tolerating("", seconds(30))}, nil,
			[]corev1.Toleration{tolerating("", nil)}, []corev1.Toleration{tolerating("", seconds(30))}},
		{"no operator is Equal", []corev1.Toleration{equal}, nil,
			[]corev1.Toleration{func() corev1.Toleration { e := equal; e.TolerationSeconds = nil; return e }(), both(nil)[0]},
			[]corev1.Toleration{equal, both(seconds(0))[0]}},
		{"a value does not match", []corev1.Toleration{valued}, nil,
			append([]corev1.Toleration{valued}, both(nil)...), both(seconds(0))},
		{"the same twice: all are listed, in order",
			[]corev1.Toleration{both(nil)[1], both(seconds(60))[1], both(nil)[0]}, nil,
			[]corev1.Toleration{both(nil)[1], both(nil)[1], both(nil)[0]},
			[]corev1.Toleration{both(nil)[1], both(seconds(60))[1]}},
		{"below 0 is 0", both(seconds(-1)), seconds(1), both(seconds(1)), both(seconds(-1))},
	} {
		t.Run(tc.name, func(t *testing.T) {
			before := slices.Clone(tc.original)
			raised, changed := raise(tc.original, tc.seconds)
			if d := cmp.Diff(tc.raised, raised); d != "" {
				t.Errorf("raise(%v) (-want +got):\n%s", tc.original, d)
			}
			if d := cmp.Diff(tc.changed, changed); d != "" {
				t.Errorf("raise(%v): changed (-want +got):\n%s", tc.original, d)
			}
			if d := cmp.Diff(before, tc.original); d != "" {
				t.Errorf("raise changed its argument (-before +after):\n%s", d)
			}
		})
	}
}

func TestPlanOfDamagedRecord(t *testing.T) {
	noSchedule := corev1.Toleration{Key: "node.kubernetes.io/unreachable", Operator: corev1.TolerationOpExists}
	for _, tc := range []struct {
		name, record string
		now, want    []corev1.Toleration
	}{
		{"no JSON", "{", both(nil), both(nil)},
		{"another type", `"x"`, both(nil), both(nil)},
		{"what raise never changes", `[{"key":"example.com/x","operator":"Exists","effect":"NoExecute","tolerationSeconds":1}]`,
			[]corev1.Toleration{tolerating("example.com/x", nil)}, []corev1.Toleration{tolerating("example.com/x", nil)}},
		{"seconds that the API would refuse", `[{"key":"node.kubernetes.io/unreachable","operator":"Exists","tolerationSeconds":1}]`,
			[]corev1.Toleration{noSchedule}, []corev1.Toleration{noSchedule}},
		{"of a toleration that is not there", `[{"operator":"Exists","effect":"NoExecute","tolerationSeconds":1}]`, both(nil), both(nil)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			pod := podWith(tc.now)
			pod.Annotations = map[string]string{OriginalAnnotation: tc.record}
			got, original := plan(pod, off)
			if d := cmp.Diff(tc.want, got); d != "" || original != "" {
				t.Errorf("plan(%s), off = %v, %q, want %v and no record", tc.record, got, original, tc.want)
			}
		})
	}
}

func podWith(tolerations []corev1.Toleration) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "p", UID: "u"}, Spec: corev1.PodSpec{NodeName: "n1", Tolerations: tolerations}}
}

// staying is how long a pod stays on a node with a taint: -1 is for ever. first is the
// rule of Kubernetes 1.36, by which the first toleration that matches counts; otherwise
// the shortest does.
func staying(tolerations []corev1.Toleration, taint string, first bool) int64 {
	stays := []int64{}
	for i := range tolerations {
		if !tolerations[i].ToleratesTaint(klog.Logger{}, &corev1.Taint{Key: taint, Effect: corev1.TaintEffectNoExecute}, true) {
			continue
		}
		s := int64(-1)
		if tolerations[i].TolerationSeconds != nil {
			s = max(0, *tolerations[i].TolerationSeconds)
		}
		if stays = append(stays, s); first {
			break
		}
	}
	least := int64(-1)
	for _, s := range stays {
		if s >= 0 && (least < 0 || s < least) {
			least = s
		}
	}
	if len(stays) == 0 {
		return 0
	}
	return least
}

// updatable is the API server's rule for the tolerations of a pod that is there.
func updatable(before, after []corev1.Toleration) error {
	for _, b := range before {
		if !slices.ContainsFunc(after, func(a corev1.Toleration) bool { b.TolerationSeconds = a.TolerationSeconds; return a == b }) {
			return fmt.Errorf("%v is gone", b)
		}
	}
	for _, a := range after {
		if a.TolerationSeconds != nil && a.Effect != corev1.TaintEffectNoExecute {
			return fmt.Errorf("%v has tolerationSeconds", a)
		}
	}
	return nil
}

func randomTolerations(r *rand.Rand) (all []corev1.Toleration) {
	pick := func(s ...string) string { return s[r.IntN(len(s))] }
	for range r.IntN(6) {
		t := corev1.Toleration{
			Key:      pick("", "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "example.com/x"),
			Operator: corev1.TolerationOperator(pick("", "Equal", "Exists", "Exists", "Gt")),
			Effect:   corev1.TaintEffect(pick("", "NoExecute", "NoExecute", "NoSchedule")),
		}
		if t.Key == "" {
			t.Operator = corev1.TolerationOpExists
		}
		switch t.Operator {
		case "", corev1.TolerationOpEqual:
			t.Value = pick("", "", "5")
		case corev1.TolerationOpGt:
			t.Value = "5"
		}
		if t.Effect == corev1.TaintEffectNoExecute && r.IntN(3) > 0 {
			t.TolerationSeconds = seconds(int64(r.IntN(4)*100 - 1))
		}
		all = append(all, t)
	}
	return all
}

// TestPlanIsUndone switches autonomy on, over and off for many pods: while it is on they
// stay as long as they should, by either rule; afterwards as long as before, with every
// step one that the API allows.
func TestPlanIsUndone(t *testing.T) {
	taints := []string{"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "example.com/x"}
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 0))
		original := randomTolerations(r)
		pod := podWith(slices.Clone(original))
		step := func(s setting) {
			tolerations, record := plan(pod, s)
			if err := updatable(pod.Spec.Tolerations, tolerations); err != nil {
				t.Fatalf("seed %d: from %v to %v: %v", seed, pod.Spec.Tolerations, tolerations, err)
			}
			pod = with(pod, tolerations, record)
			again, sameRecord := plan(pod, s)
			if !reflect.DeepEqual(again, tolerations) || sameRecord != record {
				t.Fatalf("seed %d: plan of %v changes it again to %v, record %q to %q", seed, tolerations, again, record, sameRecord)
			}
		}
		for range 1 + r.IntN(3) {
			s := []setting{forever, {on: true, seconds: seconds(150)}, {on: true, seconds: seconds(1)}}[r.IntN(3)]
			step(s)
			for _, taint := range taints[:2] {
				for _, first := range []bool{true, false} {
					got := staying(pod.Spec.Tolerations, taint, first)
					if got >= 0 && (s.seconds == nil || got < *s.seconds) {
						t.Fatalf("seed %d: with %v on %v a pod stays %d s on %s (first: %v)", seed, s, original, got, taint, first)
					}
				}
			}
		}
		step(off)
		for _, taint := range taints {
			for _, first := range []bool{true, false} {
				if got, want := staying(pod.Spec.Tolerations, taint, first), staying(original, taint, first); got != want {
					t.Fatalf("seed %d: after %v a pod stays %d s on %s (first: %v), want %d: %v", seed, original, got, taint, first, want, pod.Spec.Tolerations)
				}
			}
		}
		if _, ok := pod.Annotations[OriginalAnnotation]; ok {
			t.Fatalf("seed %d: the record is left", seed)
		}
	}
}

// TestRecord pins the format of the annotation, which outlives this program.
func TestRecord(t *testing.T) {
	_, record := plan(podWith(both(seconds(300))[:1]), forever)
	want := `[{"key":"node.kubernetes.io/not-ready","operator":"Exists","effect":"NoExecute","tolerationSeconds":300},` +
		`{"key":"node.kubernetes.io/unreachable","operator":"Exists","effect":"NoExecute","tolerationSeconds":0}]`
	if record != want {
		t.Errorf("plan records %s, want %s", record, want)
	}
	var decoded []corev1.Toleration
	if err := json.Unmarshal([]byte(record), &decoded); err != nil {
		t.Error(err)
	}
}
