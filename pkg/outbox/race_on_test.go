// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build race

package outbox

const raceEnabled = true
