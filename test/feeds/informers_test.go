// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package feeds

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// agentPrefix begins the User-Agent of informers, by which the audit log knows
// what the hub has passed on.
const agentPrefix = "informer-"

// A spec says what an informer is like.
type spec struct {
	kind      string // typed protobuf, typed JSON, dynamic, metadata
	gvr       schema.GroupVersionResource
	namespace string
	selector  metav1.ListOptions
	byNode    bool
	watchList bool
}

func (s spec) String() string {
	who, how := "token", "LIST"
	if s.byNode {
		who = "node"
	}
	if s.watchList {
		how = "WatchList"
	}
	return fmt.Sprintf("%s %s %q %s%s %s %s", s.kind, s.gvr.Resource, s.namespace, s.selector.LabelSelector, s.selector.FieldSelector, who, how)
}

// specs are twenty informers of every kind.
func specs() (all []spec) {
	for _, byNode := range []bool{true, false} {
		for _, watchList := range []bool{true, false} {
			all = append(all,
				spec{kind: "typed protobuf", gvr: configMapsGVR, byNode: byNode, watchList: watchList},
				spec{kind: "typed JSON", gvr: secretsGVR, byNode: byNode, watchList: watchList},
				spec{kind: "dynamic", gvr: rig.Widgets, byNode: byNode, watchList: watchList},
				spec{kind: "metadata", gvr: configMapsGVR, byNode: byNode, watchList: watchList},
			)
		}
	}
	return append(all,
		spec{kind: "typed protobuf", gvr: podsGVR, selector: metav1.ListOptions{LabelSelector: "parity=even"}, watchList: true},
		spec{kind: "typed JSON", gvr: configMapsGVR, namespace: "a", byNode: true},
		spec{kind: "dynamic", gvr: configMapsGVR, namespace: "b", selector: metav1.ListOptions{FieldSelector: "metadata.name=o-03"}, watchList: true},
		spec{kind: "metadata", gvr: rig.Widgets, selector: metav1.ListOptions{LabelSelector: "parity!=even"}, byNode: true},
	)
}

// A source lists and watches what a spec says, over one configuration.
type source struct {
	list    func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error)
	watch   func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error)
	example runtime.Object
}

func newSource(s spec, c *rest.Config) (source, error) {
	switch s.kind {
	case "dynamic":
		d, err := dynamic.NewForConfig(c)
		if err != nil {
			return source{}, err
		}
		r := d.Resource(s.gvr).Namespace(s.namespace)
		return source{example: &unstructured.Unstructured{}, watch: r.Watch,
			list: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return r.List(ctx, o) }}, nil
	case "metadata":
		m, err := metadata.NewForConfig(c)
		if err != nil {
			return source{}, err
		}
		r := m.Resource(s.gvr).Namespace(s.namespace)
		return source{example: &metav1.PartialObjectMetadata{}, watch: r.Watch,
			list: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return r.List(ctx, o) }}, nil
	}
	c = rest.CopyConfig(c)
	c.ContentType = rig.JSON
	if s.kind == "typed protobuf" {
		c.ContentType, c.AcceptContentTypes = rig.Protobuf, rig.Protobuf+","+rig.JSON
	}
	k, err := kubernetes.NewForConfig(c)
	if err != nil {
		return source{}, err
	}
	lw := cache.NewFilteredListWatchFromClient(k.CoreV1().RESTClient(), s.gvr.Resource, s.namespace, func(*metav1.ListOptions) {})
	example := map[string]runtime.Object{"configmaps": &corev1.ConfigMap{}, "secrets": &corev1.Secret{}, "pods": &corev1.Pod{}}[s.gvr.Resource]
	return source{list: lw.ListWithContext, watch: lw.WatchWithContext, example: example}, nil
}

// selected adds the spec's selectors.
func (s spec) selected(o metav1.ListOptions) metav1.ListOptions {
	o.LabelSelector, o.FieldSelector = s.selector.LabelSelector, s.selector.FieldSelector
	return o
}

// An informer is client-go's, with a look at all that goes over its wire.
type informer struct {
	spec
	cache.SharedIndexInformer
	direct source

	mu       sync.Mutex
	wholes   []string // requests for the whole state
	watches  int
	early    []string // watches that ended before their time
	initial  bool     // the watch has not ended its initial events
	rv       int64    // that the stream has reached
	versions map[string]int64
	problems []string
}

// An informer's requests go through it.
type spy struct {
	i    *informer
	next http.RoundTripper
}

// RoundTrip implements http.RoundTripper.
func (s *spy) RoundTrip(req *http.Request) (*http.Response, error) {
	q := req.URL.Query()
	watches := q.Get("watch") == "true" || q.Get("watch") == "1"
	s.i.mu.Lock()
	if watches {
		s.i.watches++
	}
	if !watches || q.Get("sendInitialEvents") == "true" {
		s.i.wholes = append(s.i.wholes, req.URL.RawQuery)
	}
	s.i.mu.Unlock()
	resp, err := s.next.RoundTrip(req)
	if err == nil && watches && resp.StatusCode == http.StatusOK {
		seconds, _ := strconv.Atoi(q.Get("timeoutSeconds")) // 0: any end is early
		resp.Body = &timedBody{ReadCloser: resp.Body, i: s.i, until: time.Now().Add(time.Duration(seconds)*time.Second - time.Second), ctx: req.Context(), query: req.URL.RawQuery}
	}
	return resp, err
}

// A timedBody notes that a watch has ended before its time.
type timedBody struct {
	io.ReadCloser
	i     *informer
	until time.Time
	ctx   context.Context
	query string
	once  sync.Once
}

// Read implements io.Reader.
func (b *timedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && b.ctx.Err() == nil && time.Now().Before(b.until) {
		b.once.Do(func() {
			b.i.mu.Lock()
			defer b.i.mu.Unlock()
			b.i.early = append(b.i.early, fmt.Sprintf("%s: %v at %s, %v before its time", b.query, err, time.Now().Format(time.TimeOnly), time.Until(b.until).Round(time.Second)))
		})
	}
	return n, err
}

// newInformer makes an informer that goes through the hub.
func newInformer(r *rig.Rig, s spec, n int) *informer {
	r.T.Helper()
	i := &informer{spec: s, versions: map[string]int64{}}
	c := credential(r, s.byNode)
	c.UserAgent = agentPrefix + strconv.Itoa(n)
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return &spy{i: i, next: next} })
	src, err := newSource(s, c)
	r.Must(err)
	i.direct, err = newSource(s, r.ControlPlane.TokenConfig(writerUser))
	r.Must(err)
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list, err := src.list(ctx, s.selected(o))
			if err == nil {
				err = i.listed(list)
			}
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w, err := src.watch(ctx, s.selected(o))
			if err != nil {
				return nil, err
			}
			i.begin(o)
			return watch.Filter(w, func(e watch.Event) (watch.Event, bool) { i.event(e); return e, true }), nil
		},
	}
	i.SharedIndexInformer = cache.NewSharedIndexInformer(mode{lw, !s.watchList}, src.example, 0, nil)
	_, err = i.AddEventHandler(cache.ResourceEventHandlerFuncs{UpdateFunc: i.updated})
	r.Must(err)
	return i
}

// A mode is a ListerWatcher with or without WatchList.
type mode struct {
	*cache.ListWatch
	without bool
}

// IsWatchListSemanticsUnSupported is how client-go asks.
func (m mode) IsWatchListSemanticsUnSupported() bool { return m.without }

func (i *informer) problem(format string, args ...any) {
	if len(i.problems) < 10 {
		i.problems = append(i.problems, fmt.Sprintf(format, args...))
	}
}

func version(o any) (key string, rv int64) {
	m, err := meta.CommonAccessor(o)
	if err != nil {
		return "", 0
	}
	rv, _ = strconv.ParseInt(m.GetResourceVersion(), 10, 64) // 0 is a problem in itself
	if acc, err := meta.Accessor(o); err == nil {
		key = acc.GetNamespace() + "/" + acc.GetName()
	}
	return key, rv
}

// listed takes a list's resourceVersion for the stream's.
func (i *informer) listed(list runtime.Object) error {
	_, rv := version(list)
	i.mu.Lock()
	defer i.mu.Unlock()
	if rv < i.rv {
		i.problem("a list at %d after %d", rv, i.rv)
	}
	i.rv = rv
	return meta.EachListItem(list, func(o runtime.Object) error {
		key, rv := version(o)
		i.versions[key] = rv
		return nil
	})
}

func (i *informer) begin(o metav1.ListOptions) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.initial = o.SendInitialEvents != nil && *o.SendInitialEvents
}

// event looks at a frame: but for initial events, no resourceVersion is below the
// one before.
func (i *informer) event(e watch.Event) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if e.Type == watch.Error {
		i.problem("ERROR %v", e.Object)
		return
	}
	key, rv := version(e.Object)
	if e.Type != watch.Bookmark {
		if rv < i.versions[key] || rv == 0 {
			i.problem("%s %s at %d after %d of the same object", e.Type, key, rv, i.versions[key])
		}
		i.versions[key] = rv
	}
	if !i.initial && rv < i.rv {
		i.problem("%s %s at %d after %d", e.Type, key, rv, i.rv)
	}
	i.rv = max(i.rv, rv)
	if e.Type != watch.Bookmark || !i.initial {
		return
	}
	if acc, err := meta.Accessor(e.Object); err == nil && acc.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true" {
		i.initial, i.rv = false, rv
	}
}

func (i *informer) updated(before, after any) {
	key, old := version(before)
	if _, rv := version(after); rv < old {
		i.mu.Lock()
		defer i.mu.Unlock()
		i.problem("%s went from %d to %d", key, old, rv)
	}
}

// content is an object as it is compared, without what clients add or leave out.
func content(o any) (string, error) {
	if p, ok := o.(*metav1.PartialObjectMetadata); ok {
		o = p.ObjectMeta
	}
	b, err := json.Marshal(o)
	return string(b), err
}

// holds returns what the informer holds.
func (i *informer) holds() (map[string]string, error) {
	held := map[string]string{}
	for _, o := range i.GetStore().List() {
		key, _ := version(o)
		var err error
		if held[key], err = content(o); err != nil {
			return nil, err
		}
	}
	return held, nil
}

// truth returns what the API server holds of it.
func (i *informer) truth(ctx context.Context) (map[string]string, error) {
	list, err := i.direct.list(ctx, i.selected(metav1.ListOptions{}))
	if err != nil {
		return nil, err
	}
	have := map[string]string{}
	err = meta.EachListItem(list, func(o runtime.Object) (err error) {
		key, _ := version(o)
		have[key], err = content(o)
		return err
	})
	return have, err
}

// agrees says how the informer differs from the API server.
func (i *informer) agrees(ctx context.Context) error {
	want, err := i.truth(ctx)
	if err != nil {
		return err
	}
	got, err := i.holds()
	if err != nil {
		return err
	}
	for key, w := range want {
		switch g, ok := got[key]; {
		case !ok:
			return fmt.Errorf("%s is missing", key)
		case g != w:
			return fmt.Errorf("%s is\n%.600s\nwant\n%.600s", key, g, w)
		}
	}
	for key := range got {
		if _, ok := want[key]; !ok {
			return fmt.Errorf("%s is there no more", key)
		}
	}
	return nil
}

// converge waits until informers hold what the API server does; nobody writes
// meanwhile.
func converge(ctx context.Context, all []*informer) error {
	var errs []error
	for _, i := range all {
		errs = append(errs, process.Poll(ctx, "the informer "+i.String()+" is right", i.agrees))
	}
	return errors.Join(errs...)
}

// A tally is what went over an informer's wire.
type tally struct {
	wholes, early, problems []string
	watches                 int
}

func (i *informer) tally() tally {
	i.mu.Lock()
	defer i.mu.Unlock()
	return tally{slices.Clone(i.wholes), slices.Clone(i.early), slices.Clone(i.problems), i.watches}
}

// startInformers runs informers until ctx ends, and returns when they are synced.
func startInformers(ctx context.Context, r *rig.Rig, all []spec) (informers []*informer) {
	r.T.Helper()
	var running sync.WaitGroup
	r.T.Cleanup(running.Wait) // ctx must have ended by then
	for n, s := range all {
		i := newInformer(r, s, n)
		informers = append(informers, i)
		running.Go(func() { i.RunWithContext(ctx) })
	}
	for _, i := range informers {
		r.Must(process.Poll(ctx, "the informer "+i.String()+" is synced", process.Until(i.HasSynced)))
	}
	return informers
}
