// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cel makes filters of rules that operators write in CEL, in the configuration:
// which objects a rule is for (match), and whether it withholds them (drop) or changes
// some of their fields (set).
//
// An expression sees the object as `object`, as it is in JSON, and this node as
// `node.name` and `node.pool` (empty: in no pool). metadata.managedFields and fields that the Go type of a Service,
// Endpoints, ConfigMap, Pod, Node, Secret or EndpointSlice does not have are not seen.
// There are the standard functions, and of the extensions that the API server has too:
// strings, lists, sets and optional types. There are not: its functions for URLs,
// addresses, quantities, versions, formats and authorization, comprehensions with two
// variables, and the readings of a timestamp in a time zone, which would come from the
// node's disk. Lists and maps may mix types, unlike in the API server. Maps are gone
// through in the order of their keys. So on one node of one pool the same object always
// gets the same verdict.
//
// A field that an object does not have is an error, not empty, and an error fails the
// response. So say has(object.spec.nodeName) && …, or with optional types
// object.metadata.?labels["app"].orValue("").
package cel

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	celgo "github.com/google/cel-go/cel"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/time/rate"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/edgehub/edgehub/pkg/filter"
)

// MaxRules is how many rules a configuration may have; each is a label of a metric.
const MaxRules = 64

// maxSets is how many fields a rule may set.
const maxSets = 64

// A Rule is for the objects that Match says true of. It either drops or sets.
type Rule struct {
	// Name is a DNS label. The filter is called cel/ and this.
	Name string
	// Match is an expression of type bool. Which of &&'s sides fails does not matter if
	// the other one is false.
	Match string
	Drop  bool
	// Set happens in order, but all values are taken from the object as it was before.
	Set []Set
	// DryRun only counts and logs what the rule would do. Nothing that goes wrong with it
	// fails a response.
	DryRun bool
}

// A Set sets one field.
type Set struct {
	// Path is the field: metadata.labels["example.com/x"], spec.containers[0].image. Maps
	// on the way are made where they are missing, elements of lists must be there.
	// apiVersion, kind, and in metadata name, namespace, uid, resourceVersion and
	// managedFields are refused.
	Path string
	// Value is an expression. Null removes the field. Bytes become base64, times and
	// durations strings.
	Value string
}

// A FieldError says which field of a Rule is wrong: name, match, drop, set, set[1].path,
// set[0].value. It is one line.
type FieldError struct {
	Field string
	Err   error // of an expression: line:column: message
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Err.Error() }
func (e *FieldError) Unwrap() error { return e.Err }

// A Node is what rules know of the node.
type Node struct{ Name, Pool string }

// Config is what rules need besides themselves.
type Config struct {
	// Node is asked once for each object. It must be safe for concurrent use. Nil: nothing
	// is known.
	Node func() Node
	// Pool tells when Node's Pool is known and when it changes. The filters of rules that
	// name node.pool are Dependents by it. Nil: it is known and stays.
	Pool filter.Dependent

	Registerer prometheus.Registerer
}

// Rules makes filters of rules. Until there is one it costs nothing. Safe for concurrent
// use.
type Rules struct {
	cfg Config
	env func() (*celgo.Env, error)

	mu    sync.Mutex
	inUse []*compiled // whose counts are shown
}

// NewRules makes no filter yet.
func NewRules(cfg Config) *Rules {
	if cfg.Node == nil {
		cfg.Node = func() Node { return Node{} }
	}
	r := &Rules{cfg: cfg, env: sync.OnceValues(newEnv)}
	if cfg.Registerer != nil {
		cfg.Registerer.MustRegister(collector{r})
	}
	return r
}

// New compiles a rule. The error is errors.Join's of *FieldErrors, one for each field that
// is wrong. The entry of a filter that drops and is no dry run must say that it withholds.
func (r *Rules) New(rule Rule) (filter.Filter, error) {
	env, err := r.env()
	if err != nil {
		return nil, fmt.Errorf("make the CEL environment: %w", err)
	}
	rule.Set = slices.Clone(rule.Set)
	c := &compiled{rule: rule, node: r.cfg.Node, counts: r.countsOf(rule), logs: rate.NewLimiter(logsPerSecond, logsBurst)}
	if err := c.compile(env); err != nil {
		return nil, err
	}
	if c.usesPool() && r.cfg.Pool != nil {
		return dependent{c, r.cfg.Pool}, nil
	}
	return c, nil
}

func (c *compiled) compile(env *celgo.Env) error {
	var errs []error
	field := func(name string, err error) {
		if err != nil {
			errs = append(errs, &FieldError{name, err})
		}
	}
	if len(validation.IsDNS1123Label(c.rule.Name)) > 0 {
		field("name", fmt.Errorf("%.64q is no DNS label: a-z, 0-9 and -, at most 63", c.rule.Name))
	}
	switch n := len(c.rule.Set); {
	case c.rule.Drop == (n > 0):
		field("drop", errors.New("a rule either drops or sets something"))
	case n > maxSets:
		field("set", fmt.Errorf("%d fields are more than %d", n, maxSets))
		c.rule.Set = c.rule.Set[:maxSets]
	}
	var err error
	c.match, err = compile(env, c.rule.Match, celgo.BoolType)
	field("match", err)
	for i, s := range c.rule.Set {
		path, err := parsePath(s.Path)
		field(fmt.Sprintf("set[%d].path", i), err)
		value, err := compile(env, s.Value, settable...)
		field(fmt.Sprintf("set[%d].value", i), err)
		c.sets = append(c.sets, setter{path, value})
	}
	return errors.Join(errs...)
}

func (c *compiled) usesPool() bool {
	return c.match.usesPool || slices.ContainsFunc(c.sets, func(s setter) bool { return s.value.usesPool })
}

// Use says which filters, of those that New has made, are in force: the counts of their
// dry runs are shown, and those of all others forgotten. A rule that has not changed since
// the last Use goes on counting. More than [MaxRules], or one name twice, is not shown.
func (r *Rules) Use(filters []filter.Filter) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.inUse = nil
	for _, f := range filters {
		c, ok := f.(interface{ unwrap() *compiled })
		if ok && len(r.inUse) < MaxRules && !slices.ContainsFunc(r.inUse, func(u *compiled) bool { return u.Name() == f.Name() }) {
			r.inUse = append(r.inUse, c.unwrap())
		}
	}
}
