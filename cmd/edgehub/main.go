// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Command edgehub is the node agent: a reverse proxy to the Kubernetes API that
// goes on answering when the link to it is cut. `edgehub kubeconfig` writes
// kubeconfigs for its clients.
package main

import (
	"os"

	"github.com/edgehub/edgehub/pkg/app"
	"github.com/edgehub/edgehub/pkg/cmdline"
)

func main() { os.Exit(cmdline.Run("edgehub", app.Main)) }
