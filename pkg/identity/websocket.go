// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"golang.org/x/net/http/httpguts"
)

const (
	protocolHeader       = "Sec-Websocket-Protocol"
	bearerProtocolPrefix = "base64url.bearer.authorization.k8s.io."
)

// NormalizeWebSocketToken turns the bearer token that a browser can only send as
// a WebSocket subprotocol, base64url.bearer.authorization.k8s.io.<token>, into
// an Authorization header and takes the subprotocol away, so that for all that
// follows there is one place for a token. An Authorization header that is
// already there wins, as in kube-apiserver; the subprotocol is taken away all
// the same, so that no unverified token goes upstream.
//
// The result is req itself where there is nothing to do, else a shallow copy
// with headers of its own: req is not changed. To be called before Authenticate.
// Two such subprotocols, none beside it, or one that is not base64url of a
// token: ErrUnauthenticated.
func NormalizeWebSocketToken(req *http.Request) (*http.Request, error) {
	if !isWebSocket(req.Header) {
		return req, nil
	}
	var encoded, others []string
	for _, value := range req.Header[protocolHeader] {
		for protocol := range strings.SplitSeq(value, ",") {
			protocol = strings.TrimSpace(protocol)
			if token, ok := strings.CutPrefix(protocol, bearerProtocolPrefix); ok {
				encoded = append(encoded, token)
			} else if protocol != "" {
				others = append(others, protocol)
			}
		}
	}
	if len(encoded) == 0 {
		return req, nil
	}
	// The server has to answer with one of the subprotocols asked for.
	if len(encoded) > 1 || len(others) == 0 {
		return nil, fmt.Errorf("%w: %d bearer subprotocols beside %d others", ErrUnauthenticated, len(encoded), len(others))
	}
	out := req.WithContext(req.Context()) // a shallow copy
	out.Header = req.Header.Clone()
	out.Header.Set(protocolHeader, strings.Join(others, ", "))
	if _, ok := req.Header["Authorization"]; ok {
		return out, nil
	}
	token, err := base64.RawURLEncoding.DecodeString(encoded[0])
	if err != nil || !validToken(string(token)) {
		return nil, fmt.Errorf("%w: malformed bearer subprotocol", ErrUnauthenticated)
	}
	out.Header.Set("Authorization", "Bearer "+string(token))
	return out, nil
}

func isWebSocket(h http.Header) bool {
	return httpguts.HeaderValuesContainsToken(h["Connection"], "upgrade") &&
		slices.ContainsFunc(h["Upgrade"], func(v string) bool { return strings.EqualFold(strings.TrimSpace(v), "websocket") })
}
