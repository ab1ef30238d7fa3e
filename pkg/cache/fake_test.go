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
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"sort"
	"strconv"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/seal"
)

var (
	errDown  = errors.New("link is down")
	nodeUser = &user.DefaultInfo{Name: "system:node:n1", Groups: []string{"system:nodes", "system:authenticated"}}
	alice    = &user.DefaultInfo{Name: "alice", Groups: []string{"system:authenticated"}}
	bob      = &user.DefaultInfo{Name: "bob", Groups: []string{"system:authenticated"}}
)

// A fakeServer is an API server of ConfigMaps and Secrets in JSON, with a history
// and a link that can be cut.
type fakeServer struct {
	mu       sync.Mutex
	rv       int
	objects  map[string]fakeObject // by resource/namespace/name
	history  []fakeEvent
	all      []fakeEvent // history that is never forgotten
	oldest   int         // resourceVersion back to which history reaches
	link     sync.Mutex  // guards down and changed; never held for long
	down     bool
	changed  chan struct{}
	streams  map[*fakeStream]struct{}
	requests []string
	tokens   []string                // of the requests
	readers  map[string]bool         // tokens that SelfSubjectAccessReview allows; nil: none
	refuse   func(*http.Request) int // status, 0: serve
}

type fakeObject struct {
	rv   int
	text string // value of the data
}

type fakeEvent struct {
	kind, key string
	object    fakeObject
}

type fakeStream struct {
	*io.PipeWriter
	prefix string
	name   string
}

func newFakeServer() *fakeServer {
	return &fakeServer{rv: 100, oldest: 100, objects: map[string]fakeObject{}, changed: make(chan struct{}), streams: map[*fakeStream]struct{}{}}
}

func (f *fakeServer) Up() bool { f.link.Lock(); defer f.link.Unlock(); return !f.down }
func (f *fakeServer) Changed() <-chan struct{} {
	f.link.Lock()
	defer f.link.Unlock()
	return f.changed
}

func (f *fakeServer) setDown(down bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.Up() == !down {
		return
	}
	f.link.Lock()
	f.down = down
	f.link.Unlock()
	for s := range f.streams {
		s.CloseWithError(errDown)
	}
	clear(f.streams)
	f.link.Lock()
	close(f.changed)
	f.changed = make(chan struct{})
	f.link.Unlock()
}

// put creates or changes an object, del deletes it; key is resource/ns/name.
func (f *fakeServer) put(key, text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	kind := "ADDED"
	if _, ok := f.objects[key]; ok {
		kind = "MODIFIED"
	}
	f.rv++
	f.objects[key] = fakeObject{rv: f.rv, text: text}
	f.record(fakeEvent{kind, key, f.objects[key]})
}

func (f *fakeServer) del(key string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	o, ok := f.objects[key]
	if !ok {
		return
	}
	f.rv++
	delete(f.objects, key)
	f.record(fakeEvent{"DELETED", key, fakeObject{rv: f.rv, text: o.text}})
}

func (f *fakeServer) record(e fakeEvent) {
	f.history = append(f.history, e)
	f.all = append(f.all, e)
	for s := range f.streams {
		if s.wants(e.key) {
			fmt.Fprintf(s, "{\"type\":%q,\"object\":%s}\n", e.kind, fakeJSON(e.key, e.object, true))
		}
	}
}

// at returns namespace/name=text of what a list of prefix held at rv.
func (f *fakeServer) at(prefix string, rv int) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	state := map[string]fakeObject{}
	for _, e := range f.all {
		if e.object.rv > rv || !strings.HasPrefix(e.key, prefix) {
			continue
		}
		if state[e.key] = e.object; e.kind == "DELETED" {
			delete(state, e.key)
		}
	}
	got := []string{}
	for _, k := range sortedKeys(state) {
		got = append(got, strings.SplitN(k, "/", 2)[1]+"="+state[k].text)
	}
	return got
}

// forget drops the history, as an API server that restarts does.
func (f *fakeServer) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.history, f.oldest = nil, f.rv
}

// backup returns what sets the server back to how it is now, as an etcd that is
// restored does; no watch lives through that.
func (f *fakeServer) backup() (restore func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	rv, objects, all := f.rv, maps.Clone(f.objects), slices.Clone(f.all)
	return func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.rv, f.oldest, f.objects, f.all, f.history = rv, rv, maps.Clone(objects), slices.Clone(all), nil
		for s := range f.streams {
			s.Close()
		}
		clear(f.streams)
	}
}

func (s *fakeStream) wants(key string) bool {
	return strings.HasPrefix(key, s.prefix) && (s.name == "" || strings.HasSuffix(key, "/"+s.name))
}

func fakeJSON(key string, o fakeObject, typed bool) string {
	parts := strings.Split(key, "/")
	head := ""
	if typed {
		head = fmt.Sprintf(`"kind":%q,"apiVersion":"v1",`, fakeKind(parts[0]))
	}
	text, _ := json.Marshal(o.text)
	return fmt.Sprintf(`{%s"metadata":{"name":%q,"namespace":%q,"uid":"u-%s","resourceVersion":"%d","labels":{"text":%s}},"data":{"text":%s}}`,
		head, parts[2], parts[1], parts[2], o.rv, text, text)
}

func fakeKind(resource string) string {
	return map[string]string{"configmaps": "ConfigMap", "secrets": "Secret", "leases": "Lease", "nodes": "Node"}[resource]
}

func (f *fakeServer) RoundTrip(req *http.Request) (*http.Response, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.Up() {
		return nil, fmt.Errorf("fake: %w", errDown)
	}
	token := strings.TrimPrefix(req.Header.Get("Authorization"), "Bearer ")
	if strings.HasSuffix(req.URL.Path, "/selfsubjectaccessreviews") {
		return fakeAnswer(req, 201, fmt.Sprintf(`{"kind":"SelfSubjectAccessReview","status":{"allowed":%t}}`, f.readers[token])), nil
	}
	if req.Method != http.MethodGet {
		return f.write(req)
	}
	f.requests = append(f.requests, req.Method+" "+req.URL.RequestURI())
	f.tokens = append(f.tokens, token)
	info, err := fakeResolver.NewRequestInfo(req)
	if err != nil {
		return nil, err
	}
	if f.refuse != nil {
		if code := f.refuse(req); code != 0 {
			return fakeAnswer(req, code, fmt.Sprintf(`{"kind":"Status","apiVersion":"v1","status":"Failure","code":%d}`, code)), nil
		}
	}
	if req.URL.Path == "/version" {
		return fakeAnswer(req, 200, `{"major":"1"}`), nil
	}
	prefix := info.Resource + "/"
	if info.Namespace != "" {
		prefix += info.Namespace + "/"
	}
	switch info.Verb {
	case "get":
		if info.Namespace == "" {
			prefix += "/"
		}
		o, ok := f.objects[prefix+info.Name]
		if !ok {
			return fakeAnswer(req, 404, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":404}`), nil
		}
		return fakeAnswer(req, 200, fakeJSON(prefix+info.Name, o, true)+"\n"), nil
	case "list":
		return f.list(req, info, prefix), nil
	case "watch":
		return f.watch(req, info, prefix), nil
	}
	return fakeAnswer(req, 405, `{"kind":"Status","apiVersion":"v1","status":"Failure","code":405}`), nil
}

// write creates, updates or deletes a ConfigMap, or makes a Lease out of nothing.
func (f *fakeServer) write(req *http.Request) (*http.Response, error) {
	info, err := fakeResolver.NewRequestInfo(req)
	if err != nil {
		return nil, err
	}
	var i fakeItem
	if req.Body != nil {
		if err := json.NewDecoder(req.Body).Decode(&i); err != nil && err != io.EOF {
			return nil, err
		}
	}
	if i.Metadata.Name == "" {
		i.Metadata.Name = info.Name
	}
	key := info.Resource + "/" + info.Namespace + "/" + i.Metadata.Name
	f.rv++
	if req.Method == http.MethodDelete {
		o := f.objects[key]
		delete(f.objects, key)
		f.record(fakeEvent{"DELETED", key, fakeObject{rv: f.rv, text: o.text}})
		return fakeAnswer(req, 200, `{"kind":"Status","apiVersion":"v1","status":"Success"}`), nil
	}
	kind := "ADDED"
	if _, ok := f.objects[key]; ok {
		kind = "MODIFIED"
	}
	f.objects[key] = fakeObject{rv: f.rv, text: i.Data.Text}
	f.record(fakeEvent{kind, key, f.objects[key]})
	return fakeAnswer(req, 201, fakeJSON(key, f.objects[key], true)), nil
}

func (f *fakeServer) keys(prefix, name string) []string {
	var keys []string
	for k := range f.objects {
		if strings.HasPrefix(k, prefix) && (name == "" || strings.HasSuffix(k, "/"+name)) {
			keys = append(keys, k)
		}
	}
	sort.Strings(keys)
	return keys
}

func (f *fakeServer) list(req *http.Request, info *request.RequestInfo, prefix string) *http.Response {
	keys := f.keys(prefix, info.Name)
	meta := fmt.Sprintf(`"resourceVersion":"%d"`, f.rv)
	if limit, _ := strconv.Atoi(req.URL.Query().Get("limit")); limit > 0 && req.URL.Query().Get("resourceVersion") != "0" {
		from, _ := strconv.Atoi(req.URL.Query().Get("continue"))
		keys = keys[min(from, len(keys)):]
		if len(keys) > limit {
			keys = keys[:limit]
			meta += fmt.Sprintf(`,"continue":"%d"`, from+limit)
		}
	}
	items := make([]string, len(keys))
	for i, k := range keys {
		items[i] = fakeJSON(k, f.objects[k], false)
	}
	return fakeAnswer(req, 200, fmt.Sprintf(`{"kind":"%sList","apiVersion":"v1","metadata":{%s},"items":[%s]}`+"\n", fakeKind(info.Resource), meta, strings.Join(items, ",")))
}

func (f *fakeServer) watch(req *http.Request, info *request.RequestInfo, prefix string) *http.Response {
	r, w := io.Pipe()
	s := &fakeStream{PipeWriter: w, prefix: prefix, name: info.Name}
	q := req.URL.Query()
	var head bytes.Buffer
	bookmark := func(rv int, end string) {
		fmt.Fprintf(&head, `{"type":"BOOKMARK","object":{"kind":%q,"apiVersion":"v1","metadata":{"resourceVersion":"%d"%s}}}`+"\n", fakeKind(info.Resource), rv, end)
	}
	rv, _ := strconv.Atoi(q.Get("resourceVersion"))
	switch {
	case rv == 0:
		for _, k := range f.keys(prefix, info.Name) {
			fmt.Fprintf(&head, `{"type":"ADDED","object":%s}`+"\n", fakeJSON(k, f.objects[k], true))
		}
		if q.Get("sendInitialEvents") == "true" {
			bookmark(f.rv, `,"annotations":{"k8s.io/initial-events-end":"true"}`)
		}
	case rv < f.oldest:
		head.WriteString(`{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Expired","code":410}}` + "\n")
	default:
		for _, e := range f.history {
			if e.object.rv > rv && s.wants(e.key) {
				fmt.Fprintf(&head, `{"type":%q,"object":%s}`+"\n", e.kind, fakeJSON(e.key, e.object, true))
			}
		}
	}
	f.streams[s] = struct{}{}
	resp := fakeAnswer(req, 200, "")
	resp.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(&head, r), r}
	go func() {
		<-req.Context().Done()
		w.CloseWithError(req.Context().Err())
		f.mu.Lock()
		delete(f.streams, s)
		f.mu.Unlock()
	}()
	return resp
}

func fakeAnswer(req *http.Request, code int, body string) *http.Response {
	return &http.Response{
		StatusCode: code, Status: http.StatusText(code), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: req,
		Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body)), ContentLength: -1,
	}
}

var fakeResolver = &request.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")}

// A hub is a running cache over a journal in a folder.
type hub struct {
	*Cache
	t      *testing.T
	server *fakeServer
	stop   func()
}

func sealerOf(tb testing.TB, file string) *seal.Sealer {
	tb.Helper()
	s, err := seal.New(file)
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// startHub starts a cache; stop flushes and ends it.
func startHub(t *testing.T, dir string, server *fakeServer, change ...func(*Config)) *hub {
	t.Helper()
	j, err := journal.Open(journal.Options{Dir: dir + "/journal"})
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		Upstream: server, IsUnavailable: func(err error) bool { return errors.Is(err, errDown) }, Journal: j,
		Node: func() user.Info { return nodeUser }, Sealer: sealerOf(t, dir+"/encryption.key"), FlushPeriod: 1,
	}
	for _, f := range change {
		f(&cfg)
	}
	c, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if err := j.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return &hub{Cache: c, t: t, server: server, stop: stop}
}

// do sends a GET of a path as a user and returns the response.
func (h *hub) do(ctx context.Context, u user.Info, path string) (*http.Response, error) {
	h.t.Helper()
	return h.send(ctx, u, http.MethodGet, path, "")
}

func (h *hub) send(ctx context.Context, u user.Info, method, path, body string) (*http.Response, error) {
	h.t.Helper()
	req := httptest.NewRequestWithContext(ctx, method, path, strings.NewReader(body))
	if u != nodeUser {
		req.Header.Set("Authorization", "Bearer "+u.GetName())
	}
	info, err := fakeResolver.NewRequestInfo(req)
	if err != nil {
		h.t.Fatal(err)
	}
	ctx = request.WithUser(request.WithRequestInfo(req.Context(), info), u)
	return h.RoundTrip(req.WithContext(ctx))
}

// body sends a GET that has to be answered with 200, and returns the body.
func (h *hub) body(u user.Info, path string) string {
	h.t.Helper()
	resp, err := h.do(h.t.Context(), u, path)
	if err != nil {
		h.t.Fatalf("%s: %v", path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		h.t.Fatalf("%s: %d, %v: %s", path, resp.StatusCode, err, b)
	}
	return string(b)
}

// texts returns namespace/name=text of a list's items.
func texts(t *testing.T, list string) []string {
	t.Helper()
	var l struct{ Items []fakeItem }
	if err := json.Unmarshal([]byte(list), &l); err != nil {
		t.Fatalf("%v: %s", err, list)
	}
	got := []string{}
	for _, i := range l.Items {
		got = append(got, i.String())
	}
	return got
}

type fakeItem struct {
	Metadata struct{ Namespace, Name, ResourceVersion string }
	Data     struct{ Text string }
}

func (i fakeItem) String() string {
	return i.Metadata.Namespace + "/" + i.Metadata.Name + "=" + i.Data.Text
}

// A watchClient reads a watch.
type watchClient struct {
	t      *testing.T
	d      *json.Decoder
	cancel func()
	body   io.Closer
}

func (h *hub) watchAs(u user.Info, path string) *watchClient {
	h.t.Helper()
	ctx, cancel := context.WithCancel(h.t.Context())
	resp, err := h.do(ctx, u, path)
	if err != nil {
		cancel()
		h.t.Fatalf("%s: %v", path, err)
	}
	if resp.StatusCode != http.StatusOK {
		cancel()
		h.t.Fatalf("%s: %d", path, resp.StatusCode)
	}
	w := &watchClient{t: h.t, d: json.NewDecoder(resp.Body), cancel: cancel, body: resp.Body}
	h.t.Cleanup(w.close)
	return w
}

func (w *watchClient) close() { w.cancel(); w.body.Close() }

// next returns the next event as "TYPE namespace/name=text@rv".
func (w *watchClient) next() string {
	w.t.Helper()
	var e struct {
		Type   string
		Object json.RawMessage
	}
	if err := w.d.Decode(&e); err != nil {
		return "end: " + err.Error()
	}
	var o struct {
		Code     int
		Metadata struct {
			Namespace, Name, ResourceVersion string
			Annotations                      map[string]string
		}
		Data struct{ Text string }
	}
	if err := json.Unmarshal(e.Object, &o); err != nil {
		w.t.Fatalf("%v: %s", err, e.Object)
	}
	switch e.Type {
	case "BOOKMARK":
		if o.Metadata.Annotations["k8s.io/initial-events-end"] == "true" {
			return "SYNCED @" + o.Metadata.ResourceVersion
		}
		return "BOOKMARK @" + o.Metadata.ResourceVersion
	case "ERROR":
		return fmt.Sprintf("ERROR %d", o.Code)
	}
	return fmt.Sprintf("%s %s/%s=%s@%s", e.Type, o.Metadata.Namespace, o.Metadata.Name, o.Data.Text, o.Metadata.ResourceVersion)
}

// want reads events and compares them.
func (w *watchClient) want(events ...string) {
	w.t.Helper()
	for _, want := range events {
		if got := w.next(); got != want {
			w.t.Fatalf("next event = %s, want %s", got, want)
		}
	}
}

// seen returns the requests, but for those by which feeds ask how far the history
// goes.
func (f *fakeServer) seen() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(f.requests), func(r string) bool { return strings.HasPrefix(r, "GET /api/v1/nodes?") })
}

func TestMain(m *testing.M) {
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	m.Run()
}
