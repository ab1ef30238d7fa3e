// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cel

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"strings"

	"golang.org/x/time/rate"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/filter"
)

// A dry run logs this much for each rule; all is counted.
const (
	logsPerSecond = 1
	logsBurst     = 10
)

var converter = runtime.DefaultUnstructuredConverter

// A compiled is the filter of a rule.
type compiled struct {
	rule   Rule
	match  *expression
	sets   []setter
	node   func() Node
	counts *counts
	logs   *rate.Limiter
}

type setter struct {
	path  []step
	value *expression
}

var _ filter.Filter = (*compiled)(nil)

// A dependent is the filter of a rule that names the node's pool.
type dependent struct {
	*compiled
	filter.Dependent
}

func (c *compiled) unwrap() *compiled { return c }

// Name implements filter.Filter.
func (c *compiled) Name() string { return "cel/" + c.rule.Name }

// Apply implements filter.Filter. Its errors, but those of Decode, hold nothing of the
// object.
func (c *compiled) Apply(ctx context.Context, o *filter.Object) (filter.Verdict, error) {
	verdict, install, err := c.judge(ctx, o)
	if c.rule.DryRun {
		c.count(ctx, o, verdict, err)
		return filter.Keep, nil
	}
	if err != nil {
		return filter.Keep, err
	}
	if verdict == filter.Change {
		install()
	}
	return verdict, nil
}

// judge does not change the object. If it is to be changed, install does that.
func (c *compiled) judge(ctx context.Context, o *filter.Object) (v filter.Verdict, install func(), err error) {
	decoded, err := o.Decode()
	if err != nil {
		return filter.Keep, nil, err
	}
	before, err := toMap(decoded, o.Shape())
	if err != nil {
		return filter.Keep, nil, err
	}
	node := c.node()
	vars := map[string]any{object: before, nodeName: node.Name, nodePool: node.Pool}
	matches, err := c.match.evalBool(ctx, vars)
	switch {
	case err != nil:
		return filter.Keep, nil, fmt.Errorf("match: %w", err)
	case !matches:
		return filter.Keep, nil, nil
	case c.rule.Drop:
		return filter.Drop, nil, nil
	}
	after, err := c.set(ctx, vars, before)
	if err != nil {
		return filter.Keep, nil, err
	}
	if install, err = c.fit(decoded, before, after); install == nil {
		return filter.Keep, nil, err
	}
	return filter.Change, install, nil
}

// set returns the object as the rule would have it.
func (c *compiled) set(ctx context.Context, vars map[string]any, before map[string]any) (map[string]any, error) {
	var after any = before
	for i, s := range c.sets {
		result, err := s.value.eval(ctx, vars)
		if err != nil {
			return nil, fmt.Errorf("set[%d].value: %w", i, err)
		}
		value, err := native(result)
		if err != nil {
			return nil, fmt.Errorf("set[%d].value: %w", i, err)
		}
		if after, err = put(after, s.path, value); err != nil {
			return nil, fmt.Errorf("set[%d].path: %w", i, err)
		}
	}
	return after.(map[string]any), nil // no path is empty
}

// toMap returns the object as an expression sees it, which always has a kind: in lists and
// in protobuf the object itself does not say. It has no managed fields, which are often
// half of an object, and of no interest to a node.
func toMap(decoded runtime.Object, shape codec.Shape) (m map[string]any, err error) {
	if u, ok := decoded.(*unstructured.Unstructured); ok {
		m = maps.Clone(u.Object)
		if metadata, ok := m["metadata"].(map[string]any); ok && metadata["managedFields"] != nil {
			metadata = maps.Clone(metadata)
			delete(metadata, "managedFields")
			m["metadata"] = metadata
		}
	} else if m, err = converter.ToUnstructured(unmanaged(decoded)); err != nil {
		return nil, errors.New("the object cannot be converted")
	}
	if m == nil {
		m = map[string]any{}
	}
	m["apiVersion"], m["kind"] = shape.APIVersion, shape.Kind
	return m, nil
}

// fit returns what makes the decoded object the one after, nil if that is the same.
func (c *compiled) fit(decoded runtime.Object, before, after map[string]any) (install func(), err error) {
	if reflect.DeepEqual(before, after) {
		return nil, nil
	}
	if u, ok := decoded.(*unstructured.Unstructured); ok {
		return func() { u.Object = withKindOf(u.Object, after) }, nil
	}
	fresh := reflect.New(reflect.TypeOf(decoded).Elem())
	typed := fresh.Interface().(runtime.Object)
	if err := converter.FromUnstructuredWithValidation(after, typed, true); err != nil {
		return nil, c.errUnfit()
	}
	got, err := converter.ToUnstructured(typed)
	if err != nil || !sameNumbers(after, got) {
		return nil, c.errUnfit()
	}
	if reflect.DeepEqual(before, got) {
		return nil, nil
	}
	typed.GetObjectKind().SetGroupVersionKind(decoded.GetObjectKind().GroupVersionKind())
	if was, ok := decoded.(metav1.Object); ok {
		typed.(metav1.Object).SetManagedFields(was.GetManagedFields())
	}
	return func() { reflect.ValueOf(decoded).Elem().Set(fresh.Elem()) }, nil
}

// errUnfit does not say what the converter says, which may hold values.
func (c *compiled) errUnfit() error {
	paths := make([]string, len(c.rule.Set))
	for i, s := range c.rule.Set {
		paths[i] = s.Path
	}
	return fmt.Errorf("set: there is no such field, or its type is another one: %s", strings.Join(paths, ", "))
}

// withKindOf returns the object after, saying its kind only if it did before, and with the
// managed fields that it had.
func withKindOf(before, after map[string]any) map[string]any {
	after = maps.Clone(after)
	was, _ := before["metadata"].(map[string]any)
	is, ok := after["metadata"].(map[string]any)
	if managed, has := was["managedFields"]; has && ok {
		is = maps.Clone(is)
		is["managedFields"] = managed
		after["metadata"] = is
	}
	for _, key := range []string{"apiVersion", "kind"} {
		if v, ok := before[key]; ok {
			after[key] = v
		} else {
			delete(after, key)
		}
	}
	return after
}

// unmanaged is a shallow copy of an object of a Go type, without managed fields.
func unmanaged(decoded runtime.Object) runtime.Object {
	fresh := reflect.New(reflect.TypeOf(decoded).Elem())
	fresh.Elem().Set(reflect.ValueOf(decoded).Elem())
	typed := fresh.Interface().(runtime.Object)
	if m, ok := typed.(metav1.Object); ok {
		m.SetManagedFields(nil)
	}
	return typed
}

// sameNumbers reports whether all numbers are what was wanted. The converter cuts off what
// does not fit into 32 bits.
func sameNumbers(want, got any) bool {
	switch g := got.(type) {
	case map[string]any:
		w, _ := want.(map[string]any)
		for key, v := range g {
			if wanted, ok := w[key]; ok && !sameNumbers(wanted, v) {
				return false
			}
		}
	case []any:
		w, _ := want.([]any)
		for i, v := range g {
			if i < len(w) && !sameNumbers(w[i], v) {
				return false
			}
		}
	case int64:
		switch w := want.(type) {
		case int64:
			return w == g
		case float64:
			return w == float64(g)
		}
	}
	return true
}

// count is what a dry run does with a verdict.
func (c *compiled) count(ctx context.Context, o *filter.Object, v filter.Verdict, err error) {
	if ctx.Err() != nil {
		return // the client is gone
	}
	verdict := v.String()
	if err != nil {
		verdict = verdictError
	}
	c.counts.of(verdict).Add(1)
	logger := klog.FromContext(ctx).V(2)
	if verdict == filter.Keep.String() || !logger.Enabled() || !c.logs.Allow() {
		return
	}
	m, _ := o.Meta() // a part of the message only
	logger.Info("Rule in dry run has judged an object", "filter", c.Name(), "kind", o.Shape().Kind, "object", klog.KRef(m.Namespace, m.Name), "verdict", verdict, "err", err)
}
