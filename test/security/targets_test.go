// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import (
	"fmt"
	"strings"
)

// both makes an attempt of nobody and one with a token of low rights. An empty
// canonical is a request that nobody may send; else it is what goes upstream.
func both(name, line, canonical string, headers ...string) []attempt {
	nobody := attempt{name: name + ": nobody", text: message(line, headers...), online: is401, offline: is401}
	somebody := attempt{name: name + ": low", text: message(line, append([]string{low}, headers...)...), genuine: true, offline: is503, reaches: canonical}
	if canonical == "" {
		nobody.online, nobody.offline = is400, is400
		somebody.online, somebody.offline, somebody.genuine = is400, is400, false
	}
	return []attempt{nobody, somebody}
}

// refusedTargets are those that nobody may ask for.
var refusedTargets = []string{
	"//api/v1/namespaces/a/secrets",
	"///api/v1/namespaces/a/secrets",
	"/api/v1//namespaces/a/secrets",
	"/api/v1/namespaces//a/secrets",
	"/api/v1/namespaces/a/secrets//",
	"/./api/v1/namespaces/a/secrets",
	"/api/v1/namespaces/a/./secrets",
	"/api/v1/namespaces/b/../a/secrets",
	"/api/v1/namespaces/b/configmaps/../../a/secrets/s-0",
	"/livez/../api/v1/namespaces/a/secrets",
	"/readyz/..",
	"/readyz/.",
	"/..",
	"/livez/%2e%2e/api/v1/namespaces/a/secrets",
	"/api/v1/namespaces/b/%2E%2E/a/secrets",
	"/api/v1/namespaces/b/.%2e/a/secrets",
	"/api/v1/namespaces/b/%2e/configmaps",
	"/api/v1/namespaces/b%2f..%2fa/secrets",
	"/api/v1/namespaces/b/configmaps/..%2F..%2Fa%2Fsecrets",
	"/api/v1/namespaces%2fa/secrets",
	"/livez%2f",
	"/api/v1/namespaces/b/configmaps/open%00",
	"/api/v1/namespaces/b/configmaps/open%0d%0aX-Remote-User:%20admin",
	"/api/v1/namespaces/b/configmaps/%7f",
	"/api/v1/namespaces/b/configmaps/%1b[2J",
	"/api/v1/namespaces/b/configmaps/%zz",
	"/api/v1/namespaces/b/configmaps/%",
	"https://{host}/api/v1/namespaces/a/secrets",
	"http://kubernetes.default.svc/api/v1/namespaces/a/secrets",
	"https://user:password@{host}/version",
	"mailto:api",
	"api/v1/namespaces/a/secrets",
	"?watch=1",
	"*",
	"/version#/../api/v1/namespaces/a/secrets",
}

// oddTargets have one meaning all the same: that of what goes upstream.
var oddTargets = []struct{ path, canonical string }{
	{"/api/v1/namespaces/b%5c..%5ca/secrets", "/api/v1/namespaces/b%5C..%5Ca/secrets"},
	{`/api/v1/namespaces/b\..\a/secrets`, "/api/v1/namespaces/b%5C..%5Ca/secrets"},
	{"/api/v1/namespaces/a;b/secrets", "/api/v1/namespaces/a;b/secrets"},
	{"/api/v1/namespaces/b;/..;/a/secrets", "/api/v1/namespaces/b;/..;/a/secrets"},
	{"/api/v1/namespaces/b/%252e%252e/a/secrets", "/api/v1/namespaces/b/%252e%252e/a/secrets"},
	{"/api/v1/namespaces/b/%c0%ae%c0%ae/a/secrets", "/api/v1/namespaces/b/%C0%AE%C0%AE/a/secrets"},
	{"/api/v1/namespaces/%ff/secrets", "/api/v1/namespaces/%FF/secrets"},
	{"/api/v1/namespaces/\xff\xfe/secrets", "/api/v1/namespaces/%FF%FE/secrets"},
	{"/api/v1/namespaces/%61/secrets", "/api/v1/namespaces/a/secrets"},
	{"/%61pi/v1/namespaces/a/secrets", "/api/v1/namespaces/a/secrets"},
	{"/api/v1/namespaces/%EF%BC%8E%EF%BC%8E/secrets", "/api/v1/namespaces/%EF%BC%8E%EF%BC%8E/secrets"},
	{"/API/v1/namespaces/a/secrets", "/API/v1/namespaces/a/secrets"},
	{"/api/v1/namespaces/a/secrets/", "/api/v1/namespaces/a/secrets/"},
	{"/api/v1/namespaces/b/configmaps#secrets", "/api/v1/namespaces/b/configmaps%23secrets"},
	{"/readyz/none", "/readyz/none"},
	{"/livez/", "/livez/"},
	{"/metrics", "/metrics"},
	{"/debug/pprof/heap", "/debug/pprof/heap"},
	{"/api/v1/watch/namespaces/a/secrets", "/api/v1/watch/namespaces/a/secrets"},
	{"/api/v1/proxy/namespaces/a/services/x", "/api/v1/proxy/namespaces/a/services/x"},
	{"/api/v1/nodes/n1/proxy/pods", "/api/v1/nodes/n1/proxy/pods"},
	{"/api/v1/nodes/https:n1:10250/proxy/configz", "/api/v1/nodes/https:n1:10250/proxy/configz"},
	{"/api/v1/namespaces/a/services/https:x:443/proxy/", "/api/v1/namespaces/a/services/https:x:443/proxy/"},
	{"/api/v1/namespaces/a/pods/alive/log", "/api/v1/namespaces/a/pods/alive/log"},
}

// targets are paths that mean something else to somebody else.
func targets() (all []attempt) {
	for _, path := range refusedTargets {
		all = append(all, both("target "+path, "GET "+path, "")...)
	}
	for _, t := range oddTargets {
		all = append(all, both("target "+t.path, "GET "+t.path, t.canonical)...)
	}
	all = append(all, both("target with a space", "GET /api/v1/namespaces/a/secrets /version", "")...)
	all = append(all, both("target with a tab", "GET /api/v1/\tnamespaces/a/secrets", "")...)
	for _, path := range []string{"/livez", "/readyz", "/readyz?verbose"} { // a probe has no credential
		all = append(all, attempt{name: "target " + path + " of nobody", text: message("GET " + path), open: true, online: []int{200}, offline: []int{200}})
	}
	return all
}

// queries are read by two, who must not read two things.
func queries() (all []attempt) {
	for _, q := range []struct{ path, query, canonical string }{
		{readables, "watch=1;watch=0", "!"},
		{readables, ";", "!"},
		{readables, "labelSelector=%zz", "!"},
		{readables, "%=1", "!"},
		{secrets, "watch=1&watch=0&timeoutSeconds=1", "timeoutSeconds=1&watch=1&watch=0"},
		{readables, "watch=1&watch=0&timeoutSeconds=1", "timeoutSeconds=1&watch=1&watch=0"},
		{readables, "watch=0&watch=1&timeoutSeconds=1", "timeoutSeconds=1&watch=0&watch=1"},
		{readables, "%77atch=0&watch=false", "watch=0&watch=false"},
		{readables, "watch=yes&timeoutSeconds=1", "timeoutSeconds=1&watch=yes"},
		{readables, "fieldSelector=metadata.name%3Dopen&fieldSelector=metadata.name%3Dhidden", "fieldSelector=metadata.name%3Dopen&fieldSelector=metadata.name%3Dhidden"},
		{secrets, "fieldSelector=metadata.name%3Ds-0&fieldSelector=metadata.name%3Ds-1", "fieldSelector=metadata.name%3Ds-0&fieldSelector=metadata.name%3Ds-1"},
		{"/api/v1/secrets", "fieldSelector=metadata.namespace%3Da&fieldSelector=metadata.name%3Ds-0", "fieldSelector=metadata.namespace%3Da&fieldSelector=metadata.name%3Ds-0"},
		{readables, "labelSelector=a%3Db&labelSelector=c", "labelSelector=a%3Db&labelSelector=c"},
		{readables, "labelSelector=%00", "labelSelector=%00"},
		{readables, "continue=%ff", "continue=%FF"},
		{readables, "limit=-1&continue=%2e%2e%2f", "continue=..%2F&limit=-1"},
		{readables, "continue=eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6MSwic3RhcnQiOiIuLi8uLi8uLi9zZWNyZXRzL2Evcy0wIn0", "continue=eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6MSwic3RhcnQiOiIuLi8uLi8uLi9zZWNyZXRzL2Evcy0wIn0"},
		{readables, "resourceVersion=junk", "resourceVersion=junk"},
		{secrets, "impersonate-user=system:admin&user=system:admin", "impersonate-user=system%3Aadmin&user=system%3Aadmin"},
		{aSecret, "access_token={junk}", "access_token={junk}"},
	} {
		canonical := q.path + "?" + q.canonical
		if q.canonical == "!" {
			canonical = ""
		}
		pair := both("query "+q.query+" of "+q.path, "GET "+q.path+"?"+q.query, canonical)
		if q.path == readables && canonical != "" {
			// There is a record of it, and low has seen it whole: a parameter that
			// the API server would not understand shows it nothing new.
			pair[1].open, pair[1].offline = true, []int{200, 400, 410, 503, 504}
		}
		all = append(all, pair...)
	}
	return append(all, both("query of a timeout that is none", "GET "+secrets+"?timeout=-1s", "")...)
}

// methods are rare, or of other protocols.
func methods() (all []attempt) {
	for _, method := range []string{"TRACE", "FOO", "OPTIONS", "HEAD", "get", "PROPFIND", "PURGE"} {
		all = append(all, both("method "+method, method+" "+aSecret, aSecret)...)
	}
	for _, line := range []string{"CONNECT {host}", "CONNECT 10.0.0.1:443", "CONNECT " + aSecret} {
		all = append(all, both(line, line, "")...)
	}
	all = append(all, both("h2c", "GET "+aSecret, aSecret, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")...)
	return append(all,
		// net/http's own, for whoever asks whether there is a server at all.
		attempt{name: "OPTIONS *", text: message("OPTIONS *"), online: is400, offline: is400},
		attempt{name: "a method of two words", text: message("GET POST " + aSecret), online: is400, offline: is400},
		attempt{name: "a method with a colon", text: message("G:ET " + aSecret), online: is400, offline: is400},
		attempt{name: "a method override", text: withBody("POST "+aSecret, "{}", low, "X-HTTP-Method-Override: GET"), genuine: true, offline: is503, reaches: aSecret})
}

// messages are malformed, or nearly so.
func messages() (all []attempt) {
	raw := func(name string, want []int, lines ...string) {
		for sender, credential := range map[string]string{"nobody": "X-None: 1", "low": low} {
			text := strings.ReplaceAll(strings.Join(lines, "\r\n")+"\r\n\r\n", "{credential}", credential)
			a := attempt{name: name + ": " + sender, text: text, online: want, offline: want}
			if want == nil {
				a.online, a.offline = is401, is401
				if sender == "low" {
					a.genuine, a.offline, a.online, a.reaches = true, is503, anyStatus, aSecret
				}
			}
			all = append(all, a)
		}
	}
	line, host, agent := "GET "+aSecret+" HTTP/1.1", "Host: {host}", "User-Agent: {agent}"
	raw("no Host", is400, line, agent, "{credential}")
	raw("two Hosts", is400, line, host, "Host: other", agent, "{credential}")
	raw("another Host", nil, line, "Host: kubernetes.default.svc", agent, "{credential}")
	raw("a Host with a path", is400, line, "Host: a/b c", agent, "{credential}")
	raw("a header name with a space", is400, line, host, agent, "X-A : b", "{credential}")
	raw("a header name with a space before the credential", is400, line, host, agent, "Authorization : Bearer {low}", "{credential}")
	raw("a header without a name", is400, line, host, agent, ": b", "{credential}")
	raw("a header without a colon", is400, line, host, agent, "X-A", "{credential}")
	raw("a header value with a zero byte", is400, line, host, agent, "X-A: a\x00b", "{credential}")
	raw("a header value with a carriage return", is400, line, host, agent, "X-A: a\rX-B: b", "{credential}")
	raw("a header name with another alphabet", is400, line, host, agent, "Impersonate-Üser: b", "{credential}")
	raw("a first header that is folded", is400, line, " X-A: b", host, agent, "{credential}")
	raw("a header that is folded", nil, line, host, agent, "X-A: a", " b", "{credential}")
	raw("a folded header that looks like one", nil, line, host, agent, "X-A: a", " X-Remote-User: admin", "{credential}")
	raw("lines that end without a carriage return", nil, line+"\nHost: {host}\nUser-Agent: {agent}\nX-A: b\n{credential}")
	raw("version 0.9", is400, "GET "+aSecret)
	raw("version 1.0", nil, "GET "+aSecret+" HTTP/1.0", host, agent, "{credential}")
	raw("version 1.9", nil, "GET "+aSecret+" HTTP/1.9", host, agent, "{credential}")
	raw("version 2.0", []int{505}, "GET "+aSecret+" HTTP/2.0", host, agent, "{credential}")
	raw("version junk", is400, "GET "+aSecret+" HTTP/a.b", host, agent, "{credential}")
	raw("two Content-Lengths", is400, "POST "+aSecret+" HTTP/1.1", host, agent, "Content-Length: 0", "Content-Length: 5", "{credential}")
	raw("a Content-Length with a sign", is400, "POST "+aSecret+" HTTP/1.1", host, agent, "Content-Length: +5", "{credential}")
	raw("a list of Content-Lengths", is400, "POST "+aSecret+" HTTP/1.1", host, agent, "Content-Length: 0, 0", "{credential}")
	raw("a Content-Length in hex", is400, "POST "+aSecret+" HTTP/1.1", host, agent, "Content-Length: 0x0", "{credential}")
	raw("a Content-Length beyond all numbers", is400, "POST "+aSecret+" HTTP/1.1", host, agent, "Content-Length: 99999999999999999999", "{credential}")
	raw("Transfer-Encoding chunked, identity", []int{501}, "POST "+aSecret+" HTTP/1.1", host, agent, "Transfer-Encoding: chunked, identity", "{credential}")
	raw("Transfer-Encoding xchunked", []int{501}, "POST "+aSecret+" HTTP/1.1", host, agent, "Transfer-Encoding: xchunked", "{credential}")
	raw("two Transfer-Encodings", []int{400, 501}, "POST "+aSecret+" HTTP/1.1", host, agent, "Transfer-Encoding: chunked", "Transfer-Encoding: identity", "{credential}")
	raw("Transfer-Encoding with a space", is400, "POST "+aSecret+" HTTP/1.1", host, agent, "Transfer-Encoding : chunked", "{credential}")
	return all
}

// otherPorts are the TLS ports without TLS, and the metrics.
func otherPorts() (all []attempt) {
	for _, m := range []string{message("GET " + aSecret), message("GET "+aSecret, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "\x16\x03\x01\x00\x05junk!", "PROXY TCP4 1.2.3.4 1.2.3.4 1 1\r\n"} {
		all = append(all, attempt{name: fmt.Sprintf("without TLS: %.40q %d", m, len(m)), to: clearText, text: m, online: badMessage, offline: badMessage})
	}
	shown := []int{200}
	for target, want := range map[string][]int{
		"GET /metrics": shown, "GET /livez": shown, "GET /readyz": shown, "GET /readyz?verbose": shown, "HEAD /metrics": shown,
		"GET /": {404}, "GET " + aSecret: {404}, "GET /version": {404}, "GET /debug/pprof/": {404}, "GET /debug/pprof/heap": {404}, "GET /metrics/": {404}, "GET /livez/x": {404}, "GET /healthz": {404},
		"GET //metrics": {301, 307}, "GET /livez/../api/v1/secrets": {301, 307}, "GET /%6detrics": shown, "GET /metrics%2f..%2fapi": {404},
		"GET http://{upstream}/api/v1/secrets": {404}, "GET https://{upstream}/api/v1/secrets": {404}, "CONNECT {upstream}": {404}, "CONNECT /metrics": {404, 405}, "OPTIONS *": shown,
		"POST /metrics": {405}, "DELETE /livez": {405}, "PUT /readyz": {405}, "TRACE /metrics": {405}, "POST " + aSecret: {404},
	} {
		all = append(all, attempt{name: "metrics: " + target, to: metrics, text: message(target, low), open: true, online: want, offline: want})
	}
	return append(all,
		attempt{name: "metrics: an upgrade", to: metrics, text: message("GET /exec", low, "Connection: Upgrade", "Upgrade: SPDY/3.1"), online: []int{404}, offline: []int{404}},
		attempt{name: "metrics: h2c", to: metrics, text: "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", online: []int{0, 400, 404, 505}, offline: []int{0, 400, 404, 505}})
}
