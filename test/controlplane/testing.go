// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package controlplane

import (
	"os"
	"testing"
)

// New starts a control plane for the length of a test. If the test fails, the
// end of the logs is shown and the folder is kept.
func New(t testing.TB, c Config) *ControlPlane {
	t.Helper()
	temporary := c.Dir == ""
	if temporary {
		dir, err := os.MkdirTemp("", "edgehub-controlplane-")
		if err != nil {
			t.Fatal(err)
		}
		c.Dir = dir
	}
	cp, err := Start(t.Context(), c)
	if err != nil {
		t.Fatal(err) // the folder stays: the error names a log in it
	}
	t.Cleanup(func() {
		if err := cp.Stop(); err != nil {
			t.Errorf("stop the control plane: %v", err)
		}
		switch {
		case t.Failed():
			t.Logf("control plane's folder: %s\n%s", cp.Dir(), cp.LogTail())
		case temporary:
			if err := os.RemoveAll(cp.Dir()); err != nil {
				t.Error(err)
			}
		}
	})
	return cp
}
