// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package offline

import (
	"context"
	"fmt"
	"net/http"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// A tokenQuestion is all that makes one TokenRequest another one.
type tokenQuestion struct {
	account   string
	audiences []string
	seconds   int64
	pod       string
	uid       types.UID
}

func (q tokenQuestion) ask(media string) ask {
	spec := authenticationv1.TokenRequestSpec{Audiences: q.audiences, ExpirationSeconds: &q.seconds}
	if q.pod != "" {
		spec.BoundObjectRef = &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: q.pod, UID: q.uid}
	}
	return create("/api/v1/namespaces/a/serviceaccounts/"+q.account+"/token", media, &authenticationv1.TokenRequest{Spec: spec})
}

// tokenRequest fails without the rule tokenrequest: no pod with a projected token
// starts. It also fails if one who asks for something else, or is somebody else, is
// handed the token.
func (w *world) tokenRequest() row {
	kubelets := tokenQuestion{account: "reader", audiences: []string{}, seconds: 3607, pod: "p"}
	var uidQ types.UID
	operators := tokenQuestion{account: "reader", audiences: []string{"x", "y"}, seconds: 3600}
	given := map[string]answer{}
	return row{
		name: "TokenRequest",
		online: func() {
			kubelets.uid, uidQ = w.podUID("p"), w.podUID("q")
			for _, media := range encodings {
				w.must201(w.node, kubelets.ask(media))
				given[media] = w.ask(w.node, kubelets.ask(media), http.StatusCreated)
			}
			given[operator] = w.ask(w.callers[operator], operators.ask(rig.JSON), http.StatusCreated)
			w.sameVerdict(w.node, tokenQuestion{account: "reader", seconds: 3607}.ask(rig.JSON)) // for no pod: 403
		},
		offline: func() {
			for _, media := range encodings {
				w.tokenAgain(w.node, kubelets.ask(media), given[media])
				for what, change := range map[string]func(*tokenQuestion){
					"another audience": func(q *tokenQuestion) { q.audiences = []string{"x"} },
					"another life":     func(q *tokenQuestion) { q.seconds = 3600 },
					"another uid":      func(q *tokenQuestion) { q.uid = "f52f9f3a-6f5b-4f8c-8f5b-0c6f4f1f2a3b" },
					"another pod":      func(q *tokenQuestion) { q.pod, q.uid = "q", uidQ },
					"no pod":           func(q *tokenQuestion) { q.pod = "" },
					"another account":  func(q *tokenQuestion) { q.account = "other" },
				} {
					q := kubelets
					change(&q)
					a := q.ask(media)
					a.what = "for " + what
					w.refused(w.node, a)
				}
				for _, c := range []*caller{w.callers[operator], w.callers[alice], w.stranger} {
					w.refused(c, kubelets.ask(media))
				}
				w.refused(w.node, kubelets.ask(media).with("dryRun=All"))
				w.refused(w.node, operators.ask(media))
			}
			operators.audiences = []string{"y", "x"} // in whatever order
			w.tokenAgain(w.callers[operator], operators.ask(rig.JSON), given[operator])
		},
		healed: func() { w.ask(w.node, kubelets.ask(rig.Protobuf), http.StatusCreated) },
	}
}

func (w *world) podUID(name string) types.UID {
	w.T.Helper()
	p, err := w.ControlPlane.Client.CoreV1().Pods("a").Get(w.T.Context(), name, metav1.GetOptions{})
	w.Must(err)
	return p.UID
}

// must201 waits until the API server's Node authorizer knows what the caller needs.
func (w *world) must201(c *caller, a ask) {
	w.T.Helper()
	var got answer
	w.Must(process.Poll(w.T.Context(), fmt.Sprintf("%v is allowed", a), polled(func(ctx context.Context) bool {
		got = send(ctx, c.direct, a)
		return got.status == http.StatusCreated
	}, "it is not")))
}

// tokenAgain wants the token that was given online. A recorded one may stand for a
// day, so it need not be the last.
func (w *world) tokenAgain(c *caller, a ask, given answer) {
	w.T.Helper()
	got, want := decode[authenticationv1.TokenRequest](w.replayed(c, a, http.StatusCreated).body), decode[authenticationv1.TokenRequest](given.body)
	if want.Status.Token == "" || got.Status.Token != want.Status.Token {
		w.T.Errorf("%s: %v gives another token than online, or none", c.name, a)
	}
}

// A review is a question that the node asks about somebody.
type review struct {
	what   string
	object runtime.Object
	path   string
}

func tokenReviewOf(what, token string) review {
	return review{what, &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}, "/apis/authentication.k8s.io/v1/tokenreviews"}
}

// accessReviewOf asks whether somebody may scrape the node.
func accessReviewOf(who, verb string) review {
	return review{"access of " + who, &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: who, ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: verb, Resource: "configmaps", Namespace: "a", Version: "v1"},
	}}, "/apis/authorization.k8s.io/v1/subjectaccessreviews"}
}

func (r review) ask(media string) ask {
	a := create(r.path, media, r.object.DeepCopyObject())
	a.what = r.what
	return a
}

// yes reports whether an answer to a review is yes.
func yes(a answer) bool {
	return decode[authenticationv1.TokenReview](a.body).Status.Authenticated || decode[authorizationv1.SubjectAccessReview](a.body).Status.Allowed
}

// tokenReview fails without the rules tokenreview and subjectaccessreview: nobody
// gets at kubelet's API, metrics included. It also fails if a no, or no answer at
// all, becomes a yes, or if somebody else than the node is answered.
func (w *world) tokenReview() row {
	goods := []review{accessReviewOf(alice, "list")}
	leaver := accessReviewOf(dave, "list")
	bads := []review{tokenReviewOf("a token made up", "made-up"), accessReviewOf(nobody, "list"), leaver}
	unknowns := []review{accessReviewOf(alice, "get"), accessReviewOf(carol, "list"), tokenReviewOf("alice's token", w.ControlPlane.Token(alice))}
	given := map[string]answer{}
	return row{
		name: "TokenReview",
		online: func() {
			tr, err := w.ControlPlane.Client.CoreV1().ServiceAccounts("a").CreateToken(w.T.Context(), "reader", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
			w.Must(err)
			goods = append(goods, tokenReviewOf("a ServiceAccount's token", tr.Status.Token))
			for _, media := range encodings {
				for _, r := range append(goods, leaver) {
					if given[r.what+media] = w.ask(w.node, r.ask(media), http.StatusCreated); !yes(given[r.what+media]) {
						w.T.Errorf("%s online = %v, want yes", r.what, given[r.what+media])
					}
				}
			}
			w.Revoke("a", dave)
			w.Must(process.Poll(w.T.Context(), "the right has ended", polled(func(ctx context.Context) bool {
				return !yes(send(ctx, w.node.direct, leaver.ask(rig.JSON)))
			}, "it has not")))
			for _, media := range encodings {
				for _, r := range bads {
					if got := w.sameVerdict(w.node, r.ask(media)); got.status != http.StatusCreated || yes(got) {
						w.T.Errorf("%s online = %v, want no", r.what, got)
					}
				}
			}
			w.ask(w.callers[operator], goods[0].ask(rig.JSON), http.StatusCreated)
		},
		offline: func() {
			for _, media := range encodings {
				for _, r := range goods {
					if got := w.replayed(w.node, r.ask(media), http.StatusCreated); !got.is(given[r.what+media]) {
						w.T.Errorf("%s offline = %v, online it was %v", r.what, got, given[r.what+media])
					}
					w.refused(w.stranger, r.ask(media))
					w.refused(w.callers[operator], r.ask(media))
					w.refused(w.node, r.ask(media).with("dryRun=All"))
				}
				for _, r := range append(bads, unknowns...) {
					w.refused(w.node, r.ask(media))
				}
			}
		},
		healed: func() {
			for _, r := range goods {
				w.sameVerdict(w.node, r.ask(rig.JSON))
			}
		},
	}
}

// selfSubjectReview fails if who somebody is, or may do, is answered from a record:
// these have no bound of their own like kubelet's questions, and nothing needs them.
func (w *world) selfSubjectReview() row {
	attributes := &authorizationv1.ResourceAttributes{Verb: "list", Resource: "configmaps", Namespace: "a"}
	asks := func(media string) []ask {
		return []ask{
			create("/apis/authentication.k8s.io/v1/selfsubjectreviews", media, &authenticationv1.SelfSubjectReview{}),
			create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", media, &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{ResourceAttributes: attributes}}),
			create("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews", media, &authorizationv1.SelfSubjectRulesReview{Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: "a"}}),
			create("/apis/authorization.k8s.io/v1/namespaces/a/localsubjectaccessreviews", media, &authorizationv1.LocalSubjectAccessReview{
				ObjectMeta: metav1.ObjectMeta{Namespace: "a"}, Spec: authorizationv1.SubjectAccessReviewSpec{User: alice, ResourceAttributes: attributes},
			}),
		}
	}
	each := func(f func(*caller, ask)) {
		for _, c := range w.callers {
			for _, media := range encodings {
				for _, a := range asks(media) {
					f(c, a)
				}
			}
		}
	}
	return row{
		name:    "SelfSubjectReview",
		online:  func() { each(func(c *caller, a ask) { w.sameVerdict(c, a) }) },
		offline: func() { each(w.refused) },
	}
}
