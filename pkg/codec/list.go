// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"fmt"
	"iter"
	"strings"

	"google.golang.org/protobuf/encoding/protowire"
)

// List is what a whole list said besides its items.
type List struct {
	// Shape is that of the items. In an empty list of custom resources Kind is
	// ListKind without its suffix List, which is right unless the CRD names its
	// kinds differently.
	Shape           Shape
	ResourceVersion string
	// Continue is not empty if there are more pages.
	Continue string
	// RemainingItemCount is what the server estimates behind this page, or nil.
	RemainingItemCount *int64
	// Sharded is set if the server says that the list is a shard of the whole.
	Sharded bool
	// Items is how many items were emitted.
	Items int
}

// ListDecoder splits a list into objects as its bytes pass by. It is a push
// parser: bytes may arrive in pieces of any size, and it holds one item at most,
// which it copies only if the item arrived in pieces. Both layouts of JSON are
// taken: kind, apiVersion, metadata, items (built-in kinds) and keys in
// alphabetical order (custom resources). It is not safe for concurrent use.
type ListDecoder struct {
	rep    Representation
	max    int
	emit   func(shape Shape, bare []byte) error
	buf    []byte // a token, field or item that arrives in pieces
	list   List
	err    error
	parser interface {
		// step consumes a part of p, at least one byte unless it changes its state.
		step(p []byte) (int, error)
		// complete is the error if the input ends here.
		complete() error
	}
}

// NewListDecoder starts to decode one list. maxItemBytes bounds one item and the
// list's metadata; it must be positive. emit is called for each item in order, on
// the goroutine of Write; bare is valid during the call only, and an error ends the
// decoding and is returned by Write. shape lacks ListKind as long as it is not
// known, which in lists of custom resources is until their end.
//
// Items that were emitted are a list only if Close succeeds.
func NewListDecoder(rep Representation, maxItemBytes int, emit func(shape Shape, bare []byte) error) *ListDecoder {
	d := &ListDecoder{rep: rep, max: maxItemBytes, emit: emit}
	d.list.Shape.Representation = rep
	if rep.Protobuf {
		d.parser = &protoList{d: d}
	} else {
		d.parser = &jsonList{d: d}
	}
	return d
}

// Write takes the next bytes. errors.Is tells ErrNotList, ErrTooLarge,
// ErrMalformed and errors of emit. After an error every Write returns the same one.
func (d *ListDecoder) Write(p []byte) (int, error) {
	n := 0
	for n < len(p) && d.err == nil {
		step, err := d.parser.step(p[n:])
		n += step
		if err != nil {
			d.err = fmt.Errorf("decode list as %s: %w", d.rep, err)
		}
	}
	return n, d.err
}

// Close returns the list. It is an error unless one whole list, and nothing else
// but white space in JSON, was written.
func (d *ListDecoder) Close() (List, error) {
	if d.err == nil {
		if err := d.parser.complete(); err != nil {
			d.err = fmt.Errorf("decode list as %s: %w", d.rep, err)
		}
	}
	if d.err != nil {
		return List{}, d.err
	}
	return d.list, nil
}

// take gathers size bytes over several calls. val is nil until they are complete;
// it aliases p or d.buf.
func (d *ListDecoder) take(p []byte, size int) (n int, val []byte, done bool, err error) {
	if size > d.max {
		return 0, nil, false, ErrTooLarge
	}
	need := size - len(d.buf)
	if len(d.buf) == 0 && len(p) >= size {
		return size, p[:size], true, nil
	}
	n = min(need, len(p))
	d.buf = append(d.buf, p[:n]...)
	return n, d.buf, len(d.buf) == size, nil
}

// release forgets the gathered bytes.
func (d *ListDecoder) release() { d.buf = d.buf[:0] }

// setType checks the type of a list whose kind ends in List by convention, as all
// but those of custom resources do.
func (d *ListDecoder) setType(apiVersion, listKind string) error {
	kind, ok := strings.CutSuffix(listKind, "List")
	if !ok || listKind == "APIResourceList" || listKind == "APIGroupList" {
		return fmt.Errorf("%s %s: %w", apiVersion, listKind, ErrNotList)
	}
	if kind == "" || apiVersion == "" {
		return fmt.Errorf("list of mixed or unknown kinds: %w", ErrMalformed)
	}
	s := &d.list.Shape
	s.APIVersion, s.Kind, s.ListKind = apiVersion, kind, listKind
	return s.check()
}

// item emits one item.
func (d *ListDecoder) item(shape Shape, bare []byte) error {
	d.list.Items++
	return d.emit(shape, bare)
}

// The states of a protoList.
const (
	protoStart = iota // k8s\0
	protoTag
	protoLen
	protoBody
)

// protoList is the parser for protobuf: two levels of length-delimited fields,
// the envelope and in its field raw the list.
type protoList struct {
	d       *ListDecoder
	state   int
	inside  bool // in the list, not the envelope
	left    uint64
	field   uint64 // field number
	size    int    // of the field
	varint  uint64
	shift   uint
	seen    uint // fields of the envelope
	seenOf  uint // fields of the list, items excepted
	touched bool // a tag has begun
}

func (l *protoList) step(p []byte) (int, error) {
	switch l.state {
	case protoStart:
		return l.magic(p)
	case protoBody:
		return l.body(p)
	}
	if l.inside && l.left == 0 {
		if l.state == protoLen || l.touched {
			return 0, fmt.Errorf("list ends inside a field: %w", ErrMalformed)
		}
		l.inside = false
	}
	return l.number(p)
}

func (l *protoList) magic(p []byte) (int, error) {
	n, val, done, err := l.d.take(p, len(protoMagic))
	if err != nil || !done {
		return n, err
	}
	if string(val) != string(protoMagic) {
		return n, fmt.Errorf("no protobuf envelope: %w", ErrMalformed)
	}
	l.d.release()
	l.state = protoTag
	return n, nil
}

// number reads one varint, a tag or a length.
func (l *protoList) number(p []byte) (int, error) {
	for i, c := range p {
		if l.inside {
			if l.left == 0 {
				return i, fmt.Errorf("list ends inside a field: %w", ErrMalformed)
			}
			l.left--
		}
		l.touched = true
		if l.shift == 63 && c > 1 {
			return i, fmt.Errorf("protobuf varint too long: %w", ErrMalformed)
		}
		l.varint |= uint64(c&0x7f) << l.shift
		if l.shift += 7; c >= 0x80 {
			continue
		}
		v := l.varint
		l.varint, l.shift = 0, 0
		if l.state == protoTag {
			return i + 1, l.tag(v)
		}
		l.touched = false
		return i + 1, l.length(v)
	}
	return len(p), nil
}

func (l *protoList) tag(v uint64) error {
	l.field = v >> 3
	seen, last := &l.seen, uint64(unknownContentType)
	if l.inside {
		seen, last = &l.seenOf, 2
	}
	if l.field == 0 || l.field > last || v&7 != 2 {
		return fmt.Errorf("unexpected protobuf field %d, wire type %d: %w", l.field, v&7, ErrMalformed)
	}
	item := l.inside && l.field == uint64(l.d.list.Shape.itemsField())
	if *seen&(1<<l.field) != 0 && !item {
		return fmt.Errorf("protobuf field %d occurs twice: %w", l.field, ErrMalformed)
	}
	*seen |= 1 << l.field
	l.state = protoLen
	return nil
}

func (l *protoList) length(v uint64) error {
	if l.inside && v > l.left {
		return fmt.Errorf("protobuf field longer than its message: %w", ErrMalformed)
	}
	if !l.inside && l.field == unknownRaw {
		if l.seen&(1<<unknownTypeMeta) == 0 {
			return fmt.Errorf("protobuf envelope does not begin with the type: %w", ErrMalformed)
		}
		l.inside, l.left, l.state = true, v, protoTag
		return nil
	}
	if v > uint64(l.d.max) {
		return ErrTooLarge
	}
	l.size, l.state = int(v), protoBody
	if v == 0 {
		return l.value(nil)
	}
	return nil
}

func (l *protoList) body(p []byte) (int, error) {
	n, val, done, err := l.d.take(p, l.size)
	if l.inside {
		l.left -= uint64(n)
	}
	if err != nil || !done {
		return n, err
	}
	err = l.value(val)
	l.d.release()
	return n, err
}

// value handles a complete field.
func (l *protoList) value(val []byte) error {
	l.state = protoTag
	d := l.d
	switch {
	case l.inside && l.field == uint64(d.list.Shape.itemsField()):
		return d.item(d.list.Shape, val)
	case l.inside:
		return d.readListMeta(val)
	case l.field == unknownTypeMeta:
		apiVersion, kind, err := readTypeMeta(val)
		if err != nil {
			return err
		}
		return d.setType(apiVersion, kind)
	}
	if len(val) == 0 || l.field == unknownContentType && string(val) == mediaTypeProtobuf {
		return nil
	}
	return fmt.Errorf("protobuf envelope with contents encoded as %.64q: %w", val, ErrMalformed)
}

func (l *protoList) complete() error {
	if l.state != protoTag || l.touched || l.left != 0 || l.seen&(1<<unknownRaw) == 0 {
		return fmt.Errorf("list ends early: %w", ErrMalformed)
	}
	return nil
}

func (d *ListDecoder) readListMeta(b []byte) error {
	for m := newProtoMessage(b); ; {
		ok, err := m.next()
		if err != nil || !ok {
			return err
		}
		switch m.num {
		case listMetaResourceVersion:
			d.list.ResourceVersion, err = m.text()
		case listMetaContinue:
			d.list.Continue, err = m.text()
		case listMetaRemainingItemCount:
			var n int64
			n, err = m.number()
			d.list.RemainingItemCount = &n
		case listMetaShardInfo:
			d.list.Sharded = true
		}
		if err != nil {
			return err
		}
	}
}

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
