// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"fmt"
	"net/http"
	"runtime"
	"runtime/debug"

	"k8s.io/klog/v2"
)

// A Middleware puts one concern around a handler.
type Middleware func(http.Handler) http.Handler

// Chain puts the middlewares around h. The first is the outermost, so a chain
// reads in the order in which a request passes it.
func Chain(h http.Handler, outermostFirst ...Middleware) http.Handler {
	for i := len(outermostFirst) - 1; i >= 0; i-- {
		h = outermostFirst[i](h)
	}
	return h
}

// WithPanicRecovery keeps a panic from ending the process. The client gets a 500
// if nothing was sent yet, else its stream is aborted. http.ErrAbortHandler is
// passed on: it is how a broken stream is told from one that ended.
func WithPanicRecovery(m *metrics) Middleware {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			growStack()
			r := &response{ResponseWriter: w}
			defer func() {
				if cause := recover(); cause != nil {
					recovered(r, req, m, cause)
				}
			}()
			next.ServeHTTP(r, req)
		})
	}
}

// growStack makes the goroutine's stack as large as a request will need it, while
// there is little on it to be copied. net/http serves each request of an HTTP/2
// connection on a new goroutine, and the chain is deep.
//
//go:noinline
func growStack() {
	var frame [stackBytes]byte
	runtime.KeepAlive(&frame)
}

const stackBytes = 4 << 10

func recovered(r *response, req *http.Request, m *metrics, cause any) {
	if err, ok := cause.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(http.ErrAbortHandler)
	}
	m.panics.Inc()
	klog.FromContext(req.Context()).Error(nil, "Panic while serving", "method", req.Method, "path", req.URL.Path,
		"panic", fmt.Sprint(cause), "stack", string(debug.Stack()))
	if r.begun() {
		panic(http.ErrAbortHandler)
	}
	writeError(r, req, errPanic)
}
