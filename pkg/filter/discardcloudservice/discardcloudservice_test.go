// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package discardcloudservice

import (
	"testing"

	"github.com/edgehub/edgehub/pkg/filter/filtertest"
)

func TestGoldens(t *testing.T) { filtertest.Run(t, "testdata", New()) }
