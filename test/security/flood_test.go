// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import (
	"context"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	slowConnections = 200
	// requestTimeout is the hub's --request-timeout.
	requestTimeout = 5 * time.Second
	// slowLimit is what a header or a handshake may take that never comes to an end:
	// the hub's own limit of ten seconds, with room for a machine that is busy.
	slowLimit = 15 * time.Second
	bodyLimit = requestTimeout + 5*time.Second // a body likewise
	// slowPatience is what the attacker itself waits.
	slowPatience = slowLimit + time.Second

	mega     = 1 << 20
	manyByte = 1 << 30
	// fewBytes is what may be written of a body that is not wanted: the limit of 3
	// MiB, and what lies in the buffers between.
	fewBytes = 24 * mega

	// unknownTokens are sent by so many at once, for so long.
	unknownSenders  = 48
	unknownDuration = 6 * time.Second
)

// A flood is one way to be too much.
type flood struct {
	name string
	slow bool // it takes as long as the hub lets it
	run  func(ctx context.Context, a *attacker) (strain, error)

	statuses   []int         // that are right; 0: none
	maxWritten int64         // bytes that one connection may take; 0: does not matter
	within     time.Duration // in which the hub must end every connection; 0: need not
	reaches    string        // the request URI upstream; "": none
}

// A strain is what a flood came to.
type strain struct {
	Connections int           `json:",omitempty"`
	Ended       int           `json:",omitempty"` // of these, by the hub
	Longest     time.Duration `json:",omitempty"`
	Written     int64         `json:",omitempty"` // most on one connection
	Statuses    []int         `json:",omitempty"`
}

func (s *strain) saw(status int) {
	if !slices.Contains(s.Statuses, status) {
		s.Statuses = append(s.Statuses, status)
	}
}

const (
	floodedPath = "/api/v1/namespaces/a/configmaps"
	floodedPost = "POST " + floodedPath + " HTTP/1.1\r\nHost: x\r\nUser-Agent: {agent}\r\nContent-Type: application/json\r\n"
)

// allFloods are all there are, always in the same order.
func allFloods() []flood { return append(append(floods(), slowBodies()...), unknownTokens) }

// slowBodies never end. With a token, each takes one of the places that kubelet
// needs for its requests: more are sent than the 400 that there are.
func slowBodies() []flood {
	return []flood{
		{name: "bodies of nobody that dribble", run: dribble(slowConnections, "http/1.1", floodedPost+"Content-Length: 100000\r\n\r\n", "a"), statuses: []int{0, 401, 408}, within: bodyLimit},
		{name: "bodies of low that dribble", run: dribble(600, "http/1.1", floodedPost+"Content-Length: 100000\r\n"+low+"\r\n\r\n", "a"), statuses: []int{0, 403, 408, 429, 503, 504}, within: bodyLimit, reaches: floodedPath},
	}
}

// unknownTokens are each a question to the API server, which ends the connection
// that it was asked on.
var unknownTokens = flood{name: "tokens that nobody knows", run: askWithUnknownTokens, statuses: []int{401, 429, 503, 504}}

// floods are those that are all met at once.
func floods() []flood {
	post := floodedPost
	all := []flood{
		{name: "headers that dribble", slow: true, run: dribble(slowConnections, "http/1.1", "GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: {agent}\r\n", "X-A: b\r\n"), statuses: []int{0, 408}, within: slowLimit},
		{name: "handshakes that dribble", slow: true, run: dribble(slowConnections, "", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "a"), statuses: noAnswer, within: slowLimit},
		{name: "HTTP/2 without a word", slow: true, run: dribble(slowConnections, "h2", "", ""), statuses: noAnswer, within: slowLimit},
		{name: "many headers", run: pour("GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: {agent}\r\n", strings.Repeat("X-A: b\r\n", 10000)+"\r\n", 1), statuses: []int{0, 431}},
		{name: "a header of 1 MiB", run: pour("GET / HTTP/1.1\r\nHost: x\r\nUser-Agent: {agent}\r\nX-A: ", strings.Repeat("a", mega)+"\r\n\r\n", 1), statuses: []int{0, 431}},
		{name: "a target of 1 MiB", run: pour("GET /", strings.Repeat("a", mega)+" HTTP/1.1\r\nHost: x\r\nUser-Agent: {agent}\r\n\r\n", 1), statuses: []int{0, 400, 414, 431}},
		{name: "streams that are reset, of nobody", run: rapidReset(4000, "")},
		{name: "streams that are reset, of low", run: rapidReset(2000, low), reaches: secrets},
		{name: "CONTINUATION without an end", run: continuation, maxWritten: 8 * mega, within: slowPatience},
		{name: "PING and SETTINGS", run: pings},
		{name: "HTTP/2 headers of 1 MiB", run: hugeHTTP2Header, statuses: []int{0, 431}},
	}
	for _, who := range []struct {
		name, credential string
		sized, chunked   []int
		reaches          string
	}{{"nobody", "X-None: 1", []int{401}, []int{401}, ""}, {"low", low, []int{413}, []int{400, 403, 413, 503}, floodedPath}} {
		all = append(all,
			flood{name: "1 GiB of " + who.name, run: pour(post+who.credential+"\r\nContent-Length: "+strconv.Itoa(manyByte)+"\r\n\r\n", strings.Repeat("a", mega), manyByte/mega), statuses: append([]int{0}, who.sized...), maxWritten: fewBytes},
			flood{name: "1 GiB in chunks of " + who.name, run: pour(post+who.credential+"\r\nTransfer-Encoding: chunked\r\n\r\n", "100000\r\n"+strings.Repeat("a", mega)+"\r\n", manyByte/mega), statuses: append([]int{0}, who.chunked...), maxWritten: fewBytes, reaches: who.reaches},
			flood{name: "1 GiB in gzip of " + who.name, run: bomb(post + who.credential + "\r\nContent-Encoding: gzip\r\n"), statuses: []int{0, 400, 401, 403, 413, 415, 503}, reaches: who.reaches})
	}
	return append(all, flood{
		name: "1 GiB with an upgrade, of low", run: pour(post+low+"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nTransfer-Encoding: chunked\r\n\r\n", "100000\r\n"+strings.Repeat("a", mega)+"\r\n", manyByte/mega),
		statuses: []int{0, 400, 403, 413, 503}, maxWritten: fewBytes, reaches: floodedPath,
	})
}

// flood runs the floods of the plan, all at once.
func (a *attacker) flood(ctx context.Context, emit func(outcome) error) error {
	g, ctx := errgroup.WithContext(ctx)
	for n, f := range allFloods() {
		if !slices.Contains(a.Floods, f.name) {
			continue
		}
		g.Go(func() error {
			s, err := f.run(ctx, a.numbered(n))
			o := outcome{Flood: f.name, Name: f.name, Place: a.HTTPS[0], Strain: s}
			if err != nil {
				o.Error = err.Error()
			}
			return emit(o)
		})
	}
	return g.Wait()
}

// floodNumber is that of the first flood; attempts are below.
const floodNumber = 1_000_000

// numbered is an attacker for whom {agent} is the flood's.
func (a *attacker) numbered(n int) *attacker {
	own := *a
	own.floodJob = job{number: floodNumber + n, address: a.HTTPS[0]}
	return &own
}

func (a *attacker) fill(text string) string { return a.expand(a.floodJob, text) }

// connect opens a connection with TLS, without it if protocol is "".
func (a *attacker) connect(ctx context.Context, protocol string) (net.Conn, error) {
	j := a.floodJob
	if protocol == "" {
		j.attempt.to = clearText
	}
	return a.dial(ctx, a.hub, j, protocol)
}
