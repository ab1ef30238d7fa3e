// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import "strings"

// standard is a request of HTTP/2.
var standard = []string{":method: GET", ":scheme: https", ":authority: {host}", ":path: " + aSecret, "user-agent: {agent}"}

// change replaces fields of the standard ones, and appends those that are new.
func change(fields ...string) []string {
	out := append([]string{}, standard...)
	for _, f := range fields {
		name, found := f[:strings.Index(f[1:], ":")+1], false
		for i := range out {
			if strings.HasPrefix(out[i], name+": ") {
				out[i], found = f, true
			}
		}
		if !found {
			out = append(out, f)
		}
	}
	return out
}

// http2Attempts are what HTTP/1.1 cannot say.
func http2Attempts() (all []attempt) {
	pass := func(name, reaches string, fields []string) {
		all = append(all, attempt{name: "HTTP/2: " + name, fields: fields, online: is401, offline: is401})
		all = append(all, attempt{name: "HTTP/2 with low: " + name, fields: append(append([]string{}, fields...), "authorization: Bearer {low}"), genuine: true, offline: is503, reaches: reaches})
	}
	pass("as it should be", aSecret, standard)
	pass("another Host", aSecret, change("host: kubernetes"))
	pass("another authority", aSecret, change(":authority: kubernetes.default.svc"))
	pass("clear text scheme", aSecret, change(":scheme: http"))
	pass("headers of a front proxy", aSecret, change("x-remote-user: system:admin", "x-remote-group: system:masters", "x-forwarded-for: 127.0.0.1"))
	pass("te: trailers", aSecret, change("te: trailers"))
	pass("cookies", aSecret, change("cookie: a=b", "cookie: c=d"))
	for name, fields := range map[string][]string{"shorter": change(":method: POST", "content-length: 1"), "longer": change(":method: POST", "content-length: 100"), "two": append(change(":method: POST", "content-length: 4"), "content-length: 5")} {
		all = append(all, attempt{name: "HTTP/2: a body that is not as long as said, " + name, fields: fields, body: "body", online: []int{0, 400, 401}, offline: []int{0, 400, 401}})
	}
	return append(append(all, malformedHTTP2()...),
		attempt{name: "HTTP/2: two authorizations", fields: append(change("authorization: Bearer {low}"), "authorization: Bearer {reader}"), online: is401, offline: is401},
		attempt{name: "HTTP/2 with low: impersonation", fields: change("authorization: Bearer {low}", "impersonate-user: system:admin"), genuine: true, offline: is503, reaches: aSecret},
		attempt{name: "HTTP/2: another node's certificate", cert: "n2", fields: standard, online: is403, offline: is403})
}

// malformedHTTP2 is refused whoever sends it.
func malformedHTTP2() (all []attempt) {
	add := func(name string, want []int, fields []string) {
		all = append(all, attempt{name: "HTTP/2: " + name, fields: fields, online: want, offline: want})
		all = append(all, attempt{name: "HTTP/2 with low: " + name, fields: append(append([]string{}, fields...), "authorization: Bearer {low}"), online: want, offline: want})
	}
	add("two dots", is400, change(":path: /livez/../api/v1/namespaces/a/secrets"))
	add("encoded slash", is400, change(":path: /api/v1/namespaces%2fa/secrets"))
	add("two slashes", is400, change(":path: //api/v1/namespaces/a/secrets"))
	add("path without a slash", badMessage, change(":path: api/v1/namespaces/a/secrets"))
	add("absolute path", badMessage, change(":path: https://{host}/api/v1/namespaces/a/secrets"))
	add("empty path", badMessage, change(":path: "))
	add("a star", badMessage, change(":path: *"))
	add("path with a newline", badMessage, change(":path: /version HTTP/1.1\r\nX-Remote-User: admin\r\nX: "))
	add("two authorities", badMessage, append(change(), ":authority: other"))
	add("two paths", badMessage, append([]string{":path: /livez"}, standard...))
	add("two methods", badMessage, append([]string{":method: POST"}, standard...))
	add("a pseudo header after a header", badMessage, append(change("x-a: b"), ":x: y"))
	add("an unknown pseudo header", badMessage, append([]string{":protocol: websocket"}, standard...))
	add("extended CONNECT", badMessage, append([]string{":protocol: websocket"}, change(":method: CONNECT")...))
	add("CONNECT", badMessage, []string{":method: CONNECT", ":authority: {host}", "user-agent: {agent}"})
	add("no path", badMessage, standard[:3])
	add("connection", badMessage, change("connection: close"))
	add("upgrade", badMessage, change("upgrade: SPDY/3.1"))
	add("transfer-encoding", badMessage, change("transfer-encoding: chunked"))
	add("proxy-connection", badMessage, change("proxy-connection: keep-alive"))
	add("te: gzip", badMessage, change("te: gzip"))
	add("capitals", badMessage, change("X-Remote-User: admin"))
	add("a name with a space", badMessage, change("x-a : b"))
	add("a name with a colon", badMessage, change("x:a: b"))
	add("a value with a newline", badMessage, change("x-a: b\r\nAuthorization: Bearer {reader}"))
	add("a value with a zero byte", badMessage, change("x-a: b\x00c"))
	return all
}
