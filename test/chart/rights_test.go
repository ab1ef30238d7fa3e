// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package chart

import (
	"fmt"
	"slices"
	"strings"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
)

const decision = "authorization.k8s.io/decision"

// unused are rights that TestInstall gives no occasion for, and why they are there.
var unused = map[string]string{
	"Role edgehub-webhook: patch events":                                                              "an Event that is repeated",
	"Role edgehub-events: patch events.events.k8s.io":                                                 "an Event that is repeated",
	"ClusterRole edgehub-approver: approve signers.certificates.k8s.io kubernetes.io/kubelet-serving": "the API server asks for it by itself, at the update of a request's approval",
	"ClusterRole edgehub-node: watch endpointslices.discovery.k8s.io":                                 "no client on the node follows them here; see test/feeds",
}

// A right is what one rule of a role lets somebody do.
type right struct{ role, namespace, group, resource, name, verb string }

func (r right) String() string {
	s := r.role + ": " + r.verb + " " + r.resource
	if r.group != "" {
		s += "." + r.group
	}
	if r.name != "" {
		s += " " + r.name
	}
	return s
}

// checkRights wants every request of the companion and of hubs since then to have been
// allowed, and every right to have been used.
func (r *installation) checkRights(since time.Time) {
	r.t.Helper()
	requests, err := r.cp.Requests(since)
	if err != nil {
		r.t.Fatal(err)
	}
	const accounts = "system:serviceaccount:" + namespace + ":"
	used := map[string][]auditv1.Event{}
	for _, e := range requests {
		subject := ""
		switch {
		case strings.HasPrefix(e.User.Username, accounts):
			subject = strings.TrimPrefix(e.User.Username, accounts)
		case slices.Contains(e.User.Groups, "system:nodes") && strings.HasPrefix(e.UserAgent, "edgehub"):
			subject = "system:nodes"
		default:
			continue
		}
		if got := e.Annotations[decision]; got != "allow" {
			r.t.Errorf("%s: %s %s: decision %q, want allow (%s)", subject, e.Verb, e.RequestURI, got, e.Annotations["authorization.k8s.io/reason"])
		}
		used[subject] = append(used[subject], e)
	}
	manifests, err := render(r.t, r.values...)
	if err != nil {
		r.t.Fatal(err)
	}
	for subject, rights := range rightsOf(r, manifests) {
		for _, right := range rights {
			_, excused := unused[right.String()]
			was := slices.ContainsFunc(used[subject], right.covers)
			if right.verb == "list" && !was {
				// API servers that do not stream lists are asked for them.
				right.verb = "watch"
				was = slices.ContainsFunc(used[subject], right.covers) || unused[right.String()] != ""
			}
			if was == excused {
				r.t.Errorf("%s may %v: used = %v, excused = %v", subject, right, was, excused)
			}
		}
	}
}

// covers reports whether a request needs the right.
func (r right) covers(e auditv1.Event) bool {
	if strings.HasPrefix(r.resource, "/") {
		return e.ObjectRef == nil && e.Verb == r.verb && strings.HasPrefix(e.RequestURI, r.resource)
	}
	if e.ObjectRef == nil || e.Verb != r.verb || e.ObjectRef.APIGroup != r.group || r.namespace != "" && e.ObjectRef.Namespace != r.namespace {
		return false
	}
	resource := e.ObjectRef.Resource
	if e.ObjectRef.Subresource != "" {
		resource += "/" + e.ObjectRef.Subresource
	}
	return resource == r.resource && (r.name == "" || e.ObjectRef.Name == r.name)
}

// rightsOf returns what the roles among the manifests give, by subject.
func rightsOf(r *installation, manifests string) map[string][]right {
	r.t.Helper()
	roles := map[string][]right{}
	bindings := map[string]string{} // role to subject
	for _, o := range objects(r.t, manifests) {
		var err error
		switch kind := o.GetKind(); kind {
		case "Role", "ClusterRole":
			var role rbacv1.ClusterRole
			err = runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &role)
			for _, rule := range role.Rules {
				roles[kind+" "+o.GetName()] = append(roles[kind+" "+o.GetName()], rightsIn(o, rule)...)
			}
		case "RoleBinding", "ClusterRoleBinding":
			var b rbacv1.ClusterRoleBinding
			err = runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, &b)
			bindings[b.RoleRef.Kind+" "+b.RoleRef.Name] = b.Subjects[0].Name
		}
		if err != nil {
			r.t.Fatal(err)
		}
	}
	all := map[string][]right{}
	for role, rules := range roles {
		subject, ok := bindings[role]
		if !ok {
			r.t.Errorf("%s is bound to nobody", role)
		}
		all[subject] = append(all[subject], rules...)
	}
	return all
}

func rightsIn(o *unstructured.Unstructured, rule rbacv1.PolicyRule) (all []right) {
	role := o.GetKind() + " " + o.GetName()
	names := rule.ResourceNames
	if len(names) == 0 {
		names = []string{""}
	}
	for _, verb := range rule.Verbs {
		for _, path := range rule.NonResourceURLs {
			all = append(all, right{role: role, resource: path, verb: verb})
		}
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, name := range names {
					all = append(all, right{role, o.GetNamespace(), group, resource, name, verb})
				}
			}
		}
	}
	return all
}

func schemaOf(groupVersion, resource string) schema.GroupVersionResource {
	gv, err := schema.ParseGroupVersion(groupVersion)
	if err != nil {
		panic(fmt.Sprintf("%s: %v", groupVersion, err))
	}
	return gv.WithResource(resource)
}
