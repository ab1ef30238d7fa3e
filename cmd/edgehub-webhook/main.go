// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Command edgehub-webhook is edgehub's companion in the cluster: it keeps pods off
// host-network pools that must not be there, keeps nodes' labels and the status of
// NodePools, lets pods outlive a cut, and approves the serving certificates of hubs.
package main

import (
	"os"

	"github.com/edgehub/edgehub/pkg/cmdline"
	"github.com/edgehub/edgehub/pkg/webhook"
)

func main() { os.Exit(cmdline.Run("edgehub-webhook", webhook.Main)) }
