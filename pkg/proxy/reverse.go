// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"log"
	"net/http"
	"net/http/httputil"
	"sync"
)

// SourceHeader is how a transport says where its answer came from: "upstream",
// "feed" (a live copy), "replay" (a record, the link is down) or "local" (made on
// this node). It never reaches a client; an answer without it is upstream's.
const SourceHeader = "Edgehub-Source"

// reverseProxy is the end of the chain: it hands the request to the transport
// and copies the answer. What only reads goes a shorter way than what writes,
// upgrades, or is proxied: most requests do.
func (p *Proxy) reverseProxy(errorLog *log.Logger) http.Handler {
	transport := sourceReader{p.cfg.Transport}
	forward := p.forward(transport)
	everything := &httputil.ReverseProxy{
		Rewrite:       rewrite,
		Transport:     transport,
		FlushInterval: -1, // nobody knows what a conversation waits for
		ErrorHandler: func(w http.ResponseWriter, req *http.Request, err error) {
			writeError(w, req, p.unavailable(err))
		},
		ErrorLog:   errorLog,
		BufferPool: bufferPool{},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if reads(req) {
			forward.ServeHTTP(w, req)
			return
		}
		everything.ServeHTTP(w, req)
	})
}

// rewrite leaves the choice of the server to the transport. ReverseProxy has
// removed hop-by-hop and forwarding headers before it calls.
func rewrite(r *httputil.ProxyRequest) {
	r.Out.URL.Scheme = "https"
	r.Out.URL.Host = "upstream.invalid"
	r.Out.Host = ""
}

// unavailable turns the transport's word for "there is nobody to ask" into a Status.
func (p *Proxy) unavailable(err error) error {
	if isStatus(err) || !p.cfg.Unavailable(err) {
		return err
	}
	return newOffline(err)
}

// sourceReader takes SourceHeader off every answer and notes it for the metrics.
type sourceReader struct{ next http.RoundTripper }

func (s sourceReader) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := s.next.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if resp == nil || resp.Body == nil {
		return nil, errors.New("transport gave neither an answer nor an error")
	}
	source := resp.Header.Get(SourceHeader)
	resp.Header.Del(SourceHeader)
	switch source {
	case "feed", "replay", "local":
	default:
		source = "upstream"
	}
	if r := responseFrom(req.Context()); r != nil {
		r.source = source
	}
	if resp.Request == nil {
		resp.Request = req
	}
	return resp, nil
}

// proxiedBufferBytes is for what nobody knows: an answer to a write, a large
// download through a Service, or a stream of small parts.
const proxiedBufferBytes = 32 << 10

var proxiedBuffers = sync.Pool{New: func() any { return new([proxiedBufferBytes]byte) }}

type bufferPool struct{}

func (bufferPool) Get() []byte  { return proxiedBuffers.Get().(*[proxiedBufferBytes]byte)[:] }
func (bufferPool) Put(b []byte) { proxiedBuffers.Put((*[proxiedBufferBytes]byte)(b)) }
