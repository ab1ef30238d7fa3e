// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package hostnetworkpool

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/klog/v2"
)

const (
	// maxQueue bounds the Events that are being sent or tried again. Findings beyond it
	// get in when there is room.
	maxQueue = 256
	// maxStoredBytes bounds what is read back after a restart: some 50,000 findings.
	maxStoredBytes = 1 << 20
	// maxEventNameBytes is how long a name in the API server may be.
	maxEventNameBytes = 253
	maxAnswerBytes    = 64 << 10

	// savePeriod is how often it is stored what was sent. What a crash makes forget is
	// sent again, and the API server has it.
	savePeriod  = time.Minute
	sendTimeout = 30 * time.Second
	minBackoff  = time.Second
	maxBackoff  = 5 * time.Minute
)

// A reporter creates one Event for each finding, as long as it stands.
type reporter struct {
	cfg     Config
	metrics *metrics
	wake    chan struct{} // 1: the queue has changed

	mu       sync.Mutex // guards what follows
	findings []Finding
	queue    map[string]*attempt // by Finding.id; at most maxQueue
	reported map[string]bool     // by Finding.id: an Event was created
	unsaved  bool                // reported is not what is stored
	saved    time.Time           // when it was
	turn     int                 // of the next attempt
}

// An attempt is an Event that is to be sent.
type attempt struct {
	Finding
	due   time.Time
	turn  int // among those that are due at the same time
	tries int
}

func newReporter(cfg Config, m *metrics) *reporter {
	return &reporter{cfg: cfg, metrics: m, wake: make(chan struct{}, 1), queue: map[string]*attempt{}, reported: map[string]bool{}}
}

// load reads what was reported before a restart.
func (r *reporter) load(ctx context.Context) {
	b, ok := r.cfg.Load()
	if !ok {
		return
	}
	var ids []string
	err := fmt.Errorf("%d bytes are too many", len(b))
	if len(b) <= maxStoredBytes {
		err = json.Unmarshal(b, &ids)
	}
	if err != nil {
		klog.FromContext(ctx).Info("Which Events were sent is not known any more, they are sent again", "reason", err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range ids {
		r.reported[id] = true
	}
}

// save stores what was reported, if it has changed and was not stored for period. It
// returns when to come back. Only run calls it.
func (r *reporter) save(period time.Duration) time.Duration {
	r.mu.Lock()
	if left := period - time.Since(r.saved); !r.unsaved || left > 0 {
		defer r.mu.Unlock()
		if !r.unsaved {
			return maxBackoff
		}
		return left
	}
	r.unsaved, r.saved = false, time.Now()
	ids := slices.Sorted(maps.Keys(r.reported))
	r.mu.Unlock()
	if b, err := json.Marshal(ids); err == nil { // of strings: it cannot fail
		r.cfg.Store(b)
	}
	return maxBackoff
}

// want sets the findings of which there is to be an Event. Those that had one are
// forgotten if they are not among them, provided that these are all.
func (r *reporter) want(findings []Finding, all bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.findings = findings
	wanted := byID(findings)
	maps.DeleteFunc(r.queue, func(id string, _ *attempt) bool { _, ok := wanted[id]; return !ok })
	if all {
		before := len(r.reported)
		maps.DeleteFunc(r.reported, func(id string, _ bool) bool { _, ok := wanted[id]; return !ok })
		r.unsaved = r.unsaved || len(r.reported) != before
	}
	r.fill()
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// fill queues what has no Event yet, as far as there is room. The caller holds mu.
func (r *reporter) fill() {
	waiting := 0
	for _, f := range r.findings {
		id := f.id()
		if r.reported[id] {
			continue
		}
		waiting++
		if r.queue[id] == nil && len(r.queue) < maxQueue {
			r.queue[id] = &attempt{Finding: f, turn: r.turn}
			r.turn++
		}
	}
	r.metrics.waiting.Set(float64(waiting))
}

// run sends until ctx ends.
func (r *reporter) run(ctx context.Context) {
	defer r.save(0)
	for ctx.Err() == nil {
		a, wait := r.next()
		if a != nil {
			result, err := r.send(ctx, &a.Finding)
			r.done(ctx, a, result, err)
			continue
		}
		timer := time.NewTimer(min(wait, r.save(savePeriod)))
		select {
		case <-ctx.Done():
		case <-r.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// next returns the attempt whose turn it is, or else how long until there may be one.
func (r *reporter) next() (*attempt, time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var first *attempt
	for _, a := range r.queue {
		if first == nil || cmp.Or(a.due.Compare(first.due), cmp.Compare(a.turn, first.turn)) < 0 {
			first = a
		}
	}
	if first == nil {
		return nil, maxBackoff
	}
	if wait := time.Until(first.due); wait > 0 {
		return nil, wait
	}
	return first, 0
}

// done notes what became of an attempt.
func (r *reporter) done(ctx context.Context, a *attempt, result string, err error) {
	if ctx.Err() != nil && err != nil {
		return
	}
	r.metrics.events.WithLabelValues(result).Inc()
	r.mu.Lock()
	defer r.mu.Unlock()
	id := a.id()
	if r.queue[id] != a { // the finding is gone meanwhile
		return
	}
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Event about a finding was not created, it is tried again", "kind", a.Kind, "reason", err)
		a.due = time.Now().Add(backoff(a.tries))
		a.tries++
		return
	}
	delete(r.queue, id)
	r.reported[id], r.unsaved = true, true
	r.metrics.waiting.Dec()
	if len(r.queue) == 0 {
		r.fill()
	}
}

// backoff is random in the upper half of a limit that doubles up to maxBackoff.
func backoff(tries int) time.Duration {
	limit := min(2*minBackoff<<min(tries, 10), maxBackoff)
	return limit/2 + rand.N(limit/2+1)
}

// send makes one attempt.
func (r *reporter) send(ctx context.Context, f *Finding) (result string, err error) {
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	req, err := r.request(ctx, newEvent(f, r.cfg.NodeName(), time.Now()))
	if err != nil {
		return failed, err
	}
	resp, err := r.cfg.Events.RoundTrip(req)
	if err != nil {
		return failed, fmt.Errorf("create event: %w", err)
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxAnswerBytes)) // so that the connection can be used again
	switch resp.StatusCode {
	case http.StatusCreated:
		return created, nil
	case http.StatusAccepted:
		return accepted, nil
	case http.StatusConflict:
		return exists, nil
	}
	return failed, fmt.Errorf("create event: status %d", resp.StatusCode)
}

func (r *reporter) request(ctx context.Context, e *corev1.Event) (*http.Request, error) {
	body, err := json.Marshal(e)
	if err != nil {
		return nil, fmt.Errorf("encode event: %w", err)
	}
	info := &request.RequestInfo{
		IsResourceRequest: true, Verb: "create", APIPrefix: "api", APIVersion: "v1", Path: "/api/v1/namespaces/" + e.Namespace + "/events",
		Namespace: e.Namespace, Resource: "events", Parts: []string{"events"},
	}
	ctx = request.WithUser(request.WithRequestInfo(ctx, info), r.cfg.Node())
	// The host is the upstream's to fill in.
	u := url.URL{Scheme: "https", Host: "upstream.invalid", Path: info.Path}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String(), bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("create event: %w", err)
	}
	req.Host = "" // that of the URL, once the upstream has filled it in
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "edgehub")
	return req, nil
}

// newEvent says it about the pod, or, as kubelet does, about the Node in the namespace
// default with its name for a uid.
func newEvent(f *Finding, node string, now time.Time) *corev1.Event {
	about := corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: f.Namespace, Name: f.Pod, UID: types.UID(f.UID)}
	namespace := f.Namespace
	if f.Pod == "" {
		about = corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: node, UID: types.UID(node)}
		namespace = metav1.NamespaceDefault
	}
	return &corev1.Event{
		TypeMeta:            metav1.TypeMeta{APIVersion: "v1", Kind: "Event"},
		ObjectMeta:          metav1.ObjectMeta{Namespace: namespace, Name: eventName(about.Name, f.id())},
		InvolvedObject:      about,
		Type:                corev1.EventTypeWarning,
		Reason:              string(f.Kind),
		Message:             f.Message,
		Source:              corev1.EventSource{Component: "edgehub", Host: node},
		FirstTimestamp:      metav1.NewTime(now),
		LastTimestamp:       metav1.NewTime(now),
		Count:               1,
		ReportingController: "edgehub",
		ReportingInstance:   node,
	}
}

// eventName is the same for the same finding, so that the API server knows an Event that
// it has.
func eventName(object, id string) string {
	object = object[:min(len(object), maxEventNameBytes-1-len(id))]
	return strings.TrimRight(object, ".-") + "." + id
}
