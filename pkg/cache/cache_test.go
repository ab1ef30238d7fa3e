// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/authentication/user"
)

const (
	allMaps   = "/api/v1/configmaps"
	watchList = "?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&resourceVersion="
)

func TestListIsReplayedOffline(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.put("configmaps/b/two", "2")
	dir := t.TempDir()
	h := startHub(t, dir, server)
	online := h.body(alice, allMaps)
	server.setDown(true)
	if got := h.body(alice, allMaps); got != online {
		t.Errorf("offline list = %s, want %s", got, online)
	}
	h.stop()

	h = startHub(t, dir, server)
	if got := h.body(alice, allMaps); got != online {
		t.Errorf("list after a restart = %s, want %s", got, online)
	}
	if got := texts(t, h.body(alice, "/api/v1/namespaces/b/configmaps")); !cmp.Equal(got, []string{"b/two=2"}) {
		t.Errorf("narrower list = %v", got)
	}
	if got := texts(t, h.body(alice, allMaps+"?labelSelector=text=1")); !cmp.Equal(got, []string{"a/one=1"}) {
		t.Errorf("list by label = %v", got)
	}
	if got := texts(t, h.body(alice, allMaps+"?fieldSelector=metadata.name=two")); !cmp.Equal(got, []string{"b/two=2"}) {
		t.Errorf("list by name = %v", got)
	}
}

// refused expects an APIStatus error with a code.
func (h *hub) refused(code int, do func() (*http.Response, error)) {
	h.t.Helper()
	resp, err := do()
	if err == nil {
		resp.Body.Close()
		h.t.Errorf("answer = %d, want error %d", resp.StatusCode, code)
		return
	}
	if s, ok := err.(apierrors.APIStatus); !ok || int(s.Status().Code) != code {
		h.t.Errorf("error = %v, want status %d", err, code)
	}
}

func (h *hub) refusedGet(code int, u user.Info, path string) {
	h.t.Helper()
	h.refused(code, func() (*http.Response, error) { return h.do(h.t.Context(), u, path) })
}

// Offline a resourceVersion means what it means at the API server.
func TestOfflineResourceVersions(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server)
	const path = "/api/v1/namespaces/a/configmaps"
	h.body(alice, path)
	server.setDown(true)
	for _, rv := range []string{"", "?resourceVersion=0", "?resourceVersion=0&resourceVersionMatch=NotOlderThan", "?resourceVersion=100"} {
		if got := texts(t, h.body(alice, path+rv)); !cmp.Equal(got, []string{"a/one=1"}) {
			t.Errorf("%s = %v, want the recorded list", rv, got)
		}
	}
	h.refusedGet(http.StatusBadRequest, alice, path+"?resourceVersion=junk")
}

func TestUnknownIs503(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.put("secrets/a/s", "x")
	h := startHub(t, t.TempDir(), server)
	h.body(alice, "/api/v1/namespaces/a/configmaps")
	h.body(alice, "/api/v1/namespaces/a/secrets/s")
	server.setDown(true)
	for _, path := range []string{
		allMaps, // wider than what was asked for
		"/api/v1/namespaces/b/configmaps",
		"/api/v1/secrets",
		"/api/v1/namespaces/a/secrets", // one of them is known, not all
		"/api/v1/namespaces/a/secrets/other",
		"/api/v1/namespaces/a/configmaps/other", // listed, never followed
		"/api/v1/namespaces/a/configmaps?fieldSelector=spec.x=y",
		allMaps + watchList,
	} {
		h.refusedGet(http.StatusServiceUnavailable, alice, path)
		h.refusedGet(http.StatusServiceUnavailable, bob, path)
	}
	h.refusedGet(http.StatusServiceUnavailable, bob, "/api/v1/namespaces/a/configmaps")
	h.refusedGet(http.StatusServiceUnavailable, bob, "/api/v1/namespaces/a/configmaps/one")
	h.refusedGet(http.StatusGone, alice, "/api/v1/namespaces/a/configmaps?limit=1&continue=x")
	h.refusedGet(http.StatusGatewayTimeout, alice, "/api/v1/namespaces/a/configmaps?resourceVersion=999&resourceVersionMatch=NotOlderThan")
	h.refusedGet(http.StatusUnprocessableEntity, alice, "/api/v1/namespaces/a/configmaps?watch=1&sendInitialEvents=true")
}

func TestPagesBecomeState(t *testing.T) {
	server := newFakeServer()
	for i := range 5 {
		server.put(fmt.Sprintf("configmaps/a/m%d", i), fmt.Sprint(i))
	}
	h := startHub(t, t.TempDir(), server)
	h.body(alice, allMaps+"?limit=2")
	h.body(alice, allMaps+"?limit=2&continue=2")
	server.setDown(true)
	h.refusedGet(http.StatusServiceUnavailable, alice, allMaps)
	server.setDown(false)
	h.body(alice, allMaps+"?limit=2")
	h.body(alice, allMaps+"?limit=2&continue=2")
	h.body(alice, allMaps+"?limit=2&continue=4")
	server.setDown(true)
	if got := texts(t, h.body(alice, allMaps)); len(got) != 5 {
		t.Errorf("list = %v, want 5", got)
	}
}

func TestPagesAtDifferentVersionsAreNoState(t *testing.T) {
	server := newFakeServer()
	for i := range 4 {
		server.put(fmt.Sprintf("configmaps/a/m%d", i), fmt.Sprint(i))
	}
	h := startHub(t, t.TempDir(), server)
	h.body(alice, allMaps+"?limit=2")
	server.put("configmaps/a/m0", "new")
	h.body(alice, allMaps+"?limit=2&continue=2")
	server.setDown(true)
	h.refusedGet(http.StatusServiceUnavailable, alice, allMaps)
}

func TestWatchThroughCutAndRestart(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1") // 101
	server.put("configmaps/b/two", "2") // 102
	dir := t.TempDir()
	h := startHub(t, dir, server)
	w := h.watchAs(nodeUser, allMaps+watchList)
	w.want("ADDED a/one=1@101", "ADDED b/two=2@102", "SYNCED @102")
	server.put("configmaps/a/three", "3")
	w.want("ADDED a/three=3@103")
	server.setDown(true)
	server.del("configmaps/a/one")
	server.put("configmaps/b/two", "2b")
	server.setDown(false)
	w.want("DELETED a/one=1@104", "MODIFIED b/two=2b@105")
	server.setDown(true)

	// A second client offline, from the same feed.
	w2 := h.watchAs(nodeUser, allMaps+watchList)
	w2.want("ADDED a/three=3@103", "ADDED b/two=2b@105", "SYNCED @105")
	// One that resumes gets what it has missed, the deletion included.
	w3 := h.watchAs(nodeUser, allMaps+"?watch=1&resourceVersion=103")
	w3.want("DELETED a/one=1@104", "MODIFIED b/two=2b@105")
	h.stop()

	h = startHub(t, dir, server)
	w = h.watchAs(nodeUser, allMaps+watchList)
	w.want("ADDED a/three=3@103", "ADDED b/two=2b@105", "SYNCED @105")
	w3 = h.watchAs(nodeUser, allMaps+"?watch=1&resourceVersion=103")
	w3.want("DELETED a/one=1@104", "MODIFIED b/two=2b@105")
	before := len(server.seen())
	server.put("configmaps/c/four", "4")
	server.setDown(false)
	w.want("ADDED c/four=4@106")
	w3.want("ADDED c/four=4@106")
	for _, r := range server.seen()[before:] {
		if !strings.Contains(r, "watch=true") || strings.Contains(r, "sendInitialEvents") {
			t.Errorf("request after the cut: %s; want only watches that resume", r)
		}
	}
}

func TestHistoryGoneIsTheDifference(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	server.put("configmaps/a/two", "2")
	h := startHub(t, t.TempDir(), server)
	w := h.watchAs(nodeUser, allMaps+watchList)
	w.want("ADDED a/one=1@101", "ADDED a/two=2@102", "SYNCED @102")
	server.setDown(true)
	server.del("configmaps/a/one")          // 103
	server.put("configmaps/a/three", "3")   // 104
	server.put("configmaps/a/two", "2b")    // 105
	server.put("secrets/a/unrelated", "no") // 106
	server.forget()
	server.setDown(false)
	w.want("ADDED a/three=3@104", "MODIFIED a/two=2b@105", "DELETED a/one=1@106", "BOOKMARK @106")
}

func TestFedScopeSays404Offline(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	dir := t.TempDir()
	h := startHub(t, dir, server)
	h.watchAs(nodeUser, allMaps+watchList).want("ADDED a/one=1@101", "SYNCED @101")
	server.setDown(true)
	h.refusedGet(http.StatusNotFound, nodeUser, "/api/v1/namespaces/a/configmaps/other")
	h.refusedGet(http.StatusServiceUnavailable, alice, "/api/v1/namespaces/a/configmaps/other")
	h.stop()
	// Nothing vouches for what happened between the stop and the cut.
	h = startHub(t, dir, server)
	h.refusedGet(http.StatusServiceUnavailable, nodeUser, "/api/v1/namespaces/a/configmaps/other")
	if got := h.body(nodeUser, "/api/v1/namespaces/a/configmaps/one"); !strings.Contains(got, `"text":"1"`) {
		t.Errorf("get = %s", got)
	}
}

func TestForbiddenEndsTheRight(t *testing.T) {
	server := newFakeServer()
	server.put("secrets/a/s", "x")
	h := startHub(t, t.TempDir(), server)
	h.body(alice, "/api/v1/namespaces/a/secrets")
	h.body(alice, "/api/v1/namespaces/a/secrets/s")
	server.refuse = func(*http.Request) int { return http.StatusForbidden }
	for _, path := range []string{"/api/v1/namespaces/a/secrets", "/api/v1/namespaces/a/secrets/s"} {
		resp, err := h.do(t.Context(), alice, path)
		if err != nil || resp.StatusCode != http.StatusForbidden {
			t.Fatalf("%s: %v, %v", path, resp, err)
		}
		resp.Body.Close()
	}
	server.setDown(true)
	h.refusedGet(http.StatusServiceUnavailable, alice, "/api/v1/namespaces/a/secrets")
	h.refusedGet(http.StatusServiceUnavailable, alice, "/api/v1/namespaces/a/secrets/s")
}

func TestFeedIsRefused(t *testing.T) {
	server := newFakeServer()
	server.refuse = func(*http.Request) int { return http.StatusForbidden }
	h := startHub(t, t.TempDir(), server)
	resp, err := h.do(t.Context(), alice, allMaps+watchList)
	if err != nil || resp.StatusCode != http.StatusForbidden {
		t.Fatalf("watch = %v, %v, want 403", resp, err)
	}
	resp.Body.Close()
}

func TestTokenFeedEndsWithItsLastRequest(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server)
	w := h.watchAs(alice, allMaps+watchList)
	w.want("ADDED a/one=1@101", "SYNCED @101")
	w2 := h.watchAs(alice, allMaps+watchList)
	w2.want("ADDED a/one=1@101", "SYNCED @101")
	if got := len(server.seen()); got != 1 {
		t.Errorf("%d requests upstream for two watchers, want 1", got)
	}
	w.close()
	server.put("configmaps/a/two", "2")
	w2.want("ADDED a/two=2@102")
	w2.close()
	eventually(t, "the feed has ended", func() bool { return h.count(func(s *scope) int { return btoi(s.feed != nil) }) == 0 })
}

// eventually waits for what another goroutine does.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-ctx.Done():
			t.Fatalf("not within 10 s: %s", what)
		case <-tick.C:
		}
	}
}

func TestSecretsAreNotOnDiskInClear(t *testing.T) {
	server := newFakeServer()
	const text = "correct-horse-battery-staple"
	server.put("secrets/a/s", text)
	dir := t.TempDir()
	h := startHub(t, dir, server)
	h.body(alice, "/api/v1/namespaces/a/secrets")
	h.body(alice, "/api/v1/namespaces/a/secrets/s")
	w := h.watchAs(nodeUser, "/api/v1/secrets"+watchList)
	w.want("ADDED a/s="+text+"@101", "SYNCED @101")
	h.PutResponse(alice, "tokenrequest", "k", Response{ContentType: "application/json", Body: []byte(text), Time: time.Now()})
	h.stop()
	files := 0
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		files++
		b, err := os.ReadFile(path)
		if strings.Contains(string(b), text) {
			t.Errorf("%s holds a Secret in clear", path)
		}
		return err
	})
	if err != nil || files < 4 {
		t.Fatalf("%d files, %v", files, err)
	}
	server.setDown(true)
	h = startHub(t, dir, server)
	if got := texts(t, h.body(alice, "/api/v1/namespaces/a/secrets")); !cmp.Equal(got, []string{"a/s=" + text}) {
		t.Errorf("list = %v", got)
	}
	if r, ok := h.Response(alice, "tokenrequest", "k"); !ok || string(r.Body) != text {
		t.Errorf("Response = %v, %v", r, ok)
	}
	if _, ok := h.Response(bob, "tokenrequest", "k"); ok {
		t.Error("bob has alice's response")
	}
}

func TestIdenticalListWritesNothing(t *testing.T) {
	server := newFakeServer()
	for i := range 50 {
		server.put(fmt.Sprintf("configmaps/a/m%d", i), strings.Repeat("x", 1000))
	}
	dir := t.TempDir()
	h := startHub(t, dir, server)
	h.body(alice, allMaps)
	eventually(t, "the list is on disk", func() bool { return h.journal.Stats().BytesWritten > 50_000 })
	before := h.journal.Stats().BytesWritten
	for range 5 {
		h.body(alice, allMaps)
	}
	if err := h.flushAll(func(*log) bool { return true }); err != nil {
		t.Fatal(err)
	}
	if got := h.journal.Stats().BytesWritten - before; got > 5000 {
		t.Errorf("%d bytes written for identical lists", got)
	}
}

func TestDiscoveryIsReplayed(t *testing.T) {
	server := newFakeServer()
	server.refuse = func(*http.Request) int { return 0 }
	dir := t.TempDir()
	h := startHub(t, dir, server)
	h.PutResponse(alice, "verdict", "x", Response{ContentType: "application/json", Body: []byte("{}"), Time: time.Now()})
	server.setDown(true)
	resp, err := h.do(t.Context(), alice, "/apis")
	if err == nil {
		t.Errorf("discovery that was never asked for = %v, want an error", resp)
	}
}

func TestNarrowerFromWhoeverCanTell(t *testing.T) {
	server := newFakeServer()
	server.put("configmaps/a/one", "1")
	h := startHub(t, t.TempDir(), server)
	narrow := h.body(alice, allMaps+"?fieldSelector=data.text=1") // the fake ignores it
	server.put("configmaps/a/two", "2")
	h.body(alice, allMaps)
	server.setDown(true)
	// The newer, wider scope cannot tell what data.text is.
	if got := h.body(alice, allMaps+"?fieldSelector=data.text=1"); got != narrow {
		t.Errorf("list = %s, want %s", got, narrow)
	}
}

func TestWritesAreRecorded(t *testing.T) {
	server := newFakeServer()
	dir := t.TempDir()
	h := startHub(t, dir, server)
	write := func(u user.Info, method, path, body string) {
		t.Helper()
		resp, err := h.send(t.Context(), u, method, path, body)
		if err != nil || resp.StatusCode/100 != 2 {
			t.Fatalf("%s %s: %v, %v", method, path, resp, err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	const maps, leases = "/api/v1/namespaces/a/configmaps", "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
	write(alice, "POST", maps, `{"metadata":{"name":"one"},"data":{"text":"1"}}`)
	write(alice, "POST", maps, `{"metadata":{"name":"two"},"data":{"text":"2"}}`)
	write(alice, "PUT", maps+"/one", `{"metadata":{"name":"one"},"data":{"text":"1b"}}`)
	write(alice, "POST", maps+"?dryRun=All", `{"metadata":{"name":"dry"},"data":{"text":"1"}}`)
	write(alice, "DELETE", maps+"/two", "")
	write(nodeUser, "POST", leases, `{"metadata":{"name":"n1"}}`)
	h.stop()
	server.setDown(true)
	h = startHub(t, dir, server)
	if got := h.body(alice, maps+"/one"); !strings.Contains(got, `"text":"1b"`) {
		t.Errorf("offline get = %s, want the last write", got)
	}
	h.refusedGet(http.StatusServiceUnavailable, alice, maps+"/two")
	h.refusedGet(http.StatusServiceUnavailable, alice, maps+"/dry")
	h.refusedGet(http.StatusServiceUnavailable, bob, maps+"/one")
	if got := h.body(nodeUser, leases+"/n1"); !strings.Contains(got, `"name":"n1"`) {
		t.Errorf("own Lease = %s", got)
	}
	h.refused(http.StatusServiceUnavailable, func() (*http.Response, error) {
		resp, err := h.send(t.Context(), alice, "PUT", maps+"/one", "{}")
		if errors.Is(err, errDown) {
			return nil, apierrors.NewServiceUnavailable("as the proxy says it")
		}
		return resp, err
	})
}

func TestHeartbeatsAreNotWrittenEachTime(t *testing.T) {
	server := newFakeServer()
	h := startHub(t, t.TempDir(), server)
	const leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
	renew := func(method, path string) {
		t.Helper()
		resp, err := h.send(t.Context(), nodeUser, method, path, `{"metadata":{"name":"n1"}}`)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	renew("POST", leases)
	eventually(t, "the new Lease is on disk", func() bool {
		_, due := h.nextFlush()
		return !due && h.journal.Stats().BytesWritten > 0
	})
	for range 5 {
		renew("PUT", leases+"/n1")
	}
	if next, due := h.nextFlush(); !due || time.Until(next) < time.Minute {
		t.Errorf("a renewed Lease is written in %v, want minutes", time.Until(next))
	}
}

func TestDeletionsOfOneListAreToldAgain(t *testing.T) {
	server := newFakeServer()
	for i := range 5 {
		server.put(fmt.Sprintf("configmaps/a/m%d", i), "x") // 101 to 105
	}
	h := startHub(t, t.TempDir(), server)
	w := h.watchAs(nodeUser, allMaps+watchList)
	for range 6 {
		w.next()
	}
	server.setDown(true)
	for i := range 3 {
		server.del(fmt.Sprintf("configmaps/a/m%d", i)) // to 108
	}
	server.forget()
	server.setDown(false)
	w.want("DELETED a/m0=x@108") // and here the connection breaks
	w.close()
	w = h.watchAs(nodeUser, allMaps+"?watch=1&resourceVersion=108")
	w.want("DELETED a/m0=x@108", "DELETED a/m1=x@108", "DELETED a/m2=x@108")
}
