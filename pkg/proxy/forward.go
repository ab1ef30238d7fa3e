// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/textproto"
	"strings"
	"sync"
)

const (
	// A stream holds its buffer for as long as it lives, and there may be a
	// thousand; an event of most kinds fits.
	streamBufferBytes = 4 << 10
	// What there is plenty of is copied with a larger one, for as long as it lasts.
	copyBufferBytes = 128 << 10
)

var errSwitchedUnasked = errors.New("the API server changed protocols unasked")

// reads reports whether a request only reads and its answer is only a body: every
// get, list, watch and log. ReverseProxy is for the rest, and for who knows trailers.
func reads(req *http.Request) bool {
	if req.Method != http.MethodGet || req.ContentLength != 0 || req.Header["Te"] != nil || isUpgrade(req) {
		return false
	}
	info := infoFrom(req)
	return info.Verb == "watch" || info.Subresource == "log" || !isLongRunning(req)
}

// forward does for what reads finds what ReverseProxy does for everything: it
// sends the request on, without the headers that are between two hops only, and
// copies the answer. It knows when there is something to flush, and carries no
// trailers and no 1xx, which the API server does not send with what it reads out.
func (p *Proxy) forward(transport http.RoundTripper) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		out := *req
		out.Header, out.Host, out.RequestURI, out.Body, out.Close = endToEnd(req.Header), "", "", nil, false
		resp, err := transport.RoundTrip(&out)
		if err == nil && resp.StatusCode < http.StatusOK {
			resp.Body.Close()
			err = fmt.Errorf("%w: status %d", errSwitchedUnasked, resp.StatusCode)
		}
		if err != nil {
			writeError(w, req, p.unavailable(err))
			return
		}
		defer resp.Body.Close() // all was read, or nobody wants the rest
		removeHopByHop(resp.Header)
		maps.Copy(w.Header(), resp.Header)
		w.WriteHeader(resp.StatusCode)
		if isLongRunning(req) || trickles(resp) {
			err = copyStream(w, resp.Body)
		} else {
			err = copyWhole(w, resp)
		}
		if err != nil {
			writeError(w, req, err)
		}
	})
}

// trickles reports whether parts of an answer may be worth something before the
// rest is there: it has no length, and is no object and no list.
func trickles(resp *http.Response) bool {
	if resp.ContentLength >= 0 {
		return false
	}
	mediaType, parameters, _ := strings.Cut(resp.Header.Get("Content-Type"), ";")
	switch strings.TrimSpace(mediaType) {
	case "application/json", "application/vnd.kubernetes.protobuf":
		return strings.Contains(parameters, "stream=")
	}
	return true
}

// copyWhole leaves it to the server when to send. It sends at once what is larger
// than its own buffer.
func copyWhole(w io.Writer, resp *http.Response) error {
	c := copying{dst: w, src: resp.Body, flush: func() error { return nil }}
	if resp.ContentLength < 0 || resp.ContentLength > streamBufferBytes {
		c.grow()
	}
	return c.run()
}

// copyStream sends the headers, and then each piece, as soon as they are there.
func copyStream(w http.ResponseWriter, body io.Reader) error {
	c := copying{dst: w, src: body, flush: http.NewResponseController(w).Flush}
	if err := c.flush(); err != nil {
		return fmt.Errorf("write to the client: %w", err)
	}
	c.shrinks = true
	return c.run()
}

// A copying is a body on its way to a client.
type copying struct {
	dst     io.Writer
	src     io.Reader
	flush   func() error
	shrinks bool // back to the small buffer when there is nothing to copy

	small *[streamBufferBytes]byte
	large *[copyBufferBytes]byte // nil: not in use
}

func (c *copying) run() error {
	c.small = streamBuffers.Get().(*[streamBufferBytes]byte)
	defer streamBuffers.Put(c.small)
	defer c.shrink()
	for {
		buf := c.small[:]
		if c.large != nil {
			buf = c.large[:]
		}
		n, rerr := c.src.Read(buf)
		if n > 0 {
			_, err := c.dst.Write(buf[:n])
			if err == nil {
				err = c.flush()
			}
			if err != nil {
				return fmt.Errorf("write to the client: %w", err)
			}
		}
		switch {
		case errors.Is(rerr, io.EOF):
			return nil
		case rerr != nil:
			return fmt.Errorf("read the answer: %w", rerr)
		case n == len(c.small) && c.large == nil:
			c.grow()
		case n < len(c.small) && c.shrinks:
			c.shrink()
		}
	}
}

func (c *copying) grow() { c.large = copyBuffers.Get().(*[copyBufferBytes]byte) }

func (c *copying) shrink() {
	if c.large != nil {
		copyBuffers.Put(c.large)
		c.large = nil
	}
}

// endToEnd returns the headers of a request that go on to the next hop. Values
// are shared with h. Accept-Encoding is between two hops here, too: on the node
// nothing is compressed.
func endToEnd(h http.Header) http.Header {
	out := make(http.Header, len(h)+1)
	for name, values := range h {
		if !hopByHopHeader(name) && name != "Accept-Encoding" {
			out[name] = values
		}
	}
	if _, ok := h["User-Agent"]; !ok {
		out["User-Agent"] = []string{""} // not net/http's
	}
	return out
}

// removeHopByHop removes what is between this hop and the last only: the usual
// headers, and those that Connection names.
func removeHopByHop(h http.Header) {
	for _, v := range h["Connection"] {
		for name := range strings.SplitSeq(v, ",") {
			h.Del(textproto.TrimString(name))
		}
	}
	for name := range h {
		if hopByHopHeader(name) {
			delete(h, name)
		}
	}
}

// hopByHopHeader is httputil's list. A Connection header names nothing else in a
// request: see checkConnection.
func hopByHopHeader(name string) bool {
	switch name {
	case "Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer", "Transfer-Encoding", "Upgrade":
		return true
	}
	return false
}

var (
	copyBuffers   = sync.Pool{New: func() any { return new([copyBufferBytes]byte) }}
	streamBuffers = sync.Pool{New: func() any { return new([streamBufferBytes]byte) }}
)
