// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"encoding/base64"
	"errors"
	"net/http"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestNormalizeWebSocketToken(t *testing.T) {
	bearer := func(token string) string {
		return "base64url.bearer.authorization.k8s.io." + base64.RawURLEncoding.EncodeToString([]byte(token))
	}
	ws := func(h http.Header) http.Header {
		h["Connection"], h["Upgrade"] = []string{"keep-alive, Upgrade"}, []string{"WebSocket"}
		return h
	}
	for _, tc := range []struct {
		name     string
		in, want http.Header // want nil: as it was
		err      error
	}{
		{"last", ws(http.Header{protocolHeader: {"v5.channel.k8s.io, " + bearer("tok")}}),
			ws(http.Header{protocolHeader: {"v5.channel.k8s.io"}, "Authorization": {"Bearer tok"}}), nil},
		{"between, in two headers", ws(http.Header{protocolHeader: {"a," + bearer("tok"), "b , c"}}),
			ws(http.Header{protocolHeader: {"a, b, c"}, "Authorization": {"Bearer tok"}}), nil},
		{"beside an Authorization header", ws(http.Header{protocolHeader: {"a," + bearer("other")}, "Authorization": {"Bearer tok"}}),
			ws(http.Header{protocolHeader: {"a"}, "Authorization": {"Bearer tok"}}), nil},
		{"beside an empty Authorization header", ws(http.Header{protocolHeader: {"a," + bearer("other")}, "Authorization": {""}}),
			ws(http.Header{protocolHeader: {"a"}, "Authorization": {""}}), nil},
		{"no token", ws(http.Header{protocolHeader: {"a, b"}}), nil, nil},
		{"no subprotocol", ws(http.Header{}), nil, nil},
		{"not an upgrade", http.Header{protocolHeader: {"a," + bearer("tok")}}, nil, nil},
		{"another upgrade", http.Header{protocolHeader: {"a," + bearer("tok")}, "Connection": {"Upgrade"}, "Upgrade": {"SPDY/3.1"}}, nil, nil},
		{"alone", ws(http.Header{protocolHeader: {bearer("tok")}}), nil, ErrUnauthenticated},
		{"twice", ws(http.Header{protocolHeader: {"a", bearer("tok"), bearer("tok")}}), nil, ErrUnauthenticated},
		{"empty", ws(http.Header{protocolHeader: {"a, " + bearer("")}}), nil, ErrUnauthenticated},
		{"padded", ws(http.Header{protocolHeader: {"a, " + bearer("tokk") + "=="}}), nil, ErrUnauthenticated},
		{"not base64url", ws(http.Header{protocolHeader: {"a, " + bearer("") + "+/"}}), nil, ErrUnauthenticated},
		{"line break", ws(http.Header{protocolHeader: {"a, " + bearer("x\r\nX-Remote-User: admin")}}), nil, ErrUnauthenticated},
		{"blank", ws(http.Header{protocolHeader: {"a, " + bearer("x y")}}), nil, ErrUnauthenticated},
	} {
		t.Run(tc.name, func(t *testing.T) {
			req := newRequest()
			req.Header = tc.in
			before := tc.in.Clone()
			got, err := NormalizeWebSocketToken(req)
			if !errors.Is(err, tc.err) {
				t.Fatalf("NormalizeWebSocketToken() = %v, want %v", err, tc.err)
			}
			if diff := cmp.Diff(before, req.Header); diff != "" {
				t.Errorf("the request was changed (-before +after):\n%s", diff)
			}
			switch {
			case tc.err != nil:
				if got != nil {
					t.Error("NormalizeWebSocketToken() returns a request beside its error")
				}
			case tc.want == nil:
				if got != req {
					t.Error("NormalizeWebSocketToken() returns another request, though there is nothing to do")
				}
			default:
				if diff := cmp.Diff(tc.want, got.Header); diff != "" {
					t.Errorf("NormalizeWebSocketToken() (-want +got):\n%s", diff)
				}
			}
		})
	}
}
