// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package archtest holds no code: its tests keep the import arrows between the
// rooms of this repository, and the weight of the agent.
package archtest
