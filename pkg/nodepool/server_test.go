// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package nodepool

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/follow"
)

const (
	nodeName = "edge-1"
	nodes    = "/api/v1/nodes"
	v1beta2  = "/apis/apps.openyurt.io/v1beta2/nodepools"
	v1beta1  = "/apis/apps.openyurt.io/v1beta1/nodepools"
	v1alpha1 = "/apis/apps.openyurt.io/v1alpha1/nodepools"
)

var errNoLink = errors.New("no link, and not in the cache")

// server answers watches by name. A path that has no objects is refused with 404.
type server struct {
	t *testing.T

	mu      sync.Mutex
	up      bool
	link    chan struct{}
	objects map[string]map[string]object // by path and name
	codes   map[string]int               // what is refused
	lost    map[string]bool              // what is answered with an error
	watches map[*open]bool
	asked   []string // path and name of each request
	rv      int
}

type object struct {
	codec.Shape
	bare []byte
}

// open is a watch.
type open struct {
	path, name string
	frames     chan []byte
	body       *io.PipeReader
}

func newServer(t *testing.T) *server {
	return &server{t: t, up: true, link: make(chan struct{}), objects: map[string]map[string]object{nodes: {}}, codes: map[string]int{}, lost: map[string]bool{}, watches: map[*open]bool{}}
}

func (s *server) source() follow.Source {
	return follow.Source{Transport: s, User: func() user.Info { return &user.DefaultInfo{Name: "system:node:" + nodeName} }, Changed: s.linkChanged}
}

func (s *server) isUp() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.up
}

func (s *server) linkChanged() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.link
}

func (s *server) setUp(up bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.up = up
	close(s.link)
	s.link = make(chan struct{})
}

// serve makes a path known. refuse makes it answer nothing but code; 0 is an error of
// the transport.
func (s *server) serve(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.codes, path)
	delete(s.lost, path)
	if s.objects[path] == nil {
		s.objects[path] = map[string]object{}
	}
}

func (s *server) refuse(path string, code int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if code == 0 {
		s.lost[path] = true
		return
	}
	s.codes[path] = code
}

// hangUp ends all watches of a path.
func (s *server) hangUp(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.watches {
		if w.path == path {
			delete(s.watches, w)
			close(w.frames)
		}
	}
}

func (s *server) put(path, name string, o object) {
	s.serve(path)
	s.mu.Lock()
	defer s.mu.Unlock()
	kind := watch.Modified
	if _, ok := s.objects[path][name]; !ok {
		kind = watch.Added
	}
	s.objects[path][name] = o
	s.send(path, name, kind, o)
}

func (s *server) del(path, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o := s.objects[path][name]
	delete(s.objects[path], name)
	s.send(path, name, watch.Deleted, o)
}

// send tells the watches. The caller holds mu.
func (s *server) send(path, name string, kind watch.EventType, o object) {
	for w := range s.watches {
		if w.path == path && w.name == name {
			w.frames <- o.AppendFrame(nil, kind, o.bare)
		}
	}
}

// watching are the watches that are open.
func (s *server) watching() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for w := range s.watches {
		names = append(names, w.path+"/"+w.name)
	}
	slices.Sort(names)
	return names
}

// askedSince returns what was asked since it was called last.
func (s *server) askedSince() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	asked := s.asked
	s.asked = nil
	return asked
}

func (s *server) RoundTrip(req *http.Request) (*http.Response, error) {
	q := req.URL.Query()
	path := req.URL.Path
	name, ok := strings.CutPrefix(q.Get("fieldSelector"), "metadata.name=")
	info, _ := request.RequestInfoFrom(req.Context())
	u, _ := request.UserFrom(req.Context())
	protobuf := strings.HasPrefix(req.Header.Get("Accept"), "application/vnd.kubernetes.protobuf")
	if !ok || info.Verb != "watch" || u.GetName() != "system:node:"+nodeName || q.Get("sendInitialEvents") != "true" || protobuf != (path == nodes) {
		s.t.Errorf("unexpected request %s by %v, accepting %q", req.URL, u, req.Header.Get("Accept"))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, path+"/"+name)
	code := s.codes[path]
	if s.objects[path] == nil {
		code = cmp.Or(code, http.StatusNotFound)
	}
	switch {
	case s.lost[path]:
		return nil, errNoLink
	case code != 0:
		return &http.Response{StatusCode: code, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("no")), Request: req}, nil
	}
	w := &open{path: path, name: name, frames: make(chan []byte, 100)}
	pr, pw := io.Pipe()
	w.body = pr
	s.watches[w] = true
	shape := codec.Shape{APIVersion: "v1", Kind: "Node", Representation: codec.Representation{Protobuf: true}}
	if path != nodes {
		shape = codec.Shape{APIVersion: "apps.openyurt.io/" + strings.Split(path, "/")[3], Kind: "NodePool", Unstructured: true}
	}
	if o, ok := s.objects[path][name]; ok {
		w.frames <- o.AppendFrame(nil, watch.Added, o.bare)
	}
	w.frames <- shape.AppendBookmark(nil, "1", true)
	go s.write(req, w, pw)
	return &http.Response{StatusCode: 200, Header: http.Header{"Content-Type": {shape.WatchContentType()}}, Body: pr, Request: req}, nil
}

// write sends the frames of a watch until either side ends it.
func (s *server) write(req *http.Request, w *open, to *io.PipeWriter) {
	defer to.Close()
	defer func() {
		s.mu.Lock()
		delete(s.watches, w)
		s.mu.Unlock()
	}()
	for {
		select {
		case <-req.Context().Done():
			to.CloseWithError(req.Context().Err())
			return
		case frame, ok := <-w.frames:
			if !ok {
				return
			}
			if _, err := to.Write(frame); err != nil {
				return
			}
		}
	}
}

// node makes this node, with labels in pairs.
func (s *server) node(labels ...string) object {
	n := corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "u", Labels: map[string]string{"kubernetes.io/os": "linux"}}}
	for i := 0; i < len(labels); i += 2 {
		n.Labels[labels[i]] = labels[i+1]
	}
	s.rv++
	n.ResourceVersion = fmt.Sprint(s.rv)
	b, err := n.Marshal()
	if err != nil {
		s.t.Fatal(err)
	}
	return object{codec.Shape{APIVersion: "v1", Kind: "Node", Representation: codec.Representation{Protobuf: true}}, b}
}

// pool makes a NodePool as the version of the path has it; rest is what stands behind its metadata.
func pool(path, name, rest string) object {
	apiVersion := "apps.openyurt.io/" + strings.Split(path, "/")[3]
	b := fmt.Sprintf(`{"apiVersion":%q,"kind":"NodePool","metadata":{"name":%q,"resourceVersion":"7","uid":"p-%s"},%s}`, apiVersion, name, name, rest)
	return object{codec.Shape{APIVersion: apiVersion, Kind: "NodePool", Unstructured: true}, []byte(b)}
}
