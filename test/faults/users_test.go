// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
)

// A person is somebody who asks, directly and through the hub.
type person struct {
	name    string
	through *endpoint
	direct  *endpoint
	header  http.Header // impersonation
}

// A cast is a rig with people who may see different things.
type cast struct {
	*rig
	people  []*person
	secrets []string          // values
	tokens  map[string]string // of users and ServiceAccounts, and those that the hub has passed on
}

const agentPrefix = "through-"

func newCast(t *testing.T) *cast {
	t.Helper()
	var users []controlplane.StaticUser
	for _, u := range []string{"alice", "bob", "carol", "dave", "deputy"} {
		users = append(users, controlplane.StaticUser{Name: u})
	}
	c := &cast{rig: newRig(t, "", users), tokens: map[string]string{}}
	ctx := t.Context()
	for _, ns := range []string{"a", "b"} {
		for i := range 3 {
			meta := metav1.ObjectMeta{Namespace: ns, Name: fmt.Sprintf("o-%d", i)}
			value := "value-of-" + ns + "-" + random()
			c.secrets = append(c.secrets, value)
			_, err := c.cp.Client.CoreV1().Secrets(ns).Create(ctx, &corev1.Secret{ObjectMeta: meta, StringData: map[string]string{"password": value}}, metav1.CreateOptions{})
			c.must(err)
			_, err = c.cp.Client.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{"of": ns}}, metav1.CreateOptions{})
			c.must(err)
		}
	}
	c.grant("a", "alice", "secrets", "configmaps")
	c.grant("b", "bob", "secrets", "configmaps")
	c.grant("a", "dave", "secrets", "configmaps")
	for _, name := range []string{"reader", "leaver"} {
		c.grant("a", "system:serviceaccount:a:"+name, "secrets", "configmaps")
		_, err := c.cp.Client.CoreV1().ServiceAccounts("a").Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		c.must(err)
	}
	c.letImpersonate("deputy", "alice")
	_, err := c.cp.Client.CoreV1().Pods("a").Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: corev1.PodSpec{
		NodeName: nodeName, ServiceAccountName: "reader", Containers: []corev1.Container{{Name: "c", Image: "example.invalid/none:1"}},
		Volumes: []corev1.Volume{{Name: "s", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "o-0"}}}},
	}}, metav1.CreateOptions{})
	c.must(err)
	process.Run(t, c.hub)
	c.waitLink(true)
	for _, u := range users {
		c.tokens[u.Name] = c.cp.Token(u.Name)
		c.join(u.Name, c.cp.TokenConfig(u.Name), nil)
	}
	for _, name := range []string{"reader", "leaver"} {
		tr, err := c.cp.Client.CoreV1().ServiceAccounts("a").CreateToken(ctx, name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
		c.must(err)
		config := c.cp.TokenConfig("alice")
		config.BearerToken = tr.Status.Token
		c.tokens[name] = tr.Status.Token
		c.join("system:serviceaccount:a:"+name, config, nil)
	}
	c.join("deputy", c.cp.TokenConfig("deputy"), http.Header{"Impersonate-User": {"alice"}})
	c.join("deputy", c.cp.TokenConfig("deputy"), http.Header{"Impersonate-User": {"bob"}})
	c.join(nodeUser, c.rig.node, nil)
	return c
}

func random() string {
	var b [15]byte
	_, _ = rand.Read(b[:]) // it never fails
	return hex.EncodeToString(b[:])
}

func (c *cast) letImpersonate(who, whom string) {
	ctx := c.t.Context()
	meta := metav1.ObjectMeta{Name: "impersonate-" + whom}
	_, err := c.cp.Client.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"users"}, ResourceNames: []string{whom}, Verbs: []string{"impersonate"}},
	}}, metav1.CreateOptions{})
	c.must(err)
	_, err = c.cp.Client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: who}},
	}, metav1.CreateOptions{})
	c.must(err)
}

// join adds a person; the audit log is to show the name on what goes through the
// hub.
func (c *cast) join(name string, config *rest.Config, header http.Header) {
	config = rest.CopyConfig(config)
	p := &person{name: name, header: header, direct: c.direct(config)}
	config.UserAgent = agentPrefix + name
	p.through = c.rig.through(config)
	c.people = append(c.people, p)
}

func (p *person) String() string { return fmt.Sprint(p.name, " ", p.header.Get("Impersonate-User")) }

func (p *person) ask(ctx context.Context, e *endpoint, path, accept string) (int, string, error) {
	h := p.header.Clone()
	if h == nil {
		h = http.Header{}
	}
	h.Set("Accept", accept)
	resp, err := e.do(ctx, http.MethodGet, path, h, nil)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// A request is what everybody asks for.
type request struct{ path, accept string }

func requests() (all []request) {
	for _, accept := range []string{js, pb + "," + js} {
		for _, path := range []string{
			"/api/v1/namespaces/a/secrets", "/api/v1/namespaces/b/secrets", "/api/v1/secrets", "/api/v1/namespaces/a/secrets?labelSelector=none%21%3Dx",
			"/api/v1/namespaces/a/configmaps", "/api/v1/namespaces/b/configmaps", "/api/v1/configmaps",
			"/api/v1/namespaces/a/secrets/o-0", "/api/v1/namespaces/b/secrets/o-0", "/api/v1/namespaces/a/secrets?fieldSelector=metadata.name%3Do-0",
		} {
			all = append(all, request{path, accept})
		}
	}
	return append(all,
		request{"/api/v1/namespaces/a/secrets?watch=1&timeoutSeconds=1&resourceVersion=0", js}, request{"/api/v1/namespaces/b/secrets?watch=1&timeoutSeconds=1&resourceVersion=0", js},
		request{"/api/v1/namespaces/a/secrets", js + ";as=Table;v=v1;g=meta.k8s.io," + js})
}

// leak returns a secret value that is in the text.
func (c *cast) leak(text string) string {
	for _, v := range c.secrets {
		for _, form := range disguises(v) {
			if strings.Contains(text, form) {
				return v
			}
		}
	}
	return ""
}

// TestUsersSeeTheirOwn has people with different rights ask for the same paths:
// online each gets what the API server says; offline, and after a restart, each
// gets what it was given online, and nothing else. What everything leaves on disk
// and in the log holds no secret and no token, and the API server has seen no
// request that was not its caller's own.
func TestUsersSeeTheirOwn(t *testing.T) {
	c := newCast(t)
	start := time.Now()
	given := map[*person]map[request]string{}
	t.Run("online", func(t *testing.T) { c.t = t; given = c.askOnline() })
	t.Run("token of a pod", func(t *testing.T) { c.t = t; c.tokenOfPod() })
	t.Run("rights that end", func(t *testing.T) { c.t = t; c.endRights(given) })
	t.Run("credentials online", func(t *testing.T) { c.t = t; c.badCredentials(true) })
	c.t = t
	c.settle()
	c.offline()
	t.Run("offline", func(t *testing.T) { c.t = t; c.askOffline(given) })
	t.Run("credentials offline", func(t *testing.T) { c.t = t; c.badCredentials(false) })
	c.t = t
	c.must(c.hub.Kill())
	c.must(c.hub.Start(t.Context()))
	t.Run("offline after a restart", func(t *testing.T) { c.t = t; c.askOffline(given) })
	t.Run("token of a pod offline", func(t *testing.T) { c.t = t; c.tokenOfPod() })
	c.t = t
	c.online()
	t.Run("online again", func(t *testing.T) { c.t = t; c.askOnline() })
	c.t = t
	c.must(c.hub.Stop())
	t.Run("at rest", func(t *testing.T) { c.t = t; c.searchDisk() })
	t.Run("audit", func(t *testing.T) { c.t = t; c.audit(start) })
}

// askOnline compares what the hub says with what the API server says, and returns
// what was given to whom.
func (c *cast) askOnline() map[*person]map[request]string {
	ctx := c.t.Context()
	given := map[*person]map[request]string{}
	n := 0
	for _, p := range c.people {
		given[p] = map[request]string{}
		for _, q := range requests() {
			want, direct, err := p.ask(ctx, p.direct, q.path, q.accept)
			c.must(err)
			got, body, err := p.ask(ctx, p.through, q.path, q.accept)
			c.must(err)
			if got != want {
				c.t.Errorf("%v: %s = %d, want %d as the API server says: %.200s", p, q.path, got, want, body)
			}
			if v := c.leak(body); v != "" && !strings.Contains(direct, v) && c.leak(direct) == "" {
				c.t.Errorf("%v: %s shows %s", p, q.path, v)
			}
			if got == http.StatusOK {
				given[p][q] = body
				n++
			}
		}
	}
	if n < 40 {
		c.t.Errorf("only %d questions were answered with 200", n)
	}
	c.t.Logf("%d people, %d questions each, %d times 200", len(c.people), len(requests()), n)
	return given
}

// askOffline wants what was given online, and nothing else.
func (c *cast) askOffline(given map[*person]map[request]string) {
	replayed, refused := 0, 0
	for _, p := range c.people {
		for _, q := range requests() {
			status, body, err := p.ask(c.t.Context(), p.through, q.path, q.accept)
			c.must(err)
			want, ok := given[p][q]
			switch {
			case ok && status != http.StatusOK:
				c.t.Errorf("%v: %s (%s) offline = %d, want 200 as online: %.200s", p, q.path, q.accept, status, body)
			case ok && !strings.Contains(q.path, "watch") && body != want && !sameItems(body, want):
				c.t.Errorf("%v: %s (%s) offline is\n%.400q\nonline it was\n%.400q", p, q.path, q.accept, body, want)
			case !ok && status == http.StatusOK && (c.leak(body) != "" || !c.covered(given[p], q)):
				c.t.Errorf("%v: %s (%s) offline = 200 without having been given it: %.400s", p, q.path, q.accept, body)
			case !ok && c.leak(body) != "":
				c.t.Errorf("%v: %s offline = %d and shows %s", p, q.path, status, c.leak(body))
			case ok:
				replayed++
			default:
				refused++
			}
		}
	}
	c.t.Logf("%d answers replayed, %d refused", replayed, refused)
}

// covered says whether q is within something that was given: then an answer is
// right.
func (c *cast) covered(given map[request]string, q request) bool {
	path, _, _ := strings.Cut(q.path, "?")
	for g := range given {
		if wider, _, selected := strings.Cut(g.path, "?"); !selected && strings.HasPrefix(path, wider) {
			return true
		}
	}
	return false
}

// sameItems compares lists whose resourceVersions may differ.
func sameItems(a, b string) bool {
	x, err := readList([]byte(a))
	y, err2 := readList([]byte(b))
	return err == nil && err2 == nil && slices.EqualFunc(x.items, y.items, bytes.Equal)
}

// tokenOfPod is kubelet's way to a pod's token. Others do not get it.
func (c *cast) tokenOfPod() {
	ctx := c.t.Context()
	pod, err := c.cp.Client.CoreV1().Pods("a").Get(ctx, "p", metav1.GetOptions{})
	c.must(err)
	seconds := int64(3607)
	body, err := json.Marshal(&authenticationv1.TokenRequest{
		TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "TokenRequest"},
		Spec:     authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds, BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: "p", UID: pod.UID}},
	})
	c.must(err)
	for _, p := range c.people {
		h := p.header.Clone()
		if h == nil {
			h = http.Header{}
		}
		h.Set("Content-Type", js)
		h.Set("Accept", js)
		resp, err := p.through.do(ctx, http.MethodPost, "/api/v1/namespaces/a/serviceaccounts/reader/token", h, body)
		c.must(err)
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		c.must(err)
		var tr authenticationv1.TokenRequest
		if resp.StatusCode == http.StatusCreated {
			c.must(json.Unmarshal(b, &tr))
		}
		switch got := tr.Status.Token; {
		case p.name != nodeUser && (got != "" || resp.StatusCode < 400):
			c.t.Errorf("%v: POST token = %d: %.200s", p, resp.StatusCode, b)
		case p.name == nodeUser && got == "":
			c.t.Errorf("%v: POST token = %d, want a token: %.200s", p, resp.StatusCode, b)
		case p.name == nodeUser:
			c.tokens[fmt.Sprint("passed on ", len(c.tokens))] = got
		}
	}
}

// endRights takes away what dave may and who leaver is. Once each has been told
// so for a path, there is no copy of it any more.
func (c *cast) endRights(given map[*person]map[request]string) {
	ctx := c.t.Context()
	c.revoke("a", "dave")
	c.must(c.cp.Client.CoreV1().ServiceAccounts("a").Delete(ctx, "leaver", metav1.DeleteOptions{}))
	for _, p := range c.people {
		code := map[string]int{"dave": http.StatusForbidden, "system:serviceaccount:a:leaver": http.StatusUnauthorized}[p.name]
		if code == 0 {
			continue
		}
		for _, q := range requests() {
			if _, ok := given[p][q]; !ok {
				continue
			}
			c.must(process.Poll(ctx, fmt.Sprintf("%v: %s is %d", p, q.path, code), func(ctx context.Context) error {
				status, body, err := p.ask(ctx, p.direct, q.path, q.accept)
				if err == nil && status != code {
					err = fmt.Errorf("directly it is %d: %.100s", status, body)
				}
				if err != nil {
					return err
				}
				if status, body, err = p.ask(ctx, p.through, q.path, q.accept); err == nil && status != code {
					err = fmt.Errorf("through the hub it is %d: %.100s", status, body)
				}
				return err
			}))
		}
		given[p] = nil
	}
}

// badCredentials has those ask who are nobody here.
func (c *cast) badCredentials(up bool) {
	plain := c.cp.TokenConfig("alice")
	plain.BearerToken = ""
	plain.UserAgent = agentPrefix + "nobody"
	withCert := func(name string, orgs ...string) *rest.Config {
		cert, key, err := c.cp.ClientCert(name, orgs...)
		c.must(err)
		config := rest.CopyConfig(plain)
		config.CertFile, config.KeyFile = cert, key
		return config
	}
	node := rest.CopyConfig(plain)
	node.CertFile, node.KeyFile = c.rig.node.CertFile, c.rig.node.KeyFile
	alice := "Bearer " + c.tokens["alice"]
	type attempt struct {
		name   string
		config *rest.Config
		header http.Header
		want   []int
	}
	is401, is403 := []int{http.StatusUnauthorized}, []int{http.StatusForbidden}
	unknown := is401
	if !up {
		unknown = []int{http.StatusUnauthorized, http.StatusServiceUnavailable} // nobody can say
	}
	attempts := []attempt{
		{"no credential", plain, nil, is401},
		{"another user's certificate", withCert("alice"), nil, is403},
		{"an administrator's certificate", withCert("root", "system:masters"), nil, is403},
		{"another node's certificate", withCert("system:node:n2", "system:nodes"), nil, is403},
		{"the node's name without its group", withCert(nodeUser), nil, is403},
		{"the node's name with one more group", withCert(nodeUser, "system:nodes", "system:masters"), nil, is403},
		{"the node impersonates", node, http.Header{"Impersonate-User": {"alice"}}, is403},
		{"the node impersonates a group", node, http.Header{"Impersonate-Group": {"system:masters"}}, is403},
		{"the node impersonates itself", node, http.Header{"Impersonate-User": {nodeUser}}, is403},
		{"the node impersonates a uid", node, http.Header{"impersonate-uid": {"1"}}, is403},
		{"an unknown token", plain, http.Header{"Authorization": {"Bearer none"}}, unknown},
		{"a token cut short", plain, http.Header{"Authorization": {alice[:len(alice)-1]}}, unknown},
		{"a JWT with another signature", plain, http.Header{"Authorization": {"Bearer " + c.tokens["reader"][:len(c.tokens["reader"])-20] + strings.Repeat("A", 20)}}, unknown},
		{"headers of a front proxy", plain, http.Header{"X-Remote-User": {"alice"}, "X-Remote-Group": {"system:masters"}}, is401},
	}
	for name, values := range map[string][]string{
		"empty": {""}, "no token": {"Bearer"}, "blank token": {"Bearer "}, "doubled": {alice, alice}, "two users": {alice, "Bearer " + c.tokens["bob"]}, "basic": {"Basic YWxpY2U6YWxpY2U="},
		"two blanks": {"Bearer  " + c.tokens["alice"]}, "two tokens": {alice + " " + c.tokens["bob"]}, "comma": {alice + "," + c.tokens["bob"]}, "token alone": {c.tokens["alice"]},
	} {
		attempts = append(attempts, attempt{"Authorization: " + name, plain, http.Header{"Authorization": values}, is401},
			attempt{"the node with Authorization: " + name, node, http.Header{"Authorization": values}, is401})
	}
	for _, a := range attempts {
		e := c.rig.through(a.config)
		for _, path := range []string{"/api/v1/namespaces/a/secrets", "/api/v1/namespaces/a/secrets/o-0", "/api/v1/namespaces/a/configmaps?watch=1&timeoutSeconds=1", "/version", "/readyz/none", "/metrics"} {
			resp, err := e.do(c.t.Context(), http.MethodGet, path, a.header, nil)
			if err != nil {
				c.t.Errorf("%s: %s: %v", a.name, path, err)
				continue
			}
			body, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || !slices.Contains(a.want, resp.StatusCode) {
				c.t.Errorf("%s: %s = %d, %v, want %v: %.200s", a.name, path, resp.StatusCode, err, a.want, body)
			}
			if v := c.leak(string(body)); v != "" {
				c.t.Errorf("%s: %s shows %s", a.name, path, v)
			}
		}
	}
}

// audit looks at every request of the run: those that came through the hub are
// their callers' own, those of the hub itself the node's or a known caller's.
func (c *cast) audit(since time.Time) {
	events, err := c.cp.Requests(since)
	c.must(err)
	known := map[string]bool{nodeUser: true}
	for _, p := range c.people {
		known[p.name] = true
	}
	through, own := 0, 0
	for _, e := range events {
		caller, passed := strings.CutPrefix(e.UserAgent, agentPrefix)
		as := ""
		if e.ImpersonatedUser != nil {
			as = e.ImpersonatedUser.Username
		}
		switch {
		case passed && caller == "nobody" && e.User.Username != "system:anonymous" && e.User.Username != "":
			c.t.Errorf("%s %s of nobody went out as %s", e.Verb, e.RequestURI, e.User.Username)
		case passed && caller != "nobody" && e.User.Username != caller && e.User.Username != "" && e.ResponseStatus.Code != http.StatusUnauthorized:
			c.t.Errorf("%s %s of %s went out as %s", e.Verb, e.RequestURI, caller, e.User.Username)
		case strings.HasPrefix(e.UserAgent, "edgehub") && !known[e.User.Username] && e.ResponseStatus.Code != http.StatusUnauthorized:
			c.t.Errorf("%s %s of the hub itself went out as %s", e.Verb, e.RequestURI, e.User.Username)
		case e.User.Username == nodeUser && as != "":
			c.t.Errorf("%s %s went out as the node, for %s", e.Verb, e.RequestURI, as)
		case passed:
			through++
		case strings.HasPrefix(e.UserAgent, "edgehub"):
			own++
		}
	}
	if through < 100 || own < 5 {
		c.t.Errorf("audit has %d requests of callers and %d of the hub itself: the log cannot be what is thought", through, own)
	}
	c.t.Logf("audit: %d requests of callers, %d of the hub itself", through, own)
}
