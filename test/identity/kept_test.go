// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package identity

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/rig"
)

// TestTokenIsNotKept has tokens of all kinds used, online and offline, good and bad,
// where a hub that talks much could say them, and looks for them on the disk and in
// the log.
//
// Guards: tokens are kept by their hash; a TokenRequest's answer is sealed; nothing
// logs a header, at any level.
func TestTokenIsNotKept(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.account("reader")
	pod := s.pod("p", rig.NodeName, "reader")
	s.start("-v=6")
	path := s.path("configmaps")
	tokens := map[string]string{
		"the user":    s.ControlPlane.Token(user),
		"the account": s.token("reader", authenticationv1.TokenRequestSpec{}),
		"nobody":      "nobody-has-this-token-" + s.namespace,
	}
	anybody := s.Through(s.upgradable())
	use := func() {
		t.Helper()
		for name, token := range tokens {
			for how, h := range carriers(token) {
				resp, err := anybody.Do(t.Context(), http.MethodGet, path, h, nil)
				if err != nil {
					t.Errorf("the token of %s %s: %v", name, how, err)
					continue
				}
				resp.Body.Close()
			}
		}
	}
	s.comes("the account", s.with(tokens["the account"]), path, http.StatusOK)
	own := s.Through(s.Node)
	fromNode, err := s.requestToken(own, "reader", pod)
	s.Must(err)
	tokens["the pod, by the node"] = fromNode
	use()
	s.Settle()
	s.Offline()
	use()
	if again, err := s.requestToken(own, "reader", pod); err != nil || again != fromNode {
		t.Errorf("offline the node gets another token for its pod than online: %v", err)
	}
	for _, state := range []string{"offline", "after a restart", "when it has ended"} {
		s.findNone(state, tokens)
		if state == "offline" {
			s.restart(false)
			use()
		} else {
			s.Must(s.Hub.Stop())
		}
	}
	for root, known := range map[string]string{filepath.Join(s.Hub.DataDir(), "journal"): fmt.Sprintf("%q:%q", "of", s.namespace), s.Hub.Log(): path} {
		found, err := rig.Search(root, map[string]string{"what is known to be there": known})
		if s.Must(err); len(found) == 0 {
			t.Errorf("%s is not in %s: the search cannot be right", known, root)
		}
	}
}

// findNone looks for tokens, and for the parts of those that have some.
func (s *site) findNone(state string, tokens map[string]string) {
	s.T.Helper()
	values := map[string]string{}
	for name, token := range tokens {
		values["the token of "+name] = token
		if parts := strings.Split(token, "."); len(parts) == 3 {
			values["the claims of the token of "+name], values["the signature of the token of "+name] = parts[1], parts[2]
		}
	}
	for _, root := range []string{s.Hub.DataDir(), s.Hub.Log()} {
		found, err := rig.Search(root, values)
		s.Must(err)
		for _, f := range found {
			s.T.Errorf("%s: %s", state, f)
		}
	}
}

// carriers are headers that carry a token, in ways that a log might show.
func carriers(token string) map[string]http.Header {
	return map[string]http.Header{
		"as it should be": {"Authorization": {"Bearer " + token}},
		"as a password":   {"Authorization": {"Basic " + token}},
		"twice":           {"Authorization": {"Bearer " + token + " " + token}},
		"from a browser":  websocket(token),
	}
}

// websocket are the headers of a browser, which cannot send Authorization.
func websocket(token string) http.Header {
	return http.Header{
		"Connection": {"Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"}, "Sec-Websocket-Key": {"AAAAAAAAAAAAAAAAAAAAAA=="},
		"Sec-Websocket-Protocol": {"base64url.bearer.authorization.k8s.io." + base64.RawURLEncoding.EncodeToString([]byte(token)) + ", v5.channel.k8s.io"},
	}
}

// upgradable is a client past the hub without a credential, by HTTP/1.1, which has
// upgrades.
func (s *site) upgradable() *rest.Config {
	c := s.config("")
	c.NextProtos = []string{"http/1.1"}
	return c
}

// TestTokenOfABrowser compares what the hub and the API server answer to a token that
// comes as a WebSocket's subprotocol.
//
// Guard: NormalizeWebSocketToken is in the chain before Authenticate.
func TestTokenOfABrowser(t *testing.T) {
	t.Parallel()
	s := newSite(t)
	s.account("reader")
	token := s.token("reader", authenticationv1.TokenRequestSpec{})
	s.start()
	path := s.path("configmaps/c")
	s.comes("the token as it should be", s.with(token), path, http.StatusOK)
	config := s.upgradable()
	for name, value := range map[string]string{"good": token, "bad": "none-" + s.namespace} {
		ask := func(e *rig.Endpoint) int {
			resp, err := e.Do(t.Context(), http.MethodGet, path, websocket(value), nil)
			s.Must(err)
			resp.Body.Close()
			return resp.StatusCode
		}
		if got, want := ask(s.Through(config)), ask(s.Direct(config)); got != want {
			t.Errorf("GET %s as a WebSocket with a %s token = %d, want %d as the API server says", path, name, got, want)
		}
	}
}

// requestToken asks for a token of a pod's as kubelet does.
func (s *site) requestToken(node *rig.Endpoint, account string, pod *corev1.Pod) (string, error) {
	request := authenticationv1.TokenRequest{TypeMeta: metav1.TypeMeta{APIVersion: "authentication.k8s.io/v1", Kind: "TokenRequest"}, Spec: boundTo("Pod", pod)}
	seconds := int64(3607)
	request.Spec.ExpirationSeconds = &seconds
	body, err := json.Marshal(request)
	if err != nil {
		return "", err
	}
	resp, err := node.Do(s.T.Context(), http.MethodPost, s.path("serviceaccounts/"+account+"/token"), http.Header{"Content-Type": {rig.JSON}, "Accept": {rig.JSON}}, body)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusCreated {
		err = fmt.Errorf("TokenRequest = %d, want 201: %.200s", resp.StatusCode, answer)
	}
	if err != nil {
		return "", err
	}
	err = json.Unmarshal(answer, &request)
	return request.Status.Token, err
}
