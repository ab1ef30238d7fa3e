// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cel

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/edgehub/edgehub/pkg/filter"
)

// newFilter compiles a rule for a node of the pool shop.
func newFilter(t testing.TB, rule Rule) filter.Filter {
	t.Helper()
	if rule.Name == "" {
		rule.Name = "a"
	}
	f, err := NewRules(Config{Node: func() Node { return Node{Name: "n1", Pool: "shop"} }}).New(rule)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func set(path, value string) []Set { return []Set{{path, value}} }

func TestNewRefuses(t *testing.T) {
	const tooLong = "'%s'"
	ok := set("spec.a", "1")
	for _, tc := range []struct {
		name string
		rule Rule
		want []string
	}{
		{"no name", Rule{Name: "", Match: "true", Drop: true}, []string{`name: "" is no DNS label`}},
		{"name", Rule{Name: "A_b", Match: "true", Drop: true}, []string{`name: "A_b" is no DNS label`}},
		{"neither drop nor set", Rule{Name: "a", Match: "true"}, []string{"drop: a rule either"}},
		{"drop and set", Rule{Name: "a", Match: "true", Drop: true, Set: ok}, []string{"drop: a rule either"}},
		{"too many sets", Rule{Name: "a", Match: "true", Set: make([]Set, maxSets+1)}, []string{"set: 65 fields are more than 64"}},
		{"no match", Rule{Name: "a", Match: " \n", Drop: true}, []string{"match: there is no expression"}},
		{"long match", Rule{Name: "a", Match: fmt.Sprintf(tooLong, strings.Repeat("a", maxExpression)), Drop: true}, []string{"match: 10002 bytes are more than 10000"}},
		{"syntax", Rule{Name: "a", Match: "true &&\n  )", Drop: true}, []string{"match: 2:3: Syntax error"}},
		{"unknown variable", Rule{Name: "a", Match: "true && obj.kind == 'Pod'", Drop: true}, []string{"match: 1:9: undeclared reference to 'obj'"}},
		{"unknown field of node", Rule{Name: "a", Match: "node.zone == 'a'", Drop: true}, []string{"match: 1:1: undeclared reference to 'node'"}},
		{"many problems", Rule{Name: "a", Match: "a && b && c && d", Drop: true}, []string{"match: 1:1: undeclared reference to 'a' (in container ''); 1:6:"}},
		{"not bool", Rule{Name: "a", Match: "1 + 1", Drop: true}, []string{"match: 1:1: its type int is not bool"}},
		{"bad regex", Rule{Name: "a", Match: "object.kind.matches('(')", Drop: true}, []string{"match: 1:21: invalid matches argument"}},
		{"bad duration", Rule{Name: "a", Match: "duration('1x') > duration('1s')", Drop: true}, []string{"match: 1:10: invalid duration argument"}},
		{"time zone", Rule{Name: "a", Match: "timestamp(object.metadata.creationTimestamp).getHours('Europe/Berlin') > 1", Drop: true}, []string{"match: 1:54: found no matching overload for 'getHours'"}},
		{"no time", Rule{Name: "a", Match: "now() > timestamp('2026-01-01T00:00:00Z')", Drop: true}, []string{"match: 1:4: undeclared reference to 'now'"}},
		{"deep", Rule{Name: "a", Match: strings.Repeat("(", 1000) + "true" + strings.Repeat(")", 1000), Drop: true}, []string{"match: "}},
		{"type as a value", Rule{Name: "a", Match: "true", Set: set("spec.a", "type(1)")}, []string{"set[0].value: 1:1: its type type(int) is not null_type"}},
		{"optional as a value", Rule{Name: "a", Match: "true", Set: set("spec.a", "object.?spec")}, []string{"set[0].value: 1:1: its type optional_type(dyn) is not"}},
		{"second value", Rule{Name: "a", Match: "true", Set: []Set{{"spec.a", "1"}, {"spec.b", "x"}}}, []string{"set[1].value: 1:1: undeclared reference to 'x'"}},
		{"all at once", Rule{Name: "", Match: "x", Set: []Set{{"kind", "1 +"}}}, []string{"name: ", "match: ", "set[0].path: ", "set[0].value: "}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := NewRules(Config{}).New(tc.rule)
			joined, ok := err.(interface{ Unwrap() []error })
			if !ok {
				t.Fatalf("New(%+v) = %v, want an error of errors.Join", tc.rule, err)
			}
			var got []string
			for _, err := range joined.Unwrap() {
				var field *FieldError
				if !errors.As(err, &field) {
					t.Errorf("New() = %v, want a FieldError", err)
				}
				got = append(got, err.Error())
				if len(got) > len(tc.want) {
					break // of too many sets, all of which are empty, one is enough
				}
			}
			for i, want := range tc.want {
				if i >= len(got) || !strings.HasPrefix(got[i], want) {
					t.Errorf("New() = %q, want %q", got, tc.want)
				} else if strings.Contains(got[i], "\n") {
					t.Errorf("New() = %q, want one line", got[i])
				}
			}
		})
	}
}

func TestNewTellsThreeProblems(t *testing.T) {
	_, err := NewRules(Config{}).New(Rule{Name: "a", Match: "a && b && c && d", Drop: true})
	if err == nil || strings.Count(err.Error(), "undeclared") != maxProblems || !strings.HasSuffix(err.Error(), "; …") {
		t.Errorf("New() = %v, want three problems and …", err)
	}
}

func TestParsePath(t *testing.T) {
	key := func(k string) step { return step{key: k} }
	for _, tc := range []struct {
		path string
		want []step
		err  string
	}{
		{"spec", []step{key("spec")}, ""},
		{"spec.a.b-c.$d", []step{key("spec"), key("a"), key("b-c"), key("$d")}, ""},
		{`metadata.labels["example.com/x"]`, []step{key("metadata"), key("labels"), key("example.com/x")}, ""},
		{`metadata.labels['example.com/x'].y`, []step{key("metadata"), key("labels"), key("example.com/x"), key("y")}, ""},
		{`spec["a\"]"][0][12].b`, []step{key("spec"), key(`a"]`), {index: 0}, {index: 12}, key("b")}, ""},
		{"metadata.nameOther", []step{key("metadata"), key("nameOther")}, ""},
		{"spec.metadata.name", []step{key("spec"), key("metadata"), key("name")}, ""},
		{"", nil, "1:1: no field name"},
		{"[0]", nil, "1:1: no field name"},
		{".spec", nil, "1:1: no field name"},
		{"spec.", nil, "1:6: no field name"},
		{"spec..a", nil, "1:6: no field name"},
		{"spec a", nil, "1:5: neither . nor ["},
		{"spec[", nil, "1:6: neither an index nor"},
		{"spec[a]", nil, "1:6: neither an index nor"},
		{"spec[-1]", nil, "1:6: neither an index nor"},
		{"spec[1234567]", nil, "1:12: no ]"},
		{`spec["a`, nil, "1:6: the quotes do not end"},
		{`spec['a`, nil, "1:6: the quotes do not end"},
		{`spec["a"`, nil, "1:9: no ]"},
		{`spec[""]`, nil, "1:6: the key is empty"},
		{`spec['']`, nil, "1:6: the key is empty"},
		{"spec" + strings.Repeat("[0]", maxSteps), nil, "33 steps are more than 32"},
		{strings.Repeat("a", maxPath+1), nil, "1001 bytes are more than 1000"},
		{"apiVersion", nil, "cannot be set"},
		{"kind", nil, "cannot be set"},
		{"kind.a", nil, "cannot be set"},
		{"metadata", nil, "cannot be set"},
		{"metadata.name", nil, "cannot be set"},
		{"metadata.namespace", nil, "cannot be set"},
		{`metadata["uid"]`, nil, "cannot be set"},
		{"metadata['resourceVersion'].a", nil, "cannot be set"},
	} {
		got, err := parsePath(tc.path)
		if tc.err != "" {
			if err == nil || !strings.Contains(err.Error(), tc.err) {
				t.Errorf("parsePath(%q) = %v, %v, want error %q", tc.path, got, err, tc.err)
			}
			continue
		}
		if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(step{})); err != nil || diff != "" {
			t.Errorf("parsePath(%q) = %v, %v, want %v", tc.path, got, err, tc.want)
		}
	}
}

// The filter of a rule tells when to list again only if its verdicts depend on the pool.
func TestDependent(t *testing.T) {
	pool := poolStub{make(chan struct{})}
	rules := NewRules(Config{Pool: pool})
	for _, tc := range []struct {
		rule Rule
		want bool
	}{
		{Rule{Match: "true", Drop: true}, false},
		{Rule{Match: "node.name == 'a'", Drop: true}, false},
		{Rule{Match: "object.node.pool == 'a'", Drop: true}, false},
		{Rule{Match: "true && [1].exists(i, node.pool == 'a')", Drop: true}, true},
		{Rule{Match: "true", Set: []Set{{"spec.a", "1"}, {"spec.b", "node.pool"}}}, true},
	} {
		tc.rule.Name = "a"
		f, err := rules.New(tc.rule)
		if err != nil {
			t.Fatal(err)
		}
		d, got := f.(filter.Dependent)
		if got != tc.want {
			t.Errorf("New(%+v) is a Dependent: %t, want %t", tc.rule, got, tc.want)
		}
		if got && !errors.Is(d.Ready(), errNotReady) {
			t.Errorf("Ready() = %v, want %v", d.Ready(), errNotReady)
		}
		if f.Name() != "cel/a" {
			t.Errorf("Name() = %q, want cel/a", f.Name())
		}
	}
}

var errNotReady = errors.New("not ready")

type poolStub struct{ changed chan struct{} }

func (p poolStub) Ready() error             { return errNotReady }
func (p poolStub) Changed() <-chan struct{} { return p.changed }
