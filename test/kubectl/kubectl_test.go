// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package kubectl

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/process"
)

// contents is what the cluster holds; yaml, so that kubectl makes it.
const contents = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: widgets.example.com}
spec:
  group: example.com
  scope: Namespaced
  names: {plural: widgets, singular: widget, kind: Widget, shortNames: [wd]}
  versions:
  - name: v1
    served: true
    storage: true
    additionalPrinterColumns:
    - {name: Colour, type: string, jsonPath: .spec.color}
    schema:
      openAPIV3Schema:
        description: A widget of the test.
        type: object
        properties:
          spec:
            type: object
            description: What it looks like.
            properties: {color: {type: string, description: Its colour.}}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: one, labels: {num: "1"}, annotations: {note: "<tag> & ünïcode"}}
data: {key: value, more: "two\nlines\n"}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: two, labels: {num: "2"}}
data: {key: other}
---
apiVersion: v1
kind: Secret
metadata: {name: one}
stringData: {password: hunter2}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {app: web}, ports: [{port: 80}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: c, image: "example.invalid/web:1"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: p, labels: {app: web}}
spec: {containers: [{name: c, image: "example.invalid/web:1", env: [{name: A, value: b}]}]}
---
apiVersion: v1
kind: Node
metadata: {name: other, labels: {kubernetes.io/os: linux}}
`

func (r *rig) fill() {
	r.t.Helper()
	ctx := r.t.Context()
	if err := r.cp.CreateNamespace(ctx, "team"); err != nil {
		r.t.Fatal(err)
	}
	if o := r.direct.run(sh("-n team apply -f -").with(contents)); o.Exit != 0 {
		r.t.Fatalf("apply: %+v", o)
	}
	if o := r.direct.run(sh("wait --for=condition=Established crd/widgets.example.com --timeout=60s")); o.Exit != 0 {
		r.t.Fatalf("wait: %+v", o)
	}
	for i := range 3 {
		w := fmt.Sprintf("apiVersion: example.com/v1\nkind: Widget\nmetadata: {name: w-%d}\nspec: {color: red}\n", i)
		err := process.Poll(ctx, "custom resource is served", process.Until(func() bool {
			return r.direct.run(sh("-n team apply -f -").with(w)).Exit == 0
		}))
		if err != nil {
			r.t.Fatal(err)
		}
	}
	pod, err := r.cp.Client.CoreV1().Pods("team").Get(ctx, "p", metav1.GetOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	now := metav1.Now()
	_, err = r.cp.Client.CoreV1().Events("team").Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: "p.1"},
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: "team", Name: "p", UID: pod.UID},
		Type:           "Warning", Reason: "Testing", Message: "an event of the test", FirstTimestamp: now, LastTimestamp: now, Count: 1,
		Source: corev1.EventSource{Component: "test"},
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
}

// A read is asked online, and again offline.
type read struct {
	words string
	exit  int
}

var reads = []read{
	{"get nodes", 0}, {"get node other -o wide", 0}, {"get ns", 0}, {"get pods -A", 0}, {"-n team get pods -o wide --show-labels", 0},
	{"-n team get configmaps", 0}, {"-n team get cm -o yaml", 0}, {"-n team get cm -o json", 0}, {"-n team get cm -o name", 0}, {"-n team get cm -o wide", 0},
	{"-n team get cm one -o yaml", 0}, {"-n team get cm one -o json --show-managed-fields", 0}, {"-n team get cm one two", 0}, {"-n team get cm/one secret/one", 0},
	{"-n team get cm -o jsonpath={.items[*].metadata.name}", 0}, {"-n team get cm one -o jsonpath={.data.key}", 0}, {"-n team get cm -o custom-columns=N:.metadata.name,K:.data.key", 0},
	{"-n team get cm -o go-template={{range.items}}{{.metadata.name}}/{{end}}", 0}, {"-n team get cm --sort-by=.metadata.name", 0}, {"-n team get cm -l num=2", 0},
	{"-n team get cm -l num=2 -o yaml", 0}, {"-n team get cm --field-selector metadata.name=one", 0}, {"-n team get cm --no-headers", 0}, {"-n team get cm -L num", 0},
	{"-n team get all", 0}, {"-n team get secrets", 0}, {"-n team get secret one -o yaml", 0}, {"-n team get deploy,svc,pods", 0}, {"-n team get deploy web -o yaml", 0},
	{"-n team get widgets", 0}, {"-n team get wd w-1 -o yaml", 0}, {"-n team get widgets.v1.example.com -o json", 0}, {"get crd", 0}, {"get crd widgets.example.com -o yaml", 0},
	{"-n none get cm", 0}, {"-n team get cm --chunk-size=1", 0}, {"-n team get cm --chunk-size=1 -o yaml", 0}, {"get clusterroles", 0}, {"get cm -A", 0},
	{"get --raw /version", 0}, {"get --raw /api/v1/namespaces/team/configmaps/one", 0}, {"get --raw /api/v1/namespaces/team/configmaps?limit=500", 0},
	{"-n team get deploy web --subresource=scale -o yaml", 0}, {"-n team get deploy web --subresource=status", 0},
	{"explain pods", 0}, {"explain deployment.spec.template.spec.containers --recursive", 0}, {"explain widgets.spec", 0}, {"explain configmap --output=plaintext-openapiv2", 0},
	{"explain pods.nothing", 1}, {"explain nothings", 1},
	{"api-resources", 0}, {"api-resources -o wide --sort-by=kind", 0}, {"api-resources --api-group=example.com -o name", 0}, {"api-versions", 0}, {"version", 0}, {"version -o json", 0},
	{"cluster-info", 0}, {"-n team rollout history deploy/web", 0}, {"-n team set image deploy/web c=example.invalid/web:2 --dry-run=client -o yaml", 0},
	{"-n team describe cm one --show-events=false", 0}, {"-n team describe cm --show-events=false", 0}, {"-n team describe secret one", 0}, {"-n team describe widget w-1 --show-events=false", 0}, {"describe ns team", 0},
	{"-n team wait --for=jsonpath={.data.key}=value cm/one --timeout=10s", 0},
	{"config view --minify -o jsonpath={.current-context}", 0}, {"get nothings", 1},
}

// changed are reads that are not the same offline.
var changed = []struct {
	read
	offline int
	says    string // on standard error, offline
}{
	// Events are not recorded. kubectl takes no answer for no events with most kinds,
	// and for an error with a few.
	{read{"-n team describe pod p", 0}, 0, noEvents}, {read{"-n team describe deploy web", 0}, 0, noEvents}, {read{"-n team describe svc web", 0}, 0, noEvents},
	{read{"describe node other", 0}, 0, noEvents}, {read{"-n team describe widget w-1", 0}, 0, noEvents}, {read{"-n team describe cm one", 0}, 1, unavailable},
	{read{"-n team get events", 0}, 1, unavailable}, {read{"-n team events", 0}, 1, unavailable},
	// That something does not exist is not recorded, either.
	{read{"-n team get cm none", 1}, 1, unavailable}, {read{"-n team get cm one none", 1}, 1, unavailable}, {read{"-n team describe cm none", 1}, 1, unavailable},
	{read{"get --raw /api/v1/nothing", 1}, 1, unavailable}, {read{"-n team wait --for=create cm/none --timeout=1s", 1}, 1, unavailable},
	{read{"-n team get cm -l )(", 1}, 1, unavailable}, {read{"-n team get pods --field-selector spec.none=1", 1}, 1, unavailable},
	// Only the API server knows.
	{read{"auth whoami", 0}, 1, unavailable}, {read{"auth can-i list pods", 0}, 1, unavailable}, {read{"-n team logs p", 0}, 1, unavailable},
	// What nobody tells does not come to pass.
	{read{"-n team wait --for=condition=Ready pod/p --timeout=1s", 1}, 1, "timed out"}, {read{"-n team rollout status deploy/web --timeout=1s", 1}, 1, "timed out"},
	{read{"top nodes", 1}, 1, "Metrics API not available"},
	// edgehub speaks for itself.
	{read{"get --raw /readyz", 0}, 0, ""},
}

func TestKubectl(t *testing.T) {
	r := newRig(t)
	r.fill()
	recorded := map[string]outcome{}
	r.sub("reads", func() {
		for _, q := range reads {
			recorded[q.words] = r.compare(sh(q.words), q.exit)
		}
		for _, q := range changed {
			recorded[q.words] = r.compare(sh(q.words), q.exit)
		}
	})
	r.sub("writes", r.writes)
	r.sub("watches", r.watches)
	token := r.through.run(sh("-n team create token default"))
	r.cut()
	r.sub("offline reads", func() { r.offlineReads(recorded); r.offlineChanged(recorded) })
	r.sub("offline writes", func() { r.offlineWrites(); r.offlineToken(token) })
	r.sub("offline watches", r.offlineWatches)
}

// configMap is a manifest.
func configMap(name, value string) string {
	return fmt.Sprintf("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: %s, namespace: team}\ndata: {key: \"%s\"}\n", name, value)
}

// script is what is written, in order; at its end the cluster is as it was.
func script(dir string) []call {
	file := filepath.Join(dir, "cm.yaml")
	n := func(words string) call { return sh("-n team " + words) }
	return []call{
		sh("apply -f -").with(configMap("a", "1")), sh("apply -f -").with(configMap("a", "1")), sh("apply -f -").with(configMap("a", "2")),
		sh("apply --dry-run=server -o yaml -f -").with(configMap("a", "3")), sh("diff -f -").with(configMap("a", "3")), sh("diff -f -").with(configMap("a", "2")),
		sh("apply --server-side --field-manager=other -f -").with(configMap("a", "4")), // a conflict
		sh("apply --server-side --field-manager=other --force-conflicts -f -").with(configMap("a", "4")),
		sh("apply --server-side --field-manager=one -f -").with(configMap("b", "1")), sh("apply --server-side --field-manager=one -f -").with(configMap("b", "1")),
		n("get cm a -o yaml --show-managed-fields"), n("get cm b -o yaml --show-managed-fields"), n("apply view-last-applied cm a"),
		n("create cm c --from-literal=key=1"), n("create cm c --from-literal=key=1"), n("create secret generic c --from-literal=password=x"),
		n("create deploy d --image=example.invalid/d:1"), n("scale deploy d --replicas=3"), n("set image deploy/d d=example.invalid/d:2"), n("set env deploy/d X=y"), n("rollout restart deploy/d"),
		n("expose deploy d --port=80"), n("autoscale deploy d --max=3"), n("label cm c x=y"), n("label cm c x=z"), n("label cm c x=z --overwrite"), n("annotate cm c note=text"),
		n("patch cm c -p {\"data\":{\"key\":\"2\"}}"), n("patch cm c --type=json -p [{\"op\":\"replace\",\"path\":\"/data/key\",\"value\":\"3\"}]"), n("patch cm c --type=merge -p {\"data\":{\"new\":\"4\"}}"),
		n("patch cm c --type=json -p [{\"op\":\"test\",\"path\":\"/data/key\",\"value\":\"9\"}]"), n("edit cm c").under("KUBE_EDITOR=sed -i s/key/changed/"),
		n("get cm c -o yaml"), sh("replace -f -").with(configMap("c", "5")), sh("replace --force -f -").with(configMap("c", "6")), sh("replace -f -").with(configMap("none", "5")),
		n("run r --image=example.invalid/r:1 --restart=Never"), n("run r --image=example.invalid/r:1"), n("get pod r -o jsonpath={.status.phase}"),
		n("wait --for=jsonpath={.status.phase}=Pending pod/r --timeout=20s"), n("patch pod r --subresource=status --type=merge -p {\"status\":{\"phase\":\"Succeeded\"}}"),
		n("wait --for=jsonpath={.status.phase}=Succeeded pod/r --timeout=20s"),
		n("create token default"), n("create sa s"), n("create role x --verb=get --resource=pods"), n("auth can-i get pods --as=system:serviceaccount:team:s"),
		sh("cordon other"), sh("uncordon other"), sh("taint node other k=v:NoSchedule"), sh("taint node other k=v:NoSchedule-"),
		sh("apply -f -").with("apiVersion: example.com/v1\nkind: Widget\nmetadata: {name: w-9, namespace: team}\nspec: {color: blue}\n"),
		sh("apply -f -").with("apiVersion: example.com/v1\nkind: Widget\nmetadata: {name: w-9, namespace: team}\nspec: {colour: blue}\n"), // unknown field
		sh("apply -f -").with("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: BAD, namespace: team}\n"), sh("apply -f -").with("kind: Nothing\napiVersion: none.example.com/v1\nmetadata: {name: x}\n"),
		n("get widget w-9 -o yaml"), n("patch widget w-9 --type=merge -p {\"spec\":{\"color\":\"red\"}}"), n("apply --server-side -f " + file),
		n("delete widget w-9"), n("delete cm a b c"), n("wait --for=delete cm/c --timeout=20s"), n("delete cm c"), n("delete cm c --ignore-not-found"), n("delete -f " + file),
		n("delete secret c"), n("delete deploy,svc,hpa d"), n("delete pod r --now"), n("delete sa,role s x --ignore-not-found"), n("delete cm -l none=none"),
		n("get cm -o name"),
	}
}

// writes runs the script through one door, and then through the other one.
func (r *rig) writes() {
	dir := r.t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "cm.yaml"), []byte(configMap("f", "1")), 0o600); err != nil {
		r.t.Fatal(err)
	}
	run := func(d *door) (all []outcome) {
		for _, c := range script(dir) {
			all = append(all, d.run(c).maskMoving())
		}
		return all
	}
	want, got := run(r.direct), run(r.through)
	failures := 0
	for i, c := range script(dir) {
		if d := cmp.Diff(want[i], got[i]); d != "" {
			r.t.Errorf("%s differs through edgehub (-direct +edgehub):\n%s", c, d)
		}
		if want[i].Exit != 0 {
			failures++
			r.t.Logf("%s: exit %d: %s", c, want[i].Exit, strings.TrimSpace(want[i].Stderr))
		}
	}
	if failures != 12 {
		r.t.Errorf("%d of %d commands fail directly, want 12", failures, len(want))
	}
}
