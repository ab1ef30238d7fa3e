// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package upstream

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// maxServers limits the servers because each one is probed for as long as the
// process lives.
const maxServers = 16

// Config is what New needs. Servers and the three files are required; a zero in
// any other field means its default.
type Config struct {
	// Servers are the API servers as https://host:port, the preferred one first;
	// without a port it is 443. Nothing but scheme, host and port may be given.
	Servers []string
	// CAFile holds the certificates, PEM, of which one must have signed each
	// server's. The system's are never used.
	CAFile string
	// CertFile and KeyFile hold the node's client certificate, with its
	// intermediates, and its key, PEM. They may be the same file.
	CertFile, KeyFile string

	// ProbePeriod is the longest time between two probes of a server that is up,
	// 5 s.
	ProbePeriod time.Duration
	// ProbeTimeout is how long a probe waits for its answer, 3 s, counted anew from
	// each byte that still comes from the server.
	ProbeTimeout time.Duration
	// BackoffMin and BackoffMax bound the time between two probes of a server that
	// is down, 250 ms and 2 s.
	BackoffMin, BackoffMax time.Duration
	// PingAfter is the silence on an HTTP/2 connection after which it is pinged,
	// PingTimeout how long the answer may take, 3 s each.
	PingAfter, PingTimeout time.Duration
	// DialTimeout limits the TCP handshake, 5 s; TLSTimeout the TLS handshake, 10 s.
	DialTimeout, TLSTimeout time.Duration
	// ReloadPeriod is the time between two looks at the files, 10 s.
	ReloadPeriod time.Duration
	// FailBackAfter is how many probes in a row must be good before a server takes
	// over from a working one that stands later in Servers, 3.
	FailBackAfter int

	// Registerer takes the metrics; nil: none.
	Registerer prometheus.Registerer
}

func (c Config) withDefaults() Config {
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{
		{&c.ProbePeriod, 5 * time.Second},
		{&c.ProbeTimeout, 3 * time.Second},
		{&c.BackoffMin, 250 * time.Millisecond},
		{&c.BackoffMax, 2 * time.Second},
		{&c.PingAfter, 3 * time.Second},
		{&c.PingTimeout, 3 * time.Second},
		{&c.DialTimeout, 5 * time.Second},
		{&c.TLSTimeout, 10 * time.Second},
		{&c.ReloadPeriod, 10 * time.Second},
	} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if c.FailBackAfter == 0 {
		c.FailBackAfter = 3
	}
	return c
}

// check looks at everything but servers and files.
func (c Config) check() error {
	var errs []error
	for _, d := range []struct {
		name  string
		value time.Duration
	}{
		{"ProbePeriod", c.ProbePeriod}, {"ProbeTimeout", c.ProbeTimeout},
		{"BackoffMin", c.BackoffMin}, {"BackoffMax", c.BackoffMax},
		{"PingAfter", c.PingAfter}, {"PingTimeout", c.PingTimeout},
		{"DialTimeout", c.DialTimeout}, {"TLSTimeout", c.TLSTimeout},
		{"ReloadPeriod", c.ReloadPeriod},
	} {
		if d.value < 0 {
			errs = append(errs, fmt.Errorf("%s: must not be negative, is %v", d.name, d.value))
		}
	}
	if c.BackoffMin > c.BackoffMax {
		errs = append(errs, fmt.Errorf("BackoffMin: %v is more than BackoffMax, %v", c.BackoffMin, c.BackoffMax))
	}
	if c.FailBackAfter < 0 {
		errs = append(errs, fmt.Errorf("FailBackAfter: must not be negative, is %d", c.FailBackAfter))
	}
	return errors.Join(errs...)
}

// hosts returns host:port of each server.
func (c Config) hosts() ([]string, error) {
	if len(c.Servers) == 0 {
		return nil, errors.New("servers: at least one is needed")
	}
	if len(c.Servers) > maxServers {
		return nil, fmt.Errorf("servers: %d are more than the %d allowed", len(c.Servers), maxServers)
	}
	var hosts []string
	var errs []error
	seen := map[string]bool{}
	for i, server := range c.Servers {
		host, err := parseServer(server)
		if err == nil && seen[host] {
			err = errors.New("is given twice")
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("servers[%d] %q: %w", i, redacted(server), err))
			continue
		}
		seen[host] = true
		hosts = append(hosts, host)
	}
	return hosts, errors.Join(errs...)
}

// redacted cuts what could be a password out of a URL that may not even parse.
func redacted(server string) string {
	at := strings.LastIndexByte(server, '@')
	if at < 0 {
		return server
	}
	scheme, _, ok := strings.Cut(server, "://")
	if !ok {
		return "xxxxx" + server[at:]
	}
	return scheme + "://xxxxx" + server[at:]
}

// parseServer returns the lower-case host:port of a server's URL.
func parseServer(server string) (string, error) {
	u, err := url.Parse(server)
	if err != nil {
		var parse *url.Error
		if errors.As(err, &parse) {
			err = parse.Err // without the URL, which may hold a password
		}
		return "", fmt.Errorf("is not a URL: %w", err)
	}
	switch {
	case u.Scheme == "http":
		return "", errors.New("http is not encrypted; use https")
	case u.Scheme != "https":
		return "", errors.New("must begin with https://")
	case u.User != nil:
		return "", errors.New("must not hold a user or password")
	case u.Hostname() == "":
		return "", errors.New("has no host")
	case u.Path != "" && u.Path != "/":
		return "", fmt.Errorf("must not have a path, has %q", u.Path)
	case u.RawQuery != "" || u.ForceQuery || u.Fragment != "" || strings.HasSuffix(server, "#"):
		return "", errors.New("must not have a query or fragment")
	}
	port := u.Port()
	if port == "" {
		if strings.HasSuffix(u.Host, ":") {
			return "", errors.New("has no port after the colon")
		}
		port = "443"
	}
	if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
		return "", fmt.Errorf("port %q is not between 1 and 65535", port)
	}
	return net.JoinHostPort(strings.ToLower(u.Hostname()), port), nil
}
