// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	head       = "apiVersion: edgehub.io/v1alpha1\nkind: EdgehubConfiguration\n"
	configName = "edgehub-config"
	// startPatience is how long a hub may take to see that it cannot start.
	startPatience = 20 * time.Second
)

// hide is a configuration that hides one ConfigMap from everybody.
func hide(name string) string {
	return head + "cel:\n- name: hide\n  clients: [{user: " + admin + "}]\n  resources: [configmaps]\n  match: object.metadata.name == \"" + name + "\"\n  drop: true\n"
}

// A badConfiguration is one that nobody may take, and where it is to be said that it is bad:
// LINE: FIELD: TEXT.
type badConfiguration struct {
	name, text string
	want       string
	inFile     string // instead of want; "": the same
}

// bomb has a billion values, in ten lines.
func bomb() string {
	text := head + "x0: &x0 [a, a, a, a, a, a, a, a, a, a]\n"
	for i := range 9 {
		text += fmt.Sprintf("x%d: &x%d [%s]\n", i+1, i+1, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*x%d, ", i), 10), ", "))
	}
	return text
}

var badConfigurations = []badConfiguration{
	{name: "unknown filter", text: head + "filters:\n- name: masterservice\n- name: masterservise\n", want: `5: filters[1].name: unknown filter "masterservise", did you mean "masterservice"?`},
	{name: "unknown field", text: head + "filters:\n- name: masterservice\n  disable: true\n", want: `5: filters[0].disable: unknown field, did you mean "disabled"?`},
	{name: "wrong type", text: head + "filters:\n- name: masterservice\n  clients: kubelet\n", want: `5: filters[0].clients: want a list, got a string`},
	{name: "bad CEL", text: strings.Replace(hide("x"), "object.metadata", "objekt.metadata", 1), want: `7: cel[0].match: `},
	{name: "empty", text: "", want: `1: is empty`},
	{name: "truncated", text: strings.TrimSuffix(hide("x"), "rop: true\n"), want: `8: `, inFile: `8: does not end in a newline, and may have been cut short`},
	{name: "bomb", text: bomb(), want: `1: has more than 50000 values, counting those that aliases stand for`},
}

// A site is a hub with a namespace in which its client looks at ConfigMaps: noisy, loud and
// calm.
type site struct {
	*rig.Rig
	namespace string
	file      string // of the configuration
}

func newSite(t *testing.T, name string) *site {
	t.Helper()
	s := &site{Rig: onShared(t, "config-"+name), namespace: "config-" + name, file: filepath.Join(t.TempDir(), "filters.yaml")}
	createNode(s.Rig, "config-"+name, nil)
	s.Must(s.ControlPlane.CreateNamespace(t.Context(), s.namespace))
	for _, name := range []string{"noisy", "loud", "calm"} {
		_, err := s.ControlPlane.Client.CoreV1().ConfigMaps(s.namespace).Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		s.Must(err)
	}
	return s
}

// TestBadConfigurations gives a hub what it cannot take, at the start and while it runs, as
// a file and as a ConfigMap.
func TestBadConfigurations(t *testing.T) {
	t.Parallel()
	t.Run("at the start", atTheStart)
	t.Run("file", asFile)
	t.Run("ConfigMap", asConfigMap)
}

// atTheStart there is nothing good in place of a bad file: the program ends, and says why.
func atTheStart(t *testing.T) {
	s := newSite(t, "start")
	for _, bad := range badConfigurations {
		t.Run(bad.name, func(t *testing.T) {
			s.write(bad.text)
			hub := s.NewHub("--filter-config=" + s.file)
			t.Cleanup(func() {
				if err := hub.Close(); err != nil {
					t.Error(err)
				}
			})
			ctx, cancel := context.WithTimeout(t.Context(), startPatience)
			defer cancel()
			if err := hub.Start(ctx); err == nil {
				t.Fatal("the hub has started")
			}
			select {
			case <-hub.Done():
			default:
				t.Error("the hub has not ended by itself")
			}
			log, err := os.ReadFile(hub.Log())
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.Split(strings.TrimSpace(string(log)), "\n")
			want := s.file + ":" + bad.in("file")
			if !slices.ContainsFunc(lines[max(0, len(lines)-3):], func(line string) bool { return strings.Contains(unquoted(line), want) }) {
				t.Errorf("the log ends in %q, want %q", lines[max(0, len(lines)-3):], want)
			}
		})
	}
	missing := s.NewHub("--filter-config=" + s.file + ".none")
	defer missing.Close()
	if err := missing.Start(t.Context()); err == nil {
		t.Error("the hub has started without its file")
	}
}

// unquoted is a line of the log as it was before klog put it in quotes.
func unquoted(line string) string { return strings.ReplaceAll(line, `\"`, `"`) }

func (b *badConfiguration) in(source string) string {
	if source == "file" && b.inFile != "" {
		return b.inFile
	}
	return b.want
}

// asFile changes the file while the hub runs.
func asFile(t *testing.T) {
	s := newSite(t, "file")
	s.write(hide("noisy"))
	s.Hub = s.NewHub("--filter-config=" + s.file)
	process.Run(t, s.Hub)
	s.WaitLink(true)
	s.wantHidden("the first configuration", "noisy")
	for _, bad := range badConfigurations {
		t.Run(bad.name, func(t *testing.T) {
			s.T = t
			s.refused("file", s.file, &bad, func() { s.write(bad.text) })
		})
	}
	s.T = t
	pid := s.Hub.PID()
	s.write(hide("loud"))
	s.waitInForce("file", "a good one", "loud")
	if s.Hub.PID() != pid {
		t.Errorf("the hub was started again")
	}
	s.wantReady("file", "")

	s.Settle()
	s.Offline()
	s.Must(os.Remove(s.file))
	s.waitRefused("file", 1)
	s.wantHidden("offline, the file is removed", "loud")
	s.Must(s.Hub.Kill())
	s.Must(s.Hub.Start(t.Context()))
	s.waitInForce("last_good", "offline, after a kill, without the file", "loud")
	s.write(badConfigurations[0].text)
	s.Must(s.Hub.Kill())
	s.Must(s.Hub.Start(t.Context()))
	s.waitInForce("last_good", "offline, after a kill, with a bad file", "loud")
	s.wantReady("file", s.file+":"+badConfigurations[0].want)
	s.write(hide("noisy"))
	s.waitInForce("file", "offline, a good file", "noisy")
	s.Online()
	s.wantHidden("online again", "noisy")
}

// asConfigMap changes the ConfigMap while the hub runs. A bad one at the start leaves the
// defaults in force.
func asConfigMap(t *testing.T) {
	s := newSite(t, "configmap")
	s.letNodesReadConfiguration()
	s.put(badConfigurations[0].text)
	s.Hub = s.NewHub("--config-namespace=" + s.namespace)
	process.Run(t, s.Hub)
	s.WaitLink(true)
	s.waitRefused("configmap", 1)
	s.waitInForce("defaults", "a bad one at the start", "")
	s.put(hide("noisy"))
	s.waitInForce("configmap", "the first good one", "noisy")
	name := s.namespace + "/" + configName
	for _, bad := range badConfigurations {
		t.Run(bad.name, func(t *testing.T) {
			s.T = t
			s.refused("configmap", name, &bad, func() { s.put(bad.text) })
		})
	}
	s.T = t
	s.put(hide("loud"))
	s.waitInForce("configmap", "a good one", "loud")
	s.wantReady("configmap", "")

	s.Settle()
	s.Offline()
	s.Must(s.Hub.Kill())
	s.Must(s.Hub.Start(t.Context()))
	s.wantHidden("offline, after a kill", "loud")
	s.put(badConfigurations[0].text)
	s.Online()
	s.waitRefused("configmap", 1)
	s.wantHidden("a bad one was put while cut", "loud")
	s.Must(s.Hub.Kill())
	s.Must(s.Hub.Start(t.Context()))
	s.waitRefused("configmap", 1)
	s.wantHidden("after a kill, a bad one online", "loud")
	s.put(hide("noisy"))
	s.waitInForce("configmap", "a good one takes over", "noisy")
}

func (s *site) write(text string) {
	s.T.Helper()
	s.Must(os.WriteFile(s.file, []byte(text), 0o600))
}

// put changes the ConfigMap.
func (s *site) put(text string) {
	s.T.Helper()
	of := s.ControlPlane.Client.CoreV1().ConfigMaps(s.namespace)
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: configName}, Data: map[string]string{"config.yaml": text}}
	_, err := of.Update(s.T.Context(), cm, metav1.UpdateOptions{})
	if err != nil {
		_, err = of.Create(s.T.Context(), cm, metav1.CreateOptions{})
	}
	s.Must(err)
}

// letNodesReadConfiguration does what docs/configuration.md asks for.
func (s *site) letNodesReadConfiguration() {
	s.T.Helper()
	ctx, rbac, meta := s.T.Context(), s.ControlPlane.Client.RbacV1(), metav1.ObjectMeta{Name: configName}
	_, err := rbac.Roles(s.namespace).Create(ctx, &rbacv1.Role{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"configmaps"}, ResourceNames: []string{configName}, Verbs: []string{"get", "list", "watch"}},
	}}, metav1.CreateOptions{})
	s.Must(err)
	_, err = rbac.RoleBindings(s.namespace).Create(ctx, &rbacv1.RoleBinding{
		ObjectMeta: meta, Subjects: []rbacv1.Subject{rig.Group("system:nodes")}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "Role", Name: configName},
	}, metav1.CreateOptions{})
	s.Must(err)
	own := s.Direct(s.Node)
	s.Must(process.Poll(ctx, "the node may read its configuration", func(ctx context.Context) error {
		status, _, err := own.Fetch(ctx, "/api/v1/namespaces/"+s.namespace+"/configmaps?fieldSelector=metadata.name%3D"+configName, rig.JSON)
		if err == nil && status != http.StatusOK {
			err = fmt.Errorf("status %d", status)
		}
		return err
	}))
}

// refused gives the hub a bad configuration, which is told of and changes nothing.
func (s *site) refused(source, name string, bad *badConfiguration, give func()) {
	s.T.Helper()
	before := s.reloads(source)
	give()
	s.waitRefused(source, before+1)
	s.wantReady(source, name+":"+bad.in(source))
	s.wantHidden(bad.name, "noisy")
}

// reloads is how often something was refused.
func (s *site) reloads(source string) float64 {
	s.T.Helper()
	n, err := s.Hub.Metric(s.T.Context(), "edgehub_filter_config_reloads_total", `source="`+source+`"`, `outcome="refused"`)
	s.Must(err)
	return n
}

// waitRefused waits for the n-th refusal.
func (s *site) waitRefused(source string, n float64) {
	s.T.Helper()
	s.Must(process.Poll(s.T.Context(), "what "+source+" says is refused", func(ctx context.Context) error {
		got, err := s.Hub.Metric(ctx, "edgehub_filter_config_reloads_total", `source="`+source+`"`, `outcome="refused"`)
		if err != nil || got < n {
			return fmt.Errorf("%v refusals, want %v, %w", got, n, err)
		}
		if valid, err := s.Hub.Metric(ctx, "edgehub_filter_config_valid", `source="`+source+`"`); err != nil || valid != 0 {
			return fmt.Errorf("valid = %v, %w", valid, err)
		}
		return nil
	}))
}

// waitInForce waits until a source's configuration is in force, and hides what it is to.
func (s *site) waitInForce(source, when, hidden string) {
	s.T.Helper()
	s.Must(process.Poll(s.T.Context(), when+": "+source+" is in force", func(ctx context.Context) error {
		for _, one := range []string{"configmap", "file", "last_good", "defaults"} {
			got, err := s.Hub.Metric(ctx, "edgehub_filter_config_in_force", `source="`+one+`"`)
			if err != nil || (got == 1) != (one == source) {
				return fmt.Errorf("%s in force = %v, %w", one, got, err)
			}
		}
		return s.hides(ctx, hidden)
	}))
}

func (s *site) wantHidden(when, hidden string) {
	s.T.Helper()
	if err := s.hides(s.T.Context(), hidden); err != nil {
		s.T.Errorf("%s: %v", when, err)
	}
}

// hides is nil if of the three ConfigMaps the client sees all but the one.
func (s *site) hides(ctx context.Context, hidden string) error {
	status, body, err := s.Through(s.ControlPlane.TokenConfig(admin)).Fetch(ctx, "/api/v1/namespaces/"+s.namespace+"/configmaps", rig.JSON)
	if err != nil {
		return err
	}
	if status != http.StatusOK {
		return fmt.Errorf("list: status %d", status)
	}
	var list corev1.ConfigMapList
	if err := json.Unmarshal(body, &list); err != nil {
		return err
	}
	for _, name := range []string{"noisy", "loud", "calm"} {
		seen := slices.ContainsFunc(list.Items, func(cm corev1.ConfigMap) bool { return cm.Name == name })
		if seen == (name == hidden) {
			return fmt.Errorf("the client sees ConfigMap %s: %v, want %v", name, seen, !seen)
		}
	}
	return nil
}

// wantReady checks what /readyz?verbose says of the configuration: why a source is refused,
// or, with "", that all is well.
func (s *site) wantReady(source, want string) {
	s.T.Helper()
	status, body, err := (&rig.Endpoint{URL: s.Hub.MetricsURL(), Client: http.DefaultClient}).Fetch(s.T.Context(), "/readyz?verbose", "text/plain")
	s.Must(err)
	line := "[+]filter configuration ok"
	if want != "" {
		line = "[-]filter configuration degraded: " + source
	}
	for got := range strings.Lines(string(body)) {
		if status == http.StatusOK && strings.HasPrefix(got, line) && strings.Contains(got, want) {
			return
		}
	}
	s.T.Errorf("/readyz?verbose = %d %s, want a line %q with %q", status, body, line, want)
}
