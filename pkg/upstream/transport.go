// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"sync/atomic"
	"time"
)

const (
	// maxHeaderBytes limits an answer's header; those of the API server have a few
	// hundred bytes, and some warnings.
	maxHeaderBytes = 128 << 10
	// maxStreamBufferBytes limits what is held for a client that does not read, for
	// each request. It allows 80 Mbit/s to one at a round trip of 100 ms.
	maxStreamBufferBytes = 1 << 20
	// idleConnTimeout is the http.Transport's usual one.
	idleConnTimeout = 90 * time.Second
	// maxIdleConns matters for a server without HTTP/2 only.
	maxIdleConns = 16

	keepAliveIdle     = 5 * time.Second
	keepAliveInterval = 2 * time.Second
	keepAliveCount    = 2
	// tcpUserTimeout is how long sent bytes may go without an acknowledgement. It is
	// more than pings allow, for a thin link with seconds of queue ahead.
	tcpUserTimeout = 9 * time.Second
)

type dialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// pools are the connections to one server by credential and protocol. A request
// with a token must not travel on a connection that has shown the node's
// certificate, nor the other way round, so these never mix.
type pools struct {
	node, bearer               *http.Transport // HTTP/2
	nodeUpgrade, bearerUpgrade *http.Transport // HTTP/1.1, one request a connection; bearerUpgrade is for reviews, too
}

func newPools(cfg *Config, creds *credentials, dial dialFunc, suspect func()) *pools {
	return &pools{
		node:          requestTransport(cfg, tlsConfig(creds, true), replacing(dial, suspect)),
		bearer:        requestTransport(cfg, tlsConfig(creds, false), replacing(dial, suspect)),
		nodeUpgrade:   upgradeTransport(cfg, tlsConfig(creds, true), dial),
		bearerUpgrade: upgradeTransport(cfg, tlsConfig(creds, false), dial),
	}
}

// replacing raises a suspicion when a pool that has had a connection wants
// another. With HTTP/2 one is enough, so the server may have taken leave (GOAWAY)
// of the first, as it does before a restart, and its end may be still unread.
func replacing(dial dialFunc, suspect func()) dialFunc {
	var had atomic.Bool
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		if had.Load() {
			suspect()
		}
		c, err := dial(ctx, network, address)
		if err == nil {
			had.Store(true)
		}
		return c, err
	}
}

func (p *pools) pick(bearer, upgrade bool) *http.Transport {
	switch {
	case bearer && upgrade:
		return p.bearerUpgrade
	case bearer:
		return p.bearer
	case upgrade:
		return p.nodeUpgrade
	default:
		return p.node
	}
}

func (p *pools) closeIdle() {
	for _, t := range []*http.Transport{p.node, p.bearer, p.nodeUpgrade, p.bearerUpgrade} {
		t.CloseIdleConnections()
	}
}

// tlsConfig trusts the CA file alone. With node, the certificate is presented to
// any server that asks, whatever issuers it names; without, none is.
func tlsConfig(creds *credentials, node bool) *tls.Config {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: creds.roots}
	if node {
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return &creds.cert, nil
		}
	}
	return cfg
}

// baseTransport uses no proxy, whatever the environment says: what a proxy
// answers is not the API server's word.
func baseTransport(cfg *Config, t *tls.Config, dial dialFunc) *http.Transport {
	return &http.Transport{
		DialContext:            dial,
		TLSClientConfig:        t,
		TLSHandshakeTimeout:    cfg.TLSTimeout,
		MaxIdleConns:           maxIdleConns,
		MaxIdleConnsPerHost:    maxIdleConns,
		IdleConnTimeout:        idleConnTimeout,
		MaxResponseHeaderBytes: maxHeaderBytes,
		ExpectContinueTimeout:  time.Second,
	}
}

// requestTransport asks for gzip by itself and unpacks it.
func requestTransport(cfg *Config, t *tls.Config, dial dialFunc) *http.Transport {
	tr := baseTransport(cfg, t, dial)
	tr.Protocols = new(http.Protocols)
	tr.Protocols.SetHTTP1(true)
	tr.Protocols.SetHTTP2(true)
	tr.HTTP2 = &http.HTTP2Config{
		SendPingTimeout:           cfg.PingAfter,
		PingTimeout:               cfg.PingTimeout,
		WriteByteTimeout:          cfg.PingAfter + cfg.PingTimeout,
		MaxReceiveBufferPerStream: maxStreamBufferBytes,
	}
	return tr
}

// upgradeTransport closes each connection after its answer, so that nothing can
// be sent after an upgrade that was refused.
func upgradeTransport(cfg *Config, t *tls.Config, dial dialFunc) *http.Transport {
	tr := baseTransport(cfg, t, dial)
	tr.Protocols = new(http.Protocols)
	tr.Protocols.SetHTTP1(true)
	tr.DisableKeepAlives = true
	tr.DisableCompression = true
	return tr
}

// probeTransport keeps one connection of its own, apart from the requests': a
// pool that is stuck cannot hold up a probe, and a probe never waits behind a
// large list. HTTP/1.1, so that a second probe takes a fresh connection while
// the first still waits, and a probe that is given up takes its connection with
// it.
func probeTransport(cfg *Config, creds *credentials, dial dialFunc) *http.Transport {
	tr := baseTransport(cfg, tlsConfig(creds, true), dial)
	tr.Protocols = new(http.Protocols)
	tr.Protocols.SetHTTP1(true)
	tr.MaxIdleConnsPerHost = 1
	tr.DisableCompression = true
	return tr
}

func newDialer(cfg *Config) *net.Dialer {
	return &net.Dialer{
		Timeout: cfg.DialTimeout,
		KeepAliveConfig: net.KeepAliveConfig{
			Enable: true, Idle: keepAliveIdle, Interval: keepAliveInterval, Count: keepAliveCount,
		},
		Control: setUserTimeout,
	}
}

// A conn is a connection that is watched for signs of life and for its end.
type conn struct {
	net.Conn
	server *server
	gone   func(*conn) // called once, when it is closed; may be nil
	closed atomic.Bool // by this side
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.server.alive()
		c.server.metrics.receivedBytes.Add(float64(n))
	}
	if err != nil && !c.closed.Load() {
		c.server.suspect()
	}
	return n, err
}

func (c *conn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if n > 0 {
		c.server.metrics.sentBytes.Add(float64(n))
	}
	if err != nil && !c.closed.Load() {
		c.server.suspect()
	}
	return n, err
}

func (c *conn) Close() error {
	if !c.closed.Swap(true) && c.gone != nil {
		c.gone(c)
	}
	return c.Conn.Close()
}

// abort closes the connection at once and for both sides: what is not sent yet
// has nobody to go to.
func (c *conn) abort() {
	c.closed.Store(true)
	if t, ok := c.Conn.(*net.TCPConn); ok {
		_ = t.SetLinger(0) // only fails when it is closed already
	}
	_ = c.Conn.Close() // nobody is left to be told
}
