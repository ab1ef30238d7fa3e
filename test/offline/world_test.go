// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package offline holds the real hub, between a real API server with the Node
// authorizer and raw requests, to what docs/offline.md promises for the time
// without a link: row by row, with the hub killed in between, and with a look at
// what the API server holds once the link is back.
package offline

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/node"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// The people of the tests, besides the node.
const (
	operator = "operator" // may do everything
	alice    = "alice"    // reads ConfigMaps of a
	carol    = "carol"    // reads ConfigMaps of a and b
	dave     = "dave"     // reads ConfigMaps of a, until that is taken away
	nobody   = "mallory"  // may do nothing
)

// otherNode is a node whose hub knows nothing of it.
const otherNode = "n2"

// A caller is somebody, directly at the API server and through a hub.
type caller struct {
	name            string
	config          *rest.Config // directly
	direct, through *rig.Endpoint
}

// A world is a rig with all that the rows are about, and a second hub, of another
// node, on the same link: it has hardly been asked anything.
type world struct {
	*rig.Rig
	t        *testing.T      // the test; Rig.T is the part of it that runs
	ctx      context.Context // of the test
	other    *rig.Rig        // the second hub
	callers  map[string]*caller
	node     *caller
	stranger *caller // the other node, through its hub
	restarts int     // of the hubs, while cut

	moved    map[string]bool // objects that the test itself changes while cut
	healedAt time.Time
}

func newWorld(t *testing.T) *world {
	t.Helper()
	users := []controlplane.StaticUser{{Name: operator, Groups: []string{"system:masters"}}}
	for _, name := range []string{alice, carol, dave, nobody} {
		users = append(users, controlplane.StaticUser{Name: name})
	}
	r := rig.New(t, users)
	w := &world{Rig: r, t: t, ctx: t.Context(), callers: map[string]*caller{}, moved: map[string]bool{}}
	w.populate()
	w.startOther()
	process.Run(t, w.Hub)
	w.WaitLink(true)
	for _, u := range users {
		w.callers[u.Name] = w.newCaller(u.Name, w.ControlPlane.TokenConfig(u.Name))
	}
	w.node = w.newCaller(rig.NodeUser, w.Node)
	w.callers[rig.NodeUser] = w.node
	// Whoever has never been seen cannot be known while the link is cut.
	for _, c := range w.callers {
		w.same(c, ask{path: "/version"})
	}
	return w
}

func (w *world) newCaller(name string, config *rest.Config) *caller {
	return &caller{name: name, config: config, direct: w.Direct(config), through: w.Through(config)}
}

// populate makes what there is in the cluster.
func (w *world) populate() {
	w.T.Helper()
	core := w.ControlPlane.Client.CoreV1()
	for _, ns := range []string{"a", "b"} {
		for i := range 3 {
			meta := metav1.ObjectMeta{Name: fmt.Sprintf("o-%d", i), Labels: map[string]string{"n": fmt.Sprint(i)}}
			_, err := core.ConfigMaps(ns).Create(w.ctx, &corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{"of": ns}}, metav1.CreateOptions{})
			w.Must(err)
			_, err = core.Secrets(ns).Create(w.ctx, &corev1.Secret{ObjectMeta: meta, StringData: map[string]string{"of": ns}}, metav1.CreateOptions{})
			w.Must(err)
		}
	}
	for _, name := range []string{"reader", "other"} {
		_, err := core.ServiceAccounts("a").Create(w.ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		w.Must(err)
	}
	for _, name := range []string{"p", "q"} {
		_, err := core.Pods("a").Create(w.ctx, newPod(name), metav1.CreateOptions{})
		w.Must(err)
	}
	_, err := core.Nodes().Create(w.ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: otherNode}}, metav1.CreateOptions{})
	w.Must(err)
	_, err = w.ControlPlane.Client.StorageV1().CSINodes().Create(w.ctx, &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: rig.NodeName}}, metav1.CreateOptions{})
	w.Must(err)
	c, err := dynamic.NewForConfig(w.ControlPlane.AdminConfig())
	w.Must(err)
	for _, ns := range []string{"a", "b"} {
		_, err = c.Resource(rig.Widgets).Namespace(ns).Create(w.ctx, &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "example.com/v1", "kind": "Widget", "metadata": map[string]any{"name": "w"}, "spec": map[string]any{"color": "red"},
		}}, metav1.CreateOptions{})
		w.Must(err)
	}
	for ns, names := range map[string][]string{"a": {alice, carol, dave, "system:serviceaccount:a:reader"}, "b": {carol}} {
		for _, name := range names {
			w.Grant(ns, rig.User(name), "configmaps")
		}
	}
	w.letNodesListCSINodes()
}

func newPod(name string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
		NodeName: rig.NodeName, ServiceAccountName: "reader", Containers: []corev1.Container{{Name: "c", Image: "example.invalid/none:1"}},
		Volumes: []corev1.Volume{
			{Name: "s", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "o-0"}}},
			{Name: "c", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "o-0"}}}},
		},
	}}
}

// letNodesListCSINodes makes it possible that a node holds a complete copy of all
// CSINodes in which its own is not.
func (w *world) letNodesListCSINodes() {
	w.T.Helper()
	meta := metav1.ObjectMeta{Name: "nodes-list-csinodes"}
	_, err := w.ControlPlane.Client.RbacV1().ClusterRoles().Create(w.ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{"storage.k8s.io"}, Resources: []string{"csinodes"}, Verbs: []string{"get", "list", "watch"}},
	}}, metav1.CreateOptions{})
	w.Must(err)
	_, err = w.ControlPlane.Client.RbacV1().ClusterRoleBindings().Create(w.ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta, Subjects: []rbacv1.Subject{rig.Group("system:nodes")}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
	}, metav1.CreateOptions{})
	w.Must(err)
}

// startOther starts the hub of the other node.
func (w *world) startOther() {
	w.T.Helper()
	config, err := w.ControlPlane.NodeConfig(otherNode)
	w.Must(err)
	hub, err := node.NewHub(w.ctx, node.HubConfig{
		Dir: filepath.Join(w.ControlPlane.Dir(), "hub-"+otherNode), ServerURLs: []string{w.Link.URL()},
		ServerCAFile: w.ControlPlane.CAFile(), CertFile: config.CertFile, KeyFile: config.KeyFile,
	})
	w.Must(err)
	other := *w.Rig
	w.other = &other
	w.other.Hub, w.other.Node = hub, config
	process.Run(w.T, hub)
	w.other.WaitLink(true)
	w.stranger = &caller{name: "system:node:" + otherNode, config: config, direct: w.Direct(config), through: w.other.Through(config)}
}

// cut ends the link; both hubs know.
func (w *world) cut() {
	w.T.Helper()
	w.Offline()
	w.other.WaitLink(false)
}

// restart kills both hubs and starts them.
func (w *world) restart() {
	w.T.Helper()
	w.restarts++
	w.Must(errors.Join(w.Hub.Kill(), w.other.Hub.Kill()))
	w.Must(errors.Join(w.Hub.Start(w.ctx), w.other.Hub.Start(w.ctx)))
}

// heal brings the link back, and waits until the hubs have nothing more to say to
// the API server.
func (w *world) heal() {
	w.T.Helper()
	w.healedAt = time.Now()
	w.Online()
	w.other.WaitLink(true)
	w.WaitFeeds()
	waitSent(w.Rig)
}

// waitSent waits until no Event waits in the hub.
func waitSent(r *rig.Rig) {
	r.T.Helper()
	r.Must(process.Poll(r.T.Context(), "all Events are sent", func(ctx context.Context) error {
		n, err := r.Hub.Metric(ctx, "edgehub_outbox_events")
		if err == nil && n > 0 {
			err = fmt.Errorf("%v wait", n)
		}
		return err
	}))
}
