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
// and copies the answer, streams and upgrades included.
func (p *Proxy) reverseProxy(errorLog *log.Logger) http.Handler {
	return &httputil.ReverseProxy{
		Rewrite:        rewrite,
		Transport:      sourceReader{p.cfg.Transport},
		FlushInterval:  -1, // a watch event must not wait for the next one
		ModifyResponse: p.cfg.ModifyResponse,
		ErrorHandler: func(w http.ResponseWriter, req *http.Request, err error) {
			writeError(w, req, p.unavailable(err))
		},
		ErrorLog:   errorLog,
		BufferPool: bufferPool{},
	}
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
		resp.Request = req // ModifyResponse reads the context there
	}
	return resp, nil
}

const copyBufferBytes = 32 << 10

var copyBuffers = sync.Pool{New: func() any { return new([copyBufferBytes]byte) }}

type bufferPool struct{}

func (bufferPool) Get() []byte  { return copyBuffers.Get().(*[copyBufferBytes]byte)[:] }
func (bufferPool) Put(b []byte) { copyBuffers.Put((*[copyBufferBytes]byte)(b)) }
