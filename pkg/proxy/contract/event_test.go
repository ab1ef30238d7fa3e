// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// box is an Outbox in memory.
type box struct {
	events []Event
	full   bool
}

func (b *box) Put(_ context.Context, e Event) error {
	if b.full {
		return errors.New("the disk is full")
	}
	b.events = append(b.events, e)
	return nil
}

func (b *box) Holds(namespace, name string) bool {
	for _, e := range b.events {
		if e.Namespace == namespace && e.Name == name {
			return true
		}
	}
	return false
}

func (b *box) Empty() bool { return len(b.events) == 0 }

func withBox(t *testing.T) (*world, *box) {
	w, b := newWorld(t), &box{}
	w.cfg.Outbox = b
	w.server = func(*http.Request) (*http.Response, error) { return jsonReply(201, `{"sent":true}`), nil }
	return w, b
}

const (
	coreEvents, newEvents = "/api/v1/namespaces/a/events", "/apis/events.k8s.io/v1/namespaces/a/events"
	eventJSON             = `{"kind":"Event","apiVersion":"v1","metadata":{"name":"p.1","namespace":"a"},"involvedObject":{"kind":"Pod","namespace":"a","name":"p"},"reason":"Failed","count":1,"later":"unknown here"}`
	newEventJSON          = `{"kind":"Event","apiVersion":"events.k8s.io/v1","metadata":{"name":"p.2"},"regarding":{"kind":"Pod","namespace":"a","name":"p"},"reason":"Failed"}`
)

func coreEvent(name string) *corev1.Event {
	return &corev1.Event{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "a"}, Reason: "Failed", Count: 1}
}

var coreEventKind = schema.GroupVersionKind{Version: "v1", Kind: "Event"}

func protobufEvent(t *testing.T, e *corev1.Event) string {
	t.Helper()
	b, err := encodeProtobuf(coreEventKind, e)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestEventCreate(t *testing.T) {
	protobuf := protobufEvent(t, coreEvent("p.1"))
	generated := coreEvent("")
	generated.GenerateName = "p."
	for _, tc := range []struct {
		name     string
		ask      ask
		code     int
		kept     string // namespace/name of what is kept
		answered string // in the answer
	}{
		{"JSON", ask{target: coreEvents, body: eventJSON}, 201, "a/p.1", eventJSON},
		{"protobuf", ask{target: coreEvents, body: protobuf, contentType: mediaProtobuf, accept: mediaProtobuf}, 201, "a/p.1", protobuf},
		{"protobuf, answered in JSON", ask{target: coreEvents, body: protobuf, contentType: mediaProtobuf, accept: mediaJSON}, 201, "a/p.1", `"reason":"Failed"`},
		{"the newer group", ask{target: newEvents, body: newEventJSON}, 201, "a/p.2", newEventJSON},
		{"a generated name", ask{target: coreEvents, body: `{"metadata":{"generateName":"p."}}`}, 201, "a/p.", `"name":"p.`},
		{"a generated name, protobuf", ask{target: coreEvents, body: protobufEvent(t, generated), contentType: mediaProtobuf}, 201, "a/p.", `"name":"p.`},
		{"another's", ask{user: alice, target: coreEvents, body: eventJSON}, 503, "", ""},
		{"dry run", ask{target: coreEvents + "?dryRun=All", body: eventJSON}, 503, "", ""},
		{"of another namespace", ask{target: "/api/v1/namespaces/b/events", body: eventJSON}, 503, "", ""},
		{"without a name", ask{target: coreEvents, body: `{}`}, 503, "", ""},
		{"of another kind", ask{target: coreEvents, body: newEventJSON}, 503, "", ""},
		{"no object", ask{target: coreEvents, body: `[]`}, 503, "", ""},
		{"YAML", ask{target: coreEvents, body: "a: b", contentType: "application/yaml"}, 503, "", ""},
		{"too large", ask{target: coreEvents, body: `{"metadata":{"name":"x"},"note":"` + strings.Repeat("x", maxEventBytes) + `"}`}, 503, "", ""},
		{"an answer that cannot be made", ask{target: coreEvents, body: eventJSON, accept: "application/cbor"}, 503, "", ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w, b := withBox(t)
			w.down = true
			tc.ask.method = "POST"
			resp, body, err := w.do(tc.ask)
			if got := codeOf(resp, err); got != tc.code {
				t.Fatalf("code %d, want %d: %v", got, tc.code, err)
			}
			kept := ""
			for _, e := range b.events {
				kept += e.Namespace + "/" + e.Name
				if !strings.Contains(string(e.Body), e.Name) {
					t.Errorf("what is kept does not hold its name: %q", e.Body)
				}
			}
			if tc.kept == "" && kept != "" || !strings.HasPrefix(kept, tc.kept) {
				t.Errorf("kept %q, want %q", kept, tc.kept)
			}
			if !strings.Contains(body, tc.answered) {
				t.Errorf("answered %.200q, want %.200q", body, tc.answered)
			}
			if err == nil && (resp.Header.Get(sourceHeader) != sourceLocal || !strings.HasPrefix(resp.Header.Get("Warning"), "110 ")) {
				t.Errorf("headers %v", resp.Header)
			}
		})
	}
}

func codeOf(resp *http.Response, err error) int {
	if err != nil {
		return http.StatusServiceUnavailable
	}
	return resp.StatusCode
}

// What was written is what will be sent, to the byte.
func TestEventIsKeptAsItCame(t *testing.T) {
	w, b := withBox(t)
	w.down = true
	w.do(ask{method: "POST", target: coreEvents, body: eventJSON, contentType: "application/json; charset=utf-8"})
	w.do(ask{method: "POST", target: newEvents, body: newEventJSON})
	want := []Event{
		{"", "a", "p.1", "application/json; charset=utf-8", []byte(eventJSON)},
		{"events.k8s.io", "a", "p.2", "", []byte(newEventJSON)},
	}
	if diff := cmp.Diff(want, b.events); diff != "" {
		t.Errorf("kept (-want +got):\n%s", diff)
	}
}

// No Event overtakes one that waits, and one that waits cannot be patched yet.
func TestEventsKeepTheirOrder(t *testing.T) {
	w, b := withBox(t)
	create := func(name string) string {
		_, body, err := w.do(ask{method: "POST", target: coreEvents, body: strings.Replace(eventJSON, "p.1", name, 1)})
		if err != nil {
			t.Fatal(err)
		}
		return body
	}
	patch := func(name string) int {
		resp, _, err := w.do(ask{method: "PATCH", target: coreEvents + "/" + name, body: `{"count":2}`})
		if err != nil {
			return 404
		}
		return resp.StatusCode
	}
	if got := create("e0"); got != `{"sent":true}` || len(b.events) != 0 {
		t.Errorf("with nothing waiting: %s, %d kept", got, len(b.events))
	}
	w.down = true
	create("e1")
	w.down, w.seen = false, nil
	create("e2")
	if len(b.events) != 2 || len(w.seen) != 0 {
		t.Errorf("%d kept, %v sent, want both kept", len(b.events), w.seen)
	}
	if got := patch("e2"); got != 404 || len(w.seen) != 0 {
		t.Errorf("patch of one that waits = %d, %v sent, want 404 and nothing", got, w.seen)
	}
	if got := patch("e0"); got != 201 || len(w.seen) != 1 {
		t.Errorf("patch of another one = %d, %v sent, want the API server's", got, w.seen)
	}
	b.events = nil
	create("e3")
	if len(b.events) != 0 {
		t.Error("kept although nothing waits")
	}
}

// What cannot be kept is not acknowledged; while there is a link it is sent.
func TestEventThatCannotBeKept(t *testing.T) {
	w, b := withBox(t)
	b.full, w.down = true, true
	if _, _, err := w.do(ask{method: "POST", target: coreEvents, body: eventJSON}); !errors.Is(err, errDown) {
		t.Errorf("offline: %v, want errDown", err)
	}
	b.events, w.down = []Event{{Namespace: "a", Name: "before"}}, false
	if _, body, err := w.do(ask{method: "POST", target: coreEvents, body: eventJSON}); err != nil || body != `{"sent":true}` {
		t.Errorf("online: %s, %v, want the API server's answer", body, err)
	}
}
