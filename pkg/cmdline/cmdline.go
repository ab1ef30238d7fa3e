// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cmdline is what the programs have in common between the kernel and their own
// work: signals, flags, exit codes.
package cmdline

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"
)

// Run runs a program's work with its command line, without the program's name, until that
// returns, and returns the exit code. The context ends with the first SIGINT or SIGTERM; a
// second one ends the process at once. An error is told on standard error under the
// program's name, but for pflag.ErrHelp.
func Run(name string, work func(ctx context.Context, args []string, out io.Writer) error) (code int) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM) //nolint:forbidigo // the first there is
	defer stop()
	context.AfterFunc(ctx, stop)
	err := work(klog.NewContext(ctx, klog.Background()), os.Args[1:], os.Stdout)
	klog.Flush()
	if err != nil && !errors.Is(err, pflag.ErrHelp) {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		return 1
	}
	return 0
}

// AddLogFlags adds klog's -v and --vmodule.
func AddLogFlags(fs *pflag.FlagSet) {
	klogFlags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(klogFlags)
	for _, name := range []string{"v", "vmodule"} {
		f := pflag.PFlagFromGoFlag(klogFlags.Lookup(name))
		if name == "v" {
			f.Shorthand = "v"
		}
		fs.AddFlag(f)
	}
}

// Parse sets flags from a command line that holds nothing else, and returns all that was
// not understood. Help is printed to the flags' output, and pflag.ErrHelp returned.
func Parse(fs *pflag.FlagSet, args []string) error {
	var problems []error
	err := fs.ParseAll(args, func(f *pflag.Flag, value string) error {
		if err := fs.Set(f.Name, value); err != nil {
			problems = append(problems, err)
		}
		return nil // there may be more
	})
	if errors.Is(err, pflag.ErrHelp) {
		return err
	}
	if err == nil && fs.NArg() > 0 {
		err = fmt.Errorf("%q is no flag, and %s takes nothing else", fs.Arg(0), fs.Name())
	}
	return errors.Join(append(problems, err)...)
}
