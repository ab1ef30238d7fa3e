// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/identity"
)

// An Authenticator says who sent a request, by its client certificate or its
// bearer token. Errors: those of package identity, one that Config.Unavailable
// knows, or an apierrors.APIStatus; the text of any other one never reaches the
// client. It is safe for concurrent use and does not change
// the request.
type Authenticator interface {
	Authenticate(req *http.Request) (user.Info, error)
}

// WithUser puts the caller into the context, or answers 401, 403 or 503.
// unavailable turns errors that mean so into a 503 Status.
func WithUser(a Authenticator, unavailable func(error) error) Middleware {
	return func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, whole *http.Request) {
			var u user.Info
			req, err := identity.NormalizeWebSocketToken(whole)
			if err == nil {
				u, err = a.Authenticate(req)
			}
			if err != nil {
				writeError(w, whole, identityStatus(whole, unavailable(err)))
				return
			}
			if u == nil {
				writeError(w, req, apierrors.NewUnauthorized("Unauthorized"))
				return
			}
			if r := responseFrom(req.Context()); r != nil {
				r.user = u.GetName()
			}
			next.ServeHTTP(w, req.WithContext(request.WithUser(req.Context(), u)))
		})
	}
}

func identityStatus(req *http.Request, err error) error {
	var reason string
	switch {
	case isStatus(err), req.Context().Err() != nil:
		return err
	case errors.Is(err, identity.ErrUnauthenticated):
		return &statusError{StatusError: apierrors.NewUnauthorized("Unauthorized"), cause: err}
	case errors.Is(err, identity.ErrUnavailable):
		return newOffline(err)
	case errors.Is(err, identity.ErrUseToken):
		reason = "edgehub holds no key for this client certificate; use a bearer token"
	case errors.Is(err, identity.ErrImpersonation):
		reason = "impersonation needs a bearer token"
	}
	if reason != "" {
		info := infoFrom(req)
		resource := schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}
		return &statusError{StatusError: apierrors.NewForbidden(resource, info.Name, errors.New(reason)), cause: err}
	}
	return &statusError{StatusError: apierrors.NewInternalError(errors.New("edgehub: the caller could not be authenticated")), cause: err}
}
