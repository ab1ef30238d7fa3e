// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"io"
	"net/http"
)

// WithHealth answers /livez and /readyz by itself: a probe has no credential, and
// it asks about this process, not about the API server. What exactly is not ready
// is told on the metrics address only.
func WithHealth(ready func() error) Middleware {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			switch req.URL.Path {
			case "/livez":
				writeHealth(w, http.StatusOK, "ok")
			case "/readyz":
				if err := ready(); err != nil {
					writeHealth(w, http.StatusServiceUnavailable, "not ready")
					return
				}
				writeHealth(w, http.StatusOK, "ok")
			default:
				next.ServeHTTP(w, req)
			}
		})
	}
}

func writeHealth(w http.ResponseWriter, code int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("Cache-Control", "no-cache, private")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	io.WriteString(w, text) // a probe that went away needs no answer
}
