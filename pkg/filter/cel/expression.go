// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cel

import (
	"context"
	"errors"
	"fmt"
	"strings"

	celgo "github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/interpreter"
)

const (
	// maxExpression is the length of an expression in bytes.
	maxExpression = 10_000
	// costLimit is what one evaluation may cost: about 60 ms. A rule that looks at each
	// container of a pod costs some dozens.
	costLimit = 100_000
	// interruptEvery is how many steps of a comprehension pass until the context is asked.
	interruptEvery = 100
	// maxProblems is how many of an expression's errors are told.
	maxProblems = 3
)

// Why an evaluation fails. What CEL says itself may hold values of the object, which are
// not for logs.
var (
	errCost   = fmt.Errorf("costs more than %d units", costLimit)
	errFailed = errors.New("cannot be evaluated")
)

// failures are the beginnings of CEL's messages, which has no error values, that may be told.
var failures = []string{"no such key", "no such overload", "no such attribute", "index out of bounds", "index out of range", "division by zero", "modulus by zero",
	"integer overflow", "unsigned integer overflow", "duration overflow", "timestamp overflow", "type conversion error", "unsupported conversion"}

// An expression is compiled. Safe for concurrent use.
type expression struct {
	program  celgo.Program
	source   *ast.SourceInfo
	usesPool bool
}

// compile checks that the type is one of want, or known only when it is evaluated.
func compile(env *celgo.Env, text string, want ...*celgo.Type) (*expression, error) {
	if strings.TrimSpace(text) == "" {
		return nil, errors.New("there is no expression")
	}
	if len(text) > maxExpression {
		return nil, fmt.Errorf("%d bytes are more than %d", len(text), maxExpression)
	}
	checked, issues := env.Compile(text)
	if issues.Err() != nil {
		return nil, problems(issues)
	}
	if is := checked.OutputType(); !oneOf(is, want) {
		return nil, fmt.Errorf("1:1: its type %s is not %s", is, names(want))
	}
	program, err := env.Program(checked, programOptions...)
	if err != nil {
		return nil, errors.New(oneLine(err.Error()))
	}
	e := &expression{program: program, source: checked.NativeRep().SourceInfo()}
	for _, reference := range checked.NativeRep().ReferenceMap() {
		e.usesPool = e.usesPool || reference.Name == nodePool
	}
	return e, nil
}

func oneOf(is *celgo.Type, want []*celgo.Type) bool {
	for _, t := range want {
		if is.Kind() == types.DynKind || is.Kind() == t.Kind() {
			return true
		}
	}
	return false
}

func names(of []*celgo.Type) string {
	list := make([]string, len(of))
	for i, t := range of {
		list[i] = t.TypeName()
	}
	return strings.Join(list, ", ")
}

// problems makes one line of what the compiler says.
func problems(issues *celgo.Issues) error {
	var list []string
	for i, e := range issues.Errors() {
		if i == maxProblems {
			list = append(list, "…")
			break
		}
		list = append(list, fmt.Sprintf("%d:%d: %s", e.Location.Line(), e.Location.Column()+1, oneLine(e.Message)))
	}
	return errors.New(strings.Join(list, "; "))
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

// eval returns the value. Its errors hold nothing of the object.
func (e *expression) eval(ctx context.Context, vars map[string]any) (ref.Val, error) {
	v, _, err := e.program.ContextEval(ctx, vars)
	if err == nil {
		return v, nil
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	var cancelled interpreter.EvalCancelledError
	if errors.As(err, &cancelled) && cancelled.Cause == interpreter.CostLimitExceeded {
		return nil, errCost
	}
	failure := errFailed
	for _, f := range failures {
		if strings.HasPrefix(err.Error(), f) {
			failure = errors.New(f)
		}
	}
	var at *types.Err
	if errors.As(err, &at) {
		if l := e.source.GetStartLocation(at.NodeID()); l.Line() > 0 {
			return nil, fmt.Errorf("%d:%d: %w", l.Line(), l.Column()+1, failure)
		}
	}
	return nil, failure
}

func (e *expression) evalBool(ctx context.Context, vars map[string]any) (bool, error) {
	v, err := e.eval(ctx, vars)
	if err != nil {
		return false, err
	}
	b, ok := v.(types.Bool)
	if !ok {
		return false, fmt.Errorf("is %s, not bool", v.Type().TypeName())
	}
	return bool(b), nil
}
