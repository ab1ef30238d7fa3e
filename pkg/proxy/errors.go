// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/klog/v2"
)

// statusError is a Status that remembers its cause, for the log.
type statusError struct {
	*apierrors.StatusError
	cause error
}

func (e *statusError) Unwrap() error { return e.cause }

// offlineRetrySeconds is the hint in a 503: long enough not to keep a node busy
// with asking, short enough to be felt as "at once" when the link is back.
const offlineRetrySeconds = 5

func newOffline(cause error) error {
	s := apierrors.NewServiceUnavailable("edgehub: the API server cannot be reached and nothing recorded on this node answers this request")
	s.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: offlineRetrySeconds}
	return &statusError{StatusError: s, cause: cause}
}

// errBody means that the client's body could not be read to its end.
var errBody = errors.New("the body of the request cannot be read")

var errPanic = apierrors.NewInternalError(errors.New("edgehub: a bug was met while serving this request"))

func isStatus(err error) bool {
	var s apierrors.APIStatus
	return errors.As(err, &s)
}

// statusOf is the Status that a client gets for err. What is not a Status yet
// becomes one with a text of ours: the cause may hold a token or an address.
func statusOf(err error) metav1.Status {
	var (
		asStatus apierrors.APIStatus
		tooLarge *http.MaxBytesError
	)
	switch {
	case errors.As(err, &asStatus):
		return asStatus.Status()
	case errors.As(err, &tooLarge):
		return apierrors.NewRequestEntityTooLargeError("limit is " + strconv.FormatInt(tooLarge.Limit, 10) + " bytes").Status()
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded):
		return apierrors.NewTimeoutError("edgehub: the request took longer than it may", 0).Status()
	case errors.Is(err, errBody):
		return apierrors.NewBadRequest(errBody.Error()).Status()
	}
	return metav1.Status{
		Status:  metav1.StatusFailure,
		Code:    http.StatusBadGateway,
		Reason:  metav1.StatusReasonInternalError,
		Message: "edgehub: the answer of the API server cannot be used",
	}
}

// writeError answers with err as a metav1.Status. It is the only place that
// does, and the only one that logs what it answers. If the client has gone, or
// the answer has begun, the stream is aborted: an empty or cut off body must not
// look like a whole one.
//
// The Status is JSON whatever Accept says: every Kubernetes client reads it by
// its Content-Type, and so does the API server for what fails early.
func writeError(w http.ResponseWriter, req *http.Request, err error) {
	logger := klog.FromContext(req.Context())
	// With HTTP/1 net/http takes a body that was not read in time for a client that has gone.
	if errors.Is(req.Context().Err(), context.Canceled) && !errors.Is(err, os.ErrDeadlineExceeded) {
		logger.V(4).Info("Client went away", "cause", err.Error())
		panic(http.ErrAbortHandler)
	}
	if r, ok := w.(*response); ok && r.begun() {
		logger.V(2).Info("Answer broke off", "cause", err.Error())
		panic(http.ErrAbortHandler)
	}
	status := statusOf(err)
	status.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
	if !isStatus(err) && status.Code == http.StatusBadGateway {
		logger.Error(err, "Request failed", "method", req.Method, "path", req.URL.Path)
	} else {
		logger.V(4).Info("Request refused", "method", req.Method, "path", req.URL.Path, "code", status.Code, "cause", err.Error())
	}
	body, err := json.Marshal(status)
	if err != nil {
		panic(err) // a Status is made of strings and numbers
	}
	body = append(body, '\n')
	h := w.Header()
	clear(h) // headers meant for another answer
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-cache, private")
	h.Set("X-Content-Type-Options", "nosniff")
	if status.Code == http.StatusServiceUnavailable && hidesEventErrors(req) {
		h.Set("Warning", `299 edgehub "the link to the API server is down: events are not recorded, so none are shown"`)
	}
	if d := status.Details; d != nil && d.RetryAfterSeconds > 0 {
		h.Set("Retry-After", retryAfter(status.Code, d.RetryAfterSeconds, time.Now()))
	}
	w.WriteHeader(int(status.Code))
	if req.Method != http.MethodHead {
		w.Write(body) // the client may have gone; there is nobody left to tell
	}
}

// hidesEventErrors reports whether whoever asks may take an error for "no events":
// kubectl describe prints "Events: <none>" then. A warning it shows.
func hidesEventErrors(req *http.Request) bool {
	info, ok := request.RequestInfoFrom(req.Context())
	return ok && info.Resource == "events" && strings.HasPrefix(req.UserAgent(), "kubectl")
}

// retryAfter is the value of the header Retry-After. A number makes client-go
// send the request again by itself, ten times, before its caller hears of it;
// that suits a node that is busy (429). While the link is down it would turn
// every answer of milliseconds into a stall of ten times the hint, so there it is
// a date, which HTTP allows and client-go does not act on. Callers that want the
// hint find it as a number in the Status.
func retryAfter(code int32, seconds int32, now time.Time) string {
	if code == http.StatusServiceUnavailable {
		return now.Add(time.Duration(seconds) * time.Second).UTC().Format(http.TimeFormat)
	}
	return strconv.Itoa(int(seconds))
}
