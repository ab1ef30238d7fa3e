// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"errors"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/edgehub/edgehub/pkg/app"
	"github.com/edgehub/edgehub/pkg/install"
	"github.com/edgehub/edgehub/pkg/webhook"
)

// TestArguments has each program look at the command lines that the chart makes for it.
func TestArguments(t *testing.T) {
	t.Parallel()
	for name, values := range valueSets(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			manifests, err := render(t, "--values", values)
			if err != nil {
				t.Fatal(err)
			}
			for _, o := range objects(t, manifests) {
				for _, c := range containers(t, o) {
					if err := accepts(t, c.Command, c.Args); err != nil {
						t.Errorf("%s: %v refuses %q: %v", describe(o), c.Command, c.Args, err)
					}
				}
			}
		})
	}
}

func containers(t *testing.T, o *unstructured.Unstructured) []corev1.Container {
	t.Helper()
	template, ok, err := unstructured.NestedMap(o.Object, "spec", "template")
	if err != nil {
		t.Fatal(err)
	}
	var pod corev1.PodTemplateSpec
	if ok {
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(template, &pod); err != nil {
			t.Fatal(err)
		}
	}
	return pod.Spec.Containers
}

// accepts says what a program has against its arguments.
func accepts(t *testing.T, command, args []string) error {
	t.Helper()
	switch strings.Join(command, " ") {
	case "/edgehub":
		o := app.DefaultOptions()
		return o.Parse(args)
	case "/edgehub install --watch":
		o := install.DefaultOptions()
		o.CheckHubFlags = func(args []string) error {
			hub := app.DefaultOptions()
			return hub.Parse(args)
		}
		flags := pflag.NewFlagSet("", pflag.ContinueOnError)
		o.AddFlags(flags, "install")
		if err := flags.Parse(slices.Concat(command[2:], args)); err != nil {
			return err
		}
		return o.Validate("install")
	case "/edgehub-webhook":
		o := webhook.DefaultOptions()
		return o.Parse(args)
	case "/edgehub-webhook retire":
		err := webhook.Retire(t.Context(), append(slices.Clone(args), "--kubeconfig=/nowhere"), t.Output())
		if errors.Is(err, fs.ErrNotExist) { // no further than that
			return nil
		}
		return err
	}
	return errors.New("no such program")
}
