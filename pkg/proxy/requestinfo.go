// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"net/http"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// WithRequestInfo puts the request.RequestInfo of the path into the context, made
// by the API server's own rules.
func WithRequestInfo() Middleware {
	resolver := &request.RequestInfoFactory{
		APIPrefixes:          sets.NewString("api", "apis"),
		GrouplessAPIPrefixes: sets.NewString("api"),
	}
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			info, err := resolver.NewRequestInfo(req)
			if err != nil {
				writeError(w, req, apierrors.NewBadRequest("the path names no resource"))
				return
			}
			req = req.WithContext(request.WithRequestInfo(req.Context(), info))
			if r, ok := w.(*response); ok {
				r.info, r.long = info, isLongRunning(req)
			}
			next.ServeHTTP(w, req)
		})
	}
}

// infoFrom is the RequestInfo of a request that passed WithRequestInfo.
func infoFrom(req *http.Request) *request.RequestInfo {
	info, ok := request.RequestInfoFrom(req.Context())
	if !ok {
		panic("proxy: no RequestInfo: the chain is in the wrong order")
	}
	return info
}

// isLongRunning reports whether a request is a stream, which lasts as long as
// its client wants: it has no deadline and counts against a limit of its own.
// The list is the API server's; log is on it with and without follow, because a
// large log takes longer than a deadline.
func isLongRunning(req *http.Request) bool {
	info := infoFrom(req)
	if isUpgrade(req) || info.Verb == "watch" || info.Verb == "proxy" {
		return true
	}
	switch info.Subresource {
	case "attach", "exec", "log", "portforward", "proxy":
		return info.IsResourceRequest
	}
	return false
}

func isUpgrade(req *http.Request) bool {
	if req.Header.Get("Upgrade") == "" {
		return false
	}
	for _, v := range req.Header["Connection"] {
		for option := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(option), "upgrade") {
				return true
			}
		}
	}
	return false
}
