// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package config reads which filters are in force, and for whom, and keeps it in force:
// [Parse] is the format, which docs/configuration.md tells to operators, and [Keeper]
// follows the file and the ConfigMap that hold it.
//
// A document is taken whole or not at all. What cannot be taken changes nothing: the
// filters that were in force stay so, since without them clients would be shown what
// they should not be.
package config

import (
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/edgehub/edgehub/pkg/filter"
)

// What a document says of itself.
const (
	APIVersion = "edgehub.io/v1alpha1"
	Kind       = "EdgehubConfiguration"
)

// A Configuration is what a document says. It is not changed once it is made; the zero
// one has nothing but defaults.
type Configuration struct {
	Rules []filter.Rule
	// CEL are the filters that operators have written, in the order in which they are
	// asked, after all others.
	CEL []CELRule
}

// A CELRule is a filter in CEL. Its name as a filter is cel/ and Name.
type CELRule struct {
	Name      string
	Clients   []filter.Client
	Resources []schema.GroupResource
	Verbs     []string // of get, list and watch
	Match     string   // an expression over the object
	Drop      bool     // or Set, exactly one of the two
	Set       []Assignment
	DryRun    bool // counts and logs what it would do
}

// An Assignment sets what is at Path, a.b["c.d"].e, to what the expression Value yields.
type Assignment struct {
	Path, Value string
}

// Known is what a document may speak of.
type Known struct {
	// Entries are all filters and observers, whether or not they are in force.
	Entries []filter.Entry
	// CEL compiles a rule whose name, match, drop and set are there. The field that is to
	// blame is in a FieldError; errors.Join gives more than one. nil refuses all rules.
	CEL func(CELRule) error
}

// A FieldError says which field of a CELRule is wrong: match, set[1].value and so on.
type FieldError struct {
	Field string
	Err   error
}

func (e *FieldError) Error() string { return e.Field + ": " + e.Err.Error() }

// Unwrap is what is wrong with the field.
func (e *FieldError) Unwrap() error { return e.Err }
