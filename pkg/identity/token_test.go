// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

func claimsOnly(claims string) string {
	return "eyJhbGciOiJSUzI1NiJ9." + base64.RawURLEncoding.EncodeToString([]byte(claims)) + ".c2ln"
}

func jwtFor(d time.Duration) string {
	return claimsOnly(fmt.Sprintf(`{"sub":"x","exp":%d}`, time.Now().Add(d).Unix()))
}

func keyOf(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

func TestBearerToken(t *testing.T) {
	long := strings.Repeat("a", maxTokenBytes)
	for _, tc := range []struct {
		values []string
		want   string
	}{
		{[]string{"Bearer abc"}, "abc"},
		{[]string{"bEARER abc.def-_~+/=="}, "abc.def-_~+/=="},
		{[]string{"Bearer token-x7k2:s3cr3t"}, "token-x7k2:s3cr3t"},
		{[]string{"Bearer " + long}, long},
		{[]string{"Bearer " + long + "a"}, ""},
		{nil, ""},
		{[]string{""}, ""},
		{[]string{"Bearer"}, ""},
		{[]string{"Bearer "}, ""},
		{[]string{" Bearer abc"}, ""},
		{[]string{"Bearer  abc"}, ""},
		{[]string{"Bearer abc "}, ""},
		{[]string{"Bearer abc def"}, ""},
		{[]string{"Bearer\tabc"}, ""},
		{[]string{"Bearer abc,def"}, ""},
		{[]string{"Bearer abc, Bearer def"}, ""},
		{[]string{"Bearer \"abc\""}, ""},
		{[]string{"Bearer a\x00b"}, ""},
		{[]string{"Bearer a\r\nX: y"}, ""},
		{[]string{"Bearer ä"}, ""},
		{[]string{"abc"}, ""},
		{[]string{"Basic YTpi"}, ""},
		{[]string{"Bearerabc"}, ""},
		{[]string{"Bearer abc", "Bearer abc"}, ""},
		{[]string{"Bearer abc", ""}, ""},
	} {
		got, err := bearerToken(tc.values)
		if got != tc.want || (err == nil) != (tc.want != "") || (err != nil && !errors.Is(err, ErrUnauthenticated)) {
			t.Errorf("bearerToken(%.60q) = %.60q, %v, want %.60q", tc.values, got, err, tc.want)
		}
	}
}

func TestReviewRequest(t *testing.T) {
	f := newFixture(t)
	f.answer(func(req *http.Request) (*http.Response, error) {
		body, _ := io.ReadAll(req.Body)
		if got, want := string(body), reviewBody; got != want || req.ContentLength != int64(len(want)) {
			t.Errorf("body = %s, want %s", got, want)
		}
		if req.Method != http.MethodPost || req.URL.Path != "/apis/authentication.k8s.io/v1/selfsubjectreviews" || req.URL.RawQuery != "" || req.Host != "" {
			t.Errorf("request = %s %s", req.Method, req.URL)
		}
		want := http.Header{
			"Authorization": {"Bearer tok"}, "Accept": {"application/json"},
			"Content-Type": {"application/json"}, "User-Agent": {"edgehub"},
		}
		if diff := cmp.Diff(want, req.Header); diff != "" {
			t.Errorf("headers (-want +got):\n%s", diff)
		}
		if _, ok := req.Context().Deadline(); !ok {
			t.Error("the review has no deadline")
		}
		return answer(201, review("alice")), nil
	})
	req := withToken("tok")
	req.Header.Set("Impersonate-User", "admin")
	req.Header.Set("X-Remote-User", "admin")
	u, err := f.Authenticate(req)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(reviewed("alice"), u); diff != "" {
		t.Errorf("Authenticate() (-want +got):\n%s", diff)
	}
	f.wantReviews(t, 1)
}

func TestReviewAnswers(t *testing.T) {
	for _, tc := range []struct {
		name string
		rt   roundTripper
		want error
	}{
		{"200", func(*http.Request) (*http.Response, error) { return answer(200, review("alice")), nil }, nil},
		{"401", func(*http.Request) (*http.Response, error) { return answer(401, review("alice")), nil }, ErrUnauthenticated},
		{"403", func(*http.Request) (*http.Response, error) { return answer(403, review("alice")), nil }, ErrUnavailable},
		{"404", func(*http.Request) (*http.Response, error) { return answer(404, "404 page not found"), nil }, ErrUnavailable},
		{"429", func(*http.Request) (*http.Response, error) { return answer(429, "{}"), nil }, ErrUnavailable},
		{"302", func(*http.Request) (*http.Response, error) { return answer(302, review("alice")), nil }, ErrUnavailable},
		{"500", func(*http.Request) (*http.Response, error) { return answer(500, review("alice")), nil }, ErrUnavailable},
		{"503", func(*http.Request) (*http.Response, error) { return answer(503, "{}"), nil }, ErrUnavailable},
		{"not JSON", func(*http.Request) (*http.Response, error) { return answer(201, "<html>"), nil }, ErrUnavailable},
		{"other kind", func(*http.Request) (*http.Response, error) {
			return answer(201, strings.Replace(review("alice"), "SelfSubjectReview", "Status", 1)), nil
		}, ErrUnavailable},
		{"no name", func(*http.Request) (*http.Response, error) { return answer(201, review("")), nil }, ErrUnavailable},
		{"anonymous", func(*http.Request) (*http.Response, error) { return answer(201, review("system:anonymous")), nil }, ErrUnavailable},
		{"unauthenticated group", func(*http.Request) (*http.Response, error) {
			return answer(201, strings.Replace(review("alice"), "system:authenticated", "system:unauthenticated", 1)), nil
		}, ErrUnavailable},
		{"too large", func(*http.Request) (*http.Response, error) {
			return answer(201, review("alice")+strings.Repeat(" ", maxReviewBytes)), nil
		}, ErrUnavailable},
		{"other error", func(*http.Request) (*http.Response, error) { return nil, errors.New("a redirect") }, ErrUnavailable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFixture(t)
			f.answer(tc.rt)
			name := ""
			if tc.want == nil {
				name = "alice"
			}
			f.want(t, withToken("tok"), name, tc.want)
			if got := f.verdicts.stores; (got > 0) != (tc.want == nil) {
				t.Errorf("stored verdicts = %d", got)
			}
		})
	}
}

// An answer that says nothing about the token is no reason to fall back to what
// was known, and none to forget it.
func TestReviewErrorOfKnownToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		token := jwtFor(time.Hour)
		f.want(t, withToken(token), "alice", nil)
		<-time.After(acceptedFor)
		f.answer(func(*http.Request) (*http.Response, error) { return answer(500, "{}"), nil })
		f.want(t, withToken(token), "", ErrUnavailable)
		f.down.Store(true)
		f.want(t, withToken(token), "alice", nil)
	})
}

type brokenBody struct{}

func (brokenBody) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }
func (brokenBody) Close() error             { return nil }

func TestLinkLostDuringReview(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		token := jwtFor(time.Hour)
		f.want(t, withToken(token), "alice", nil)
		for name, rt := range map[string]roundTripper{
			"in the body": func(*http.Request) (*http.Response, error) {
				return &http.Response{StatusCode: 201, Body: brokenBody{}}, nil
			},
			"silent": func(req *http.Request) (*http.Response, error) {
				<-req.Context().Done()
				return nil, req.Context().Err()
			},
		} {
			<-time.After(acceptedFor)
			f.answer(rt)
			start := time.Now()
			f.want(t, withToken(token), "alice", nil)
			f.want(t, withToken("unknown-"+name[:2]), "", ErrUnavailable)
			if d := time.Since(start); d > 2*reviewTimeout {
				t.Errorf("%s: two reviews took %v, want at most %v", name, d, 2*reviewTimeout)
			}
		}
	})
}

func TestVerdictTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		f.want(t, withToken("tok"), "alice", nil)
		<-time.After(acceptedFor - time.Second)
		f.want(t, withToken("tok"), "alice", nil)
		f.wantReviews(t, 1)
		<-time.After(time.Second)
		f.want(t, withToken("tok"), "alice", nil)
		f.wantReviews(t, 2)

		// Another token is another question.
		f.answer(func(*http.Request) (*http.Response, error) { return answer(401, "{}"), nil })
		f.want(t, withToken("tok2"), "", ErrUnauthenticated)
		f.wantReviews(t, 3)
		<-time.After(rejectedFor - time.Second)
		f.want(t, withToken("tok2"), "", ErrUnauthenticated)
		f.want(t, withToken("tok"), "alice", nil)
		f.wantReviews(t, 3)
		<-time.After(time.Second)
		f.answer(func(*http.Request) (*http.Response, error) { return answer(201, review("bob")), nil })
		f.want(t, withToken("tok2"), "bob", nil)
		f.wantReviews(t, 4)
	})
}

// What the API server once said is good for no longer than the token.
func TestVerdictEndsWithToken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		token := jwtFor(30 * time.Second)
		f.want(t, withToken(token), "alice", nil)
		<-time.After(30 * time.Second)
		f.answer(func(*http.Request) (*http.Response, error) { return answer(401, "{}"), nil })
		f.want(t, withToken(token), "", ErrUnauthenticated)
		f.wantReviews(t, 2)
	})
}

func TestOffline(t *testing.T) {
	for _, tc := range []struct {
		name    string
		token   func() string
		restart bool
		after   time.Duration
		want    error
	}{
		{"jwt", func() string { return jwtFor(8760 * time.Hour) }, false, 8759 * time.Hour, nil},
		{"jwt after a restart", func() string { return jwtFor(8760 * time.Hour) }, true, 8759 * time.Hour, nil},
		{"jwt, expired", func() string { return jwtFor(time.Hour) }, false, time.Hour, ErrUnauthenticated},
		{"jwt after a restart, expired", func() string { return jwtFor(time.Hour) }, true, time.Hour, ErrUnauthenticated},
		{"opaque", func() string { return "opaque" }, false, 24 * time.Hour, nil},
		{"opaque, too old", func() string { return "opaque" }, false, 24*time.Hour + time.Second, ErrUnavailable},
		{"opaque after a restart", func() string { return "opaque" }, true, 24 * time.Hour, nil},
		{"opaque after a restart, too old", func() string { return "opaque" }, true, 24*time.Hour + time.Second, ErrUnavailable},
		{"jwt without exp, too old", func() string { return claimsOnly(`{"sub":"x","EXP":99999999999}`) }, false, 25 * time.Hour, ErrUnavailable},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t)
				token := tc.token()
				f.want(t, withToken(token), "alice", nil)
				f.down.Store(true)
				<-time.After(tc.after)
				if tc.restart {
					f.restart(t)
				}
				if tc.want != nil {
					f.want(t, withToken(token), "", tc.want)
					return
				}
				u, err := f.Authenticate(withToken(token))
				if err != nil {
					t.Fatalf("Authenticate() = %v, want nil", err)
				}
				if diff := cmp.Diff(reviewed("alice"), u); diff != "" {
					t.Errorf("Authenticate() (-want +got):\n%s", diff)
				}
				f.want(t, withToken(token+"x"), "", ErrUnavailable)
				// Both are asked for again as soon as somebody can be asked.
				f.down.Store(false)
				f.answer(func(*http.Request) (*http.Response, error) { return answer(401, "{}"), nil })
				f.want(t, withToken(token), "", ErrUnauthenticated)
			})
		})
	}
}

func TestOfflineErrorKeepsItsCause(t *testing.T) {
	f := newFixture(t)
	f.down.Store(true)
	_, err := f.Authenticate(withToken("s3cr3t"))
	if !errors.Is(err, errCut) || strings.Contains(err.Error(), "s3cr3t") {
		t.Errorf("Authenticate() = %v, want it to wrap %v and not to tell the token", err, errCut)
	}
}

// After a power cut a clock without a battery may be years behind.
func TestOfflineClockInThePast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		f.verdicts.Store(keyOf("opaque"), fmt.Appendf(nil, `{"name":"alice","verified":%d}`, time.Now().Add(20*8760*time.Hour).Unix()))
		f.down.Store(true)
		f.want(t, withToken("opaque"), "alice", nil)
		f.down.Store(false)
		f.answer(func(*http.Request) (*http.Response, error) { return answer(401, "{}"), nil })
		f.want(t, withToken("opaque"), "", ErrUnauthenticated)
	})
}

func TestRejectionEndsStoredVerdict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		token := jwtFor(1000 * time.Hour)
		f.want(t, withToken(token), "alice", nil)
		<-time.After(acceptedFor)
		f.answer(func(*http.Request) (*http.Response, error) { return answer(401, "{}"), nil })
		f.want(t, withToken(token), "", ErrUnauthenticated)
		if raw, _ := f.verdicts.Load(keyOf(token)); len(raw) != 0 {
			t.Errorf("stored verdict = %s, want nothing", raw)
		}
		f.down.Store(true)
		f.want(t, withToken(token), "", ErrUnauthenticated) // still remembered
		<-time.After(rejectedFor)
		f.want(t, withToken(token), "", ErrUnauthenticated) // and on record
		f.restart(t)
		f.want(t, withToken(token), "", ErrUnauthenticated)

		// Made up tokens cause no writes.
		f.down.Store(false)
		stores := f.verdicts.stores
		f.want(t, withToken("junk"), "", ErrUnauthenticated)
		if got := f.verdicts.stores; got != stores {
			t.Errorf("writes for an unknown token = %d, want 0", got-stores)
		}
	})
}

func TestStoredVerdicts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		token := jwtFor(1000 * time.Hour)
		f.want(t, withToken(token), "alice", nil)
		raw, _ := f.verdicts.Load(keyOf(token))
		want := fmt.Sprintf(`{"name":"alice","uid":"u-1","groups":["system:serviceaccounts","system:authenticated"],`+
			`"extra":{"authentication.kubernetes.io/credential-id":["JTI=x"]},"exp":%d,"verified":%d}`,
			time.Now().Add(1000*time.Hour).Unix(), time.Now().Unix())
		if diff := cmp.Diff(want, string(raw)); diff != "" {
			t.Errorf("stored verdict (-want +got):\n%s", diff)
		}
		f.want(t, withToken("opaque"), "alice", nil)
		for key, v := range f.verdicts.m {
			if strings.Contains(key+v, "opaque") || strings.Contains(key+v, token) {
				t.Errorf("stored under %s: %s, which holds a token", key, v)
			}
		}

		// A day of use: nothing new about the one, the time of the other every hour.
		stores := f.verdicts.stores
		for range 24 * 20 {
			<-time.After(3 * time.Minute)
			f.want(t, withToken(token), "alice", nil)
			f.want(t, withToken("opaque"), "alice", nil)
		}
		if got := f.verdicts.stores - stores; got != 24 {
			t.Errorf("writes in a day = %d, want 24", got)
		}
		// Another identity is news.
		<-time.After(acceptedFor)
		f.answer(func(*http.Request) (*http.Response, error) { return answer(201, review("carol")), nil })
		f.want(t, withToken(token), "carol", nil)
		f.restart(t)
		f.down.Store(true)
		f.want(t, withToken(token), "carol", nil)
	})
}

func TestWithoutVerdicts(t *testing.T) {
	f := newFixture(t)
	f.cfg.Verdicts = nil
	f.restart(t)
	token := jwtFor(time.Hour)
	f.want(t, withToken(token), "alice", nil)
	f.answer(func(*http.Request) (*http.Response, error) { return answer(401, "{}"), nil })
	f.want(t, withToken("bad"), "", ErrUnauthenticated)
	f.down.Store(true)
	f.want(t, withToken(token), "alice", nil)
	f.restart(t)
	f.want(t, withToken(token), "", ErrUnavailable)
}

func TestDamagedVerdictIsUnknown(t *testing.T) {
	f := newFixture(t)
	f.down.Store(true)
	for _, raw := range []string{"{", "null", "[]", `{"name":""}`, `{"name":7}`, `{"uid":"x","verified":99999999999}`} {
		f.verdicts.Store(keyOf("tok"), []byte(raw))
		f.want(t, withToken("tok"), "", ErrUnavailable)
	}
}

func TestConcurrentRequestsShareAReview(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		release := make(chan struct{})
		f.answer(func(req *http.Request) (*http.Response, error) {
			select {
			case <-release:
				return answer(201, review("alice")), nil
			case <-req.Context().Done():
				return nil, req.Context().Err()
			}
		})
		first, leave := context.WithCancel(t.Context())
		left := make(chan error)
		go func() {
			_, err := f.Authenticate(withToken("tok").WithContext(first))
			left <- err
		}()
		synctest.Wait() // the first one leads
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				if u, err := f.Authenticate(withToken("tok")); err != nil || u.GetName() != "alice" {
					t.Errorf("Authenticate() = %v, %v, want alice", u, err)
				}
			})
		}
		synctest.Wait()
		leave()
		if err := <-left; !errors.Is(err, context.Canceled) {
			t.Errorf("Authenticate() of a caller that left = %v, want %v", err, context.Canceled)
		}
		close(release)
		wg.Wait()
		f.wantReviews(t, 1)
	})
}

func TestReviewsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		f.answer(func(req *http.Request) (*http.Response, error) {
			<-req.Context().Done()
			return nil, req.Context().Err()
		})
		var wg sync.WaitGroup
		for i := range maxReviews * 3 {
			wg.Go(func() {
				if _, err := f.Authenticate(withToken(fmt.Sprint("junk", i))); !errors.Is(err, ErrUnavailable) {
					t.Errorf("Authenticate() = %v, want %v", err, ErrUnavailable)
				}
			})
		}
		synctest.Wait()
		f.wantReviews(t, maxReviews)
		start := time.Now()
		wg.Wait()
		if d := time.Since(start); d > reviewTimeout {
			t.Errorf("the last caller waited for %v, want at most %v", d, reviewTimeout)
		}
	})
}

func TestMemoryIsBounded(t *testing.T) {
	f := newFixture(t)
	for i := range maxAccepted + 10 {
		f.tokens.accept(t.Context(), fmt.Sprint(i), verdict{user: reviewed("alice"), verified: time.Now()})
		f.tokens.reject(t.Context(), fmt.Sprint("bad", i), "")
	}
	if a, r := f.tokens.accepted.len(), f.tokens.rejected.len(); a != maxAccepted || r != maxRejected {
		t.Errorf("kept = %d accepted, %d rejected, want %d, %d", a, r, maxAccepted, maxRejected)
	}
}

func TestExpOf(t *testing.T) {
	for _, tc := range []struct {
		token string
		want  int64
	}{
		{claimsOnly(`{"exp":1700000000}`), 1700000000},
		{claimsOnly(`{"exp":1.7e9,"iat":5}`), 1700000000},
		{claimsOnly(`{"exp":1700000000.9}`), 1700000000},
		{claimsOnly(`{"exp":0}`), 1},
		{claimsOnly(`{"exp":-5}`), 1},
		{claimsOnly(`{"exp":1e300}`), lastExp},
		{claimsOnly(`{"exp":1e999}`), 0},
		{claimsOnly(`{"exp":"1700000000"}`), 0},
		{claimsOnly(`{"exp":null}`), 0},
		{claimsOnly(`{"EXP":1700000000}`), 0},
		{claimsOnly(`{}`), 0},
		{claimsOnly(`[1]`), 0},
		{claimsOnly(`{"exp":1700000000} x`), 0},
		{"a.!.b", 0},
		{"opaque", 0},
		{"a.b", 0},
		{claimsOnly(`{"exp":1700000000}`) + ".x", 0},
	} {
		if got := expOf(tc.token); got != tc.want {
			t.Errorf("expOf(%q) = %d, want %d", tc.token, got, tc.want)
		}
	}
}

func FuzzExpOf(f *testing.F) {
	f.Add([]byte(`{"exp":1700000000}`))
	f.Add([]byte(`{"exp":1e300}`))
	f.Fuzz(func(t *testing.T, claims []byte) {
		if got := expOf(claimsOnly(string(claims))); got < 0 || got > lastExp {
			t.Errorf("expOf(%q) = %d", claims, got)
		}
	})
}
