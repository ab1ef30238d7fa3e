// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/link"
	"github.com/edgehub/edgehub/test/port"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// A stage is a rig with a capture between link and API server, a good node that
// goes through the hub, and everything that an attacker may have got hold of.
type stage struct {
	*rig.Rig
	capture *capture
	good    *goodNode
	plan    plan
	direct  map[int][]int // what the API server says to an attempt, by its number
	dir     string        // of what the attacker may read
}

// theStage is the one of all tests: a control plane takes long to start.
var theStage struct {
	once   sync.Once
	s      *stage
	dir    string
	closer []func() error
}

// onStage returns the stage, set up by the first test that asks. The link is up.
func onStage(t *testing.T) *stage {
	t.Helper()
	theStage.once.Do(func() { theStage.s = newStage(t) })
	if theStage.s == nil {
		t.Fatal("the first test could not set the stage up")
	}
	theStage.s.T = t
	return theStage.s
}

// closeStage ends what onStage began. After a failure the logs are kept.
func closeStage(passed bool) (err error) {
	for i := len(theStage.closer) - 1; i >= 0; i-- {
		err = errors.Join(err, theStage.closer[i]())
	}
	switch {
	case theStage.dir == "":
	case passed && err == nil:
		err = os.RemoveAll(theStage.dir)
	default:
		fmt.Println("The logs are in", theStage.dir)
	}
	return err
}

func atEnd(f func() error) { theStage.closer = append(theStage.closer, f) }

func newStage(t *testing.T) *stage {
	t.Helper()
	s := &stage{Rig: &rig.Rig{T: t}, direct: map[int][]int{}}
	var err error
	theStage.dir, err = os.MkdirTemp("", "edgehub-security-")
	s.Must(err)
	s.ControlPlane, err = controlplane.Start(t.Context(), controlplane.Config{
		Dir: filepath.Join(theStage.dir, "controlplane"), Audit: true, Users: []controlplane.StaticUser{{Name: "low"}},
	})
	s.Must(err)
	atEnd(s.ControlPlane.Stop)
	s.Rig.Node, err = s.ControlPlane.NodeConfig(rig.NodeName)
	s.Must(err)
	s.capture, err = newCapture(s.ControlPlane, s.Rig.Node)
	s.Must(err)
	atEnd(func() error { s.capture.close(); return nil })
	s.Link, err = link.New(context.WithoutCancel(t.Context()), s.capture.addr())
	s.Must(err)
	atEnd(func() error { s.Link.Close(); return nil })
	p, err := port.Free()
	s.Must(err)
	second := net.JoinHostPort("127.0.0.2", strconv.Itoa(p))
	s.Hub = s.NewHub("--allow-non-local-listen", "--link-local-address="+second, "--request-timeout="+requestTimeout.String())
	s.plan = plan{
		HTTPS: []string{s.Hub.Addr(), second}, Metrics: s.Hub.MetricsURL()[len("http://"):], Upstream: s.ControlPlane.Addr(),
		Marker: "attacker-" + rand.Text(), Tokens: map[string]string{}, Certs: map[string]certificate{},
	}
	s.makeObjects()
	s.Must(s.Hub.Start(t.Context()))
	atEnd(s.Hub.Close)
	s.WaitLink(true)
	s.forgeTokens()
	s.forgeCertificates()
	s.layOut()
	s.good = newGoodNode(s)
	s.warmUp()
	return s
}

// makeObjects makes what is attacked.
func (s *stage) makeObjects() {
	s.T.Helper()
	ctx, client := s.T.Context(), s.ControlPlane.Client
	for _, ns := range []string{"a", "b"} {
		s.Must(s.ControlPlane.CreateNamespace(ctx, ns))
	}
	_, err := client.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: rig.NodeName}}, metav1.CreateOptions{})
	s.Must(err)
	meta := func(namespace, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: namespace, Name: name}
	}
	for i := range 3 {
		s.plan.Secrets = append(s.plan.Secrets, "value-"+rand.Text())
		_, err := client.CoreV1().Secrets("a").Create(ctx, &corev1.Secret{ObjectMeta: meta("a", fmt.Sprintf("s-%d", i)), StringData: map[string]string{"password": s.plan.Secrets[i]}}, metav1.CreateOptions{})
		s.Must(err)
	}
	s.plan.Secrets = append(s.plan.Secrets, "hidden-"+rand.Text())
	for _, c := range []corev1.ConfigMap{
		{ObjectMeta: meta("a", "target"), Data: map[string]string{"by": "operator"}},
		{ObjectMeta: meta("b", "open")},
		{ObjectMeta: meta("a", "hidden"), Data: map[string]string{"value": s.plan.Secrets[3]}},
	} {
		_, err := client.CoreV1().ConfigMaps(c.Namespace).Create(ctx, &c, metav1.CreateOptions{})
		s.Must(err)
	}
	for _, name := range []string{"reader", "plain"} {
		_, err := client.CoreV1().ServiceAccounts("a").Create(ctx, &corev1.ServiceAccount{ObjectMeta: meta("a", name)}, metav1.CreateOptions{})
		s.Must(err)
	}
	for _, name := range []string{"alive", "gone"} {
		_, err := client.CoreV1().Pods("a").Create(ctx, podOf(name), metav1.CreateOptions{})
		s.Must(err)
	}
	_, err = client.CoordinationV1().Leases("kube-node-lease").Create(ctx, &coordinationv1.Lease{ObjectMeta: meta("kube-node-lease", rig.NodeName)}, metav1.CreateOptions{})
	s.Must(err)
	_, err = client.CoreV1().Events("a").Create(ctx, &corev1.Event{ObjectMeta: meta("a", "e-0"), InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "a", Name: "alive"}}, metav1.CreateOptions{})
	s.Must(err)
	s.Grant("b", rig.User("low"), "configmaps")
	s.Grant("a", rig.User("system:serviceaccount:a:reader"), "secrets", "configmaps")
}

// podOf is on the node, which may read the secret and the ConfigMap for it.
func podOf(name string) *corev1.Pod {
	source := corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "s-0"}}
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name}, Spec: corev1.PodSpec{
		NodeName: rig.NodeName, ServiceAccountName: "reader",
		Containers: []corev1.Container{{Name: "c", Image: "example.invalid/none:1"}}, Volumes: []corev1.Volume{{Name: "s", VolumeSource: source}},
	}}
}

// layOut puts where any user may read and run it what the attacker needs.
func (s *stage) layOut() {
	s.T.Helper()
	s.dir = filepath.Join(theStage.dir, "attacker")
	s.Must(os.Mkdir(s.dir, 0o755))
	s.Must(os.Chmod(theStage.dir, 0o711)) // the rest is in folders of root's own
	self, err := os.Executable()
	s.Must(err)
	s.plan.CAFile, s.plan.RootFile = filepath.Join(s.dir, "hub-ca.crt"), filepath.Join(s.dir, "cluster-ca.crt")
	for to, from := range map[string]string{s.plan.CAFile: s.Hub.CAFile(), s.plan.RootFile: s.ControlPlane.CAFile(), filepath.Join(s.dir, "attacker"): self} {
		s.Must(copyFile(to, from))
	}
}

// copyFile makes a copy that everybody may read and run.
func copyFile(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// warmUp has the hub record what the node and the user low are shown.
func (s *stage) warmUp() {
	s.T.Helper()
	ctx := s.T.Context()
	s.Must(s.good.watch(ctx))
	for _, path := range goodPaths() {
		s.Must(process.Poll(ctx, "the node gets "+path, func(ctx context.Context) error { return s.good.ask(ctx, path) }))
	}
	e := s.lowThrough()
	for _, path := range []string{readable, readables} {
		if status, body, err := e.Fetch(ctx, path, rig.JSON); err != nil || status != 200 {
			s.T.Fatalf("low: GET %s = %d, %v, want 200: %.200s", path, status, err, body)
		}
	}
	s.Settle()
}

// lowThrough is the user low when nothing is wrong with what it asks.
func (s *stage) lowThrough() *rig.Endpoint {
	s.T.Helper()
	config := s.ControlPlane.TokenConfig("low")
	config.UserAgent = lowAgent
	return s.Through(config)
}

// A state is how the hub is placed when it is attacked.
type state string

const (
	online    state = "online"
	offline   state = "offline"
	restarted state = "offline after a restart"
)

// inEachState runs f online, with the link cut, and when the hub was killed and
// started meanwhile. The link is up again at the end.
func (s *stage) inEachState(f func(state)) {
	s.T.Helper()
	s.subtest(string(online), func() { f(online) })
	s.Offline()
	defer s.Online()
	s.subtest(string(offline), func() { f(offline) })
	s.Must(s.Hub.Kill())
	s.Must(s.Hub.Start(s.T.Context()))
	s.WaitLink(false)
	s.subtest(string(restarted), func() { f(restarted) })
}

// subtest runs f with T as the subtest.
func (s *stage) subtest(name string, f func()) {
	t := s.T.(*testing.T)
	defer func() { s.T = t }()
	t.Run(name, func(t *testing.T) {
		s.T = t
		f()
	})
}
