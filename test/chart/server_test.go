// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
)

// shared is the control plane of all tests, made by the first that asks.
var shared struct {
	once sync.Once
	dir  string
	cp   *controlplane.ControlPlane
	err  error
}

func TestMain(m *testing.M) {
	flag.Parse()
	rest.SetDefaultWarningHandler(rest.NoWarnings{}) // about old kinds that are listed
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

// cluster returns the shared control plane, which knows the kinds of cert-manager and of
// Prometheus' operator that the chart uses.
func cluster(t *testing.T) *controlplane.ControlPlane {
	t.Helper()
	shared.once.Do(func() {
		if shared.dir, shared.err = os.MkdirTemp("", "edgehub-chart-"); shared.err != nil {
			return
		}
		ctx := context.WithoutCancel(t.Context())
		shared.cp, shared.err = controlplane.Start(ctx, controlplane.Config{
			Dir: filepath.Join(shared.dir, "controlplane"), ControllerManager: true, Scheduler: true, Audit: true,
			// The API server itself finds the pods of a Service: there is no kube-proxy.
			APIServerArgs: []string{"--enable-aggregator-routing=true"},
		})
		if shared.err != nil {
			return
		}
		if shared.err = shared.cp.CreateNamespace(ctx, namespace); shared.err != nil {
			return
		}
		crds, err := os.Open(filepath.Join("testdata", "crds.yaml"))
		if err != nil {
			shared.err = err
			return
		}
		defer crds.Close()
		if _, shared.err = kubectl(ctx, crds, "apply", "-f", "-"); shared.err != nil {
			return
		}
		_, shared.err = kubectl(ctx, nil, "wait", "--for=condition=Established", "--timeout=60s", "crd", "--all")
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	return shared.cp
}

// kubectl is an administrator's; its warnings are an error's text only.
func kubectl(ctx context.Context, in io.Reader, args ...string) (string, error) {
	bin, err := controlplane.Binaries(ctx, "kubectl")
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "kubectl"), append([]string{"--kubeconfig=" + shared.cp.AdminKubeconfig()}, args...)...)
	var out, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = in, &out, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("kubectl %s: %w\n%s", strings.Join(args, " "), err, stderr.Bytes())
	}
	return out.String(), nil
}

// TestServerTakesAll has a real API server look at every object, without keeping any:
// unknown fields and bad values, CEL and rights included. And helm says what is in
// testdata/golden, where it may ask the cluster.
func TestServerTakesAll(t *testing.T) {
	t.Parallel()
	cp := cluster(t)
	for name, values := range valueSets(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// Another release than TestInstall's, whose objects would be changed, not made. The CRD
			// is there or not: both will do.
			manifests, err := helm(t.Context(), t, slices.Concat([]string{"template", "other", chartDir(t), "--values", values, "--set", "fullnameOverride=other"}, forCluster)...)
			if err != nil {
				t.Fatal(err)
			}
			out, err := kubectl(t.Context(), strings.NewReader(manifests), "apply", "--server-side", "--force-conflicts", "--dry-run=server", "-f", "-")
			if err != nil {
				t.Fatal(err)
			}
			if got, want := strings.Count(out, "(server dry run)"), len(objects(t, manifests)); got != want {
				t.Errorf("the API server has looked at %d objects, want %d:\n%s", got, want, out)
			}

			said, err := helm(t.Context(), t, "install", "notes-"+release, chartDir(t), "--kubeconfig", cp.AdminKubeconfig(), "--namespace", namespace,
				"--dry-run=server", "--output", "json", "--values", values, "--set", "nodePools.crd.install=never", "--set", "fullnameOverride=notes")
			if err != nil {
				t.Fatal(err)
			}
			var result struct {
				Info struct {
					Notes string `json:"notes"`
				} `json:"info"`
			}
			if err := yaml.Unmarshal([]byte(said), &result); err != nil {
				t.Fatal(err)
			}
			golden(t, name+".txt", result.Info.Notes)
		})
	}
}

// poll waits until condition returns nil.
func poll(t *testing.T, what string, condition func(context.Context) error) {
	t.Helper()
	if err := process.Poll(t.Context(), what, condition); err != nil {
		t.Fatal(err)
	}
}
