// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/codec"
)

// wild is a filter that does what the color of an object says.
var wild = fake{"wild", func(o *Object) (Verdict, error) {
	switch color, _, err := o.Annotation("color"); {
	case err != nil:
		return Keep, err
	case color == "red":
		return Drop, nil
	case color == "blue":
		return setMark(o, "seen")
	case color == "black":
		return Keep, errors.New("a secret")
	}
	return Keep, nil
}}

// TestGet and lists: what becomes of an object by its color.
func TestGet(t *testing.T) {
	for _, f := range forms {
		for color, code := range map[string]int{"green": 200, "blue": 200, "red": 404, "black": 500} {
			t.Run(f.name+"/"+color, func(t *testing.T) {
				s := newServer(t)
				rv := s.set("a", color)
				r := newRig(t, s, entry(wild, true))
				for _, method := range []string{http.MethodGet, http.MethodHead} {
					got, body, resp := r.answer(ask{form: f, verb: "get", name: "a", method: method})
					if got != code {
						t.Fatalf("%s of a %s object answered %d, want %d", method, color, got, code)
					}
					if code != 200 {
						continue
					}
					o := thing{name: "a", color: color, rv: rv}
					if color == "blue" {
						o.mark = "seen"
					}
					shape, bare := o.encode(t, f)
					want := shape.AppendObject(nil, bare)
					if resp.ContentLength != int64(len(want)) && color == "green" {
						t.Errorf("%s has Content-Length %d, want %d", method, resp.ContentLength, len(want))
					}
					switch {
					case method == http.MethodHead:
						if len(body) > 0 {
							t.Errorf("HEAD has a body: %q", body)
						}
					case color == "green" && !bytes.Equal(body, want):
						t.Errorf("GET = %q, want %q", body, want)
					case color == "blue":
						_, bare, err := codec.DecodeObject(f.rep, body)
						if err != nil {
							t.Fatal(err)
						}
						if got, err := decodeThing(f.rep, bare); got != o || err != nil {
							t.Errorf("GET = %v, %v, want %v", got, err, o)
						}
					}
				}
				verdict := map[string]string{"green": "keep", "blue": "change", "red": "drop", "black": "error"}[color]
				if n := r.metric("objects", "wild", verdict); n != 2 {
					t.Errorf("edgehub_filter_objects_total{wild,%s} = %v, want 2", verdict, n)
				}
			})
		}
	}
}

// TestErrorsAreNotTold: neither the text of a filter's error nor an object of a list with
// an object that cannot be judged reaches the client.
func TestErrorsAreNotTold(t *testing.T) {
	for _, f := range forms {
		s := newServer(t)
		s.set("a", "green")
		s.set("b", "black")
		r := newRig(t, s, entry(wild, true))
		for _, verb := range []string{"get", "list"} {
			_, err := r.RoundTrip(ask{form: f, verb: verb, name: "b"}.request(t.Context()))
			if err == nil {
				t.Fatalf("%s %s of an object that cannot be judged is answered", f.name, verb)
			}
			if st := status(t, err); st.Code != 500 || strings.Contains(err.Error(), "secret") || !strings.Contains(st.Message, "wild") {
				t.Errorf("%s %s = %d %q, want a 500 that names the filter, not its error", f.name, verb, st.Code, st.Message)
			}
		}
		if f.resource == services {
			w := r.mustWatch(ask{form: f})
			for got := ""; !strings.HasPrefix(got, "ERROR"); {
				if got = w.next(); strings.Contains(got, "secret") || strings.Contains(got, "black") {
					t.Errorf("watch = %q", got)
				}
			}
			w.want("EOF")
			w.body.Close()
		}
	}
}

func TestList(t *testing.T) {
	for _, f := range forms {
		t.Run(f.name, func(t *testing.T) {
			s := newServer(t)
			a, b, c := thing{name: "a", color: "green"}, thing{name: "b", color: "red"}, thing{name: "c", color: "blue", mark: "seen"}
			a.rv, b.rv, c.rv = s.set("a", "green"), s.set("b", "red"), s.set("c", "blue")
			r := newRig(t, s, entry(wild, true))
			code, body, resp := r.answer(ask{form: f, verb: "list"})
			if code != 200 || resp.ContentLength != int64(len(body)) {
				t.Fatalf("list answered %d with Content-Length %d, want 200, %d", code, resp.ContentLength, len(body))
			}
			things, list := decodeList(t, f.rep, body)
			if fmt.Sprint(things) != fmt.Sprint([]thing{a, c}) || list.ResourceVersion != fmt.Sprint(s.rv) {
				t.Errorf("list = %v at %s, want %v at %d", things, list.ResourceVersion, []thing{a, c}, s.rv)
			}

			// Nothing but green ones: byte for byte. Nothing left: an empty list.
			s.set("b", "")
			s.set("c", "")
			if _, body, _ := r.answer(ask{form: f, verb: "list"}); !bytes.Equal(body, listOf(t, f, s.rv, []thing{a})) {
				t.Errorf("list that is kept = %q, want it as it came", body)
			}
			s.set("a", "red")
			if _, body, _ := r.answer(ask{form: f, verb: "list"}); !bytes.Equal(body, listOf(t, f, s.rv, nil)) {
				t.Errorf("list of nothing = %q, want %q", body, listOf(t, f, s.rv, nil))
			}
			if _, body, resp := r.answer(ask{form: f, verb: "list", method: http.MethodHead}); len(body) > 0 || resp.ContentLength != int64(len(listOf(t, f, s.rv, nil))) {
				t.Errorf("HEAD of a list = %q with Content-Length %d", body, resp.ContentLength)
			}
			r.accounts(t)
		})
	}
}

func decodeList(t testing.TB, rep codec.Representation, body []byte) (things []thing, list codec.List) {
	t.Helper()
	d := codec.NewListDecoder(rep, 1<<20, func(_ codec.Shape, bare []byte) error {
		o, err := decodeThing(rep, bare)
		things = append(things, o)
		return err
	})
	_, err := d.Write(body)
	if err == nil {
		list, err = d.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return things, list
}

// TestAnswersThatCannotBeFiltered are never sent on.
func TestAnswersThatCannotBeFiltered(t *testing.T) {
	list := func(meta string) string {
		return `{"kind":"ServiceList","apiVersion":"v1","metadata":{` + meta + `"resourceVersion":"7"},"items":[]}`
	}
	for _, tc := range []struct {
		name, verb, contentType, body string
		want                          int
	}{
		{"list", "list", "application/json", list(""), 200},
		{"part of a list", "list", "application/json", list(`"continue":"more",`), 500},
		{"shard of a list", "list", "application/json", list(`"shardInfo":{"selector":"x"},`), 500},
		{"list that breaks off", "list", "application/json", list("")[:60], 500},
		{"no list", "list", "application/json", `{"kind":"Service","apiVersion":"v1"}`, 500},
		{"other type", "list", "application/yaml", "a: b", 500},
		{"type that was not asked for", "list", "application/vnd.kubernetes.protobuf", "k8s\x00", 500},
		{"junk", "get", "application/json", `{"kind":`, 500},
		{"other type of an object", "get", "text/html", "<p>", 500},
		{"other type of a watch", "watch", "text/html", "<p>", 500},
		{"junk in a watch", "watch", "application/json", `{"type":"ADDED","object":{"kind":"Service"}}`, 200},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var body closing
			r := newRig(t, roundTrip(func(req *http.Request) (*http.Response, error) {
				body.Reader = strings.NewReader(tc.body)
				return respond(req, 200, tc.contentType, &body), nil
			}), entry(wild, true))
			code, got, _ := r.answer(ask{form: forms[0], verb: tc.verb, name: "a"})
			if code != tc.want || tc.verb == "watch" && code == 200 && !strings.Contains(string(got), `"type":"ERROR"`) {
				t.Errorf("answered %d %q, want %d", code, got, tc.want)
			}
			if !body.closed {
				t.Error("the body was not closed")
			}
			r.accounts(t)
		})
	}
}

type closing struct {
	io.Reader
	closed bool
}

func (c *closing) Close() error { c.closed = true; return nil }

const tableAccept = "application/json;as=Table;v=v1;g=meta.k8s.io"

// TestAccept is what is asked for in a client's stead, "" for 406.
func TestAccept(t *testing.T) {
	const proto, partial = "application/vnd.kubernetes.protobuf", "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
	for _, tc := range []struct {
		accept   string
		services string
		widgets  string
	}{
		{"application/json", "application/json", "application/json"},
		{proto, proto, ""},
		{proto + ",application/json", proto + ",application/json", "application/json"},
		{"*/*", "application/json", "application/json"},
		{tableAccept, "", ""},
		{tableAccept + ",application/json", "application/json", "application/json"},
		{partial, "", ""},
		{partial + ",application/json", "application/json", "application/json"},
		{"application/cbor", "", ""},
		{"application/yaml", "", ""},
	} {
		for gr, want := range map[schema.GroupResource]string{services: tc.services, widgets: tc.widgets} {
			for _, verb := range allVerbs {
				s := newServer(t)
				s.set("a", "green")
				r := newRig(t, s, entry(wild, true))
				a := ask{form: form{"", gr, jsonRep}, verb: verb, name: "a", accept: tc.accept}
				resp, err := r.RoundTrip(a.request(t.Context()))
				if want == "" {
					if err == nil || status(t, err).Code != 406 || len(s.asked) > 0 {
						t.Errorf("%s of %s with Accept %s = %v, want a 406", verb, gr, tc.accept, err)
					}
				} else if err != nil {
					t.Errorf("%s of %s with Accept %s = %v", verb, gr, tc.accept, err)
				} else if s.last().Header.Get("Accept") != want {
					t.Errorf("%s of %s with Accept %s asks for %s, want %s", verb, gr, tc.accept, s.last().Header.Get("Accept"), want)
				}
				if err == nil {
					resp.Body.Close()
				}
				// No filter is in force: as the client says.
				off := entry(wild, true)
				off.Default = false
				if resp, err = newRig(t, s, off).RoundTrip(a.request(t.Context())); err != nil || s.last().Header.Get("Accept") != tc.accept {
					t.Errorf("%s of %s with Accept %s and no filter asks for %s, %v", verb, gr, tc.accept, s.last().Header.Get("Accept"), err)
				}
				if err == nil {
					resp.Body.Close()
				}
			}
		}
	}
}

// TestUntouched is what passes although a filter is in force.
func TestUntouched(t *testing.T) {
	plain := func(change func(ctx context.Context, req *http.Request) *http.Request) func(*testing.T) *http.Request {
		return func(t *testing.T) *http.Request {
			return change(t.Context(), ask{form: forms[0], verb: "list"}.request(t.Context()))
		}
	}
	asking := func(a ask) func(*testing.T) *http.Request {
		return func(t *testing.T) *http.Request { a.form = forms[0]; return a.request(t.Context()) }
	}
	for _, tc := range []struct {
		name string
		req  func(*testing.T) *http.Request
	}{
		{"no request info", plain(func(ctx context.Context, req *http.Request) *http.Request {
			return req.WithContext(request.WithUser(ctx, &user.DefaultInfo{}))
		})},
		{"no user", plain(func(ctx context.Context, req *http.Request) *http.Request {
			return req.WithContext(request.WithRequestInfo(ctx, &request.RequestInfo{IsResourceRequest: true, Verb: "list", Resource: "services"}))
		})},
		{"no resource", plain(func(_ context.Context, req *http.Request) *http.Request {
			info, _ := request.RequestInfoFrom(req.Context())
			info.IsResourceRequest = false
			return req
		})},
		{"other subresource", asking(ask{verb: "get", name: "a", subresource: "scale"})},
		{"write", asking(ask{verb: "update", name: "a", method: http.MethodPut})},
		{"delete", asking(ask{verb: "deletecollection", method: http.MethodDelete})},
		{"HEAD of a watch, which the API server refuses", asking(ask{verb: "watch", method: http.MethodHead})},
		{"other program", asking(ask{verb: "list", program: "other"})},
		{"other user", asking(ask{verb: "list", user: "other"})},
		{"WebSocket of an exec", asking(ask{verb: "get", name: "a", subresource: "exec", upgrade: "websocket"})},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got *http.Request
			resp := &http.Response{StatusCode: 200, Body: http.NoBody}
			e := entry(wild, true)
			e.Clients = []Client{{User: "kubelet", Program: "tester"}}
			r := newRig(t, roundTrip(func(req *http.Request) (*http.Response, error) { got = req; return resp, nil }), e)
			want := tc.req(t)
			if a, err := r.RoundTrip(want); a != resp || err != nil || got != want {
				t.Errorf("RoundTrip() = %v, %v, want the answer and the request untouched", a, err)
			}
		})
	}
}

func TestStatusIsFilteredAsItsObject(t *testing.T) {
	s := newServer(t)
	s.set("a", "red")
	r := newRig(t, s, entry(wild, true))
	if code, _, _ := r.answer(ask{form: forms[0], verb: "get", name: "a", subresource: "status"}); code != 404 {
		t.Errorf("status of an object that is withheld answered %d, want 404", code)
	}
}

func TestUpgrade(t *testing.T) {
	s := newServer(t)
	r := newRig(t, s, entry(wild, true))
	_, err := r.RoundTrip(ask{form: forms[0], verb: "watch", upgrade: "websocket"}.request(t.Context()))
	if err == nil || status(t, err).Code != 406 {
		t.Errorf("watch by WebSocket with a filter = %v, want a 406", err)
	}
	conn := &connection{closed: make(chan struct{})}
	r = newRig(t, roundTrip(func(req *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 101, Body: conn, Request: req}, nil
	}))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	resp, err := r.RoundTrip(ask{form: forms[0], verb: "watch", upgrade: "websocket"}.request(ctx))
	if err != nil || resp.Body != io.ReadCloser(conn) {
		t.Fatalf("watch by WebSocket without a filter = %v, %v, want the connection untouched", resp, err)
	}
	r.use(nil, entry(wild, true))
	r.expireWatches()
	select {
	case <-conn.closed:
	default:
		t.Error("the WebSocket goes on although a filter is in force")
	}
}

type connection struct{ closed chan struct{} }

func (c *connection) Read([]byte) (int, error) { return 0, io.EOF }

func (c *connection) Close() error { close(c.closed); return nil }

// TestLimit: filtered lists come in one piece.
func TestLimit(t *testing.T) {
	s := newServer(t)
	r := newRig(t, s, entry(wild, true))
	for _, tc := range []struct {
		query, want string
		code        int
	}{
		{"limit=500&labelSelector=a%3Db", "labelSelector=a%3Db", 200},
		{"limit=1", "", 200},
		{"shardSelector=x&resourceVersion=0", "resourceVersion=0", 200},
		{"limit=1&continue=", "continue=", 200},
		{"limit=1&continue=token", "", 410},
	} {
		s.asked = nil
		a := ask{form: forms[0], verb: "list", query: tc.query}
		req := a.request(t.Context())
		code, _, _ := r.answer(a)
		if code != tc.code || code == 200 && s.last().URL.RawQuery != tc.want {
			t.Errorf("list?%s answered %d, asked for %v, want %d, %s", tc.query, code, s.asked, tc.code, tc.want)
		}
		if req.URL.RawQuery != tc.query {
			t.Errorf("the client's request was changed to %s", req.URL.RawQuery)
		}
	}
}

func TestErrorsOfNextPass(t *testing.T) {
	s := newServer(t)
	r := newRig(t, s, entry(wild, true))
	if code, body, _ := r.answer(ask{form: forms[0], verb: "get", name: "a"}); code != 404 || !bytes.Contains(body, []byte(`"a"`)) {
		t.Errorf("get of what is not there answered %d %q, want the server's 404", code, body)
	}
	s.old = 100
	r.answer(ask{form: forms[0], verb: "list"})
	resp, err := r.RoundTrip(ask{form: forms[0], verb: "watch", query: "resourceVersion=10"}.request(t.Context()))
	if err != nil || resp.StatusCode != 410 {
		t.Fatalf("watch that is too old = %v, %v, want the server's 410", resp, err)
	}
	resp.Body.Close()
	boom := errors.New("boom")
	r = newRig(t, roundTrip(func(*http.Request) (*http.Response, error) { return nil, boom }), entry(wild, true))
	for _, verb := range allVerbs {
		if _, err := r.RoundTrip(ask{form: forms[0], verb: verb}.request(t.Context())); !errors.Is(err, boom) {
			t.Errorf("%s = %v, want %v", verb, err, boom)
		}
	}
	r.accounts(t)
}
