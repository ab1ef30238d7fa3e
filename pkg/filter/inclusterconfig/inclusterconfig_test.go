// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package inclusterconfig

import (
	"testing"

	"github.com/edgehub/edgehub/pkg/filter/filtertest"
)

func TestGoldens(t *testing.T) { filtertest.Run(t, "testdata", New()) }

// Whatever the text is, what comes out is the text without one line, or an error.
func FuzzWithoutKubeconfig(f *testing.F) {
	for _, seed := range []string{
		"clientConnection:\n  kubeconfig: /a/b\n  qps: 5\n", "clientConnection:\n  kubeconfig: |\n    kubeconfig: /a\n", "clientConnection: {kubeconfig: /a}",
		"clientConnection: &a\n  kubeconfig: /a\nb: *a\n", "a: |\n clientConnection:\n  kubeconfig: /a\n", "'clientConnection' :\n  ? kubeconfig\n  : /a\n", "---\n", "- a\n", "",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		once, err := withoutKubeconfig(text)
		if err != nil {
			return
		}
		if len(once) > len(text) {
			t.Errorf("withoutKubeconfig(%q) = %q, want nothing more", text, once)
		}
		if twice, err := withoutKubeconfig(once); err != nil || twice != once {
			t.Errorf("withoutKubeconfig(%q) = %q, %v, want no change", once, twice, err)
		}
	})
}
