// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	kjson "k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// The media types that are understood. Anything else is passed on untouched.
const (
	mediaJSON     = "application/json"
	mediaProtobuf = "application/vnd.kubernetes.protobuf"
)

var (
	nodeKind    = schema.GroupVersionKind{Version: "v1", Kind: "Node"}
	csiNodeKind = schema.GroupVersionKind{Group: "storage.k8s.io", Version: "v1", Kind: "CSINode"}
	leaseKind   = schema.GroupVersionKind{Group: "coordination.k8s.io", Version: "v1", Kind: "Lease"}
)

const (
	// maxObjectBytes bounds what is held of a request or an answer: the largest
	// object that etcd takes is 1.5 MiB.
	maxObjectBytes = 2 << 20
	// maxReviewBytes bounds reviews and token requests: a token, a name and a path.
	maxReviewBytes = 128 << 10
)

var (
	errTooLarge = errors.New("larger than an object can be")
	errMedia    = errors.New("a media type that is not understood")
)

// retrySeconds is the hint of a 503, the same as the proxy's.
const retrySeconds = 5

// buffer reads the body of req, so that it can be sent and looked at. A body
// beyond limit is not held: it is sent as it is and body is nil.
func buffer(req *http.Request, limit int64) (buffered *http.Request, body []byte, err error) {
	if req.Body == nil || req.Body == http.NoBody {
		return req, nil, nil
	}
	body, err = io.ReadAll(io.LimitReader(req.Body, limit+1))
	if err != nil {
		return nil, nil, fmt.Errorf("read the body of the request: %w", err)
	}
	r := *req
	if int64(len(body)) > limit {
		r.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(body), req.Body), req.Body}
		return &r, nil, nil
	}
	r.ContentLength = int64(len(body))
	r.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	r.Body, _ = r.GetBody()
	return &r, body, nil
}

// readBody takes the whole body out of resp and puts it back.
func readBody(resp *http.Response, limit int64) ([]byte, error) {
	body, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	if err == nil && int64(len(body)) > limit {
		err = errTooLarge
	}
	resp.Body.Close()
	if err != nil {
		return nil, fmt.Errorf("read the answer: %w", err)
	}
	resp.Body = io.NopCloser(bytes.NewReader(body))
	return body, nil
}

// message is a built-in object in both encodings.
type message interface {
	Unmarshal([]byte) error
	Marshal() ([]byte, error)
}

// An object is a message that is a Kubernetes object.
type object interface {
	message
	runtime.Object
}

// written is an object as a client wrote it.
type written struct {
	contentType string
	body        []byte
	kind        schema.GroupVersionKind
	into        object // to decode it, where that is needed
}

// localAnswer gives a client what it wrote, in the form that it asked for: the bytes
// that were written if that is their form. Nil if the client takes no whole object.
func localAnswer(req *http.Request, code int, w written, warning string) *http.Response {
	accepted := acceptable(req)
	if len(accepted) == 0 {
		return nil
	}
	media, body := accepted[0], w.body
	if media != mediaType(w.contentType) {
		err := decode(w.contentType, body, w.kind, w.into)
		if err == nil && media == mediaProtobuf {
			body, err = encodeProtobuf(w.kind, w.into)
		} else if err == nil {
			w.into.GetObjectKind().SetGroupVersionKind(w.kind)
			body, err = encodeJSON(w.into)
		}
		if err != nil {
			return nil
		}
	}
	return answer(req, code, media, body, sourceLocal, warning)
}

func mediaType(contentType string) string {
	if contentType == "" {
		return mediaJSON
	}
	media, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		return ""
	}
	return media
}

var protobufMagic = []byte("k8s\x00")

// decode reads an object of the given kind. JSON is read by the rules of the API
// server (case-sensitive, the last of two equal keys counts), so that both see
// the same object.
func decode(contentType string, body []byte, kind schema.GroupVersionKind, into message) error {
	var seen metav1.TypeMeta
	raw := body
	switch mediaType(contentType) {
	case mediaJSON:
		if err := kjson.Unmarshal(body, &seen); err != nil {
			return fmt.Errorf("decode %s: %w", kind.Kind, err)
		}
	case mediaProtobuf:
		var unknown runtime.Unknown
		rest, ok := bytes.CutPrefix(body, protobufMagic)
		if !ok {
			return errMedia
		}
		if err := unknown.Unmarshal(rest); err != nil {
			return fmt.Errorf("decode %s: %w", kind.Kind, err)
		}
		if unknown.ContentEncoding != "" {
			return errMedia
		}
		seen, raw = metav1.TypeMeta{Kind: unknown.Kind, APIVersion: unknown.APIVersion}, unknown.Raw
	default:
		return errMedia
	}
	// An empty kind is the resource's, as at the API server.
	if seen.Kind != "" && seen.GroupVersionKind() != kind {
		return fmt.Errorf("decode %s: it is a %s", kind.Kind, seen.GroupVersionKind())
	}
	var err error
	if mediaType(contentType) == mediaJSON {
		err = kjson.Unmarshal(raw, into)
	} else {
		err = into.Unmarshal(raw)
	}
	if err != nil {
		return fmt.Errorf("decode %s: %w", kind.Kind, err)
	}
	return nil
}

// encodeProtobuf is the counterpart of decode for one of the two encodings.
func encodeProtobuf(kind schema.GroupVersionKind, m message) ([]byte, error) {
	raw, err := m.Marshal()
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", kind.Kind, err)
	}
	unknown := runtime.Unknown{Raw: raw}
	unknown.APIVersion, unknown.Kind = kind.ToAPIVersionAndKind()
	b, err := unknown.Marshal()
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", kind.Kind, err)
	}
	return append(slices.Clone(protobufMagic), b...), nil
}

// encodeJSON is for objects whose TypeMeta is set.
func encodeJSON(object any) ([]byte, error) {
	b, err := json.Marshal(object)
	if err != nil {
		return nil, fmt.Errorf("encode: %w", err)
	}
	return append(b, '\n'), nil
}

// nameOf is metadata.name of an object of the given kind.
func nameOf(contentType string, body []byte, kind schema.GroupVersionKind) (string, bool) {
	var meta metav1.PartialObjectMetadata // every object has its metadata where this one has
	if body == nil || decode(contentType, body, kind, &meta) != nil {
		return "", false
	}
	return meta.Name, true
}

// acceptable are the media types of whole objects that a client takes and this
// package can make, best first.
func acceptable(req *http.Request) []string {
	values := req.Header["Accept"]
	if len(values) == 0 {
		return []string{mediaJSON}
	}
	type choice struct {
		media string
		q     float64
	}
	var choices []choice
	for element := range strings.SplitSeq(strings.Join(values, ","), ",") {
		media, params, err := mime.ParseMediaType(element)
		if err != nil || params["as"] != "" || params["stream"] != "" {
			continue
		}
		q := 1.0
		if v, ok := params["q"]; ok {
			if q, err = strconv.ParseFloat(v, 64); err != nil {
				continue
			}
		}
		switch media {
		case "*/*", "application/*":
			media = mediaJSON
		case mediaJSON, mediaProtobuf:
		default:
			continue
		}
		if q > 0 {
			choices = append(choices, choice{media, q})
		}
	}
	slices.SortStableFunc(choices, func(a, b choice) int {
		switch {
		case a.q > b.q:
			return -1
		case a.q < b.q:
			return 1
		}
		return 0
	})
	var media []string
	for _, c := range choices {
		media = append(media, c.media)
	}
	return media
}

// Where an answer came from, see proxy.SourceHeader.
const (
	sourceHeader = "Edgehub-Source"
	sourceReplay = "replay"
	sourceLocal  = "local"
)

// online reports whether an answer is the API server's of now, or of a live copy.
func online(resp *http.Response) bool {
	source := resp.Header.Get(sourceHeader)
	return source != sourceReplay && source != sourceLocal
}

// answer makes a response of this package's own, with the warning that says why.
// The code for warnings that client-go shows, 299, is for people only: kubelet
// would log one every ten seconds for as long as the link is down.
func answer(req *http.Request, code int, contentType string, body []byte, source, warning string) *http.Response {
	h := http.Header{}
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Cache-Control", "no-cache, private")
	h.Set(sourceHeader, source)
	h.Add("Warning", "110 edgehub "+strconv.Quote(warning))
	if strings.HasPrefix(req.UserAgent(), "kubectl") {
		h.Add("Warning", "299 edgehub "+strconv.Quote(warning))
	}
	return &http.Response{
		Status: strconv.Itoa(code) + " " + http.StatusText(code), StatusCode: code, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: h, Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)), Request: req,
	}
}

// get asks Next for an object on behalf of the caller of req, whose RequestInfo
// (of a create or of the object itself) is info.
func (c *Contract) get(req *http.Request, path string, info *request.RequestInfo) (*http.Response, error) {
	asked := *info
	asked.Verb, asked.Path, asked.Subresource = "get", path, ""
	asked.Name = path[strings.LastIndexByte(path, '/')+1:]
	asked.Parts = []string{info.Resource, asked.Name}
	u := &url.URL{Scheme: req.URL.Scheme, Host: req.URL.Host, Path: path}
	get, err := http.NewRequestWithContext(request.WithRequestInfo(req.Context(), &asked), http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, fmt.Errorf("ask for %s: %w", path, err)
	}
	get.Header.Set("Accept", mediaProtobuf+", "+mediaJSON)
	for _, name := range []string{"Authorization", "User-Agent"} {
		if v := req.Header[name]; v != nil {
			get.Header[name] = v
		}
	}
	return c.cfg.Next.RoundTrip(get)
}
