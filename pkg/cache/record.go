// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

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
	resets   int64
	ordering int64
}

// A listRecorder takes a list in as it passes by. It never slows the client: what
// it cannot take in it lets go, and counts that.
type listRecorder struct {
	body    io.ReadCloser
	l       *log
	rep     codec.Representation
	key     Key
	staging *staging
	first   bool // page of its list
	rv      string
	floor   string             // the answer is as new as this, or of another history
	resets  int64              // of the history, when the answer began
	decoder *codec.ListDecoder // nil once recording is over

	scope *scope // of the key, while a part is decoded
	shape codec.Shape
	// known are the items as long as all of them are what the scope has already,
	// in the API server's order. It is nil when they are staged instead.
	known   []*object
	compare bool
	name    []byte // of the item that is looked up
}

// recordList lets a list answer be recorded, if it is a state: not an exact one,
// and, where it has pages, all of them at one resourceVersion.
// An answer that is older than floor says that the API server's history was reset.
func (c *Cache) recordList(resp *http.Response, q *query, floor string) {
	if c.revoke(resp, q); resp.StatusCode != http.StatusOK {
		return
	}
	rep, ok := q.representationOf(resp.Header.Get("Content-Type"))
	if !ok || q.exact() {
		return
	}
	l := c.logOf(q.name)
	r := &listRecorder{body: withEnd(resp), l: l, rep: rep, key: q.key, floor: floor, resets: c.resets.Load(), staging: newStaging(), first: true, compare: true}
	r.key.Representation = rep
	if token := q.opts.Continue; token != "" {
		p := l.takePage(token)
		if p == nil || p.key != r.key || p.resets != r.resets {
			return
		}
		r.staging, r.rv, r.first, r.compare = p.staging, p.rv, false, false
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

// item takes one item in. The caller holds the log's lock for reading.
func (r *listRecorder) item(shape codec.Shape, bare []byte) error {
	if r.rep.Partial != "" && shape.Kind != "PartialObjectMetadata" {
		return errNotAnObject
	}
	r.shape = shape
	o := r.lookup(bare)
	if o != nil && r.compare {
		if n := len(r.known); n == 0 || r.known[n-1].key < o.key {
			r.known = append(r.known, o)
			return nil
		}
	}
	if err := r.stage(); err != nil {
		return err
	}
	if o == nil {
		var err error
		if o, _, err = newObject(r.rep, bare); err != nil {
			return err
		}
		o.bare = bytes.Clone(bare)
	}
	return r.staging.add(r.scope, shape, watch.Added, o)
}

// lookup returns the scope's own object if it is this very version.
func (r *listRecorder) lookup(bare []byte) *object {
	if len(r.scope.objects) == 0 {
		return nil
	}
	id, ok := codec.PeekIdentity(r.rep, bare, false)
	if !ok {
		return nil
	}
	r.name = append(append(append(r.name[:0], id.Namespace...), '/'), id.Name...)
	if o := r.scope.objects[string(r.name)]; o != nil && o.rv == string(id.ResourceVersion) {
		return o
	}
	return nil
}

// stage goes over from comparing to collecting. The caller holds the log's lock.
func (r *listRecorder) stage() error {
	if !r.compare {
		return nil
	}
	known := r.known
	r.compare, r.known = false, nil
	for _, o := range known {
		if err := r.staging.add(r.scope, r.shape, watch.Added, o); err != nil {
			return err
		}
	}
	return nil
}

// decode takes the next part of the list in, under one lock.
func (r *listRecorder) decode(p []byte) {
	r.l.mu.RLock()
	defer r.l.mu.RUnlock()
	r.enter()
	if _, err := r.decoder.Write(p); err != nil {
		r.abandon("undecodable")
	}
}

// enter looks the scope up. The caller holds the log's lock.
func (r *listRecorder) enter() {
	if r.scope = r.l.scopes[r.key]; r.scope == nil {
		r.scope = &scope{log: r.l}
	}
	if r.compare && r.known == nil {
		r.known = make([]*object, 0, len(r.scope.objects))
	}
}

func (r *listRecorder) Read(p []byte) (int, error) {
	n, err := r.body.Read(p)
	if r.decoder != nil && n > 0 {
		r.decode(p[:n])
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
	if compareRV(list.ResourceVersion, r.floor) < 0 {
		// What it shares with the state is of the other history; the next one is kept.
		l.c.historyReset(list.ResourceVersion, sameResource(l.name.gvr()))
		r.abandon("history reset")
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.c.resets.Load() != r.resets {
		r.abandon("history reset")
		return
	}
	l.saw(r.key, list.ResourceVersion)
	r.enter()
	if list.Continue != "" {
		if r.stage() != nil {
			r.abandon("undecodable")
			return
		}
		l.keepPage(&page{key: r.key, staging: r.staging, rv: list.ResourceVersion, token: list.Continue, resets: r.resets})
		return
	}
	if rep := r.rep; !rep.Protobuf && rep.Partial == "" && list.Shape.Unstructured {
		l.jsonOnly = true
	}
	s := l.scopes[r.key]
	if s == nil {
		s = l.newScope(r.key, false)
		r.scope = s
	}
	s.used = l.c.now()
	s.vouch()
	listed, err := r.listed(list.ResourceVersion)
	switch {
	case err != nil:
	case s.complete && compareRV(list.ResourceVersion, s.reach) < 0:
		s.alsoFrom(list.ResourceVersion, listed)
	default:
		err = s.replace(list.Shape, list.ResourceVersion, listed)
	}
	if err != nil {
		s.expire()
	}
}

// listed returns what the list held, by key: the scope's own objects where nothing
// has changed. The caller holds the log's lock.
func (r *listRecorder) listed(rv string) (map[string]*object, error) {
	s := r.scope
	if r.compare && s.complete && len(r.known) == len(s.objects) {
		gone := func(o *object) bool { return s.objects[o.key] != o }
		if compareRV(rv, s.rv) <= 0 || !slices.ContainsFunc(r.known, gone) {
			return s.objects, nil // replace does nothing with a list that is not newer
		}
	}
	return r.staging.byKey, r.stage()
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
	l := c.logOf(q.name)
	c.captureObject(resp, l, rep, key)
	if t, ok := resp.Body.(*capture); ok {
		t.known = func(begin []byte) bool { return l.holdsVersion(rep, key, begin) }
	}
}

// holdsVersion reports whether an answer that begins so is the version that is
// recorded already.
func (l *log) holdsVersion(rep codec.Representation, key string, begin []byte) bool {
	id, ok := codec.PeekIdentity(rep, begin, true)
	if !ok || len(key) != len(id.Namespace)+1+len(id.Name) || key[:len(id.Namespace)] != string(id.Namespace) || key[len(id.Namespace)+1:] != string(id.Name) {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.single[rep]
	if s == nil || s.objects[key] == nil || s.objects[key].rv != string(id.ResourceVersion) || l.noteworthy(time.Unix(s.objects[key].seenOnDisk, 0)) {
		return false
	}
	s.objects[key].seen = l.c.now().Unix()
	s.used = l.c.now()
	return true
}

// captureObject keeps the object that an answer holds, in the record of single
// objects. key is what it must be; "" where the answer decides (a create).
func (c *Cache) captureObject(resp *http.Response, l *log, rep codec.Representation, key string) {
	resets := c.resets.Load()
	resp.Body = &capture{body: withEnd(resp), limit: c.cfg.MaxObjectBytes, done: func(body []byte, whole bool) {
		if !whole {
			c.metrics.abandoned.WithLabelValues("incomplete").Inc()
			return
		}
		if c.resets.Load() != resets {
			c.metrics.abandoned.WithLabelValues("history reset").Inc()
			return
		}
		shape, bare, err := codec.DecodeObject(rep, body)
		if err != nil || shape.Kind == "Status" {
			return
		}
		if (shape.Kind == "PartialObjectMetadata") != (rep.Partial != "") {
			return
		}
		if rep.Protobuf || shape.Unstructured {
			bare = bytes.Clone(bare) // of JSON of built-in kinds it is a copy already
		}
		o, _, err := newObject(rep, bare)
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
	o.seen = s.used.Unix()
	if old := s.objects[o.key]; old != nil && compareRV(old.rv, o.rv) >= 0 {
		if old.seen = o.seen; l.noteworthy(time.Unix(old.seenOnDisk, 0)) {
			s.dirty[o.key] = old
			l.touch(false)
		}
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
			s.feed.stop()
		}
		for w := range s.everyWatcher() {
			w.queue.cut()
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
