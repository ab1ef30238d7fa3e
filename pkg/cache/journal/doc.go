// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package journal keeps logs on disk.
package journal
