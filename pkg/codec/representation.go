// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package codec reads and writes what kube-apiserver and its clients say to
// each other, without turning it into Go types and back: it splits lists and
// watch streams into objects, strips and restores the envelope that all objects
// of a list share, and reads the few metadata fields that a cache needs from the
// raw bytes. An object is never re-encoded, so fields that this binary has never
// heard of survive.
//
// The cache calls it for everything that passes by. All parsers take hostile
// input: they return an error, never panic, and hold at most one object plus
// what their limit allows. The package does no I/O of its own, starts no
// goroutine and logs nothing.
//
// Caveat: an object in its stored ("bare") form is meaningless without its
// [Shape], which is kept once a list.
package codec

import (
	"errors"
	"fmt"
	"mime"
	"strings"

	"github.com/munnerz/goautoneg"
)

// Errors that callers tell apart with errors.Is.
var (
	// ErrMalformed means that the bytes are not what they were said to be.
	ErrMalformed = errors.New("malformed")
	// ErrTooLarge means that an object or a frame is larger than the limit.
	ErrTooLarge = errors.New("larger than the limit")
	// ErrNotList means that a body is well formed so far but no list of objects:
	// a single object, a Status, a Table.
	ErrNotList = errors.New("not a list of objects")
	// ErrUnsupportedField means that a field selector asks for something that
	// cannot be answered from the object at hand. It says nothing about whether
	// the API server would answer it.
	ErrUnsupportedField = errors.New("field selector is not supported")
)

const (
	mediaTypeJSON     = "application/json"
	mediaTypeProtobuf = "application/vnd.kubernetes.protobuf"
	mediaTypeYAML     = "application/yaml"
	mediaTypeCBOR     = "application/cbor"

	metaGroup       = "meta.k8s.io"
	kindPartial     = "PartialObjectMetadata"
	kindPartialList = "PartialObjectMetadataList"
	kindTable       = "Table"
	kindStatus      = "Status"
)

// Representation is how objects travel. It is comparable.
type Representation struct {
	// Protobuf is false for JSON.
	Protobuf bool
	// Partial is "" for whole objects, and "v1" or "v1beta1" for
	// PartialObjectMetadata of that version of meta.k8s.io.
	Partial string
}

// String is a stable text form that [ParseRepresentation] reads back: json,
// protobuf, json-partial-v1, protobuf-partial-v1beta1 and so on.
func (r Representation) String() string {
	s := "json"
	if r.Protobuf {
		s = "protobuf"
	}
	if r.Partial != "" {
		s += "-partial-" + r.Partial
	}
	return s
}

// ParseRepresentation reads the text form of [Representation.String].
func ParseRepresentation(s string) (Representation, error) {
	for _, protobuf := range []bool{false, true} {
		for _, partial := range []string{"", "v1", "v1beta1"} {
			if r := (Representation{Protobuf: protobuf, Partial: partial}); r.String() == s {
				return r, nil
			}
		}
	}
	return Representation{}, fmt.Errorf("representation %q: %w", s, ErrMalformed)
}

// Accept is the header that asks for exactly this representation and nothing
// else. list is true for a LIST alone. A GET and a WATCH (WatchList too) ask for
// single objects: kube-apiserver sends whole objects, not partial ones, to a watch
// that asks for PartialObjectMetadataList.
func (r Representation) Accept(list bool) string {
	if r.Partial == "" {
		return r.ContentType()
	}
	kind := kindPartial
	if list {
		kind = kindPartialList
	}
	return r.ContentType() + ";as=" + kind + ";g=" + metaGroup + ";v=" + r.Partial
}

// ContentType is the Content-Type of the answer to a get or list.
func (r Representation) ContentType() string {
	if r.Protobuf {
		return mediaTypeProtobuf
	}
	return mediaTypeJSON
}

// WatchContentType is the Content-Type of the answer to a watch.
func (r Representation) WatchContentType() string {
	if r.Protobuf {
		return mediaTypeProtobuf + ";stream=watch"
	}
	return mediaTypeJSON
}

// FromContentType tells the representation from the Content-Type of an answer.
// Whether objects are partial cannot be seen there. It is false for everything
// but plain JSON and protobuf, and for transformed documents, which name what
// they are in the parameter "as" (aggregated discovery).
func FromContentType(contentType string) (Representation, bool) {
	switch contentType { // as the API server writes them
	case mediaTypeJSON:
		return Representation{}, true
	case mediaTypeProtobuf:
		return Representation{Protobuf: true}, true
	}
	mediaType, params, err := mime.ParseMediaType(contentType)
	if err != nil || params["as"] != "" {
		return Representation{}, false
	}
	switch mediaType {
	case mediaTypeJSON:
		return Representation{}, true
	case mediaTypeProtobuf:
		return Representation{Protobuf: true}, true
	}
	return Representation{}, false
}

// Accepted is one form in which a client takes an answer. It is comparable.
type Accepted struct {
	// Representation counts only if Other is empty.
	Representation
	// Other, if not empty, is a media type that is no Representation, with the
	// parameters that matter, for example
	// "application/json;as=Table;v=v1;g=meta.k8s.io".
	Other string
}

// Resource reports whether kube-apiserver can answer a get, list or watch of API
// resources in this form. It is false for the media types that only other
// endpoints have (OpenAPI, aggregated discovery), which resource endpoints skip.
func (a Accepted) Resource() bool {
	if a.Other == "" {
		return true
	}
	mediaType, params, _ := strings.Cut(a.Other, ";")
	as, ofMeta := "", false
	for _, version := range []string{"v1", "v1beta1"} {
		if kind, ok := strings.CutSuffix(params, ";v="+version+";g="+metaGroup); ok {
			as, ofMeta = strings.TrimPrefix(kind, "as="), true
		}
	}
	partial := as == kindPartial || as == kindPartialList
	switch mediaType {
	case mediaTypeJSON:
		return ofMeta && as == kindTable
	case mediaTypeYAML:
		return params == "" || ofMeta && (as == kindTable || partial)
	case mediaTypeCBOR:
		return params == "" || ofMeta && partial
	}
	return false
}

// ParseAccept reads the values of a request's Accept header, in the order of
// preference in which kube-apiserver tries them: by q, concrete before wildcard,
// otherwise as written. Like kube-apiserver it looks at the first header line only.
// No header, an empty one, */* and application/* mean JSON. Clauses with
// parameters that kube-apiserver refuses are left out; an empty result is its 406.
func ParseAccept(header []string) []Accepted {
	if len(header) == 0 || header[0] == "" {
		return []Accepted{{}}
	}
	var accepted []Accepted
	for _, clause := range goautoneg.ParseAccept(header[0]) {
		if a, ok := acceptClause(clause); ok {
			accepted = append(accepted, a)
		}
	}
	return accepted
}

func acceptClause(clause goautoneg.Accept) (Accepted, bool) {
	mediaType := clause.Type + "/" + clause.SubType
	if mediaType == "*/*" || mediaType == "application/*" {
		mediaType = mediaTypeJSON // the first that the API server offers
	}
	if strings.Contains(mediaType, "*") {
		return Accepted{}, false
	}
	if stream := clause.Params["stream"]; stream != "" && stream != "watch" {
		return Accepted{}, false
	}
	if sv := clause.Params["sv"]; sv != "" && sv != "v1" {
		return Accepted{}, false
	}
	_, hasAs := clause.Params["as"]
	_, hasG := clause.Params["g"]
	_, hasV := clause.Params["v"]
	as, g, v := clause.Params["as"], clause.Params["g"], clause.Params["v"]
	encoded := mediaType == mediaTypeJSON || mediaType == mediaTypeProtobuf
	if !hasAs && !hasG && !hasV {
		if encoded {
			return Accepted{Representation: Representation{Protobuf: mediaType == mediaTypeProtobuf}}, true
		}
		return Accepted{Other: mediaType}, true
	}
	if encoded && g == metaGroup && (v == "v1" || v == "v1beta1") {
		switch as {
		case kindPartial, kindPartialList:
			return Accepted{Representation: Representation{Protobuf: mediaType == mediaTypeProtobuf, Partial: v}}, true
		case kindTable:
			if mediaType == mediaTypeProtobuf {
				return Accepted{}, false
			}
		}
	}
	return Accepted{Other: mediaType + ";as=" + as + ";v=" + v + ";g=" + g}, true
}
