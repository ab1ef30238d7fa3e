// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/codec"
)

// What the tests ask for and in which form: Services in both encodings, and a custom
// resource, of which there is JSON only.
var (
	jsonRep  = codec.Representation{}
	protoRep = codec.Representation{Protobuf: true}
	services = schema.GroupResource{Resource: "services"}
	widgets  = schema.GroupResource{Group: "example.com", Resource: "widgets"}
	allVerbs = []string{"get", "list", "watch"}

	forms = []form{{"json", services, jsonRep}, {"protobuf", services, protoRep}, {"custom", widgets, jsonRep}}
)

type form struct {
	name     string
	resource schema.GroupResource
	rep      codec.Representation
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// seed is EDGEHUB_SEED, or a random one, as the rig of the large tests has it.
func seed(t testing.TB) uint64 {
	t.Helper()
	s := rand.Uint64()
	if text := os.Getenv("EDGEHUB_SEED"); text != "" {
		var err error
		if s, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("EDGEHUB_SEED=%s: %v", text, err)
		}
	}
	t.Logf("EDGEHUB_SEED=%d", s)
	return s
}

// A thing is what objects of the tests come down to.
type thing struct {
	name, color, mark string
	rv                int
}

// encode makes a thing an object, as an API server writes it.
func (o thing) encode(t testing.TB, f form) (codec.Shape, []byte) {
	t.Helper()
	notes := map[string]string{"color": o.color}
	if o.mark != "" {
		notes["mark"] = o.mark
	}
	m := metav1.ObjectMeta{Name: o.name, Namespace: "shop", ResourceVersion: strconv.Itoa(o.rv), UID: "u", Annotations: notes}
	if f.rep.Protobuf {
		bare, err := (&corev1.Service{ObjectMeta: m}).Marshal()
		if err != nil {
			t.Fatal(err)
		}
		return codec.Shape{Representation: f.rep, APIVersion: "v1", Kind: "Service", ListKind: "ServiceList"}, bare
	}
	var v any = &corev1.Service{TypeMeta: metav1.TypeMeta{Kind: "Service", APIVersion: "v1"}, ObjectMeta: m}
	if f.resource == widgets {
		v = map[string]any{"apiVersion": "example.com/v1", "kind": "Widget", "metadata": m, "size": 12345678901234567, "weight": json.Number("1e3")}
	}
	wire, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	shape, bare, err := codec.DecodeObject(f.rep, wire)
	if err != nil {
		t.Fatal(err)
	}
	return shape, bare
}

func decodeThing(rep codec.Representation, bare []byte) (o thing, err error) {
	m, err := codec.ReadMeta(rep, bare)
	if err != nil {
		return o, err
	}
	o.name = m.Name
	if o.rv, err = strconv.Atoi(m.ResourceVersion); err != nil {
		return o, err
	}
	if o.color, _, err = codec.ReadAnnotation(rep, bare, "color"); err == nil {
		o.mark, _, err = codec.ReadAnnotation(rep, bare, "mark")
	}
	return o, err
}

// A server is an API server with one namespace of things, for a Chain to stand before.
type server struct {
	t testing.TB

	mu      sync.Mutex // guards what follows
	rv      int
	things  map[string]thing
	log     []logged
	changed chan struct{}
	cut     chan struct{} // closed: watches break off
	asked   []*http.Request
	open    int // watches
	chunk   int // bytes that a watch gives at once; 0: all
	old     int // watches cannot begin before
}

type logged struct {
	kind  watch.EventType
	thing thing
}

func newServer(t testing.TB) *server {
	return &server{t: t, rv: 10, things: map[string]thing{}, changed: make(chan struct{}), cut: make(chan struct{})}
}

// set creates or changes a thing; color "" deletes it.
func (s *server) set(name, color string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, had := s.things[name]
	if !had && color == "" {
		return s.rv
	}
	s.rv++
	o, kind := thing{name: name, color: color, rv: s.rv}, watch.Added
	switch {
	case color == "":
		o.color, kind = old.color, watch.Deleted
		delete(s.things, name)
	case had:
		kind = watch.Modified
	}
	if color != "" {
		s.things[name] = o
	}
	s.append(kind, o)
	return s.rv
}

// bookmark sends one, with a resourceVersion of its own if moved is set.
func (s *server) bookmark(moved bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if moved {
		s.rv++
	}
	s.append(watch.Bookmark, thing{rv: s.rv})
}

func (s *server) append(kind watch.EventType, o thing) {
	s.log = append(s.log, logged{kind, o})
	close(s.changed)
	s.changed = make(chan struct{})
}

// breakOff ends all watches, maybe in the middle of a frame.
func (s *server) breakOff() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.cut)
	s.cut = make(chan struct{})
}

func (s *server) watches() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.open
}

func (s *server) last() *http.Request {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.asked) == 0 {
		s.t.Fatal("nothing was asked for")
	}
	return s.asked[len(s.asked)-1]
}

func respond(req *http.Request, code int, contentType string, body io.ReadCloser) *http.Response {
	return &http.Response{StatusCode: code, Header: http.Header{"Content-Type": {contentType}}, Body: body, ContentLength: -1, Request: req}
}

func (s *server) status(req *http.Request, err *apierrors.StatusError) *http.Response {
	b, _ := json.Marshal(err.ErrStatus)
	return respond(req, int(err.ErrStatus.Code), "application/json", io.NopCloser(bytes.NewReader(b)))
}

func (s *server) RoundTrip(req *http.Request) (*http.Response, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, req)
	info, ok := request.RequestInfoFrom(req.Context())
	if !ok || info.Subresource != "" && info.Subresource != "status" || req.Method != http.MethodGet {
		return respond(req, http.StatusOK, "text/plain", io.NopCloser(strings.NewReader("plain"))), nil
	}
	accepted := codec.ParseAccept(req.Header["Accept"])
	if len(accepted) == 0 || accepted[0].Other != "" || accepted[0].Partial != "" {
		return respond(req, http.StatusOK, "application/yaml", io.NopCloser(strings.NewReader("other"))), nil
	}
	f := form{"", schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}, accepted[0].Representation}
	switch info.Verb {
	case "get":
		o, ok := s.things[info.Name]
		if !ok {
			return s.status(req, apierrors.NewNotFound(f.resource, info.Name)), nil
		}
		shape, bare := o.encode(s.t, f)
		return respond(req, http.StatusOK, f.rep.ContentType(), io.NopCloser(bytes.NewReader(shape.AppendObject(nil, bare)))), nil
	case "list":
		return respond(req, http.StatusOK, f.rep.ContentType(), io.NopCloser(bytes.NewReader(listOf(s.t, f, s.rv, slices.Collect(maps.Values(s.things)))))), nil
	}
	return s.watch(req, f)
}

// listOf is a list in the order of names.
func listOf(t testing.TB, f form, rv int, things []thing) []byte {
	slices.SortFunc(things, func(a, b thing) int { return strings.Compare(a.name, b.name) })
	shape, _ := thing{}.encode(t, f)
	var bares [][]byte
	var lens []int
	for _, o := range things {
		_, bare := o.encode(t, f)
		bares, lens = append(bares, bare), append(lens, len(bare))
	}
	b := shape.AppendListHead(nil, strconv.Itoa(rv), slices.Values(lens))
	for i, bare := range bares {
		b = shape.AppendListItem(b, bare, i == 0)
	}
	return shape.AppendListTail(b, strconv.Itoa(rv))
}

func (s *server) watch(req *http.Request, f form) (*http.Response, error) {
	q := req.URL.Query()
	b := &watchBody{server: s, ctx: req.Context(), form: f, next: len(s.log), cut: s.cut, bookmarks: q.Get("allowWatchBookmarks") == "true"}
	shape, _ := thing{}.encode(s.t, f)
	if rv := q.Get("resourceVersion"); !resumes(q) {
		for _, o := range s.things { // in any order
			shape, bare := o.encode(s.t, f)
			b.buf = shape.AppendFrame(b.buf, watch.Added, bare)
		}
		if b.bookmarks {
			b.buf = shape.AppendBookmark(b.buf, strconv.Itoa(s.rv), true)
		}
	} else {
		from, err := strconv.Atoi(rv)
		if err != nil || from < s.old {
			return s.status(req, apierrors.NewResourceExpired("too old")), nil
		}
		if at := slices.IndexFunc(s.log, func(e logged) bool { return e.thing.rv > from }); at >= 0 {
			b.next = at
		}
	}
	s.open++
	return respond(req, http.StatusOK, f.rep.WatchContentType(), b), nil
}

type watchBody struct {
	server    *server
	ctx       context.Context
	form      form
	bookmarks bool
	cut       <-chan struct{}
	next      int
	buf       []byte
	closed    sync.Once
}

func (b *watchBody) Read(p []byte) (int, error) {
	for {
		b.server.mu.Lock()
		for ; b.next < len(b.server.log); b.next++ {
			e := b.server.log[b.next]
			shape, bare := e.thing.encode(b.server.t, b.form)
			switch {
			case e.kind != watch.Bookmark:
				b.buf = shape.AppendFrame(b.buf, e.kind, bare)
			case b.bookmarks:
				b.buf = shape.AppendBookmark(b.buf, strconv.Itoa(e.thing.rv), false)
			}
		}
		changed, n := b.server.changed, len(p)
		if b.server.chunk > 0 {
			n = min(n, b.server.chunk)
		}
		b.server.mu.Unlock()
		select {
		case <-b.cut:
			return 0, io.ErrUnexpectedEOF
		case <-b.ctx.Done():
			return 0, b.ctx.Err()
		default:
		}
		if len(b.buf) > 0 {
			n = copy(p[:n], b.buf)
			b.buf = b.buf[n:]
			return n, nil
		}
		select {
		case <-changed:
		case <-b.cut:
		case <-b.ctx.Done():
		}
	}
}

func (b *watchBody) Close() error {
	b.closed.Do(func() {
		b.server.mu.Lock()
		defer b.server.mu.Unlock()
		b.server.open--
	})
	return nil
}
