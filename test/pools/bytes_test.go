// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	podsOnNode  = 500
	podsBesides = 40

	kubeletProgram = "kubelet/v1.36.3 (linux/amd64) kubernetes/edgehub-test"
	watchPatience  = 30 * time.Second
)

// A view is what somebody asks for, in a representation, of the server that the hub is
// behind and of the hub.
type view struct {
	name            string
	path, accept    string
	direct, through *rig.Endpoint
}

func (v *view) String() string { return v.name + " in " + v.accept }

// A scene is a hub, what it stands before, and who looks.
type scene struct {
	*rig.Rig
	views []*view
	pods  *population
	whole int // bodies of lists that were compared as a whole
}

// TestPodsAreNeverChanged asks for pods that hostnetworkpool finds much in, directly and
// through a hub that has no configuration, or one that names hostnetworkpropagation.
func TestPodsAreNeverChanged(t *testing.T) {
	t.Parallel()
	cp := controlplane.New(t, controlplane.Config{Users: users})
	r := rig.On(t, cp)
	createNode(r, rig.NodeName, map[string]string{poolLabel: "host", hostNetworkLabel: "true"})
	newNodePools(r).create(r, "v1beta2", map[string]any{"name": "host"}, map[string]any{"type": "Edge", "hostNetwork": true})
	pods := newPopulation(r)

	obsolete := filepath.Join(t.TempDir(), "filters.yaml")
	r.Must(os.WriteFile(obsolete, []byte("apiVersion: edgehub.io/v1alpha1\nkind: EdgehubConfiguration\nfilters:\n- name: hostnetworkpropagation\n"), 0o600))
	newer := &newerServer{}
	for _, tc := range []struct {
		name   string
		server string
		args   []string
		log    string // that the hub writes
		fields string // that all pods have
	}{
		{"default", cp.Addr(), nil, "", ""},
		{"of a later server", newer.start(t, cp, r.Node), nil, "", "newer"},
		{"with hostnetworkpropagation", cp.Addr(), []string{"--filter-config=" + obsolete}, obsolete + `:4: filters[0].name: hostnetworkpropagation does nothing any more`, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := newScene(t, cp, pods, tc.server, tc.args)
			s.online()
			if tc.fields != "" {
				s.wantNewer()
			}
			if tc.log == "" { // the rest is the same
				s.offline()
			}
			log, err := os.ReadFile(s.Hub.Log())
			s.Must(err)
			if !bytes.Contains(log, []byte(tc.log)) {
				t.Errorf("the hub's log lacks %q", tc.log)
			}
			if s.whole == 0 { // of some
				t.Errorf("no list has the same resourceVersion directly and through the hub")
			}
		})
	}
}

func newScene(t *testing.T, cp *controlplane.ControlPlane, pods *population, server string, args []string) *scene {
	t.Helper()
	s := &scene{Rig: rig.On(t, cp), pods: pods}
	var err error
	s.Link, err = link.New(t.Context(), server)
	s.Must(err)
	t.Cleanup(s.Link.Close)
	s.Hub = s.NewHub(args...)
	process.Run(t, s.Hub)
	s.WaitLink(true)
	for _, by := range []struct {
		name, path, program string
		config              *rest.Config
	}{
		{"kubelet's pods", "/api/v1/pods?fieldSelector=spec.nodeName%3D" + rig.NodeName, kubeletProgram, s.Node},
		{"all pods", "/api/v1/pods", "kubectl/v1.36.3", cp.TokenConfig(admin)},
	} {
		direct := rest.CopyConfig(by.config)
		direct.Host, direct.UserAgent = "https://"+server, by.program
		for _, accept := range []string{rig.Protobuf, rig.JSON} {
			s.views = append(s.views, &view{name: by.name, path: by.path, accept: accept, direct: s.Direct(direct), through: s.Through(direct)})
		}
	}
	return s
}

// online compares lists, watches and gets as they come from the API server and from feeds.
func (s *scene) online() {
	s.T.Helper()
	s.compareLists("online", "")
	initial := s.openWatches(rig.WatchList)
	s.compareInitial("online", initial)
	s.WaitFeeds()
	s.wantFindings()

	rv := s.pods.change(s.Rig)
	s.compareChanges("after WatchList", initial)
	s.compareFeeds("from the feed")
	since := s.openWatches("watch=1&allowWatchBookmarks=true&timeoutSeconds=3000&resourceVersion=" + rv)
	s.compareSince(rv, since)
	s.pods.change(s.Rig)
	s.compareChanges("later", initial)
	s.compareChanges("later, since "+rv, since)
	s.compareGets("online")
	s.compareLists("online again", "")
}

// compareFeeds compares lists of any version, which come from feeds after something has
// happened that nobody has been shown yet.
func (s *scene) compareFeeds(when string) {
	s.T.Helper()
	ctx, labels := s.T.Context(), []string{`resource="pods"`, `verb="list"`, `source="feed"`}
	before, err := s.Hub.Metric(ctx, "edgehub_proxy_requests_total", labels...)
	s.Must(err)
	s.compareLists(when, "resourceVersion=0")
	after, err := s.Hub.Metric(ctx, "edgehub_proxy_requests_total", labels...)
	s.Must(err)
	if got := int(after - before); got != len(s.views) {
		s.T.Errorf("%s: %d lists came from a feed, want %d", when, got, len(s.views))
	}
}

// wantNewer checks that the server adds fields everywhere, or there would be no test.
func (s *scene) wantNewer() {
	s.T.Helper()
	for _, v := range s.views {
		_, body, err := v.through.Fetch(s.T.Context(), v.path, v.accept)
		s.Must(err)
		for _, field := range map[string][]string{rig.JSON: {newerTop, newerSpec, newerContainer}, rig.Protobuf: {string(newerFields)}}[v.accept] {
			if n := bytes.Count(body, []byte(field)); n < podsOnNode-50 {
				s.T.Errorf("%v have the fields of a later server %d times, want one for each pod", v, n)
			}
		}
	}
}

// offline compares what the hub says while the link is cut, and after a kill, with what the
// API server says then.
func (s *scene) offline() {
	s.T.Helper()
	s.Settle()
	s.Offline()
	for _, when := range []string{"offline", "offline, after a kill"} {
		s.compareLists(when, "")
		s.compareGets(when)
		s.compareInitial(when, s.openWatches(rig.WatchList))
		if when == "offline" {
			s.Must(s.Hub.Kill())
			s.Must(s.Hub.Start(s.T.Context()))
		}
	}
}

// wantFindings checks that the observer has seen the pods.
func (s *scene) wantFindings() {
	s.T.Helper()
	s.Must(process.Poll(s.T.Context(), "there are findings of all kinds about pods", func(ctx context.Context) error {
		for _, kind := range []string{"NoPodNetwork", "HostPortConflict", "ExcludedPodOnHostNetworkPool"} {
			if n, err := s.Hub.Metric(ctx, "edgehub_nodepool_findings", `kind="`+kind+`"`); err != nil || n < 20 {
				return fmt.Errorf("%v of kind %s, %w", n, kind, err)
			}
		}
		return nil
	}))
}

func (s *scene) compareLists(when, parameters string) {
	s.T.Helper()
	for _, v := range s.views {
		path := v.path
		if parameters != "" {
			path = rig.With(path, parameters)
		}
		wantStatus, want, err := v.direct.Fetch(s.T.Context(), path, v.accept)
		s.Must(err)
		gotStatus, got, err := v.through.Fetch(s.T.Context(), path, v.accept)
		s.Must(err)
		if wantStatus != http.StatusOK || gotStatus != wantStatus {
			s.T.Fatalf("%s: %v = %d, want %d", when, v, gotStatus, wantStatus)
		}
		if bytes.Equal(want, got) {
			s.whole++
			continue
		}
		s.sameItems(fmt.Sprintf("%s: list of %v", when, v), want, got)
	}
}

// listVersion is where a list in JSON says its resourceVersion, before its items.
var listVersion = regexp.MustCompile(`"metadata":\{"resourceVersion":"(\d+)"\},"items":\[`)

// sameItems compares lists that differ: only their resourceVersions may.
func (s *scene) sameItems(what string, want, got []byte) {
	s.T.Helper()
	// It takes seconds to decode so much JSON.
	if w, g := listVersion.FindSubmatchIndex(want[:100]), listVersion.FindSubmatchIndex(got[:100]); w != nil && g != nil {
		if !bytes.Equal(want[w[2]:w[3]], got[g[2]:g[3]]) && bytes.Equal(want[:w[2]], got[:g[2]]) && bytes.Equal(want[w[3]:], got[g[3]:]) {
			return
		}
	}
	wantList, err := rig.ReadList(want)
	s.Must(err)
	gotList, err := rig.ReadList(got)
	s.Must(err)
	if len(wantList.Items) < podsOnNode-50 {
		s.T.Fatalf("%s: the API server has %d pods", what, len(wantList.Items))
	}
	s.same(what, wantList.Items, gotList.Items)
	if wantList.ResourceVersion == gotList.ResourceVersion {
		s.T.Errorf("%s: bodies at resourceVersion %d differ", what, wantList.ResourceVersion)
	}
}

// same compares what must be the same byte for byte, in the same order.
func (s *scene) same(what string, want, got [][]byte) {
	s.T.Helper()
	if len(want) != len(got) {
		s.T.Errorf("%s: %d objects, want %d", what, len(got), len(want))
	}
	bad := 0
	for i := range min(len(want), len(got)) {
		if bytes.Equal(want[i], got[i]) {
			continue
		}
		if bad++; bad > 2 {
			continue
		}
		at := 0
		for at < min(len(want[i]), len(got[i])) && want[i][at] == got[i][at] {
			at++
		}
		around := func(b []byte) []byte { return b[max(0, at-60):min(len(b), at+60)] }
		s.T.Errorf("%s: object %d differs at byte %d:\n got %q\nwant %q", what, i, at, around(got[i]), around(want[i]))
	}
	if bad > 2 {
		s.T.Errorf("%s: %d of %d objects differ", what, bad, len(want))
	}
}

func (s *scene) compareGets(when string) {
	s.T.Helper()
	for _, v := range s.views {
		for _, p := range s.pods.some() {
			path := "/api/v1/namespaces/" + p.Namespace + "/pods/" + p.Name
			status, want, err := v.direct.Fetch(s.T.Context(), path, v.accept)
			s.Must(err)
			gotStatus, got, err := v.through.Fetch(s.T.Context(), path, v.accept)
			s.Must(err)
			if status != http.StatusOK || gotStatus != status {
				s.T.Errorf("%s: GET %s by %v = %d, want %d", when, path, v, gotStatus, status)
				continue
			}
			s.same(fmt.Sprintf("%s: GET %s by %v", when, path, v), [][]byte{want}, [][]byte{got})
		}
	}
}

// A pair is the same watch, directly and through the hub.
type pair struct {
	*view
	direct, through *stream
}

// A stream is the frames of a watch, each as its bytes.
type stream struct {
	*bufio.Reader
	protobuf bool
}

func (s *scene) openWatches(parameters string) (pairs []pair) {
	s.T.Helper()
	for _, v := range s.views {
		pairs = append(pairs, pair{v, s.open(v, v.direct, parameters), s.open(v, v.through, parameters)})
	}
	return pairs
}

func (s *scene) open(v *view, e *rig.Endpoint, parameters string) *stream {
	s.T.Helper()
	resp, err := e.Get(s.T.Context(), rig.With(v.path, parameters), v.accept)
	s.Must(err)
	s.T.Cleanup(func() { resp.Body.Close() })
	if resp.StatusCode != http.StatusOK {
		s.T.Fatalf("watch of %v: %s", v, resp.Status)
	}
	return &stream{bufio.NewReader(resp.Body), v.accept == rig.Protobuf}
}

// until reads up to the frame that is the last one, without bookmarks.
func (s *stream) until(last func(frame []byte) bool) (frames [][]byte, err error) {
	for {
		frame, err := readFrame(s.Reader, s.protobuf)
		if err != nil {
			return frames, err
		}
		if !isBookmark(frame) {
			frames = append(frames, frame)
		}
		if last(frame) {
			return frames, nil
		}
	}
}

// isBookmark looks at the type, with which a frame begins.
func isBookmark(frame []byte) bool {
	return bytes.Contains(frame[:min(len(frame), 24)], []byte("BOOKMARK"))
}

// compareInitial reads what WatchLists begin with, which comes in no order.
func (s *scene) compareInitial(when string, pairs []pair) {
	s.T.Helper()
	s.compareWatches(when+": initial events", pairs, func(frame []byte) bool {
		return isBookmark(frame) && bytes.Contains(frame, []byte("k8s.io/initial-events-end"))
	}, true)
}

// compareChanges reads on to the last change that there was.
func (s *scene) compareChanges(when string, pairs []pair) {
	s.T.Helper()
	marker := []byte(s.pods.marker)
	s.compareWatches(when+": changes", pairs, func(frame []byte) bool { return bytes.Contains(frame, marker) }, false)
}

func (s *scene) compareWatches(what string, pairs []pair, last func(frame []byte) bool, unordered bool) {
	s.T.Helper()
	for _, p := range pairs {
		want, got := s.read(what, p, last)
		if len(want) < 10 {
			s.T.Errorf("%s of %v: %d frames", what, p.view, len(want))
		}
		if unordered {
			slices.SortFunc(want, bytes.Compare)
			slices.SortFunc(got, bytes.Compare)
		}
		s.same(fmt.Sprintf("%s of %v", what, p.view), want, got)
	}
}

// compareSince reads what has changed since a version. Of an object that has changed more
// than once the hub may leave out what was in between, and all of one that came and went; an
// object that it sends is the API server's at that version.
func (s *scene) compareSince(rv string, pairs []pair) {
	s.T.Helper()
	marker := []byte(s.pods.marker)
	for _, p := range pairs {
		what := fmt.Sprintf("changes of %v since %s", p.view, rv)
		want, got := s.read(what, p, func(frame []byte) bool { return bytes.Contains(frame, marker) })
		versions, last := map[string][]byte{}, map[string]string{}
		for _, e := range s.events(p, want) {
			version := fmt.Sprintf("%s at %d, deleted: %v", e.Meta.Key, e.Meta.ResourceVersion, e.Type == "DELETED")
			versions[version], last[e.Meta.Key] = e.Item, version
		}
		left := maps.Clone(last)
		for _, e := range s.events(p, got) {
			version := fmt.Sprintf("%s at %d, deleted: %v", e.Meta.Key, e.Meta.ResourceVersion, e.Type == "DELETED")
			if item, ok := versions[version]; !ok {
				s.T.Errorf("%s: the API server has not sent %s", what, version)
			} else {
				s.same(what+": "+version, [][]byte{item}, [][]byte{e.Item})
			}
			if left[e.Meta.Key] == version {
				delete(left, e.Meta.Key)
			}
		}
		for _, version := range left {
			if !strings.HasSuffix(version, "true") { // it may have come since
				s.T.Errorf("%s: %s is missing", what, version)
			}
		}
	}
}

func (s *scene) events(p pair, frames [][]byte) (events []rig.Event) {
	s.T.Helper()
	for _, f := range frames {
		e, err := rig.Frames(bytes.NewReader(f), p.accept)()
		s.Must(err)
		events = append(events, e)
	}
	return events
}

// read reads both watches up to the same frame.
func (s *scene) read(what string, p pair, last func(frame []byte) bool) (want, got [][]byte) {
	s.T.Helper()
	return s.readOne(what+", directly", p.direct, last), s.readOne(what+", through the hub", p.through, last)
}

func (s *scene) readOne(what string, from *stream, last func(frame []byte) bool) (frames [][]byte) {
	s.T.Helper()
	done := make(chan error, 1)
	go func() {
		var err error
		frames, err = from.until(last)
		done <- err
	}()
	select {
	case err := <-done:
		s.Must(err)
	case <-time.After(watchPatience):
		s.T.Fatalf("%s: the last frame did not come", what)
	}
	return frames
}
