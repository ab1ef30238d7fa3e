// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package identity has clients show the real hub, in front of a real API server
// with its Node authorizer and RBAC, what they are known by: certificates that end,
// are renewed and are no longer trusted, tokens that were seen before and tokens
// that were not, online, while the link is cut, and after a restart. And it looks
// for what must not lie on the disk.
//
// The tests run side by side: most of their time is spent waiting for something to
// expire.
package identity

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	user       = "identity-user"
	otherNode  = "n2"
	podsOfN1   = "/api/v1/pods?fieldSelector=spec.nodeName%3D" + rig.NodeName
	nodeItself = "/api/v1/nodes/" + rig.NodeName
)

// shared is the control plane of all tests, made by the first that asks.
var shared struct {
	once sync.Once
	dir  string
	cp   *controlplane.ControlPlane
	err  error
}

// atOnce is how many tests run side by side, on as few cores as there may be.
const atOnce = "8"

func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", atOnce); err != nil {
		panic(err) // there is such a flag
	}
	code := m.Run()
	if err := endShared(code == 0); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code) //nolint:forbidigo // TestMain is main here
}

// endShared keeps the logs after a failure.
func endShared(passed bool) (err error) {
	if shared.cp != nil {
		err = shared.cp.Stop()
	}
	switch {
	case shared.dir == "":
	case passed && err == nil:
		err = os.RemoveAll(shared.dir)
	default:
		fmt.Println("The logs are in", shared.dir)
	}
	return err
}

func startShared(ctx context.Context) (err error) {
	if shared.dir, err = os.MkdirTemp("", "edgehub-identity-"); err != nil {
		return err
	}
	shared.cp, err = controlplane.Start(ctx, controlplane.Config{
		Dir: filepath.Join(shared.dir, "controlplane"), Audit: true, Users: []controlplane.StaticUser{{Name: user}},
		// The signer of certificates, and what the rig waits for.
		ControllerManager: true, ControllerManagerArgs: []string{"--controllers=certificatesigningrequest-signing-controller,serviceaccount-controller"},
	})
	if err != nil {
		return err
	}
	for _, name := range []string{rig.NodeName, otherNode} {
		_, nerr := shared.cp.Client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		err = errors.Join(err, nerr)
	}
	return err
}

// A site is a rig with a namespace of its own, in which are the ConfigMap c and the
// Secret s.
type site struct {
	*rig.Rig
	namespace string
}

var sites atomic.Int64 // made so far

// newSite makes a site on the shared control plane. The hub is the test's to make.
func newSite(t *testing.T) *site {
	t.Helper()
	shared.once.Do(func() { shared.err = startShared(context.WithoutCancel(t.Context())) })
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	r := rig.On(t, shared.cp)
	name, _, _ := strings.Cut(r.T.Name(), "/")
	s := &site{Rig: r, namespace: fmt.Sprintf("%s-%d", strings.ToLower(name), sites.Add(1))}
	ctx, core := s.T.Context(), s.ControlPlane.Client.CoreV1()
	s.Must(s.ControlPlane.CreateNamespace(ctx, s.namespace))
	_, err := core.ConfigMaps(s.namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c"}, Data: map[string]string{"of": s.namespace}}, metav1.CreateOptions{})
	s.Must(err)
	_, err = core.Secrets(s.namespace).Create(ctx, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"of": s.namespace}}, metav1.CreateOptions{})
	s.Must(err)
	return s
}

// path is that of something in the site's namespace.
func (s *site) path(what string) string { return "/api/v1/namespaces/" + s.namespace + "/" + what }

// start makes the site's hub and starts it for the length of the test, which ends in
// failure if its link does not come up.
func (s *site) start(args ...string) {
	s.T.Helper()
	s.Hub = s.NewHub(args...)
	process.Run(s.T, s.Hub)
	s.WaitLink(true)
}

// restart kills the hub and starts it again, while the link is as it is.
func (s *site) restart(up bool) {
	s.T.Helper()
	s.Must(s.Hub.Kill())
	s.Must(s.Hub.Start(s.T.Context()))
	s.WaitLink(up)
}

// asks wants a GET answered with a status, and returns the body.
func (s *site) asks(who string, e *rig.Endpoint, path string, want int) string {
	s.T.Helper()
	status, body, err := e.Fetch(s.T.Context(), path, rig.JSON)
	if err != nil || status != want {
		s.T.Errorf("%s: GET %s = %d, %v, want %d: %.300s", who, path, status, err, want, body)
	}
	return string(body)
}

// comes waits until a GET is answered with a status.
func (s *site) comes(who string, e *rig.Endpoint, path string, want int) {
	s.T.Helper()
	s.Must(process.Poll(s.T.Context(), fmt.Sprintf("%s: GET %s is answered with %d", who, path, want), func(ctx context.Context) error {
		status, body, err := e.Fetch(ctx, path, rig.JSON)
		if err == nil && status != want {
			err = fmt.Errorf("it is answered with %d: %.200s", status, body)
		}
		return err
	}))
}

// metric is the sum of a metric's series with some labels.
func (s *site) metric(name string, labels ...string) float64 {
	s.T.Helper()
	v, err := s.Hub.Metric(s.T.Context(), name, labels...)
	s.Must(err)
	return v
}

// waitMetric waits until a metric is so much at least.
func (s *site) waitMetric(least float64, name string, labels ...string) {
	s.T.Helper()
	s.Must(process.Poll(s.T.Context(), fmt.Sprintf("%s %v is %v", name, labels, least), func(ctx context.Context) error {
		v, err := s.Hub.Metric(ctx, name, labels...)
		if err == nil && v < least {
			err = fmt.Errorf("it is %v", v)
		}
		return err
	}))
}

// pod makes a pod on a node with a ServiceAccount. The node may read the namespace's
// ConfigMap c and the Secrets named for it.
func (s *site) pod(name, on, account string, secrets ...string) *corev1.Pod {
	s.T.Helper()
	spec := corev1.PodSpec{NodeName: on, ServiceAccountName: account, Containers: []corev1.Container{{Name: "c", Image: "example.invalid/none:1"}}}
	volume := func(name string, source corev1.VolumeSource) {
		spec.Volumes = append(spec.Volumes, corev1.Volume{Name: name, VolumeSource: source})
	}
	volume("configmap", corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "c"}}})
	for _, secret := range secrets {
		volume("secret-"+secret, corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: secret}})
	}
	p, err := s.ControlPlane.Client.CoreV1().Pods(s.namespace).Create(s.T.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{})
	s.Must(err)
	return p
}

// deletePod removes a pod at once.
func (s *site) deletePod(name string) {
	s.T.Helper()
	now := int64(0)
	s.Must(s.ControlPlane.Client.CoreV1().Pods(s.namespace).Delete(s.T.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: &now}))
}

// account makes a ServiceAccount that may read ConfigMaps, and returns its name as a
// user.
func (s *site) account(name string) string {
	s.T.Helper()
	_, err := s.ControlPlane.Client.CoreV1().ServiceAccounts(s.namespace).Create(s.T.Context(), &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
	s.Must(err)
	username := "system:serviceaccount:" + s.namespace + ":" + name
	s.Grant(s.namespace, rig.User(username), "configmaps")
	return username
}

// token asks the API server, past the hub, for a token of a ServiceAccount.
func (s *site) token(account string, spec authenticationv1.TokenRequestSpec) string {
	s.T.Helper()
	r, err := s.ControlPlane.Client.CoreV1().ServiceAccounts(s.namespace).CreateToken(s.T.Context(), account, &authenticationv1.TokenRequest{Spec: spec}, metav1.CreateOptions{})
	s.Must(err)
	return r.Status.Token
}

// config is that of a client with a token, past the hub.
func (s *site) config(token string) *rest.Config {
	c := s.ControlPlane.TokenConfig(user)
	c.BearerToken = token
	return c
}

// with is a client of the hub with a token.
func (s *site) with(token string) *rig.Endpoint { return s.Through(s.config(token)) }
