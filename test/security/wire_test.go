// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package security

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"golang.org/x/sync/errgroup"
)

const (
	answerPatience = 15 * time.Second       // for the first answer
	morePatience   = 250 * time.Millisecond // for one more that may not come
	maxAnswerBytes = 1 << 20
	atOnce         = 24 // attempts
)

// An attacker is the hostile process.
type attacker struct {
	plan
	hub, upstream *tls.Config
	certs         map[string]tls.Certificate
	floodJob      job // what a flood sends is this one's
}

func newAttacker(p plan) (*attacker, error) {
	a := &attacker{plan: p, certs: map[string]tls.Certificate{}}
	for file, config := range map[string]**tls.Config{p.CAFile: &a.hub, p.RootFile: &a.upstream} {
		content, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(content)
		*config = &tls.Config{
			RootCAs: roots, MinVersion: tls.VersionTLS12, ClientSessionCache: tls.NewLRUClientSessionCache(0),
			CurvePreferences: []tls.CurveID{tls.CurveP256}, // the cheapest with the race detector
		}
	}
	for name, c := range p.Certs {
		key, err := x509.ParsePKCS8PrivateKey(c.Key)
		if err != nil {
			return nil, fmt.Errorf("key of %s: %w", name, err)
		}
		a.certs[name] = tls.Certificate{Certificate: c.Chain, PrivateKey: key}
	}
	return a, nil
}

type job struct {
	number  int
	attempt attempt
	address string
}

// tryAll makes all attempts of the plan, some at once.
func (a *attacker) tryAll(ctx context.Context, emit func(outcome) error) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(atOnce)
	for _, j := range a.jobs() {
		g.Go(func() error { return emit(a.try(ctx, j)) })
	}
	return g.Wait()
}

// try makes one attempt, and again at the API server itself if it tells us
// something.
func (a *attacker) try(ctx context.Context, j job) outcome {
	got := a.send(ctx, a.hub, j)
	o := outcome{Attempt: j.number, Name: j.attempt.name, Place: j.address, Statuses: got.statuses, Length: got.bodies.Len(), Secret: a.secretIn(got)}
	if got.end != nil {
		o.Error = got.end.Error()
	}
	if j.attempt.genuine && a.Compare {
		direct := j
		direct.address = a.Upstream
		o.Direct = a.send(ctx, a.upstream, direct).statuses
	}
	return o
}

// secretIn returns a value that the attacker was not to see, "" if there is none.
func (a *attacker) secretIn(got *answers) string {
	for _, s := range a.Secrets {
		for _, form := range []string{s, base64.StdEncoding.EncodeToString([]byte(s))} {
			if bytes.Contains(got.bodies.Bytes(), []byte(form)) || bytes.Contains(got.headers.Bytes(), []byte(form)) {
				return s
			}
		}
	}
	return ""
}

// expand fills in the placeholders.
func (a *attacker) expand(j job, text string) string {
	pairs := []string{"{host}", j.address, "{upstream}", a.Upstream, "{agent}", agentOf(a.Marker, j.number)}
	for name, token := range a.Tokens {
		pairs = append(pairs, "{"+name+"}", token, "{"+name+"B64}", base64.RawURLEncoding.EncodeToString([]byte(token)))
	}
	return strings.NewReplacer(pairs...).Replace(text)
}

// agentOf is a User-Agent from which agentNumber gets the number back.
func agentOf(marker string, number int) string { return fmt.Sprintf("%s-%d/1", marker, number) }

// agentNumber returns the number of the attempt that a User-Agent names, and
// whether it is an attacker's.
func agentNumber(marker, agent string) (number int, ok bool) {
	_, rest, ok := strings.Cut(agent, marker)
	if !ok {
		return -1, false
	}
	text, _, _ := strings.Cut(strings.TrimPrefix(rest, "-"), "/")
	number, err := strconv.Atoi(text)
	if err != nil {
		return -1, true
	}
	return number, true
}

// answers are all that came on one connection, and how it ended; nil: the attacker
// had enough.
type answers struct {
	statuses        []int
	headers, bodies bytes.Buffer
	end             error
}

func (a *attacker) send(ctx context.Context, config *tls.Config, j job) *answers {
	protocol, exchange := "http/1.1", a.sendHTTP1
	if j.attempt.fields != nil {
		protocol, exchange = "h2", a.sendHTTP2
	}
	got := new(answers)
	conn, err := a.dial(ctx, config, j, protocol)
	if err != nil {
		got.end = err
		return got
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(answerPatience)) // a network connection takes one
	got.end = exchange(conn, j, got)
	return got
}

func (a *attacker) dial(ctx context.Context, config *tls.Config, j job, protocol string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", j.address)
	if err != nil || j.attempt.to != "" {
		return conn, err
	}
	config = config.Clone() // which shares the sessions
	config.NextProtos = []string{protocol}
	config.ServerName, _, _ = net.SplitHostPort(j.address) // as dialled
	if j.attempt.cert != "" {
		config.ClientSessionCache = nil // a session remembers who began it
		cert := a.certs[j.attempt.cert]
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
	}
	secured := tls.Client(conn, config)
	ctx, cancel := context.WithTimeout(ctx, answerPatience)
	defer cancel()
	if err := secured.HandshakeContext(ctx); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	return secured, nil
}

func (a *attacker) sendHTTP1(conn net.Conn, j job, got *answers) error {
	text := a.expand(j, j.attempt.text)
	go func() { _, _ = io.WriteString(conn, text) }() // the answer may come before the end
	method, _, _ := strings.Cut(text, " ")
	r := bufio.NewReader(conn)
	for {
		resp, err := http.ReadResponse(r, &http.Request{Method: method})
		if err != nil {
			return err
		}
		if resp.StatusCode/100 == 1 && resp.StatusCode != http.StatusSwitchingProtocols {
			continue
		}
		got.statuses = append(got.statuses, resp.StatusCode)
		_ = resp.Header.Write(&got.headers) // a buffer takes everything
		if _, err = io.Copy(&got.bodies, io.LimitReader(resp.Body, maxAnswerBytes)); err != nil || !j.attempt.more {
			return err
		}
		_ = conn.SetReadDeadline(time.Now().Add(morePatience))
		method = http.MethodGet // of what rides along
	}
}

// sendHTTP2 sends one request on stream 1, and whatever it is waits for an answer,
// the end of the stream or that of the connection.
func (a *attacker) sendHTTP2(conn net.Conn, j job, got *answers) error {
	f, err := startHTTP2(conn)
	if err != nil {
		return err
	}
	var block []hpack.HeaderField
	for _, field := range j.attempt.fields {
		// A pseudo header's name begins with a colon.
		name, value, _ := strings.Cut(field[1:], ": ")
		block = append(block, hpack.HeaderField{Name: field[:1] + name, Value: a.expand(j, value)})
	}
	if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: encode(block), EndHeaders: true, EndStream: j.attempt.body == ""}); err != nil {
		return err
	}
	if j.attempt.body != "" {
		_ = f.WriteData(1, true, []byte(j.attempt.body)) // an answer may say why it fails
	}
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return err
		}
		ended := false
		switch frame := frame.(type) {
		case *http2.MetaHeadersFrame:
			for _, h := range frame.Fields {
				_, _ = fmt.Fprintln(&got.headers, h.Name, h.Value) // a buffer takes everything
			}
			if code, err := strconv.Atoi(frame.PseudoValue("status")); err == nil && code >= 200 {
				got.statuses = append(got.statuses, code)
			}
			ended = frame.StreamEnded()
		case *http2.DataFrame:
			_, _ = got.bodies.Write(frame.Data())
			ended = frame.StreamEnded()
		case *http2.RSTStreamFrame:
			return fmt.Errorf("stream reset: %v", frame.ErrCode)
		case *http2.GoAwayFrame:
			return fmt.Errorf("go away: %v", frame.ErrCode)
		}
		if ended {
			return nil
		}
	}
}

func startHTTP2(conn net.Conn) (*http2.Framer, error) {
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		return nil, err
	}
	f := http2.NewFramer(conn, conn)
	f.AllowIllegalWrites = true
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	return f, f.WriteSettings()
}

// encode takes names and values that no client would send.
func encode(fields []hpack.HeaderField) []byte {
	var b bytes.Buffer
	e := hpack.NewEncoder(&b)
	for _, f := range fields {
		_ = e.WriteField(f) // a buffer takes everything
	}
	return b.Bytes()
}
