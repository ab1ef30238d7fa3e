// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/codec"
)

// An ask is a request of the tests.
type ask struct {
	form
	verb, name, subresource string
	query                   string
	user, program           string
	accept                  string // instead of the form's
	method, path, upgrade   string
}

func (a ask) request(ctx context.Context) *http.Request {
	if a.user == "" {
		a.user = "kubelet"
	}
	if a.program == "" {
		a.program = "tester"
	}
	if a.accept == "" {
		a.accept = a.rep.Accept(false)
	}
	if a.method == "" {
		a.method = http.MethodGet
	}
	prefix := "/api/v1"
	if a.resource.Group != "" {
		prefix = "/apis/" + a.resource.Group + "/v1"
	}
	if a.path == "" {
		a.path = prefix + "/namespaces/shop/" + a.resource.Resource
	}
	if a.verb == "watch" {
		a.query += "&watch=1"
	}
	info := &request.RequestInfo{IsResourceRequest: true, Path: a.path, Verb: a.verb, APIGroup: a.resource.Group, APIVersion: "v1", Namespace: "shop", Resource: a.resource.Resource, Subresource: a.subresource, Name: a.name}
	ctx = request.WithUser(request.WithRequestInfo(ctx, info), &user.DefaultInfo{Name: a.user})
	req, _ := http.NewRequestWithContext(ctx, a.method, (&url.URL{Scheme: "https", Host: "upstream", Path: a.path, RawQuery: a.query}).String(), nil)
	req.Header.Set("Accept", a.accept)
	req.Header.Set("User-Agent", a.program+"/v1.0 (linux)")
	if a.upgrade != "" {
		req.Header.Set("Upgrade", a.upgrade)
	}
	return req
}

// A fake is a filter made of a function.
type fake struct {
	name  string
	apply func(*Object) (Verdict, error)
}

func (f fake) Name() string                                        { return f.name }
func (f fake) Apply(_ context.Context, o *Object) (Verdict, error) { return f.apply(o) }

// dropping withholds what has a color.
func dropping(color string) fake {
	return fake{"drop", func(o *Object) (Verdict, error) {
		if c, _, err := o.Annotation("color"); err != nil || c != color {
			return Keep, err
		}
		return Drop, nil
	}}
}

// marking sets an annotation.
func marking(mark string) fake {
	return fake{"mark", func(o *Object) (Verdict, error) { return setMark(o, mark) }}
}

func setMark(o *Object, mark string) (Verdict, error) {
	typed, err := o.Decode()
	if err != nil {
		return Keep, err
	}
	m, err := meta.Accessor(typed)
	if err != nil {
		return Keep, err
	}
	notes := m.GetAnnotations()
	notes["mark"] = mark
	m.SetAnnotations(notes)
	return Change, nil
}

// A dependency is what a filter depends on; it can be changed at any time.
type dependency struct {
	mu      sync.Mutex
	value   string
	err     error
	changed chan struct{}
}

func newDependency(value string) *dependency {
	return &dependency{value: value, changed: make(chan struct{})}
}

func (d *dependency) set(value string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.value, d.err = value, err
	close(d.changed)
	d.changed = make(chan struct{})
}

func (d *dependency) get() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.value
}

func (d *dependency) Ready() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.err
}

func (d *dependency) Changed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.changed
}

// A dependent is a fake with something to depend on.
type dependent struct {
	fake
	*dependency
}

// withholding depends on the color that it withholds.
func withholding(d *dependency) dependent {
	return dependent{fake{"pool", func(o *Object) (Verdict, error) { return dropping(d.get()).apply(o) }}, d}
}

func entry(f Filter, withholds bool) Entry {
	return Entry{Filter: f, Resources: []schema.GroupResource{services, widgets}, Verbs: allVerbs, Clients: []Client{{}}, Withholds: withholds, Default: true}
}

// A rig is a Chain before a server.
type rig struct {
	*Chain
	t   testing.TB
	reg *prometheus.Registry
}

func newRig(t testing.TB, s http.RoundTripper, entries ...Entry) *rig {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	c, err := New(Config{Next: s, Entries: entries, Dir: t.TempDir(), Registerer: reg})
	if err != nil {
		t.Fatal(err)
	}
	return &rig{c, t, reg}
}

// answer is what a client gets.
func (r *rig) answer(a ask) (code int, body []byte, resp *http.Response) {
	r.t.Helper()
	resp, err := r.RoundTrip(a.request(r.t.Context()))
	if err != nil {
		return int(status(r.t, err).Code), nil, nil
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatalf("body: %v", err)
	}
	return resp.StatusCode, b, resp
}

func status(t testing.TB, err error) metav1.Status {
	t.Helper()
	s, ok := err.(apierrors.APIStatus)
	if !ok {
		t.Fatalf("RoundTrip() = %v, want an APIStatus", err)
	}
	return s.Status()
}

func (r *rig) use(rules []Rule, more ...Entry) {
	r.t.Helper()
	if err := r.Use(rules, more); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) metric(name string, labels ...string) float64 {
	switch name {
	case "objects":
		return testutil.ToFloat64(r.metrics.objects.WithLabelValues(labels...))
	case "expired":
		return testutil.ToFloat64(r.metrics.expired.WithLabelValues(labels...))
	}
	return testutil.ToFloat64(r.metrics.spooled)
}

// accounts checks that the books of the sessions are right.
func (c *Chain) accounts(t testing.TB) {
	t.Helper()
	s := c.sessions
	s.mu.Lock()
	defer s.mu.Unlock()
	n, held := 0, 0
	for key, list := range s.byKey {
		n += len(list)
		for _, v := range list {
			sum := 0
			for _, b := range v.held {
				sum += len(b)
			}
			if sum != v.bytes || v.gone {
				t.Errorf("view of %s holds %d bytes, counts %d, gone: %t", key, sum, v.bytes, v.gone)
			}
			held += sum
		}
	}
	if n != s.n || held != s.bytes {
		t.Errorf("sessions have %d views of %d bytes, count %d of %d", n, held, s.n, s.bytes)
	}
}

// An event is what a client of a watch sees, in words: ADDED a red 11.
func words(kind watch.EventType, o thing) string {
	if kind == watch.Bookmark {
		return fmt.Sprintf("BOOKMARK %d", o.rv)
	}
	s := fmt.Sprintf("%s %s %s %d", kind, o.name, o.color, o.rv)
	if o.mark != "" {
		s += " " + o.mark
	}
	return s
}

// A watcher is a client of a watch that is read event by event.
type watcher struct {
	t      testing.TB
	rep    codec.Representation
	body   io.ReadCloser
	frames *codec.FrameReader
}

// watch begins one; code is not 200 if it is refused.
func (r *rig) watch(a ask) (w *watcher, code int) {
	r.t.Helper()
	a.verb = "watch"
	resp, err := r.RoundTrip(a.request(r.t.Context()))
	if err != nil {
		return nil, int(status(r.t, err).Code)
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		return nil, resp.StatusCode
	}
	return &watcher{r.t, a.rep, resp.Body, codec.NewFrameReader(resp.Body, a.rep, 1<<20)}, http.StatusOK
}

// mustWatch begins one that must be accepted.
func (r *rig) mustWatch(a ask) *watcher {
	r.t.Helper()
	w, code := r.watch(a)
	if code != http.StatusOK {
		r.t.Fatalf("watch %q answered %d, want 200", a.query, code)
	}
	return w
}

func (w *watcher) next() string {
	w.t.Helper()
	f, err := w.frames.Next()
	if err != nil {
		return err.Error()
	}
	_, bare, err := codec.DecodeObject(w.rep, f.Object)
	if err != nil {
		w.t.Fatal(err)
	}
	if f.Type == watch.Error {
		var st metav1.Status
		if w.rep.Protobuf {
			err = st.Unmarshal(bare)
		} else {
			err = json.Unmarshal(bare, &st)
		}
		if err != nil {
			w.t.Fatal(err)
		}
		return fmt.Sprintf("ERROR %d %s", st.Code, st.Message)
	}
	o, err := decodeThing(w.rep, bare)
	if err != nil {
		w.t.Fatal(err)
	}
	return words(f.Type, o)
}

// want reads events and compares.
func (w *watcher) want(events ...string) {
	w.t.Helper()
	for i, want := range events {
		if got := w.next(); got != want && !strings.HasPrefix(got, want+" edgehub:") {
			w.t.Fatalf("event %d = %q, want %q", i, got, want)
		}
	}
}
