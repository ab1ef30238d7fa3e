// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/edgehub/edgehub/pkg/filter"
)

// Which filters were in force is known after a restart, and not being able to know it
// keeps nobody from starting.
func TestFormerFile(t *testing.T) {
	f := formerFile(filepath.Join(t.TempDir(), "former.json"))
	if got := f.load(t.Context()); got != nil {
		t.Errorf("load() of no file = %v, want none", got)
	}
	want := []filter.Former{{
		Rule: filter.Rule{
			Name: "masterservice", Clients: []filter.Client{{User: "a", Program: "kubelet"}},
			Resources: []schema.GroupResource{{Group: "g", Resource: "services"}}, Verbs: []string{"list", "watch"},
		},
		Until: time.Unix(1, 0).UTC(),
	}}
	f.save(t.Context(), want)
	if diff := cmp.Diff(want, f.load(t.Context())); diff != "" {
		t.Errorf("load() after save() (-want +got):\n%s", diff)
	}
	if err := os.WriteFile(string(f), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := f.load(t.Context()); got != nil {
		t.Errorf("load() of junk = %v, want none", got)
	}
}
