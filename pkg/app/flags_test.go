// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/edgehub/edgehub/internal/flagdoc"
)

func TestFlagsDoc(t *testing.T) {
	o := DefaultOptions()
	fs := pflag.NewFlagSet("edgehub", pflag.ContinueOnError)
	o.AddFlags(fs)
	flagdoc.Check(t, "../../docs/flags.md", fs)
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
