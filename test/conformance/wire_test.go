// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"sort"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/rig"
)

// An endpoint is the API server, or edgehub in front of it.
type endpoint struct {
	name string
	*rig.Endpoint
}

func newEndpoint(name string, c *rest.Config) (*endpoint, error) {
	e, err := rig.NewEndpoint(c)
	return &endpoint{name, e}, err
}

// An answer is what is compared of a response: without what differs between two
// answers of one API server, such as the list's resourceVersion in a cluster that
// goes on.
type answer struct {
	Status      int
	ContentType string
	Continued   bool // the list has a continue token
	Meta        string
	Items       []string // of a list, in order
	Events      []string // of a watch
	Body        string   // of anything else
	Err         string
}

func (e *endpoint) get(ctx context.Context, path, accept string) (*http.Response, error) {
	header := http.Header{}
	if accept != "" {
		header.Set("Accept", accept)
	}
	return e.Do(ctx, http.MethodGet, path, header, nil)
}

// ask sends a GET and reads the whole answer.
func (e *endpoint) ask(ctx context.Context, path, accept string) (answer, http.Header, []byte, error) {
	resp, err := e.get(ctx, path, accept)
	if err != nil {
		return answer{}, nil, nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return answer{}, nil, nil, err
	}
	a := answer{Status: resp.StatusCode, ContentType: resp.Header.Get("Content-Type")}
	if err := a.read(body); err != nil {
		return a, resp.Header, body, fmt.Errorf("%w in %q", err, body[:min(len(body), 200)])
	}
	return a, resp.Header, body, nil
}

// read takes a body apart: lists into their items' bytes.
func (a *answer) read(body []byte) error {
	if raw, ok := bytes.CutPrefix(body, []byte("k8s\x00")); ok {
		return a.readProtobuf(raw, body)
	}
	var l struct {
		Kind, APIVersion string
		Metadata         map[string]json.RawMessage
		Items            []json.RawMessage
		Rows             []json.RawMessage
		Message          string
		Status           json.RawMessage
	}
	if err := json.Unmarshal(body, &l); err != nil || l.Items == nil && l.Rows == nil {
		a.Body = still(body)
		return nil
	}
	delete(l.Metadata, "resourceVersion")
	_, a.Continued = l.Metadata["continue"]
	if string(l.Metadata["continue"]) == `""` {
		a.Continued = false
	} else {
		delete(l.Metadata, "continue")
	}
	meta, err := json.Marshal(l.Metadata)
	a.Meta = l.Kind + " " + l.APIVersion + " " + string(meta)
	for _, i := range append(l.Items, l.Rows...) {
		a.Items = append(a.Items, still(i))
	}
	return err
}

// moving is what an API server says differently each time.
var moving = regexp.MustCompile(`List\nmetadata:\n  resourceVersion: "\d+"|Too large resource version: \d+, current: \d+|too old resource version: \d+ \(\d+\)|"age":"[^"]*"|"\d+[smhd]"`)

// still is b without what moves. What is larger than any list of these tests is a document,
// which stays the same, and an expression takes long over it.
func still(b []byte) string {
	if len(b) > 512<<10 {
		return string(b)
	}
	return moving.ReplaceAllString(string(b), "…")
}

func (a *answer) readProtobuf(raw, body []byte) error {
	kind, object := "", []byte(nil)
	if err := rig.Fields(raw, func(n protowire.Number, v []byte) error {
		switch n {
		case 1:
			kind = string(v)
		case 2:
			object = v
		}
		return nil
	}); err != nil {
		return err
	}
	if !strings.Contains(kind, "List") {
		a.Body = still(body)
		return nil
	}
	a.Meta = kind
	return rig.Fields(object, func(n protowire.Number, v []byte) error {
		switch n {
		case 1:
			return rig.Fields(v, func(n protowire.Number, v []byte) error {
				a.Continued = a.Continued || n == 3 && len(v) > 0
				return nil
			})
		case 2:
			a.Items = append(a.Items, string(v))
		}
		return nil
	})
}

// follow reads a watch until the initial events have ended, want events have
// come, or the watch's own time-out. Events that come in no order of their own
// (initial ones) are sorted.
func (e *endpoint) follow(ctx context.Context, path, accept string, want int) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	resp, err := e.get(ctx, path, accept)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	a := answer{Status: resp.StatusCode, ContentType: resp.Header.Get("Content-Type")}
	if resp.StatusCode != http.StatusOK {
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			return a, err
		}
		return a, a.read(body)
	}
	next := jsonFrames(resp.Body)
	if strings.Contains(a.ContentType, "protobuf") {
		next = protobufFrames(resp.Body)
	}
	for want <= 0 || len(a.Events) < want {
		kind, object, err := next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return a, err
		}
		if kind == "BOOKMARK" {
			end := bytes.Contains(object, []byte("k8s.io/initial-events-end"))
			a.Events = append(a.Events, fmt.Sprintf("BOOKMARK end=%v", end))
			if end {
				break
			}
			continue
		}
		a.Events = append(a.Events, kind+" "+still(object))
	}
	// Bookmarks in between come as the server likes.
	a.Events = slices.DeleteFunc(a.Events, func(s string) bool { return s == "BOOKMARK end=false" })
	sort.Strings(a.Events)
	return a, nil
}

func jsonFrames(r io.Reader) func() (string, []byte, error) {
	d := json.NewDecoder(r)
	return func() (string, []byte, error) {
		var f struct {
			Type   string
			Object json.RawMessage
		}
		err := d.Decode(&f)
		return f.Type, f.Object, err
	}
}

func protobufFrames(r io.Reader) func() (string, []byte, error) {
	return func() (string, []byte, error) {
		var n [4]byte
		if _, err := io.ReadFull(r, n[:]); err != nil {
			return "", nil, err
		}
		b := make([]byte, binary.BigEndian.Uint32(n[:]))
		if _, err := io.ReadFull(r, b); err != nil {
			return "", nil, err
		}
		kind, object := "", []byte(nil)
		err := rig.Fields(b, func(n protowire.Number, v []byte) error {
			switch n {
			case 1:
				kind = string(v)
			case 2: // RawExtension
				return rig.Fields(v, func(n protowire.Number, v []byte) error { object = v; return nil })
			}
			return nil
		})
		return kind, object, err
	}
}
