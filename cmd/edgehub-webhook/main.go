// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Command edgehub-webhook is edgehub's companion in the cluster: it keeps pods off
// host-network pools that must not be there, keeps nodes' labels and the status of
// NodePools, lets pods outlive a cut, and approves the serving certificates of hubs.
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

	"github.com/edgehub/edgehub/pkg/webhook"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the process at once
	err := webhook.Main(klog.NewContext(ctx, klog.Background()), os.Args[1:], os.Stdout)
	klog.Flush()
	if err != nil && !errors.Is(err, pflag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "edgehub-webhook:", err)
		os.Exit(1)
	}
}
