// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import (
	"encoding/base64"
	"fmt"
	"strings"
)

// stowaway is a request that rides in another one, or behind it: nobody's, and
// for a path that no attempt reaches. As edgehub reads it, it is refused. Upstream
// it would be by nobody that is known.
var stowaway = message("GET "+secrets+"/stowaway", "Host: x", "User-Agent: stowaway")

// smuggled are requests of which two servers may see two different ends.
func smuggled() (all []attempt) {
	post := "POST /api/v1/namespaces/a/configmaps"
	add := func(name string, want []int, text string) {
		all = append(all, attempt{name: "smuggled: " + name, text: text, more: true, online: want, offline: want})
	}
	// With a token of low rights, who may send what comes first.
	pass := func(name, reaches, text string) {
		all = append(all, attempt{name: "smuggled: " + name, text: text, more: true, genuine: true, offline: []int{503, 200}, reaches: reaches})
	}
	path := "/api/v1/namespaces/a/configmaps"
	chunked := func(headers ...string) string { return message(post, append(headers, "Transfer-Encoding: chunked")...) }
	add("both lengths, of nobody", is401, chunked("Content-Length: 4")+"0\r\n\r\n"+stowaway)
	pass("both lengths", path, chunked(low, "Content-Length: 4")+"0\r\n\r\n"+stowaway)
	pass("both lengths, the other first", path, message(post, low, "Transfer-Encoding: chunked", "Content-Length: 4")+"0\r\n\r\n"+stowaway)
	pass("a body of a GET", readable, message("GET "+readable, low, fmt.Sprint("Content-Length: ", len(stowaway)))+stowaway)
	pass("a chunked body of a GET", readable, message("GET "+readable, low, "Transfer-Encoding: chunked")+fmt.Sprintf("%x\r\n", len(stowaway))+stowaway+"\r\n0\r\n\r\n")
	pass("a body of a HEAD", readable, message("HEAD "+readable, low, fmt.Sprint("Content-Length: ", len(stowaway)))+stowaway)
	pass("behind a GET", readable, message("GET "+readable, low)+stowaway)
	pass("behind a Content-Length of 0", path, message(post, low, "Content-Length: 0")+stowaway)
	pass("two equal Content-Lengths", path, message(post, low, "Content-Length: 2", "Content-Length: 2")+"{}"+stowaway)
	pass("trailers", path, chunked(low, "Trailer: Authorization")+"2\r\n{}\r\n0\r\nAuthorization: Bearer {junk}\r\nX-Remote-User: admin\r\nImpersonate-User: admin\r\n\r\n"+stowaway)
	pass("an extension of a chunk", path, chunked(low)+"2;a=b\r\n{}\r\n0\r\n\r\n"+stowaway)
	pass("Transfer-Encoding with a tab", path, message(post, low, "Transfer-Encoding:\tchunked")+"0\r\n\r\n"+stowaway)
	pass("Transfer-Encoding in capitals", path, message(post, low, "TRANSFER-ENCODING: CHUNKED")+"0\r\n\r\n"+stowaway)
	for name, chunk := range map[string]string{
		"negative": "-2\r\n{}\r\n0\r\n\r\n", "0x": "0x2\r\n{}\r\n0\r\n\r\n", "too long": "fffffffffffffffff\r\n", "bare newline": "2\n{}\n0\n\n", "with a carriage return": "2;a=\"\r\"\r\n{}\r\n0\r\n\r\n", "longer than said": "2\r\n{}{}\r\n0\r\n\r\n", "junk": "zz\r\n",
	} {
		all = append(all, attempt{name: "smuggled: a chunk size that is " + name, text: chunked(low) + chunk + stowaway, more: true, online: []int{0, 400, 403, 408, 415, 500, 502}, offline: []int{0, 400, 408, 500, 502, 503}, reaches: path})
	}
	add("both lengths, version 1.0", []int{400, 401, 403}, strings.Replace(chunked("Content-Length: 4"), "HTTP/1.1", "HTTP/1.0", 1)+"0\r\n\r\n"+stowaway)
	add("an expectation of nobody", []int{401}, message(post, "Expect: 100-continue", "Content-Length: 2")+"{}"+stowaway)
	pass("an expectation", path, message(post, low, "Expect: 100-continue", "Content-Length: 2")+"{}"+stowaway)
	return all
}

// upgrades are conversations that are not granted. What follows on the client's
// connection is a request of its own, and must not reach the connection to the API
// server, which has been told who is speaking.
func upgrades() (all []attempt) {
	const execURI = "/api/v1/namespaces/a/pods/alive/exec?command=id&container=c&stdout=true"
	spdy := []string{"Connection: Upgrade", "Upgrade: SPDY/3.1", "X-Stream-Protocol-Version: v4.channel.k8s.io"}
	ws := []string{"Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="}
	subprotocol := func(token string) string {
		return "Sec-WebSocket-Protocol: v4.channel.k8s.io, base64url.bearer.authorization.k8s.io." + token
	}
	encoded := base64.RawURLEncoding.EncodeToString([]byte("junk"))
	with := func(name string, protocol []string, more ...string) []string {
		return append(append([]string{}, protocol...), more...)
	}
	for name, protocol := range map[string][]string{"SPDY": spdy, "websocket": with("", ws, "Sec-WebSocket-Protocol: v4.channel.k8s.io")} {
		for _, uri := range []string{execURI, "/api/v1/namespaces/a/pods/alive/attach?container=c&stdout=true", "/api/v1/namespaces/a/pods/alive/portforward?ports=80", "/api/v1/nodes/n1/proxy/exec", secrets} {
			all = append(all,
				attempt{name: name + " of nobody: " + uri, text: message("GET "+uri, protocol...) + stowaway, more: true, online: is401, offline: is401},
				attempt{name: name + " of low: " + uri, text: message("GET "+uri, with("", protocol, low)...) + stowaway, more: true, genuine: true, offline: is503, reaches: uri},
				attempt{name: name + " by POST of low: " + uri, text: withBody("POST "+uri, "", with("", protocol, low)...) + stowaway, more: true, genuine: true, offline: is503, reaches: uri})
		}
		all = append(all,
			attempt{name: name + " that is answered with 200", text: message("GET "+noSwitchPath, with("", protocol, low)...) + stowaway, more: true, open: true, online: []int{200}, offline: is503, reaches: noSwitchPath},
			attempt{name: name + " that is answered with a redirect", text: message("GET "+redirectPath, with("", protocol, low)...) + stowaway, more: true, online: []int{502}, offline: is503, reaches: redirectPath},
			attempt{name: name + " with impersonation", text: message("GET "+execURI, with("", protocol, low, "Impersonate-User: system:admin")...) + stowaway, more: true, genuine: true, offline: is503, reaches: execURI},
			attempt{name: name + " to health", text: message("GET /livez", protocol...) + stowaway, more: true, open: true, online: []int{200}, offline: []int{200}})
	}
	for name, protocol := range map[string]string{"junk": subprotocol("junk"), "empty": subprotocol("")} {
		all = append(all, attempt{name: "token in the subprotocol, " + name, text: message("GET "+execURI, with("", ws, protocol)...) + stowaway, more: true, online: is401, offline: is401})
	}
	all = append(all,
		attempt{name: "token in the subprotocol, encoded junk", text: message("GET "+execURI, with("", ws, subprotocol(encoded))...) + stowaway, more: true, online: is401, offline: unknown},
		attempt{name: "token in the subprotocol, a real one", text: message("GET "+execURI, with("", ws, subprotocol("{lowB64}"))...) + stowaway, more: true, genuine: true, offline: is503, reaches: execURI})
	return append(all,
		attempt{name: "low, and a token in the subprotocol", text: message("GET "+execURI, with("", ws, low, subprotocol("{readerB64}"))...) + stowaway, more: true, genuine: true, offline: is503, reaches: execURI},
		attempt{name: "junk, and a token in the subprotocol", text: message("GET "+execURI, with("", ws, "Authorization: Bearer {junk}", subprotocol("{readerB64}"))...) + stowaway, more: true, online: is401, offline: unknown},
		attempt{name: "a redirect", text: message("GET "+redirectPath, low) + stowaway, more: true, online: []int{502}, offline: is503, reaches: redirectPath},
		attempt{name: "a redirect of a POST", text: withBody("POST "+redirectPath, "{}", low) + stowaway, more: true, online: []int{502}, offline: is503, reaches: redirectPath})
}
