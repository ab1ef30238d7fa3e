// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Command edgehub is the node agent: a reverse proxy to the Kubernetes API that
// goes on answering when the link to it is cut. `edgehub kubeconfig` writes
// kubeconfigs for its clients.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/app"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := app.Main(klog.NewContext(ctx, klog.Background()), os.Args[1:], os.Stdout)
	klog.Flush()
	if err != nil && !errors.Is(err, pflag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "edgehub:", err)
		os.Exit(1)
	}
}
