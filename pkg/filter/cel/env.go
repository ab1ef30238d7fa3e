// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cel

import (
	"cmp"
	"math"
	"slices"

	celgo "github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/env"
	"github.com/google/cel-go/common/overloads"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/common/types/traits"
	"github.com/google/cel-go/ext"
	"github.com/google/cel-go/interpreter"
)

// The variables of an expression. That of the node are two, so that a misspelt third one
// is an error of the compiler.
const (
	object   = "object"
	nodeName = "node.name"
	nodePool = "node.pool"
)

// settable are the types of values; see native.
var settable = []*celgo.Type{celgo.NullType, celgo.BoolType, celgo.IntType, celgo.UintType, celgo.DoubleType, celgo.StringType,
	celgo.BytesType, celgo.TimestampType, celgo.DurationType, celgo.ListType(celgo.DynType), celgo.MapType(celgo.DynType, celgo.DynType)}

var programOptions = []celgo.ProgramOption{
	celgo.EvalOptions(celgo.OptOptimize, celgo.OptTrackCost),
	celgo.CostLimit(costLimit),
	celgo.InterruptCheckFrequency(interruptEvery),
	celgo.CustomDecoratorV2(sortLiterals),
	celgo.CostTrackerOptions(interpreter.PresenceTestHasCost(false), interpreter.OverloadCostTracker(overloads.ExtFormatString, formatCost)),
}

// newEnv takes the versions of the extensions that count what they cost. They have more
// functions than those of the API server, which are older.
func newEnv() (*celgo.Env, error) {
	return celgo.NewCustomEnv(
		celgo.CustomTypeAdapter(adapter{}),
		celgo.StdLib(celgo.StdLibSubset(withoutTimeZones())),
		celgo.OptionalTypes(),
		ext.Strings(ext.StringsVersion(5)), ext.Lists(ext.ListsVersion(4), ext.ListsMaxRangeSize(costLimit)), ext.Sets(),
		celgo.CrossTypeNumericComparisons(true),
		celgo.DefaultUTCTimeZone(true),
		celgo.EagerlyValidateDeclarations(true),
		celgo.ASTValidators(celgo.ValidateDurationLiterals(), celgo.ValidateTimestampLiterals(), celgo.ValidateRegexLiterals()),
		celgo.ParserExpressionSizeLimit(maxExpression),
		celgo.Variable(object, celgo.DynType), celgo.Variable(nodeName, celgo.StringType), celgo.Variable(nodePool, celgo.StringType),
	)
}

// withoutTimeZones leaves out what reads the zones on the node's disk.
func withoutTimeZones() *env.LibrarySubset {
	subset := env.NewLibrarySubset()
	for name, overload := range map[string]string{
		overloads.TimeGetFullYear:     overloads.TimestampToYearWithTz,
		overloads.TimeGetMonth:        overloads.TimestampToMonthWithTz,
		overloads.TimeGetDayOfYear:    overloads.TimestampToDayOfYearWithTz,
		overloads.TimeGetDayOfMonth:   overloads.TimestampToDayOfMonthZeroBasedWithTz,
		overloads.TimeGetDate:         overloads.TimestampToDayOfMonthOneBasedWithTz,
		overloads.TimeGetDayOfWeek:    overloads.TimestampToDayOfWeekWithTz,
		overloads.TimeGetHours:        overloads.TimestampToHoursWithTz,
		overloads.TimeGetMinutes:      overloads.TimestampToMinutesWithTz,
		overloads.TimeGetSeconds:      overloads.TimestampToSecondsWithTz,
		overloads.TimeGetMilliseconds: overloads.TimestampToMillisecondsWithTz,
	} {
		subset.AddExcludedFunctions(&env.Function{Name: name, Overloads: []*env.Overload{{ID: overload}}})
	}
	return subset
}

// formatCost counts what format makes, which CEL does not: a short format can print the
// whole object, once for each element of a list.
func formatCost(args []ref.Val, result ref.Val) *uint64 {
	size := 0
	for _, v := range []ref.Val{args[0], result} {
		if s, ok := v.(types.String); ok {
			size += len(s)
		}
	}
	cost := 1 + uint64(math.Ceil(float64(size)/10)) // as for other strings
	return &cost
}

// An adapter makes CEL's values of Go's. Its maps are in order.
type adapter struct{}

func (a adapter) NativeToValue(value any) ref.Val {
	switch v := value.(type) {
	case map[string]any:
		return sortedMap{types.NewStringInterfaceMap(a, v)}
	case []any:
		return types.NewDynamicList(a, v)
	}
	return types.DefaultTypeAdapter.NativeToValue(value)
}

// A sortedMap is gone through in the order of its keys. Go's own order differs from one
// evaluation to the next, and the verdict with it.
type sortedMap struct{ traits.Mapper }

func (m sortedMap) Iterator() traits.Iterator {
	var keys []ref.Val
	for it := m.Mapper.Iterator(); it.HasNext() == types.True; {
		keys = append(keys, it.Next())
	}
	slices.SortFunc(keys, compareKeys)
	return types.NewRefValList(adapter{}, keys).Iterator()
}

func (m sortedMap) IsZeroValue() bool { return m.Size() == types.IntZero }

// sortLiterals makes sortedMaps of the maps that are written in an expression, which do not
// come by the adapter.
func sortLiterals(i interpreter.InterpretableV2) (interpreter.InterpretableV2, error) {
	if c, ok := i.(interpreter.InterpretableConstructor); ok && c.Type() == types.MapType {
		return sortedLiteral{c}, nil
	}
	return i, nil
}

type sortedLiteral struct {
	interpreter.InterpretableConstructor
}

func (l sortedLiteral) Exec(frame *interpreter.ExecutionFrame) ref.Val {
	v := l.InterpretableConstructor.Exec(frame)
	if m, ok := v.(traits.Mapper); ok {
		return sortedMap{m}
	}
	return v
}

func (l sortedLiteral) Eval(vars interpreter.Activation) ref.Val {
	return l.Exec(interpreter.AsFrame(vars))
}

func compareKeys(a, b ref.Val) int {
	if c := cmp.Compare(a.Type().TypeName(), b.Type().TypeName()); c != 0 {
		return c
	}
	if comparable, ok := a.(traits.Comparer); ok {
		if c, ok := comparable.Compare(b).(types.Int); ok {
			return int(c)
		}
	}
	return 0
}
