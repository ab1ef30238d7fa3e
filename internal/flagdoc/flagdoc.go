// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package flagdoc keeps the pages of docs that list a program's flags. Tests use it; with
// `go test -update` they write the page.
package flagdoc

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
)

var update = flag.Bool("update", false, "write the pages that list flags anew")

// Check compares the page at path, as seen by the test, with the flags of the programs
// that it is about, and wants each flag's usage to be a sentence.
func Check(t *testing.T, path string, programs ...*pflag.FlagSet) {
	t.Helper()
	var b strings.Builder
	for i, p := range programs {
		head := "# Flags of " + p.Name() + "\n\n"
		if i == 0 {
			head += "Written by `make docs` from the program; a test compares.\n\n"
		} else {
			head = "\n#" + head
		}
		b.WriteString(head + "| flag | default | meaning |\n|---|---|---|\n")
		p.VisitAll(func(f *pflag.Flag) {
			b.WriteString(row(f))
			klogs := f.Name == "v" || f.Name == "vmodule"
			if !klogs && (!strings.HasSuffix(f.Usage, ".") || strings.ToLower(f.Name) != f.Name) {
				t.Errorf("--%s of %s: usage %q is no sentence", f.Name, p.Name(), f.Usage)
			}
		})
	}
	want := b.String()
	if *update {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, string(got)); d != "" {
		t.Errorf("%s is not the program's; run make docs (-want +got):\n%s", path, d)
	}
}

func row(f *pflag.Flag) string {
	name, value := "--"+f.Name, f.DefValue
	if f.Shorthand != "" {
		name = "-" + f.Shorthand + ", " + name
	}
	if value == "[]" {
		value = ""
	}
	if value != "" {
		value = "`" + value + "`"
	}
	return fmt.Sprintf("| `%s` | %s | %s |\n", name, value, strings.ReplaceAll(f.Usage, "|", `\|`))
}
