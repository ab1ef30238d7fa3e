// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package pools

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/binary"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/protobuf/encoding/protowire"
	"k8s.io/client-go/rest"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/rig"
)

// A newerServer stands between link and API server as an API server of a later version: each
// pod that passes, in lists, gets and watches, has fields that nobody knows today. The
// same pod always gets the same ones, so who asks it directly sees what it sent to the
// hub. (The API server itself keeps no fields that it does not know.)
type newerServer struct{}

// The fields, in JSON with all that a decoder and encoder would write differently.
const (
	newerTop       = `"newerTop":[1.50,1e2,null,{"b":1,"a":"\u003c\u00fc\/"}],`
	newerSpec      = `"newerSpec":{"twice":1,"twice":12345678901234567890},`
	newerContainer = `"newerContainer":"\ud83d\ude00",`
)

// newerFields are for any place in protobuf. Their numbers are not in use.
var newerFields = protowire.AppendString(protowire.AppendTag(protowire.AppendVarint(protowire.AppendTag(nil, 1999, protowire.VarintType), 7), 2000, protowire.BytesType), "of a later version")

// start serves for the length of the test, and returns the address. It asks the API server
// with the node's certificate for whoever has shown it, and with no certificate for others.
func (n *newerServer) start(t testing.TB, cp *controlplane.ControlPlane, nodeConfig *rest.Config) string {
	t.Helper()
	serving, err := tls.LoadX509KeyPair(filepath.Join(cp.Dir(), "pki", "apiserver.crt"), filepath.Join(cp.Dir(), "pki", "apiserver.key"))
	if err != nil {
		t.Fatal(err)
	}
	target, err := url.Parse(cp.URL())
	if err != nil {
		t.Fatal(err)
	}
	asNode, err := rest.TransportFor(nodeConfig)
	if err != nil {
		t.Fatal(err)
	}
	others, err := rest.TransportFor(&rest.Config{Host: cp.URL(), TLSClientConfig: rest.TLSClientConfig{CAFile: cp.CAFile()}})
	if err != nil {
		t.Fatal(err)
	}
	quiet := log.New(io.Discard, "", 0) // a link that is cut is no news
	proxy := func(transport http.RoundTripper) http.Handler {
		return &httputil.ReverseProxy{
			ErrorLog: quiet, Transport: transport, FlushInterval: -1, ModifyResponse: n.modify,
			Rewrite: func(r *httputil.ProxyRequest) {
				r.SetURL(target)
				r.Out.Header.Set("Accept-Encoding", "identity")
			},
			ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
		}
	}
	node, other := proxy(asNode), proxy(others)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if len(req.TLS.PeerCertificates) > 0 {
			node.ServeHTTP(w, req)
		} else {
			other.ServeHTTP(w, req)
		}
	}))
	server.EnableHTTP2, server.Config.ErrorLog = true, quiet
	server.TLS = &tls.Config{Certificates: []tls.Certificate{serving}, MinVersion: tls.VersionTLS12, ClientAuth: tls.RequestClientCert}
	server.StartTLS()
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return server.Listener.Addr().String()
}

var podsPath = regexp.MustCompile(`^/api/v1/(namespaces/[^/]+/)?pods(/[^/]+)?$`)

func (n *newerServer) modify(resp *http.Response) error {
	if resp.Request.Method != http.MethodGet || resp.StatusCode != http.StatusOK || !podsPath.MatchString(resp.Request.URL.Path) {
		return nil
	}
	protobuf := strings.Contains(resp.Header.Get("Content-Type"), "protobuf")
	if watch := resp.Request.URL.Query().Get("watch"); watch != "" && watch != "0" && watch != "false" {
		body := resp.Body
		r, w := io.Pipe()
		go func() { w.CloseWithError(n.copyFrames(w, body, protobuf)) }()
		resp.Body = &frames{PipeReader: r, source: body}
		return nil
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if err := resp.Body.Close(); err != nil {
		return err
	}
	body = n.add(body, protobuf)
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	resp.Header.Set("Content-Length", strconv.Itoa(len(body)))
	return nil
}

// frames are those of a watch, with more in them.
type frames struct {
	*io.PipeReader
	source io.Closer
}

func (f *frames) Close() error {
	_ = f.PipeReader.Close() // it never fails
	return f.source.Close()
}

func (n *newerServer) copyFrames(w io.Writer, body io.Reader, protobuf bool) error {
	r := bufio.NewReader(body)
	for {
		frame, err := readFrame(r, protobuf)
		if err != nil {
			return err
		}
		if protobuf {
			frame = edit(frame[4:], func(number protowire.Number, v []byte) []byte {
				if number != 2 {
					return v
				}
				return edit(v, func(_ protowire.Number, v []byte) []byte { return n.add(v, true) })
			})
			frame = append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...)
		} else {
			frame = n.add(frame, false)
		}
		if _, err := w.Write(frame); err != nil {
			return err
		}
	}
}

// readFrame reads a frame of a watch, all its bytes.
func readFrame(r *bufio.Reader, protobuf bool) ([]byte, error) {
	if !protobuf {
		return r.ReadBytes('\n')
	}
	frame := make([]byte, 4)
	if _, err := io.ReadFull(r, frame); err != nil {
		return nil, err
	}
	frame = append(frame, make([]byte, binary.BigEndian.Uint32(frame))...)
	_, err := io.ReadFull(r, frame[4:])
	return frame, err
}

// add adds the fields to a pod, a list of pods or, in JSON, a frame.
func (n *newerServer) add(b []byte, protobuf bool) []byte {
	if !protobuf {
		// Within a string the quotes would have a backslash.
		b = bytes.ReplaceAll(b, []byte(`"spec":{`), []byte(newerTop+`"spec":{`+newerSpec))
		return bytes.ReplaceAll(b, []byte(`"containers":[{`), []byte(`"containers":[{`+newerContainer))
	}
	raw, ok := bytes.CutPrefix(b, []byte("k8s\x00"))
	if !ok {
		return b
	}
	kind := ""
	raw = edit(raw, func(number protowire.Number, v []byte) []byte {
		switch {
		case number == 1: // TypeMeta, which comes first
			_ = rig.Fields(v, func(n protowire.Number, v []byte) error {
				if n == 2 {
					kind = string(v)
				}
				return nil
			})
		case number == 2 && kind == "Pod":
			return newerPod(v)
		case number == 2 && kind == "PodList":
			return edit(v, func(number protowire.Number, v []byte) []byte {
				if number == 2 {
					return newerPod(v)
				}
				return v
			})
		}
		return v
	})
	return append([]byte("k8s\x00"), raw...)
}

func newerPod(pod []byte) []byte {
	return append(edit(pod, func(number protowire.Number, v []byte) []byte {
		if number != 2 {
			return v
		}
		return append(edit(v, func(number protowire.Number, v []byte) []byte {
			if number != 2 { // a container
				return v
			}
			return append(bytes.Clone(v), newerFields...)
		}), newerFields...)
	}), newerFields...)
}

// edit copies a message with other values for its length-delimited fields.
func edit(b []byte, f func(protowire.Number, []byte) []byte) (out []byte) {
	for len(b) > 0 {
		n, t, w := protowire.ConsumeField(b)
		if w < 0 {
			panic(protowire.ParseError(w)) // it is the API server's
		}
		field := b[:w]
		b = b[w:]
		if t != protowire.BytesType {
			out = append(out, field...)
			continue
		}
		v, _ := protowire.ConsumeBytes(field[protowire.SizeTag(n):])
		out = protowire.AppendBytes(protowire.AppendTag(out, n, t), f(n, v))
	}
	return out
}
