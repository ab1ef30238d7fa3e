// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package upstream

import "syscall"

// setUserTimeout does nothing where there is no TCP_USER_TIMEOUT; pings and
// probes find a dead connection all the same.
func setUserTimeout(_, _ string, _ syscall.RawConn) error { return nil }
