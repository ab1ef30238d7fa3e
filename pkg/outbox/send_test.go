// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package outbox

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

func TestRequest(t *testing.T) {
	for _, tc := range []struct {
		name  string
		event Event
		want  string // method, path as it is sent, Content-Type
	}{
		{"core", Event{Namespace: "ns", Name: "e", ContentType: "application/json", Body: []byte("x")},
			"POST /api/v1/namespaces/ns/events application/json"},
		{"events.k8s.io", Event{Group: eventsGroup, Namespace: "ns", Name: "e", ContentType: "application/vnd.kubernetes.protobuf", Body: []byte("x")},
			"POST /apis/events.k8s.io/v1/namespaces/ns/events application/vnd.kubernetes.protobuf"},
		{"no Content-Type", Event{Namespace: "ns", Name: "e"}, "POST /api/v1/namespaces/ns/events "},
		{"escaped", Event{Namespace: "n?s", Name: "e"}, "POST /api/v1/namespaces/n%3Fs/events "},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var seen *http.Request
				h := open(t, memfs.New(), newServer())
				h.server.setAnswer(func(req *http.Request, body string) (*http.Response, error) {
					seen = req
					if body != string(tc.event.Body) || req.ContentLength != int64(len(body)) {
						t.Errorf("body = %q, Content-Length %d, want %q", body, req.ContentLength, tc.event.Body)
					}
					return reply(http.StatusCreated, ""), nil
				})
				h.put(t, tc.event)
				h.drain(t)
				if got := seen.Method + " " + seen.URL.EscapedPath() + " " + seen.Header.Get("Content-Type"); got != tc.want {
					t.Errorf("request is %s, want %s", got, tc.want)
				}
				want := http.Header{"Accept": {"application/json"}, "User-Agent": {"edgehub"}}
				if tc.event.ContentType != "" {
					want.Set("Content-Type", tc.event.ContentType)
				}
				if d := cmp.Diff(want, seen.Header); d != "" {
					t.Errorf("headers (-want +got):\n%s", d)
				}
				if u, ok := request.UserFrom(seen.Context()); !ok || u.GetName() != self.Name {
					t.Errorf("user is %v, want %v", u, self)
				}
				factory := &request.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")}
				info, err := factory.NewRequestInfo(seen)
				if err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(info, infoOf(seen)); d != "" {
					t.Errorf("RequestInfo (-want +got):\n%s", d)
				}
				if deadline, ok := seen.Context().Deadline(); !ok || time.Until(deadline) != sendTimeout {
					t.Errorf("deadline is in %v, want %v", time.Until(deadline), sendTimeout)
				}
			})
		})
	}
}

func TestAnswers(t *testing.T) {
	broken := func(code int) *http.Response {
		resp := reply(code, "")
		resp.Body = io.NopCloser(io.MultiReader(strings.NewReader(`{"kind":"Status"`), errReader{}))
		return resp
	}
	for _, tc := range []struct {
		name   string
		answer *http.Response
		want   string // the result, "" for one that is sent again
	}{
		{"created", reply(201, `{"kind":"Event"}`), created},
		{"ok", reply(200, ""), created},
		{"created, and the body is cut off", broken(201), created},
		{"exists", reply(409, alreadyExists), exists},
		{"another conflict", reply(409, `{"kind":"Status","reason":"Conflict","code":409}`), rejected},
		{"a conflict of somebody else's", reply(409, `{"reason":"AlreadyExists"}`), rejected},
		{"a conflict that is no Status", reply(409, "AlreadyExists"), rejected},
		{"a conflict that is cut off", broken(409), ""},
		{"bad request", reply(400, ""), rejected},
		{"unauthorized", reply(401, ""), ""},
		{"forbidden", reply(403, ""), rejected},
		{"no such namespace", reply(404, ""), rejected},
		{"request timeout", reply(408, ""), ""},
		{"too large", reply(413, ""), rejected},
		{"invalid", reply(422, ""), rejected},
		{"too many requests", reply(429, ""), ""},
		{"internal error", reply(500, ""), ""},
		{"unavailable", reply(503, ""), ""},
		{"gateway timeout", reply(504, ""), ""},
		{"not modified", reply(304, ""), ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := open(t, memfs.New(), newServer())
			body := &closing{ReadCloser: tc.answer.Body}
			tc.answer.Body = body
			h.server.setAnswer(func(*http.Request, string) (*http.Response, error) { return tc.answer, nil })
			h.put(t, event("a", "1"), event("b", "2"))
			_, err := h.sendOldest(t.Context(), false)
			if again := err != nil; again != (tc.want == "") {
				t.Errorf("sendOldest() = %v, want an error: %v", err, tc.want == "")
			}
			for _, result := range []string{created, exists, rejected} {
				want := 0
				if result == tc.want {
					want = 1
				}
				if got := h.sent(result); got != want {
					t.Errorf("sent_total{%s} = %d, want %d", result, got, want)
				}
			}
			if held := h.Holds("ns", "a"); held != (tc.want == "") || !h.Holds("ns", "b") {
				t.Errorf("Holds(a) = %v, want %v", held, tc.want == "")
			}
			if !body.closed {
				t.Error("the body was not closed")
			}
		})
	}
}

type errReader struct{}

func (errReader) Read([]byte) (int, error) { return 0, errors.New("cut off") }

type closing struct {
	io.ReadCloser
	closed bool
}

func (c *closing) Close() error { c.closed = true; return c.ReadCloser.Close() }

func TestAnswerIsReadBounded(t *testing.T) {
	h := open(t, memfs.New(), newServer())
	body := &endless{}
	h.server.setAnswer(func(*http.Request, string) (*http.Response, error) {
		resp := reply(http.StatusConflict, "")
		resp.Body = io.NopCloser(body)
		return resp, nil
	})
	h.put(t, event("a", "1"))
	h.drain(t)
	if body.read > 2*maxAnswerBytes {
		t.Errorf("%d bytes were read of an answer, want about %d", body.read, maxAnswerBytes)
	}
}

// endless is a body that has no end.
type endless struct{ read int }

func (e *endless) Read(p []byte) (int, error) {
	e.read += len(p)
	return len(p), nil
}
