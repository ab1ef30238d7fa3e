// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

var (
	errDown = errors.New("link down")
	self    = &user.DefaultInfo{Name: "system:node:n1", Groups: []string{user.NodesGroup, user.AllAuthenticated}}
	alice   = &user.DefaultInfo{Name: "alice", Groups: []string{user.AllAuthenticated}}
)

// memory is Responses in memory.
type memory struct {
	kept   map[string]Response
	writes int
}

func (m *memory) id(u user.Info, class, key string) string {
	return fmt.Sprintf("%q %q %q", u.GetName(), class, key)
}

func (m *memory) PutResponse(u user.Info, class, key string, r Response) {
	m.writes++
	m.kept[m.id(u, class, key)] = r
}

func (m *memory) Response(u user.Info, class, key string) (Response, bool) {
	r, ok := m.kept[m.id(u, class, key)]
	return r, ok
}

// world is a Contract over a cache and an API server that do as they are told.
type world struct {
	*Contract
	t       *testing.T
	down    bool
	records map[string]string                           // JSON by path: what the cache replays while the link is down
	server  func(*http.Request) (*http.Response, error) // the API server
	seen    []string                                    // what the API server was asked
	memory  *memory
	reg     *prometheus.Registry
	clock   time.Time
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, records: map[string]string{}, memory: &memory{kept: map[string]Response{}},
		reg: prometheus.NewPedanticRegistry(), clock: time.Unix(1_900_000_000, 0)}
	c, err := New(Config{Next: w, Unavailable: func(err error) bool { return errors.Is(err, errDown) }, Responses: w.memory,
		Node: func() user.Info { return self }, Registerer: w.reg})
	if err != nil {
		t.Fatal(err)
	}
	c.now = func() time.Time { return w.clock }
	w.Contract = c
	return w
}

func (w *world) RoundTrip(req *http.Request) (*http.Response, error) {
	if !w.down {
		w.seen = append(w.seen, req.Method+" "+req.URL.Path)
		return w.server(req)
	}
	info, ok := request.RequestInfoFrom(req.Context())
	if _, known := request.UserFrom(req.Context()); !ok || !known || info.Path != req.URL.Path {
		w.t.Errorf("request to %s carries RequestInfo %v", req.URL.Path, info)
	}
	if req.Method != http.MethodGet {
		return nil, fmt.Errorf("dial: %w", errDown)
	}
	record, ok := w.records[req.URL.Path]
	if !ok {
		return nil, apierrors.NewServiceUnavailable("not recorded")
	}
	resp := jsonReply(http.StatusOK, record)
	resp.Header.Set(sourceHeader, sourceReplay)
	return resp, nil
}

func jsonReply(code int, body string) *http.Response {
	return &http.Response{StatusCode: code, Header: http.Header{"Content-Type": {mediaJSON}}, Body: io.NopCloser(strings.NewReader(body))}
}

type ask struct {
	user                       user.Info
	method, target, body       string
	contentType, accept, agent string
}

func (w *world) do(a ask) (*http.Response, string, error) {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), a.method, a.target, strings.NewReader(a.body))
	if err != nil {
		w.t.Fatal(err)
	}
	for name, v := range map[string]string{"Content-Type": a.contentType, "Accept": a.accept, "User-Agent": a.agent} {
		if v != "" {
			req.Header.Set(name, v)
		}
	}
	f := &request.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")}
	info, err := f.NewRequestInfo(req)
	if err != nil {
		w.t.Fatal(err)
	}
	if a.user == nil {
		a.user = self
	}
	req = req.WithContext(request.WithUser(request.WithRequestInfo(req.Context(), info), a.user))
	resp, err := w.Contract.RoundTrip(req)
	if err != nil {
		return nil, "", err
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return resp, string(body), nil
}

// outcome is the status code, or what the error means to the client.
func outcome(resp *http.Response, err error) int {
	var status apierrors.APIStatus
	switch {
	case err == nil:
		return resp.StatusCode
	case errors.As(err, &status):
		return int(status.Status().Code)
	case errors.Is(err, errDown):
		return http.StatusServiceUnavailable
	}
	return 0
}

const (
	nodePath    = "/api/v1/nodes/n1"
	csiNodePath = "/apis/storage.k8s.io/v1/csinodes/n1"
	ownLease    = leasePath + "n1"
	recNode     = `{"kind":"Node","apiVersion":"v1","metadata":{"name":"n1","uid":"u1","resourceVersion":"7"},"spec":{"podCIDR":"10.0.0.0/24"},` +
		`"status":{"newerField":{"a":1},"volumesInUse":["v1"],"conditions":[{"type":"Ready","status":"True"},{"type":"DiskPressure","status":"False"}]}}`
)

func protobufOf(t *testing.T, kind schema.GroupVersionKind, m message) string {
	t.Helper()
	b, err := encodeProtobuf(kind, m)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// The table of docs/offline.md, row by row: what a write or a question meets while
// the link is down.
func TestOffline(t *testing.T) {
	lease := `{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"n1","namespace":"kube-node-lease","resourceVersion":"5"},"spec":{"holderIdentity":"n1"}}`
	csiNode := `{"kind":"CSINode","apiVersion":"storage.k8s.io/v1","metadata":{"name":"n1"}}`
	all := map[string]string{nodePath: recNode, ownLease: lease, csiNodePath: csiNode}
	pbNode := protobufOf(t, nodeKind, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}})
	const strategic, merge = "application/strategic-merge-patch+json", "application/merge-patch+json"
	for _, tc := range []struct {
		name    string
		ask     ask
		records map[string]string
		code    int
	}{
		{"own Node create, recorded", ask{method: "POST", target: "/api/v1/nodes", body: recNode}, all, 409},
		{"own Node create, protobuf", ask{method: "POST", target: "/api/v1/nodes", body: pbNode, contentType: mediaProtobuf}, all, 409},
		{"own Node create, not recorded", ask{method: "POST", target: "/api/v1/nodes", body: recNode}, nil, 503},
		{"another Node create", ask{method: "POST", target: "/api/v1/nodes", body: strings.ReplaceAll(recNode, "n1", "n2")}, all, 503},
		{"own Node create by another", ask{user: alice, method: "POST", target: "/api/v1/nodes", body: recNode}, all, 503},
		{"own Node create, no Node", ask{method: "POST", target: "/api/v1/nodes", body: csiNode}, all, 503},
		{"own Node create, garbage", ask{method: "POST", target: "/api/v1/nodes", body: "{"}, all, 503},
		{"own Node create, dry run", ask{method: "POST", target: "/api/v1/nodes?dryRun=All", body: recNode}, all, 503},
		{"own Node status patch", ask{method: "PATCH", target: nodePath + "/status", contentType: strategic, body: `{"status":{"phase":"x"}}`}, all, 200},
		{"own Node status merge patch", ask{method: "PATCH", target: nodePath + "/status", contentType: merge, body: `{"status":{"phase":"x"}}`}, all, 200},
		{"own Node status apply patch", ask{method: "PATCH", target: nodePath + "/status", contentType: "application/apply-patch+yaml", body: `{}`}, all, 503},
		{"own Node status patch, not recorded", ask{method: "PATCH", target: nodePath + "/status", contentType: strategic, body: `{}`}, nil, 503},
		{"own Node status patch, garbage", ask{method: "PATCH", target: nodePath + "/status", contentType: strategic, body: `{"status":`}, all, 400},
		{"own Node status patch, wrong type", ask{method: "PATCH", target: nodePath + "/status", contentType: merge, body: `{"status":{"conditions":7}}`}, all, 400},
		{"own Node status patch, no object", ask{method: "PATCH", target: nodePath + "/status", contentType: merge, body: `[1]`}, all, 400},
		{"own Node status patch, no metadata", ask{method: "PATCH", target: nodePath + "/status", contentType: merge, body: `{"metadata":null}`}, all, 400},
		{"own Node status patch for another uid", ask{method: "PATCH", target: nodePath + "/status", contentType: merge, body: `{"metadata":{"uid":"u2"}}`}, all, 409},
		{"own Node status patch of another version", ask{method: "PATCH", target: nodePath + "/status", contentType: merge, body: `{"metadata":{"resourceVersion":"6"}}`}, all, 409},
		{"own Node patch of the rest", ask{method: "PATCH", target: nodePath, contentType: strategic, body: `{"metadata":{"labels":{"a":"b"}}}`}, all, 503},
		{"own Node status update", ask{method: "PUT", target: nodePath + "/status", body: recNode}, all, 503},
		{"own Node delete", ask{method: "DELETE", target: nodePath}, all, 503},
		{"another Node status patch", ask{method: "PATCH", target: "/api/v1/nodes/n2/status", contentType: strategic, body: `{}`}, all, 503},
		{"own Node status patch by another", ask{user: alice, method: "PATCH", target: nodePath + "/status", contentType: strategic, body: `{}`}, all, 503},
		{"own Lease get", ask{method: "GET", target: ownLease}, all, 200},
		{"own Lease get, not recorded", ask{method: "GET", target: ownLease}, nil, 503},
		{"own Lease update", ask{method: "PUT", target: ownLease, body: lease}, nil, 200},
		{"own Lease update, another name in it", ask{method: "PUT", target: ownLease, body: strings.ReplaceAll(lease, `"n1","names`, `"n2","names`)}, all, 503},
		{"own Lease update, no Lease", ask{method: "PUT", target: ownLease, body: recNode}, all, 503},
		{"own Lease create, recorded", ask{method: "POST", target: strings.TrimSuffix(leasePath, "/"), body: lease}, all, 409},
		{"own Lease create, not recorded", ask{method: "POST", target: strings.TrimSuffix(leasePath, "/"), body: lease}, nil, 503},
		{"another Lease update", ask{method: "PUT", target: "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/n1", body: lease}, all, 503},
		{"own Lease update by another", ask{user: alice, method: "PUT", target: ownLease, body: lease}, all, 503},
		{"own Lease delete", ask{method: "DELETE", target: ownLease}, all, 503},
		{"own CSINode get", ask{method: "GET", target: csiNodePath}, all, 200},
		{"own CSINode get, not recorded", ask{method: "GET", target: csiNodePath}, nil, 503},
		{"own CSINode create, recorded", ask{method: "POST", target: "/apis/storage.k8s.io/v1/csinodes", body: csiNode}, all, 409},
		{"own CSINode create, not recorded", ask{method: "POST", target: "/apis/storage.k8s.io/v1/csinodes", body: csiNode}, nil, 503},
		{"own CSINode update", ask{method: "PUT", target: csiNodePath, body: csiNode}, all, 503},
		{"own Event create", ask{method: "POST", target: "/api/v1/namespaces/a/events", body: `{}`}, all, 503},
		{"own Event patch", ask{method: "PATCH", target: "/api/v1/namespaces/a/events/e", body: `{}`}, all, 404},
		{"own Event patch, new group", ask{method: "PATCH", target: "/apis/events.k8s.io/v1/namespaces/a/events/e", body: `{}`}, all, 404},
		{"another's Event patch", ask{user: alice, method: "PATCH", target: "/api/v1/namespaces/a/events/e", body: `{}`}, all, 503},
		{"pod create", ask{method: "POST", target: "/api/v1/namespaces/a/pods", body: `{}`}, all, 503},
		{"pod status patch", ask{method: "PATCH", target: "/api/v1/namespaces/a/pods/b/status", contentType: strategic, body: `{}`}, all, 503},
		{"pod delete", ask{method: "DELETE", target: "/api/v1/namespaces/a/pods/b"}, all, 503},
		{"TokenRequest, not recorded", ask{method: "POST", target: "/api/v1/namespaces/a/serviceaccounts/b/token", body: `{}`}, all, 503},
		{"TokenReview, not recorded", ask{method: "POST", target: "/apis/authentication.k8s.io/v1/tokenreviews", body: `{"spec":{"token":"t"}}`}, all, 503},
		{"SubjectAccessReview, not recorded", ask{method: "POST", target: "/apis/authorization.k8s.io/v1/subjectaccessreviews", body: `{}`}, all, 503},
		{"SelfSubjectAccessReview", ask{user: alice, method: "POST", target: "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body: `{}`}, all, 503},
		{"SelfSubjectReview", ask{user: alice, method: "POST", target: "/apis/authentication.k8s.io/v1/selfsubjectreviews", body: `{}`}, all, 503},
		{"a body larger than any object", ask{method: "POST", target: "/api/v1/nodes", body: strings.Repeat("x", maxObjectBytes+1)}, all, 503},
	} {
		t.Run(tc.name, func(t *testing.T) {
			w := newWorld(t)
			w.down, w.records = true, tc.records
			resp, _, err := w.do(tc.ask)
			if got := outcome(resp, err); got != tc.code {
				t.Errorf("%s %s = %d (%v), want %d", tc.ask.method, tc.ask.target, got, err, tc.code)
			}
		})
	}
}

// While the link is up every request reaches the API server with its body whole,
// and its answer the client.
func TestOnlinePassesEverything(t *testing.T) {
	for _, target := range []string{
		"POST /api/v1/nodes", "PATCH " + nodePath + "/status", "GET " + nodePath, "PUT " + ownLease, "GET " + ownLease, "GET " + csiNodePath,
		"POST /apis/storage.k8s.io/v1/csinodes", "PATCH /api/v1/namespaces/a/events/e", "POST /api/v1/namespaces/a/serviceaccounts/b/token",
		"POST /apis/authentication.k8s.io/v1/tokenreviews", "POST /apis/authorization.k8s.io/v1/subjectaccessreviews", "POST /api/v1/namespaces/a/pods",
	} {
		for _, body := range []string{`{"spec":{"token":"t"}}`, "not JSON", strings.Repeat("y", maxObjectBytes+1)} {
			codes := []int{200, 201, 403, 404, 409, 500}
			if len(body) > maxObjectBytes {
				codes = codes[:1]
			}
			for _, code := range codes {
				w := newWorld(t)
				w.server = func(req *http.Request) (*http.Response, error) {
					got, err := io.ReadAll(req.Body)
					if err != nil || string(got) != body { // the whole of it
						t.Errorf("%s: the API server got %d bytes, %v, want %d", target, len(got), err, len(body))
					}
					return jsonReply(code, "answer"), nil
				}
				method, path, _ := strings.Cut(target, " ")
				resp, got, err := w.do(ask{method: method, target: path, body: body})
				if err != nil || resp.StatusCode != code || got != "answer" {
					t.Errorf("%s = %v %q, %v, want %d answer", target, resp, got, err, code)
				}
				if len(w.memory.kept) > 0 {
					t.Errorf("%s %d: %d answers recorded, want none", target, code, len(w.memory.kept))
				}
			}
		}
	}
}

func TestNodeOverlay(t *testing.T) {
	w := newWorld(t)
	w.down, w.records[nodePath] = true, recNode
	const strategic = "application/strategic-merge-patch+json"
	patch := func(body string, accept string) (*http.Response, string) {
		t.Helper()
		resp, got, err := w.do(ask{method: "PATCH", target: nodePath + "/status", contentType: strategic, body: body, accept: accept})
		if err != nil {
			t.Fatal(err)
		}
		return resp, got
	}
	node := func(contentType, body string) *corev1.Node {
		t.Helper()
		var n corev1.Node
		if err := decode(contentType, []byte(body), nodeKind, &n); err != nil {
			t.Fatal(err)
		}
		return &n
	}
	conditions := func(n *corev1.Node) (s []string) {
		for _, c := range n.Status.Conditions {
			s = append(s, string(c.Type)+"="+string(c.Status))
		}
		return s
	}

	// Merged by key, spec and identity untouched, unknown fields kept.
	resp, body := patch(`{"metadata":{"annotations":{"a":"b"},"name":"n1"},"spec":{"podCIDR":"1.1.1.1/8"},"status":{"conditions":[{"type":"DiskPressure","status":"True"}],"volumesInUse":["v1","v2"]}}`, "")
	n := node(mediaJSON, body)
	if diff := cmp.Diff([]string{"Ready=True", "DiskPressure=True"}, conditions(n)); diff != "" {
		t.Errorf("conditions (-want +got):\n%s", diff)
	}
	if n.ResourceVersion != "7" || n.UID != "u1" || n.Spec.PodCIDR != "10.0.0.0/24" || n.Annotations["a"] != "b" || len(n.Status.VolumesInUse) != 2 {
		t.Errorf("patched Node = %s", body)
	}
	if !strings.Contains(body, `"newerField":{"a":1}`) {
		t.Errorf("patched Node lost a field that this binary does not know: %s", body)
	}
	if got := resp.Header.Values("Warning"); len(got) != 1 || !strings.HasPrefix(got[0], "110 ") {
		t.Errorf("Warning = %q, want one with code 110", got)
	}

	// The next patch stands on the first; protobuf on demand.
	resp, body = patch(`{"status":{"conditions":[{"type":"Ready","status":"False"}]}}`, mediaProtobuf+", "+mediaJSON)
	if ct := resp.Header.Get("Content-Type"); ct != mediaProtobuf {
		t.Errorf("Content-Type = %q, want protobuf", ct)
	}
	want := []string{"Ready=False", "DiskPressure=True"}
	if diff := cmp.Diff(want, conditions(node(mediaProtobuf, body))); diff != "" {
		t.Errorf("conditions (-want +got):\n%s", diff)
	}

	// GET shows it, to the node only, in the form asked for.
	for _, accept := range []string{"", mediaJSON, mediaProtobuf, "application/yaml, */*;q=0.1"} {
		resp, body, err := w.do(ask{method: "GET", target: nodePath, accept: accept})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, conditions(node(resp.Header.Get("Content-Type"), body))); diff != "" {
			t.Errorf("GET, Accept %q (-want +got):\n%s", accept, diff)
		}
	}
	for _, a := range []ask{{user: alice}, {accept: "application/json;as=Table;v=v1;g=meta.k8s.io"}} {
		a.method, a.target = "GET", nodePath
		if _, body, err := w.do(a); err != nil || body != recNode {
			t.Errorf("GET by %v, Accept %q = %s, %v, want the record", a.user, a.accept, body, err)
		}
	}
	// People see the warning.
	resp, _, _ = w.do(ask{method: "GET", target: nodePath, agent: "kubectl/v1.36"})
	if got := resp.Header.Values("Warning"); len(got) != 2 || !strings.HasPrefix(got[1], "299 ") {
		t.Errorf("Warning for kubectl = %q, want a second one with code 299", got)
	}

	// A newer record ends it.
	w.records[nodePath] = strings.Replace(recNode, `"7"`, `"8"`, 1)
	if _, body, _ := w.do(ask{method: "GET", target: nodePath}); body != w.records[nodePath] {
		t.Errorf("GET after a newer record = %s, want the record", body)
	}
	// So does the API server's word.
	for _, online := range []ask{{method: "GET", target: nodePath}, {method: "PATCH", target: nodePath + "/status", contentType: strategic, body: "{}"}} {
		patch(`{"status":{"phase":"Pending"}}`, "")
		w.down, w.server = false, func(*http.Request) (*http.Response, error) { return jsonReply(200, recNode), nil }
		w.do(online)
		w.down = true
		if _, body, _ := w.do(ask{method: "GET", target: nodePath}); body != w.records[nodePath] {
			t.Errorf("GET after %s online = %s, want the record", online.method, body)
		}
	}
	for _, s := range w.seen {
		if s != "GET "+nodePath && s != "PATCH "+nodePath+"/status" {
			t.Errorf("the API server was asked %s", s)
		}
	}
}

func TestOverlayIsBounded(t *testing.T) {
	w := newWorld(t)
	w.down, w.records[nodePath] = true, recNode
	w.maxNodeBytes = 2000
	for i, want := range []int{200, 413, 413} {
		body := fmt.Sprintf(`{"metadata":{"annotations":{"a%d":%q}}}`, i, strings.Repeat("x", 1000))
		resp, _, err := w.do(ask{method: "PATCH", target: nodePath + "/status", contentType: "application/merge-patch+json", body: body})
		if code := outcome(resp, err); code != want {
			t.Errorf("patch %d = %d (%v), want %d", i, code, err, want)
		}
	}
}

func TestLeaseCopy(t *testing.T) {
	w := newWorld(t)
	lease := func(holder string) *coordinationv1.Lease {
		return &coordinationv1.Lease{TypeMeta: metav1.TypeMeta{Kind: "Lease", APIVersion: "coordination.k8s.io/v1"},
			ObjectMeta: metav1.ObjectMeta{Name: "n1", Namespace: leaseNamespace, ResourceVersion: "5"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder}}
	}
	asJSON := func(l *coordinationv1.Lease) string { b, _ := json.Marshal(l); return string(b) }
	w.down, w.records[ownLease] = true, asJSON(lease("recorded"))
	asProtobuf := protobufOf(t, leaseKind, lease("pb"))
	resp, body, err := w.do(ask{method: "PUT", target: ownLease, body: asProtobuf, contentType: mediaProtobuf, accept: mediaProtobuf + "," + mediaJSON})
	if err != nil || body != asProtobuf || resp.Header.Get("Content-Type") != mediaProtobuf || len(resp.Header.Values("Warning")) != 1 {
		t.Errorf("PUT = %v %q, %v, want its own body and a warning", resp, body, err)
	}
	holder := func(accept string) string {
		t.Helper()
		resp, body, err := w.do(ask{method: "GET", target: ownLease, accept: accept})
		if err != nil {
			t.Fatal(err)
		}
		var l coordinationv1.Lease
		if err := decode(resp.Header.Get("Content-Type"), []byte(body), leaseKind, &l); err != nil || l.ResourceVersion != "5" {
			t.Fatalf("GET = %q, %v", body, err)
		}
		return *l.Spec.HolderIdentity
	}
	for _, accept := range []string{"", mediaJSON, mediaProtobuf} {
		if got := holder(accept); got != "pb" {
			t.Errorf("GET, Accept %q: holder %q, want pb", accept, got)
		}
	}
	// A copy answers where nothing is recorded, too.
	delete(w.records, ownLease)
	if got := holder(""); got != "pb" {
		t.Errorf("GET without a record: holder %q, want pb", got)
	}
	w.records[ownLease] = asJSON(lease("recorded"))
	// Once the API server answers, the copy is gone.
	w.down, w.server = false, func(*http.Request) (*http.Response, error) { return jsonReply(200, asJSON(lease("server"))), nil }
	updates := func() float64 { return testutil.ToFloat64(w.metrics.leases) }
	if got := updates(); got != 0 {
		t.Errorf("%v updates that the API server has accepted, want 0 while it is away", got)
	}
	w.do(ask{method: "PUT", target: ownLease, body: asJSON(lease("server"))})
	w.do(ask{user: alice, method: "PUT", target: ownLease, body: asJSON(lease("server"))})
	if got := updates(); got != 1 {
		t.Errorf("%v updates that the API server has accepted, want 1: the node's own Lease, by the node", got)
	}
	w.down = true
	if got := holder(""); got != "recorded" {
		t.Errorf("GET after an update online: holder %q, want recorded", got)
	}
	for _, s := range w.seen {
		if s != "PUT "+ownLease {
			t.Errorf("the API server was asked %s: something was replayed", s)
		}
	}
}

// kubelet exits when it cannot create a CSINode that a 404 told it to create.
func TestCSINodeIsNever404Offline(t *testing.T) {
	notFound := apierrors.NewNotFound(schema.GroupResource{Group: "storage.k8s.io", Resource: "csinodes"}, "n1")
	for _, tc := range []struct {
		name   string
		source string
		err    error
		code   int
	}{
		{"the API server's", "upstream", nil, 404}, {"a record's", sourceReplay, nil, 503}, {"a record's, as an error", "", notFound, 503},
	} {
		w := newWorld(t)
		w.server = func(*http.Request) (*http.Response, error) {
			resp := jsonReply(404, "{}")
			resp.Header.Set(sourceHeader, tc.source)
			return resp, tc.err
		}
		if resp, _, err := w.do(ask{method: "GET", target: csiNodePath}); outcome(resp, err) != tc.code {
			t.Errorf("%s 404 = %d, want %d", tc.name, outcome(resp, err), tc.code)
		}
	}
}

func jwt(exp time.Time) string {
	return "e30." + base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"exp":%d}`, exp.Unix())) + ".sig"
}

const tokenPath = "/api/v1/namespaces/a/serviceaccounts/b/token"

func TestTokenRequest(t *testing.T) {
	w := newWorld(t)
	expiry := w.clock.Add(365 * 24 * time.Hour)
	w.server = func(req *http.Request) (*http.Response, error) {
		resp := jsonReply(http.StatusCreated, "")
		tr := &authenticationv1.TokenRequest{TypeMeta: metav1.TypeMeta{Kind: "TokenRequest", APIVersion: "authentication.k8s.io/v1"},
			Status: authenticationv1.TokenRequestStatus{Token: jwt(expiry)}}
		body, _ := json.Marshal(tr)
		if req.Header.Get("Accept") == mediaProtobuf {
			resp.Header.Set("Content-Type", mediaProtobuf)
			body = []byte(protobufOf(t, tokenRequestKind, tr))
		}
		resp.Body = io.NopCloser(bytes.NewReader(body))
		return resp, nil
	}
	question := func(aud []string, exp int64, uid string) *authenticationv1.TokenRequest {
		return &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{Audiences: aud, ExpirationSeconds: &exp,
			BoundObjectRef: &authenticationv1.BoundObjectReference{Kind: "Pod", APIVersion: "v1", Name: "p", UID: "uid-" + "1"}}}
	}
	q := question([]string{"x", "y"}, 3607, "1")
	protobufAsk := ask{method: "POST", target: tokenPath, body: protobufOf(t, tokenRequestKind, q), contentType: mediaProtobuf, accept: mediaProtobuf}
	jsonBody, _ := json.Marshal(q)
	jsonAsk := ask{method: "POST", target: tokenPath, body: string(jsonBody), contentType: mediaJSON, accept: mediaJSON}
	online := map[string]string{}
	for name, a := range map[string]ask{"protobuf": protobufAsk, "JSON": jsonAsk} {
		resp, body, err := w.do(a)
		if err != nil || resp.StatusCode != 201 {
			t.Fatalf("%s online = %v, %v", name, resp, err)
		}
		online[name] = body
	}
	w.down = true
	for name, a := range map[string]ask{"protobuf": protobufAsk, "JSON": jsonAsk} {
		resp, body, err := w.do(a)
		if err != nil || resp.StatusCode != 201 || body != online[name] || resp.Header.Get(sourceHeader) != sourceReplay {
			t.Errorf("%s offline = %v %q, %v, want what was said online", name, resp, body, err)
		}
	}
	// Audiences in another order are the same question; everything else is another.
	variant := func(change func(*authenticationv1.TokenRequest)) string {
		v := q.DeepCopy()
		change(v)
		b, _ := json.Marshal(v)
		return string(b)
	}
	for _, tc := range []struct {
		name string
		ask  ask
		code int
	}{
		{"audiences in another order", ask{body: variant(func(v *authenticationv1.TokenRequest) { v.Spec.Audiences = []string{"y", "x"} })}, 201},
		{"another audience", ask{body: variant(func(v *authenticationv1.TokenRequest) { v.Spec.Audiences = []string{"x"} })}, 503},
		{"another life", ask{body: variant(func(v *authenticationv1.TokenRequest) { *v.Spec.ExpirationSeconds = 600 })}, 503},
		{"another pod", ask{body: variant(func(v *authenticationv1.TokenRequest) { v.Spec.BoundObjectRef.UID = "uid-2" })}, 503},
		{"no pod", ask{body: variant(func(v *authenticationv1.TokenRequest) { v.Spec.BoundObjectRef = nil })}, 503},
		{"another caller", ask{user: alice, body: string(jsonBody)}, 503},
		{"another service account", ask{target: "/api/v1/namespaces/a/serviceaccounts/c/token", body: string(jsonBody)}, 503},
		{"another namespace", ask{target: "/api/v1/namespaces/c/serviceaccounts/b/token", body: string(jsonBody)}, 503},
		{"dry run", ask{target: tokenPath + "?dryRun=All", body: string(jsonBody)}, 503},
		{"a table", ask{body: string(jsonBody), accept: "application/json;as=Table;v=v1;g=meta.k8s.io"}, 503},
	} {
		tc.ask.method = "POST"
		if tc.ask.target == "" {
			tc.ask.target = tokenPath
		}
		if resp, _, err := w.do(tc.ask); outcome(resp, err) != tc.code {
			t.Errorf("%s = %d, want %d", tc.name, outcome(resp, err), tc.code)
		}
	}
	// Expired: replayed all the same, and counted.
	w.clock = expiry.Add(time.Hour)
	if resp, _, err := w.do(jsonAsk); outcome(resp, err) != 201 {
		t.Errorf("expired token = %d, want 201", outcome(resp, err))
	}
	if got := testutil.ToFloat64(w.metrics.expired); got != 1 {
		t.Errorf("expired tokens replayed = %v, want 1", got)
	}
	// The API server's no ends it.
	w.down, w.server = false, func(*http.Request) (*http.Response, error) { return jsonReply(404, "{}"), nil }
	w.do(jsonAsk)
	w.down = true
	for _, a := range []ask{jsonAsk, protobufAsk} {
		if resp, _, err := w.do(a); outcome(resp, err) != 503 {
			t.Errorf("token after a 404 = %d, want 503", outcome(resp, err))
		}
	}
}

// kubelet asks every 48 minutes for a token that is good for a year: that must not
// be a write each time.
func TestTokenIsNotRewrittenWhileItIsGood(t *testing.T) {
	for _, tc := range []struct {
		name   string
		life   time.Duration
		writes int // in two days
	}{{"extended", 365 * 24 * time.Hour, 2}, {"an hour", time.Hour, 60}} {
		w := newWorld(t)
		w.server = func(*http.Request) (*http.Response, error) {
			return jsonReply(201, `{"kind":"TokenRequest","apiVersion":"authentication.k8s.io/v1","status":{"token":"`+jwt(w.clock.Add(tc.life))+`"}}`), nil
		}
		for range 60 {
			w.do(ask{method: "POST", target: tokenPath, body: `{"spec":{}}`})
			w.clock = w.clock.Add(48 * time.Minute)
		}
		if w.memory.writes != tc.writes {
			t.Errorf("%s: %d writes in two days, want %d", tc.name, w.memory.writes, tc.writes)
		}
	}
}

func TestVerdicts(t *testing.T) {
	const reviews, access = "/apis/authentication.k8s.io/v1/tokenreviews", "/apis/authorization.k8s.io/v1/subjectaccessreviews"
	yes := map[string]string{
		reviews: `{"kind":"TokenReview","apiVersion":"authentication.k8s.io/v1","spec":{"token":"t"},"status":{"authenticated":true,"user":{"username":"prometheus"}}}`,
		access:  `{"kind":"SubjectAccessReview","apiVersion":"authorization.k8s.io/v1","status":{"allowed":true}}`,
	}
	no := map[string]string{
		reviews: `{"kind":"TokenReview","apiVersion":"authentication.k8s.io/v1","spec":{"token":"t"},"status":{"error":"unknown"}}`,
		access:  `{"kind":"SubjectAccessReview","apiVersion":"authorization.k8s.io/v1","status":{"allowed":false}}`,
	}
	body := map[string]string{reviews: `{"spec":{"token":"t"}}`, access: `{"spec":{"user":"prometheus","nonResourceAttributes":{"path":"/metrics","verb":"get"}}}`}
	for _, path := range []string{reviews, access} {
		t.Run(path, func(t *testing.T) {
			w := newWorld(t)
			a := ask{method: "POST", target: path, body: body[path]}
			say := func(verdict map[string]string) {
				w.down, w.server = false, func(*http.Request) (*http.Response, error) { return jsonReply(201, verdict[path]), nil }
				if _, got, err := w.do(a); err != nil || got != verdict[path] {
					t.Errorf("online = %q, %v", got, err)
				}
				w.down = true
			}
			offline := func(a ask) int { resp, _, err := w.do(a); return outcome(resp, err) }
			say(no)
			if w.memory.writes != 0 {
				t.Error("a no was recorded")
			}
			say(yes)
			if got := offline(a); got != 201 {
				t.Errorf("a yes offline = %d, want 201", got)
			}
			other := a
			other.body = strings.Replace(strings.Replace(a.body, `"t"`, `"u"`, 1), "/metrics", "/exec", 1)
			if got := offline(other); got != 503 {
				t.Errorf("another question offline = %d, want 503", got)
			}
			other = a
			other.user = alice
			if got := offline(other); got != 503 {
				t.Errorf("the same question by another offline = %d, want 503", got)
			}
			say(yes)
			if w.memory.writes != 1 {
				t.Errorf("the same yes twice: %d writes, want 1", w.memory.writes)
			}
			w.clock = w.clock.Add(24 * time.Hour)
			if got := offline(a); got != 201 {
				t.Errorf("a yes after 24 h = %d, want 201", got)
			}
			w.clock = w.clock.Add(time.Second)
			if got := offline(a); got != 503 {
				t.Errorf("a yes after more than 24 h = %d, want 503", got)
			}
			w.clock = w.clock.Add(-48 * time.Hour) // a node without a clock of its own
			if got := offline(a); got != 201 {
				t.Errorf("a yes from the future = %d, want 201", got)
			}
			say(no)
			if got := offline(a); got != 503 {
				t.Errorf("a yes taken back = %d, want 503", got)
			}
		})
	}
}

func TestTokenReviewEndsWithTheToken(t *testing.T) {
	w := newWorld(t)
	token := jwt(w.clock.Add(time.Hour))
	answer := `{"kind":"TokenReview","apiVersion":"authentication.k8s.io/v1","spec":{"token":"` + token + `"},"status":{"authenticated":true}}`
	w.server = func(*http.Request) (*http.Response, error) { return jsonReply(201, answer), nil }
	a := ask{method: "POST", target: "/apis/authentication.k8s.io/v1/tokenreviews", body: `{"spec":{"token":"` + token + `"}}`}
	w.do(a)
	w.down = true
	for after, want := range map[time.Duration]int{30 * time.Minute: 201, 61 * time.Minute: 503} {
		w.clock = time.Unix(1_900_000_000, 0).Add(after)
		if resp, _, err := w.do(a); outcome(resp, err) != want {
			t.Errorf("after %v = %d, want %d", after, outcome(resp, err), want)
		}
	}
}

// Keys that differ by case must not be taken for each other: the API server
// would not.
func TestQuestionsAreReadAsTheAPIServerReadsThem(t *testing.T) {
	key := func(body string) string {
		var r authorizationv1.SubjectAccessReview
		if err := decode("", []byte(body), subjectAccessReviewKind, &r); err != nil {
			t.Fatal(err)
		}
		return hashKey(r.Spec)
	}
	if key(`{"spec":{"user":"a","USER":"b"}}`) != key(`{"spec":{"user":"a"}}`) {
		t.Error("USER was taken for user")
	}
	if key(`{"spec":{"user":"a","user":"b"}}`) != key(`{"spec":{"user":"b"}}`) {
		t.Error("the first of two equal keys counted")
	}
}

func TestAcceptable(t *testing.T) {
	for _, tc := range []struct {
		accept []string
		want   []string
	}{
		{nil, []string{mediaJSON}},
		{[]string{""}, nil},
		{[]string{mediaProtobuf + "," + mediaJSON}, []string{mediaProtobuf, mediaJSON}},
		{[]string{mediaJSON, mediaProtobuf}, []string{mediaJSON, mediaProtobuf}},
		{[]string{mediaJSON + ";q=0.5, " + mediaProtobuf}, []string{mediaProtobuf, mediaJSON}},
		{[]string{"application/json;as=Table;v=v1;g=meta.k8s.io, application/json"}, []string{mediaJSON}},
		{[]string{"application/cbor, */*"}, []string{mediaJSON}},
		{[]string{"application/json;q=0, application/yaml"}, nil},
		{[]string{"application/json;q=x, ;;,"}, nil},
	} {
		req := &http.Request{Header: http.Header{"Accept": tc.accept}}
		if diff := cmp.Diff(tc.want, acceptable(req)); diff != "" {
			t.Errorf("acceptable(%q) (-want +got):\n%s", tc.accept, diff)
		}
	}
}

func TestJWTExpiry(t *testing.T) {
	for token, want := range map[string]int64{
		jwt(time.Unix(1234, 0)): 1234, "": 0, "a.b": 0, "a.!.c": 0, "a.e30.c": 0, "a." + base64.RawURLEncoding.EncodeToString([]byte(`{"exp":1e300}`)) + ".c": 0,
		"a." + base64.RawURLEncoding.EncodeToString([]byte(`{"exp":-5}`)) + ".c": 0,
	} {
		got, ok := jwtExpiry(token)
		if ok != (want != 0) || (ok && got.Unix() != want) {
			t.Errorf("jwtExpiry(%q) = %v, %v, want %d", token, got, ok, want)
		}
	}
}

func TestMetricsAreWellFormed(t *testing.T) {
	w := newWorld(t)
	w.down = true
	w.do(ask{method: "PATCH", target: "/api/v1/namespaces/a/events/e"})
	if problems, err := testutil.GatherAndLint(w.reg); err != nil || len(problems) > 0 {
		t.Errorf("GatherAndLint() = %v, %v", problems, err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(mediaJSON, []byte(recNode))
	f.Add(mediaProtobuf, []byte("k8s\x00\x0a\x00"))
	f.Fuzz(func(t *testing.T, contentType string, body []byte) {
		var n corev1.Node
		if decode(contentType, body, nodeKind, &n) != nil {
			return
		}
		if _, err := encodeProtobuf(nodeKind, &n); err != nil {
			t.Errorf("a Node that was read cannot be written: %v", err)
		}
	})
}

// A GET whose representation is recorded from an older state must not drop the overlay
// that stands on the newer record.
func TestNodeOverlayOutlivesOlderRecord(t *testing.T) {
	w := newWorld(t)
	w.down = true
	node := func(rv string) string {
		return `{"kind":"Node","apiVersion":"v1","metadata":{"name":"n1","uid":"u","resourceVersion":"` + rv + `"},"status":{}}`
	}
	const path = "/api/v1/nodes/n1"
	w.records[path] = node("20") // what a client that takes JSON, too, is shown
	patch := ask{user: self, method: http.MethodPatch, target: path + "/status", contentType: "application/merge-patch+json", body: `{"status":{"phase":"Running"}}`}
	if resp, body, err := w.do(patch); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("PATCH = %v, %q, %v", resp, body, err)
	}
	w.records[path] = node("10") // what one that takes protobuf only is shown: it was recorded before
	if _, _, err := w.do(ask{user: self, method: http.MethodGet, target: path}); err != nil {
		t.Fatal(err)
	}
	w.records[path] = node("20")
	_, body, err := w.do(ask{user: self, method: http.MethodGet, target: path})
	if err != nil || !strings.Contains(body, `"phase":"Running"`) {
		t.Errorf("GET after the GET of an older record = %q, %v, want the patched Node", body, err)
	}
}
