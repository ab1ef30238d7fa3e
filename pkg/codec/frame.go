// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package codec

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// Frame is one event of a watch.
type Frame struct {
	// Type is one of the five of package watch.
	Type watch.EventType
	// Object is the object as it is on the wire, byte for byte: what [DecodeObject]
	// takes. It belongs to the caller of Next.
	Object []byte
}

const (
	frameBufferBytes = 8 << 10  // what a quiet JSON watch holds
	frameKeepBytes   = 64 << 10 // a larger buffer is given back
	frameChunkBytes  = 64 << 10 // what is allocated on a length prefix alone
	maxEmptyReads    = 100
)

// FrameReader splits a watch response into frames. It holds at most one frame and
// what came with it. It is not safe for concurrent use.
type FrameReader struct {
	r   io.Reader
	rep Representation
	max int
	err error // what Next returns from now on

	// JSON only: buf[start:end] has been read and not yet returned.
	buf        []byte
	start, end int
	readErr    error
	sc         jsonScanner
}

// NewFrameReader reads frames in the given representation from r. maxBytes bounds
// one frame as it is on the wire, without the length prefix.
func NewFrameReader(r io.Reader, rep Representation, maxBytes int) *FrameReader {
	return &FrameReader{r: r, rep: rep, max: maxBytes}
}

// Next returns the next frame. It blocks no longer than it takes for the frame's
// last byte to arrive. The error is io.EOF if the stream ended between two
// frames, io.ErrUnexpectedEOF if it ended inside one; errors.Is tells ErrTooLarge,
// ErrMalformed (an unknown event type too) and errors of the reader. After an
// error Next returns the same error for ever.
func (f *FrameReader) Next() (Frame, error) {
	if f.err != nil {
		return Frame{}, f.err
	}
	var frame Frame
	var err error
	if f.rep.Protobuf {
		frame, err = f.nextProto()
	} else {
		frame, err = f.nextJSON()
	}
	if err == nil {
		return frame, nil
	}
	if err != io.EOF && err != io.ErrUnexpectedEOF { //nolint:errorlint // the two are passed on as they are
		err = fmt.Errorf("watch frame: %w", err)
	}
	f.err = err
	return Frame{}, err
}

func (f *FrameReader) nextJSON() (Frame, error) {
	f.sc.reset()
	scanned := 0
	for {
		for scanned == 0 && f.start < f.end && isSpace(f.buf[f.start]) {
			f.start++
		}
		n, done, err := f.sc.scan(f.buf[f.start+scanned : f.end])
		if err != nil {
			return Frame{}, err
		}
		if scanned += n; scanned > f.max {
			return Frame{}, ErrTooLarge
		}
		if done {
			break
		}
		switch err := f.fill(); {
		case err == nil:
		case !errors.Is(err, io.EOF):
			return Frame{}, err
		case scanned == 0:
			return Frame{}, io.EOF
		default:
			return Frame{}, io.ErrUnexpectedEOF
		}
	}
	wire := f.buf[f.start : f.start+scanned]
	frame, err := splitJSONFrame(wire, &f.sc)
	if err != nil {
		return Frame{}, err
	}
	frame.Object = bytes.Clone(frame.Object)
	f.start += scanned
	if len(f.buf) > frameKeepBytes && len(wire) < len(f.buf)/4 && f.end-f.start < frameKeepBytes/2 {
		f.buf = append(make([]byte, 0, frameKeepBytes), f.buf[f.start:f.end]...)
		f.start, f.end = 0, len(f.buf)
		f.buf = f.buf[:cap(f.buf)]
	}
	return frame, nil
}

// fill reads more bytes into the buffer.
func (f *FrameReader) fill() error {
	if f.readErr != nil {
		return f.readErr
	}
	switch {
	case f.start == f.end:
		f.start, f.end = 0, 0
	case f.end == len(f.buf) && f.start > 0:
		f.end = copy(f.buf, f.buf[f.start:f.end])
		f.start = 0
	}
	if f.end == len(f.buf) {
		f.buf = append(f.buf, make([]byte, max(len(f.buf), frameBufferBytes))...)
	}
	for range maxEmptyReads {
		n, err := f.r.Read(f.buf[f.end:])
		f.end += n
		f.readErr = err
		if n > 0 {
			return nil
		}
		if err != nil {
			return err
		}
	}
	f.readErr = io.ErrNoProgress
	return f.readErr
}

// splitJSONFrame finds type and object of a frame that sc has scanned.
func splitJSONFrame(wire []byte, sc *jsonScanner) (Frame, error) {
	if frame, ok := splitPlainJSONFrame(wire, sc); ok {
		return frame, nil
	}
	var frame Frame
	var seen uint
	for o := newJSONObject(wire); ; {
		ok, err := o.next()
		if err != nil {
			return Frame{}, err
		}
		if !ok {
			return frame, frame.check()
		}
		switch string(o.key) {
		case "type":
			var t string
			if err = once(&seen, 0, "type"); err == nil {
				t, err = jsonString(o.key, o.value)
			}
			frame.Type = watch.EventType(t)
		case "object":
			err = once(&seen, 1, "object")
			if !isNull(o.value) {
				frame.Object = o.value
			}
		}
		if err != nil {
			return Frame{}, err
		}
	}
}

// splitPlainJSONFrame does the same without another look at the object, if the
// frame is what kube-apiserver sends: these two members, nothing else.
func splitPlainJSONFrame(wire []byte, sc *jsonScanner) (Frame, bool) {
	rest, ok := bytes.CutPrefix(wire, []byte(`{"type":"`))
	if !ok || sc.direct != 1 || sc.closed != len(wire)-1 {
		return Frame{}, false
	}
	quote := bytes.IndexByte(rest, '"')
	if quote < 0 {
		return Frame{}, false
	}
	object, ok := bytes.CutPrefix(rest[quote:], []byte(`","object":`))
	if !ok || object[0] != '{' {
		return Frame{}, false
	}
	// The only container in the frame starts here and ends before the frame's brace.
	frame := Frame{Type: watch.EventType(rest[:quote]), Object: object[:len(object)-1]}
	return frame, frame.check() == nil
}

func (f Frame) check() error {
	switch f.Type {
	case watch.Added, watch.Modified, watch.Deleted, watch.Bookmark, watch.Error:
	default:
		return fmt.Errorf("event type %.64q: %w", f.Type, ErrMalformed)
	}
	if len(f.Object) == 0 {
		return fmt.Errorf("event without object: %w", ErrMalformed)
	}
	return nil
}

func (f *FrameReader) nextProto() (Frame, error) {
	var prefix [4]byte
	if _, err := io.ReadFull(f.r, prefix[:]); err != nil {
		return Frame{}, err // io.EOF if not even one byte came
	}
	length := uint64(binary.BigEndian.Uint32(prefix[:]))
	if f.max < 0 || length > uint64(f.max) {
		return Frame{}, ErrTooLarge
	}
	size := int(length)
	body := make([]byte, 0, min(size, frameChunkBytes))
	for len(body) < size {
		body = slices.Grow(body, min(size-len(body), max(len(body), 1)))
		from := len(body)
		body = body[:min(cap(body), size)]
		if _, err := io.ReadFull(f.r, body[from:]); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return Frame{}, err
		}
	}
	return splitProtoFrame(body)
}

func splitProtoFrame(body []byte) (Frame, error) {
	var frame Frame
	var seen uint
	for m := newProtoMessage(body); ; {
		ok, err := m.next()
		if err != nil {
			return Frame{}, err
		}
		if !ok {
			return frame, frame.check()
		}
		if m.num != watchEventType && m.num != watchEventObject {
			continue
		}
		b, err := m.data()
		if err != nil {
			return Frame{}, err
		}
		if seen&(1<<m.num) != 0 {
			return Frame{}, fmt.Errorf("field %d occurs twice in a protobuf watch event: %w", m.num, ErrMalformed)
		}
		seen |= 1 << m.num
		if m.num == watchEventType {
			frame.Type = watch.EventType(b)
			continue
		}
		raw, err := protoOnce(b, rawExtensionRaw)
		if err != nil {
			return Frame{}, err
		}
		if raw != nil {
			frame.Object = slices.Clip(raw.bytes)
		}
	}
}

// AppendFrame appends one watch event, its delimiter or length prefix included.
func (s Shape) AppendFrame(dst []byte, t watch.EventType, bare []byte) []byte {
	if !s.Protobuf {
		dst = append(dst, `{"type":`...)
		dst = appendJSONString(dst, string(t))
		dst = append(dst, `,"object":`...)
		dst = s.appendWire(dst, bare)
		return append(dst, '}', '\n')
	}
	wireLen := s.wireLen(len(bare))
	rawLen := protoFieldLen(wireLen)
	dst = binary.BigEndian.AppendUint32(dst, uint32(protoFieldLen(len(t))+protoFieldLen(rawLen)))
	dst = appendProtoString(dst, watchEventType, string(t))
	dst = appendProtoHead(dst, watchEventObject, rawLen)
	dst = appendProtoHead(dst, rawExtensionRaw, wireLen)
	return s.appendWire(dst, bare)
}

// AppendBookmark appends a BOOKMARK event: an object of this kind that holds
// nothing but the resourceVersion and, if initialEventsEnd is set, the annotation
// that ends the initial events of a WatchList.
func (s Shape) AppendBookmark(dst []byte, resourceVersion string, initialEventsEnd bool) []byte {
	if s.Protobuf {
		meta := metav1.ObjectMeta{ResourceVersion: resourceVersion}
		if initialEventsEnd {
			meta.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
		}
		bare, err := (&metav1.PartialObjectMetadata{ObjectMeta: meta}).Marshal()
		if err != nil {
			panic(err) // strings can always be encoded
		}
		return s.AppendFrame(dst, watch.Bookmark, bare)
	}
	const annotation = `"annotations":{"` + metav1.InitialEventsAnnotationKey + `":"true"}`
	bare := []byte(`{"metadata":{`)
	if s.Unstructured {
		bare = append(bare[:0], `{"apiVersion":`...)
		bare = appendJSONString(bare, s.APIVersion)
		bare = append(bare, `,"kind":`...)
		bare = appendJSONString(bare, s.Kind)
		bare = append(bare, `,"metadata":{`...)
		if initialEventsEnd {
			bare = append(bare, annotation+","...)
		}
	}
	bare = append(bare, `"resourceVersion":`...)
	bare = appendJSONString(bare, resourceVersion)
	if initialEventsEnd && !s.Unstructured {
		bare = append(bare, ","+annotation...)
	}
	return s.AppendFrame(dst, watch.Bookmark, append(bare, '}', '}'))
}

// AppendStatusFrame appends an ERROR event. st is not changed; its TypeMeta does
// not matter.
func AppendStatusFrame(dst []byte, rep Representation, st *metav1.Status) []byte {
	status := *st
	status.TypeMeta = metav1.TypeMeta{}
	var bare []byte
	var err error
	if rep.Protobuf {
		bare, err = status.Marshal()
	} else {
		bare, err = json.Marshal(&status)
	}
	if err != nil {
		panic(err) // a Status holds nothing that cannot be encoded
	}
	shape := Shape{Representation: rep, APIVersion: "v1", Kind: kindStatus}
	return shape.AppendFrame(dst, watch.Error, bare)
}
