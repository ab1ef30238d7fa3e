// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/edgehub/edgehub/pkg/filter"
)

var update = flag.Bool("update", false, "rewrite golden files")

type named string

func (n named) Name() string { return string(n) }
func (n named) Apply(context.Context, *filter.Object) (filter.Verdict, error) {
	return filter.Keep, nil
}
func (n named) Observe(*filter.Request) filter.Observation { return nil }

func known() Known {
	services, slices := schema.GroupResource{Resource: "services"}, schema.GroupResource{Group: "discovery.k8s.io", Resource: "endpointslices"}
	return Known{
		Entries: []filter.Entry{
			{Filter: named("masterservice"), Resources: []schema.GroupResource{services}, Verbs: []string{"get", "list", "watch"}},
			{Filter: named("servicetopology"), Resources: []schema.GroupResource{{Resource: "endpoints"}, slices}, Verbs: []string{"get", "list", "watch"}},
			{Observer: named("hostnetworkpool"), Resources: []schema.GroupResource{{Resource: "pods"}}, Verbs: []string{"list", "watch"}, Default: true},
		},
		CEL: compile,
	}
}

// compile finds an error wherever an expression begins with "bad".
func compile(r CELRule) error {
	var errs []error
	check := func(field, expression string) {
		if strings.HasPrefix(expression, "bad") {
			errs = append(errs, &FieldError{Field: field, Err: fmt.Errorf("1:1: undeclared\nreference %s", expression)})
		}
	}
	check("match", r.Match)
	for i, s := range r.Set {
		check(fmt.Sprintf("set[%d].path", i), s.Path)
		check(fmt.Sprintf("set[%d].value", i), s.Value)
	}
	switch r.Match {
	case "odd field":
		errs = append(errs, &FieldError{Field: "set[7].value", Err: errors.New("is odd")})
	case "no field":
		return errors.New("too expensive")
	}
	return errors.Join(errs...)
}

const head = "apiVersion: edgehub.io/v1alpha1\nkind: EdgehubConfiguration\n"

// rule is a rule in CEL that lacks nothing but what it does.
const rule = head + "cel:\n- name: a\n  clients: [{program: kubelet}]\n  resources: [pods]\n  match: 'true'\n"

func TestParseRefuses(t *testing.T) {
	for _, test := range []struct {
		name, in string
		want     []string
	}{
		{"empty", "", []string{`f:1: is empty`}},
		{"comment only", "# nothing\n", []string{`f:1: is empty`}},
		{"empty document", "---\n", []string{`f:1: is empty`}},
		{"null", "\n~\n", []string{`f:2: is empty`}},
		{"a list", "- a\n", []string{`f:1: want fields, got a list`}},
		{"a string", "a\n", []string{`f:1: want fields, got a string`}},
		{"a number", "\n5\n", []string{`f:2: want fields, got a number`}},
		{"a time", "2026-01-02\n", []string{`f:1: want fields, got "2026-01-02"`}},
		{"too large", head + strings.Repeat("#\n", 1<<19), []string{`f:1: is larger than 262144 bytes`}},
		{"not UTF-8", head + "# \xff\n", []string{`f:3: is not text in UTF-8`}},
		{"UTF-16", "\xff\xfea\x00", []string{`f:1: is not text in UTF-8`}},
		{"control character", head + "#\n# \x01\n", []string{`f:4: is not text in UTF-8`}},
		{"second document", head + "---\n" + head, []string{`f:3: has a second document, which may not be`}},
		{"second document, empty", head + "---\n", []string{`f:3: has a second document, which may not be`}},
		{"second document, broken", head + "---\n[\n", []string{`f:4: is not YAML: did not find expected node content`}},
		{"not YAML", head + "filters:\n- name: a\n  b\n", []string{`f:5: is not YAML: could not find expected ':'`}},
		{"a tab", head + "filters:\n\t- name: a\n", []string{`f:4: is not YAML: found character that cannot start any token`}},
		{"unclosed", head + "filters: [\n", []string{`f:3: is not YAML: did not find expected node content`}},
		{"half a file", head + "filters:\n- name: masterservice\n  clien", []string{`f:5: is not YAML: could not find expected ':'`}},
		{"unknown anchor", head + "filters: *x\n", []string{`f:3: is not YAML: unknown anchor 'x' referenced`}},
		{"merge key", head + "filters:\n- &a {name: masterservice}\n- <<: *a\n  name: servicetopology\n", []string{`f:5: filters[1]: want the name of a field, got "<<"`}},
		{"key that is no string", head + "1: a\n[b]: c\n", []string{`f:3: want the name of a field, got "1"`, `f:4: want the name of a field, got a list`}},
		{"contains itself", head + "filters: &a [*a]\n", []string{`f:1: is nested deeper than 32 levels, or contains itself`}},

		{"nothing said", "{}\n", []string{`f:1: apiVersion: is missing`, `f:1: kind: is missing`}},
		{"nothing said, in line 3", "# a\n\nfilters: []\n", []string{`f:3: apiVersion: is missing`, `f:3: kind: is missing`}},
		{"other apiVersion", "apiVersion: edgehub.io/v1\nkind: EdgehubConfiguration\n", []string{`f:1: apiVersion: is "edgehub.io/v1", want "edgehub.io/v1alpha1"`}},
		{"apiVersion is a number", "apiVersion: 1\nkind: EdgehubConfiguration\n", []string{`f:1: apiVersion: want a string, got 1: put it in quotes`}},
		{"other kind", "kind: ConfigMap\napiVersion: edgehub.io/v1alpha1\n", []string{`f:1: kind: is "ConfigMap", want "EdgehubConfiguration"`}},
		{"unknown field", head + "filter: []\n", []string{`f:3: filter: unknown field, did you mean "filters"?`}},
		{"unknown field like none", head + "extraordinary: []\n", []string{`f:3: extraordinary: unknown field, known are apiVersion, kind, filters, cel`}},
		{"unknown field with an odd name", head + "\"a b\\n\": []\n", []string{`f:3: "a b\n": unknown field, known are apiVersion, kind, filters, cel`}},
		{"unknown field with a long name", head + "? " + strings.Repeat("ü", 100) + "\n: a\n", []string{`f:3: "` + strings.Repeat("ü", 32) + `"…: unknown field, known are apiVersion, kind, filters, cel`}},
		{"duplicate key", head + "filters: []\nkind: EdgehubConfiguration\n", []string{`f:4: kind: is given twice, first in line 2`}},

		{"filters are no list", head + "filters: {}\n", []string{`f:3: filters: want a list, got fields`}},
		{"filters are nothing", head + "filters:\n", []string{`f:3: filters: want a list, got nothing`}},
		{"filters are too many", head + "filters: [" + strings.Repeat("a,", 1001) + "]\n", []string{`f:3: filters: has 1001 elements, more than 1000`}},
		{"a filter is a string", head + "filters:\n- masterservice\n", []string{`f:4: filters[0]: want fields, got a string`}},
		{"a filter without a name", head + "filters:\n- disabled: true\n", []string{`f:4: filters[0].name: is missing`}},
		{"a filter with an empty name", head + "filters:\n- name: ''\n", []string{`f:4: filters[0].name: must not be empty`}},
		{"a filter with a null name", head + "filters:\n- name:\n", []string{`f:4: filters[0].name: want a string, got nothing`}},
		{"a filter with a list as name", head + "filters:\n- name: [a]\n", []string{`f:4: filters[0].name: want a string, got a list`}},
		{"unknown filter", head + "filters:\n- name: masterservise\n", []string{`f:4: filters[0].name: unknown filter "masterservise", did you mean "masterservice"?`}},
		{"unknown filter like none", head + "filters:\n- name: foo\n", []string{`f:4: filters[0].name: unknown filter "foo", known are masterservice, servicetopology, hostnetworkpool`}},
		{"duplicate filter", head + "filters:\n- name: masterservice\n- {name: hostnetworkpool}\n- name: masterservice\n", []string{`f:6: filters[2].name: "masterservice" is listed twice, first in line 4`}},
		{"duplicate deprecated filter", head + "filters:\n- name: hostnetworkpropagation\n- name: hostnetworkpropagation\n", []string{`f:5: filters[1].name: "hostnetworkpropagation" is listed twice, first in line 4`}},
		{"disabled is a string", head + "filters:\n- name: masterservice\n  disabled: yes\n", []string{`f:5: filters[0].disabled: want true or false, got "yes"`}},
		{"disabled is tagged", head + "filters:\n- name: masterservice\n  disabled: !!bool maybe\n", []string{`f:5: filters[0].disabled: want true or false, got "maybe"`}},
		{"disabled is nothing", head + "filters:\n- name: masterservice\n  disabled:\n", []string{`f:5: filters[0].disabled: want true or false, got nothing`}},
		{"disabled is a list", head + "filters:\n- name: masterservice\n  disabled: []\n", []string{`f:5: filters[0].disabled: want true or false, got a list`}},

		{"no clients", head + "filters:\n- name: masterservice\n  clients: []\n", []string{`f:5: filters[0].clients: is an empty list: leave it out, or name something`}},
		{"empty client", head + "filters:\n- name: masterservice\n  clients:\n  - {}\n", []string{`f:6: filters[0].clients[0]: is empty, and would match every client: give program, user or both`}},
		{"client is a string", head + "filters:\n- name: masterservice\n  clients: [kubelet]\n", []string{`f:5: filters[0].clients[0]: want fields, got a string`}},
		{"client with an unknown field", head + "filters:\n- name: masterservice\n  clients:\n  - prog: kubelet\n", []string{`f:6: filters[0].clients[0].prog: unknown field, known are program, user`}},
		{"client with empty fields", head + "filters:\n- name: masterservice\n  clients:\n  - program: ''\n    user: ''\n", []string{`f:6: filters[0].clients[0].program: must not be empty`, `f:7: filters[0].clients[0].user: must not be empty`}},
		{"client with a whole User-Agent", head + "filters:\n- name: masterservice\n  clients:\n  - program: kubelet/v1.36.3\n", []string{`f:6: filters[0].clients[0].program: want the first word of the User-Agent, up to a slash or space, got "kubelet/v1.36.3"`}},
		{"client with a number as user", head + "filters:\n- name: masterservice\n  clients:\n  - user: 1000\n", []string{`f:6: filters[0].clients[0].user: want a string, got 1000: put it in quotes`}},

		{"other resource", head + "filters:\n- name: servicetopology\n  resources: [endpoints, services]\n", []string{`f:5: filters[0].resources[1]: servicetopology is not for "services", only for endpoints, endpointslices.discovery.k8s.io`}},
		{"resource of another group", head + "filters:\n- name: masterservice\n  resources: [services.example.com]\n", []string{`f:5: filters[0].resources[0]: masterservice is not for "services.example.com", only for services`}},
		{"subresource", head + "filters:\n- name: masterservice\n  resources: [services/status]\n", []string{`f:5: filters[0].resources[0]: want resource or resource.group, got "services/status"`}},
		{"duplicate resource", head + "filters:\n- name: masterservice\n  resources:\n  - services\n  - services\n", []string{`f:7: filters[0].resources[1]: "services" is listed twice`}},
		{"no resources", head + "filters:\n- name: masterservice\n  resources: []\n", []string{`f:5: filters[0].resources: is an empty list: leave it out, or name something`}},
		{"other verb", head + "filters:\n- name: hostnetworkpool\n  verbs: [list, get]\n", []string{`f:5: filters[0].verbs[1]: hostnetworkpool is not for "get", only for list, watch`}},
		{"unknown verb", head + "filters:\n- name: masterservice\n  verbs: [create]\n", []string{`f:5: filters[0].verbs[0]: want one of get, list, watch, got "create"`}},
		{"duplicate verb", head + "filters:\n- name: masterservice\n  verbs: [get, get]\n", []string{`f:5: filters[0].verbs[1]: "get" is listed twice`}},
		{"no verbs", head + "filters:\n- name: masterservice\n  verbs: []\n", []string{`f:5: filters[0].verbs: is an empty list: leave it out, or name something`}},

		{"cel: nothing given", head + "cel:\n- {}\n", []string{`f:4: cel[0].clients: is missing`, `f:4: cel[0].resources: is missing`, `f:4: cel[0].name: is missing`, `f:4: cel[0].match: is missing`, `f:4: cel[0]: drop: true or set must be given`}},
		{"cel: neither drop nor set", rule, []string{`f:4: cel[0]: drop: true or set must be given`}},
		{"cel: drop: false", rule + "  drop: false\n", []string{`f:4: cel[0]: drop: true or set must be given`}},
		{"cel: drop and set", rule + "  drop: true\n  set: [{path: a, value: b}]\n", []string{`f:9: cel[0].set: cannot be given together with drop`}},
		{"cel: empty set", rule + "  set: []\n", []string{`f:8: cel[0].set: is an empty list: leave it out, or name something`}},
		{"cel: set without path and value", rule + "  set: [{}]\n", []string{`f:8: cel[0].set[0].path: is missing`, `f:8: cel[0].set[0].value: is missing`}},
		{"cel: value is no string", rule + "  set:\n  - path: a\n    value: true\n", []string{`f:10: cel[0].set[0].value: want a string, got true: put it in quotes`}},
		{"cel: a set is a string", rule + "  set: [a]\n", []string{`f:8: cel[0].set[0]: want fields, got a string`}},
		{"cel: name", strings.Replace(rule, "name: a", "name: Hide_it", 1) + "  drop: true\n", []string{`f:4: cel[0].name: want at most 40 of a-z, 0-9 and -, got "Hide_it"`}},
		{"cel: long name", strings.Replace(rule, "name: a", "name: "+strings.Repeat("a", 41), 1) + "  drop: true\n", []string{`f:4: cel[0].name: want at most 40 of a-z, 0-9 and -, got "` + strings.Repeat("a", 41) + `"`}},
		{"cel: duplicate name", rule + "  drop: true\n" + strings.TrimPrefix(rule, head+"cel:\n") + "  drop: true\n", []string{`f:9: cel[1].name: "a" is listed twice, first in line 4`}},
		{"cel: a rule is a string", head + "cel: [a]\n", []string{`f:3: cel[0]: want fields, got a string`}},
		{"cel: resource", strings.Replace(rule, "[pods]", "['*']", 1) + "  drop: true\n", []string{`f:6: cel[0].resources[0]: want resource or resource.group, got "*"`}},
		{"cel: 65 rules", head + "cel:\n" + rules(66), []string{`f:132: cel[64]: is one rule too many: there may be 64`}},
		{"cel: match does not compile", strings.Replace(rule, "'true'", "bad", 1) + "  drop: true\n", []string{`f:7: cel[0].match: 1:1: undeclared reference bad`}},
		{"cel: sets do not compile", rule + "  set:\n  - path: a\n    value: bad1\n  - path: bad2\n    value: b\n", []string{`f:10: cel[0].set[0].value: 1:1: undeclared reference bad1`, `f:11: cel[0].set[1].path: 1:1: undeclared reference bad2`}},
		{"cel: what is compiled though something else is wrong", strings.Replace(rule, "'true'", "bad", 1) + "  drop: true\n  dryrun: true\n", []string{`f:7: cel[0].match: 1:1: undeclared reference bad`, `f:9: cel[0].dryrun: unknown field, did you mean "dryRun"?`}},
		{"cel: what is not compiled", strings.Replace(rule, "'true'", "bad", 1), []string{`f:4: cel[0]: drop: true or set must be given`}},
		{"cel: error without a field", strings.Replace(rule, "'true'", "no field", 1) + "  drop: true\n", []string{`f:4: cel[0]: too expensive`}},
		{"cel: error in a field that is not there", strings.Replace(rule, "'true'", "odd field", 1) + "  drop: true\n", []string{`f:4: cel[0]: set[7].value: is odd`}},

		{"everything at once, in the order of lines", "cel:\n- name: B\n  clients: [{}]\nfilters:\n- name: a\n  verbs: [x]\nkind: x\n", []string{
			`f:1: apiVersion: is missing`,
			`f:2: cel[0].resources: is missing`,
			`f:2: cel[0].match: is missing`,
			`f:2: cel[0].name: want at most 40 of a-z, 0-9 and -, got "B"`,
			`f:2: cel[0]: drop: true or set must be given`,
			`f:3: cel[0].clients[0]: is empty, and would match every client: give program, user or both`,
			`f:5: filters[0].name: unknown filter "a", known are masterservice, servicetopology, hostnetworkpool`,
			`f:6: filters[0].verbs[0]: want one of get, list, watch, got "x"`,
			`f:7: kind: is "x", want "EdgehubConfiguration"`,
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, _, err := Parse("f", []byte(test.in), known())
			if err == nil {
				t.Fatalf("Parse(%q) = %+v, want an error", test.in, c)
			}
			if diff := cmp.Diff(test.want, strings.Split(err.Error(), "\n")); diff != "" {
				t.Errorf("Parse(%q): error (-want +got):\n%s", test.in, diff)
			}
		})
	}
}

// rules are n good ones, of two lines each.
func rules(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "- {name: r%d, clients: [{program: a}],\n  resources: [pods], match: 'true', drop: true}\n", i)
	}
	return b.String()
}

func TestParseTakes(t *testing.T) {
	for _, test := range []struct {
		name, in string
		want     Configuration
	}{
		{"nothing", head, Configuration{}},
		{"empty lists", head + "filters: []\ncel: []\n", Configuration{}},
		{"JSON", `{"apiVersion": "edgehub.io/v1alpha1", "kind": "EdgehubConfiguration"}`, Configuration{}},
		{"Windows line ends", strings.ReplaceAll(head, "\n", "\r\n"), Configuration{}},
		{"a byte order mark", "\ufeff" + head, Configuration{}},
		{"an explicit document", "%YAML 1.1\n---\n" + head + "...\n", Configuration{}},
		{"only a name", head + "filters:\n- name: masterservice\n", Configuration{Rules: []filter.Rule{{Name: "masterservice"}}}},
		{"a quoted name", head + "filters:\n- name: \"masterservice\"\n", Configuration{Rules: []filter.Rule{{Name: "masterservice"}}}},
		{"disabled", head + "filters:\n- {name: hostnetworkpool, disabled: True}\n- {name: masterservice, disabled: FALSE}\n", Configuration{Rules: []filter.Rule{{Name: "hostnetworkpool", Disabled: true}, {Name: "masterservice"}}}},
		{"a deprecated one", head + "filters:\n- name: hostnetworkpropagation\n  resources: [pods]\n  verbs: [get]\n", Configuration{}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, _, err := Parse("f", []byte(test.in), known())
			if err != nil {
				t.Fatalf("Parse(%q) = %v", test.in, err)
			}
			if diff := cmp.Diff(test.want, *got); diff != "" {
				t.Errorf("Parse(%q) (-want +got):\n%s", test.in, diff)
			}
		})
	}
	if c, _, err := Parse("f", []byte(head+"cel:\n"+rules(64)), known()); err != nil || len(c.CEL) != 64 {
		t.Errorf("Parse(64 rules) = %d rules, %v, want all", len(c.CEL), err)
	}
}

func TestParseGolden(t *testing.T) {
	in, err := os.ReadFile("testdata/full.in.yaml")
	if err != nil {
		t.Fatal(err)
	}
	c, warnings, err := Parse("full.in.yaml", in, known())
	if err != nil {
		t.Fatal(err)
	}
	got, err := json.MarshalIndent(map[string]any{"configuration": c, "warnings": warnings}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	const golden = "testdata/full.out.json"
	if *update {
		if err := os.WriteFile(golden, append(got, '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)+"\n"); diff != "" {
		t.Errorf("Parse(full.in.yaml) (-want +got):\n%s", diff)
	}
}

func TestSuggestion(t *testing.T) {
	known := []string{"masterservice", "watch", "drop"}
	for word, want := range map[string]string{
		"masterservise":  `, did you mean "masterservice"?`,
		"masterservce":   `, did you mean "masterservice"?`,
		"mmasterservice": `, did you mean "masterservice"?`,
		"asterservice":   `, did you mean "masterservice"?`,
		"watches":        `, did you mean "watch"?`,
		"hatch":          `, did you mean "watch"?`,
		"dorp":           `, did you mean "drop"?`,
		"rdp":            ", known are masterservice, watch, drop",
		"stop":           `, did you mean "drop"?`,
		"":               ", known are masterservice, watch, drop",
	} {
		if got := suggestion(word, known); got != want {
			t.Errorf("suggestion(%q) = %q, want %q", word, got, want)
		}
	}
	for _, test := range []struct {
		a, b string
		want int
	}{{"", "", 0}, {"abc", "abc", 0}, {"abc", "", 3}, {"", "abc", 3}, {"abc", "axc", 1}, {"abc", "bc", 1}, {"bc", "abc", 1}, {"abcd", "bcde", 2}, {"kitten", "sitting", 3}} {
		if got := distance(test.a, test.b, 10); got != test.want {
			t.Errorf("distance(%q, %q) = %d, want %d", test.a, test.b, got, test.want)
		}
	}
}

// What docs/configuration.md shows can be used.
func TestDocumentedExample(t *testing.T) {
	doc, err := os.ReadFile("../../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(doc), "```yaml\n")
	example, _, ok := strings.Cut(rest, "```")
	if !ok {
		t.Fatal("docs/configuration.md has no example")
	}
	if c, _, err := Parse("docs/configuration.md", []byte(example), known()); err != nil || len(c.Rules) == 0 || len(c.CEL) == 0 {
		t.Errorf("Parse(the example) = %+v, %v, want rules of both kinds", c, err)
	}
}

func TestWithoutCEL(t *testing.T) {
	k := known()
	k.CEL = nil
	_, _, err := Parse("f", []byte(rule+"  drop: true\n"), k)
	if want := "f:4: cel[0]: rules in CEL are not supported by this program"; err == nil || err.Error() != want {
		t.Errorf("Parse(a rule) = %v, want %s", err, want)
	}
}

// Whatever is written, it costs little more than reading it.
func TestParseIsBounded(t *testing.T) {
	const most = maxBytes
	fill := func(begin, piece, end string) string {
		return begin + strings.Repeat(piece, (most-len(begin)-len(end))/len(piece)) + end
	}
	laughs := head + "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
	for i := range 9 {
		laughs += fmt.Sprintf("a%d: &a%d [*a%d,*a%d,*a%d,*a%d,*a%d,*a%d,*a%d,*a%d,*a%d]\n", i+1, i+1, i, i, i, i, i, i, i, i, i)
	}
	for _, test := range []struct{ name, in, want string }{
		{"billion laughs", laughs, "f:1: has more than 50000 values, counting those that aliases stand for"},
		{"aliases in the fields that are read", fill(head+"x: &c ["+strings.Repeat("{program: a},", 900)+"]\nfilters: [", "{clients: *c},", "]\n"), "f:1: has more than 50000 values, counting those that aliases stand for"},
		{"many values", fill(head+"filters: [", "a,", "]\n"), "f:1: has more than 50000 values, counting those that aliases stand for"},
		{"many fields", fill(head, "a: b\n", ""), "f:1: has more than 50000 values, counting those that aliases stand for"},
		{"many problems", head + strings.Repeat("aaaaaaaaaaaaaaaa: b\n", 12000), "f:103: and 11900 more"},
		{"deep lists", fill(head+"filters: ", "[", ""), "f:3: is not YAML: exceeded max depth of 10000"},
		{"deep fields", fill(head+"filters: ", "{a: ", ""), "f:3: is not YAML: exceeded max depth of 10000"},
		{"deep and whole", head + "filters: " + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + "\n", "f:1: is nested deeper than 32 levels, or contains itself"},
		{"deep in blocks", fill(head+"filters:\n", "- ", "\n"), "f:3: is not YAML: exceeded max depth of 10000"},
		{"one long word", fill(head+"filters:\n- name: ", "a", "\n"), `f:4: filters[0].name: unknown filter "` + strings.Repeat("a", 64) + `"…, known are masterservice, servicetopology, hostnetworkpool`},
		{"one long number", fill(head+"filters:\n- name: ", "1", "\n"), ""},
		{"quotes", fill(head+"filters:\n- name: \"", `\"`, "\"\n"), ""},
		{"comments", fill(head, "# a\n", "filters: 5\n"), "want a list, got a number"},
		{"comments behind values", fill(head+"filters:\n", "- a # a\n", ""), ""},
		{"anchors", fill(head+"filters:\n", "- &a a\n", ""), ""},
		{"question marks", fill(head, "? ", "\n"), ""},
		{"blank lines", fill(head, "\n", "filters: 5\n"), "f:262"},
		{"folded text", fill(head+"filters: >\n", "  a\n\n", ""), ""},
		{"tags", fill(head+"filters: [", "!!a a,", "]\n"), ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			begun := time.Now()
			_, _, err := Parse("f", []byte(test.in), known())
			took := time.Since(begun)
			runtime.ReadMemStats(&after)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("Parse(%d bytes) = %.300v, want %s", len(test.in), err, test.want)
			}
			if took > 10*time.Second { // with the race detector on a busy machine
				t.Errorf("Parse(%d bytes) took %v", len(test.in), took)
			}
			if got := after.TotalAlloc - before.TotalAlloc; got > 128<<20 {
				t.Errorf("Parse(%d bytes) allocated %d MiB in all", len(test.in), got>>20)
			}
			t.Logf("%v, %d MiB allocated", took, (after.TotalAlloc-before.TotalAlloc)>>20)
		})
	}
}

func FuzzParse(f *testing.F) {
	if full, err := os.ReadFile("testdata/full.in.yaml"); err == nil {
		f.Add(full)
	}
	for _, seed := range []string{"", head, rule + "  drop: true\n", rule + "  set: [{path: a, value: bad}]\n", head + "filters: &a [*a]\n", "%YAML 1.1\n---\n" + head + "...\n", "\ufeff" + head, "- # a\n -", "a: b\n--- c"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c, warnings, err := Parse("f", b, known())
		if err != nil {
			for line := range strings.SplitSeq(err.Error(), "\n") {
				if !strings.HasPrefix(line, "f:") {
					t.Errorf("Parse(%q) = %q, want lines that begin with the name", b, line)
				}
			}
			return
		}
		// What is in force is what a restart finds.
		copied := lastGood(sourceFile, "f", b)
		again, warningsAgain, err := parseFile("f", copied, known())
		if err != nil {
			t.Fatalf("Parse(%q) = %v, want what was parsed before", copied, err)
		}
		if diff := cmp.Diff(c, again); diff != "" || len(warnings) != len(warningsAgain) {
			t.Errorf("Parse(%q) again (-first +second), %q:\n%s", copied, warningsAgain, diff)
		}
	})
}
