// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filters

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"

	corev1 "k8s.io/api/core/v1"

	"github.com/edgehub/edgehub/test/rig"
)

// What follows are rules that are as simple in Go as in CEL, so that the test knows by
// itself what they make of an object.

const (
	maxRules = 7
	mark     = "example.com/mark" // a label that rules set
	hidden   = "hidden"
)

var (
	colors    = []string{"red", "green", "blue"}
	resources = []string{"configmaps", "services", "widgets"}
	groups    = map[string]string{"configmaps": "configmaps", "services": "services", "widgets": "widgets.example.com"}
)

// clientsOf are for whom rules are; delta of the node is never among them.
var clientsOf = []client{{Program: "alpha"}, {Program: "beta"}, {Program: "gamma"}, {User: agentUser}, {Program: "alpha", User: rig.NodeUser}}

// pick returns one of several.
func pick[T any](rng *rand.Rand, of []T) T { return of[rng.IntN(len(of))] }

// field is a field of an object; nil if it is not there.
func field(o map[string]any, path ...string) any {
	var v any = o
	for _, name := range path {
		m, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = m[name]
	}
	return v
}

func textOf(o map[string]any, path ...string) string {
	s, _ := field(o, path...).(string)
	return s
}

// put sets a field, and makes what it lies in.
func put(o map[string]any, value any, path ...string) {
	for _, name := range path[:len(path)-1] {
		inner, ok := o[name].(map[string]any)
		if !ok {
			inner = map[string]any{}
			o[name] = inner
		}
		o = inner
	}
	o[path[len(path)-1]] = value
}

// levels are where objects say their level, a text but in widgets.
var levels = map[string][]string{"configmaps": {"data", "level"}, "services": {"metadata", "annotations", "level"}, "widgets": {"spec", "level"}}

// notes are where they say something that may be hidden.
var notes = map[string][]string{"configmaps": {"data", "text"}, "services": {"metadata", "annotations", "text"}, "widgets": {"spec", "text"}}

func levelOf(o map[string]any, resource string) int {
	switch v := field(o, levels[resource]...).(type) {
	case string:
		n, _ := strconv.Atoi(v)
		return n
	case float64:
		return int(v)
	}
	return 0
}

func levelCEL(resource string) string {
	path := "object.?" + strings.Join(levels[resource], ".?")
	if resource == "widgets" {
		return path + ".orValue(0)"
	}
	return "int(" + path + `.orValue("0"))`
}

// newRule returns a random rule.
func newRule(rng *rand.Rand, n int) rule {
	resource := pick(rng, resources)
	r := rule{
		Name: fmt.Sprintf("rule-%d", n), Clients: []client{pick(rng, clientsOf)}, Resources: []string{groups[resource]}, DryRun: rng.IntN(6) == 0,
	}
	for rng.IntN(2) == 0 {
		r.Clients = append(r.Clients, pick(rng, clientsOf))
	}
	r.match(rng, resource)
	if rng.IntN(2) == 0 {
		r.Drop = true
	} else {
		r.sets(rng, resource)
	}
	return r
}

func (r *rule) match(rng *rand.Rand, resource string) {
	color := pick(rng, colors)
	const colorCEL = `object.metadata.?labels.?color.orValue("")`
	isColor := func(o map[string]any) bool { return textOf(o, "metadata", "labels", "color") == color }
	switch rng.IntN(6) {
	case 0:
		r.Match = fmt.Sprintf("%s == %q", colorCEL, color)
		r.matches = func(o map[string]any, _ string) bool { return isColor(o) }
	case 1:
		suffix := strconv.Itoa(rng.IntN(5))
		r.Match = fmt.Sprintf("object.metadata.name.endsWith(%q)", suffix)
		r.matches = func(o map[string]any, _ string) bool {
			return strings.HasSuffix(textOf(o, "metadata", "name"), suffix)
		}
	case 2:
		r.Match = fmt.Sprintf(`object.metadata.namespace == "a" && %s != %q`, colorCEL, color)
		r.matches = func(o map[string]any, _ string) bool {
			return textOf(o, "metadata", "namespace") == "a" && !isColor(o)
		}
	case 3:
		least := 1 + rng.IntN(4)
		r.Match = fmt.Sprintf("%s >= %d", levelCEL(resource), least)
		r.matches = func(o map[string]any, _ string) bool { return levelOf(o, resource) >= least }
	case 4:
		in := pick(rng, []string{"p1", "p2", ""})
		r.Match = fmt.Sprintf("node.pool == %q && %s == %q", in, colorCEL, color)
		r.matches = func(o map[string]any, pool string) bool { return pool == in && isColor(o) }
	default: // what an earlier rule may have set
		r.Match = fmt.Sprintf("%q in object.metadata.?labels.orValue({})", mark)
		r.matches = func(o map[string]any, _ string) bool { return field(o, "metadata", "labels", mark) != nil }
	}
}

func (r *rule) sets(rng *rand.Rand, resource string) {
	switch dice := rng.IntN(4); {
	case dice == 0:
		value := fmt.Sprintf("v%d", rng.IntN(100))
		r.Set = []set{{fmt.Sprintf("metadata.labels[%q]", mark), strconv.Quote(value)}}
		r.change = func(o map[string]any, _ string) { put(o, value, "metadata", "labels", mark) }
	case dice == 1:
		r.Set = []set{{"metadata.labels.pool", "node.pool"}, {"metadata.annotations.by", `"edgehub"`}}
		r.change = func(o map[string]any, pool string) {
			put(o, pool, "metadata", "labels", "pool")
			put(o, "edgehub", "metadata", "annotations", "by")
		}
	case dice == 2 && resource == "widgets":
		r.Set = []set{{strings.Join(levels["widgets"], "."), levelCEL("widgets") + " + 1"}}
		r.change = func(o map[string]any, _ string) {
			put(o, float64(levelOf(o, "widgets")+1), levels["widgets"]...)
		}
	default:
		r.Set = []set{{strings.Join(notes[resource], "."), strconv.Quote(hidden)}}
		r.change = func(o map[string]any, _ string) { put(o, hidden, notes[resource]...) }
	}
}

// newDocument returns a random configuration: some of the rules before, changed or not, and
// new ones; or none at all.
func newDocument(rng *rand.Rand, before document, names *int) document {
	var d document
	if before.CEL != nil && rng.IntN(4) == 0 {
		return d
	}
	for _, r := range before.CEL {
		switch rng.IntN(5) {
		case 0: // gone
		case 1:
			r.DryRun = !r.DryRun
			d.CEL = append(d.CEL, r)
		case 2: // another one of the same name
			fresh := newRule(rng, 0)
			fresh.Name = r.Name
			d.CEL = append(d.CEL, fresh)
		default:
			d.CEL = append(d.CEL, r)
		}
	}
	for len(d.CEL) < maxRules && (len(d.CEL) == 0 || rng.IntN(3) > 0) {
		*names++
		d.CEL = append(d.CEL, newRule(rng, *names))
	}
	if rng.IntN(4) == 0 {
		d.CEL[0], d.CEL[len(d.CEL)-1] = d.CEL[len(d.CEL)-1], d.CEL[0]
	}
	if rng.IntN(2) == 0 {
		d.Filters = []entry{{Name: "discardcloudservice", Disabled: rng.IntN(4) == 0, Clients: []client{pick(rng, clientsOf)}}}
	}
	return d
}

// isFor reports whether clients name who asks.
func isFor(clients []client, program, user string) bool {
	return slices.ContainsFunc(clients, func(c client) bool {
		return (c.Program == "" || c.Program == program) && (c.User == "" || c.User == user)
	})
}

// view is what a document makes of an object for somebody, nil for nothing. The object is
// not changed.
func (d document) view(v *view, object map[string]any, pool string) map[string]any {
	user := agentUser
	if v.byNode {
		user = rig.NodeUser
	}
	for _, e := range d.Filters { // there is only one
		if !e.Disabled && isFor(e.Clients, v.program, user) && v.resource == "services" && textOf(object, "spec", "type") == "LoadBalancer" &&
			textOf(object, "metadata", "annotations", "svc.openyurt.io/discard") == "true" {
			return nil
		}
	}
	object = runtime.DeepCopyJSON(object)
	for _, r := range d.CEL {
		switch {
		case r.DryRun || !slices.Contains(r.Resources, groups[v.resource]) || !isFor(r.Clients, v.program, user) || !r.matches(object, pool):
		case r.Drop:
			return nil
		default:
			r.change(object, pool)
		}
	}
	return object
}

// decode makes the same of an item, whatever its form.
func decode(resource string, item []byte, protobuf bool) (o map[string]any, err error) {
	if protobuf {
		typed := map[string]interface{ Unmarshal([]byte) error }{"configmaps": &corev1.ConfigMap{}, "services": &corev1.Service{}}[resource]
		if err := typed.Unmarshal(item); err != nil {
			return nil, err
		}
		if item, err = json.Marshal(typed); err != nil {
			return nil, err
		}
	}
	return o, json.Unmarshal(item, &o)
}
