// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"io"
	"net/http/httptest"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/codec"
)

// A list that passes by while a feed does its first sync may be newer than what
// the feed is told. Those who follow the sync must not be left with its state as
// if it were the scope's: they would never hear of what went in between.
func TestListOvertakesStaging(t *testing.T) {
	h := startHub(t, t.TempDir(), newFakeServer())
	req := httptest.NewRequestWithContext(t.Context(), "GET", "/api/v1/configmaps?watch=1&allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan", nil)
	info, err := fakeResolver.NewRequestInfo(req)
	if err != nil {
		t.Fatal(err)
	}
	req = req.WithContext(request.WithUser(req.Context(), alice))
	q, err := parseQuery(req, info)
	if err != nil {
		t.Fatal(err)
	}
	shape := codec.Shape{APIVersion: "v1", Kind: "ConfigMap"}
	l := h.logOf(q.name)
	l.mu.Lock()
	s := l.newScope(q.key, false)
	s.feed = &feed{scope: s, user: q.user, cancel: func() {}, staging: newStaging(), changed: make(chan struct{}), holders: map[string]*holder{}}
	s.feed.hold(q.caller)
	st := s.feed.staging
	o, _, err := newObject(q.key.Representation, []byte(`{"metadata":{"name":"gone","namespace":"a","resourceVersion":"101"}}`))
	if err == nil {
		err = st.add(s, shape, watch.Added, o)
	}
	if err != nil {
		t.Fatal(err)
	}
	w := newWatcher(req, s, &q, q.caller)
	// a/gone is deleted at 103; the list at 104 is through before the sync at 102.
	if err := s.replace(shape, "104", map[string]*object{}); err != nil {
		t.Fatal(err)
	}
	if err := s.feed.synced(st, "102"); err != nil {
		t.Fatal(err)
	}
	l.mu.Unlock()
	w.feed.end()
	defer w.Close()
	got, err := io.ReadAll(w)
	if err != nil {
		t.Fatal(err)
	}
	if text := string(got); strings.Contains(text, "initial-events-end") && !strings.Contains(text, "DELETED") {
		t.Errorf("the watch says that all is there, a/gone too, which the scope knows to be deleted:\n%s", text)
	}
}
