// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package outbox

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/klog/v2"
)

const (
	sendTimeout = 30 * time.Second
	// maxAnswerBytes bounds what is read of an answer; a Status is much shorter.
	maxAnswerBytes = 64 << 10

	minBackoff = time.Second
	maxBackoff = 30 * time.Second
	// maxRetryAfter is how long an answer may ask to wait.
	maxRetryAfter = time.Minute

	// maxInternalErrors is how often in a row an Event may be answered 500, or not within
	// sendTimeout: a webhook that fails for one must not hold up all others for ever.
	maxInternalErrors = 20

	// noteWithin is when the disk is told at the latest what was sent.
	noteWithin = time.Second
	// diskRetry is how long a disk that failed is left alone.
	diskRetry = 30 * time.Second
)

// What the API server says to an Event that it will not be asked about again.
const (
	created  = "created"
	exists   = "exists"
	rejected = "rejected"
)

// errInternal is what may be one Event's fault: something fails, or hangs, over it.
var errInternal = errors.New("internal error of the API server")

// Run sends what waits until ctx ends, and returns nil then. What has gone wrong
// with the disk, the link or the API server is tried again. It must be called once.
func (o *Outbox) Run(ctx context.Context) error {
	logger := klog.FromContext(ctx)
	for {
		err := o.Load(ctx)
		if err == nil {
			break
		}
		logger.Error(err, "Outbox could not be read; will try again")
		if !wait(ctx, diskRetry) {
			return nil
		}
	}
	var noting sync.WaitGroup
	noting.Go(func() { o.noteSent(ctx) })
	o.sendAll(ctx)
	noting.Wait()
	o.tryNote(ctx)
	return nil
}

// noteSent keeps the disk no more than noteWithin behind, until ctx ends.
func (o *Outbox) noteSent(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-o.popped:
		}
		if !wait(ctx, noteWithin) {
			return
		}
		if !o.tryNote(ctx) {
			signal(o.popped)
			wait(ctx, diskRetry)
		}
	}
}

func (o *Outbox) tryNote(ctx context.Context) bool {
	o.disk.Lock()
	defer o.disk.Unlock()
	err := o.note(ctx)
	if err != nil {
		// That Events are sent again after a crash is the lesser evil.
		klog.FromContext(ctx).Error(err, "Outbox could not note what was sent; it may be sent again")
	}
	return err == nil
}

// sendAll sends one Event after the other until ctx ends.
func (o *Outbox) sendAll(ctx context.Context) {
	logger := klog.FromContext(ctx)
	internal := 0 // errors in a row
	for tries := 0; o.ready(ctx); {
		after, err := o.sendOldest(ctx, internal >= maxInternalErrors)
		if internal++; !errors.Is(err, errInternal) {
			internal = 0
		}
		if err == nil {
			tries = 0
			continue
		}
		if o.cfg.IsUnavailable(err) {
			tries = 0 // the API server is not the one who has to be spared
		} else {
			logger.V(2).Info("Event was not taken and will be sent again", "err", err)
		}
		wait(ctx, max(after, backoff(tries)))
		tries++
	}
}

// ready waits for an Event and for the link. It returns false when ctx has ended.
func (o *Outbox) ready(ctx context.Context) bool {
	for ctx.Err() == nil {
		changed := o.cfg.Changed() // before Up, so that none is missed
		switch {
		case o.Empty():
			changed = o.added
		case o.cfg.Up():
			return true
		}
		select {
		case <-ctx.Done():
		case <-changed:
		}
	}
	return false
}

// sendOldest sends one Event, if one waits. After an error it is to be sent again,
// and not before the given time has passed. The last time an Event that is answered
// 500 is given up.
func (o *Outbox) sendOldest(ctx context.Context, last bool) (after time.Duration, err error) {
	it, body, err := o.oldest(ctx)
	if it == nil || err != nil {
		return 0, err
	}
	result, after, err := o.post(ctx, it, body)
	if last && errors.Is(err, errInternal) {
		result, err = rejected, nil
	}
	if err != nil {
		return after, err
	}
	o.metrics.sent.WithLabelValues(result).Inc()
	if result == rejected {
		klog.FromContext(ctx).V(2).Info("Event was rejected by the API server", "event", klog.KRef(it.Namespace, it.Name))
	}
	o.finish(ctx, it)
	return 0, nil
}

// post sends an Event and reads the answer.
func (o *Outbox) post(ctx context.Context, it *item, body []byte) (result string, after time.Duration, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, sendTimeout, errInternal)
	defer cancel()
	req, err := o.request(ctx, it, body)
	if err != nil {
		return "", 0, fmt.Errorf("send event: %w", err)
	}
	resp, err := o.cfg.Upstream.RoundTrip(req)
	if err != nil && errors.Is(context.Cause(ctx), errInternal) {
		return "", 0, fmt.Errorf("send event: %w: no answer after %v", errInternal, sendTimeout)
	}
	if err != nil {
		return "", 0, fmt.Errorf("send event: %w", err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes))
	switch code := resp.StatusCode; {
	case code/100 == 2: // whatever became of the body
		return created, 0, nil
	case code == http.StatusConflict && err != nil:
		return "", 0, fmt.Errorf("send event: read the answer: %w", err)
	case code == http.StatusConflict && reason(answer) == metav1.StatusReasonAlreadyExists:
		return exists, 0, nil
	case code == http.StatusInternalServerError:
		return "", retryAfter(resp.Header), fmt.Errorf("send event: %w: status %d", errInternal, code)
	// 401: the certificate may be about to be renewed.
	case code == http.StatusUnauthorized, code == http.StatusRequestTimeout, code == http.StatusTooManyRequests, code/100 != 4:
		return "", retryAfter(resp.Header), fmt.Errorf("send event: status %d", code)
	}
	return rejected, 0, nil
}

func (o *Outbox) request(ctx context.Context, it *item, body []byte) (*http.Request, error) {
	info := &request.RequestInfo{
		IsResourceRequest: true, Verb: "create", APIPrefix: "api", APIGroup: it.Group, APIVersion: "v1",
		Namespace: it.Namespace, Resource: "events", Parts: []string{"events"},
	}
	prefix := "/api/v1"
	if it.Group != "" {
		info.APIPrefix, prefix = "apis", "/apis/"+it.Group+"/v1"
	}
	info.Path = prefix + "/namespaces/" + it.Namespace + "/events"
	ctx = request.WithUser(request.WithRequestInfo(ctx, info), o.cfg.Node())
	// The host is the upstream's to fill in.
	u := url.URL{Scheme: "https", Host: "upstream.invalid", Path: info.Path}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Host = "" // that of the URL, once the upstream has filled it in
	if it.ContentType != "" {
		req.Header.Set("Content-Type", it.ContentType)
	}
	req.Header.Set("Accept", "application/json")
	req.Header.Set("User-Agent", "edgehub")
	return req, nil
}

// reason is the reason of a Status, empty for anything else.
func reason(answer []byte) metav1.StatusReason {
	var s metav1.Status
	if err := json.Unmarshal(answer, &s); err != nil || s.Kind != "Status" {
		return ""
	}
	return s.Reason
}

// retryAfter is how long an answer asks to wait, 0 if it does not say so in seconds.
func retryAfter(h http.Header) time.Duration {
	seconds, err := strconv.Atoi(h.Get("Retry-After"))
	if err != nil || seconds < 0 {
		return 0
	}
	return min(time.Duration(min(seconds, 3600))*time.Second, maxRetryAfter)
}

// backoff is random in the upper half of a limit that doubles up to maxBackoff.
func backoff(tries int) time.Duration {
	limit := min(2*minBackoff<<min(tries, 10), maxBackoff)
	return limit/2 + rand.N(limit/2+1)
}

// wait returns false if ctx ends before d has passed.
func wait(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
