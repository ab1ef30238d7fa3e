// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"fmt"
	"net/http"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

const (
	discovery      = "system:service-account-issuer-discovery"
	discoveryToAll = "identity-test-discovery"
	issuersKeys    = "/openid/v1/jwks"
)

// A stranger is a token that the hub has not seen before the cut.
type stranger struct {
	name, token string
	want        int // status of what its ServiceAccount was shown, offline
}

// TestUnknownTokenOffline has tokens come that the hub has never seen while nobody can
// be asked about them. Without the issuer's keys it cannot tell. With them, a pod of
// this node is who its token says, and is shown what its ServiceAccount was shown
// before the cut, no more; a token that is of no pod that is known here, or that the
// API server would refuse, opens nothing.
//
// Guards: verify checks signature, key, audience and times; user wants what a token is
// bound to on this node, by its uid; NodeKnows looks at the newest state; the keys
// are on disk.
func TestUnknownTokenOffline(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	username := s.account("reader")
	s.account("again")
	s.Grant(s.namespace, rig.User(username), "secrets") // never shown
	here := s.pod("here", rig.NodeName, "reader")
	gone := s.pod("gone", rig.NodeName, "reader")
	anew := s.pod("anew", rig.NodeName, "reader")
	elsewhere := s.pod("elsewhere", otherNode, "reader")
	s.bindDiscovery(false)
	s.start()
	known, path := s.with(s.token("reader", authenticationv1.TokenRequestSpec{})), s.path("configmaps")
	s.comes("a known token", known, path, http.StatusOK)
	s.comes("the ServiceAccount that is made again", s.with(s.token("again", authenticationv1.TokenRequestSpec{})), path, http.StatusOK)
	own := s.Through(s.Node)
	s.asks("the node", own, podsOfN1, http.StatusOK)
	pods := s.watch(own, podsOfN1)
	pods.until(s.namespace + "/anew")
	s.waitMetric(1, "edgehub_identity_issuer_fetches_total", `result="error"`)
	s.Settle()
	s.Offline()
	s.asks("a token of a pod, without the issuer's keys", s.with(s.token("reader", boundTo("Pod", here))), path, http.StatusServiceUnavailable)
	s.asks("a known token", known, path, http.StatusOK)

	s.bindDiscovery(true)
	s.Online()
	s.fetchKeys()
	strangers := s.strangers(here, gone, anew, elsewhere)
	again := s.watch(own, podsOfN1)
	s.deletePod("gone")
	s.deletePod("anew")
	s.pod("anew", rig.NodeName, "reader")
	s.pod("last", rig.NodeName, "default")
	again.until(s.namespace + "/last") // and with it all that was before
	online := s.asks("a known token", known, path, http.StatusOK)
	s.Settle()
	s.Offline()
	s.judge("offline", strangers, online)
	if n := s.metric("edgehub_identity_authentications_total", `result="token_signature"`); n == 0 {
		t.Error("no token was taken by its signature")
	}
	s.restart(false)
	s.judge("offline after a restart", strangers, online)
	s.Online()
	s.asks("the token of a pod that is here, online", s.with(strangers[0].token), path, http.StatusOK)
	s.comes("the token of a pod that is gone, online", s.with(s.tokenOf(strangers, "a pod that was deleted")), path, http.StatusUnauthorized)
}

// fetchKeys starts the hub anew until it has the issuer's keys: it asks for them once
// in ten minutes, which may fail where a machine is very busy.
func (s *site) fetchKeys() {
	s.T.Helper()
	const fetches = "edgehub_identity_issuer_fetches_total"
	for range 3 {
		s.restart(true)
		s.waitMetric(1, fetches)
		if s.metric(fetches, `result="success"`) > 0 {
			return
		}
	}
	s.T.Fatal("the issuer's keys were not fetched")
}

// boundTo is a token of something.
func boundTo(kind string, o metav1.Object) authenticationv1.TokenRequestSpec {
	return authenticationv1.TokenRequestSpec{BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: kind, Name: o.GetName(), UID: o.GetUID()}}
}

// strangers are made while the link is up, past the hub.
func (s *site) strangers(here, gone, anew, elsewhere *corev1.Pod) []stranger {
	s.T.Helper()
	ctx, core := s.T.Context(), s.ControlPlane.Client.CoreV1()
	node := func(name string) *corev1.Node {
		n, err := core.Nodes().Get(ctx, name, metav1.GetOptions{})
		s.Must(err)
		return n
	}
	secret, err := core.Secrets(s.namespace).Get(ctx, "s", metav1.GetOptions{})
	s.Must(err)
	s.Must(core.ServiceAccounts(s.namespace).Delete(ctx, "again", metav1.DeleteOptions{}))
	_, err = core.ServiceAccounts(s.namespace).Create(ctx, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: "again"}}, metav1.CreateOptions{})
	s.Must(err)
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	s.Must(err)
	pod := s.token("reader", boundTo("Pod", here))
	const ok, no, unknown = http.StatusOK, http.StatusUnauthorized, http.StatusServiceUnavailable
	with := func(claim string, value any) string {
		return s.forge(pod, forgery{claims: map[string]any{claim: value}})
	}
	return []stranger{
		{"a pod", pod, ok},
		{"nothing", s.token("reader", authenticationv1.TokenRequestSpec{}), ok},
		{"this node", s.token("reader", boundTo("Node", node(rig.NodeName))), ok},
		{"a ServiceAccount of the same name that is another one", s.token("again", authenticationv1.TokenRequestSpec{}), unknown},
		{"a pod that was deleted", s.token("reader", boundTo("Pod", gone)), unknown},
		{"a pod that was deleted and made anew", s.token("reader", boundTo("Pod", anew)), unknown},
		{"another node's pod", s.token("reader", boundTo("Pod", elsewhere)), unknown},
		{"another node", s.token("reader", boundTo("Node", node(otherNode))), unknown},
		{"a Secret", s.token("reader", boundTo("Secret", secret)), unknown},
		{"another audience", s.token("reader", authenticationv1.TokenRequestSpec{Audiences: []string{"elsewhere"}, BoundObjectRef: boundTo("Pod", here).BoundObjectRef}), no},
		{"a pod, long ago", with("exp", time.Now().Add(-time.Minute).Unix()), no},
		{"a pod, in an hour", with("nbf", time.Now().Add(time.Hour).Unix()), unknown},
		{"a pod, by another issuer", with("iss", "https://elsewhere.example.com"), unknown},
		{"a pod, of another subject", with("sub", "system:serviceaccount:kube-system:admin"), no},
		{"a pod, with another key's signature", s.forge(pod, forgery{key: other}), no},
		{"a pod, with a key that nobody knows", s.forge(pod, forgery{key: other, keyID: "unknown"}), unknown},
		{"a pod, without a signature", unsigned(pod), unknown},
	}
}

func (s *site) tokenOf(all []stranger, name string) string {
	s.T.Helper()
	for _, x := range all {
		if x.name == name {
			return x.token
		}
	}
	s.T.Fatalf("no stranger is %s", name)
	return ""
}

// judge compares what strangers are shown with what their ServiceAccount was shown.
func (s *site) judge(state string, all []stranger, shown string) {
	s.T.Helper()
	// Clocks may differ, but not to prolong a token.
	all = append(all, stranger{"a pod, until a moment ago", s.until(all[0].token, time.Now().Add(-time.Second)), http.StatusUnauthorized})
	for _, x := range all {
		who, e := fmt.Sprintf("token of %s, %s", x.name, state), s.with(x.token)
		got := s.asks(who, e, s.path("configmaps"), x.want)
		if x.want == http.StatusOK && !sameItems(got, shown) {
			s.T.Errorf("%s: it is shown\n%.300s\nwant\n%.300s", who, got, shown)
		}
		more := x.want
		if more == http.StatusOK {
			more = http.StatusServiceUnavailable
		}
		for _, path := range []string{s.path("secrets"), s.path("secrets/s"), "/api/v1/configmaps", podsOfN1} {
			s.asks(who, e, path, more)
		}
	}
}

// bindDiscovery lets every node read the issuer's keys, or none, and waits until the
// API server has taken note.
func (s *site) bindDiscovery(yes bool) {
	s.T.Helper()
	bindings, ctx, want := s.ControlPlane.Client.RbacV1().ClusterRoleBindings(), s.T.Context(), http.StatusForbidden
	remove := func(ctx context.Context) {
		if err := bindings.Delete(ctx, discoveryToAll, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			s.T.Error(err)
		}
	}
	if !yes {
		remove(ctx)
	} else {
		want = http.StatusOK
		_, err := bindings.Create(ctx, &rbacv1.ClusterRoleBinding{
			ObjectMeta: metav1.ObjectMeta{Name: discoveryToAll}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: discovery},
			Subjects: []rbacv1.Subject{rig.Group("system:nodes")},
		}, metav1.CreateOptions{})
		s.Must(err)
		s.T.Cleanup(func() { remove(context.WithoutCancel(ctx)) })
	}
	direct := s.Direct(s.Node)
	s.Must(process.Poll(ctx, fmt.Sprintf("GET %s is answered with %d", issuersKeys, want), func(ctx context.Context) error {
		status, _, err := direct.Fetch(ctx, issuersKeys, "application/jwk-set+json")
		if err == nil && status != want {
			err = fmt.Errorf("it is answered with %d", status)
		}
		return err
	}))
}
