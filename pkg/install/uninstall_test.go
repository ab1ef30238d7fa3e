// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
)

const (
	atHub   = `server: "https://127.0.0.1:10268", certificate-authority: /etc/kubernetes/pki/ca.crt`
	nodePEM = `client-certificate: /pki/node.pem, client-key: /pki/node.pem`
)

// With kubelet at the hub, and no state and no backup, nothing may be removed: least of all
// what kubelet trusts.
func TestUninstallWithoutAWayBack(t *testing.T) {
	i := newInstaller(t, kubeconfigOf(atHub, nodePEM))
	i.command, i.o.Purge, i.out = "uninstall", true, io.Discard
	write(t, filepath.Join(i.o.Root, "/pki/node.pem"), certificate(t, "system:node:n", "system:nodes"))
	ca := filepath.Join(i.o.DataDir, "pki", "ca.crt")
	if err := i.host.mkdir(filepath.Dir(ca), 0o700); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(i.o.Root, ca), []byte("x"))
	if err := i.uninstall(t.Context()); !errors.Is(err, errNoWayBack) {
		t.Errorf("uninstall() = %v, want %v", err, errNoWayBack)
	}
	if !i.host.exists(ca) {
		t.Error("what kubelet trusts was removed")
	}
}

// What an installer has placed is found by what is written there, and nothing else is.
func TestStrays(t *testing.T) {
	i := newInstaller(t, "")
	pod, service := filepath.Join(i.o.Root, staticPod{i}.file()), filepath.Join(i.o.Root, unit{i}.file())
	for _, tc := range []struct {
		name, pod, service string
		want               int
	}{
		{"nothing", "", "", 0},
		{"a pod", "metadata: {annotations: {edgehub.io/placed: x}}", "", 1},
		{"somebody's pod", "metadata: {name: edgehub}", "", 0},
		{"both", "metadata: {annotations: {edgehub.io/placed: x}}", unitHead + "\n[Unit]\n", 2},
		{"somebody's service", "", "[Unit]\n", 0},
	} {
		for file, content := range map[string]string{pod: tc.pod, service: tc.service} {
			write(t, file, []byte(content))
		}
		if got := i.strays(); len(got) != tc.want {
			t.Errorf("%s: strays() = %d, want %d", tc.name, len(got), tc.want)
		}
	}
}

// A unit whose program is gone would not start after a reboot: it is not what was placed.
func TestUnitWithoutItsProgram(t *testing.T) {
	i := newInstaller(t, "")
	u := unit{i}
	content := unitHead + "\n[Service]\nExecStart=/usr/local/bin/edgehub-1 --v=2\n"
	write(t, filepath.Join(i.o.Root, u.file()), []byte(content))
	if got, err := u.placed(); err != nil || got == nil || len(got) != 0 {
		t.Errorf("placed() without the program = %q, %v, want something else than the unit", got, err)
	}
	write(t, filepath.Join(i.o.Root, "/usr/local/bin/edgehub-1"), []byte("x"))
	if got, err := u.placed(); err != nil || string(got) != content {
		t.Errorf("placed() = %q, %v, want the unit", got, err)
	}
}

// Without a link kubelet is not restarted: it would lose what it has.
func TestNoRestartWithoutALink(t *testing.T) {
	i := newInstaller(t, kubeconfigOf(`server: "https://127.0.0.1:1", certificate-authority: /etc/kubernetes/pki/ca.crt`, nodePEM))
	var steps []string
	i.o.Progress = func(step string) { steps = append(steps, step) }
	write(t, filepath.Join(i.o.Root, "/pki/node.pem"), certificate(t, "system:node:n", "system:nodes"))
	k, err := i.readKubelet()
	if err != nil {
		t.Fatal(err)
	}
	i.state.Pointed = true
	if err := i.restartIfPointed(t.Context(), k); !errors.Is(err, ErrLinkDown) || len(steps) > 0 {
		t.Errorf("restartIfPointed() = %v after %q, want %v at once", err, steps, ErrLinkDown)
	}
}

// Who has taken the hub's port is not followed elsewhere.
func TestScrapeFollowsNobody(t *testing.T) {
	asked := false
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked = true }))
	defer elsewhere.Close()
	s := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusFound))
	defer s.Close()
	if _, err := scrape(t.Context(), s.URL); err == nil || !strings.Contains(err.Error(), "302") || asked {
		t.Errorf("scrape() = %v, asked elsewhere %v, want an error of 302", err, asked)
	}
}
