// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// An audit looks at what was sent upstream.
type audit struct {
	server string            // whom edgehub speaks to
	good   string            // the good node's User-Agent
	marker string            // in every attacker's
	reach  map[int]string    // the request URI of an attempt or a flood, by its number
	tokens map[string]string // by name
}

func (s *stage) newAudit() audit {
	a := audit{server: s.Link.Addr(), good: s.good.agent, marker: s.plan.Marker, reach: map[int]string{}, tokens: s.plan.Tokens}
	fill := &attacker{plan: s.plan}
	for n, at := range attempts() {
		a.reach[n] = fill.expand(job{number: n}, at.reaches)
	}
	for n, f := range allFloods() {
		a.reach[floodNumber+n] = f.reaches
	}
	return a
}

// ownRequests are those that edgehub makes by itself with the node's certificate:
// the path, and the field selector that goes with it. All are GETs.
var ownRequests = map[string]string{
	"/readyz":                           "",                  // the probe
	"/api/v1/nodes":                     "metadata.name=n1",  // whether the history is still the same one
	"/api/v1/pods":                      "spec.nodeName=n1",  // the feed of what the good node watches
	"/.well-known/openid-configuration": "",                  // who signs tokens
	"/openid/v1/jwks":                   "",                  // with which keys
	secrets:                             "metadata.name=s-0", // another one
}

// maxBodyBytes is the hub's --max-body-bytes.
const maxBodyBytes = 3 << 20

// reviews are the questions that edgehub asks with a caller's token.
var reviews = []string{"/apis/authentication.k8s.io/v1/selfsubjectreviews", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"}

// faults returns what is wrong with one request.
func (a audit) faults(s sent) (faults []string) {
	agent := s.Header.Get("User-Agent")
	bad := func(format string, args ...any) {
		faults = append(faults, fmt.Sprintf("%s %s (%s) of %q upstream: ", s.Method, s.URI, s.Proto, agent)+fmt.Sprintf(format, args...))
	}
	u, err := url.ParseRequestURI(s.URI)
	if err != nil {
		bad("%v", err)
		return faults
	}
	if s.Host != a.server {
		bad("to Host %s", s.Host)
	}
	if c := canonical(u); c != s.URI {
		bad("its canonical form is %s", c)
	}
	if names := headersLike(s.Header, "X-Remote-", "X-Forwarded-", "Forwarded", "X-Real-Ip", "Edgehub-"); len(names) > 0 {
		bad("with %v", names)
	}
	if n := s.Bytes.Load(); n > maxBodyBytes {
		bad("with a body of %d bytes", n)
	}
	a.credential(s, bad)
	number, attacker := agentNumber(a.marker, fmt.Sprint(s.Header))
	switch {
	case attacker && s.Node:
		bad("an attacker with the node's certificate")
	case attacker:
		if reach, ok := a.reach[number]; !ok || reach != s.URI {
			bad("attempt %d may go to %q only", number, reach)
		}
	case agent == a.good:
	case strings.HasPrefix(agent, "edgehub") && s.Node:
		if selector, ok := ownRequests[u.Path]; !ok || s.Method != http.MethodGet || u.Query().Get("fieldSelector") != selector {
			bad("not one that edgehub makes as the node")
		}
	case strings.HasPrefix(agent, "edgehub"):
		if s.Method != http.MethodGet && !slices.Contains(reviews, u.Path) {
			bad("not one that edgehub makes for a caller")
		}
	case agent == lowAgent && !s.Node:
	default:
		bad("by nobody that is known")
	}
	return faults
}

// credential wants the node's certificate, or one token.
func (a audit) credential(s sent, bad func(string, ...any)) {
	tokens, impersonation := s.Header["Authorization"], headersLike(s.Header, "Impersonate-")
	switch {
	case s.Certificate != "" && !s.Node:
		bad("with the certificate of %s", s.Certificate)
	case s.Node && (len(tokens) > 0 || len(impersonation) > 0):
		bad("with the node's certificate, and %d tokens and %v", len(tokens), impersonation)
	case !s.Node && (len(tokens) != 1 || tokens[0] == "Bearer " || tokens[0] == ""):
		bad("with %d tokens and no certificate", len(tokens))
	}
	for _, name := range []string{"elsewhere", "gone", "expired", "unsigned", "hmac", "otherkey", "junk", "reader"} {
		// Whose it is the API server is asked, and nothing else.
		if slices.Contains(tokens, "Bearer "+a.tokens[name]) && !slices.Contains(reviews, s.URI) {
			bad("with token %s", name)
		}
	}
}

// canonical is the one form of a path and a query.
func canonical(u *url.URL) string {
	for i, segment := range strings.Split(u.Path, "/") {
		if (segment == "" && i > 0 && i < strings.Count(u.Path, "/")) || segment == "." || segment == ".." || strings.ContainsFunc(segment, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return "none"
		}
	}
	query, err := url.ParseQuery(u.RawQuery)
	if err != nil {
		return "none"
	}
	c := url.URL{Path: u.Path, RawQuery: query.Encode()}
	return c.RequestURI()
}

// all audits every request, and the connections they came on.
func (a audit) all(records []sent) (faults []string) {
	upgrades := map[int64]bool{}
	for _, s := range records {
		faults = append(faults, a.faults(s)...)
		if s.Header.Get("Upgrade") != "" {
			upgrades[s.Conn] = true
		}
	}
	for _, s := range records {
		if upgrades[s.Conn] && s.Nth > 1 {
			faults = append(faults, fmt.Sprintf("%s %s upstream is request %d on a connection of an upgrade", s.Method, s.URI, s.Nth))
		}
	}
	return faults
}

// hiddenTokens are those that went upstream where edgehub has not looked: as a
// subprotocol of WebSocket, which the API server takes for a credential when it does
// not accept the Authorization beside it.
func hiddenTokens(records []sent) (faults []string) {
	for _, s := range records {
		for _, v := range s.Header["Sec-Websocket-Protocol"] {
			if strings.Contains(v, "base64url.bearer.authorization.k8s.io.") {
				faults = append(faults, fmt.Sprintf("%s %s of %q upstream has a token in Sec-WebSocket-Protocol", s.Method, s.URI, s.Header.Get("User-Agent")))
			}
		}
	}
	return faults
}

// A decision is what edgehub took a request for.
type decision struct{ verb, resource, namespace, name string }

// decisions are those that the hub's log tells of, by the attempt's number.
func (a audit) decisions(log string) map[int][]decision {
	all := map[int][]decision{}
	for line := range strings.Lines(log) {
		if !strings.Contains(line, `] "Answered" `) && !strings.Contains(line, `] "Streaming" `) {
			continue
		}
		if n, ok := agentNumber(a.marker, logged(line, "client")); ok && n < floodNumber {
			all[n] = append(all[n], decision{logged(line, "verb"), logged(line, "resource"), logged(line, "namespace"), logged(line, "name")})
		}
	}
	return all
}

// logged returns a value of a line of the log, "" if there is none.
func logged(line, key string) string {
	_, rest, _ := strings.Cut(line, " "+key+"=")
	quoted, err := strconv.QuotedPrefix(rest)
	if err != nil {
		return ""
	}
	value, err := strconv.Unquote(quoted)
	if err != nil {
		return ""
	}
	return value
}

var infos = &request.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")}

// asSent is the decision that the API server comes to.
func asSent(s sent) (decision, error) {
	u, err := url.ParseRequestURI(s.URI)
	if err != nil {
		return decision{}, err
	}
	info, err := infos.NewRequestInfo(&http.Request{Method: s.Method, URL: u, Header: s.Header})
	if err != nil {
		return decision{}, err
	}
	d := decision{info.Verb, info.Resource, info.Namespace, info.Name}
	if info.Subresource != "" {
		d.resource += "/" + info.Subresource
	}
	if !info.IsResourceRequest {
		d.resource = info.Path
	}
	return d, nil
}

// sameDecisions wants the API server to come to the decision that edgehub came to,
// for every request of the attacker's that went upstream. It returns how many it
// has compared.
func (a audit) sameDecisions(records []sent, log string) (compared int, faults []string) {
	logged := a.decisions(log)
	for _, s := range records {
		agent := s.Header.Get("User-Agent")
		number, ok := agentNumber(a.marker, agent)
		if !ok || number >= floodNumber || !strings.HasPrefix(agent, a.marker) {
			continue // the log has the first word only
		}
		d, err := asSent(s)
		if err != nil || !slices.Contains(logged[number], d) {
			faults = append(faults, fmt.Sprintf("%s %s upstream is %v (%v), edgehub has decided by %v", s.Method, s.URI, d, err, logged[number]))
			continue
		}
		compared++
	}
	return compared, faults
}

// exampleAudit and exampleSent are made up.
func exampleAudit() audit {
	return audit{server: "h:1", good: "good-node-1", marker: "attacker-1", reach: map[int]string{7: aSecret}, tokens: map[string]string{"junk": "junk", "low": "low"}}
}

func exampleSent(agent string, node bool, uri string) sent {
	s := sent{Method: http.MethodGet, URI: uri, Host: "h:1", Header: http.Header{"User-Agent": {agent}}, Bytes: new(atomic.Int64), Node: node, Conn: 1, Nth: 1}
	if node {
		s.Certificate = "system:node:n1"
	} else {
		s.Header.Set("Authorization", "Bearer low")
	}
	return s
}

// TestTheAuditCanSayNo has the audit look at requests that are made up: it finds
// what is wrong with each of them.
func TestTheAuditCanSayNo(t *testing.T) {
	a := exampleAudit()
	for _, s := range []sent{
		exampleSent("good-node-1", true, aSecret), exampleSent("edgehub", true, "/readyz"), exampleSent("edgehub", true, secrets+"?fieldSelector=metadata.name%3Ds-0&watch=true"),
		exampleSent(agentOf("attacker-1", 7), false, aSecret), exampleSent("edgehub", false, readables), exampleSent(lowAgent, false, readable),
	} {
		if faults := a.faults(s); len(faults) > 0 {
			t.Errorf("faults of what is right = %q, want nothing", faults)
		}
	}
	header := func(s sent, name, value string) sent { s.Header[name] = append(s.Header[name], value); return s }
	attacker := func() sent { return exampleSent(agentOf("attacker-1", 7), false, aSecret) }
	for name, s := range map[string]sent{
		"an attacker with the node's certificate":   exampleSent(agentOf("attacker-1", 7), true, aSecret),
		"an attacker as kubelet, as the node":       exampleSent("kubelet/v1.36.3 kubernetes/"+agentOf("attacker-1", 7), true, aSecret),
		"a marker in another header":                header(exampleSent("edgehub", true, "/readyz"), "Referer", agentOf("attacker-1", 7)),
		"nobody with the node's certificate":        exampleSent("", true, aSecret),
		"edgehub elsewhere as the node":             exampleSent("edgehub", true, "/api/v1/configmaps"),
		"edgehub with a wider selector as the node": exampleSent("edgehub", true, secrets),
		"edgehub that writes as the node":           func() sent { s := exampleSent("edgehub", true, "/readyz"); s.Method = http.MethodPost; return s }(),
		"edgehub that writes for somebody":          func() sent { s := exampleSent("edgehub", false, readables); s.Method = http.MethodPost; return s }(),
		"an attacker elsewhere":                     exampleSent(agentOf("attacker-1", 7), false, secrets),
		"an attempt that reaches nothing":           exampleSent(agentOf("attacker-1", 8), false, aSecret),
		"an unknown attempt":                        exampleSent("attacker-1", false, aSecret),
		"the stowaway":                              exampleSent("stowaway", false, secrets+"/stowaway"),
		"a redirect that was followed":              exampleSent(agentOf("attacker-1", 7), false, landingPath),
		"another certificate":                       func() sent { s := attacker(); s.Certificate = "admin"; return s }(),
		"no credential":                             func() sent { s := attacker(); s.Header.Del("Authorization"); return s }(),
		"an empty token":                            func() sent { s := attacker(); s.Header.Set("Authorization", "Bearer "); return s }(),
		"two tokens":                                header(attacker(), "Authorization", "Bearer x"),
		"a forged token":                            func() sent { s := attacker(); s.Header.Set("Authorization", "Bearer junk"); return s }(),
		"the node's certificate with a token":       header(exampleSent("good-node-1", true, aSecret), "Authorization", "Bearer low"),
		"the node's certificate with impersonation": header(exampleSent("good-node-1", true, aSecret), "Impersonate-User", "admin"),
		"X-Remote-User":                             header(attacker(), "X-Remote-User", "admin"),
		"x-forwarded-for, not canonical":            header(attacker(), "x-forwarded-for", "1.2.3.4"),
		"Edgehub-Source":                            header(attacker(), "Edgehub-Source", "feed"),
		"another Host":                              func() sent { s := attacker(); s.Host = "kubernetes"; return s }(),
		"dots":                                      exampleSent("good-node-1", true, "/api/../api/v1"),
		"encoded dots":                              exampleSent("good-node-1", true, "/api/%2e%2e/v1"),
		"an encoded slash":                          exampleSent("good-node-1", true, "/api%2fv1"),
		"two slashes":                               exampleSent("good-node-1", true, "/api//v1"),
		"a semicolon in the query":                  exampleSent("good-node-1", true, "/api?a;b"),
		"a query in another order":                  exampleSent("good-node-1", true, "/api?b=1&a=1"),
		"a large body":                              func() sent { s := attacker(); s.Bytes.Store(maxBodyBytes + 1); return s }(),
		"no path":                                   exampleSent("good-node-1", true, "api"),
	} {
		if len(a.faults(s)) == 0 {
			t.Errorf("faults of %s = nothing, want one", name)
		}
	}
	if len(hiddenTokens([]sent{header(attacker(), "Sec-Websocket-Protocol", "v4.channel.k8s.io, base64url.bearer.authorization.k8s.io.anVuaw")})) != 1 {
		t.Error("hiddenTokens of a token in a subprotocol = nothing, want it")
	}
	second := attacker()
	second.Nth = 2
	if len(a.all([]sent{header(attacker(), "Upgrade", "SPDY/3.1"), second})) == 0 {
		t.Error("faults of a second request behind an upgrade = nothing, want one")
	}
}

// TestTheDecisionsAreRead has a made up log compared with made up requests.
func TestTheDecisionsAreRead(t *testing.T) {
	a := exampleAudit()
	log := `I1121 metrics.go:1] "Answered" verb="get" resource="secrets" namespace="a" name="s-0" user="low" client="attacker-1-7" source="upstream" code="403"` + "\n"
	if n, faults := a.sameDecisions([]sent{exampleSent(agentOf("attacker-1", 7), false, aSecret)}, log); n != 1 || len(faults) > 0 {
		t.Errorf("sameDecisions of the same = %d, %q, want 1 and nothing", n, faults)
	}
	for name, s := range map[string]sent{
		"another name":   exampleSent(agentOf("attacker-1", 7), false, secrets+"/s-1"),
		"another verb":   exampleSent(agentOf("attacker-1", 7), false, secrets),
		"nothing logged": exampleSent(agentOf("attacker-1", 6), false, aSecret),
	} {
		if _, faults := a.sameDecisions([]sent{s}, log); len(faults) != 1 {
			t.Errorf("sameDecisions of %s = %q, want a fault", name, faults)
		}
	}
}
