// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"k8s.io/apiserver/pkg/endpoints/request"
)

// A watch that goes on from a Table stays open while the link is down, also after a
// restart, and goes to the API server when it is back; one that goes on from
// nothing recorded is refused.
func TestTableWatchWaitsForTheLink(t *testing.T) {
	server, dir := newFakeServer(), t.TempDir()
	server.put("configmaps/a/x", "1")
	h := startHub(t, dir, server)
	ask := func(path string) (*http.Response, error) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		req := httptest.NewRequestWithContext(ctx, http.MethodGet, path, nil)
		req.Header.Set("Authorization", "Bearer "+alice.GetName())
		req.Header.Set("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json")
		info, err := fakeResolver.NewRequestInfo(req)
		if err != nil {
			t.Fatal(err)
		}
		return h.RoundTrip(req.WithContext(request.WithUser(request.WithRequestInfo(ctx, info), alice)))
	}
	resp, err := ask("/api/v1/namespaces/a/configmaps?limit=500")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	var list struct {
		Metadata struct{ ResourceVersion string }
	}
	if err := json.Unmarshal(body, &list); err != nil {
		t.Fatal(err)
	}
	h.stop()
	server.setDown(true)
	h = startHub(t, dir, server)
	watch := "/api/v1/namespaces/a/configmaps?watch=true&resourceVersion=" + list.Metadata.ResourceVersion
	for _, path := range []string{
		watch + "&labelSelector=n", "/api/v1/namespaces/b/configmaps?watch=true&resourceVersion=1", "/api/v1/namespaces/a/configmaps?watch=true",
	} {
		if resp, err := ask(path); err == nil {
			t.Errorf("%s offline = %d, want an error", path, resp.StatusCode)
		}
	}
	if resp, err = ask(watch); err != nil {
		t.Fatalf("%s offline: %v, want a watch that waits", watch, err)
	}
	server.put("configmaps/a/y", "2") // while nobody can tell
	server.setDown(false)
	w := &watchClient{t: t, d: json.NewDecoder(resp.Body)}
	if got, want := w.next(), "ADDED a/y=2@102"; got != want {
		t.Errorf("first event = %s, want %s", got, want)
	}
	if err := resp.Body.Close(); err != nil {
		t.Error(err)
	}
	// What the API server refuses is the last event.
	server.setDown(true)
	if resp, err = ask(watch); err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	server.refuse = func(*http.Request) int { return http.StatusForbidden }
	server.setDown(false)
	w = &watchClient{t: t, d: json.NewDecoder(resp.Body)}
	if got, want := w.next(), "ERROR 403"; got != want {
		t.Errorf("event of a refused watch = %s, want %s", got, want)
	}
	if got, want := w.next(), "end: EOF"; got != want {
		t.Errorf("after it: %s, want %s", got, want)
	}
}
