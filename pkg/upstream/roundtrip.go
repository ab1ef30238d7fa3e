// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/net/http/httpguts"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// RoundTrip sends the request to the server that is chosen now; scheme and host
// of its URL do not matter. A request with an Authorization header goes out on a
// connection that has shown no client certificate. One without goes out with the
// node's, if request.UserFrom of its context is the node itself and it does not
// impersonate. Anything else is ErrCredential, and is not sent.
//
// ErrUnavailable, with the cause in its chain, is returned at once when no
// server is up, and for all that goes wrong on the way, also by the answer's
// Body. If the request's context has ended, the error is the context's. A
// redirect is ErrRedirect.
//
// An upgrade goes out with HTTP/1.1; the Body of a 101 answer is an
// io.ReadWriteCloser. Any other answer to an upgrade is the last on its
// connection. Apart from upgrades gzip is this side's business: the header
// Accept-Encoding is not sent on, and the Body is unpacked.
func (u *Upstream) RoundTrip(req *http.Request) (*http.Response, error) {
	bearer, err := u.credential(req)
	if err != nil {
		closeBody(req)
		u.metrics.requests.WithLabelValues("refused").Inc()
		return nil, err
	}
	session := u.session()
	if session == nil {
		closeBody(req)
		u.metrics.requests.WithLabelValues("unavailable").Inc()
		return nil, fmt.Errorf("%w: %s: %w", ErrUnavailable, u.servers[0].name, u.servers[0].why())
	}
	resp, err := session.roundTrip(req, bearer)
	switch {
	case errors.Is(err, ErrRedirect):
		u.metrics.requests.WithLabelValues("3xx").Inc()
	case err == nil:
		u.metrics.requests.WithLabelValues(class(resp.StatusCode)).Inc()
	case req.Context().Err() != nil:
		u.metrics.requests.WithLabelValues("canceled").Inc()
	default:
		u.metrics.requests.WithLabelValues("error").Inc()
	}
	return resp, err
}

const (
	authorization = "Authorization"
	impersonation = "Impersonate-" // and User, Group, Uid, Extra-*
)

// credential says whether the request brings its own credential, or else may use
// the node's. It is the only place that decides this.
func (u *Upstream) credential(req *http.Request) (bearer bool, err error) {
	impersonates := false
	for key, values := range req.Header {
		switch {
		case strings.EqualFold(key, authorization):
			if key != authorization || len(values) != 1 || !wholeAuthorization(values[0]) {
				return false, fmt.Errorf("%w: Authorization is empty, doubled or malformed", ErrCredential)
			}
			bearer = true
		case len(key) >= len(impersonation) && strings.EqualFold(key[:len(impersonation)], impersonation):
			impersonates = true
		}
	}
	if bearer {
		return true, nil
	}
	caller, ok := request.UserFrom(req.Context())
	switch {
	case !ok || caller == nil:
		return false, fmt.Errorf("%w: no Authorization and no user", ErrCredential)
	case caller.GetName() != u.Node().GetName() || !slices.Contains(caller.GetGroups(), user.NodesGroup):
		return false, fmt.Errorf("%w: no Authorization, and %q is not this node", ErrCredential, caller.GetName())
	case impersonates:
		return false, fmt.Errorf("%w: impersonation needs a token", ErrCredential)
	}
	return false, nil
}

// wholeAuthorization wants a scheme and something after it: kube-apiserver takes
// an empty token for an anonymous caller.
func wholeAuthorization(value string) bool {
	scheme, rest, _ := strings.Cut(strings.TrimSpace(value), " ")
	return scheme != "" && strings.TrimSpace(rest) != ""
}

func isUpgrade(h http.Header) bool {
	return h.Get("Upgrade") != "" && httpguts.HeaderValuesContainsToken(h["Connection"], "Upgrade")
}

// isReview reports whether a request asks whose its token is. Anybody can make up a token,
// and kube-apiserver ends an HTTP/2 connection on which it has answered 401: these have
// connections of their own, so that nobody ends those of others.
func isReview(req *http.Request) bool {
	return req.URL.Path == "/apis/authentication.k8s.io/v1/selfsubjectreviews"
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		_ = req.Body.Close() // the caller's own
	}
}

// roundTrip sends one request over the session's connections.
func (x *session) roundTrip(req *http.Request, bearer bool) (*http.Response, error) {
	upgrade := isUpgrade(req.Header)
	ctx, cancel := context.WithCancelCause(req.Context())
	stop := context.AfterFunc(x.ctx, func() { cancel(context.Cause(x.ctx)) })
	e := &exchange{session: x, caller: req.Context(), release: func() { stop(); cancel(nil) }}
	resp, err := x.transport(bearer, upgrade || bearer && isReview(req)).RoundTrip(e.outgoing(ctx, req, upgrade))
	if err != nil {
		err = e.translate(err)
		e.release()
		return nil, err
	}
	if resp.StatusCode/100 == 3 && resp.StatusCode != http.StatusNotModified {
		_ = resp.Body.Close() // not wanted
		e.release()
		return nil, fmt.Errorf("%w: %s: status %d", ErrRedirect, x.server.name, resp.StatusCode)
	}
	resp.Request = req
	resp.Body = e.wrap(resp.Body)
	return resp, nil
}

// outgoing is what is sent for req.
func (e *exchange) outgoing(ctx context.Context, req *http.Request, upgrade bool) *http.Request {
	out := req.WithContext(ctx)
	to := *req.URL
	to.Scheme, to.Host, to.User, to.Opaque = "https", e.session.server.name, nil, ""
	out.URL, out.Host, out.RequestURI, out.Close = &to, "", "", false
	if !upgrade {
		out.Header = withoutHop(req.Header)
	} else if out.Header == nil {
		out.Header = http.Header{}
	}
	if out.Body != nil && out.Body != http.NoBody {
		e.sent = &requestBody{ReadCloser: out.Body}
		out.Body = e.sent
	}
	return out
}

// hop are the headers that are not sent on. Without Accept-Encoding the transport
// asks for gzip and unpacks it.
var hop = []string{"Connection", "Upgrade", "Accept-Encoding"}

// withoutHop returns h itself if there is nothing to be removed: a transport does
// not change the headers of its request.
func withoutHop(h http.Header) http.Header {
	if h == nil {
		return http.Header{}
	}
	if !slices.ContainsFunc(hop, func(name string) bool { return h[name] != nil }) {
		return h
	}
	h = maps.Clone(h)
	for _, name := range hop {
		delete(h, name)
	}
	return h
}

// An exchange is one request and its answer.
type exchange struct {
	session *session
	caller  context.Context // the request's
	sent    *requestBody    // nil: none
	release func()          // lets go of the session; may be called again
}

// translate says whose fault an error is: the caller's, the session's that has
// ended, or the connection's, which the session is told.
func (e *exchange) translate(err error) error {
	if cause := e.caller.Err(); cause != nil {
		if errors.Is(err, cause) {
			return err
		}
		return fmt.Errorf("%w (%s)", cause, err.Error())
	}
	if e.sent != nil {
		if cause := e.sent.failure.Load(); cause != nil {
			return fmt.Errorf("read request body: %w", *cause)
		}
	}
	x := e.session
	if x.ctx.Err() == nil {
		x.failed(err)
	}
	if x.ctx.Err() != nil {
		// Not with err in the chain: it may be the context that the session ended.
		return fmt.Errorf("%w (%s)", context.Cause(x.ctx), err.Error())
	}
	return fmt.Errorf("%w: %s: %w", ErrUnavailable, x.server.name, err)
}

// wrap makes the errors of an answer's body those that RoundTrip promises.
func (e *exchange) wrap(body io.ReadCloser) io.ReadCloser {
	if body == http.NoBody {
		e.release()
		return body
	}
	if rw, ok := body.(io.ReadWriteCloser); ok {
		return &upgradeBody{responseBody: responseBody{ReadCloser: body, exchange: e}, rw: rw}
	}
	return &responseBody{ReadCloser: body, exchange: e}
}

type responseBody struct {
	io.ReadCloser
	exchange *exchange
	closed   atomic.Bool
}

func (b *responseBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	switch {
	case err == nil:
		return n, nil
	case errors.Is(err, io.EOF): // never wrapped, as io.Reader has it
		b.exchange.release()
		return n, io.EOF
	case b.closed.Load():
		return n, err
	}
	err = b.exchange.translate(err)
	b.exchange.release()
	return n, err
}

func (b *responseBody) Close() error {
	b.closed.Store(true)
	err := b.ReadCloser.Close()
	b.exchange.release()
	return err
}

// An upgradeBody is both directions of a connection that was upgraded. Each may
// end by itself, so only Close lets go.
type upgradeBody struct {
	responseBody
	rw io.ReadWriteCloser
}

var _ io.ReadWriteCloser = (*upgradeBody)(nil)

func (b *upgradeBody) Read(p []byte) (int, error) {
	n, err := b.rw.Read(p)
	return n, b.translate(err)
}

func (b *upgradeBody) Write(p []byte) (int, error) {
	n, err := b.rw.Write(p)
	return n, b.translate(err)
}

// CloseWrite tells the server that nothing more comes.
func (b *upgradeBody) CloseWrite() error {
	if c, ok := b.rw.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return http.ErrNotSupported
}

func (b *upgradeBody) translate(err error) error {
	if err == nil || errors.Is(err, io.EOF) || b.closed.Load() {
		return err
	}
	return b.exchange.translate(err)
}

// A requestBody remembers whether it was the caller's body that failed.
type requestBody struct {
	io.ReadCloser
	failure atomic.Pointer[error]
}

func (b *requestBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && err != io.EOF {
		b.failure.Store(&err)
	}
	return n, err
}
