// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"testing"

	"github.com/edgehub/edgehub/test/admission/cases"
)

func TestAdmission(t *testing.T) {
	table, err := cases.All()
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t)
	r.createOld(table)
	r.createOldDaemonSets()
	r.install()
	t.Run("all", func(t *testing.T) {
		t.Run("table", func(t *testing.T) { t.Parallel(); r.testTable(t, table) })
		t.Run("callers", func(t *testing.T) { t.Parallel(); r.testCallers(t) })
		for _, mode := range modes {
			t.Run("scheduler/"+mode, func(t *testing.T) { t.Parallel(); r.testScheduler(t, mode) })
			t.Run("daemonset/"+mode, func(t *testing.T) { t.Parallel(); r.testDaemonSets(t, mode) })
		}
	})
	t.Run("metrics", r.testMetrics)
	t.Run("policy's types", r.testPolicyTypes)
	t.Run("companion gone", r.testGone)
}
