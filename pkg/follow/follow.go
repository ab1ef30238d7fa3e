// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package follow keeps what edgehub itself has to know of objects in the cluster: the
// pool of its node, the annotations of Services, its configuration. It asks as every
// other client on the node does, by a WatchList, but the cache directly, so that it shares
// the cache's watch upstream with whoever else is interested, is answered while the link
// is down, and knows after a restart what it knew before.
package follow

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"strings"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/codec"
)

const (
	retryPeriod    = time.Second
	maxRetryPeriod = time.Minute
	// refusedPeriod is between tries where there is nothing to follow: a resource that
	// the cluster does not have, or that the node may not read.
	refusedPeriod  = 10 * time.Minute
	maxObjectBytes = 8 << 20
)

// A Source is where a Table is filled from.
type Source struct {
	// Transport answers; RequestInfo and User are in the context of its requests.
	Transport http.RoundTripper
	// User is who asks.
	User func() user.Info
	// Changed is closed at the next change of the link; then what failed is tried at once.
	Changed func() <-chan struct{}
}

// A Query is what to follow: all objects of a resource, those of a namespace, or one.
type Query struct {
	schema.GroupVersionResource
	Namespace string // "": all, or the resource has none
	Name      string // "": all
	// FieldSelector narrows further; "": by nothing.
	FieldSelector string
	// JSON asks for JSON where the API server might have protobuf: custom resources.
	JSON bool
}

// A Table has a T of each object that is followed, once somebody has asked for any: what
// nobody needs is not followed. Get, All, Err and Changed are safe for concurrent use.
type Table[T any] struct {
	source Source
	query  Query
	read   func(codec.Shape, []byte) (T, bool, error)
	asked  chan struct{} // closed by the first Get, All or Err
	once   sync.Once

	mu      sync.Mutex // guards what follows
	rows    map[string]T
	err     error // why rows are not known; nil: they are
	changed chan struct{}
}

var errUnknown = errors.New("not known yet")

// A Refusal is what Err returns where the API server says no, by its HTTP status: 404 for
// a resource that the cluster does not have, 403 for one that the node may not read.
type Refusal struct {
	Resource schema.GroupVersionResource
	Code     int
}

func (r *Refusal) Error() string {
	return fmt.Sprintf("%s: the API server answered %d", r.Resource.String(), r.Code)
}

// New makes a table that Run fills. read takes out of a bare object what is to be kept,
// false for nothing; the bytes are not its to keep.
func New[T any](source Source, query Query, read func(codec.Shape, []byte) (T, bool, error)) *Table[T] {
	return &Table[T]{source: source, query: query, read: read, asked: make(chan struct{}), err: fmt.Errorf("%s: %w", query.GroupResource(), errUnknown), changed: make(chan struct{})}
}

// Get returns the row of an object.
func (t *Table[T]) Get(namespace, name string) (row T, ok bool) {
	t.need()
	t.mu.Lock()
	defer t.mu.Unlock()
	row, ok = t.rows[namespace+"/"+name]
	return row, ok
}

// All returns a copy, by namespace/name.
func (t *Table[T]) All() map[string]T {
	t.need()
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.rows)
}

// Err is why nothing is known, nil once something is: rows are not forgotten for want of
// an answer. errors.As finds a Refusal in it.
func (t *Table[T]) Err() error {
	t.need()
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// Changed is closed at the next change of a row or of Err.
func (t *Table[T]) Changed() <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.changed
}

func (t *Table[T]) need() { t.once.Do(func() { close(t.asked) }) }

// Run follows until ctx ends.
func (t *Table[T]) Run(ctx context.Context) error {
	logger := klog.FromContext(ctx).WithValues("resource", t.query.GroupVersionResource.String(), "namespace", t.query.Namespace, "name", t.query.Name)
	select {
	case <-t.asked:
	case <-ctx.Done():
		return nil
	}
	wait := retryPeriod
	for ctx.Err() == nil {
		link := t.source.Changed()
		lived, err := t.follow(ctx)
		if lived {
			wait = retryPeriod
		}
		logger.V(4).Info("Follows no more", "reason", err)
		t.fail(err)
		period := wait
		var refusal *Refusal
		if errors.As(err, &refusal) && refusal.Code < http.StatusInternalServerError && refusal.Code != http.StatusTooManyRequests {
			period = refusedPeriod
		}
		timer := time.NewTimer(period)
		select {
		case <-ctx.Done():
		case <-link:
		case <-timer.C:
			wait = min(2*wait, maxRetryPeriod)
		}
		timer.Stop()
	}
	return nil
}

// follow makes one watch; lived reports whether its state came whole.
func (t *Table[T]) follow(ctx context.Context) (lived bool, err error) {
	rows := map[string]T{} // until they are complete
	err = t.source.watch(ctx, t.query, func(kind watch.EventType, shape codec.Shape, bare []byte) error {
		return t.take(rows, kind, shape, bare)
	}, func() bool {
		if !lived {
			t.replace(rows)
			rows, lived = nil, true
		}
		return true
	})
	return lived, err
}

// List tells see of each object that there is: ADDED, and what happens to it meanwhile. It
// returns nil only if these were all.
func (s Source) List(ctx context.Context, q Query, see func(watch.EventType, codec.Shape, []byte)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	return s.watch(ctx, q, func(kind watch.EventType, shape codec.Shape, bare []byte) error {
		see(kind, shape, bare)
		return nil
	}, func() bool { return false })
}

// watch calls each for every object and synced when these were all, and goes on if that
// says so. It returns nil if it does not.
func (s Source) watch(ctx context.Context, q Query, each func(watch.EventType, codec.Shape, []byte) error, synced func() bool) error {
	resp, err := s.ask(ctx, q)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	rep, ok := codec.FromContentType(resp.Header.Get("Content-Type"))
	if !ok {
		return fmt.Errorf("unexpected content type %q", resp.Header.Get("Content-Type"))
	}
	frames := codec.NewFrameReader(resp.Body, rep, maxObjectBytes)
	for {
		frame, err := frames.Next()
		if err != nil {
			return err
		}
		shape, bare, err := codec.DecodeObject(rep, frame.Object)
		switch {
		case err != nil:
			return err
		case frame.Type == watch.Error:
			return errors.New("the watch was ended")
		case frame.Type != watch.Bookmark:
			if err := each(frame.Type, shape, bare); err != nil {
				return err
			}
			continue
		}
		end, _, err := codec.ReadAnnotation(rep, bare, metav1.InitialEventsAnnotationKey)
		if err != nil {
			return err
		}
		if end == "true" && !synced() {
			return nil
		}
	}
}

func (s Source) ask(ctx context.Context, q Query) (*http.Response, error) {
	v := url.Values{"watch": {"1"}, "allowWatchBookmarks": {"true"}, "sendInitialEvents": {"true"}, "resourceVersionMatch": {string(metav1.ResourceVersionMatchNotOlderThan)}}
	info := &request.RequestInfo{IsResourceRequest: true, Verb: "watch", APIPrefix: "apis", APIGroup: q.Group, APIVersion: q.Version, Namespace: q.Namespace, Resource: q.Resource, Name: q.Name}
	path := "/apis/" + q.Group + "/" + q.Version
	if q.Group == "" {
		path, info.APIPrefix = "/api/"+q.Version, "api"
	}
	if q.Namespace != "" {
		path += "/namespaces/" + url.PathEscape(q.Namespace)
	}
	path += "/" + q.Resource
	info.Path, info.FieldSelector = path, q.FieldSelector
	if q.Name != "" {
		info.FieldSelector = strings.TrimSuffix("metadata.name="+q.Name+","+q.FieldSelector, ",")
	}
	if info.FieldSelector != "" {
		v.Set("fieldSelector", info.FieldSelector)
	}
	ctx = request.WithUser(request.WithRequestInfo(ctx, info), s.User())
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, (&url.URL{Scheme: "https", Host: "upstream.invalid", Path: path, RawQuery: v.Encode()}).String(), nil)
	if err != nil {
		return nil, err
	}
	accept := codec.Representation{Protobuf: true}.Accept(false) + "," + codec.Representation{}.Accept(false)
	if q.JSON {
		accept = codec.Representation{}.Accept(false)
	}
	req.Header.Set("Accept", accept)
	req.Header.Set("User-Agent", "edgehub")
	resp, err := s.Transport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10)) // so that the connection can be used again
		resp.Body.Close()
		return nil, &Refusal{Resource: q.GroupVersionResource, Code: resp.StatusCode}
	}
	return resp, nil
}

// take brings an event into rows, or, once these are complete, into the table.
func (t *Table[T]) take(rows map[string]T, kind watch.EventType, shape codec.Shape, bare []byte) error {
	m, err := codec.ReadMeta(shape.Representation, bare)
	if err != nil {
		return err
	}
	key := m.Namespace + "/" + m.Name
	var row T
	keep := false
	if kind != watch.Deleted {
		if row, keep, err = t.read(shape, bare); err != nil {
			return fmt.Errorf("%s %s: %w", shape.Kind, key, err)
		}
	}
	if rows != nil {
		set(rows, key, row, keep)
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if old, had := t.rows[key]; had != keep || had && !reflect.DeepEqual(old, row) {
		set(t.rows, key, row, keep)
		t.notify()
	}
	return nil
}

func set[T any](rows map[string]T, key string, row T, keep bool) {
	if keep {
		rows[key] = row
	} else {
		delete(rows, key)
	}
}

func (t *Table[T]) replace(rows map[string]T) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.err != nil || !reflect.DeepEqual(t.rows, rows) {
		t.rows, t.err = rows, nil
		t.notify()
	}
}

// fail notes why there are no rows yet.
func (t *Table[T]) fail(err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.rows == nil && (t.err == nil || t.err.Error() != err.Error()) {
		t.err = err
		t.notify()
	}
}

// notify tells of a change. The caller holds mu.
func (t *Table[T]) notify() {
	close(t.changed)
	t.changed = make(chan struct{})
}
