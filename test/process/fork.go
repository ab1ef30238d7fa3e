// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"runtime"
	"sync"
)

// The signal that a child gets at its parent's death comes at the death of the
// thread that started it, and the Go runtime ends threads. So all children are
// started by one thread that lives as long as the process.
var (
	forkerOnce sync.Once
	forker     = make(chan func())
)

// onForker calls start on the thread that never ends.
func onForker(start func() error) error {
	forkerOnce.Do(func() {
		go func() {
			runtime.LockOSThread()
			for f := range forker {
				f()
			}
		}()
	})
	result := make(chan error)
	forker <- func() { result <- start() }
	return <-result
}
