// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package outbox

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/cache/journal"
	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

var (
	errDown = errors.New("link down")
	self    = &user.DefaultInfo{Name: "system:node:n1", Groups: []string{user.NodesGroup}}
)

// A server is an API server and the link to it. It remembers what arrives.
type server struct {
	mu      sync.Mutex // guards what follows
	up      bool
	changed chan struct{}
	posts   []string // bodies, in the order in which they arrived
	answer  func(req *http.Request, body string) (*http.Response, error)
}

func newServer() *server {
	return &server{up: true, changed: make(chan struct{}), answer: func(*http.Request, string) (*http.Response, error) {
		return reply(http.StatusCreated, `{"kind":"Event"}`), nil
	}}
}

func (s *server) isUp() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.up
}

func (s *server) change() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

func (s *server) setUp(up bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.up != up {
		close(s.changed)
		s.up, s.changed = up, make(chan struct{})
	}
}

func (s *server) setAnswer(f func(*http.Request, string) (*http.Response, error)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer = f
}

// got is what has arrived so far, the bodies.
func (s *server) got() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.posts...)
}

func (s *server) RoundTrip(req *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	if !s.up {
		s.mu.Unlock()
		return nil, fmt.Errorf("dial: %w", errDown)
	}
	s.posts = append(s.posts, string(body))
	answer := s.answer
	s.mu.Unlock()
	return answer(req, string(body))
}

func reply(code int, body string) *http.Response {
	return &http.Response{StatusCode: code, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body))}
}

func always(code int, body string) func(*http.Request, string) (*http.Response, error) {
	return func(*http.Request, string) (*http.Response, error) { return reply(code, body), nil }
}

const alreadyExists = `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"AlreadyExists","code":409}`

// A hub is an Outbox with all that it needs. Run does not run.
type hub struct {
	*Outbox
	fs      *memfs.FS
	server  *server
	reg     *prometheus.Registry
	journal *journal.Journal
}

// open makes an Outbox over a file system.
func open(t testing.TB, fs *memfs.FS, s *server, change ...func(*Config)) *hub {
	t.Helper()
	h, err := tryOpen(fs, s, change...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.journal.Close() })
	return h
}

func tryOpen(fs *memfs.FS, s *server, change ...func(*Config)) (*hub, error) {
	j, err := journal.Open(journal.Options{Dir: "/outbox", FS: fs, SegmentBytes: 4 << 10})
	if err != nil {
		return nil, err
	}
	h := &hub{fs: fs, server: s, reg: prometheus.NewPedanticRegistry(), journal: j}
	cfg := Config{
		Journal: j, Upstream: s, Up: s.isUp, Changed: s.change, Registerer: h.reg,
		IsUnavailable: func(err error) bool { return errors.Is(err, errDown) },
		Node:          nodeSelf,
	}
	for _, f := range change {
		f(&cfg)
	}
	h.Outbox, err = New(cfg)
	return h, err
}

// event makes an Event whose body tells it from all others.
func event(name, body string) Event {
	return Event{Namespace: "ns", Name: name, ContentType: "application/json", Body: []byte(body)}
}

func (h *hub) put(t testing.TB, events ...Event) {
	t.Helper()
	for _, e := range events {
		if err := h.Put(t.Context(), e); err != nil {
			t.Fatalf("Put(%s) = %v", e.Name, err)
		}
	}
}

// waiting are the bodies in the queue, oldest first, as they are on disk.
func (h *hub) waiting(t testing.TB) []string {
	t.Helper()
	h.disk.Lock()
	defer h.disk.Unlock()
	var bodies []string
	for _, it := range h.queue {
		b, err := h.body(it)
		if err != nil {
			t.Fatalf("body of %s: %v", it.Name, err)
		}
		bodies = append(bodies, string(b))
	}
	return bodies
}

// drain sends all that waits, without Run.
func (h *hub) drain(t testing.TB) {
	t.Helper()
	for !h.Empty() {
		if _, err := h.sendOldest(t.Context(), false); err != nil {
			t.Fatalf("sendOldest() = %v", err)
		}
	}
}

func (h *hub) sent(result string) int {
	return int(testutil.ToFloat64(h.metrics.sent.WithLabelValues(result)))
}

func (h *hub) dropped(reason string) int {
	return int(testutil.ToFloat64(h.metrics.dropped.WithLabelValues(reason)))
}

func nodeSelf() user.Info { return self }

func infoOf(req *http.Request) *request.RequestInfo {
	info, _ := request.RequestInfoFrom(req.Context())
	return info
}
