// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bufio"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"
)

// Nobody has all places, and the node has its own.
func TestPlaces(t *testing.T) {
	p := newPlaces(10)
	node := &user.DefaultInfo{Name: "system:node:n1", Groups: []string{user.NodesGroup}}
	a, b, c := &user.DefaultInfo{Name: "a"}, &user.DefaultInfo{Name: "b"}, &user.DefaultInfo{Name: "c"}
	taken := func(u user.Info) (n int) {
		for p.take(u) {
			n++
		}
		return n
	}
	for _, step := range []struct {
		name string
		who  user.Info
		want int
	}{{"a", a, 5}, {"b", b, 5}, {"c, when all are taken", c, 0}, {"nobody", nil, 0}, {"the node", node, 10}} {
		if got := taken(step.who); got != step.want {
			t.Errorf("%s takes %d places, want %d", step.name, got, step.want)
		}
	}
	p.give(a)
	if got := taken(c); got != 1 {
		t.Errorf("c takes %d places after one was given back, want 1", got)
	}
	for range 10 {
		p.give(node)
	}
	for range 5 {
		p.give(b)
	}
	for range 4 {
		p.give(a)
	}
	p.give(c)
	if p.node != 0 || p.others != 0 || len(p.byUser) != 0 {
		t.Errorf("all given back: %d, %d, %v", p.node, p.others, p.byUser)
	}
}

// A body that the client has broken is the client's fault.
func TestBrokenBody(t *testing.T) {
	cfg := config(transportFunc(func(req *http.Request) (*http.Response, error) {
		_, err := io.ReadAll(req.Body)
		if err == nil {
			err = errors.New("the body was read to its end")
		}
		return nil, err
	}))
	addr := start(t, cfg).addr
	for _, tc := range []struct {
		name, body string
		want       int
	}{
		{"chunks that are none", "Transfer-Encoding: chunked\r\n\r\nzz\r\n", http.StatusBadRequest},
		{"longer than it may be", "Transfer-Encoding: chunked\r\n\r\n" + strings.Repeat("100000\r\n"+strings.Repeat("x", 1<<20)+"\r\n", 4), http.StatusRequestEntityTooLarge},
	} {
		if got := rawStatus(t, addr, "POST /api/v1/namespaces/a/configmaps HTTP/1.1\r\nHost: x\r\n"+tc.body); got != tc.want {
			t.Errorf("%s: %d, want %d", tc.name, got, tc.want)
		}
	}
	if got := rawStatus(t, addr, "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n"); got != http.StatusBadRequest {
		t.Errorf("OPTIONS *: %d, want 400", got)
	}
}

// rawStatus sends bytes as they are and returns the status of the answer.
func rawStatus(t *testing.T, addr, request string) int {
	t.Helper()
	conn, err := tls.Dial("tcp", addr, &tls.Config{InsecureSkipVerify: true})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	go io.WriteString(conn, request) // the answer may come before its end
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	return resp.StatusCode
}

// A body that dribbles is not waited for longer than a request may take.
func TestSlowBody(t *testing.T) {
	cfg := config(transportFunc(func(req *http.Request) (*http.Response, error) {
		_, err := io.ReadAll(req.Body)
		return nil, fmt.Errorf("read: %w", err)
	}))
	cfg.RequestTimeout = 200 * time.Millisecond
	if got := rawStatus(t, start(t, cfg).addr, "POST /api/v1/namespaces/a/configmaps HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nx"); got != http.StatusGatewayTimeout {
		t.Errorf("status %d, want 504", got)
	}
}
