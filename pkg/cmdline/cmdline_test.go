// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cmdline

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

func TestRun(t *testing.T) {
	for _, tc := range []struct {
		err  error
		want int
	}{{nil, 0}, {pflag.ErrHelp, 0}, {errors.New("no"), 1}} {
		got := Run("program", func(ctx context.Context, args []string, out io.Writer) error {
			if ctx.Err() != nil || out == nil || len(args) == 0 { // those of the test's program
				t.Errorf("work(%v, %q, %v), want a context that goes on, the arguments, and an output", ctx.Err(), args, out)
			}
			return tc.err
		})
		if got != tc.want {
			t.Errorf("Run(work that returns %v) = %d, want %d", tc.err, got, tc.want)
		}
	}
}

func TestParse(t *testing.T) {
	for _, tc := range []struct {
		args string
		want []string // lines of the error
	}{
		{"--n=7 --d 2s -v=3", nil},
		{"--n=many --d=long", []string{"--n", "--d"}},
		{"--n=7 start", []string{`"start" is no flag, and program verb takes nothing else`}},
		{"--n=many --nothing", []string{"--n", "unknown flag: --nothing"}},
	} {
		fs := pflag.NewFlagSet("program verb", pflag.ContinueOnError)
		fs.SetOutput(io.Discard)
		n, d := fs.Int("n", 0, ""), fs.Duration("d", 0, "")
		AddLogFlags(fs)
		err := Parse(fs, strings.Fields(tc.args))
		if tc.want == nil {
			if err != nil || *n != 7 || *d != 2*time.Second || fs.Lookup("v").Value.String() != "3" {
				t.Errorf("Parse(%q) = %v with %d, %v, want 7, 2s", tc.args, err, *n, *d)
			}
			continue
		}
		if err == nil {
			t.Errorf("Parse(%q) = nil, want %q", tc.args, tc.want)
			continue
		}
		lines := strings.Split(err.Error(), "\n")
		for i, want := range tc.want {
			if len(lines) != len(tc.want) || !strings.Contains(lines[i], want) {
				t.Errorf("Parse(%q) = %q, want %q", tc.args, lines, tc.want)
			}
		}
	}
	fs := pflag.NewFlagSet("program", pflag.ContinueOnError)
	fs.SetOutput(io.Discard)
	if err := Parse(fs, []string{"--help"}); !errors.Is(err, pflag.ErrHelp) {
		t.Errorf("Parse(--help) = %v, want %v", err, pflag.ErrHelp)
	}
}
