// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/edgehub/edgehub/pkg/filter"
)

// maxCELRules bounds what a request can cost, and the series of metrics.
const maxCELRules = 64

// deprecated is a filter of older agents.
const deprecated = "hostnetworkpropagation"

var (
	verbs        = []string{"get", "list", "watch"}
	celName      = regexp.MustCompile(`^[a-z0-9-]{1,40}$`)
	resourceName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]*(\.[a-z0-9][a-z0-9-]*)*$`)
)

// Parse reads a document, of at most 256 KiB, strictly: it is one YAML document without
// unknown or repeated fields. All that is wrong is returned at once, joined, in the order
// of lines, each as NAME:LINE: FIELD: what is wrong, where name is what the document is
// called; beyond 100, the rest is a number. Warnings have the same form. Time and memory
// are bounded whatever b is.
func Parse(name string, b []byte, k Known) (c *Configuration, warnings []string, err error) {
	p := &parser{document: document{name: name}, known: k}
	if root, ok := p.read(b); ok {
		p.configuration(root)
	}
	if err := p.problems.join(name); err != nil {
		return nil, nil, err
	}
	return &p.conf, p.warnings.lines(name), nil
}

// A parser makes a Configuration from a document.
type parser struct {
	document
	known Known
	conf  Configuration
}

func (p *parser) configuration(root value) {
	m := p.fields(root, "apiVersion", "kind", "filters", "cel")
	p.mustBe(root, m["apiVersion"], "apiVersion", APIVersion)
	p.mustBe(root, m["kind"], "kind", Kind)
	seen := map[string]int{}
	for _, v := range p.list(m["filters"]) {
		p.rule(v, seen)
	}
	clear(seen)
	for i, v := range p.list(m["cel"]) {
		if i == maxCELRules {
			p.fail(v, "is one rule too many: there may be %d", maxCELRules)
			break
		}
		p.celRule(v, seen)
	}
}

func (p *parser) mustBe(parent, v value, field, want string) {
	if p.require(parent, v, field) {
		if got := p.text(v); got != "" && got != want {
			p.fail(v, "is %s, want %q", short(got), want)
		}
	}
}

// rule reads an element of filters.
func (p *parser) rule(v value, seen map[string]int) {
	m := p.fields(v, "name", "disabled", "clients", "resources", "verbs")
	if m == nil {
		return
	}
	var of *filter.Entry
	name := ""
	if p.require(v, m["name"], "name") {
		if name = p.text(m["name"]); name != "" && p.unique(m["name"], name, seen) {
			of = p.entry(m["name"], name)
		}
	}
	r := filter.Rule{
		Name:      name,
		Disabled:  p.flag(m["disabled"]),
		Clients:   p.clients(m["clients"]),
		Resources: p.resources(m["resources"], of),
		Verbs:     p.verbs(m["verbs"], of),
	}
	if name != deprecated {
		p.conf.Rules = append(p.conf.Rules, r)
	}
}

// entry finds the filter of this name; nil if there is none.
func (p *parser) entry(v value, name string) *filter.Entry {
	var names []string
	for i := range p.known.Entries {
		e := &p.known.Entries[i]
		if e.Name() == name {
			return e
		}
		names = append(names, e.Name())
	}
	if name == deprecated {
		p.warn(v, "%s does nothing any more: pods are no longer changed on their way to the node. The observer hostnetworkpool, which reports, and the webhook in the cluster have replaced it", deprecated)
		return nil
	}
	p.fail(v, "unknown filter %s%s", short(name), suggestion(name, names))
	return nil
}

// celRule reads an element of cel.
func (p *parser) celRule(v value, seen map[string]int) {
	m := p.fields(v, "name", "clients", "resources", "verbs", "match", "drop", "set", "dryRun")
	if m == nil {
		return
	}
	p.require(v, m["clients"], "clients")
	p.require(v, m["resources"], "resources")
	r := CELRule{
		Clients:   p.clients(m["clients"]),
		Resources: p.resources(m["resources"], nil),
		Verbs:     p.verbs(m["verbs"], nil),
		DryRun:    p.flag(m["dryRun"]),
	}
	before := len(p.problems) // of what follows CEL would say it again
	p.require(v, m["name"], "name")
	p.require(v, m["match"], "match")
	places := map[string]value{"name": m["name"], "match": m["match"], "set": m["set"], "drop": m["drop"]}
	r.Name, r.Match, r.Drop, r.Set = p.text(m["name"]), p.text(m["match"]), p.flag(m["drop"]), p.assignments(m["set"], places)
	if r.Verbs == nil {
		r.Verbs = slices.Clone(verbs)
	}
	if r.Name != "" && !celName.MatchString(r.Name) {
		p.fail(m["name"], "want at most 40 of a-z, 0-9 and -, got %s", short(r.Name))
	} else if r.Name != "" {
		p.unique(m["name"], r.Name, seen)
	}
	switch {
	case r.Drop && m["set"].Node != nil:
		p.fail(m["set"], "cannot be given together with drop")
	case !r.Drop && m["set"].Node == nil:
		p.fail(v, "drop: true or set must be given")
	}
	if len(p.problems) == before {
		p.compile(v, r, places)
	}
	p.conf.CEL = append(p.conf.CEL, r)
}

// compile lets CEL find what is wrong with a rule; places are its fields.
func (p *parser) compile(v value, r CELRule, places map[string]value) {
	if p.known.CEL == nil {
		p.fail(v, "rules in CEL are not supported by this program")
		return
	}
	err := p.known.CEL(r)
	if err == nil {
		return
	}
	errs := []error{err}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		errs = joined.Unwrap()
	}
	for _, err := range errs {
		at := v
		var of *FieldError
		if errors.As(err, &of) {
			if place := places[of.Field]; place.Node != nil {
				at, err = place, of.Err
			}
		}
		p.fail(at, "%s", strings.ReplaceAll(err.Error(), "\n", " "))
	}
}

func (p *parser) assignments(v value, places map[string]value) (out []Assignment) {
	for _, item := range p.list(v) {
		m := p.fields(item, "path", "value")
		if m == nil {
			continue
		}
		for _, field := range []string{"path", "value"} {
			p.require(item, m[field], field)
			places[item.field[strings.LastIndex(item.field, "set["):]+"."+field] = m[field]
		}
		out = append(out, Assignment{Path: p.text(m["path"]), Value: p.text(m["value"])})
	}
	p.notEmpty(v)
	return out
}

func (p *parser) clients(v value) (out []filter.Client) {
	for _, item := range p.list(v) {
		m := p.fields(item, "program", "user")
		if m == nil {
			continue
		}
		c := filter.Client{User: p.text(m["user"]), Program: p.text(m["program"])}
		if len(item.Content) == 0 {
			p.fail(item, "is empty, and would match every client: give program, user or both")
		}
		if strings.ContainsAny(c.Program, "/ ") {
			p.fail(m["program"], "want the first word of the User-Agent, up to a slash or space, got %s", short(c.Program))
		}
		out = append(out, c)
	}
	p.notEmpty(v)
	return out
}

// resources reads those that narrow an entry; nil: any.
func (p *parser) resources(v value, of *filter.Entry) (out []schema.GroupResource) {
	for _, item := range p.list(v) {
		s := p.text(item)
		r := schema.ParseGroupResource(s)
		switch {
		case s == "":
		case !resourceName.MatchString(s):
			p.fail(item, "want resource or resource.group, got %s", short(s))
		case slices.Contains(out, r):
			p.fail(item, "%s is listed twice", short(s))
		case of != nil && !slices.Contains(of.Resources, r):
			only := make([]string, len(of.Resources))
			for i, r := range of.Resources {
				only[i] = r.String()
			}
			p.fail(item, "%s is not for %s, only for %s", of.Name(), short(s), strings.Join(only, ", "))
		default:
			out = append(out, r)
		}
	}
	p.notEmpty(v)
	return out
}

// verbs reads those that narrow an entry; nil: any.
func (p *parser) verbs(v value, of *filter.Entry) (out []string) {
	for _, item := range p.list(v) {
		s := p.text(item)
		switch {
		case s == "":
		case !slices.Contains(verbs, s):
			p.fail(item, "want one of %s, got %s", strings.Join(verbs, ", "), short(s))
		case slices.Contains(out, s):
			p.fail(item, "%s is listed twice", short(s))
		case of != nil && !slices.Contains(of.Verbs, s):
			p.fail(item, "%s is not for %s, only for %s", of.Name(), short(s), strings.Join(of.Verbs, ", "))
		default:
			out = append(out, s)
		}
	}
	p.notEmpty(v)
	return out
}
