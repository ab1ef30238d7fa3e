// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"bytes"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"
)

// protoMagic starts every protobuf body and the object of every watch frame; a
// runtime.Unknown follows.
var protoMagic = []byte("k8s\x00")

// Field numbers, from the generated.proto files of k8s.io/apimachinery.
const (
	unknownTypeMeta        = 1
	unknownRaw             = 2
	unknownContentEncoding = 3
	unknownContentType     = 4

	typeMetaAPIVersion = 1
	typeMetaKind       = 2

	watchEventType   = 1
	watchEventObject = 2
	rawExtensionRaw  = 1

	listMetaResourceVersion    = 2
	listMetaContinue           = 3
	listMetaRemainingItemCount = 4
	listMetaShardInfo          = 5

	objectMeta = 1 // in every object

	metaName              = 1
	metaNamespace         = 3
	metaUID               = 5
	metaResourceVersion   = 6
	metaGeneration        = 7
	metaDeletionTimestamp = 9
	metaLabels            = 11
	metaAnnotations       = 12

	mapKey   = 1
	mapValue = 2
)

// protoMessage walks the fields of one message in memory, in order. Groups and
// unknown fields are stepped over; what does not parse is an error.
type protoMessage struct {
	b []byte
	i int // offset behind what has been read

	// The field that next found.
	num   protowire.Number
	typ   protowire.Type
	start int    // offset of its tag in b
	at    int    // offset of bytes in b
	bytes []byte // contents of a length-delimited field
	value uint64 // of a varint field
}

func newProtoMessage(b []byte) *protoMessage { return &protoMessage{b: b} }

func (m *protoMessage) next() (bool, error) {
	if m.i == len(m.b) {
		return false, nil
	}
	m.start = m.i
	num, typ, n := protowire.ConsumeTag(m.b[m.i:])
	if n < 0 {
		return false, protoError(n)
	}
	m.num, m.typ, m.bytes, m.i = num, typ, nil, m.i+n
	switch typ {
	case protowire.BytesType:
		m.bytes, n = protowire.ConsumeBytes(m.b[m.i:])
	case protowire.VarintType:
		m.value, n = protowire.ConsumeVarint(m.b[m.i:])
	default:
		n = protowire.ConsumeFieldValue(num, typ, m.b[m.i:])
	}
	if n < 0 {
		return false, protoError(n)
	}
	m.i += n
	m.at = m.i - len(m.bytes)
	return true, nil
}

// data is the field as string, bytes or message.
func (m *protoMessage) data() ([]byte, error) {
	if m.typ != protowire.BytesType {
		return nil, fmt.Errorf("protobuf field %d has wire type %d: %w", m.num, m.typ, ErrMalformed)
	}
	return m.bytes, nil
}

func (m *protoMessage) text() (string, error) {
	b, err := m.data()
	return string(b), err
}

// number is the field as an integer.
func (m *protoMessage) number() (int64, error) {
	if m.typ != protowire.VarintType {
		return 0, fmt.Errorf("protobuf field %d has wire type %d: %w", m.num, m.typ, ErrMalformed)
	}
	return int64(m.value), nil
}

func protoError(code int) error {
	return fmt.Errorf("protobuf: %w: %w", protowire.ParseError(code), ErrMalformed)
}

// protoOnce finds the only occurrence of a message field, nil if there is none.
// A second one would have to be merged with the first; no API server sends that,
// and it is refused.
func protoOnce(b []byte, num protowire.Number) (field *protoMessage, err error) {
	for m := newProtoMessage(b); ; {
		ok, err := m.next()
		if err != nil {
			return nil, err
		}
		if !ok {
			return field, nil
		}
		if m.num != num {
			continue
		}
		if _, err := m.data(); err != nil {
			return nil, err
		}
		if field != nil {
			return nil, fmt.Errorf("protobuf field %d occurs twice: %w", num, ErrMalformed)
		}
		found := *m
		field = &found
	}
}

// readUnknown takes apart k8s\0 + runtime.Unknown. raw aliases wire.
func readUnknown(wire []byte) (apiVersion, kind string, raw []byte, err error) {
	body, ok := bytes.CutPrefix(wire, protoMagic)
	if !ok {
		return "", "", nil, fmt.Errorf("no protobuf envelope: %w", ErrMalformed)
	}
	var seen uint
	for m := newProtoMessage(body); ; {
		ok, err := m.next()
		if err != nil {
			return "", "", nil, err
		}
		if !ok {
			break
		}
		if m.num > unknownContentType {
			return "", "", nil, fmt.Errorf("unknown field %d in protobuf envelope: %w", m.num, ErrMalformed)
		}
		b, err := m.data()
		if err != nil {
			return "", "", nil, err
		}
		if seen&(1<<m.num) != 0 {
			return "", "", nil, fmt.Errorf("field %d occurs twice in protobuf envelope: %w", m.num, ErrMalformed)
		}
		seen |= 1 << m.num
		switch m.num {
		case unknownTypeMeta:
			apiVersion, kind, err = readTypeMeta(b)
		case unknownRaw:
			raw = b
		default:
			err = checkContent(m.num, b)
		}
		if err != nil {
			return "", "", nil, err
		}
	}
	if seen&(1<<unknownTypeMeta) == 0 || kind == "" || apiVersion == "" {
		return "", "", nil, fmt.Errorf("protobuf envelope without type: %w", ErrMalformed)
	}
	return apiVersion, kind, raw, nil
}

// checkContent refuses what kube-apiserver never says about its own objects.
func checkContent(num protowire.Number, value []byte) error {
	if len(value) == 0 || num == unknownContentType && string(value) == mediaTypeProtobuf {
		return nil
	}
	return fmt.Errorf("protobuf envelope with contents encoded as %.64q: %w", value, ErrMalformed)
}

func readTypeMeta(b []byte) (apiVersion, kind string, err error) {
	for m := newProtoMessage(b); ; {
		ok, err := m.next()
		if err != nil || !ok {
			return apiVersion, kind, err
		}
		switch m.num {
		case typeMetaAPIVersion:
			apiVersion, err = m.text()
		case typeMetaKind:
			kind, err = m.text()
		}
		if err != nil {
			return "", "", err
		}
	}
}

// The lengths of what the append functions below write.

func protoFieldLen(n int) int { return 1 + protowire.SizeBytes(n) }

func typeMetaLen(apiVersion, kind string) int {
	return protoFieldLen(len(apiVersion)) + protoFieldLen(len(kind))
}

func unknownLen(apiVersion, kind string, rawLen int) int {
	return len(protoMagic) + protoFieldLen(typeMetaLen(apiVersion, kind)) + protoFieldLen(rawLen) + len(unknownEnd)
}

// unknownEnd is an empty contentEncoding and contentType, which the API server's
// serializer always writes.
const unknownEnd = "\x1a\x00\x22\x00"

// appendUnknownHead writes everything up to the rawLen bytes of the object, which
// the caller appends, and then unknownEnd.
func appendUnknownHead(dst []byte, apiVersion, kind string, rawLen int) []byte {
	dst = append(dst, protoMagic...)
	dst = appendProtoHead(dst, unknownTypeMeta, typeMetaLen(apiVersion, kind))
	dst = appendProtoString(dst, typeMetaAPIVersion, apiVersion)
	dst = appendProtoString(dst, typeMetaKind, kind)
	return appendProtoHead(dst, unknownRaw, rawLen)
}

func appendProtoHead(dst []byte, num protowire.Number, n int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(dst, num, protowire.BytesType), uint64(n))
}

func appendProtoString(dst []byte, num protowire.Number, s string) []byte {
	return append(appendProtoHead(dst, num, len(s)), s...)
}
