// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Command image builds all programs below cmd and puts them into an image in the OCI
// layout, without a container engine: what the Dockerfile makes, for `ctr images import`
// and for tools that copy images to registries. The same sources and the same Go give
// the same digest. It is run in the repository's root.
//
//	go run ./build/image -o edgehub.tar -platform linux/amd64,linux/arm64 -tag edgehub:dev
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	out := flag.String("o", "", "where to write: a file that ends in .tar, or a folder that is empty or not there yet")
	list := flag.String("platform", "linux/"+runtime.GOARCH, "platforms to build for, with commas between them, such as linux/amd64,linux/arm64")
	tag := flag.String("tag", "edgehub:dev", "name of the image with its tag, for who imports it")
	version := flag.String("version", "unknown", "for the label org.opencontainers.image.version")
	flag.Parse()
	if *out == "" || flag.NArg() > 0 {
		flag.Usage()
		return errors.New("-o is needed, and nothing besides flags")
	}
	platforms, err := parsePlatforms(*list)
	if err != nil {
		return fmt.Errorf("-platform: %w", err)
	}
	ref, err := name.NewTag(*tag)
	if err != nil {
		return fmt.Errorf("-tag: %w", err)
	}
	created, err := sourceDate()
	if err != nil {
		return err
	}
	programs := map[string][]file{}
	for _, p := range platforms {
		if programs[p.String()], err = build(ctx, p); err != nil {
			return err
		}
	}
	digest, err := write(*out, contents{platforms, programs, ref, *version, created})
	if err != nil {
		return err
	}
	fmt.Printf("%s@%s\n", reference(ref), digest)
	return nil
}

func parsePlatforms(list string) (platforms []v1.Platform, err error) {
	for s := range strings.SplitSeq(list, ",") {
		p, err := v1.ParsePlatform(s)
		if err != nil {
			return nil, err
		}
		if p.OS != "linux" || p.Architecture == "" || p.Variant != "" || p.OSVersion != "" {
			return nil, fmt.Errorf("%q is not linux/ARCHITECTURE", s)
		}
		platforms = append(platforms, *p)
	}
	return platforms, nil
}

// sourceDate returns the time of all that is in the image: that of the sources as
// reproducible-builds.org has it, else 1970.
func sourceDate() (time.Time, error) {
	s := os.Getenv("SOURCE_DATE_EPOCH")
	if s == "" {
		return time.Unix(0, 0).UTC(), nil
	}
	seconds, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
	}
	return time.Unix(seconds, 0).UTC(), nil
}

// build builds every program below cmd for a platform, as make build does.
func build(ctx context.Context, p v1.Platform) (programs []file, err error) {
	dir, err := os.MkdirTemp("", "edgehub-image-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", dir+"/", "./cmd/...")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+p.OS, "GOARCH="+p.Architecture)
	if said, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("go build ./cmd/... for %s: %w\n%s", p, err, bytes.TrimSpace(said))
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		programs = append(programs, file{e.Name(), 0o755, data})
	}
	return programs, nil
}
