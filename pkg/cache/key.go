// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/edgehub/edgehub/pkg/codec"
)

// A Key says what one list or watch asked for, within one user and resource.
type Key struct {
	Namespace     string // "" for all, and for cluster-scoped resources
	Name          string // metadata.name, "" for all
	LabelSelector string // as labels.Selector prints it
	FieldSelector string // without metadata.name=, which is Name
	codec.Representation
}

func (k Key) String() string {
	return fmt.Sprintf("%s/%s?labels=%s&fields=%s (%s)", k.Namespace, k.Name, k.LabelSelector, k.FieldSelector, k.Representation)
}

// plain reports whether the scope holds everything in its namespace and name:
// what it does not hold then does not exist.
func (k Key) plain() bool { return k.LabelSelector == "" && k.FieldSelector == "" }

// covers reports whether everything that n asks for is in a scope of k.
func (k Key) covers(n Key) bool {
	return k.Representation == n.Representation &&
		(k.Namespace == "" || k.Namespace == n.Namespace) &&
		(k.Name == "" || k.Name == n.Name) &&
		(k.LabelSelector == "" || k.LabelSelector == n.LabelSelector) &&
		(k.FieldSelector == "" || k.FieldSelector == n.FieldSelector)
}

// overlaps reports whether an object can be in both. Selectors are not looked at.
func (k Key) overlaps(n Key) bool {
	return (k.Namespace == "" || n.Namespace == "" || k.Namespace == n.Namespace) &&
		(k.Name == "" || n.Name == "" || k.Name == n.Name)
}

// names reports whether an object of a key is in the namespace and has the name
// that k asks for.
func (k Key) names(objectKey string) bool {
	ns, name, _ := strings.Cut(objectKey, "/")
	return (k.Namespace == "" || k.Namespace == ns) && (k.Name == "" || k.Name == name)
}

// wider reports whether k asks for less than a scope of w holds.
func (k Key) wider(w Key) bool { return k.Namespace != w.Namespace || k.Name != w.Name }

// query returns the URL query that asks an API server for the key.
func (k Key) query() url.Values {
	q := url.Values{}
	if k.LabelSelector != "" {
		q.Set("labelSelector", k.LabelSelector)
	}
	fs := k.FieldSelector
	if k.Name != "" {
		name := fields.OneTermEqualSelector("metadata.name", k.Name).String()
		fs = strings.Join(slices.DeleteFunc([]string{name, fs}, func(s string) bool { return s == "" }), ",")
	}
	if fs != "" {
		q.Set("fieldSelector", fs)
	}
	return q
}

// A logName identifies the log of one user and resource.
type logName struct {
	User     string `json:"user"`     // for people
	Identity string `json:"identity"` // what decides: see identityOf
	Group    string `json:"group,omitempty"`
	Version  string `json:"version,omitempty"`
	Resource string `json:"resource,omitempty"` // "" for non-resource paths
	Class    string `json:"class,omitempty"`    // of PutResponse
}

func (n logName) gvr() schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: n.Group, Version: n.Version, Resource: n.Resource}
}

// secret reports whether what the log holds is encrypted at rest in any case.
func (n logName) secret() bool {
	return n.Class != "" || n.Group == "" && n.Resource == "secrets"
}

// reviewExtraPrefix is where the API server puts what differs from one
// credential of a user to the next (credential id, node and pod names); it says
// nothing about what the user may see.
const reviewExtraPrefix = "authentication.kubernetes.io/"

// identityOf returns a hash of all that makes a user for the API server: name,
// uid, groups in any order and extra, together with the headers by which it
// impersonates somebody. Each field is preceded by its length, so that no two
// identities share a hash.
func identityOf(u user.Info, impersonate http.Header) string {
	b := make([]byte, 0, 512)
	field := func(s string) { b = append(binary.BigEndian.AppendUint64(b, uint64(len(s))), s...) }
	list := func(name string, values []string, sorted bool) {
		field(name)
		if sorted {
			values = slices.Sorted(slices.Values(values))
		}
		field(strconv.Itoa(len(values)))
		for _, v := range values {
			field(v)
		}
	}
	field(u.GetName())
	field(u.GetUID())
	list("groups", u.GetGroups(), true)
	extra := u.GetExtra()
	for _, k := range sortedKeys(extra) {
		if !strings.HasPrefix(k, reviewExtraPrefix) {
			list("extra "+k, extra[k], true)
		}
	}
	for _, k := range sortedKeys(impersonate) {
		list("impersonate "+k, impersonate[k], false)
	}
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:16])
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// heartbeats reports whether the resource's objects have no generation and are
// written all the time to say that somebody is alive: that is as good as a change
// of status alone.
func (n logName) heartbeats() bool {
	return n.Group == "" && n.Resource == "nodes" || n.Group == "coordination.k8s.io" && n.Resource == "leases"
}

// A caller is who asks, and the headers that prove it to the API server.
type caller struct {
	user       user.Info
	identity   string
	credential http.Header // Authorization and Impersonate-*; empty for the node
}

// credentialKey tells credentials apart; "" is the node's.
func (c caller) credentialKey() string {
	if len(c.credential) == 0 {
		return ""
	}
	var b strings.Builder
	for _, k := range sortedKeys(c.credential) {
		for _, v := range c.credential[k] {
			fmt.Fprintf(&b, "%s: %s\n", k, v)
		}
	}
	return b.String()
}

func callerOf(req *http.Request) (caller, error) {
	u, ok := request.UserFrom(req.Context())
	if !ok || u.GetName() == "" {
		return caller{}, fmt.Errorf("cache: request without a user")
	}
	c := caller{user: u, credential: http.Header{}}
	impersonate := http.Header{}
	for k, v := range req.Header {
		switch {
		case strings.HasPrefix(k, "Impersonate-"):
			impersonate[k] = v
			c.credential[k] = v
		case k == "Authorization":
			c.credential[k] = v
		}
	}
	c.identity = identityOf(u, impersonate)
	return c, nil
}

// A query is one get, list or watch, understood.
type query struct {
	caller
	name logName
	key  Key // its Representation is the first that Accept names
	opts metav1.ListOptions
	// accepted are all representations in the client's order.
	accepted []codec.Accepted
	get      bool // one object by its name
	// unanswerable is true when no scope can answer the request: a parameter
	// that we do not know, a selector that does not parse, no representation.
	unanswerable bool
	// opaque is true as well where another representation, such as a Table,
	// comes first.
	opaque bool
}

// known are the parameters that say what is asked for, and those that do not
// matter for the answer.
var known = map[string]bool{
	"labelSelector": true, "fieldSelector": true, "watch": true, "limit": true, "continue": true, "resourceVersion": true,
	"resourceVersionMatch": true, "allowWatchBookmarks": true, "sendInitialEvents": true, "timeoutSeconds": true, "timeout": true,
}

// parseQuery reads a get, list or watch. A selector that does not parse makes it
// opaque: the API server has the words for what is wrong with it.
func parseQuery(req *http.Request, info *request.RequestInfo) (query, error) {
	c, err := callerOf(req)
	if err != nil {
		return query{}, err
	}
	q := query{caller: c, name: logName{
		User: c.user.GetName(), Identity: c.identity,
		Group: info.APIGroup, Version: info.APIVersion, Resource: info.Resource,
	}}
	q.accepted = codec.ParseAccept(req.Header.Values("Accept"))
	q.unanswerable = info.Subresource != "" || len(q.representations()) == 0
	q.opaque = q.unanswerable || q.accepted[0].Other != ""
	for _, a := range q.accepted {
		if a.Other == "" {
			q.key.Representation = a.Representation
			break
		}
	}
	values := req.URL.Query()
	for k, v := range values {
		if !known[k] || len(v) != 1 {
			q.reject()
		}
	}
	if err := metav1.Convert_url_Values_To_v1_ListOptions(&values, &q.opts, nil); err != nil {
		q.reject()
	}
	q.key.Namespace = info.Namespace
	if info.APIGroup == "" && info.Resource == "namespaces" {
		q.key.Namespace = "" // RequestInfo counts a namespace as its own
	}
	if q.get = info.Verb == "get"; q.get {
		q.key.Name = info.Name
		return q, nil
	}
	if ls, err := labels.Parse(q.opts.LabelSelector); err != nil {
		q.reject()
	} else {
		q.key.LabelSelector = ls.String()
	}
	if fs, err := fields.ParseSelector(q.opts.FieldSelector); err != nil {
		q.reject()
	} else {
		q.setFields(fs)
	}
	if q.key.Name == "" {
		q.key.Name = info.Name // of /watch/.../name
	}
	return q, nil
}

func (q *query) reject() { q.opaque, q.unanswerable = true, true }

// setFields takes metadata.name out of the field selector and orders the rest.
func (q *query) setFields(fs fields.Selector) {
	if name, ok := fs.RequiresExactMatch("metadata.name"); ok && name != "" {
		q.key.Name = name
	}
	var rest []string
	for _, r := range fs.Requirements() {
		if q.key.Name != "" && r.Field == "metadata.name" && r.Value == q.key.Name && (r.Operator == "=" || r.Operator == "==") {
			continue
		}
		op := strings.Replace(string(r.Operator), "==", "=", 1)
		rest = append(rest, r.Field+op+fields.EscapeValue(r.Value))
	}
	slices.Sort(rest)
	q.key.FieldSelector = strings.Join(slices.Compact(rest), ",")
}

// representations are what a scope may be in to answer the query, best first.
func (q *query) representations() []codec.Representation {
	var reps []codec.Representation
	for _, a := range q.accepted {
		if a.Other == "" && !slices.Contains(reps, a.Representation) {
			reps = append(reps, a.Representation)
		}
	}
	return reps
}

// compareRV orders two resourceVersions of one resource. "" comes first; both
// have been checked by validRV when they entered the cache.
func compareRV(a, b string) int {
	if a == "" || b == "" {
		return cmp.Compare(len(a), len(b))
	}
	c, err := resourceversion.CompareResourceVersion(a, b)
	if err != nil {
		return cmp.Compare(a, b)
	}
	return c
}

// validRV reports whether rv can be compared with others: the API server's own
// are decimal numbers, those of an aggregated API may be anything.
func validRV(rv string) bool {
	_, err := resourceversion.CompareResourceVersion(rv, rv)
	return err == nil
}

func maxRV(a, b string) string {
	if compareRV(a, b) >= 0 {
		return a
	}
	return b
}
