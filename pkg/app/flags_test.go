// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
)

var update = flag.Bool("update", false, "write docs/flags.md anew")

const flagsDoc = "../../docs/flags.md"

func flagsMarkdown() string {
	o := DefaultOptions()
	fs := pflag.NewFlagSet("edgehub", pflag.ContinueOnError)
	o.AddFlags(fs)
	var b strings.Builder
	b.WriteString("# Flags of edgehub\n\nWritten by `make docs` from the program; a test compares.\n\n| flag | default | meaning |\n|---|---|---|\n")
	fs.VisitAll(func(f *pflag.Flag) {
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
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", name, value, strings.ReplaceAll(f.Usage, "|", `\|`))
	})
	return b.String()
}

func TestFlagsDoc(t *testing.T) {
	want := flagsMarkdown()
	if *update {
		if err := os.WriteFile(flagsDoc, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(flagsDoc)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, string(got)); diff != "" {
		t.Errorf("docs/flags.md is not the program's; run make docs (-want +got):\n%s", diff)
	}
}

func TestFlagsSayWhatTheyTake(t *testing.T) {
	o := DefaultOptions()
	fs := pflag.NewFlagSet("edgehub", pflag.ContinueOnError)
	o.AddFlags(fs)
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Name == "v" || f.Name == "vmodule" {
			return // klog's
		}
		if !strings.HasSuffix(f.Usage, ".") || strings.ToLower(f.Name) != f.Name {
			t.Errorf("--%s: usage %q is no sentence", f.Name, f.Usage)
		}
	})
}
