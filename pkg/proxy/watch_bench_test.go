// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"runtime"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// silent is the body of a watch of which nothing happens.
type silent struct{ done <-chan struct{} }

func (s silent) Read([]byte) (int, error) { <-s.done; return 0, io.EOF }
func (s silent) Close() error             { return nil }

// BenchmarkIdleWatch tells what a watch costs in memory in which nothing happens:
// all that is the proxy's and net/http's, one connection for all, nothing of the
// client's and of the cache's.
func BenchmarkIdleWatch(b *testing.B) {
	const watches = 1000
	cfg := config(transportFunc(func(req *http.Request) (*http.Response, error) {
		resp := reply(200, "")
		resp.Body, resp.ContentLength = silent{req.Context().Done()}, -1
		return resp, nil
	}))
	for b.Loop() {
		r := startWith(b.Context(), b, cfg)
		conn := r.dialHTTP2()
		f := http2.NewFramer(conn, conn)
		before := inUse()
		var headers bytes.Buffer
		encoder := hpack.NewEncoder(&headers)
		for i := range watches {
			headers.Reset()
			for _, h := range [][2]string{
				{":method", "GET"}, {":scheme", "https"}, {":authority", "127.0.0.1:10268"},
				{":path", fmt.Sprintf("/api/v1/namespaces/default/secrets?allowWatchBookmarks=true&fieldSelector=metadata.name%%3Dsecret-%d&resourceVersion=12345&timeoutSeconds=428&watch=true", i)},
				{"accept", "application/vnd.kubernetes.protobuf,application/json"}, {"user-agent", "kubelet/v1.36.0 (linux/amd64) kubernetes/1234567"}, {"accept-encoding", "gzip"},
			} {
				encoder.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
			}
			if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: uint32(2*i + 1), BlockFragment: headers.Bytes(), EndHeaders: true, EndStream: true}); err != nil {
				b.Fatal(err)
			}
		}
		for answered := 0; answered < watches; {
			frame, err := f.ReadFrame()
			if err != nil {
				b.Fatal(err)
			}
			if _, ok := frame.(*http2.HeadersFrame); ok {
				answered++
			}
		}
		heap, stack := inUse().minus(before)
		b.ReportMetric(float64(heap)/watches, "heapB/watch")
		b.ReportMetric(float64(stack)/watches, "stackB/watch")
		conn.Close()
		if err := r.stop(); err != nil {
			b.Fatal(err)
		}
	}
}

type memory struct{ heap, stack int64 }

func (m memory) minus(before memory) (heap, stack int64) {
	return m.heap - before.heap, m.stack - before.stack
}

func inUse() memory {
	runtime.GC()
	runtime.GC() // the first one leaves pools alone
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return memory{int64(m.HeapAlloc), int64(m.StackInuse)}
}
