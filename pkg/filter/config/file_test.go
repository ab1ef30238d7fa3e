// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestFileReload(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.write(b.path, with("masterservice"))
		b.start()
		b.want("at the start", []string{"masterservice"}, "file", nil)
		b.wantCopy("at the start", "file", b.path, with("masterservice"))
		b.wantCounts("at the start", "file", 1, 1, 0)

		b.write(b.path, with("servicetopology"))
		pass(pollPeriod)
		b.want("seen once", []string{"masterservice"}, "file", nil)
		pass(pollPeriod)
		b.want("seen twice", []string{"masterservice", "servicetopology"}, "file", nil)
		b.wantCopy("seen twice", "file", b.path, with("servicetopology"))

		b.write(b.path, with("nonsense"))
		pass(5 * pollPeriod)
		b.want("bad", []string{"masterservice", "servicetopology"}, "file", map[string]string{"file": unknownFilter})
		b.wantCopy("bad", "file", b.path, with("servicetopology"))
		b.wantCounts("bad", "file", 0, 2, 1)
		b.wantLogged("bad", "was refused", 1)

		b.write(b.path, with("servicetopology"))
		pass(2 * pollPeriod)
		b.want("as before", []string{"masterservice", "servicetopology"}, "file", nil)
		b.wantCounts("as before", "file", 1, 3, 1)

		b.write(b.path, "# another comment\n"+with("servicetopology"))
		pass(2 * pollPeriod)
		b.want("which says the same", []string{"masterservice", "servicetopology"}, "file", nil)
		b.wantCopy("which says the same", "file", b.path, "# another comment\n"+with("servicetopology"))
	})
}

func TestFileThatIsBeingWritten(t *testing.T) {
	inBubble(t, func(b *bench) {
		b.write(b.path, with("masterservice"))
		b.start()
		whole := with("servicetopology") + "- name: hostnetworkpool\n"
		for i := 10; i < len(whole); i += 10 { // a new part every second: never the same twice
			b.write(b.path, whole[:i])
			pass(pollPeriod)
			b.want(fmt.Sprintf("%d bytes", i), []string{"masterservice"}, "file", nil)
		}
		b.write(b.path, whole)
		pass(2 * pollPeriod)
		b.want("whole", []string{"masterservice", "servicetopology"}, "file", nil)

		b.write(b.path, with("masterservice")+"# and then the writer st")
		pass(3 * pollPeriod)
		b.want("no newline", []string{"masterservice", "servicetopology"}, "file", map[string]string{"file": "filters.yaml:5: does not end in a newline, and may have been cut short"})
		b.wantCounts("no newline", "file", 0, 2, 1)
		b.write(b.path, "")
		pass(3 * pollPeriod)
		b.want("empty", []string{"masterservice", "servicetopology"}, "file", map[string]string{"file": "filters.yaml:1: is empty"})
	})
}

func TestFileThatCannotBeRead(t *testing.T) {
	for _, test := range []struct {
		name string
		make func(path string) error
		want string
	}{
		{"gone", os.Remove, "open filters.yaml: no such file or directory"},
		{"a folder", func(path string) error { return os.Mkdir(path, 0o755) }, "filters.yaml: is not a file"},
		{"a pipe", func(path string) error { return syscall.Mkfifo(path, 0o600) }, "filters.yaml: is not a file"},
		{"a link to itself", func(path string) error { return os.Symlink(path, path) }, "open filters.yaml: too many levels of symbolic links"},
		{"too large", func(path string) error { return os.WriteFile(path, make([]byte, 3<<20), 0o600) }, "filters.yaml:1: is larger than 262144 bytes"},
	} {
		t.Run(test.name, func(t *testing.T) {
			inBubble(t, func(b *bench) {
				b.write(b.path, with("masterservice"))
				b.start()
				if test.name != "gone" {
					if err := os.Remove(b.path); err != nil {
						t.Fatal(err)
					}
				}
				if err := test.make(b.path); err != nil {
					t.Fatal(err)
				}
				pass(5 * pollPeriod)
				b.want(test.name, []string{"masterservice"}, "file", map[string]string{"file": test.want})
				b.wantCounts(test.name, "file", 0, 1, 1)
				if err := os.Remove(b.path); err != nil && test.name != "gone" {
					t.Fatal(err)
				}
				b.write(b.path, with("servicetopology"))
				pass(2 * pollPeriod)
				b.want("again", []string{"masterservice", "servicetopology"}, "file", nil)
			})
		})
	}
}

// A ConfigMap that is mounted is a link to a link, which is replaced.
func TestFileBehindALink(t *testing.T) {
	inBubble(t, func(b *bench) {
		link := func(to string) {
			t.Helper()
			b.write(filepath.Join(b.dir, to), with(to))
			if err := errors.Join(os.Symlink(to, b.path+".new"), os.Rename(b.path+".new", b.path)); err != nil {
				t.Fatal(err)
			}
		}
		link("masterservice")
		b.start()
		link("servicetopology")
		pass(2 * pollPeriod)
		b.want("replaced", []string{"masterservice", "servicetopology"}, "file", nil)
		if err := os.Remove(filepath.Join(b.dir, "servicetopology")); err != nil {
			t.Fatal(err)
		}
		pass(2 * pollPeriod)
		b.want("dangling", []string{"masterservice", "servicetopology"}, "file", map[string]string{"file": "open filters.yaml: no such file or directory"})
	})
}
