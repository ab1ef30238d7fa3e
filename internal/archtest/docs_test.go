// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package archtest

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// namedTests are package and name of each test that a table names: in a row's last
// column a package comes first, then its tests in backquotes. byDefault is the package
// of rows that name none.
func namedTests(doc, byDefault string) (named [][2]string) {
	token := regexp.MustCompile("`[^`]+`|\\b(?:test|pkg)/[a-z/]+")
	for line := range strings.Lines(doc) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "| ") || len(cells) != 3 {
			continue
		}
		in := byDefault
		for _, t := range token.FindAllString(cells[2], -1) {
			if name, ok := strings.CutPrefix(t, "`"); !ok {
				in = t
			} else if name = strings.TrimSuffix(name, "`"); regexp.MustCompile("^[A-Z][A-Za-z]*(/[A-Za-z_]+)?$").MatchString(name) {
				named = append(named, [2]string{in, name})
			}
		}
	}
	return named
}

// The tests that the documents name are there.
func TestDocsNameTests(t *testing.T) {
	for _, doc := range []struct {
		file, byDefault string
		least           int
	}{{"security.md", "", 30}, {"offline.md", "test/offline", 12}} {
		text, err := os.ReadFile(filepath.Join("../../docs", doc.file))
		if err != nil {
			t.Fatal(err)
		}
		named := namedTests(string(text), doc.byDefault)
		if len(named) < doc.least {
			t.Errorf("docs/%s names %d tests, want at least %d", doc.file, len(named), doc.least)
		}
		for _, n := range named {
			if !hasTest(t, n[0], n[1]) {
				t.Errorf("docs/%s names %s in %s, which is not there", doc.file, n[1], n[0])
			}
		}
	}
}

// hasTest reports whether a package has a test with that in its name, and, behind a
// slash, a subtest.
func hasTest(t *testing.T, in, name string) bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("../..", in, "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	test, sub, _ := strings.Cut(name, "/")
	found := regexp.MustCompile(`(?m)^func (Test|Fuzz)\w*` + test)
	subtest := `"` + strings.ReplaceAll(sub, "_", " ")
	hasFunc, hasSub := false, sub == ""
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		hasFunc = hasFunc || found.Match(b)
		hasSub = hasSub || strings.Contains(string(b), subtest)
	}
	return hasFunc && hasSub
}
