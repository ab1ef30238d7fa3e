// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package install puts the hub onto nodes, upgrades it and takes it away: on scratch roots with
// a small kubelet of its own and a systemd that is only a stub behind a real D-Bus, against the
// real API server; and on a real kubelet. Installers are killed at every step, versions are
// broken, disks are full, links are down: at every moment kubelet's kubeconfig must be one that
// works.
package install

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/install"
	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/node"
)

// asInstaller makes this program an installer that kills itself; see killedInstaller.
const asInstaller = "EDGEHUB_TEST_INSTALLER"

// as500 makes this program a server at this address that answers everything with 500.
const as500 = "EDGEHUB_TEST_500"

// A killedInstaller is what such an installer is told.
type killedInstaller struct {
	Command string
	Options install.Options
	KillAt  int // before the step of this number, from 0; behind the last one: not at all
}

var (
	cp  *controlplane.ControlPlane
	hub string // the program
)

func TestMain(m *testing.M) {
	if told := os.Getenv(asInstaller); told != "" {
		runInstaller(told)
		return
	}
	if address := os.Getenv(as500); address != "" {
		panic(http.ListenAndServe(address, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(500) })))
	}
	flag.Parse()
	// They wait for processes more than they work.
	if err := flag.Set("test.parallel", "8"); err != nil {
		panic(err)
	}
	os.Exit(run(m)) //nolint:forbidigo // TestMain is main here
}

func run(m *testing.M) int {
	ctx := context.Background()
	var err error
	if cp, err = controlplane.Start(ctx, controlplane.Config{}); err == nil {
		defer cp.Stop()
		hub, err = node.BuildHub(ctx)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

func runInstaller(told string) {
	var k killedInstaller
	if err := json.Unmarshal([]byte(told), &k); err != nil {
		panic(err)
	}
	step := 0
	k.Options.Progress = func(name string) {
		if step == k.KillAt {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		step++
		fmt.Println(name)
	}
	if err := install.Run(klog.NewContext(context.Background(), klog.Background()), k.Command, k.Options, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1) //nolint:forbidigo // a process of its own
	}
	os.Exit(0) //nolint:forbidigo // a process of its own
}

// newNode makes a Node in the API server and returns its credential.
func newNode(t *testing.T, name string, labels map[string]string) *rest.Config {
	t.Helper()
	_, err := cp.Client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels}}, metav1.CreateOptions{})
	c, err2 := cp.NodeConfig(name)
	if err := errors.Join(err, err2); err != nil {
		t.Fatal(err)
	}
	return c
}
