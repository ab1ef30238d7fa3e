// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/codec"
)

// connect brings the state up to date and follows the watch until it breaks. lived
// reports whether the API server has taken the watch.
func (f *feed) connect(outer context.Context) (lived bool, err error) {
	ctx, cancel := context.WithCancel(outer)
	defer cancel()
	defer func() {
		if ctx.Err() != nil && outer.Err() == nil {
			err = errHungUp
		}
	}()
	l := f.scope.log
	agreed := f.agreed
	f.agreed = false
	l.mu.Lock()
	f.hangUp = cancel
	sync := !f.scope.complete || f.resync
	rv := f.scope.rv
	l.mu.Unlock()
	timeout := minWatchTimeout + rand.N(minWatchTimeout)
	q := f.scope.key.query()
	q.Set("watch", "true")
	q.Set("allowWatchBookmarks", "true")
	q.Set("timeoutSeconds", strconv.Itoa(int(timeout.Seconds())))
	now := ""
	if sync {
		sync, err = f.beginSync(ctx, q, rv)
	} else {
		now, err = f.beginResume(ctx, q, rv, agreed)
	}
	if err != nil {
		return false, err
	}
	resp, err := f.do(ctx, q)
	if err != nil {
		var r *refusal
		if sync && errors.As(err, &r) && r.code == http.StatusUnprocessableEntity {
			l.c.noInitial.Store(l.name.gvr(), true)
			return false, errNoInit
		}
		return false, err
	}
	defer resp.Body.Close()
	defer f.connected(sync, rv, now, agreed)()
	start := l.c.now()
	frames := codec.NewFrameReader(resp.Body, f.scope.key.Representation, l.c.cfg.MaxObjectBytes)
	for {
		frame, err := frames.Next()
		if err != nil {
			// Only the end that was asked for says nothing of the API server's history.
			f.agreed = errors.Is(err, io.EOF) && l.c.now().Sub(start) > timeout-time.Second
			return true, err
		}
		if err := f.take(frame); err != nil {
			return true, err
		}
	}
}

// minWatchTimeout and twice that bound how long one watch of a feed lasts, so that
// the API server looks again at what the user may see.
const minWatchTimeout = 300 * time.Second

// beginSync prepares the request for the whole state: by WatchList, or, where the
// API server does not have it, by a list from whose resourceVersion the watch goes
// on.
func (f *feed) beginSync(ctx context.Context, q url.Values, from string) (sync bool, err error) {
	l := f.scope.log
	l.c.metrics.syncs.WithLabelValues(f.syncReason()).Inc()
	if _, old := l.c.noInitial.Load(l.name.gvr()); !old {
		q.Set("sendInitialEvents", "true")
		q.Set("resourceVersionMatch", string(metav1.ResourceVersionMatchNotOlderThan))
		q.Set("resourceVersion", "")
		return true, nil
	}
	if err := f.listAll(ctx, from); err != nil {
		return false, err
	}
	l.mu.RLock()
	defer l.mu.RUnlock()
	q.Set("resourceVersion", f.scope.rv)
	return false, nil
}

func (f *feed) syncReason() string {
	l := f.scope.log
	l.mu.RLock()
	defer l.mu.RUnlock()
	switch {
	case f.reset:
		return "reset"
	case f.scope.complete:
		return "expired"
	}
	return "new"
}

// beginResume prepares the request to go on where the state is. It returns how far
// the API server's history goes, "" if that is not known. It is not asked for where
// the last connection has ended as agreed: the API server has not been away.
func (f *feed) beginResume(ctx context.Context, q url.Values, rv string, agreed bool) (now string, err error) {
	c := f.scope.log.c
	if !agreed {
		if now, err = f.sameHistory(ctx, rv); err != nil {
			return "", err
		}
	}
	c.metrics.resumes.Inc()
	q.Set("resourceVersion", rv)
	return now, nil
}

// forgetHistory gives up the state, because the API server's history was reset.
func (f *feed) forgetHistory(now string) {
	l := f.scope.log
	l.c.resets.Add(1)
	l.mu.Lock()
	f.scope.expire()
	f.reset = true
	l.mu.Unlock()
	l.c.historyReset(now, sameResource(l.name.gvr()))
}

// catchUpPatience is how long a feed that was resumed waits for what has happened
// meanwhile, before its state is taken to be up to date. Bookmarks tell, but come
// once a minute.
const catchUpPatience = time.Second

// connected notes that the API server has taken the watch that was asked for when the
// state was at from, and the API server's history went to now. What it returns is for
// the end of the connection.
func (f *feed) connected(sync bool, from, now string, agreed bool) (done func()) {
	l := f.scope.log
	l.mu.Lock()
	defer l.mu.Unlock()
	defer f.notify()
	if f.stopped {
		return func() {}
	}
	f.scope.fed, f.catchUp = false, now
	f.connection++
	connection := f.connection
	if sync {
		f.staging = newStaging()
		f.staging.from = from
		return func() {}
	}
	if agreed {
		f.live = true
		return func() {}
	}
	if now != "" && f.caughtUp() {
		return func() {}
	}
	timer := time.AfterFunc(catchUpPatience, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if f.connection == connection && f.hangUp != nil {
			f.live = true
			f.notify()
		}
	})
	return func() { timer.Stop() }
}

// caughtUp notes whether the state has reached what was there when the feed was
// resumed. The caller holds the log's lock.
func (f *feed) caughtUp() bool {
	if compareRV(f.scope.rv, f.catchUp) < 0 {
		return false
	}
	if !f.live || !f.scope.fed {
		f.live, f.scope.fed = true, true
		f.notify()
	}
	return true
}

// do sends a request of the feed, and returns an answer of 200 in the scope's
// encoding, or an error.
func (f *feed) do(ctx context.Context, q url.Values) (*http.Response, error) {
	l := f.scope.log
	u := &url.URL{Scheme: "https", Host: "upstream", Path: resourcePath(l.name, f.scope.key.Namespace), RawQuery: q.Encode()}
	ctx = request.WithUser(ctx, f.user)
	l.mu.Lock()
	credential := f.credential()
	l.mu.Unlock()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header = credential.Clone()
	req.Header.Set("Accept", f.scope.key.Accept(!q.Has("watch")))
	req.Header.Set("User-Agent", "edgehub")
	resp, err := l.c.cfg.Upstream.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	rep, ok := codec.FromContentType(resp.Header.Get("Content-Type"))
	switch {
	case resp.StatusCode == http.StatusNotAcceptable && f.scope.key.Protobuf && f.scope.key.Partial == "",
		resp.StatusCode == http.StatusOK && ok && f.scope.key.Protobuf && f.scope.key.Partial == "" && !rep.Protobuf:
		err = errJSONOnly
	case resp.StatusCode == http.StatusGone:
		err = errExpired
	case resp.StatusCode != http.StatusOK:
		body, _ := io.ReadAll(io.LimitReader(resp.Body, maxRefusalBytes))
		err = &refusal{code: resp.StatusCode, header: resp.Header, body: body}
	case ok && rep.Protobuf != f.scope.key.Protobuf:
		err = fmt.Errorf("content type %q: %w", resp.Header.Get("Content-Type"), errNotAnObject)
	case !ok:
		err = fmt.Errorf("unexpected content type %q", resp.Header.Get("Content-Type"))
	default:
		return resp, nil
	}
	resp.Body.Close()
	return nil, err
}

// resourcePath is where a resource is listed.
func resourcePath(n logName, namespace string) string {
	p := "/api/" + n.Version
	if n.Group != "" {
		p = "/apis/" + n.Group + "/" + n.Version
	}
	if namespace != "" {
		p += "/namespaces/" + url.PathEscape(namespace)
	}
	return p + "/" + n.Resource
}

// take applies one frame of the upstream watch.
func (f *feed) take(frame codec.Frame) error {
	s := f.scope
	rep := s.key.Representation
	shape, bare, err := codec.DecodeObject(rep, frame.Object)
	if err != nil {
		return fmt.Errorf("watch frame: %w", err)
	}
	if frame.Type == watch.Error {
		return statusError(rep, frame.Object)
	}
	if shape.Kind == "Status" || rep.Partial != "" && shape.Kind != "PartialObjectMetadata" {
		return fmt.Errorf("watch frame: unexpected kind %s", shape.Kind)
	}
	if frame.Type == watch.Bookmark {
		return f.bookmark(shape, bare)
	}
	o, _, err := newObject(rep, bare)
	if err != nil {
		return fmt.Errorf("watch frame: %w", err)
	}
	l := s.log
	l.mu.Lock()
	defer l.mu.Unlock()
	if f.stopped {
		return context.Canceled
	}
	l.c.metrics.events.WithLabelValues(string(frame.Type)).Inc()
	if st := f.staging; st != nil && !st.done {
		if err := st.add(s, shape, frame.Type, o); err != nil {
			return err
		}
		switch n := len(st.list); {
		case n == 1:
			st.notify()
			f.notify() // there is a shape: who waits can be served
		case n%stagedBatch == 0:
			st.notify()
		}
		return nil
	}
	if len(s.objects) > l.c.cfg.MaxObjects || s.bytes > l.c.cfg.MaxScopeBytes {
		return errTooLarge
	}
	if s.shape.Kind == "" {
		s.setShape(shape)
	}
	if shape.Kind != s.shape.Kind || shape.APIVersion != s.shape.APIVersion {
		return fmt.Errorf("watch frame of kind %s in a scope of %s: %w", shape.Kind, s.shape.Kind, errNotAnObject)
	}
	s.apply(frame.Type, o)
	if f.catchUp != "" {
		f.caughtUp()
	}
	return nil
}

// stagedBatch is how many objects of a first sync its watchers are woken for: each time
// costs a write to each of them.
const stagedBatch = 16

// bookmark moves the scope on; the one that ends the initial events makes the
// state complete.
func (f *feed) bookmark(shape codec.Shape, bare []byte) error {
	s := f.scope
	meta, err := codec.ReadMeta(s.key.Representation, bare)
	if err != nil || !validRV(meta.ResourceVersion) {
		return fmt.Errorf("bookmark at %q: %w", meta.ResourceVersion, errors.Join(err, errNotAnObject))
	}
	end, _, err := codec.ReadAnnotation(s.key.Representation, bare, metav1.InitialEventsAnnotationKey)
	if err != nil {
		return err
	}
	l := s.log
	l.mu.Lock()
	defer l.mu.Unlock()
	st := f.staging
	switch {
	case f.stopped:
		return context.Canceled
	case st == nil:
		if compareRV(meta.ResourceVersion, s.rv) < 0 {
			return nil // of an API server that is not up to date
		}
		// All up to here has come, and here is later than the connection.
		s.advance(meta.ResourceVersion)
		f.caughtUp()
		s.send(&event{kind: watch.Bookmark, rv: meta.ResourceVersion})
		return nil
	case end != "true":
		return nil
	}
	if st.shape.Kind == "" {
		st.shape = shape
	}
	return f.synced(st, meta.ResourceVersion)
}

// synced makes what was staged the scope's state. The caller holds the log's
// lock.
func (f *feed) synced(st *staging, rv string) error {
	s := f.scope
	if s.complete && compareRV(rv, st.from) < 0 {
		// A consistent read that is older than what was read before: etcd has been
		// restored, and nothing that is recorded holds any more.
		return &resetError{now: rv}
	}
	if err := s.replace(st.shape, rv, st.byKey); err != nil {
		s.expire()
		return err
	}
	if s.rv == rv {
		st.done, st.rv = true, rv
		for w := range st.watchers {
			w.cursor = rv
			s.watchers[w] = struct{}{}
		}
	} else {
		// A list has overtaken the sync. What went in between, its watchers
		// would never hear of: they ask again, and begin with the scope's state.
		st.failed = true
	}
	st.notify()
	f.staging, f.resync, f.reset = nil, false, false
	f.live, s.fed = true, true
	s.vouch()
	f.notify()
	return nil
}

// expire makes the scope incomplete, because its bytes cannot be read or its
// history is not to be trusted; watchers are told to list again. The caller holds
// the log's lock.
func (s *scope) expire() {
	s.endWatchers(func(*watcher) bool { return true })
	s.reset()
	if s.feed != nil && s.feed.hangUp != nil {
		s.feed.live = false
		s.feed.hangUp() // and begin anew
	}
}

// endWatchers tells watchers to list again. The caller holds the log's lock.
func (s *scope) endWatchers(which func(*watcher) bool) {
	st := apierrors.NewResourceExpired("the state that this watch goes on from is not known here").Status()
	for w := range s.watchers {
		if which(w) {
			w.finish(codec.AppendStatusFrame(nil, s.key.Representation, &st))
		}
	}
}

// statusError turns the object of an ERROR event into an error.
func statusError(rep codec.Representation, wire []byte) error {
	st := &metav1.Status{}
	var err error
	if rep.Protobuf {
		var bare []byte
		if _, bare, err = codec.DecodeObject(rep, wire); err == nil {
			err = st.Unmarshal(bare)
		}
	} else {
		err = json.Unmarshal(wire, st)
	}
	if err != nil {
		return fmt.Errorf("watch error: %w", err)
	}
	if st.Code == http.StatusGone || st.Reason == metav1.StatusReasonExpired {
		return errExpired
	}
	return &apierrors.StatusError{ErrStatus: *st}
}

// listAll is the sync for an API server without WatchList: all pages at one
// resourceVersion. The state was at from when it began.
func (f *feed) listAll(ctx context.Context, from string) error {
	s := f.scope
	st := newStaging()
	st.from = from
	q := s.key.query()
	q.Set("limit", pageLimit)
	for {
		list, err := f.listPage(ctx, q, st)
		if err != nil {
			return err
		}
		if st.rv != "" && list.ResourceVersion != st.rv {
			return fmt.Errorf("page at %s of a list at %s", list.ResourceVersion, st.rv)
		}
		st.rv = list.ResourceVersion
		st.shape = list.Shape
		if q.Set("continue", list.Continue); list.Continue == "" {
			break
		}
	}
	s.log.mu.Lock()
	defer s.log.mu.Unlock()
	if f.stopped {
		return context.Canceled
	}
	return f.synced(st, st.rv)
}

func (f *feed) listPage(ctx context.Context, q url.Values, st *staging) (codec.List, error) {
	s := f.scope
	resp, err := f.do(ctx, q)
	if err != nil {
		return codec.List{}, err
	}
	defer resp.Body.Close()
	d := codec.NewListDecoder(s.key.Representation, s.log.c.cfg.MaxObjectBytes, func(shape codec.Shape, bare []byte) error {
		o, _, err := newObject(s.key.Representation, bytes.Clone(bare))
		if err != nil {
			return err
		}
		s.log.mu.RLock()
		defer s.log.mu.RUnlock()
		return st.add(s, shape, watch.Added, o)
	})
	if _, err := io.Copy(d, resp.Body); err != nil {
		return codec.List{}, err
	}
	list, err := d.Close()
	if err == nil && !validRV(list.ResourceVersion) {
		err = errNotAnObject
	}
	return list, err
}
