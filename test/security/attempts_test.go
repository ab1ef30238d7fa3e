// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// An attempt is a request that its sender should gain nothing by.
//
// In what is sent, {host} is the address, {agent} a User-Agent with the attacker's
// marker and the attempt's number, and any other word in braces the token of that
// name.
type attempt struct {
	name   string
	cert   string   // the client certificate to show, "": none
	text   string   // HTTP/1.1, to the last byte; or else
	fields []string // HTTP/2: header fields, each as "name: value", and
	body   string
	to     place // the zero value: both HTTPS listeners
	more   bool  // there may be a second answer, wait for it

	// The statuses that are right, with the link up and down; 0 is none at all.
	online, offline []int
	// The credential is a real one: with the link up the status is that of the API
	// server itself, and data is right where it gives some.
	genuine bool
	// Data is right although the API server would give none.
	open bool
	// The one request URI with which the attempt may go upstream; "": none.
	reaches string
}

// A place is where an attempt goes.
type place string

const (
	clearText place = "clear text" // to both HTTPS listeners, without TLS
	metrics   place = "metrics"
)

// What the answers are mostly. Offline nobody can say whose a token is that has
// not been seen before.
var (
	is400      = []int{400}
	is401      = []int{401}
	is403      = []int{403}
	is503      = []int{503}
	unknown    = []int{401, 503}
	noAnswer   = []int{0}
	badMessage = []int{0, 400}
	anyStatus  []int // the API server's
)

const (
	aSecret   = "/api/v1/namespaces/a/secrets/s-0"
	secrets   = "/api/v1/namespaces/a/secrets"
	readable  = "/api/v1/namespaces/b/configmaps/open" // low may
	readables = "/api/v1/namespaces/b/configmaps"      // low may

	low = "Authorization: Bearer {low}"
)

// attempts are all there are, always in the same order.
func attempts() []attempt {
	var all []attempt
	for _, group := range [][]attempt{
		credentials(), otherHeaders(), targets(), queries(), methods(), messages(), smuggled(), upgrades(), http2Attempts(), writes(), otherPorts(),
	} {
		all = append(all, group...)
	}
	slices.SortFunc(all, func(a, b attempt) int { return strings.Compare(a.name, b.name) }) // the attacker counts as its judge does
	return all
}

// message is a request without a body. Line is the method and the target; Host and
// User-Agent are the usual ones where headers have none.
func message(line string, headers ...string) string {
	lines := []string{line + " HTTP/1.1"}
	for _, standard := range []string{"Host: {host}", "User-Agent: {agent}"} {
		name, _, _ := strings.Cut(standard, " ")
		if !slices.ContainsFunc(headers, func(h string) bool { return strings.HasPrefix(h, name) }) {
			lines = append(lines, standard)
		}
	}
	return strings.Join(append(lines, headers...), "\r\n") + "\r\n\r\n"
}

func withBody(line, body string, headers ...string) string {
	return message(line, append(headers, "Content-Length: "+strconv.Itoa(len(body)))...) + body
}

// credentials are those that are none, or somebody else's.
func credentials() (all []attempt) {
	with := func(name string, online, offline []int, headers ...string) {
		for _, path := range []string{aSecret, secrets + "?watch=1&timeoutSeconds=1&resourceVersion=0"} {
			all = append(all, attempt{name: name + ": " + path, text: message("GET "+path, headers...), online: online, offline: offline})
		}
	}
	bearer := func(token string) string { return "Authorization: Bearer " + token }
	with("no credential", is401, is401)
	for _, token := range []string{"expired", "gone", "elsewhere", "unsigned", "hmac", "otherkey", "junk"} {
		with("token "+token, is401, unknown, bearer("{"+token+"}"))
	}
	for name, value := range map[string]string{
		"empty": "", "empty Bearer": "Bearer ", "Bearer alone": "Bearer", "Basic": "Basic YWRtaW46YWRtaW4=", "Negotiate": "Negotiate YWJj", "token alone": "{low}",
		"two in one": "Bearer {low} {reader}", "comma": "Bearer {low},Bearer {reader}", "two blanks": "Bearer  {low}", "tab": "Bearer\t{low}", "quoted": `Bearer "{low}"`,
	} {
		with("Authorization "+name, is401, is401, "Authorization: "+value)
	}
	with("two Authorizations", is401, is401, low, bearer("{junk}"))
	with("two Authorizations, one empty", is401, is401, low, "authorization:")
	with("the same Authorization twice", is401, is401, low, low)
	with("kubelet's User-Agent", is401, is401, "User-Agent: kubelet/v1.36.3 (linux/amd64) kubernetes/{agent}")
	with("edgehub's User-Agent", is401, is401, "User-Agent: edgehub {agent}")
	with("headers of a front proxy", is401, is401, "X-Remote-User: system:admin", "X-Remote-Group: system:masters", "X-Remote-Extra-Scopes: all", "X-Remote-Uid: 1")
	with("headers of a load balancer", is401, is401, "X-Forwarded-For: 127.0.0.1", "X-Forwarded-Client-Cert: Subject=\"CN=system:node:n1\"", "Forwarded: for=127.0.0.1", "X-Real-Ip: 127.0.0.1", "X-SSL-Client-Verify: SUCCESS")
	with("impersonation without a token", is401, is401, "Impersonate-User: system:admin", "Impersonate-Group: system:masters")
	for i, path := range []string{aSecret, secrets} {
		for name, query := range map[string]string{"access_token": "access_token={reader}", "token": "token={reader}", "authorization": "authorization=Bearer+{reader}"} {
			all = append(all, attempt{name: fmt.Sprintf("%s in the query %d", name, i), text: message("GET " + path + "?" + query), online: is401, offline: is401})
		}
	}
	for _, cert := range []struct {
		name string
		want []int
	}{
		{"n2", is403}, {"admin", is403}, {"nodename", is403}, {"nodemaster", is403}, // of the cluster's authority
		{"selfsigned", is401}, {"signedbyn2", is401}, {"otherauthority", is401}, // with the node's own names
		// The certificate itself is no secret: the handshake asks for its key.
		{"nodewithoutkey", noAnswer},
	} {
		all = append(all,
			attempt{name: "certificate " + cert.name, cert: cert.name, text: message("GET " + aSecret), online: cert.want, offline: cert.want},
			attempt{name: "certificate " + cert.name + " as kubelet", cert: cert.name, text: message("GET "+secrets, "User-Agent: kubelet/v1.36.3 (linux/amd64) kubernetes/{agent}", "X-Remote-User: system:node:n1"), online: cert.want, offline: cert.want})
	}
	return append(all,
		attempt{name: "certificate n2 with a token", cert: "n2", text: message("GET "+aSecret, low), genuine: true, offline: is503, reaches: aSecret},
		attempt{name: "certificate n2 with junk", cert: "n2", text: message("GET "+aSecret, bearer("{junk}")), online: is401, offline: unknown})
}

// otherHeaders come beside a token of low rights.
func otherHeaders() (all []attempt) {
	for name, headers := range map[string][]string{
		"alone":                       nil,
		"headers of a front proxy":    {"X-Remote-User: system:admin", "X-Remote-Group: system:masters", "X-Remote-Extra-Scopes: all"},
		"headers of a load balancer":  {"X-Forwarded-For: 127.0.0.1", "X-Forwarded-Host: kubernetes", "X-Forwarded-Uri: /version", "Forwarded: for=127.0.0.1"},
		"edgehub's own headers":       {"Edgehub-Source: feed", "Edgehub-User: system:node:n1"},
		"kubelet's User-Agent":        {"User-Agent: kubelet/v1.36.3 (linux/amd64) kubernetes/{agent}"},
		"a method in a header":        {"X-HTTP-Method-Override: DELETE", "X-HTTP-Method: DELETE", "X-Method-Override: DELETE"},
		"a URL in a header":           {"X-Original-URL: " + secrets, "X-Rewrite-URL: " + secrets},
		"impersonation":               {"Impersonate-User: system:admin"},
		"impersonation in lower case": {"impersonate-user: system:node:n1", "impersonate-group: system:nodes"},
		"impersonation of a group":    {"Impersonate-User: low", "Impersonate-Group: system:masters"},
		"impersonation of an uid":     {"Impersonate-Uid: 1"},
		"impersonation of extras":     {"Impersonate-User: low", "Impersonate-Extra-Scopes: all"},
		"impersonation twice":         {"Impersonate-User: low", "Impersonate-User: system:admin"},
		"trailers":                    {"TE: trailers", "Trailer: Authorization, Impersonate-User"},
		"an unknown expectation":      {"Expect: 200-maybe"},
		"Proxy-Authorization":         {"Proxy-Authorization: Bearer {reader}"},
		"gzip of nothing":             {"Content-Encoding: gzip", "Accept-Encoding: br, gzip;q=0, *;q=1"},
	} {
		for _, path := range []string{aSecret, readable} {
			a := attempt{name: "low with " + name + ": " + path, text: message("GET "+path, append([]string{low}, headers...)...), genuine: true, offline: is503, reaches: path}
			switch {
			case strings.HasPrefix(name, "impersonation"):
			case strings.HasPrefix(name, "an unknown"):
				a.offline, a.reaches, a.genuine = []int{417}, "", false
				a.online = a.offline
			case path == readable:
				a.offline = []int{200} // from its record
			}
			all = append(all, a)
		}
	}
	for _, name := range []string{"Authorization", "authorization", "Impersonate-User", "X-Remote-User", "close, Authorization", "keep-alive,impersonate-user", "Upgrade, Authorization", "Accept", "Host", "Content-Length"} {
		all = append(all, attempt{name: "low with Connection: " + name, text: message("GET "+aSecret, low, "Impersonate-User: low", "Connection: "+name), online: is400, offline: is400})
	}
	return all
}

// writes are by nobody and by somebody who may not.
func writes() (all []attempt) {
	const merge, object = "application/merge-patch+json", "application/json"
	for _, w := range []struct{ line, body, contentType string }{
		{"POST /api/v1/namespaces/a/configmaps", `{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"planted"}}`, object},
		{"PUT /api/v1/namespaces/a/configmaps/target", `{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"target"},"data":{"by":"attacker"}}`, object},
		{"PATCH /api/v1/namespaces/a/configmaps/target", `{"data":{"by":"attacker"}}`, merge},
		{"DELETE /api/v1/namespaces/a/configmaps/target", "", object},
		{"DELETE /api/v1/namespaces/a/configmaps", "", object},
		{"POST /api/v1/namespaces/a/secrets", `{"kind":"Secret","apiVersion":"v1","metadata":{"name":"planted"}}`, object},
		{"DELETE /api/v1/namespaces/a/secrets/s-0", "", object},
		{"POST /api/v1/nodes", `{"kind":"Node","apiVersion":"v1","metadata":{"name":"n1"}}`, object},
		{"PATCH /api/v1/nodes/n1", `{"metadata":{"labels":{"by":"attacker"}}}`, merge},
		{"PATCH /api/v1/nodes/n1/status", `{"status":{"nodeInfo":{"machineID":"attacker"}}}`, merge},
		{"PUT /api/v1/nodes/n1/status", `{"kind":"Node","apiVersion":"v1","metadata":{"name":"n1"}}`, object},
		{"DELETE /api/v1/nodes/n1", "", object},
		{"PUT /apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1", `{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"n1","namespace":"kube-node-lease"},"spec":{"holderIdentity":"attacker"}}`, object},
		{"POST /apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases", `{"kind":"Lease","apiVersion":"coordination.k8s.io/v1","metadata":{"name":"planted","namespace":"kube-node-lease"}}`, object},
		{"POST /api/v1/namespaces/a/events", `{"kind":"Event","apiVersion":"v1","metadata":{"name":"planted"},"involvedObject":{"kind":"Pod","namespace":"a","name":"alive"}}`, object},
		{"PATCH /api/v1/namespaces/a/events/e-0", `{"message":"attacker"}`, merge},
		{"POST /api/v1/namespaces/a/serviceaccounts/reader/token", `{"kind":"TokenRequest","apiVersion":"authentication.k8s.io/v1","spec":{}}`, object},
		{"POST /apis/authentication.k8s.io/v1/tokenreviews", `{"kind":"TokenReview","apiVersion":"authentication.k8s.io/v1","spec":{"token":"junk"}}`, object},
		{"POST /apis/authorization.k8s.io/v1/subjectaccessreviews", `{"kind":"SubjectAccessReview","apiVersion":"authorization.k8s.io/v1","spec":{"user":"low","nonResourceAttributes":{"path":"/","verb":"get"}}}`, object},
		{"POST /api/v1/namespaces/a/pods/alive/binding", `{"kind":"Binding","apiVersion":"v1","metadata":{"name":"alive"},"target":{"kind":"Node","name":"n1"}}`, object},
		{"POST /api/v1/namespaces/a/pods/alive/eviction", `{"kind":"Eviction","apiVersion":"policy/v1","metadata":{"name":"alive"}}`, object},
		{"DELETE /api/v1/namespaces/a/pods/alive?gracePeriodSeconds=0", "", object},
		{"POST /apis/rbac.authorization.k8s.io/v1/clusterrolebindings", `{"kind":"ClusterRoleBinding","apiVersion":"rbac.authorization.k8s.io/v1","metadata":{"name":"planted"},"roleRef":{"apiGroup":"rbac.authorization.k8s.io","kind":"ClusterRole","name":"cluster-admin"},"subjects":[{"kind":"User","name":"low"}]}`, object},
		{"POST /apis/certificates.k8s.io/v1/certificatesigningrequests", `{"kind":"CertificateSigningRequest","apiVersion":"certificates.k8s.io/v1","metadata":{"name":"planted"},"spec":{"request":"","signerName":"kubernetes.io/kube-apiserver-client-kubelet","usages":["client auth"]}}`, object},
	} {
		_, path, _ := strings.Cut(w.line, " ")
		text := func(headers ...string) string {
			return withBody(w.line, w.body, append(headers, "Content-Type: "+w.contentType)...)
		}
		all = append(all,
			attempt{name: w.line, text: text(), online: is401, offline: is401},
			attempt{name: w.line + " as kubelet", text: text("User-Agent: kubelet/v1.36.3 (linux/amd64) kubernetes/{agent}", "X-Remote-User: system:node:n1"), online: is401, offline: is401},
			attempt{name: w.line + " with another node's certificate", cert: "n2", text: text(), online: is403, offline: is403},
			attempt{name: w.line + " with a low token", text: text(low), genuine: true, online: is403, offline: is503, reaches: path},
			attempt{name: w.line + " with a token of another audience", text: text("Authorization: Bearer {elsewhere}"), online: is401, offline: unknown})
	}
	return all
}
