// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package follow

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/codec"
)

var (
	protobuf   = codec.Representation{Protobuf: true}
	configMaps = schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}
	pools      = schema.GroupVersionResource{Group: "apps.openyurt.io", Version: "v1beta2", Resource: "nodepools"}
)

// An answer is what the source says to one request: frames come through a pipe.
type answer struct {
	code int
	rep  codec.Representation
	*io.PipeWriter
	body *io.PipeReader
	err  error
}

// A source answers one request after the other; without an answer there is none.
type source struct {
	t *testing.T

	mu      sync.Mutex // guards what follows
	asked   []*http.Request
	at      []time.Time
	answers []*answer
	link    chan struct{}
	rv      int
}

func (s *source) RoundTrip(req *http.Request) (*http.Response, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked, s.at = append(s.asked, req), append(s.at, time.Now())
	if len(s.answers) == 0 {
		return nil, errors.New("no link")
	}
	a := s.answers[0]
	s.answers = s.answers[1:]
	if a.err != nil {
		return nil, a.err
	}
	body := io.ReadCloser(a.body)
	if a.code != http.StatusOK {
		body = io.NopCloser(strings.NewReader("no"))
	} else {
		context.AfterFunc(req.Context(), func() { a.body.CloseWithError(req.Context().Err()) })
	}
	return &http.Response{StatusCode: a.code, Header: http.Header{"Content-Type": {a.rep.WatchContentType()}}, Body: body, Request: req}, nil
}

func (s *source) changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.link
}

// flip changes the link.
func (s *source) flip() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.link)
	s.link = make(chan struct{})
}

func (s *source) times() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.asked)
}

// will adds an answer.
func (s *source) will(code int, rep codec.Representation) *answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	a := &answer{code: code, rep: rep}
	a.body, a.PipeWriter = io.Pipe()
	s.answers = append(s.answers, a)
	return a
}

// send sends a frame.
func (s *source) send(a *answer, kind watch.EventType, name, value string) {
	s.t.Helper()
	s.rv++
	c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, ResourceVersion: fmt.Sprint(s.rv), Annotations: map[string]string{"value": value}}}
	bare, err := c.Marshal()
	if !a.rep.Protobuf {
		bare = fmt.Appendf(nil, `{"metadata":{"name":%q,"namespace":"shop","annotations":{"value":%q}}}`, name, value)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	shape := codec.Shape{Representation: a.rep, APIVersion: "v1", Kind: "ConfigMap"}
	if kind == watch.Bookmark {
		s.write(a, shape.AppendBookmark(nil, fmt.Sprint(s.rv), name == "end"))
		return
	}
	s.write(a, shape.AppendFrame(nil, kind, bare))
}

func (s *source) write(a *answer, b []byte) {
	s.t.Helper()
	if _, err := a.Write(b); err != nil {
		s.t.Fatalf("nobody reads: %v", err)
	}
	synctest.Wait()
}

// read keeps the annotation; "none" is not kept, "bad" cannot be read.
func read(shape codec.Shape, bare []byte) (string, bool, error) {
	v, ok, err := codec.ReadAnnotation(shape.Representation, bare, "value")
	if v == "bad" {
		err = errors.New("bad value")
	}
	return v, ok && v != "none", err
}

// run runs the table until stop.
func run(t *testing.T, table *Table[string]) (stop func()) {
	t.Helper()
	_ = table.Err() // somebody asks
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- table.Run(ctx) }()
	return sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run() = %v, want nil", err)
		}
	})
}

// bubble is a table in a bubble that nobody runs yet.
func bubble(t *testing.T, query Query, test func(t *testing.T, s *source, table *Table[string])) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &source{t: t, link: make(chan struct{})}
		test(t, s, New(Source{Transport: s, User: func() user.Info { return &user.DefaultInfo{Name: "node"} }, Changed: s.changed}, query, read))
	})
}

func isClosed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

func wantRows(t *testing.T, table *Table[string], want map[string]string) {
	t.Helper()
	if diff := cmp.Diff(want, table.All()); diff != "" {
		t.Errorf("All() (-want +got):\n%s", diff)
	}
	for key, v := range want {
		ns, name, _ := strings.Cut(key, "/")
		if got, ok := table.Get(ns, name); got != v || !ok {
			t.Errorf("Get(%s) = %q, %t, want %q, true", key, got, ok, v)
		}
	}
}

func TestTable(t *testing.T) {
	for _, rep := range []codec.Representation{protobuf, {}} {
		bubble(t, Query{GroupVersionResource: configMaps}, func(t *testing.T, s *source, table *Table[string]) {
			if err := table.Err(); !errors.Is(err, errUnknown) {
				t.Errorf("Err() before Run = %v, want %v", err, errUnknown)
			}
			if _, ok := table.Get("shop", "a"); ok {
				t.Error("there is a row before there is an answer")
			}
			a := s.will(200, rep)
			defer run(t, table)()
			s.send(a, watch.Added, "a", "1")
			s.send(a, watch.Added, "b", "2")
			s.send(a, watch.Added, "c", "none")
			s.send(a, watch.Bookmark, "", "")
			if len(table.All()) > 0 || table.Err() == nil {
				t.Error("rows are there before all of them are known")
			}
			changed := table.Changed()
			step := func(name string, kind watch.EventType, object, value string, change bool) {
				t.Helper()
				s.send(a, kind, object, value)
				if isClosed(changed) != change {
					t.Errorf("%s: Changed() is closed: %t, want %t", name, !change, change)
				}
				changed = table.Changed()
			}
			step("end of initial events", watch.Bookmark, "end", "", true)
			if err := table.Err(); err != nil {
				t.Errorf("Err() = %v, want nil", err)
			}
			wantRows(t, table, map[string]string{"shop/a": "1", "shop/b": "2"})
			step("bookmark", watch.Bookmark, "", "", false)
			step("the same", watch.Modified, "a", "1", false)
			step("another value", watch.Modified, "a", "3", true)
			step("one more", watch.Added, "d", "4", true)
			step("what is not kept", watch.Added, "e", "none", false)
			step("what was not kept is gone", watch.Deleted, "e", "none", false)
			step("not kept any more", watch.Modified, "d", "none", true)
			step("gone", watch.Deleted, "b", "2", true)
			step("gone twice", watch.Deleted, "b", "2", false)
			wantRows(t, table, map[string]string{"shop/a": "3"})
			all := table.All()
			all["shop/x"] = "mine"
			wantRows(t, table, map[string]string{"shop/a": "3"})
		})
	}
}

// TestReconnect: rows are kept while there is no answer, and those of the next whole
// answer take their place.
func TestReconnect(t *testing.T) {
	bubble(t, Query{GroupVersionResource: configMaps}, func(t *testing.T, s *source, table *Table[string]) {
		a := s.will(200, protobuf)
		defer run(t, table)()
		s.send(a, watch.Added, "a", "1")
		s.send(a, watch.Added, "b", "2")
		s.send(a, watch.Bookmark, "end", "")
		want := map[string]string{"shop/a": "1", "shop/b": "2"}
		changed := table.Changed()
		unchanged := func(when string) {
			t.Helper()
			if isClosed(changed) || table.Err() != nil {
				t.Errorf("%s: Changed() is closed: %t, Err() = %v, want false, nil", when, isClosed(changed), table.Err())
			}
			wantRows(t, table, want)
		}
		a.CloseWithError(io.ErrUnexpectedEOF)
		<-time.After(5 * time.Minute)
		unchanged("after minutes without a link")
		refused := s.will(404, protobuf)
		s.flip()
		synctest.Wait()
		unchanged("after a 404")
		_ = refused

		a = s.will(200, protobuf)
		s.flip()
		synctest.Wait()
		s.send(a, watch.Added, "b", "3")
		unchanged("while the answer is not whole")
		a.CloseWithError(io.ErrUnexpectedEOF)
		synctest.Wait()
		unchanged("after an answer that broke off")

		a = s.will(200, protobuf)
		s.flip()
		synctest.Wait()
		s.send(a, watch.Added, "b", "2")
		s.send(a, watch.Added, "a", "1")
		s.send(a, watch.Bookmark, "end", "")
		unchanged("after the same answer")

		a.CloseWithError(io.EOF)
		a = s.will(200, protobuf)
		<-time.After(retryPeriod)
		synctest.Wait()
		s.send(a, watch.Added, "b", "3")
		s.send(a, watch.Bookmark, "end", "")
		if !isClosed(changed) {
			t.Error("Changed() is not closed after another answer")
		}
		wantRows(t, table, map[string]string{"shop/b": "3"})
	})
}

// TestWhatEndsAWatch: an ERROR, junk, a row that cannot be read. It is asked for again.
func TestWhatEndsAWatch(t *testing.T) {
	status := codec.AppendStatusFrame(nil, protobuf, &metav1.Status{Code: 410})
	bad := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: map[string]string{"value": "bad"}}}
	bare, _ := bad.Marshal()
	shape := codec.Shape{Representation: protobuf, APIVersion: "v1", Kind: "ConfigMap"}
	for name, frame := range map[string][]byte{
		"error": status, "junk": bytes.Repeat([]byte{255}, 9), "row that cannot be read": shape.AppendFrame(nil, watch.Added, bare),
		"large": {0x7f, 0, 0, 0},
	} {
		for _, synced := range []bool{false, true} {
			t.Run(fmt.Sprint(name, synced), func(t *testing.T) {
				bubble(t, Query{GroupVersionResource: configMaps}, func(t *testing.T, s *source, table *Table[string]) {
					a := s.will(200, protobuf)
					defer run(t, table)()
					if synced {
						s.send(a, watch.Bookmark, "end", "")
					}
					next := s.will(200, protobuf)
					_, _ = a.Write(frame)
					synctest.Wait()
					if (table.Err() == nil) != synced {
						t.Errorf("Err() = %v", table.Err())
					}
					<-time.After(retryPeriod)
					synctest.Wait()
					s.send(next, watch.Added, "b", "1")
					s.send(next, watch.Bookmark, "end", "")
					wantRows(t, table, map[string]string{"shop/b": "1"})
				})
			})
		}
	}
}

func TestRefusal(t *testing.T) {
	for code, period := range map[int]time.Duration{403: refusedPeriod, 404: refusedPeriod, 429: retryPeriod, 503: retryPeriod} {
		bubble(t, Query{GroupVersionResource: pools, JSON: true}, func(t *testing.T, s *source, table *Table[string]) {
			s.will(code, protobuf)
			s.will(code, protobuf)
			first := table.Changed()
			stop := run(t, table)
			synctest.Wait()
			r := (*Refusal)(nil)
			if err := table.Err(); !errors.As(err, &r) || r.Code != code || r.Resource != pools {
				t.Fatalf("Err() = %v, want a Refusal of %d", err, code)
			}
			if !isClosed(first) {
				t.Error("Changed() is not closed when Err has changed")
			}
			again := table.Changed()
			<-time.After(period - time.Millisecond)
			synctest.Wait()
			if s.times() != 1 {
				t.Errorf("asked %d times in the %s after a %d, want once", s.times(), period, code)
			}
			<-time.After(2 * time.Millisecond)
			synctest.Wait()
			if s.times() != 2 || isClosed(again) {
				t.Errorf("asked %d times; Changed() is closed: %t, want 2, false: Err is the same", s.times(), isClosed(again))
			}
			stop()
		})
	}
}

// TestAfterARefusal: what fails otherwise is tried again as soon as ever.
func TestAfterARefusal(t *testing.T) {
	bubble(t, Query{GroupVersionResource: pools}, func(t *testing.T, s *source, table *Table[string]) {
		s.will(404, protobuf)
		stop := run(t, table)
		synctest.Wait()
		s.flip() // and nobody answers
		synctest.Wait()
		<-time.After(maxRetryPeriod + time.Millisecond)
		synctest.Wait()
		if s.times() < 3 {
			t.Errorf("asked %d times in a minute without a link after a 404, want 3 or more", s.times())
		}
		stop()
	})
}

// TestNobodyAsks: what nobody needs is not followed.
func TestNobodyAsks(t *testing.T) {
	for name, ask := range map[string]func(*Table[string]){
		"Get": func(t *Table[string]) { t.Get("a", "b") },
		"All": func(t *Table[string]) { t.All() },
		"Err": func(t *Table[string]) { _ = t.Err() },
	} {
		bubble(t, Query{GroupVersionResource: pools}, func(t *testing.T, s *source, table *Table[string]) {
			ctx, cancel := context.WithCancel(t.Context())
			go func() { _ = table.Run(ctx) }()
			<-time.After(time.Hour)
			if n := s.times(); n != 0 {
				t.Errorf("asked %d times before anybody needed it", n)
			}
			ask(table)
			synctest.Wait()
			if n := s.times(); n != 1 {
				t.Errorf("asked %d times after %s, want once", n, name)
			}
			cancel()
		})
	}
}

// TestSourceList: nil only if these were all.
func TestSourceList(t *testing.T) {
	for _, tc := range []struct {
		name string
		end  func(s *source, a *answer)
		ok   bool
	}{
		{"whole", func(s *source, a *answer) { s.send(a, watch.Bookmark, "end", "") }, true},
		{"broken off", func(_ *source, a *answer) { a.Close() }, false},
		{"lost", func(_ *source, a *answer) { a.CloseWithError(errors.New("lost")) }, false},
		{"bookmark that is not the end", func(s *source, a *answer) { s.send(a, watch.Bookmark, "", ""); a.Close() }, false},
	} {
		bubble(t, Query{}, func(t *testing.T, s *source, _ *Table[string]) {
			a := s.will(200, protobuf)
			var got []string
			done := make(chan error, 1)
			source := Source{Transport: s, User: func() user.Info { return &user.DefaultInfo{} }, Changed: s.changed}
			go func() {
				done <- source.List(t.Context(), Query{GroupVersionResource: configMaps}, func(kind watch.EventType, shape codec.Shape, bare []byte) {
					v, _, _ := read(shape, bare)
					got = append(got, fmt.Sprint(kind, " ", v))
				})
			}()
			s.send(a, watch.Added, "a", "1")
			s.send(a, watch.Deleted, "a", "1")
			tc.end(s, a)
			if err := <-done; (err == nil) != tc.ok {
				t.Errorf("List() that is %s = %v", tc.name, err)
			}
			if diff := cmp.Diff([]string{"ADDED 1", "DELETED 1"}, got); diff != "" {
				t.Errorf("List() sees (-want +got):\n%s", diff)
			}
			synctest.Wait()
			if _, err := a.Write([]byte("x")); err == nil {
				t.Error("the body is open after List")
			}
		})
	}
}

// TestRetry: periods double up to a minute, begin anew after an answer, and a change of
// the link cuts them short.
func TestRetry(t *testing.T) {
	bubble(t, Query{GroupVersionResource: configMaps}, func(t *testing.T, s *source, table *Table[string]) {
		stop := run(t, table)
		begin := time.Now()
		<-time.After(5 * time.Minute)
		synctest.Wait()
		var got []time.Duration
		s.mu.Lock()
		for _, at := range s.at {
			got = append(got, at.Sub(begin)/time.Second)
		}
		s.mu.Unlock()
		if diff := cmp.Diff([]time.Duration{0, 1, 3, 7, 15, 31, 63, 123, 183, 243}, got[:10]); diff != "" {
			t.Errorf("asked after seconds (-want +got):\n%s", diff)
		}
		n := s.times()
		a := s.will(200, protobuf)
		s.flip()
		synctest.Wait()
		if s.times() != n+1 {
			t.Fatal("a change of the link does not lead to a request at once")
		}
		s.send(a, watch.Bookmark, "end", "")
		s.flip()
		synctest.Wait()
		if s.times() != n+1 {
			t.Error("a change of the link ends a watch that goes on")
		}
		a.Close()
		synctest.Wait()
		n = s.times() // once more at once, for the link has changed since
		<-time.After(retryPeriod + time.Millisecond)
		synctest.Wait()
		if s.times() != n+1 {
			t.Errorf("asked %d times in the second after an answer, want once", s.times()-n)
		}
		stop()
	})
}

// TestRunEndsWithItsContext: during a watch too, and closes what it reads.
func TestRunEndsWithItsContext(t *testing.T) {
	bubble(t, Query{GroupVersionResource: configMaps}, func(t *testing.T, s *source, table *Table[string]) {
		a := s.will(200, protobuf)
		stop := run(t, table)
		s.send(a, watch.Bookmark, "end", "")
		stop()
		if _, err := a.Write([]byte("x")); err == nil {
			t.Error("the body is open after Run has returned")
		}
		if err := table.Err(); err != nil {
			t.Errorf("Err() after Run = %v, want nil: what is known is known", err)
		}
	})
}

// TestAsk: what is asked for.
func TestAsk(t *testing.T) {
	for _, tc := range []struct {
		query                Query
		path, field, accept  string
		prefix, resourceName string
	}{
		{Query{GroupVersionResource: configMaps}, "/api/v1/configmaps", "", protobuf.ContentType() + ",application/json", "api", ""},
		{Query{GroupVersionResource: configMaps, Namespace: "kube-system", Name: "hub"}, "/api/v1/namespaces/kube-system/configmaps", "metadata.name=hub", protobuf.ContentType() + ",application/json", "api", "hub"},
		{Query{GroupVersionResource: pools, Name: "edge", JSON: true}, "/apis/apps.openyurt.io/v1beta2/nodepools", "metadata.name=edge", "application/json", "apis", "edge"},
		{Query{GroupVersionResource: configMaps, Name: "a", FieldSelector: "x=y"}, "/api/v1/configmaps", "metadata.name=a,x=y", protobuf.ContentType() + ",application/json", "api", "a"},
		{Query{GroupVersionResource: configMaps, FieldSelector: "x=y"}, "/api/v1/configmaps", "x=y", protobuf.ContentType() + ",application/json", "api", ""},
	} {
		bubble(t, tc.query, func(t *testing.T, s *source, table *Table[string]) {
			stop := run(t, table)
			synctest.Wait()
			stop()
			req := s.asked[0]
			q := req.URL.Query()
			info, _ := request.RequestInfoFrom(req.Context())
			who, _ := request.UserFrom(req.Context())
			if req.URL.Path != tc.path || q.Get("fieldSelector") != tc.field || req.Header.Get("Accept") != tc.accept {
				t.Errorf("asks for %s, Accept %s, want %s, %s, %s", req.URL, req.Header.Get("Accept"), tc.path, tc.field, tc.accept)
			}
			if q.Get("watch") != "1" || q.Get("sendInitialEvents") != "true" || q.Get("allowWatchBookmarks") != "true" || q.Get("resourceVersionMatch") != "NotOlderThan" || q.Has("resourceVersion") {
				t.Errorf("asks for %s, want a WatchList", req.URL.RawQuery)
			}
			want := &request.RequestInfo{IsResourceRequest: true, Path: tc.path, Verb: "watch", APIPrefix: tc.prefix, APIGroup: tc.query.Group, APIVersion: tc.query.Version, Namespace: tc.query.Namespace, Resource: tc.query.Resource, Name: tc.resourceName, FieldSelector: tc.field}
			if diff := cmp.Diff(want, info); diff != "" || who.GetName() != "node" {
				t.Errorf("asks as %s with request info (-want +got):\n%s", who.GetName(), diff)
			}
		})
	}
}

// TestReadersBesideRun is for the race detector.
func TestReadersBesideRun(t *testing.T) {
	bubble(t, Query{GroupVersionResource: configMaps}, func(t *testing.T, s *source, table *Table[string]) {
		a := s.will(200, protobuf)
		defer run(t, table)()
		s.send(a, watch.Bookmark, "end", "")
		var readers sync.WaitGroup
		for range 4 {
			readers.Go(func() {
				for {
					changed := table.Changed()
					if _, ok := table.Get("shop", "last"); ok {
						return
					}
					_, _ = table.All(), table.Err()
					<-changed
				}
			})
		}
		for i := range 50 {
			s.send(a, watch.Added, fmt.Sprint(i), "1")
		}
		s.send(a, watch.Added, "last", "1")
		readers.Wait()
	})
}
