// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
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

func TestParse(t *testing.T) {
	server := "--server-url=https://10.0.0.1:6443"
	for _, tc := range []struct {
		name string
		args []string
		want []string // lines of the error
	}{
		{"good", []string{server, "--cache-max-scopes", "7"}, nil},
		{"values that are none", []string{"--cache-max-scopes=many", "--feed-linger=long", server}, []string{"--cache-max-scopes", "--feed-linger"}},
		// Behind an unknown flag nothing is known: what is not given is not missing.
		{"unknown flag", []string{"--nothing", server}, []string{"unknown flag: --nothing"}},
		{"value and unknown flag", []string{"--cache-max-scopes=many", "--nothing"}, []string{"--cache-max-scopes", "unknown flag: --nothing"}},
		{"argument", []string{server, "start"}, []string{`"start"`}},
		{"values that are wrong", []string{"--cache-max-scopes=0", "--feed-linger=0s"}, []string{"--cache-max-scopes", "--feed-linger", "--server-url"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			o := DefaultOptions()
			err := o.Parse(tc.args)
			if err == nil && tc.want == nil {
				return
			}
			if err == nil || tc.want == nil {
				t.Fatalf("Parse() = %v, want %q", err, tc.want)
			}
			lines := strings.Split(err.Error(), "\n")
			if len(lines) != len(tc.want) {
				t.Fatalf("Parse() = %q, want %d lines", lines, len(tc.want))
			}
			for i, want := range tc.want {
				if !strings.Contains(lines[i], want) {
					t.Errorf("line %d of Parse() = %q, want %s", i, lines[i], want)
				}
			}
		})
	}
	o := DefaultOptions()
	if err := o.Parse([]string{"--help"}); !errors.Is(err, pflag.ErrHelp) {
		t.Errorf("Parse(--help) = %v, want %v", err, pflag.ErrHelp)
	}
}
