// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
)

func TestTransportErrors(t *testing.T) {
	pods := schema.GroupResource{Resource: "pods"}
	for _, tc := range []struct {
		name       string
		err        error
		code       int
		reason     metav1.StatusReason
		retryAfter string // "date" or the value
	}{
		{"unavailable", fmt.Errorf("dial: %w", errLinkDown), 503, metav1.StatusReasonServiceUnavailable, "date"},
		{"status", apierrors.NewNotFound(pods, "a"), 404, metav1.StatusReasonNotFound, ""},
		{"wrapped status", fmt.Errorf("cache: %w", apierrors.NewResourceExpired("gone")), 410, metav1.StatusReasonExpired, ""},
		{"status with a hint", apierrors.NewTooManyRequests("busy", 7), 429, metav1.StatusReasonTooManyRequests, "7"},
		{"status that is also unavailable", errors.Join(apierrors.NewAlreadyExists(pods, "a"), errLinkDown), 409, metav1.StatusReasonAlreadyExists, ""},
		{"body too large", fmt.Errorf("send: %w", &http.MaxBytesError{Limit: 3}), 413, metav1.StatusReasonRequestEntityTooLarge, ""},
		{"deadline", fmt.Errorf("send: %w", context.DeadlineExceeded), 504, metav1.StatusReasonTimeout, ""},
		{"redirect", errors.New("upstream redirected to https://169.254.169.254"), 502, metav1.StatusReasonInternalError, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := handler(t, config(transportFunc(func(*http.Request) (*http.Response, error) { return nil, tc.err })))
			w := serveRaw(t, h, "GET /api/v1/pods HTTP/1.1\nHost: localhost\nAccept: application/vnd.kubernetes.protobuf")
			var got metav1.Status
			if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
				t.Fatalf("body %q: %v", w.Body, err)
			}
			if w.Code != tc.code || got.Reason != tc.reason || int(got.Code) != tc.code || got.Kind != "Status" || got.APIVersion != "v1" || got.Status != "Failure" {
				t.Errorf("answer to %v = %d %+v, want %d %s", tc.err, w.Code, got, tc.code, tc.reason)
			}
			if ct := w.Header().Get("Content-Type"); ct != "application/json" {
				t.Errorf("Content-Type = %q, want application/json", ct)
			}
			header := w.Header().Get("Retry-After")
			if _, err := time.Parse(http.TimeFormat, header); tc.retryAfter == "date" && err == nil {
				header = "date"
			}
			if header != tc.retryAfter {
				t.Errorf("Retry-After = %q, want %q", header, tc.retryAfter)
			}
			if tc.retryAfter == "date" && got.Details.RetryAfterSeconds == 0 {
				t.Errorf("details = %+v, want retryAfterSeconds", got.Details)
			}
			if tc.code == 502 && got.Message != "edgehub: the answer of the API server cannot be used" {
				t.Errorf("message %q tells the cause", got.Message)
			}
		})
	}
}

// kubectl describe takes a failed list of events for none; so there it is told.
func TestEventsWarning(t *testing.T) {
	h := handler(t, config(transportFunc(func(*http.Request) (*http.Response, error) { return nil, errLinkDown })))
	const events = "/api/v1/namespaces/a/events?fieldSelector=involvedObject.name%3Dx"
	for _, tc := range []struct {
		agent, path string
		want        string
	}{
		{"kubectl/v1.36.3 (linux/amd64)", events, `299 edgehub "the link to the API server is down: events are not recorded, so none are shown"`},
		{"kubectl/v1.36.3 (linux/amd64)", "/apis/events.k8s.io/v1/events", `299 edgehub "the link to the API server is down: events are not recorded, so none are shown"`},
		{"kubectl/v1.36.3 (linux/amd64)", "/api/v1/namespaces/a/pods", ""},
		{"kubelet/v1.36.3 (linux/amd64)", events, ""},
	} {
		w := serveRaw(t, h, "GET "+tc.path+" HTTP/1.1\nHost: localhost\nUser-Agent: "+tc.agent)
		if got := w.Header().Get("Warning"); w.Code != 503 || got != tc.want {
			t.Errorf("GET %s by %s = %d with Warning %q, want 503 with %q", tc.path, tc.agent, w.Code, got, tc.want)
		}
	}
}

func TestErrorToHEADHasNoBody(t *testing.T) {
	h := handler(t, config(transportFunc(func(*http.Request) (*http.Response, error) { return nil, errLinkDown })))
	if w := serveRaw(t, h, "HEAD /api/v1/pods HTTP/1.1\nHost: localhost"); w.Code != 503 || w.Body.Len() != 0 {
		t.Errorf("HEAD = %d with %d bytes, want 503 with none", w.Code, w.Body.Len())
	}
}

// client-go must hear of a missing link at once, not after ten tries of its own,
// whichever encoding it speaks.
func TestClientGoHearsOfOfflineAtOnce(t *testing.T) {
	for _, contentType := range []string{"application/json", "application/vnd.kubernetes.protobuf"} {
		tries := 0
		s := httptest.NewServer(handler(t, config(transportFunc(func(*http.Request) (*http.Response, error) {
			tries++
			return nil, errLinkDown
		}))))
		defer s.Close()
		c, err := rest.UnversionedRESTClientFor(&rest.Config{Host: s.URL, ContentConfig: rest.ContentConfig{
			ContentType: contentType, NegotiatedSerializer: serializer.NewCodecFactory(scheme.Scheme)}})
		if err != nil {
			t.Fatal(err)
		}
		err = c.Post().AbsPath("/api/v1/pods").Body([]byte("x")).Do(t.Context()).Error()
		if seconds, ok := apierrors.SuggestsClientDelay(err); !apierrors.IsServiceUnavailable(err) || tries != 1 || !ok || seconds != offlineRetrySeconds {
			t.Errorf("%s: error after %d tries = %v, hint %d; want ServiceUnavailable after 1, hint %d", contentType, tries, err, seconds, offlineRetrySeconds)
		}
	}
}

func TestWriteErrorAbortsWhatHasBegun(t *testing.T) {
	for _, tc := range []struct {
		name   string
		begun  bool
		cancel bool
		abort  bool
	}{{"not begun", false, false, false}, {"begun", true, false, true}, {"client gone", false, true, true}} {
		t.Run(tc.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if tc.cancel {
				cancel()
			}
			w := &response{ResponseWriter: httptest.NewRecorder()}
			if tc.begun {
				w.WriteHeader(200)
			}
			defer func() {
				cause, _ := recover().(error)
				if got := errors.Is(cause, http.ErrAbortHandler); got != tc.abort {
					t.Errorf("writeError aborted: %v, want %v", got, tc.abort)
				}
			}()
			writeError(w, httptest.NewRequestWithContext(ctx, "GET", "/", nil), errLinkDown)
		})
	}
}
