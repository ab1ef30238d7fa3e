// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/seal"
)

// A Response is a whole response as it was recorded.
type Response struct {
	ContentType string
	ETag        string
	Body        []byte    // not to be changed
	Time        time.Time // when it was recorded

	seen time.Time // when the API server last said so
}

// responseMeta is what the disk says of a whole response besides its body.
type responseMeta struct {
	Path        string `json:"path"`             // path and sorted query
	Accept      string `json:"accept,omitempty"` // as it was asked for, in normal form
	ContentType string `json:"type"`
	ETag        string `json:"etag,omitempty"`
	Time        int64  `json:"time"`           // Unix seconds
	Seal        string `json:"seal,omitempty"` // the key that the body is sealed with
}

func (m responseMeta) id() string { return m.Path + "\n" + m.Accept }

// A record is a whole response in a log.
type record struct {
	responseMeta
	body []byte // until it is on disk
	ref  journal.Ref
	used time.Time
	seen time.Time // when the API server last said so; Time is what the disk knows of it
}

func (r *record) entry() journal.Entry {
	meta, err := json.Marshal(r.responseMeta)
	if err != nil {
		panic(err) // strings and a number
	}
	return journal.Entry{Kind: entryResponse, Meta: meta}
}

func (l *log) responsePlace(r *record) string {
	place := l.name.Identity + "\n" + l.name.gvr().String() + "\n" + l.name.Class + "\n" + r.id()
	if l.name.Class != "" {
		place += "\n" + strconv.FormatInt(r.Time, 10) // on which it depends for how long it holds
	}
	return place
}

// putResponse keeps a copy of a response, in place of an older one to the same question.
// Nothing new, nothing written: an older one on disk is compared without the lock,
// because a disk that is slow must not hold up the log's other users.
func (l *log) putResponse(m responseMeta, body []byte) {
	old := l.recordedAs(m)
	same := old.sameAs(m)
	if !same && old != nil && l.name.Class == "" && old.mayBe(body) {
		b, err := old.read()
		same = err == nil && bytes.Equal(b, body)
	}
	old.close()
	l.mu.Lock()
	defer l.mu.Unlock()
	if r := l.responses[m.id()]; same && r == old.record && !l.noteworthy(time.Unix(r.Time, 0)) {
		r.used, r.seen = l.c.now(), time.Unix(m.Time, 0)
		return
	}
	r := &record{responseMeta: m, body: append([]byte{}, body...), used: l.c.now(), seen: time.Unix(m.Time, 0)}
	l.responses[m.id()] = r
	l.limitResponses()
	l.dirtyResp[m.id()] = r
	l.touch(true)
}

// A recorded is where the body of a record was at one moment. It needs no lock and
// has to be closed.
type recorded struct {
	l      *log
	record *record
	body   []byte // while it is not on disk
	ref    journal.Ref
	view   *pinnedView
}

// recordedAs takes down what is recorded under the id of m, nil if nothing is.
func (l *log) recordedAs(m responseMeta) *recorded {
	l.mu.RLock()
	defer l.mu.RUnlock()
	r := l.responses[m.id()]
	if r == nil {
		return nil
	}
	old := &recorded{l: l, record: r, body: r.body, ref: r.ref}
	if r.body == nil {
		old.view = l.view()
	}
	return old
}

// sameAs reports whether the entity tag says that m is nothing new.
func (o *recorded) sameAs(m responseMeta) bool {
	return o != nil && o.record.ETag != "" && o.record.ETag == m.ETag && o.record.ContentType == m.ContentType
}

// mayBe is false if the length alone tells the body from the recorded one.
func (o *recorded) mayBe(body []byte) bool {
	if o.body != nil || o.view == nil {
		return len(o.body) == len(body)
	}
	length := int(o.ref.Length)
	if o.view.seal != "" {
		length -= seal.Overhead
	}
	return length == len(body)
}

// read returns the body. The caller must not hold mu.
func (o *recorded) read() ([]byte, error) {
	if o.body != nil {
		return o.body, nil
	}
	if o.view == nil {
		return nil, errNoJournal
	}
	b, err := o.view.Read(o.ref, nil)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", o.record.Path, err)
	}
	return o.l.c.unseal(o.view.seal, b, o.l.responsePlace(o.record))
}

func (o *recorded) close() {
	if o != nil && o.view != nil {
		o.view.Close()
	}
}

// maxResponses bounds how many whole responses a log keeps: of discovery there are
// some hundreds, of tokens one for each volume and each time a pod is replaced.
const maxResponses = 2000

// limitResponses forgets the tenth that was used least recently when there are too
// many. The caller holds mu.
func (l *log) limitResponses() {
	if len(l.responses) <= maxResponses {
		return
	}
	all := slices.SortedFunc(maps.Values(l.responses), func(a, b *record) int { return a.used.Compare(b.used) })
	for _, r := range all[:maxResponses/10] {
		l.forgetResponse(r)
		l.c.metrics.evictions.Inc()
	}
}

// holds reports whether a response is recorded with an entity tag.
func (l *log) holds(id, tag string) bool {
	if l == nil {
		return false
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	r := l.responses[id]
	return r != nil && r.ETag == tag
}

// response returns what was recorded under the id of m. What cannot be read any
// more is forgotten.
func (l *log) response(m responseMeta) (Response, bool) {
	old := l.recordedAs(m)
	if old == nil {
		return Response{}, false
	}
	defer old.close()
	body, err := old.read()
	l.mu.Lock()
	defer l.mu.Unlock()
	r := old.record
	if err != nil && !isDamage(err) {
		l.c.metrics.journalFailures.Inc() // there are too many open files, say: next time it may be read
		return Response{}, false
	}
	if err != nil {
		l.c.metrics.damaged.Inc()
		if l.responses[m.id()] == r {
			l.forgetResponse(r)
		}
		return Response{}, false
	}
	r.used = l.c.now()
	return Response{ContentType: r.ContentType, ETag: r.ETag, Body: body, Time: time.Unix(r.Time, 0), seen: r.seen}, true
}

func (l *log) forgetResponse(r *record) {
	delete(l.responses, r.id())
	delete(l.dirtyResp, r.id())
	e := r.entry()
	e.Kind = entryForget
	l.forget(e)
}

// PutResponse keeps a small whole record of a user under a key, encrypted at
// rest. The class names what it is, from a closed set. An older one under the
// same key is replaced. The body is the cache's from here on.
func (c *Cache) PutResponse(u user.Info, class, key string, r Response) {
	if len(r.Body) > c.cfg.MaxResponseBytes {
		c.metrics.abandoned.WithLabelValues("too large").Inc()
		return
	}
	l := c.logOf(logName{User: u.GetName(), Identity: identityOf(u, nil), Class: class})
	l.putResponse(responseMeta{Path: key, ContentType: r.ContentType, ETag: r.ETag, Time: r.Time.Unix()}, r.Body)
}

// Response returns what PutResponse has kept for that user, class and key, and is not too
// old for that user.
func (c *Cache) Response(u user.Info, class, key string) (Response, bool) {
	l := c.logOf(logName{User: u.GetName(), Identity: identityOf(u, nil), Class: class})
	v, ok := l.response(responseMeta{Path: key})
	if ok && l.tooOld(v.seen) {
		return Response{}, false
	}
	return v, ok
}

// recordable reports whether a non-resource path is worth recording.
func recordable(path string) bool {
	for _, p := range []string{"/api", "/apis", "/openapi"} {
		if path == p || strings.HasPrefix(path, p+"/") {
			return true
		}
	}
	return path == "/version" || path == "/version/" || path == "/openid/v1/jwks" || path == "/.well-known/openid-configuration"
}

// normalQuery writes a query in one order; timeouts say nothing about the answer.
func normalQuery(u *url.URL) string {
	q := u.Query()
	q.Del("timeout")
	q.Del("timeoutSeconds")
	if len(q) == 0 {
		return u.Path
	}
	return u.Path + "?" + q.Encode()
}

func normalAccept(accepted []codec.Accepted) string {
	parts := make([]string, 0, len(accepted))
	for _, a := range accepted {
		if a.Other != "" {
			parts = append(parts, a.Other)
		} else {
			parts = append(parts, a.Representation.String())
		}
	}
	return strings.Join(parts, ",")
}

// roundTripResponse answers what is recorded as a whole: from upstream, and when
// that is away, from the record.
func (c *Cache) roundTripResponse(req *http.Request, name logName, accepted []codec.Accepted) (*http.Response, error) {
	meta := responseMeta{Path: normalQuery(req.URL), Accept: normalAccept(accepted)}
	if tag := req.Header.Get("If-None-Match"); tag != "" && !c.logIfKnown(name).holds(meta.id(), tag) {
		// The client has it from another time; the record has not.
		req = req.Clone(req.Context())
		req.Header.Del("If-None-Match")
	}
	resp, err := c.pass(req)
	if err == nil {
		if resp.StatusCode == http.StatusOK {
			meta.ContentType, meta.ETag = resp.Header.Get("Content-Type"), resp.Header.Get("ETag")
			c.recordResponse(resp, name, meta)
		}
		if resp.StatusCode == http.StatusNotModified {
			c.logIfKnown(name).confirm(meta.id())
		}
		return resp, nil
	}
	if !c.unavailable(err) {
		return nil, err
	}
	l := c.logIfKnown(name)
	if l == nil {
		return nil, err
	}
	r, ok := l.response(meta)
	if !ok {
		r, ok = l.anyResponse(meta.Path, accepted)
	}
	if !ok || l.tooOld(r.seen) {
		return nil, err
	}
	return c.replayResponse(req, r), nil
}

// anyResponse finds an answer to the same question in another representation
// that the client accepts as well.
func (l *log) anyResponse(path string, accepted []codec.Accepted) (Response, bool) {
	l.mu.RLock()
	var found []responseMeta
	for _, r := range l.responses {
		if r.Path == path && acceptable(r.ContentType, accepted) {
			found = append(found, r.responseMeta)
		}
	}
	l.mu.RUnlock()
	slices.SortFunc(found, func(a, b responseMeta) int { return strings.Compare(a.id(), b.id()) })
	for _, m := range found {
		if r, ok := l.response(m); ok {
			return r, true
		}
	}
	return Response{}, false
}

func acceptable(contentType string, accepted []codec.Accepted) bool {
	have := codec.ParseAccept([]string{contentType})
	return len(have) == 1 && slices.Contains(accepted, have[0])
}

func (c *Cache) recordResponse(resp *http.Response, name logName, meta responseMeta) {
	meta.Time = c.now().Unix()
	resp.Body = &capture{body: withEnd(resp), limit: c.cfg.MaxResponseBytes, done: func(body []byte, whole bool) {
		if !whole {
			c.metrics.abandoned.WithLabelValues("incomplete").Inc()
			return
		}
		c.logOf(name).putResponse(meta, body)
	}}
}

func (c *Cache) replayResponse(req *http.Request, r Response) *http.Response {
	resp := c.newResponse(req, r.ContentType, sourceReplay)
	if r.ETag != "" {
		resp.Header.Set("ETag", r.ETag)
		resp.Header.Set("Vary", "Accept")
		if slices.Contains(strings.Split(strings.ReplaceAll(req.Header.Get("If-None-Match"), " ", ""), ","), r.ETag) {
			resp.StatusCode, resp.Status = http.StatusNotModified, "304 Not Modified"
			resp.Body = http.NoBody
			return resp
		}
	}
	setBody(resp, r.Body)
	return resp
}

// newResponse starts a 200 of the cache's own.
func (c *Cache) newResponse(req *http.Request, contentType, source string) *http.Response {
	h := http.Header{}
	h.Set("Content-Type", contentType)
	h.Set("Cache-Control", "no-cache, private")
	h.Set(SourceHeader, source)
	if source == sourceReplay {
		h.Add("Warning", `110 edgehub "the link to the API server is down: this is the last recorded state"`)
		if strings.HasPrefix(req.UserAgent(), "kubectl") {
			h.Add("Warning", `299 edgehub "the link to the API server is down: this is the last recorded state"`)
		}
	}
	return &http.Response{
		Status: "200 OK", StatusCode: http.StatusOK, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: h, Body: http.NoBody, ContentLength: -1, Request: req,
	}
}

func setBody(resp *http.Response, body []byte) {
	resp.Body = io.NopCloser(bytes.NewReader(body))
	resp.ContentLength = int64(len(body))
	resp.Header.Set("Content-Length", strconv.Itoa(len(body)))
}

// maxPooledCapture is the size from which on a capture's buffer is not kept.
const maxPooledCapture = 64 << 10

var captures = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// withEnd returns the body of an answer such that its last bytes come with io.EOF. A
// client that knows the length asks its next question when it has them: what they are
// the end of must be on record by then.
func withEnd(resp *http.Response) io.ReadCloser {
	if resp.ContentLength <= 0 {
		return resp.Body
	}
	return &measured{ReadCloser: resp.Body, left: resp.ContentLength}
}

type measured struct {
	io.ReadCloser
	left int64
}

func (m *measured) Read(p []byte) (int, error) {
	n, err := m.ReadCloser.Read(p)
	if m.left -= int64(n); m.left == 0 && n > 0 && err == nil {
		var more [1]byte
		var k int
		if k, err = m.ReadCloser.Read(more[:]); k > 0 {
			err = io.ErrUnexpectedEOF // more than was said
		}
	}
	return n, err
}

// A capture copies a body while somebody else reads it. It never slows the
// reader; beyond the limit it lets go and goes on passing bytes.
type capture struct {
	body   io.ReadCloser
	buf    *bytes.Buffer // nil before the first byte and after the last
	limit  int
	failed bool
	known  func(begin []byte) bool       // if set: whether it is not worth copying
	done   func(body []byte, whole bool) // called once; body is not to be kept
}

func (t *capture) Read(p []byte) (int, error) {
	n, err := t.body.Read(p)
	if n > 0 && t.done != nil && !t.failed {
		t.take(p[:n])
	}
	if err != nil {
		t.finish(err == io.EOF)
	}
	return n, err
}

func (t *capture) take(p []byte) {
	if t.buf == nil {
		if t.known != nil && t.known(p) {
			t.done = nil
			return
		}
		t.buf = captures.Get().(*bytes.Buffer)
	}
	if t.buf.Len()+len(p) > t.limit {
		t.failed = true
		t.release()
		return
	}
	t.buf.Write(p)
}

func (t *capture) Close() error {
	t.finish(false)
	return t.body.Close()
}

func (t *capture) finish(whole bool) {
	done := t.done
	if done == nil {
		return
	}
	t.done = nil
	var b []byte
	if t.buf != nil {
		b = t.buf.Bytes()
	}
	done(b, whole && !t.failed)
	t.release()
}

func (t *capture) release() {
	if t.buf != nil && t.buf.Cap() <= maxPooledCapture {
		t.buf.Reset()
		captures.Put(t.buf)
	}
	t.buf = nil
}
