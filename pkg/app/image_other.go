// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package app

func unmapImage() {}
