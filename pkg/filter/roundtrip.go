// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/edgehub/edgehub/pkg/codec"
)

// maxObjectBytes bounds one object: the cache's limit, which is above etcd's.
const maxObjectBytes = 8 << 20

// RoundTrip answers as Next does, through the filters that are in force for the request.
// Errors of its own are an apierrors.APIStatus.
func (c *Chain) RoundTrip(req *http.Request) (*http.Response, error) {
	r := requestOf(req)
	if r == nil {
		return c.cfg.Next.RoundTrip(req)
	}
	rules := c.rules.Load()
	filters, observers := rules.match(r)
	if tracked := rules.tracked(r, filters); len(filters) == 0 && (!tracked || !readable(req)) {
		if q := req.URL.Query(); tracked && r.Verb == "watch" && resumes(q) && c.sessions.doubtful(req.URL, q.Get("resourceVersion"), r) {
			c.metrics.expired.WithLabelValues(expiredUnknown).Inc()
			return nil, errExpired
		}
		return c.pass(req, c.newPipeline(r, rules, nil), observers)
	}
	if isUpgrade(req) {
		return nil, notAcceptable("edgehub: filters are in force for this client, which need a plain answer")
	}
	p, err := c.ready(req.Context(), r)
	if err != nil {
		return nil, err
	}
	out, reps, err := narrow(req, r)
	if err != nil {
		return nil, err
	}
	if r.Verb == "watch" {
		return c.watch(out, p, observers)
	}
	resp, err := c.cfg.Next.RoundTrip(out)
	if err != nil || resp.StatusCode != http.StatusOK {
		return resp, err
	}
	c.observe(resp, r, observers)
	rep, ok := codec.FromContentType(resp.Header.Get("Content-Type"))
	if !ok || !slices.Contains(reps, rep) {
		resp.Body.Close()
		return nil, apierrors.NewInternalError(fmt.Errorf("edgehub: an answer of type %q cannot be filtered", resp.Header.Get("Content-Type")))
	}
	if r.Verb == "get" {
		err = p.get(out, resp, rep)
	} else {
		err = p.list(out, resp, rep)
	}
	if err != nil {
		return nil, err
	}
	if req.Method == http.MethodHead {
		resp.Body.Close()
		resp.Body = http.NoBody
	}
	return resp, nil
}

// pass answers as Next does. A watch ends when a filter is put in force for it.
func (c *Chain) pass(req *http.Request, p *pipeline, observers []Observer) (*http.Response, error) {
	if p.request.Verb != "watch" || isUpgrade(req) {
		resp, err := c.cfg.Next.RoundTrip(req)
		if err == nil && resp.StatusCode == http.StatusSwitchingProtocols {
			c.trackUpgrade(req.Context(), &upgraded{p, resp.Body})
		} else if err == nil {
			c.observe(resp, p.request, observers)
		}
		return resp, err
	}
	ctx, cancel := context.WithCancel(req.Context())
	resp, err := c.cfg.Next.RoundTrip(req.WithContext(ctx))
	if err != nil {
		cancel()
		return nil, err
	}
	c.observe(resp, p.request, observers)
	w := &unfiltered{ReadCloser: resp.Body, pipeline: p, key: sessionKey(p.request, req.URL, codec.Representation{}), cancel: cancel}
	resp.Body = w
	c.track(w)
	return resp, nil
}

func isUpgrade(req *http.Request) bool { return req.Header.Get("Upgrade") != "" }

func notAcceptable(message string) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusNotAcceptable, Reason: metav1.StatusReasonNotAcceptable, Message: message,
	}}
}

// readable reports whether an answer will be in a form that can be taken apart.
func readable(req *http.Request) bool {
	accepted := codec.ParseAccept(req.Header["Accept"])
	return len(accepted) > 0 && accepted[0].Other == "" && accepted[0].Partial == ""
}

// narrow asks for the answer in a form that filters can read: whole objects in JSON, or in
// protobuf where their Go types are known, and lists in one piece. The API allows a server
// to ignore limit and shardSelector.
func narrow(req *http.Request, r *Request) (*http.Request, []codec.Representation, error) {
	typed := typedResources[schema.GroupVersionResource{Group: r.APIGroup, Version: r.APIVersion, Resource: r.Resource}]
	var reps []codec.Representation
	var accept []string
	for _, a := range codec.ParseAccept(req.Header["Accept"]) {
		if a.Other == "" && a.Partial == "" && (typed || !a.Protobuf) && !slices.Contains(reps, a.Representation) {
			reps = append(reps, a.Representation)
			accept = append(accept, a.Accept(false))
		}
	}
	if reps == nil {
		return nil, nil, notAcceptable("edgehub: filters are in force for this client, which need whole objects in JSON or, for some resources, protobuf")
	}
	out := *req
	out.Method = http.MethodGet
	out.Header = req.Header.Clone()
	out.Header.Set("Accept", strings.Join(accept, ","))
	if q := req.URL.Query(); r.Verb != "get" && (q.Has("limit") || q.Has("continue") || q.Has("shardSelector")) {
		if q.Get("continue") != "" && r.Verb == "list" {
			return nil, nil, apierrors.NewResourceExpired("edgehub: filtered lists come in one piece: the list cannot be continued, start it again")
		}
		q.Del("limit")
		q.Del("shardSelector")
		u := *req.URL
		u.RawQuery = q.Encode()
		out.URL = &u
	}
	return &out, reps, nil
}

// get filters an answer that is one object.
func (p *pipeline) get(req *http.Request, resp *http.Response, rep codec.Representation) error {
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxObjectBytes+1))
	resp.Body.Close()
	if err != nil {
		return err
	}
	if len(body) > maxObjectBytes {
		return apierrors.NewInternalError(errors.New("edgehub: object is too large to be filtered"))
	}
	shape, bare, err := codec.DecodeObject(rep, body)
	if err != nil {
		return p.unreadable(err)
	}
	v, filtered, err := p.apply(req.Context(), NewObject(shape, bare))
	switch {
	case err != nil:
		return err
	case v == Drop:
		return apierrors.NewNotFound(schema.GroupResource{Group: p.request.APIGroup, Resource: p.request.Resource}, p.request.Name)
	case v == Change:
		body = shape.AppendObject(nil, filtered)
	}
	setBody(resp, io.NopCloser(bytes.NewReader(body)), int64(len(body)))
	return nil
}

func (p *pipeline) unreadable(err error) error {
	for _, f := range p.filters {
		p.chain.metrics.objects.WithLabelValues(f.Name(), verdictError).Inc()
	}
	return apierrors.NewInternalError(fmt.Errorf("edgehub: an answer cannot be filtered: %w", err))
}

func setBody(resp *http.Response, body io.ReadCloser, length int64) {
	resp.Body, resp.ContentLength = body, length
	resp.Header.Set("Content-Length", strconv.FormatInt(length, 10))
}

// list filters an answer that is a list. It is taken apart as it comes and gathered, so
// that whatever goes wrong is known before the first byte is sent, and so is how long it
// is, with which protobuf begins.
func (p *pipeline) list(req *http.Request, resp *http.Response, rep codec.Representation) error {
	gr := schema.GroupResource{Group: p.request.APIGroup, Resource: p.request.Resource}
	g := &gathered{spool: spool{dir: p.chain.cfg.Dir, metrics: p.chain.metrics}}
	if p.chain.cfg.InMemory(gr) {
		g.spool.dir = ""
	}
	view := p.chain.newView(p, rep)
	d := codec.NewListDecoder(rep, maxObjectBytes, func(shape codec.Shape, bare []byte) error {
		o := NewObject(shape, bare)
		v, b, err := p.apply(req.Context(), o)
		if err != nil || v == Drop {
			return err
		}
		m, err := o.Meta()
		if err != nil {
			return p.unreadable(err)
		}
		view.hold(m.Namespace+"/"+m.Name, b, "")
		g.lens = append(g.lens, len(b))
		return g.spool.write(b)
	})
	_, err := io.CopyBuffer(onlyWriter{d}, resp.Body, make([]byte, 32<<10))
	resp.Body.Close()
	var list codec.List
	if err == nil {
		list, err = d.Close()
	}
	if err == nil && (list.Continue != "" || list.Sharded) {
		err = fmt.Errorf("%w: a part of one", codec.ErrNotList)
	}
	if err != nil {
		_ = g.Close() // it holds nothing that is wanted
		p.chain.sessions.discard(view)
		if status := (*apierrors.StatusError)(nil); errors.As(err, &status) {
			return status
		}
		if codecError(err) {
			return p.unreadable(err)
		}
		return err
	}
	view.reach(list.ResourceVersion)
	view.claims = 1
	p.chain.sessions.put(sessionKey(p.request, req.URL, rep), view)
	g.shape, g.rv = list.Shape, list.ResourceVersion
	setBody(resp, g, g.shape.ListLen(g.rv, slices.Values(g.lens)))
	return nil
}

func codecError(err error) bool {
	return errors.Is(err, codec.ErrMalformed) || errors.Is(err, codec.ErrNotList) || errors.Is(err, codec.ErrTooLarge)
}

// onlyWriter hides from io.Copy what else a writer can do.
type onlyWriter struct{ io.Writer }

// A gathered is the body of a filtered list.
type gathered struct {
	shape codec.Shape
	rv    string
	lens  []int
	spool spool

	next  int // item; -1: the tail has been given
	done  atomic.Bool
	begun bool
	buf   []byte
	space []byte
	item  []byte
}

func (g *gathered) Read(b []byte) (int, error) {
	if g.done.Load() {
		return 0, http.ErrBodyReadAfterClose
	}
	for len(g.buf) == 0 {
		if g.next < 0 {
			return 0, io.EOF
		}
		g.buf = g.space[:0]
		if err := g.fill(); err != nil {
			return 0, err
		}
		g.space = g.buf
	}
	n := copy(b, g.buf)
	g.buf = g.buf[n:]
	return n, nil
}

func (g *gathered) fill() (err error) {
	if !g.begun {
		g.begun = true
		g.buf = g.shape.AppendListHead(g.buf, g.rv, slices.Values(g.lens))
		return g.spool.rewind()
	}
	for g.next < len(g.lens) && len(g.buf) < spoolBufferBytes {
		n := g.lens[g.next]
		g.item = slices.Grow(g.item[:0], n)[:n]
		if err := g.spool.read(g.item); err != nil {
			return err
		}
		g.buf = g.shape.AppendListItem(g.buf, g.item, g.next == 0)
		g.next++
	}
	if g.next == len(g.lens) {
		g.buf = g.shape.AppendListTail(g.buf, g.rv)
		g.next = -1
	}
	return nil
}

// Close may come while a Read is under way.
func (g *gathered) Close() error {
	if g.done.Swap(true) {
		return nil
	}
	return g.spool.close()
}

// sessionKey names who watches what, in which form.
func sessionKey(r *Request, u *url.URL, rep codec.Representation) string {
	q := u.Query()
	extra := maps.Clone(r.User.GetExtra())
	delete(extra, user.CredentialIDKey) // another one after each rotation of a token
	return fmt.Sprintf("%q %q %q %q %q %q %q %q %v", r.User.GetName(), r.User.GetUID(), r.User.GetGroups(), extra, r.Program,
		[]string{r.APIGroup, r.APIVersion, r.Resource, r.Subresource, r.Namespace, r.Name}, q["labelSelector"], q["fieldSelector"], rep)
}
