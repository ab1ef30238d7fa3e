// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const module = "github.com/edgehub/edgehub/"

// arrows says which of our packages a room may import. A room is a package and
// what is below it, unless that has a line of its own; inside a room everything
// goes. What has no line may not exist.
var arrows = map[string][]string{
	"cmd/edgehub":         {"pkg/app", "pkg/cmdline"},
	"cmd/edgehub-webhook": {"pkg/webhook", "pkg/cmdline"},
	"cmd/edgehubctl":      {"pkg/cache", "pkg/cache/journal", "pkg/codec", "pkg/filter", "pkg/nodepool", "pkg/hostport", "pkg/app"},
	"pkg/app": {"pkg/cmdline", "pkg/datadir", "pkg/linklocal", "pkg/outbox", "pkg/seal", "pkg/proxy", "pkg/proxy/contract", "pkg/identity", "pkg/upstream", "pkg/cache", "pkg/cache/journal", "pkg/codec",
		"pkg/filter", "pkg/follow", "pkg/install", "pkg/nodepool", "pkg/hostport"},
	"pkg/install":        {"pkg/cmdline", "pkg/datadir"},
	"pkg/cmdline":        {},
	"pkg/proxy":          {"pkg/identity"},
	"pkg/proxy/contract": {},
	"pkg/identity":       {"pkg/datadir"},
	"pkg/upstream":       {},
	"pkg/datadir":        {},
	"pkg/linklocal":      {},
	"pkg/outbox":         {"pkg/cache/journal"},
	"pkg/seal":           {},
	"pkg/cache":          {"pkg/cache/journal", "pkg/codec", "pkg/seal"},
	"pkg/cache/journal":  {},
	"pkg/codec":          {},
	"pkg/follow":         {"pkg/codec"},
	"pkg/filter":         {"pkg/codec", "pkg/datadir", "pkg/follow", "pkg/nodepool", "pkg/hostport"},
	"pkg/nodepool":       {"pkg/codec", "pkg/follow"},
	"pkg/hostport":       {},
	"pkg/webhook":        {"pkg/cmdline", "pkg/datadir", "pkg/nodepool", "pkg/hostport"},
	"build":              {},
	"internal":           {},
}

// Tests and benchmarks look at everything from outside.
var free = []string{"test", "bench"}

// banned are packages that the agent must not link, with what they bring.
var banned = map[string]string{
	"k8s.io/apiserver/pkg/server":            "1,263 packages",
	"k8s.io/apiserver/pkg/endpoints/filters": "gRPC",
	"k8s.io/client-go/kubernetes":            "the types of every API group",
	"google.golang.org/grpc":                 "a gRPC client and server",
	"testing":                                "test code",
}

// maxAgentPackages bounds what the agent links, the standard library included. It
// is today's number with room for the filters; raise it in the change that needs
// it, and say what it buys.
const maxAgentPackages = 560

type pkg struct {
	ImportPath string
	Imports    []string
}

func room(path string) (string, bool) {
	for path != "" && path != "." {
		if _, ok := arrows[path]; ok {
			return path, true
		}
		path = path[:max(0, strings.LastIndexByte(path, '/'))]
	}
	return "", false
}

func isFree(path string) bool {
	return slices.ContainsFunc(free, func(f string) bool { return path == f || strings.HasPrefix(path, f+"/") })
}

// violations are the imports that no arrow allows.
func violations(packages []pkg) (found []string) {
	for _, p := range packages {
		from := strings.TrimPrefix(p.ImportPath, module)
		if isFree(from) {
			continue
		}
		fromRoom, ok := room(from)
		if !ok {
			found = append(found, from+" is in no room")
			continue
		}
		for _, imported := range p.Imports {
			to, ours := strings.CutPrefix(imported, module)
			if !ours {
				continue
			}
			if toRoom, ok := room(to); !ok || toRoom != fromRoom && !slices.Contains(arrows[fromRoom], toRoom) {
				found = append(found, from+" imports "+to)
			}
		}
	}
	return found
}

// tooHeavy says what is wrong with the agent's dependencies.
func tooHeavy(deps []string) (found []string) {
	for _, d := range deps {
		if brings, ok := banned[d]; ok {
			found = append(found, "the agent links "+d+", which brings "+brings)
		}
	}
	if len(deps) > maxAgentPackages {
		found = append(found, fmt.Sprintf("the agent links %d packages, more than %d", len(deps), maxAgentPackages))
	}
	return found
}

func list(t *testing.T, args ...string) []pkg {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"list", "-e", "-json=ImportPath,Imports"}, args...)...)
	cmd.Dir = "../.."
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var packages []pkg
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return packages
		} else if err != nil {
			t.Fatal(err)
		}
		packages = append(packages, p)
	}
}

func TestArrows(t *testing.T) {
	packages := list(t, "./...")
	if len(packages) < 8 {
		t.Fatalf("go list found %d packages", len(packages))
	}
	for _, v := range violations(packages) {
		t.Error(v)
	}
}

func TestAgentIsLight(t *testing.T) {
	var deps []string
	for _, p := range list(t, "-deps", "./cmd/edgehub") {
		deps = append(deps, p.ImportPath)
	}
	t.Logf("the agent links %d packages", len(deps))
	for _, v := range tooHeavy(deps) {
		t.Error(v)
	}
}

// The checks above must be able to fail.
func TestViolationsAreFound(t *testing.T) {
	for _, tc := range []struct {
		name string
		pkg  pkg
		want []string
	}{
		{"an arrow", pkg{"pkg/app", []string{"pkg/cache"}}, nil},
		{"the way back", pkg{"pkg/cache", []string{"pkg/app"}}, []string{"pkg/cache imports pkg/app"}},
		{"a neighbour", pkg{"pkg/proxy", []string{"pkg/upstream", "pkg/identity"}}, []string{"pkg/proxy imports pkg/upstream"}},
		{"inside a room", pkg{"pkg/cache/journal", []string{"pkg/cache/journal/memfs"}}, nil},
		{"a package below takes its room's arrows", pkg{"pkg/filter/servicetopology", []string{"pkg/filter", "pkg/nodepool"}}, nil},
		{"a package below gets no more", pkg{"pkg/filter/servicetopology", []string{"pkg/cache"}}, []string{"pkg/filter/servicetopology imports pkg/cache"}},
		{"a room below is not the room", pkg{"pkg/proxy/contract", []string{"pkg/proxy"}}, []string{"pkg/proxy/contract imports pkg/proxy"}},
		{"a new room", pkg{"pkg/util", nil}, []string{"pkg/util is in no room"}},
		{"importing a new room", pkg{"pkg/cache", []string{"pkg/util"}}, []string{"pkg/cache imports pkg/util"}},
		{"tests", pkg{"test/node", []string{"pkg/cache"}}, nil},
		{"importing tests", pkg{"pkg/cache", []string{"test/node"}}, []string{"pkg/cache imports test/node"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			p := pkg{ImportPath: module + tc.pkg.ImportPath, Imports: []string{"fmt", "k8s.io/klog/v2"}}
			for _, i := range tc.pkg.Imports {
				p.Imports = append(p.Imports, module+i)
			}
			if diff := cmp.Diff(tc.want, violations([]pkg{p})); diff != "" {
				t.Errorf("violations(%s) (-want +got):\n%s", tc.pkg.ImportPath, diff)
			}
		})
	}
	heavy := append(make([]string, maxAgentPackages), "k8s.io/apiserver/pkg/server")
	if got := tooHeavy(heavy); len(got) != 2 {
		t.Errorf("tooHeavy() = %q, want the package and the number", got)
	}
	if got := tooHeavy([]string{"google.golang.org/grpc/codes"}); got != nil {
		t.Errorf("tooHeavy() = %q, want nothing", got)
	}
}
