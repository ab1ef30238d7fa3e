// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/codec"
)

// maxPages is how many lists a user may have under way, page by page, in one
// resource before the oldest is no longer recorded.
const maxPages = 8

// A page is what has been seen of a list that goes on with a continue token.
type page struct {
	key      Key
	staging  *staging
	rv       string
	token    string
	ordering int64
}

// A listRecorder takes a list in as it passes by. It never slows the client: what
// it cannot take in it lets go, and counts that.
type listRecorder struct {
	body    io.ReadCloser
	l       *log
	q       *query
	rep     codec.Representation
	staging *staging
	first   bool // page of its list
	rv      string
	decoder *codec.ListDecoder // nil once recording is over
}

// recordList lets a list answer be recorded, if it is a state: not an exact one,
// and, where it has pages, all of them at one resourceVersion.
func (c *Cache) recordList(resp *http.Response, q *query) {
	if c.revoke(resp, q); resp.StatusCode != http.StatusOK {
		return
	}
	rep, ok := q.representationOf(resp.Header.Get("Content-Type"))
	if !ok || q.exact() {
		return
	}
	l := c.logOf(q.name)
	r := &listRecorder{body: resp.Body, l: l, q: q, rep: rep, staging: newStaging(), first: true}
	if token := q.opts.Continue; token != "" {
		p := l.takePage(token)
		if p == nil || p.key != r.key() {
			return
		}
		r.staging, r.rv, r.first = p.staging, p.rv, false
	}
	r.decoder = codec.NewListDecoder(rep, c.cfg.MaxObjectBytes, r.item)
	resp.Body = r
}

// exact reports whether a list asks for one resourceVersion exactly. A limit with a
// resourceVersion and no match means that, too.
func (q *query) exact() bool {
	o := &q.opts
	return o.ResourceVersionMatch == metav1.ResourceVersionMatchExact ||
		o.ResourceVersionMatch == "" && o.Limit > 0 && o.ResourceVersion != "" && o.ResourceVersion != "0"
}

// representationOf returns which of the accepted representations an answer is in.
// Its content type does not tell metadata only from whole objects; the kind does.
func (q *query) representationOf(contentType string) (codec.Representation, bool) {
	got, ok := codec.FromContentType(contentType)
	if !ok {
		return got, false
	}
	for _, rep := range q.representations() {
		if rep.Protobuf == got.Protobuf {
			return rep, true
		}
	}
	return got, false
}

func (r *listRecorder) key() Key {
	key := r.q.key
	key.Representation = r.rep
	return key
}

func (r *listRecorder) item(shape codec.Shape, bare []byte) error {
	if r.rep.Partial != "" && shape.Kind != "PartialObjectMetadata" {
		return errNotAnObject
	}
	o, _, err := newObject(r.rep, bare)
	if err != nil {
		return err
	}
	l := r.l
	l.mu.RLock()
	defer l.mu.RUnlock()
	s := l.scopes[r.key()]
	if s == nil {
		s = &scope{log: l}
	}
	if old := s.objects[o.key]; old == nil || old.rv != o.rv {
		o.bare = bytes.Clone(bare)
	}
	return r.staging.add(s, shape, watch.Added, o)
}

func (r *listRecorder) Read(p []byte) (int, error) {
	n, err := r.body.Read(p)
	if r.decoder != nil && n > 0 {
		if _, derr := r.decoder.Write(p[:n]); derr != nil {
			r.abandon("undecodable")
		}
	}
	if r.decoder != nil && err == io.EOF {
		r.finish()
	}
	return n, err
}

func (r *listRecorder) Close() error {
	if r.decoder != nil {
		r.abandon("incomplete")
	}
	return r.body.Close()
}

func (r *listRecorder) abandon(reason string) {
	r.decoder = nil
	r.l.c.metrics.abandoned.WithLabelValues(reason).Inc()
}

// finish takes the list into its scope, or remembers it until its next page.
func (r *listRecorder) finish() {
	list, err := r.decoder.Close()
	if err != nil || !validRV(list.ResourceVersion) || !r.first && list.ResourceVersion != r.rv {
		r.abandon("undecodable")
		return
	}
	r.decoder = nil
	l := r.l
	l.mu.Lock()
	defer l.mu.Unlock()
	l.saw(r.key(), list.ResourceVersion)
	if list.Continue != "" {
		l.keepPage(&page{key: r.key(), staging: r.staging, rv: list.ResourceVersion, token: list.Continue})
		return
	}
	if rep := r.rep; !rep.Protobuf && rep.Partial == "" && list.Shape.Unstructured {
		l.jsonOnly = true
	}
	s := l.scopes[r.key()]
	if s == nil {
		s = l.newScope(r.key(), false)
	}
	s.used = l.c.now()
	if err := s.replace(list.Shape, list.ResourceVersion, r.staging.byKey); err != nil {
		s.expire()
	}
}

// keepPage remembers a list until its next page. The caller holds mu.
func (l *log) keepPage(p *page) {
	if l.pages == nil {
		l.pages = map[string]*page{}
	}
	l.pageCount++
	p.ordering = l.pageCount
	l.pages[p.token] = p
	if len(l.pages) > maxPages {
		var oldest *page
		for _, o := range l.pages {
			if oldest == nil || o.ordering < oldest.ordering {
				oldest = o
			}
		}
		delete(l.pages, oldest.token)
		l.c.metrics.abandoned.WithLabelValues("incomplete").Inc()
	}
}

func (l *log) takePage(token string) *page {
	l.mu.Lock()
	defer l.mu.Unlock()
	p := l.pages[token]
	delete(l.pages, token)
	return p
}

// recordGet keeps the object of a get's answer.
func (c *Cache) recordGet(resp *http.Response, q *query) {
	if c.revoke(resp, q); resp.StatusCode != http.StatusOK {
		return
	}
	key := objectKey(q.key.Namespace, q.key.Name)
	rep, ok := q.representationOf(resp.Header.Get("Content-Type"))
	if !ok {
		return
	}
	c.captureObject(resp, c.logOf(q.name), rep, key)
}

// captureObject keeps the object that an answer holds, in the record of single
// objects. key is what it must be; "" where the answer decides (a create).
func (c *Cache) captureObject(resp *http.Response, l *log, rep codec.Representation, key string) {
	resp.Body = &capture{body: resp.Body, limit: c.cfg.MaxObjectBytes, done: func(body []byte, whole bool) {
		if !whole {
			c.metrics.abandoned.WithLabelValues("incomplete").Inc()
			return
		}
		shape, bare, err := codec.DecodeObject(rep, body)
		if err != nil || shape.Kind == "Status" {
			return
		}
		if (shape.Kind == "PartialObjectMetadata") != (rep.Partial != "") {
			return
		}
		o, _, err := newObject(rep, bytes.Clone(bare))
		if err != nil || key != "" && o.key != key {
			return
		}
		l.keepObject(rep, shape, o)
	}}
}

func (l *log) keepObject(rep codec.Representation, shape codec.Shape, o *object) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.singleOf(rep)
	s.used = l.c.now()
	if old := s.objects[o.key]; old != nil && compareRV(old.rv, o.rv) >= 0 {
		return
	}
	if _, known := s.objects[o.key]; !known && len(s.objects) >= l.c.cfg.MaxObjects {
		l.c.metrics.abandoned.WithLabelValues("too large").Inc()
		return
	}
	if s.shape.Kind == "" {
		s.setShape(shape)
		s.dirtyState = true
	}
	s.put(o)
}

// forgetObject drops the single records of an object.
func (l *log) forgetObject(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forgetSingle(key)
}

// forgetSingle is forgetObject for who holds mu.
func (l *log) forgetSingle(key string) {
	for _, s := range l.single {
		if o := s.objects[key]; o != nil {
			delete(s.objects, key)
			s.dirty[key] = &object{key: key, rv: o.rv, added: o.rv, deleted: true, bare: []byte{}}
			l.touch(true)
		}
	}
}

// revoke ends a user's right to what is cached, because the API server has just
// said that there is none: to every scope that holds as much as was asked for, and
// to the whole responses to that path. What is not there (404) goes as well.
func (c *Cache) revoke(resp *http.Response, q *query) {
	switch resp.StatusCode {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound:
	default:
		return
	}
	if resp.StatusCode != http.StatusNotFound {
		c.shares.forget(q.caller, q.name.gvr())
	}
	l := c.logIfKnown(q.name)
	if l == nil {
		return
	}
	path := resp.Request.URL.Path
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.responses {
		if p, _, _ := strings.Cut(r.Path, "?"); p == path {
			l.forgetResponse(r)
		}
	}
	if q.get {
		l.forgetSingle(objectKey(q.key.Namespace, q.key.Name))
		return
	}
	for _, s := range l.scopes {
		want := q.key
		want.Representation = s.key.Representation
		if !s.key.covers(want) {
			continue
		}
		if s.feed != nil {
			s.feed.cancel()
		}
		for w := range s.watchers {
			w.finish(nil)
		}
		l.drop(s)
	}
}

// write sends a write upstream and keeps the object in the answer: what the
// writer has been told is not forgotten when the link goes down right after.
func (c *Cache) write(req *http.Request, info *request.RequestInfo) (*http.Response, error) {
	dryRun := len(req.URL.Query()["dryRun"]) > 0
	resp, err := c.pass(req)
	if err != nil || dryRun || resp.StatusCode/100 != 2 || info.Subresource != "" && info.Subresource != "status" {
		return resp, err
	}
	q, err := parseQuery(req, info)
	if err != nil {
		resp.Body.Close()
		return nil, err
	}
	namespace := info.Namespace
	if info.APIGroup == "" && info.Resource == "namespaces" {
		namespace = ""
	}
	l := c.logOf(q.name)
	key := ""
	if info.Name != "" {
		key = objectKey(namespace, info.Name)
	}
	rep, ok := codec.FromContentType(resp.Header.Get("Content-Type"))
	if info.Verb == "delete" {
		// Also where it is only on its way out: the feeds follow that, and a record
		// that nobody corrects any more would be replayed for ever.
		l.forgetObject(key)
		return resp, nil
	}
	if ok {
		c.captureObject(resp, l, rep, key)
	}
	return resp, nil
}

func parseLogName(text string) (logName, error) {
	var n logName
	err := json.Unmarshal([]byte(text), &n)
	return n, err
}
