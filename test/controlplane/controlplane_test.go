// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
)

func clientFor(t *testing.T, c *rest.Config) kubernetes.Interface {
	t.Helper()
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		t.Fatal(err)
	}
	return client
}

func configMap(name string) *corev1.ConfigMap {
	return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// One control plane for everything that does not disturb the others.
func TestControlPlane(t *testing.T) {
	start := time.Now()
	cp := controlplane.New(t, controlplane.Config{
		Audit: true,
		Users: []controlplane.StaticUser{{Name: "ann", Groups: []string{"readers"}}},
	})
	t.Logf("ready after %v", time.Since(start).Round(time.Millisecond))
	t.Run("pods can be created", func(t *testing.T) { testCreatePod(t, cp) })
	t.Run("static user", func(t *testing.T) { testStaticUser(t, cp) })
	t.Run("node", func(t *testing.T) { testNode(t, cp) })
	t.Run("requests", func(t *testing.T) { testRequests(t, cp) })
	t.Run("API server restarts", func(t *testing.T) { testRestart(t, cp) })
	t.Run("snapshot", func(t *testing.T) { testSnapshot(t, cp) })
}

func testCreatePod(t *testing.T, cp *controlplane.ControlPlane) {
	if err := cp.CreateNamespace(t.Context(), "work"); err != nil {
		t.Fatal(err)
	}
	for _, namespace := range []string{"default", "work"} {
		pod := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: "p"},
			Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
		}
		if _, err := cp.Client.CoreV1().Pods(namespace).Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
			t.Errorf("Create(pod) in %s = %v, want nil", namespace, err)
		}
	}
}

func testStaticUser(t *testing.T, cp *controlplane.ControlPlane) {
	ann := clientFor(t, cp.TokenConfig("ann"))
	if _, err := ann.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("List(pods) as ann = %v, want forbidden", err)
	}
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "readers"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:aggregate-to-view"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "Group", Name: "readers"}},
	}
	if _, err := cp.Client.RbacV1().ClusterRoleBindings().Create(t.Context(), binding, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	err := process.Poll(t.Context(), "ann may list pods", func(ctx context.Context) error {
		_, err := ann.CoreV1().Pods("default").List(ctx, metav1.ListOptions{})
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

func testNode(t *testing.T, cp *controlplane.ControlPlane) {
	config, err := cp.NodeConfig("n1")
	if err != nil {
		t.Fatal(err)
	}
	node := clientFor(t, config)
	for name, want := range map[string]bool{"n1": true, "n2": false} {
		_, err := node.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if got := err == nil; got != want {
			t.Errorf("Create(node %s) as n1 = %v, want success: %v", name, err, want)
		}
	}
	cert, key, err := cp.NodeCredentialsUntil("n1", time.Now().Add(-time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	config.CertFile, config.KeyFile = cert, key
	_, err = clientFor(t, config).CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
	if !apierrors.IsUnauthorized(err) {
		t.Errorf("Get(node) with an expired certificate = %v, want unauthorized", err)
	}
	cert, key, err = cp.ClientCert("someone", "system:masters")
	if err != nil {
		t.Fatal(err)
	}
	config.CertFile, config.KeyFile = cert, key
	if _, err := clientFor(t, config).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Errorf("List(nodes) of a member of system:masters = %v, want nil", err)
	}
}

func testRequests(t *testing.T, cp *controlplane.ControlPlane) {
	since := time.Now()
	maps := cp.Client.CoreV1().ConfigMaps("default")
	if _, err := maps.List(t.Context(), metav1.ListOptions{}); err != nil {
		t.Fatal(err)
	}
	w, err := maps.Watch(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var requests []auditv1.Event
	waitFor := func(what string, stage auditv1.Stage) {
		t.Helper()
		err := process.Poll(t.Context(), what, func(context.Context) (err error) {
			if requests, err = cp.Requests(since); err != nil {
				return err
			}
			for _, r := range requests {
				if r.Verb == "watch" && r.ObjectRef.Resource == "configmaps" && r.User.Username == "admin" && r.Stage == stage {
					return nil
				}
			}
			return fmt.Errorf("%d requests", len(requests))
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	waitFor("the watch is logged as running", auditv1.StageResponseStarted)
	w.Stop()
	waitFor("the watch is logged as over", auditv1.StageResponseComplete)
	for verb, want := range map[string]int{"list": 1, "watch": 1, "create": 0, "": 2} {
		if got := controlplane.Count(requests, "admin", verb, "configmaps"); got != want {
			t.Errorf("Count(admin, %q, configmaps) = %d, want %d", verb, got, want)
		}
	}
}

func testRestart(t *testing.T, cp *controlplane.ControlPlane) {
	maps := cp.Client.CoreV1().ConfigMaps("default")
	if _, err := maps.Create(t.Context(), configMap("kept"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for name, end := range map[string]func() error{"stop": cp.StopAPIServer, "kill": cp.KillAPIServer} {
		start := time.Now()
		if err := end(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		ended := time.Now()
		if _, err := maps.Get(t.Context(), "kept", metav1.GetOptions{}); err == nil {
			t.Errorf("Get() after %s = nil, want an error", name)
		}
		if err := cp.StartAPIServer(t.Context()); err != nil {
			t.Fatal(err)
		}
		t.Logf("%s took %v, the start %v", name, ended.Sub(start).Round(time.Millisecond), time.Since(ended).Round(time.Millisecond))
		if _, err := maps.Get(t.Context(), "kept", metav1.GetOptions{}); err != nil {
			t.Errorf("Get() after %s and start = %v, want nil", name, err)
		}
	}
}

func testSnapshot(t *testing.T, cp *controlplane.ControlPlane) {
	maps := cp.Client.CoreV1().ConfigMaps("default")
	if _, err := maps.Create(t.Context(), configMap("before"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	snapshot, err := cp.SnapshotEtcd(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := maps.Create(t.Context(), configMap("after"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := cp.RestoreEtcd(t.Context(), snapshot); err != nil {
		t.Fatal(err)
	}
	if _, err := maps.Get(t.Context(), "before", metav1.GetOptions{}); err != nil {
		t.Errorf("Get(before) after the restore = %v, want nil", err)
	}
	if _, err := maps.Get(t.Context(), "after", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("Get(after) after the restore = %v, want not found", err)
	}
}

func TestControllerManagerAndScheduler(t *testing.T) {
	start := time.Now()
	cp := controlplane.New(t, controlplane.Config{ControllerManager: true, Scheduler: true})
	t.Logf("ready after %v", time.Since(start).Round(time.Millisecond))
	if err := cp.CreateNamespace(t.Context(), "work"); err != nil {
		t.Fatal(err)
	}
}

func TestStartTellsWhyNot(t *testing.T) {
	cp, err := controlplane.Start(t.Context(), controlplane.Config{APIServerArgs: []string{"--no-such-flag"}})
	if err == nil {
		t.Fatal(errors.Join(errors.New("Start() with a wrong flag = nil, want an error"), cp.Stop()))
	}
	for _, want := range []string{"kube-apiserver is ready", "it ended", "unknown flag: --no-such-flag"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("Start() = %q, want %q in it", err, want)
		}
	}
}
