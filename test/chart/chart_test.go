// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package chart holds charts/edgehub to what is promised of it: what it renders for each
// documented set of values, what values it refuses, that a real API server takes all of
// it, and that helm can install, upgrade and remove it on a real node without anybody
// else noticing.
package chart

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/edgehub/edgehub/test/controlplane"
)

const (
	release   = "edgehub"
	namespace = "edgehub-system"
)

var update = flag.Bool("update", false, "write testdata/golden anew")

// chartDir returns the chart's folder.
func chartDir(t testing.TB) string {
	t.Helper()
	root, err := controlplane.Root()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(root, "charts", "edgehub")
}

// valueSets returns the documented sets of values: name to file.
func valueSets(t testing.TB) map[string]string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(chartDir(t), "ci", "*-values.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	sets := map[string]string{}
	for _, f := range files {
		sets[strings.TrimSuffix(filepath.Base(f), "-values.yaml")] = f
	}
	if len(sets) < 10 {
		t.Fatalf("%d sets of values in charts/edgehub/ci, want 10 or more", len(sets))
	}
	return sets
}

// helm runs helm and returns what it prints. Its own files are the test's.
func helm(ctx context.Context, t testing.TB, args ...string) (string, error) {
	t.Helper()
	bin, err := controlplane.Binaries(ctx, "helm")
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, filepath.Join(bin, "helm"), args...)
	home := t.TempDir()
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("helm %s: %w\n%s", strings.Join(args, " "), err, stderr.Bytes())
	}
	return out.String(), nil
}

// forCluster are helm's arguments that stand for the API server of the tests where helm
// asks none.
var forCluster = []string{
	"--namespace", namespace, "--kube-version", "1.36.3",
	"--api-versions", "admissionregistration.k8s.io/v1/MutatingAdmissionPolicy",
	"--api-versions", "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy",
}

// render returns the text that helm template makes with more arguments of helm's.
func render(t testing.TB, args ...string) (string, error) {
	t.Helper()
	return helm(t.Context(), t, append(append([]string{"template", release, chartDir(t)}, forCluster...), args...)...)
}

// objects takes manifests apart.
func objects(t testing.TB, manifests string) []*unstructured.Unstructured {
	t.Helper()
	var all []*unstructured.Unstructured
	for d := yaml.NewYAMLOrJSONDecoder(strings.NewReader(manifests), 4096); ; {
		o := &unstructured.Unstructured{}
		switch err := d.Decode(&o.Object); {
		case errors.Is(err, io.EOF):
			return all
		case err != nil:
			t.Fatal(err)
		case len(o.Object) > 0:
			all = append(all, o)
		}
	}
}

func describe(o *unstructured.Unstructured) string { return o.GetKind() + "/" + o.GetName() }
