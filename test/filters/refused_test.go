// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	strict = "strict" // a program whose rules cannot judge every object
	torn   = "torn"   // another, whose rules make objects that cannot be
	mapsA  = "/api/v1/namespaces/a/configmaps"
	things = "/apis/example.com/v1/namespaces/a/widgets"
	table  = rig.JSON + ";as=Table;v=v1;g=meta.k8s.io"

	secretText = "nobody-is-shown-this" // of the object that cannot be judged
	grace      = 30 * time.Second
)

// refusing is a configuration by which some objects fail.
func refusing() document {
	return document{CEL: []rule{
		{Name: "strict", Clients: []client{{Program: strict}}, Resources: []string{"configmaps"}, Match: `object.metadata.namespace == "a" && int(object.?data.?level.orValue("0")) > 3`, Drop: true},
		{Name: "strict-widgets", Clients: []client{{Program: strict}}, Resources: []string{"widgets.example.com"}, Match: "object.spec.level > 3", Drop: true},
		{Name: "torn", Clients: []client{{Program: torn}}, Resources: []string{"configmaps"}, Match: `object.metadata.name == "bad"`, Set: []set{{"data.text", "5"}}},
	}}
}

// TestRefusals has rules fail for one object: whoever asks for it, or for all, is refused,
// and is not shown it; everybody else is answered as ever.
func TestRefusals(t *testing.T) {
	t.Parallel()
	s := newStage(t, refusing())
	ctx := t.Context()
	maps := s.ControlPlane.Client.CoreV1().ConfigMaps("a")
	for name, level := range map[string]string{"good": "1", "dropped": "4", "bad": "many"} {
		_, err := maps.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}, Data: map[string]string{"level": level, "text": secretText}}, metav1.CreateOptions{})
		s.Must(err)
		w := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Widget", "metadata": map[string]any{"name": name}, "spec": map[string]any{"text": secretText}}}
		if level != "many" {
			put(w.Object, int64(level[0]-'0'), "spec", "level")
		} else {
			put(w.Object, level, "spec", "level")
		}
		_, err = s.dynamic.Resource(rig.Widgets).Namespace("a").Create(ctx, w, metav1.CreateOptions{})
		s.Must(err)
	}
	process.Run(t, s.Hub)
	s.WaitLink(true)
	t.Run("reads", func(t *testing.T) { testReads(t, s) })
	t.Run("forms", func(t *testing.T) { testForms(t, s) })
	t.Run("kubectl", func(t *testing.T) { testKubectl(t, s) })
	t.Run("watches", func(t *testing.T) { testWatches(t, s) })
	t.Run("mended", func(t *testing.T) {
		_, err := maps.Patch(ctx, "bad", types.MergePatchType, []byte(`{"data":{"level":"2"}}`), metav1.PatchOptions{})
		s.Must(err)
		s.Must(process.Poll(ctx, "the list is answered", func(ctx context.Context) error {
			l, status, err := s.endpoint(strict).List(ctx, mapsA, rig.JSON)
			if err == nil && (status != http.StatusOK || len(l.Items) != 3) { // with kube-root-ca.crt
				err = fmt.Errorf("%d with %d items", status, len(l.Items))
			}
			return err
		}))
	})
}

// endpoint is a program of the token user's, through the hub.
func (s *stage) endpoint(program string) *rig.Endpoint {
	s.T.Helper()
	return s.Direct(s.credential(false, program))
}

func testReads(t *testing.T, s *stage) {
	for _, tc := range []struct {
		program, path, accept string
		want                  int
		rule                  string // that counts an error
	}{
		{strict, mapsA + "/good", rig.JSON, 200, ""},
		{strict, mapsA + "/good", rig.Protobuf, 200, ""},
		{strict, mapsA + "/dropped", rig.JSON, 404, ""},
		{strict, mapsA + "/dropped", rig.Protobuf, 404, ""},
		{strict, mapsA + "/bad", rig.JSON, 500, "strict"},
		{strict, mapsA + "/bad", rig.Protobuf, 500, "strict"},
		{strict, mapsA, rig.JSON, 500, "strict"},
		{strict, mapsA, rig.Protobuf, 500, "strict"},
		{strict, mapsA + "?fieldSelector=metadata.name%3Dbad", rig.JSON, 500, "strict"},
		{strict, mapsA + "?fieldSelector=metadata.name%3Dgood", rig.JSON, 200, ""},
		{strict, mapsA + "?limit=1", rig.JSON, 500, "strict"},
		{strict, things, rig.JSON, 500, "strict-widgets"},
		{strict, things + "/bad", rig.JSON, 500, "strict-widgets"},
		{strict, things + "/good", rig.JSON, 200, ""},
		{torn, mapsA + "/bad", rig.JSON, 500, "torn"},
		{torn, mapsA, rig.Protobuf, 500, "torn"},
		{torn, mapsA + "/good", rig.JSON, 200, ""},
		{plain, mapsA + "/bad", rig.JSON, 200, ""},
		{plain, mapsA, rig.Protobuf, 200, ""},
		{plain, things, rig.JSON, 200, ""},
	} {
		t.Run(fmt.Sprintf("%s %s %s", tc.program, tc.path, tc.accept), func(t *testing.T) {
			before := failures(t, s, tc.rule)
			status, body, err := s.endpoint(tc.program).Fetch(t.Context(), tc.path, tc.accept)
			if err != nil {
				t.Fatal(err)
			}
			if status != tc.want {
				t.Errorf("GET %s = %d, want %d: %.300q", tc.path, status, tc.want, body)
			}
			if shown := bytes.Contains(body, []byte(secretText)); shown != (tc.want == http.StatusOK) {
				t.Errorf("GET %s shows an object: %t; %.300q", tc.path, shown, body)
			}
			if after := failures(t, s, tc.rule); tc.rule != "" && after <= before {
				t.Errorf("edgehub_filter_objects_total{verdict=error} = %v, want more than %v", after, before)
			}
		})
	}
}

// failures is how often a rule could not judge an object.
func failures(t *testing.T, s *stage, rule string) float64 {
	t.Helper()
	n, err := s.Hub.Metric(t.Context(), "edgehub_filter_objects_total", fmt.Sprintf("filter=%q", "cel/"+rule), `verdict="error"`)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// testForms asks for what filters cannot take apart.
func testForms(t *testing.T, s *stage) {
	const watch = "?watch=1&timeoutSeconds=1"
	for _, tc := range []struct {
		name, program, path, accept string
		want                        int
		kind                        string // in the answer
	}{
		{"table of a filtered list", strict, mapsA, table, 406, "Status"},
		{"table of a filtered object", strict, mapsA + "/good", table, 406, "Status"},
		{"table of a filtered watch", strict, mapsA + watch, table, 406, "Status"},
		{"metadata of a filtered list", strict, mapsA, rig.MetadataJSON, 406, "Status"},
		{"metadata of a filtered list, protobuf", strict, mapsA, rig.MetadataProtobuf, 406, "Status"},
		{"metadata of a filtered object", strict, mapsA + "/good", rig.WatchAccept(strings.ReplaceAll(rig.MetadataJSON, "List", "")), 406, "Status"},
		{"metadata of a filtered watch", strict, things + watch, rig.WatchAccept(rig.MetadataJSON), 406, "Status"},
		{"table or an object", strict, mapsA + "/good", table + "," + rig.JSON, 200, "ConfigMap"},
		{"table of another resource", strict, "/api/v1/namespaces/a/services", table, 200, "Table"},
		{"table", plain, mapsA, table, 200, "Table"},
		{"table of an object", plain, mapsA + "/bad", table, 200, "Table"},
		{"metadata", plain, mapsA, rig.MetadataJSON, 200, "PartialObjectMetadataList"},
		{"metadata, protobuf", plain, mapsA, rig.MetadataProtobuf, 200, "PartialObjectMetadataList"},
		{"metadata of a watch", plain, things + watch, rig.WatchAccept(rig.MetadataJSON), 200, "PartialObjectMetadata"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, body, err := s.endpoint(tc.program).Fetch(t.Context(), tc.path, tc.accept)
			if err != nil {
				t.Fatal(err)
			}
			if status != tc.want || !bytes.Contains(body, []byte(tc.kind)) {
				t.Errorf("GET %s = %d, want %d and %s: %.300q", tc.path, status, tc.want, tc.kind, body)
			}
			if status == http.StatusNotAcceptable && bytes.Contains(body, []byte(secretText)) {
				t.Errorf("GET %s shows an object: %.300q", tc.path, body)
			}
		})
	}
}

// testWatches has watches come upon the object that cannot be judged: at once, and later.
func testWatches(t *testing.T, s *stage) {
	for _, tc := range []struct{ path, accept, rule string }{
		{mapsA, rig.JSON, "strict"}, {mapsA, rig.Protobuf, "strict"}, {things, rig.JSON, "strict-widgets"},
	} {
		t.Run(tc.path+" "+tc.accept, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), grace)
			defer cancel()
			before := failures(t, s, tc.rule)
			watchToError(ctx, t, s, rig.With(tc.path, rig.WatchList), tc.accept)
			selected := rig.With(tc.path, "labelSelector=round&"+rig.WatchList)
			if tc.path == mapsA {
				watchLive(ctx, t, s, selected, tc.accept)
			}
			if after := failures(t, s, tc.rule); after <= before {
				t.Errorf("edgehub_filter_objects_total{verdict=error} = %v, want more than %v", after, before)
			}
		})
	}
}

// watchToError reads a watch that must end with ERROR 500 and must not show the object.
func watchToError(ctx context.Context, t *testing.T, s *stage, path, accept string) {
	t.Helper()
	resp, err := s.endpoint(strict).Get(ctx, path, accept)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("GET %s = %s, want 200", path, resp.Status)
	}
	next := rig.Frames(resp.Body, resp.Header.Get("Content-Type"))
	for {
		ev, err := next()
		switch {
		case err != nil:
			t.Fatalf("watch of %s ended with %v, want ERROR", path, err)
		case ev.Type == "ERROR" && ev.Code != http.StatusInternalServerError:
			t.Fatalf("watch of %s says ERROR %d, want 500", path, ev.Code)
		case ev.Type == "ERROR":
			if _, err := next(); err == nil {
				t.Errorf("watch of %s goes on after ERROR", path)
			}
			return
		case ev.Type != "BOOKMARK" && ev.Meta.Key != "a/good" && ev.Meta.Key != "a/kube-root-ca.crt" && ev.Meta.Key != "a/later":
			t.Errorf("watch of %s shows %s %s", path, ev.Type, ev.Meta.Key)
		case ev.Meta.Key == "a/later" && !bytes.Contains(ev.Item, []byte("judged")):
			t.Errorf("watch of %s shows %q", path, ev.Item)
		case ev.Synced: // now what it holds goes bad
			spoil(ctx, t, s)
		}
	}
}

// watchLive is a watch of one object, which goes bad.
func watchLive(ctx context.Context, t *testing.T, s *stage, path, accept string) {
	t.Helper()
	maps := s.ControlPlane.Client.CoreV1().ConfigMaps("a")
	_, err := maps.Create(ctx, &corev1.ConfigMap{
		ObjectMeta: metav1.ObjectMeta{Name: "later", Labels: map[string]string{"round": "1"}}, Data: map[string]string{"level": "1", "text": "judged"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := maps.Delete(ctx, "later", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	}()
	watchToError(ctx, t, s, path, accept)
}

func spoil(ctx context.Context, t *testing.T, s *stage) {
	t.Helper()
	patch := `{"data":{"level":"many","text":"` + secretText + `"}}`
	if _, err := s.ControlPlane.Client.CoreV1().ConfigMaps("a").Patch(ctx, "later", types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
}

// testKubectl runs kubectl, for which no filter is in force, directly and through the hub.
func testKubectl(t *testing.T, s *stage) {
	bin, err := controlplane.Binaries(t.Context(), "kubectl")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	direct, through := filepath.Join(dir, "direct"), filepath.Join(dir, "through")
	c := s.ControlPlane.TokenConfig(agentUser)
	s.Must(controlplane.WriteKubeconfig(direct, c))
	s.Must(controlplane.WriteKubeconfig(through, s.Hub.Through(c)))
	run := func(kubeconfig string, args ...string) string {
		cmd := exec.CommandContext(t.Context(), filepath.Join(bin, "kubectl"), append([]string{"--kubeconfig=" + kubeconfig, "--namespace=a"}, args...)...)
		cmd.Env = append(os.Environ(), "HOME="+dir, "KUBECACHEDIR="+kubeconfig+".cache")
		out, err := cmd.CombinedOutput()
		return fmt.Sprintf("%s%v", out, err)
	}
	for _, args := range []string{"get configmaps -o name", "get configmaps bad -o yaml", "get widgets -o json", "get configmaps --no-headers -o custom-columns=N:.metadata.name,L:.data.level", "get configmaps none"} {
		want, got := run(direct, strings.Fields(args)...), run(through, strings.Fields(args)...)
		if d := cmp.Diff(want, got); d != "" || (args != "get configmaps none" && !strings.Contains(got, "bad")) {
			t.Errorf("kubectl %s (-directly +through the hub):\n%s\n%s", args, d, got)
		}
	}
	// A table has ages, which pass.
	if got := run(through, "get", "configmaps", "--server-print=true"); !strings.Contains(got, "NAME") || !strings.Contains(got, "DATA") || !strings.Contains(got, "bad") {
		t.Errorf("kubectl get configmaps prints %q, want a table", got)
	}
}
