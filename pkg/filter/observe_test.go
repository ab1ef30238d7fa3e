// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
)

// A notebook is an observer that writes down what it is told.
type notebook struct {
	mu    sync.Mutex
	lines []string
	block <-chan struct{} // nil: it does not wait
	skip  bool
	asked int
}

func (n *notebook) Name() string { return "notebook" }

func (n *notebook) Observe(*Request) Observation {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.asked++; n.skip {
		return nil
	}
	return n
}

func (n *notebook) note(line string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.lines = append(n.lines, line)
}

func (n *notebook) See(kind watch.EventType, o *Object) {
	if n.block != nil {
		<-n.block
	}
	t, err := decodeThing(o.Shape().Representation, o.bare)
	n.note(fmt.Sprintf("%s %v", words(kind, t), err == nil))
}
func (n *notebook) Synced()        { n.note("synced") }
func (n *notebook) End(whole bool) { n.note(fmt.Sprint("end ", whole)) }

func (n *notebook) read() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.lines)
}

func observing(o Observer) Entry {
	return Entry{Observer: o, Resources: []schema.GroupResource{services, widgets}, Verbs: allVerbs, Clients: []Client{{}}, Default: true}
}

// TestObserve: what an observer is told of bytes, and that the client gets just these.
func TestObserve(t *testing.T) {
	var list, events, ended [][]byte // by form
	a, b := thing{name: "a", color: "red", rv: 5}, thing{name: "b", color: "green", rv: 6}
	for _, f := range forms {
		shape, bare := a.encode(t, f)
		_, bareB := b.encode(t, f)
		list = append(list, listOf(t, f, 7, []thing{a, b}))
		e := shape.AppendFrame(nil, watch.Added, bare)
		e = shape.AppendBookmark(e, "5", true)
		e = shape.AppendFrame(e, watch.Modified, bareB)
		e = shape.AppendBookmark(e, "7", false)
		e = shape.AppendFrame(e, watch.Deleted, bare)
		events, ended = append(events, e), append(ended, e[:len(e)-7])
	}
	lost := errors.New("lost")
	for i, f := range forms {
		cut := 2 // the last byte of JSON is white space
		if f.rep.Protobuf {
			cut = 1
		}
		for _, tc := range []observeCase{
			{"list", "list", list[i], io.EOF, []string{"ADDED a red 5 true", "ADDED b green 6 true", "synced", "end true"}},
			{"list that breaks off", "list", list[i][:len(list[i])-cut], io.EOF, []string{"ADDED a red 5 true", "ADDED b green 6 true", "end false"}},
			{"list that is lost", "list", list[i], lost, []string{"ADDED a red 5 true", "ADDED b green 6 true", "end false"}},
			{"junk", "list", []byte("junk, but what of it"), io.EOF, []string{"end false"}},
			{"watch", "watch", events[i], io.EOF, []string{"ADDED a red 5 true", "synced", "MODIFIED b green 6 true", "DELETED a red 5 true", "end true"}},
			{"watch that breaks off", "watch", ended[i], io.EOF, []string{"ADDED a red 5 true", "synced", "MODIFIED b green 6 true", "end false"}},
			{"watch that is lost", "watch", events[i], lost, []string{"ADDED a red 5 true", "synced", "MODIFIED b green 6 true", "DELETED a red 5 true", "end false"}},
			{"junk in a watch", "watch", bytes.Repeat([]byte("junk"), 99999), io.EOF, []string{"end false"}},
			{"get", "get", []byte("anything"), io.EOF, nil},
		} {
			t.Run(f.name+"/"+tc.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) { told(t, f, tc) })
			})
		}
	}
}

// An observeCase is a body that ends with an error, maybe io.EOF.
type observeCase struct {
	name, verb string
	body       []byte
	end        error
	want       []string
}

// told checks what an observer is told of a body.
func told(t *testing.T, f form, tc observeCase) {
	t.Helper()
	n := &notebook{}
	r := newRig(t, roundTrip(func(req *http.Request) (*http.Response, error) {
		reader := io.MultiReader(iotest.HalfReader(bytes.NewReader(tc.body)), iotest.ErrReader(tc.end))
		return respond(req, 200, f.rep.ContentType(), io.NopCloser(reader)), nil
	}), observing(n), observing(&other{}))
	resp, err := r.RoundTrip(ask{form: f, verb: tc.verb}.request(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(resp.Body)
	if !bytes.Equal(got, tc.body) || err == nil != errors.Is(tc.end, io.EOF) {
		t.Errorf("the client gets %d bytes, %v, want the %d of the server, %v", len(got), err, len(tc.body), tc.end)
	}
	resp.Body.Close()
	synctest.Wait()
	if diff := cmp.Diff(tc.want, n.read()); diff != "" {
		t.Errorf("the observer is told (-want +got):\n%s", diff)
	}
}

// An other is an observer that nothing is of interest to.
type other struct{ notebook }

func (*other) Name() string                 { return "other" }
func (*other) Observe(*Request) Observation { return nil }

// TestClientLeavesObserved: a body that is closed before its end broke off.
func TestClientLeavesObserved(t *testing.T) {
	for _, verb := range []string{"list", "watch"} {
		synctest.Test(t, func(t *testing.T) {
			s := newServer(t)
			s.set("a", "red")
			n := &notebook{}
			r := newRig(t, s, observing(n))
			resp, err := r.RoundTrip(ask{form: forms[0], verb: verb}.request(t.Context()))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(resp.Body, make([]byte, 50)); err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			synctest.Wait()
			if got := n.read(); len(got) == 0 || got[len(got)-1] != "end false" {
				t.Errorf("%s: the observer is told %q, want end false", verb, got)
			}
		})
	}
}

// TestSlowObserver: the client never waits for one; one that lags too far behind loses
// touch.
func TestSlowObserver(t *testing.T) {
	f := forms[0]
	for _, verb := range []string{"list", "watch"} {
		for size, want := range map[int]string{100: "end true", maxBacklogBytes/10 + 1: "end false"} {
			if size > 100 && verb == "watch" {
				continue // the same, and takes seconds
			}
			synctest.Test(t, func(t *testing.T) {
				var things []thing
				var body []byte
				for i := range 12 {
					o := thing{name: fmt.Sprintf("%02d", i), color: strings.Repeat("x", size), rv: 5}
					shape, bare := o.encode(t, f)
					things, body = append(things, o), shape.AppendFrame(body, watch.Added, bare)
				}
				if verb == "list" {
					body = listOf(t, f, 7, things)
				}
				wait := make(chan struct{})
				n := &notebook{block: wait}
				r := newRig(t, roundTrip(func(req *http.Request) (*http.Response, error) {
					return respond(req, 200, f.rep.ContentType(), io.NopCloser(bytes.NewReader(body))), nil
				}), observing(n))
				if _, got, _ := r.answer(ask{form: f, verb: verb}); !bytes.Equal(got, body) {
					t.Errorf("the client of a slow observer gets %d bytes, want the %d of the server", len(got), len(body))
				}
				synctest.Wait()
				if got := n.read(); len(got) > 0 {
					t.Errorf("%s: the observer that waits was told %q", verb, got)
				}
				close(wait)
				synctest.Wait()
				if got := n.read(); len(got) == 0 || got[len(got)-1] != want {
					t.Errorf("%s of %d bytes: the observer is told %d times, want %s at last", verb, len(body), len(got), want)
				}
			})
		}
	}
}

// TestObserverBesideAFilter: it is told of answers that are filtered, too.
func TestObserverBesideAFilter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newServer(t)
		s.set("a", "green")
		n := &notebook{}
		r := newRig(t, s, entry(dropping("red"), true), observing(n))
		w := r.mustWatch(ask{form: forms[0], query: r.listed(forms[0])})
		s.set("a", "red")
		w.want("DELETED a green 12")
		w.body.Close()
		synctest.Wait()
		if got := n.read(); len(got) != 5 || n.asked != 2 {
			t.Errorf("the observer of a list and a watch is asked %d times and told %q", n.asked, got)
		}
		if c := r.metric("objects", "notebook", "seen"); c != 2 {
			t.Errorf("edgehub_filter_objects_total{notebook,seen} = %v, want 2", c)
		}
	})
}
