// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

// What counts as an answer about the DaemonSet.
func TestUnwanted(t *testing.T) {
	const status = `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"%s","details":{"name":"%s","group":"apps","kind":"%s"},"code":404}`
	const object = `{"kind":"DaemonSet","apiVersion":"apps/v1","metadata":{"name":"%s","namespace":"ns"%s},"spec":{"template":{"spec":{"nodeSelector":{"edge":"yes"}}}}}`
	for _, tc := range []struct {
		name  string
		code  int
		body  string
		want  string // why; "error": it is not known
		label string
	}{
		{"gone", 404, fmt.Sprintf(status, "NotFound", "hub", "daemonsets"), "it is gone", "yes"},
		{"a 404 of somebody else's", 404, "not found", "error", "yes"},
		{"a 404 of another object", 404, fmt.Sprintf(status, "NotFound", "other", "daemonsets"), "error", "yes"},
		{"no such kind", 404, `{"kind":"Status","reason":"NotFound","details":{}}`, "error", "yes"},
		{"401", 401, `{"kind":"Status","reason":"Unauthorized"}`, "error", "yes"},
		{"403", 403, fmt.Sprintf(status, "Forbidden", "hub", "daemonsets"), "error", "yes"},
		{"500", 500, "", "error", "yes"},
		{"a redirect", 302, "", "error", "yes"},
		{"a portal", 200, "<html>", "error", "yes"},
		{"another object", 200, fmt.Sprintf(object, "other", ""), "error", "yes"},
		{"there", 200, fmt.Sprintf(object, "hub", ""), "", "yes"},
		{"there, not for this node", 200, fmt.Sprintf(object, "hub", ""), "its nodeSelector does not select this node", "no"},
		{"being deleted", 200, fmt.Sprintf(object, "hub", `,"deletionTimestamp":"2026-01-01T00:00:00Z"`), "it is being deleted", "yes"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if strings.Contains(r.URL.Path, "/nodes/") {
					fmt.Fprintf(w, `{"kind":"Node","metadata":{"name":"n","labels":{"edge":"%s"}}}`, tc.label)
					return
				}
				if got := r.Header.Get("Authorization"); got != "Bearer secret" {
					t.Errorf("Authorization = %q", got)
				}
				w.WriteHeader(tc.code)
				io.WriteString(w, tc.body)
			}))
			t.Cleanup(s.Close)
			ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
			i := newInstaller(t, kubeconfigOf(`server: "`+s.URL+`", certificate-authority: /etc/kubernetes/pki/ca.crt`, `client-certificate: /pki/node.pem, client-key: /pki/node.pem`))
			write(t, filepath.Join(i.o.Root, "/etc/kubernetes/pki/ca.crt"), ca)
			write(t, filepath.Join(i.o.Root, "/pki/node.pem"), certificate(t, "system:node:n", "system:nodes"))
			dir := t.TempDir()
			write(t, dir+"/ca.crt", ca)
			write(t, dir+"/token", []byte("secret\n"))
			write(t, dir+"/conf", []byte(kubeconfigOf(`server: "`+s.URL+`", certificate-authority: ca.crt`, `tokenFile: token`)))
			i.o.DaemonSet, i.o.Kubeconfig = "ns/hub", dir+"/conf"
			why, err := i.unwanted(t.Context())
			if tc.want == "error" {
				if err == nil || why != "" {
					t.Errorf("unwanted() = %q, %v, want an error", why, err)
				}
				return
			}
			if err != nil || why != tc.want {
				t.Errorf("unwanted() = %q, %v, want %q", why, err, tc.want)
			}
		})
	}
}

func TestExcludes(t *testing.T) {
	labels := map[string]string{"edge": "yes", "n": "5"}
	terms := func(s string) string {
		return `"affinity":{"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":{"nodeSelectorTerms":[` + s + `]}}}`
	}
	expression := func(key, op, values string) string {
		return `{"matchExpressions":[{"key":"` + key + `","operator":"` + op + `","values":[` + values + `]}]}`
	}
	for _, tc := range []struct {
		name, spec string
		excluded   bool
		wrong      bool
	}{
		{"nothing", ``, false, false},
		{"selector", `"nodeSelector":{"edge":"yes"}`, false, false},
		{"another selector", `"nodeSelector":{"edge":"no"}`, true, false},
		{"In", terms(expression("edge", "In", `"no","yes"`)), false, false},
		{"NotIn", terms(expression("edge", "NotIn", `"yes"`)), true, false},
		{"NotIn of none", terms(expression("x", "NotIn", `"yes"`)), false, false},
		{"Exists", terms(expression("x", "Exists", ``)), true, false},
		{"DoesNotExist", terms(expression("x", "DoesNotExist", ``)), false, false},
		{"Gt", terms(expression("n", "Gt", `"4"`)), false, false},
		{"Lt", terms(expression("n", "Lt", `"5"`)), true, false},
		{"one of two", terms(expression("x", "Exists", ``) + "," + expression("edge", "Exists", ``)), false, false},
		{"an empty one", terms(`{}`), true, false},
		{"the node's name", terms(`{"matchFields":[{"key":"metadata.name","operator":"In","values":["node"]}]}`), false, false},
		{"another's name", terms(`{"matchFields":[{"key":"metadata.name","operator":"In","values":["other"]}]}`), true, false},
		{"an operator of tomorrow", terms(expression("x", "Like", `"y"`)), false, true},
	} {
		var d daemonSet
		must(t, json.Unmarshal([]byte(`{"spec":{"template":{"spec":{`+tc.spec+`}}}}`), &d))
		why, err := d.excludes("node", labels)
		if (err != nil) != tc.wrong || (why != "") != tc.excluded {
			t.Errorf("%s: excludes() = %q, %v, want excluded %v", tc.name, why, err, tc.excluded)
		}
	}
}

func TestMetrics(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	m := newMetrics(reg)
	m.looked(nil)
	m.looked(fmt.Errorf("x: %w", ErrSilent))
	t.Setenv(placedVariable, "00ff")
	reg.MustRegister(Placed())
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("GatherAndLint() = %v, %v", problems, err)
	}
	for name, want := range map[string]float64{"ok": 1, "silent": 1, "error": 0} {
		if got := testutil.ToFloat64(m.looks.WithLabelValues(name)); got != want {
			t.Errorf("edgehub_install_looks_total{result=%q} = %v, want %v", name, got, want)
		}
	}
	t.Setenv(placedVariable, "")
	if n := testutil.CollectAndCount(Placed()); n != 0 {
		t.Errorf("Placed() of a hub that was not placed has %d metrics, want none", n)
	}
}

// What a hub says of itself is read back.
func TestHubMetrics(t *testing.T) {
	text := `# TYPE edgehub_install_placed_info gauge
edgehub_install_placed_info{hash="abc"} 1
# TYPE edgehub_proxy_node_lease_updates_total counter
edgehub_proxy_node_lease_updates_total 5
# TYPE edgehub_proxy_requests_total counter
edgehub_proxy_requests_total{code="200",resource="leases",source="upstream",verb="update"} 9
`
	code := http.StatusOK
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(code)
		if r.URL.Path == "/metrics" {
			io.WriteString(w, text)
		}
	}))
	defer s.Close()
	i := &installer{at: hubAt{Metrics: s.URL}}
	if m, err := i.hubMetrics(t.Context()); err != nil || m.hash != "abc" || m.renewed != 5 {
		t.Errorf("hubMetrics() = %+v, %v, want abc, 5", m, err)
	}
	code = 500
	if m, err := i.hubMetrics(t.Context()); err == nil {
		t.Errorf("hubMetrics() of a 500 = %+v, want an error", m)
	}
}

func TestPoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		errNo := errors.New("no")
		start, n := time.Now(), 0
		if err := poll(t.Context(), time.Minute, func(context.Context) error { n++; return errNo }); !errors.Is(err, errNo) || time.Since(start) != time.Minute || n < 100 {
			t.Errorf("poll() = %v after %v and %d times", err, time.Since(start), n)
		}
		ctx, cancel := context.WithCancel(t.Context())
		err := poll(ctx, time.Minute, func(context.Context) error { cancel(); return errNo })
		if !errors.Is(err, errNo) || !errors.Is(err, context.Canceled) {
			t.Errorf("poll() that was interrupted = %v", err)
		}
	})
}

func TestLock(t *testing.T) {
	i := newInstaller(t, "")
	unlock, err := i.lock()
	must(t, err)
	other := *i
	if _, err := other.lock(); !errors.Is(err, ErrBusy) {
		t.Errorf("lock() = %v, want ErrBusy", err)
	}
	must(t, os.RemoveAll(filepath.Join(i.o.Root, i.o.StateDir))) // an uninstall
	unlock()
	unlock, err = other.lock()
	must(t, err)
	unlock()
}
