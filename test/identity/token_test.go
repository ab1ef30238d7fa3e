// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/process"
	"github.com/edgehub/edgehub/test/rig"
)

// reviews is how often the hub has asked whose a token is.
func (s *site) reviews() float64 {
	s.T.Helper()
	return s.metric("edgehub_identity_reviews_total")
}

// TestTokenVerdicts counts how often the API server is asked whose a token is: once
// in two minutes, however many requests there are and however many are first. A token
// that it does not accept any more is refused from then on, also while nobody can be
// asked.
//
// Guards: remembered answers without a review; flights lets requests share one;
// reject takes the place of what was recorded about the token.
func TestTokenVerdicts(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	username := s.account("reader")
	s.start()
	begin := time.Now()
	first, path := s.with(s.token("reader", authenticationv1.TokenRequestSpec{})), s.path("configmaps")
	s.comes("the first token", first, path, http.StatusOK) // its rights take a moment
	for range 20 {
		s.asks("the first token", first, path, http.StatusOK)
	}
	if got := s.reviews(); got != 1 {
		t.Errorf("reviews of one token = %v, want 1", got)
	}
	s.Must(process.Poll(t.Context(), "the audit log has one review", func(context.Context) error {
		events, err := s.ControlPlane.Requests(begin)
		if n := controlplane.Count(events, username, "create", "selfsubjectreviews"); err == nil && n != 1 {
			err = fmt.Errorf("it has %d", n)
		}
		return err
	}))
	t.Run("at the same time", func(t *testing.T) { s.T = t; s.shareReview(path) })
	t.Run("one that is none", func(t *testing.T) { s.T = t; s.refuseOnce(path) })
	s.T = t
	s.endAccount(first, path)
}

// shareReview has many come with a token that nobody has seen, over a link on which a
// review takes a while.
func (s *site) shareReview(path string) {
	e := s.with(s.token("reader", authenticationv1.TokenRequestSpec{}))
	before := s.reviews()
	s.Link.Delay(150 * time.Millisecond)
	defer s.Link.Delay(0)
	var wg sync.WaitGroup
	for range 30 {
		wg.Go(func() { s.asks("one of many", e, path, http.StatusOK) })
	}
	wg.Wait()
	if got := s.reviews() - before; got != 1 {
		s.T.Errorf("reviews for 30 first requests = %v, want 1", got)
	}
}

// refuseOnce has somebody insist on a token that is none, within the 10 s for which
// a no is remembered.
func (s *site) refuseOnce(path string) {
	e := s.with("none-" + s.namespace)
	before, begin := s.reviews(), time.Now()
	for range 10 {
		s.asks("no token", e, path, http.StatusUnauthorized)
	}
	if got := s.reviews() - before; got != 1 && time.Since(begin) < 10*time.Second {
		s.T.Errorf("reviews for 10 requests with what is no token = %v, want 1", got)
	}
}

// endAccount deletes the ServiceAccount of a token that the hub knows. That the API
// server has taken note is seen from another token of it, past the hub.
func (s *site) endAccount(e *rig.Endpoint, path string) {
	s.T.Helper()
	direct := s.Direct(s.config(s.token("reader", authenticationv1.TokenRequestSpec{})))
	s.asks("a token past the hub", direct, path, http.StatusOK)
	s.Must(s.ControlPlane.Client.CoreV1().ServiceAccounts(s.namespace).Delete(s.T.Context(), "reader", metav1.DeleteOptions{}))
	s.comes("a token of a ServiceAccount that is gone, past the hub", direct, path, http.StatusUnauthorized)
	// Within two minutes the hub takes its word for who it is, and the API server
	// has the last one.
	s.comes("the token of a ServiceAccount that is gone", e, path, http.StatusUnauthorized)
	s.restart(true) // now it asks
	s.asks("the token after a restart", e, "/version", http.StatusUnauthorized)
	s.Settle()
	s.Offline()
	s.asks("the token offline", e, "/version", http.StatusUnauthorized)
	s.restart(false)
	s.asks("the token offline after a restart", e, "/version", http.StatusUnauthorized)
	s.asks("the token offline after a restart", e, path, http.StatusUnauthorized)
}

// TestKnownTokenOfflineUntilExp has a token that the API server has vouched for end
// while the link is down: it is good until then, also for a hub that has been started
// since, and 401 after.
//
// Guards: offline of a verdict looks at exp; accept writes the verdict down.
func TestKnownTokenOfflineUntilExp(t *testing.T) {
	t.Parallel()
	const life = 20 * time.Second
	s := newSite(t)
	s.account("reader")
	token := s.token("reader", authenticationv1.TokenRequestSpec{})
	s.start()
	end := time.Now().Add(life).Truncate(time.Second)
	e, path := s.with(s.until(token, end)), s.path("configmaps")
	s.comes("the token", e, path, http.StatusOK)
	s.Settle()
	s.Offline()
	s.asks("the token offline", e, path, http.StatusOK)
	s.restart(false)
	s.asks("the token offline after a restart", e, path, http.StatusOK)
	if late := time.Since(end); late > 0 {
		t.Fatalf("all that was to be done before the token ended took %v longer", late)
	}
	if n := s.metric("edgehub_identity_authentications_total", `result="token_offline"`); n != 1 {
		t.Errorf("requests with a token that was taken by its verdict = %v, want 1", n)
	}
	s.Must(process.Poll(t.Context(), "the token is refused", func(ctx context.Context) error {
		asked := time.Now()
		status, _, err := e.Fetch(ctx, path, rig.JSON)
		switch answered := time.Now(); {
		case err != nil:
			return err
		case status == http.StatusUnauthorized && answered.Before(end):
			t.Errorf("the token is refused %v before its end", end.Sub(answered))
		case status == http.StatusOK && asked.After(end):
			t.Errorf("the token is taken %v after its end", asked.Sub(end))
		case status != http.StatusOK && status != http.StatusUnauthorized:
			t.Errorf("GET %s with the token = %d, want 200 or 401", path, status)
		}
		if status == http.StatusOK {
			return errors.New("it is taken")
		}
		return nil
	}))
	s.asks("the token after its end", e, path, http.StatusUnauthorized)
}

// TestOfflineMaxAge gives users 4 s: for so long after it was last shown something a
// user is shown it while the link is down, and no longer. Others have their own times,
// and it begins anew with the next time that the API server shows it.
//
// Guards: tooOld compares; the classes are told apart; a list that shows nothing new
// counts as having been shown; the time is on disk.
func TestOfflineMaxAge(t *testing.T) {
	t.Parallel()
	const age = 4 * time.Second
	s := newSite(t)
	s.account("reader")
	s.Grant(s.namespace, rig.User(user), "configmaps")
	s.pod("p", rig.NodeName, "default")
	s.start("--offline-max-age=user=" + age.String())
	path := s.path("configmaps")
	somebody, account, own := s.Through(s.ControlPlane.TokenConfig(user)), s.with(s.token("reader", authenticationv1.TokenRequestSpec{})), s.Through(s.Node)
	s.comes("the user", somebody, path, http.StatusOK)
	s.comes("the ServiceAccount", account, path, http.StatusOK)
	s.asks("the node", own, podsOfN1, http.StatusOK)
	s.Settle()
	others := func(when string) {
		t.Helper()
		s.asks("the ServiceAccount "+when, account, path, http.StatusOK)
		s.asks("the node "+when, own, podsOfN1, http.StatusOK)
	}
	for _, when := range []string{"offline", "offline once more"} { // shown nothing new in between
		for n := 1; !s.hides(somebody, path, age); n++ {
			if n == 5 {
				t.Fatal("the hub never knew in time that the link was cut")
			}
			s.Online()
		}
		others(when)
		if when == "offline" {
			s.Online()
		}
	}
	s.restart(false)
	s.asks("the user after a restart", somebody, path, http.StatusServiceUnavailable)
	others("after a restart")
	s.Online()
	s.comes("the user online again", somebody, path, http.StatusOK)
}

// hides shows something to somebody, cuts the link, and wants it shown for a time from
// then on. It is false where half of the time had gone by when the hub knew of the cut.
func (s *site) hides(e *rig.Endpoint, path string, age time.Duration) bool {
	s.T.Helper()
	asked := time.Now()
	s.comes("the user online", e, path, http.StatusOK)
	shown := time.Now()
	s.Offline()
	if time.Since(asked) > age/2 {
		return false
	}
	answers := 0
	s.Must(process.Poll(s.T.Context(), "the user is not shown it any more", func(ctx context.Context) error {
		now := time.Now()
		status, _, err := e.Fetch(ctx, path, rig.JSON)
		switch {
		case err != nil:
			return err
		// Times on disk are whole seconds.
		case status == http.StatusOK && now.Sub(shown) > age+time.Second:
			s.T.Errorf("the user is shown it %v after the last time, want %v at most", now.Sub(shown), age)
		case status == http.StatusServiceUnavailable && time.Since(asked) < age-time.Second:
			s.T.Errorf("the user is not shown it %v after the last time, want %v", time.Since(asked), age)
		case status == http.StatusOK:
			answers++
		}
		if status == http.StatusOK {
			return errors.New("it is shown")
		}
		return nil
	}))
	if answers == 0 {
		s.T.Error("the user is never shown it offline")
	}
	s.asks("the user after its time", e, path, http.StatusServiceUnavailable)
	return true
}
