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
	"github.com/edgehub/edgehub/test/rig"
)

// A person is somebody who asks, directly and through the hub.
type person struct {
	name    string
	through *rig.Endpoint
	direct  *rig.Endpoint
	header  http.Header // impersonation
}

// A cast is a rig with people who may see different things.
type cast struct {
	*rig.Rig
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
	c := &cast{Rig: newRig(t, users), tokens: map[string]string{}}
	ctx := t.Context()
	for _, ns := range []string{"a", "b"} {
		for i := range 3 {
			meta := metav1.ObjectMeta{Namespace: ns, Name: fmt.Sprintf("o-%d", i)}
			value := "value-of-" + ns + "-" + random()
			c.secrets = append(c.secrets, value)
			_, err := c.ControlPlane.Client.CoreV1().Secrets(ns).Create(ctx, &corev1.Secret{ObjectMeta: meta, StringData: map[string]string{"password": value}}, metav1.CreateOptions{})
			c.Must(err)
			_, err = c.ControlPlane.Client.CoreV1().ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: meta, Data: map[string]string{"of": ns}}, metav1.CreateOptions{})
			c.Must(err)
		}
	}
	c.Grant("a", rig.User("alice"), "secrets", "configmaps")
	c.Grant("b", rig.User("bob"), "secrets", "configmaps")
	c.Grant("a", rig.User("dave"), "secrets", "configmaps")
	for _, name := range []string{"reader", "leaver"} {
		c.Grant("a", rig.User("system:serviceaccount:a:"+name), "secrets", "configmaps")
		_, err := c.ControlPlane.Client.CoreV1().ServiceAccounts("a").Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		c.Must(err)
	}
	c.letImpersonate("deputy", "alice")
	_, err := c.ControlPlane.Client.CoreV1().Pods("a").Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: corev1.PodSpec{
		NodeName: rig.NodeName, ServiceAccountName: "reader", Containers: []corev1.Container{{Name: "c", Image: "example.invalid/none:1"}},
		Volumes: []corev1.Volume{{Name: "s", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "o-0"}}}},
	}}, metav1.CreateOptions{})
	c.Must(err)
	process.Run(t, c.Hub)
	c.WaitLink(true)
	for _, u := range users {
		c.tokens[u.Name] = c.ControlPlane.Token(u.Name)
		c.join(u.Name, c.ControlPlane.TokenConfig(u.Name), nil)
	}
	for _, name := range []string{"reader", "leaver"} {
		tr, err := c.ControlPlane.Client.CoreV1().ServiceAccounts("a").CreateToken(ctx, name, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
		c.Must(err)
		config := c.ControlPlane.TokenConfig("alice")
		config.BearerToken = tr.Status.Token
		c.tokens[name] = tr.Status.Token
		c.join("system:serviceaccount:a:"+name, config, nil)
	}
	c.join("deputy", c.ControlPlane.TokenConfig("deputy"), http.Header{"Impersonate-User": {"alice"}})
	c.join("deputy", c.ControlPlane.TokenConfig("deputy"), http.Header{"Impersonate-User": {"bob"}})
	c.join(rig.NodeUser, c.Node, nil)
	return c
}

func random() string {
	var b [15]byte
	_, _ = rand.Read(b[:]) // it never fails
	return hex.EncodeToString(b[:])
}

func (c *cast) letImpersonate(who, whom string) {
	ctx := c.T.Context()
	meta := metav1.ObjectMeta{Name: "impersonate-" + whom}
	_, err := c.ControlPlane.Client.RbacV1().ClusterRoles().Create(ctx, &rbacv1.ClusterRole{ObjectMeta: meta, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"users"}, ResourceNames: []string{whom}, Verbs: []string{"impersonate"}},
	}}, metav1.CreateOptions{})
	c.Must(err)
	_, err = c.ControlPlane.Client.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: meta, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: meta.Name},
		Subjects: []rbacv1.Subject{{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: who}},
	}, metav1.CreateOptions{})
	c.Must(err)
}

// join adds a person; the audit log is to show the name on what goes through the
// hub.
func (c *cast) join(name string, config *rest.Config, header http.Header) {
	config = rest.CopyConfig(config)
	p := &person{name: name, header: header, direct: c.Direct(config)}
	config.UserAgent = agentPrefix + name
	p.through = c.Through(config)
	c.people = append(c.people, p)
}

func (p *person) String() string { return fmt.Sprint(p.name, " ", p.header.Get("Impersonate-User")) }

func (p *person) ask(ctx context.Context, e *rig.Endpoint, path, accept string) (int, string, error) {
	h := p.header.Clone()
	if h == nil {
		h = http.Header{}
	}
	h.Set("Accept", accept)
	resp, err := e.Do(ctx, http.MethodGet, path, h, nil)
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
	for _, accept := range []string{rig.JSON, rig.Protobuf + "," + rig.JSON} {
		for _, path := range []string{
			"/api/v1/namespaces/a/secrets", "/api/v1/namespaces/b/secrets", "/api/v1/secrets", "/api/v1/namespaces/a/secrets?labelSelector=none%21%3Dx",
			"/api/v1/namespaces/a/configmaps", "/api/v1/namespaces/b/configmaps", "/api/v1/configmaps",
			"/api/v1/namespaces/a/secrets/o-0", "/api/v1/namespaces/b/secrets/o-0", "/api/v1/namespaces/a/secrets?fieldSelector=metadata.name%3Do-0",
		} {
			all = append(all, request{path, accept})
		}
	}
	return append(all,
		request{"/api/v1/namespaces/a/secrets?watch=1&timeoutSeconds=1&resourceVersion=0", rig.JSON}, request{"/api/v1/namespaces/b/secrets?watch=1&timeoutSeconds=1&resourceVersion=0", rig.JSON},
		request{"/api/v1/namespaces/a/secrets", rig.JSON + ";as=Table;v=v1;g=meta.k8s.io," + rig.JSON})
}

// leak returns a secret value that is in the text.
func (c *cast) leak(text string) string {
	for _, v := range c.secrets {
		for _, form := range rig.Disguises(v) {
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
	t.Run("online", func(t *testing.T) { c.T = t; given = c.askOnline() })
	t.Run("token of a pod", func(t *testing.T) { c.T = t; c.tokenOfPod() })
	t.Run("rights that end", func(t *testing.T) { c.T = t; c.endRights(given) })
	t.Run("credentials online", func(t *testing.T) { c.T = t; c.badCredentials(true) })
	c.T = t
	c.Settle()
	c.Offline()
	t.Run("offline", func(t *testing.T) { c.T = t; c.askOffline(given) })
	t.Run("credentials offline", func(t *testing.T) { c.T = t; c.badCredentials(false) })
	c.T = t
	c.Must(c.Hub.Kill())
	c.Must(c.Hub.Start(t.Context()))
	t.Run("offline after a restart", func(t *testing.T) { c.T = t; c.askOffline(given) })
	t.Run("token of a pod offline", func(t *testing.T) { c.T = t; c.tokenOfPod() })
	c.T = t
	c.Online()
	t.Run("online again", func(t *testing.T) { c.T = t; c.askOnline() })
	c.T = t
	c.Must(c.Hub.Stop())
	t.Run("at rest", func(t *testing.T) { c.T = t; c.searchDisk() })
	t.Run("audit", func(t *testing.T) { c.T = t; c.audit(start) })
}

// askOnline compares what the hub says with what the API server says, and returns
// what was given to whom.
func (c *cast) askOnline() map[*person]map[request]string {
	ctx := c.T.Context()
	given := map[*person]map[request]string{}
	n := 0
	for _, p := range c.people {
		given[p] = map[request]string{}
		for _, q := range requests() {
			want, direct, err := p.ask(ctx, p.direct, q.path, q.accept)
			c.Must(err)
			got, body, err := p.ask(ctx, p.through, q.path, q.accept)
			c.Must(err)
			if got != want {
				c.T.Errorf("%v: %s = %d, want %d as the API server says: %.200s", p, q.path, got, want, body)
			}
			if v := c.leak(body); v != "" && !strings.Contains(direct, v) && c.leak(direct) == "" {
				c.T.Errorf("%v: %s shows %s", p, q.path, v)
			}
			if got == http.StatusOK {
				given[p][q] = body
				n++
			}
		}
	}
	if n < 40 {
		c.T.Errorf("only %d questions were answered with 200", n)
	}
	c.T.Logf("%d people, %d questions each, %d times 200", len(c.people), len(requests()), n)
	return given
}

// askOffline wants what was given online, and nothing else.
func (c *cast) askOffline(given map[*person]map[request]string) {
	replayed, refused := 0, 0
	for _, p := range c.people {
		for _, q := range requests() {
			status, body, err := p.ask(c.T.Context(), p.through, q.path, q.accept)
			c.Must(err)
			want, ok := given[p][q]
			switch {
			case ok && status != http.StatusOK:
				c.T.Errorf("%v: %s (%s) offline = %d, want 200 as online: %.200s", p, q.path, q.accept, status, body)
			case ok && !strings.Contains(q.path, "watch") && body != want && !sameItems(body, want):
				c.T.Errorf("%v: %s (%s) offline is\n%.400q\nonline it was\n%.400q", p, q.path, q.accept, body, want)
			case !ok && status == http.StatusOK && (c.leak(body) != "" || !c.covered(given[p], q)):
				c.T.Errorf("%v: %s (%s) offline = 200 without having been given it: %.400s", p, q.path, q.accept, body)
			case !ok && c.leak(body) != "":
				c.T.Errorf("%v: %s offline = %d and shows %s", p, q.path, status, c.leak(body))
			case ok:
				replayed++
			default:
				refused++
			}
		}
	}
	c.T.Logf("%d answers replayed, %d refused", replayed, refused)
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
	x, err := rig.ReadList([]byte(a))
	y, err2 := rig.ReadList([]byte(b))
	return err == nil && err2 == nil && slices.EqualFunc(x.Items, y.Items, bytes.Equal)
}

// tokenOfPod is kubelet's way to a pod's token. Others do not get it.
func (c *cast) tokenOfPod() {
	ctx := c.T.Context()
	pod, err := c.ControlPlane.Client.CoreV1().Pods("a").Get(ctx, "p", metav1.GetOptions{})
	c.Must(err)
	seconds := int64(3607)
	body, err := json.Marshal(&authenticationv1.TokenRequest{
		TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "TokenRequest"},
		Spec:     authenticationv1.TokenRequestSpec{ExpirationSeconds: &seconds, BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: "p", UID: pod.UID}},
	})
	c.Must(err)
	for _, p := range c.people {
		h := p.header.Clone()
		if h == nil {
			h = http.Header{}
		}
		h.Set("Content-Type", rig.JSON)
		h.Set("Accept", rig.JSON)
		resp, err := p.through.Do(ctx, http.MethodPost, "/api/v1/namespaces/a/serviceaccounts/reader/token", h, body)
		c.Must(err)
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		c.Must(err)
		var tr authenticationv1.TokenRequest
		if resp.StatusCode == http.StatusCreated {
			c.Must(json.Unmarshal(b, &tr))
		}
		switch got := tr.Status.Token; {
		case p.name != rig.NodeUser && (got != "" || resp.StatusCode < 400):
			c.T.Errorf("%v: POST token = %d: %.200s", p, resp.StatusCode, b)
		case p.name == rig.NodeUser && got == "":
			c.T.Errorf("%v: POST token = %d, want a token: %.200s", p, resp.StatusCode, b)
		case p.name == rig.NodeUser:
			c.tokens[fmt.Sprint("passed on ", len(c.tokens))] = got
		}
	}
}

// endRights takes away what dave may and who leaver is. Once each has been told
// so for a path, there is no copy of it any more.
func (c *cast) endRights(given map[*person]map[request]string) {
	ctx := c.T.Context()
	c.Revoke("a", "dave")
	c.Must(c.ControlPlane.Client.CoreV1().ServiceAccounts("a").Delete(ctx, "leaver", metav1.DeleteOptions{}))
	for _, p := range c.people {
		code := map[string]int{"dave": http.StatusForbidden, "system:serviceaccount:a:leaver": http.StatusUnauthorized}[p.name]
		if code == 0 {
			continue
		}
		for _, q := range requests() {
			if _, ok := given[p][q]; !ok {
				continue
			}
			c.Must(process.Poll(ctx, fmt.Sprintf("%v: %s is %d", p, q.path, code), func(ctx context.Context) error {
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
	plain := c.ControlPlane.TokenConfig("alice")
	plain.BearerToken = ""
	plain.UserAgent = agentPrefix + "nobody"
	withCert := func(name string, orgs ...string) *rest.Config {
		cert, key, err := c.ControlPlane.ClientCert(name, orgs...)
		c.Must(err)
		config := rest.CopyConfig(plain)
		config.CertFile, config.KeyFile = cert, key
		return config
	}
	node := rest.CopyConfig(plain)
	node.CertFile, node.KeyFile = c.Node.CertFile, c.Node.KeyFile
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
		{"the node's name without its group", withCert(rig.NodeUser), nil, is403},
		{"the node's name with one more group", withCert(rig.NodeUser, "system:nodes", "system:masters"), nil, is403},
		{"the node impersonates", node, http.Header{"Impersonate-User": {"alice"}}, is403},
		{"the node impersonates a group", node, http.Header{"Impersonate-Group": {"system:masters"}}, is403},
		{"the node impersonates itself", node, http.Header{"Impersonate-User": {rig.NodeUser}}, is403},
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
		e := c.Through(a.config)
		for _, path := range []string{"/api/v1/namespaces/a/secrets", "/api/v1/namespaces/a/secrets/o-0", "/api/v1/namespaces/a/configmaps?watch=1&timeoutSeconds=1", "/version", "/readyz/none", "/metrics"} {
			resp, err := e.Do(c.T.Context(), http.MethodGet, path, a.header, nil)
			if err != nil {
				c.T.Errorf("%s: %s: %v", a.name, path, err)
				continue
			}
			body, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || !slices.Contains(a.want, resp.StatusCode) {
				c.T.Errorf("%s: %s = %d, %v, want %v: %.200s", a.name, path, resp.StatusCode, err, a.want, body)
			}
			if v := c.leak(string(body)); v != "" {
				c.T.Errorf("%s: %s shows %s", a.name, path, v)
			}
		}
	}
}

// audit looks at every request of the run: those that came through the hub are
// their callers' own, those of the hub itself the node's or a known caller's.
func (c *cast) audit(since time.Time) {
	events, err := c.ControlPlane.Requests(since)
	c.Must(err)
	known := map[string]bool{rig.NodeUser: true}
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
			c.T.Errorf("%s %s of nobody went out as %s", e.Verb, e.RequestURI, e.User.Username)
		case passed && caller != "nobody" && e.User.Username != caller && e.User.Username != "" && e.ResponseStatus.Code != http.StatusUnauthorized:
			c.T.Errorf("%s %s of %s went out as %s", e.Verb, e.RequestURI, caller, e.User.Username)
		case strings.HasPrefix(e.UserAgent, "edgehub") && !known[e.User.Username] && e.ResponseStatus.Code != http.StatusUnauthorized:
			c.T.Errorf("%s %s of the hub itself went out as %s", e.Verb, e.RequestURI, e.User.Username)
		case e.User.Username == rig.NodeUser && as != "":
			c.T.Errorf("%s %s went out as the node, for %s", e.Verb, e.RequestURI, as)
		case passed:
			through++
		case strings.HasPrefix(e.UserAgent, "edgehub"):
			own++
		}
	}
	if through < 100 || own < 5 {
		c.T.Errorf("audit has %d requests of callers and %d of the hub itself: the log cannot be what is thought", through, own)
	}
	c.T.Logf("audit: %d requests of callers, %d of the hub itself", through, own)
}
