// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/edgehub/edgehub/pkg/install"
	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/port"
)

// A watching is an `edgehub install --watch` that runs.
type watching struct {
	n     *fakeNode
	url   string
	stop  context.CancelFunc
	ended chan error
}

func (n *fakeNode) watch(change ...func(*install.Options)) *watching {
	n.t.Helper()
	p, err := port.Free()
	n.must(err)
	ctx, stop := context.WithCancel(n.t.Context())
	w := &watching{n: n, url: fmt.Sprintf("http://127.0.0.1:%d", p), stop: stop, ended: make(chan error, 1)}
	o := n.options
	o.Watch, o.Interval, o.FallbackAfter, o.ProbeListenAddress = true, 300*time.Millisecond, 4*time.Second, strings.TrimPrefix(w.url, "http://")
	for _, c := range change {
		c(&o)
	}
	n.must(o.Validate("install"))
	o.Progress = func(step string) { n.t.Logf("watch: %s", step) }
	go func() { w.ended <- install.Run(ctx, "install", o, io.Discard) }()
	n.t.Cleanup(func() { w.end() })
	return w
}

// end is SIGTERM, and waits for the end.
func (w *watching) end() error {
	w.stop()
	err := <-w.ended
	w.ended <- nil
	return err
}

// ready waits until /readyz says 200, and otherwise until it says so with that text.
func (w *watching) ready(want string) {
	w.n.t.Helper()
	w.n.poll("the watch is ready or says "+want, func(ctx context.Context) error {
		code, body, err := fetch(ctx, w.url+"/readyz")
		if err == nil && (want == "") != (code == 200) || !strings.Contains(body, want) {
			err = fmt.Errorf("/readyz = %d %s", code, body)
		}
		return err
	})
}

// settles waits until kubelet is at the hub, and /readyz has that text: it is of the last look.
func (w *watching) settles(text string) {
	w.n.t.Helper()
	w.n.poll("kubelet is at the hub, and /readyz says "+text, func(ctx context.Context) error {
		c, err := w.n.config()
		if err == nil && (c.Host != w.n.hubURL() || w.n.kubeletUses() != w.n.hubURL()) {
			err = fmt.Errorf("its kubeconfig leads to %s, and it uses %s", c.Host, w.n.kubeletUses())
		}
		_, body, err2 := fetch(ctx, w.url+"/readyz")
		if err2 == nil && !strings.Contains(body, text) {
			err2 = errors.New(body)
		}
		return errors.Join(err, err2)
	})
	w.n.installed()
}

func fetch(ctx context.Context, url string) (code int, body string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// Somebody changes what is placed, or kubelet's kubeconfig; the hub is silent for too long, and
// comes back.
func TestWatch(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t, cp.URL())
	w := n.watch()
	w.settles("ok")
	placed := n.manifest()
	manifest := n.at("/etc/kubernetes/manifests/edgehub.yaml")
	for what, change := range map[string]func() error{
		"removed": func() error { return os.Remove(manifest) },
		"changed": func() error {
			return os.WriteFile(manifest, []byte(strings.Replace(placed, "good:1", "good:2", 1)), 0o600)
		},
	} {
		n.must(change())
		n.poll("what was "+what+" is as it was", func(context.Context) error {
			if b, err := os.ReadFile(manifest); err != nil || string(b) != placed {
				return errors.New("it is not")
			}
			return nil
		})
		w.settles("ok")
	}

	// As kubeadm does when it renews certificates.
	n.original = append([]byte("# written by kubeadm again\n"), n.original...)
	n.writeConf(n.original)
	n.must(n.startKubelet())
	w.settles("ok")

	n.hold(true)
	w.ready("the hub does not answer")
	n.poll("kubelet is pointed at the API server", func(context.Context) error {
		if n.kubeletUses() != cp.URL() {
			return errors.New(n.kubeletUses())
		}
		return nil
	})
	n.works()
	n.hold(false)
	w.ready("kubelet was pointed at the API server")
	w.settles("ok")
	_, text, err := fetch(t.Context(), w.url+"/metrics")
	n.must(err)
	for _, want := range []string{"edgehub_install_ready 1", "edgehub_install_fallbacks_total 1", "edgehub_install_kubeconfig_rewrites_total 1"} {
		if !strings.Contains(text, want+"\n") {
			t.Errorf("no %s in the metrics:\n%s", want, text)
		}
	}
	n.must(w.end())
	n.installed()
	n.must(second(n.run("uninstall")))
	n.untouched()
}

// Somebody writes kubelet's kubeconfig again and again: kubelet is not restarted for ever.
func TestWatchGivesWay(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t, cp.URL())
	w := n.watch()
	w.ready("")
	n.poll("it gives way", func(ctx context.Context) error {
		if b, err := os.ReadFile(n.at(kubeletConf)); err != nil || !bytes.Equal(b, n.original) {
			n.writeConf(n.original)
		}
		_, body, err := fetch(ctx, w.url+"/readyz")
		if err == nil && !strings.Contains(body, "again and again") {
			err = errors.New(body)
		}
		return err
	})
	n.works()
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.starts > 6 {
		t.Errorf("kubelet was started %d times", n.starts)
	}
}

// A version that does not work: the watch is not ready, and looks after the one before.
func TestWatchUpgradeFails(t *testing.T) {
	t.Parallel()
	n := newFakeNode(t, cp.URL())
	n.programs["bad"] = n.program("bad", broken["ends"])
	n.must(second(n.run("install")))
	placed := n.manifest()
	w := n.watch(image("bad"), soon, skipCandidate)
	w.settles("has failed on this node before")
	n.must(os.Remove(n.at("/etc/kubernetes/manifests/edgehub.yaml")))
	n.poll("the version before is looked after", func(context.Context) error {
		if b, err := os.ReadFile(n.at("/etc/kubernetes/manifests/edgehub.yaml")); err != nil || string(b) != placed {
			return errors.New("it is gone")
		}
		return nil
	})
	w.settles("has failed on this node before")
	n.must(w.end())
	w = n.watch(image("good:2"))
	w.settles("ok")
	n.must(w.end())
}

// At SIGTERM all is undone if the DaemonSet is gone or does not want the node, and nothing
// whatever else the answer is.
func TestWatchLeaves(t *testing.T) {
	t.Parallel()
	remove := func(o metav1.DeleteOptions) func(*fakeNode) error {
		return func(n *fakeNode) error {
			return cp.Client.AppsV1().DaemonSets("default").Delete(n.t.Context(), n.name, o)
		}
	}
	foreground := metav1.DeletePropagationForeground
	nobody, err := cp.NodeConfig("nobody")
	if err != nil {
		t.Fatal(err)
	}
	forbidden := filepath.Join(t.TempDir(), "kubeconfig")
	unknown := forbidden + "-unknown"
	stranger := cp.AdminConfig()
	stranger.CertFile, stranger.KeyFile, stranger.CertData, stranger.KeyData = "", "", nil, nil
	stranger.BearerToken = "nobody's"
	if err := errors.Join(controlplane.WriteKubeconfig(forbidden, nobody), controlplane.WriteKubeconfig(unknown, stranger)); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name, kubeconfig string
		change           func(*fakeNode) error
		leaves           bool
	}{
		{"it is there", cp.AdminKubeconfig(), func(*fakeNode) error { return nil }, false},
		{"403", forbidden, remove(metav1.DeleteOptions{}), false},
		{"401", unknown, remove(metav1.DeleteOptions{}), false},
		{"it is gone", cp.AdminKubeconfig(), remove(metav1.DeleteOptions{}), true},
		{"it is being deleted", cp.AdminKubeconfig(), remove(metav1.DeleteOptions{PropagationPolicy: &foreground}), true},
		{"the node is another's", cp.AdminKubeconfig(), func(n *fakeNode) error {
			_, err := cp.Client.CoreV1().Nodes().Patch(t.Context(), n.name, types.MergePatchType, []byte(`{"metadata":{"labels":{"edge":null}}}`), metav1.PatchOptions{})
			return err
		}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			n := newFakeNode(t, cp.URL())
			n.createDaemonSet()
			w := n.watch(func(o *install.Options) { o.DaemonSet, o.Kubeconfig = "default/"+n.name, tc.kubeconfig })
			w.settles("ok")
			n.must(tc.change(n))
			n.must(w.end())
			if tc.leaves {
				n.untouched()
			} else {
				n.installed()
			}
		})
	}
}

// createDaemonSet makes one of the node's name, for nodes that are edge nodes.
func (n *fakeNode) createDaemonSet() {
	n.t.Helper()
	labels := map[string]string{"app": n.name}
	_, err := cp.Client.AppsV1().DaemonSets("default").Create(n.t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: n.name},
		Spec: appsv1.DaemonSetSpec{Selector: &metav1.LabelSelector{MatchLabels: labels}, Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: labels},
			Spec: corev1.PodSpec{
				NodeSelector: map[string]string{"edge": "yes"},
				Containers:   []corev1.Container{{Name: "c", Image: "c"}},
			},
		}},
	}, metav1.CreateOptions{})
	n.must(err)
}
