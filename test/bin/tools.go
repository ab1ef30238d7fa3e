// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package bin pins the programs that the tests and the demo run against. They
// are built by package name from this module, so that what is tested against is
// written down in one go.mod.
package bin

import (
	_ "go.etcd.io/etcd/server/v3"
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kube-scheduler"
	_ "k8s.io/kubernetes/cmd/kubectl"
	_ "k8s.io/kubernetes/cmd/kubelet"
	_ "k8s.io/kubernetes/cmd/kubemark"
)
