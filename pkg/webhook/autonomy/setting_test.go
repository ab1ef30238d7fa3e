// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package autonomy

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestOfNode(t *testing.T) {
	hour := setting{on: true, seconds: seconds(3600)}
	const own, flag, duration = Annotation, "node.beta.openyurt.io/autonomy", "node.openyurt.io/autonomy-duration"
	for _, tc := range []struct {
		name        string
		annotations map[string]string
		want        *setting
		wrong       bool
	}{
		{"nothing", nil, nil, false},
		{"true", map[string]string{own: "true"}, &forever, false},
		{"false", map[string]string{own: "false"}, &off, false},
		{"a duration", map[string]string{own: "1h"}, &hour, false},
		{"a part of a second is one", map[string]string{own: "10ms"}, &setting{on: true, seconds: seconds(1)}, false},
		{"0 is no duration", map[string]string{own: "0"}, nil, true},
		{"below 0", map[string]string{own: "-1h"}, nil, true},
		{"another case", map[string]string{own: "True"}, nil, true},
		{"empty", map[string]string{own: ""}, nil, true},
		{"false goes before OpenYurt's", map[string]string{own: "false", flag: "true"}, &off, false},
		{"what means nothing does not", map[string]string{own: "yes", flag: "true"}, &forever, true},
		{"OpenYurt's flag", map[string]string{flag: "true"}, &forever, false},
		{"OpenYurt's flag, false", map[string]string{flag: "false"}, &off, false},
		{"OpenYurt's flag means nothing", map[string]string{flag: "1h"}, nil, true},
		{"OpenYurt's duration", map[string]string{duration: "1h"}, &hour, false},
		{"OpenYurt's 0 is for ever", map[string]string{duration: "0"}, &forever, false},
		{"OpenYurt's below 0 is for ever", map[string]string{duration: "-5s"}, &forever, false},
		{"OpenYurt's duration means nothing", map[string]string{duration: "true"}, nil, true},
		{"OpenYurt's flag goes before its duration", map[string]string{flag: "true", duration: "1h"}, &forever, false},
		{"OpenYurt's duration without its flag", map[string]string{flag: "false", duration: "1h"}, &hour, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got, err := ofNode(tc.annotations)
			if d := cmp.Diff(tc.want, got, cmp.AllowUnexported(setting{})); d != "" || (err != nil) != tc.wrong {
				t.Errorf("ofNode(%v) = %v, %v, want %v, wrong: %v", tc.annotations, got, err, tc.want, tc.wrong)
			}
		})
	}
}

func TestOfPool(t *testing.T) {
	for value, want := range map[string]*setting{"true": &forever, "false": &off, "2s": {on: true, seconds: seconds(2)}, "on": nil} {
		got, err := ofPool(map[string]string{Annotation: value, openYurtAnnotation: "true"})
		if d := cmp.Diff(want, got, cmp.AllowUnexported(setting{})); d != "" || (err != nil) != (want == nil) {
			t.Errorf("ofPool(%q) = %v, %v, want %v", value, got, err, want)
		}
	}
}

func TestExempt(t *testing.T) {
	controlled := func(kind string, by bool) *corev1.Pod {
		return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{{Kind: kind, Controller: &by}}}}
	}
	now := metav1.NewTime(time.Unix(1, 0))
	for _, tc := range []struct {
		name string
		pod  *corev1.Pod
		want bool
	}{
		{"a pod", &corev1.Pod{}, false},
		{"pending", &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodPending}}, false},
		{"running", &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodRunning}}, false},
		{"unknown", &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodUnknown}}, false},
		{"succeeded", &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodSucceeded}}, true},
		{"failed", &corev1.Pod{Status: corev1.PodStatus{Phase: corev1.PodFailed}}, true},
		{"terminating", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now}}, true},
		{"mirror", &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{"kubernetes.io/config.mirror": ""}}}, true},
		{"of a DaemonSet", controlled("DaemonSet", true), true},
		{"owned by a DaemonSet, not controlled", controlled("DaemonSet", false), false},
		{"of a StatefulSet", controlled("StatefulSet", true), false},
	} {
		if got := exempt(tc.pod); got != tc.want {
			t.Errorf("exempt(%s) = %v, want %v", tc.name, got, tc.want)
		}
	}
}
