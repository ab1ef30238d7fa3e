// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package filter is what stands between an answer and its client: filters, which
// rewrite or withhold objects, and observers, which only look. A [Chain] puts them around
// whatever answers, the API server or the cache; the cache below holds the unfiltered
// truth, and a filter is a view of it.
//
// An object that a filter cannot judge is never sent as it is: the response fails.
package filter

import (
	"context"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// A Verdict is what a filter thinks of an object.
type Verdict int

const (
	// Keep sends the object on as it is: Apply has changed nothing.
	Keep Verdict = iota
	// Change sends on what Apply has made of it.
	Change
	// Drop withholds it: a GET is answered 404, a list leaves it out, and a watch says
	// DELETED if the client holds it.
	Drop
)

func (v Verdict) String() string { return [...]string{"keep", "change", "drop"}[v] }

// A Filter rewrites or withholds objects. Methods must be safe for concurrent use and
// must not do I/O.
type Filter interface {
	// Name is the stable identifier used in configuration, logs and metrics.
	Name() string
	// Apply judges one object, which it owns for the duration of the call. It may change
	// what [As] returns, and then returns Change. On an error the response fails; an
	// unfiltered object is never sent instead. The verdict depends on nothing but the
	// object and what Dependent tells of.
	Apply(ctx context.Context, o *Object) (Verdict, error)
}

// Dependent is what a Filter is besides if its verdicts depend on more than the object.
type Dependent interface {
	// Ready is nil once what it depends on is known. Until then requests wait a while,
	// and are refused with the error's text if it stays unknown.
	Ready() error
	// Changed is closed at the next change of Ready or of what it depends on, once Apply
	// goes by it. Who watches is then told to list again.
	Changed() <-chan struct{}
}

// Conditional is what a Filter is besides if it cannot do its work everywhere.
type Conditional interface {
	// Usable is why it cannot be in force, always the same; nil: it can.
	Usable() error
}

// An Observer looks at what clients are answered, before any filter, and cannot change it. Methods must be
// safe for concurrent use and must not do I/O.
type Observer interface {
	Name() string
	// Observe begins with one response; nil: it is of no interest.
	Observe(r *Request) Observation
}

// An Observation is told what one response says, in order, by one goroutine at a time. A
// GET is not told of.
type Observation interface {
	// See is one object: ADDED for those of a list. It must not be changed, and is valid
	// during the call only.
	See(kind watch.EventType, o *Object)
	// Synced says that all that there is has been seen: the end of a list, or of a
	// watch's initial events.
	Synced()
	// End is the last call. whole is false if the answer broke off.
	End(whole bool)
}

// A Request is what is known of a request before it is answered. It is not changed.
type Request struct {
	*request.RequestInfo
	User    user.Info
	Program string // what the User-Agent says; it identifies nobody
}

// programOf is the first word of a User-Agent: kubelet of kubelet/v1.36.3 (linux/amd64).
func programOf(userAgent string) string {
	if i := strings.IndexAny(userAgent, "/ "); i >= 0 {
		return userAgent[:i]
	}
	return userAgent
}

// An Entry is a filter or an observer in the order in which all are asked, with what it
// is for.
type Entry struct {
	Filter   Filter   // or
	Observer Observer // exactly one of the two
	// Resources and Verbs (of get, list and watch) are what it is for. Configuration can
	// only narrow them.
	Resources []schema.GroupResource
	Verbs     []string
	// Clients are whose requests it is for where the configuration does not say.
	Clients []Client
	// Withholds must be set if Apply may say Drop: watches then remember what their
	// client holds.
	Withholds bool
	// Version tells two filters of one name apart: what the operator wrote. Who watches is
	// told to list again when it changes.
	Version string
	// Default puts it in force where the configuration does not name it.
	Default bool
}

// Name is that of the filter or observer.
func (e *Entry) Name() string {
	if e.Filter != nil {
		return e.Filter.Name()
	}
	return e.Observer.Name()
}

// A Client is who may be asking. What is empty matches all.
type Client struct {
	User    string // the verified name
	Program string // of the User-Agent
}

// Program names clients by their programs.
func Program(names ...string) []Client {
	clients := make([]Client, len(names))
	for i, name := range names {
		clients[i].Program = name
	}
	return clients
}

// A Rule puts one filter in force. What is nil is as the Entry has it.
type Rule struct {
	Name      string
	Disabled  bool
	Clients   []Client
	Resources []schema.GroupResource
	Verbs     []string
}
