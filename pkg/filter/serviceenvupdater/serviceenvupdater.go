// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package serviceenvupdater is a filter for kubelet: where a pod says itself where the API
// server is, by environment variables in its spec, it is told the hub's address instead.
//
// Caveat: kubelet then runs another pod than the API server has. Nothing else of edgehub
// changes pods; this is off unless asked for.
package serviceenvupdater

import (
	"context"
	"net/netip"
	"strconv"

	corev1 "k8s.io/api/core/v1"

	"github.com/edgehub/edgehub/pkg/filter"
	"github.com/edgehub/edgehub/pkg/filter/masterservice"
)

const (
	hostVar = "KUBERNETES_SERVICE_HOST"
	portVar = "KUBERNETES_SERVICE_PORT"
)

// Filter is serviceenvupdater.
type Filter struct{ masterservice.Hub }

var (
	_ filter.Filter      = (*Filter)(nil)
	_ filter.Conditional = (*Filter)(nil)
)

// New makes the filter of the address at which the hub answers pods.
func New(hub netip.AddrPort) *Filter { return &Filter{masterservice.NewHub(hub)} }

// Name is serviceenvupdater.
func (*Filter) Name() string { return "serviceenvupdater" }

// Apply changes the variables that are there, in containers of all sorts; it adds none.
func (f *Filter) Apply(_ context.Context, o *filter.Object) (filter.Verdict, error) {
	if err := f.Usable(); err != nil {
		return filter.Keep, err
	}
	pod, err := filter.As[corev1.Pod](o)
	if err != nil {
		return filter.Keep, err
	}
	verdict := filter.Keep
	for _, env := range environments(&pod.Spec) {
		if f.update(env) {
			verdict = filter.Change
		}
	}
	return verdict, nil
}

// environments returns those of all containers; sidecars are init containers.
func environments(spec *corev1.PodSpec) (all [][]corev1.EnvVar) {
	for i := range spec.InitContainers {
		all = append(all, spec.InitContainers[i].Env)
	}
	for i := range spec.Containers {
		all = append(all, spec.Containers[i].Env)
	}
	for i := range spec.EphemeralContainers {
		all = append(all, spec.EphemeralContainers[i].Env)
	}
	return all
}

// update reports whether there was something to change in env.
func (f *Filter) update(env []corev1.EnvVar) (changed bool) {
	for i := range env {
		var hub corev1.EnvVar // without a ValueFrom, which goes with no Value
		switch env[i].Name {
		case hostVar:
			hub = corev1.EnvVar{Name: hostVar, Value: f.Addr().String()}
		case portVar:
			hub = corev1.EnvVar{Name: portVar, Value: strconv.Itoa(int(f.Port()))}
		default:
			continue
		}
		if env[i] != hub {
			env[i], changed = hub, true
		}
	}
	return changed
}
