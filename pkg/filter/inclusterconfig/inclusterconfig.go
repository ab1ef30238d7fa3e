// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package inclusterconfig is a filter for kubelet: kube-proxy's configuration, as kubeadm
// writes it, names no kubeconfig. kube-proxy then finds the API server as every pod does,
// by the environment that masterservice leads to the hub.
package inclusterconfig

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/edgehub/edgehub/pkg/filter"
)

const (
	namespace = "kube-system"
	name      = "kube-proxy"
	file      = "config.conf"
	section   = "clientConnection"
	option    = "kubeconfig"
)

var errLine = errors.New(section + "." + option + " of " + file + " is not on a line of its own")

// Filter is inclusterconfig.
type Filter struct{}

var _ filter.Filter = Filter{}

// New makes the filter.
func New() Filter { return Filter{} }

// Name is inclusterconfig.
func (Filter) Name() string { return "inclusterconfig" }

// Apply takes the line out of kube-system/kube-proxy. Nothing else in the file changes,
// comments included; where that cannot be done it is an error.
func (Filter) Apply(_ context.Context, o *filter.Object) (filter.Verdict, error) {
	if is, err := o.Is(namespace, name); err != nil || !is {
		return filter.Keep, err
	}
	m, err := filter.As[corev1.ConfigMap](o)
	if err != nil {
		return filter.Keep, err
	}
	without, err := withoutKubeconfig(m.Data[file])
	if err != nil || without == m.Data[file] {
		return filter.Keep, err
	}
	m.Data[file] = without
	return filter.Change, nil
}

// withoutKubeconfig returns a configuration of kube-proxy without its kubeconfig. It works
// on lines, and YAML is the judge of whether the right one is gone.
func withoutKubeconfig(text string) (string, error) {
	var before, after map[string]any
	if err := yaml.Unmarshal([]byte(text), &before); err != nil {
		return "", fmt.Errorf("parse %s: %w", file, err)
	}
	connection, _ := before[section].(map[string]any)
	if path, ok := connection[option]; !ok || path == nil || path == "" {
		return text, nil // in-cluster already
	}
	delete(connection, option)
	text = withoutLine(text)
	if err := yaml.Unmarshal([]byte(text), &after); err != nil {
		return "", errLine
	}
	if after[section] == nil {
		after[section] = map[string]any{} // it was the only line
	}
	if !reflect.DeepEqual(before, after) {
		return "", errLine
	}
	return text, nil
}

func withoutLine(text string) string {
	var out strings.Builder
	inside := false
	for line := range strings.Lines(text) {
		key, _, _ := strings.Cut(strings.TrimSpace(line), ":")
		key = strings.Trim(key, `"'`)
		switch {
		case key == "" || key[0] == '#':
		case line[0] != ' ':
			inside = key == section
		case inside && key == option:
			continue
		}
		out.WriteString(line)
	}
	return out.String()
}
