// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"iter"

	"google.golang.org/protobuf/encoding/protowire"
)

// itemsFirst reports whether a protobuf list has its items before its ListMeta:
// they are fields 1 and 2 there, everywhere else 2 and 1.
func (s Shape) itemsFirst() bool { return s.Partial == "v1beta1" }

func (s Shape) itemsField() protowire.Number {
	if s.itemsFirst() {
		return 1
	}
	return 2
}

// ListLen is the exact number of bytes of a list: of AppendListHead, of one
// AppendListItem for each length in bareLens, and of AppendListTail.
func (s Shape) ListLen(resourceVersion string, bareLens iter.Seq[int]) int64 {
	if s.Protobuf {
		return int64(unknownLen(s.APIVersion, s.ListKind, int(s.protoListLen(resourceVersion, bareLens))))
	}
	n := int64(len(s.AppendListHead(nil, resourceVersion, bareLens)) + len(s.AppendListTail(nil, resourceVersion)))
	items := int64(0)
	for bareLen := range bareLens {
		items++
		if s.Partial != "" {
			bareLen = s.wireLen(bareLen)
		}
		n += int64(bareLen)
	}
	return n + max(items-1, 0) // commas
}

// AppendListHead appends what stands before the first item. In protobuf it holds
// the length of all that follows, hence bareLens, the lengths of all items in
// order; JSON does not look at them. The bytes are those of kube-apiserver for a
// list whose metadata holds nothing but a resourceVersion, with one exception: an
// empty JSON PartialObjectMetadataList has "items":[] in place of null.
func (s Shape) AppendListHead(dst []byte, resourceVersion string, bareLens iter.Seq[int]) []byte {
	if s.Protobuf {
		return s.appendProtoListHead(dst, resourceVersion, s.protoListLen(resourceVersion, bareLens))
	}
	if s.Unstructured {
		dst = append(dst, `{"apiVersion":`...)
		dst = appendJSONString(dst, s.APIVersion)
		return append(dst, `,"items":[`...)
	}
	dst = append(dst, `{"kind":`...)
	dst = appendJSONString(dst, s.ListKind)
	dst = append(dst, `,"apiVersion":`...)
	dst = appendJSONString(dst, s.APIVersion)
	dst = append(dst, `,"metadata":{`...)
	if resourceVersion != "" {
		dst = append(dst, `"resourceVersion":`...)
		dst = appendJSONString(dst, resourceVersion)
	}
	return append(dst, `},"items":[`...)
}

// AppendListItem appends one item; first is true for the first one.
func (s Shape) AppendListItem(dst, bare []byte, first bool) []byte {
	if s.Protobuf {
		dst = appendProtoHead(dst, s.itemsField(), len(bare))
		return append(dst, bare...)
	}
	if !first {
		dst = append(dst, ',')
	}
	if s.Partial != "" {
		return s.appendWire(dst, bare)
	}
	return append(dst, bare...)
}

// AppendListTail appends what stands behind the last item.
func (s Shape) AppendListTail(dst []byte, resourceVersion string) []byte {
	if s.Protobuf {
		if s.itemsFirst() {
			dst = appendListMeta(dst, 2, resourceVersion)
		}
		return append(dst, unknownEnd...)
	}
	if s.Unstructured {
		dst = append(dst, `],"kind":`...)
		dst = appendJSONString(dst, s.ListKind)
		dst = append(dst, `,"metadata":{"continue":"","resourceVersion":`...)
		dst = appendJSONString(dst, resourceVersion)
		return append(dst, "}}\n"...)
	}
	return append(dst, "]}\n"...)
}

// protoListLen is the length of the list message inside its envelope.
func (s Shape) protoListLen(resourceVersion string, bareLens iter.Seq[int]) int64 {
	n := s.listMetaFieldLen(resourceVersion)
	for bareLen := range bareLens {
		n += int64(protoFieldLen(bareLen))
	}
	return n
}

func (s Shape) listMetaFieldLen(resourceVersion string) int64 {
	return int64(len(appendListMeta(nil, 1, resourceVersion)))
}

func (s Shape) appendProtoListHead(dst []byte, resourceVersion string, listLen int64) []byte {
	dst = appendUnknownHead(dst, s.APIVersion, s.ListKind, int(listLen))
	if !s.itemsFirst() {
		dst = appendListMeta(dst, 1, resourceVersion)
	}
	return dst
}

// appendListMeta appends a ListMeta with empty selfLink and continue, which the
// API server's serializer always writes.
func appendListMeta(dst []byte, num protowire.Number, resourceVersion string) []byte {
	dst = appendProtoHead(dst, num, protoFieldLen(0)+protoFieldLen(len(resourceVersion))+protoFieldLen(0))
	dst = append(dst, "\x0a\x00"...)
	dst = appendProtoString(dst, listMetaResourceVersion, resourceVersion)
	return append(dst, "\x1a\x00"...)
}
