// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package offline

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/tools/record"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// repetitions is how often an Event happens while cut: once as it is created, then as
// patches, for each of which client-go creates it again.
const repetitions = 5

// recorders has both of client-go's recorders emit as the node, with kubelet's
// encoding: while cut, the same again and again, and once more when the link is back.
func (e *emitter) recorders() {
	e.Offline()
	config := rest.CopyConfig(e.Hub.Through(e.Node))
	config.ContentType = rig.Protobuf
	client, err := kubernetes.NewForConfig(config)
	e.Must(err)
	ctx, cancel := context.WithCancel(e.T.Context())
	defer cancel()
	old := record.NewBroadcaster(record.WithContext(ctx))
	defer old.Shutdown()
	old.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	oldRecorder := old.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "kubelet", Host: rig.NodeName})
	young := events.NewBroadcaster(&events.EventSinkImpl{Interface: client.EventsV1()})
	defer young.Shutdown()
	e.Must(young.StartRecordingToSinkWithContext(ctx))
	youngRecorder := young.NewRecorder(scheme.Scheme, "edgehub.test/recorder")
	about := aboutPod
	about.UID = types.UID("0d6b0c4e-6f57-4a0f-9a3c-0d3d3b6d1a11")
	emit := func() {
		oldRecorder.Event(&about, corev1.EventTypeNormal, "Recorded", "again and again")
		youngRecorder.Eventf(&about, nil, corev1.EventTypeNormal, "Recorded", "Recording", "again and again")
	}

	for range repetitions {
		emit()
	}
	// The younger recorder tells of the first repetition only, and counts the others.
	e.answers("event_create", repetitions+2)
	e.answers("event_patch", repetitions)
	e.Online()
	waitSent(e.Rig)
	first := e.recorded(repetitions, 2)
	emit()
	var again []corev1.Event
	e.Must(process.Poll(e.T.Context(), "the Event is patched", func(context.Context) error {
		if again = e.recorded(0, 0); count(again[0]) != repetitions+1 {
			return fmt.Errorf("its count is %d, want %d", count(again[0]), repetitions+1)
		}
		return nil
	}))
	for i := range first {
		if first[i].UID != again[i].UID {
			e.T.Errorf("%s is another Event than before", again[i].Name)
		}
	}
}

// answers waits until a rule has given so many answers since the hub was started.
func (e *emitter) answers(rule string, want float64) {
	e.T.Helper()
	waitAnswers(e.Rig, rule, want)
}

func waitAnswers(r *rig.Rig, rule string, want float64) {
	r.T.Helper()
	r.Must(process.Poll(r.T.Context(), fmt.Sprintf("%v answers by the rule %s", want, rule), func(ctx context.Context) error {
		n, err := r.Hub.Metric(ctx, "edgehub_proxy_offline_answers_total", fmt.Sprintf("rule=%q", rule))
		if err == nil && n < want {
			err = fmt.Errorf("%v so far", n)
		}
		return err
	}))
}

func count(e corev1.Event) int32 {
	if e.Series != nil {
		return e.Series.Count
	}
	return e.Count
}

// recorded returns the Events of the two recorders, the older one's first. Counts
// that are not 0 must be theirs.
func (e *emitter) recorded(counts ...int32) []corev1.Event {
	e.T.Helper()
	all := make([]corev1.Event, len(counts))
	n := 0
	for _, v := range eventsOf(e.Rig, "p.") {
		if v.Reason != "Recorded" {
			continue
		}
		i := 0
		if v.ReportingController == "edgehub.test/recorder" {
			i = 1
		}
		all[i] = v
		n++
		if counts[i] != 0 && count(v) != counts[i] {
			e.T.Errorf("the Event %s has the count %d, want %d", v.Name, count(v), counts[i])
		}
	}
	if n != len(counts) {
		e.T.Fatalf("the API server has %d recorded Events, want %d", n, len(counts))
	}
	return all
}
