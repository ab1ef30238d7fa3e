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
	"strings"
	"testing"
	"testing/iotest"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// nested is a JSON value n containers deep.
func nested(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }

// unknown is a protobuf body.
func unknown(apiVersion, kind string, raw string) string {
	return string(appendUnknownHead(nil, apiVersion, kind, len(raw))) + raw + unknownEnd
}

// field is a length-delimited protobuf field.
func field(num int, value string) string {
	return string(rune(num<<3|2)) + string(binary.AppendUvarint(nil, uint64(len(value)))) + value
}

func TestListDecoderRefuses(t *testing.T) {
	jsonRep, protoRep := Representation{}, Representation{Protobuf: true}
	for _, tc := range []struct {
		name string
		rep  Representation
		in   string
		want error
	}{
		{"pod", jsonRep, `{"kind":"Pod","apiVersion":"v1","metadata":{"name":"a"},"spec":{}}`, ErrNotList},
		{"object with items", jsonRep, `{"apiVersion":"g/v1","items":[],"kind":"Basket","metadata":{"name":"a"}}`, ErrNotList},
		{"object with other items", jsonRep, `{"apiVersion":"g/v1","items":{"a":1},"kind":"Basket","metadata":{"name":"a"}}`, ErrNotList},
		{"status", jsonRep, `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","code":404}`, ErrNotList},
		{"table", jsonRep, `{"kind":"Table","apiVersion":"meta.k8s.io/v1","metadata":{},"columnDefinitions":[],"rows":[]}`, ErrNotList},
		{"discovery", jsonRep, `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"v1","resources":[]}`, ErrNotList},
		{"partial in place of whole", jsonRep, `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1","metadata":{},"items":[]}`, ErrMalformed},
		{"whole in place of partial", Representation{Partial: "v1"}, `{"kind":"PodList","apiVersion":"v1","metadata":{},"items":[]}`, ErrMalformed},
		{"other version of partial", Representation{Partial: "v1"}, `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1beta1","metadata":{},"items":[]}`, ErrMalformed},
		{"custom in place of partial", Representation{Partial: "v1"}, `{"apiVersion":"g/v1","items":[],"kind":"XList","metadata":{}}`, ErrMalformed},
		{"truncated", jsonRep, `{"kind":"PodList","apiVersion":"v1","metadata":{},"items":[{"metadata":{}}]`, ErrMalformed},
		{"empty", jsonRep, ``, ErrMalformed},
		{"not an object", jsonRep, `[]`, ErrMalformed},
		{"two lists", jsonRep, `{"kind":"PodList","apiVersion":"v1","items":[]}{"kind":"PodList"}`, ErrMalformed},
		{"items twice", jsonRep, `{"kind":"PodList","apiVersion":"v1","items":[],"items":[]}`, ErrMalformed},
		{"kind twice, once escaped", jsonRep, `{"kind":"PodList","apiVersion":"v1","items":[],"k\u0069nd":"X"}`, ErrMalformed},
		{"resourceVersion twice", jsonRep, `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"1","resourceVersion":"2"},"items":[]}`, ErrMalformed},
		{"resourceVersion a number", jsonRep, `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":1},"items":[]}`, ErrMalformed},
		{"items before type", jsonRep, `{"items":[],"kind":"PodList","apiVersion":"v1"}`, ErrMalformed},
		{"item of another type", jsonRep, `{"apiVersion":"g/v1","items":[{"apiVersion":"g/v2","kind":"X"}],"kind":"XList"}`, ErrMalformed},
		{"items of two kinds", jsonRep, `{"apiVersion":"g/v1","items":[{"apiVersion":"g/v1","kind":"X"},{"apiVersion":"g/v1","kind":"Y"}],"kind":"XList"}`, ErrMalformed},
		{"item without type", jsonRep, `{"apiVersion":"g/v1","items":[{"metadata":{}}],"kind":"XList"}`, ErrMalformed},
		{"typed item in a built-in list", jsonRep, `{"kind":"PodList","apiVersion":"v1","items":[{"kind":"Pod","apiVersion":"v1"}]}`, ErrMalformed},
		{"null item", jsonRep, `{"kind":"PodList","apiVersion":"v1","items":[null]}`, ErrMalformed},
		{"trailing comma", jsonRep, `{"kind":"PodList","apiVersion":"v1","items":[{},]}`, ErrMalformed},
		{"List of anything", jsonRep, `{"kind":"List","apiVersion":"v1","items":[{}]}`, ErrMalformed},
		{"bad literal in an item", jsonRep, `{"kind":"PodList","apiVersion":"v1","items":[{"a":trux}]}`, ErrMalformed},
		{"bad number in an item", jsonRep, `{"kind":"PodList","apiVersion":"v1","items":[{"a":01}]}`, ErrMalformed},
		{"too deep", jsonRep, `{"kind":"PodList","apiVersion":"v1","items":[{"a":` + nested(maxJSONDepth) + `}]}`, ErrMalformed},
		{"item too large", jsonRep, `{"kind":"PodList","apiVersion":"v1","items":[{"a":"` + strings.Repeat("x", testMaxBytes) + `"}]}`, ErrTooLarge},
		{"metadata too large", jsonRep, `{"kind":"PodList","apiVersion":"v1","metadata":{"a":"` + strings.Repeat("x", testMaxBytes) + `"}}`, ErrTooLarge},

		{"protobuf pod", protoRep, unknown("v1", "Pod", field(1, field(1, "a"))), ErrNotList},
		{"protobuf status", protoRep, unknown("v1", "Status", ""), ErrNotList},
		{"protobuf discovery", protoRep, unknown("v1", "APIResourceList", ""), ErrNotList},
		{"no magic", protoRep, `{"kind":"PodList"}`, ErrMalformed},
		{"protobuf truncated", protoRep, unknown("v1", "PodList", field(1, "")+field(2, field(1, "")))[:30], ErrMalformed},
		{"protobuf empty", protoRep, "", ErrMalformed},
		{"protobuf without list", protoRep, "k8s\x00" + field(1, field(1, "v1")+field(2, "PodList")), ErrMalformed},
		{"list before type", protoRep, "k8s\x00" + field(2, "") + field(1, field(1, "v1")+field(2, "PodList")), ErrMalformed},
		{"list twice", protoRep, unknown("v1", "PodList", field(1, "")) + field(2, field(1, "")), ErrMalformed},
		{"metadata twice", protoRep, unknown("v1", "PodList", field(1, "")+field(1, "")), ErrMalformed},
		{"unknown field in list", protoRep, unknown("v1", "PodList", field(1, "")+field(3, "")), ErrMalformed},
		{"wrong wire type", protoRep, unknown("v1", "PodList", "\x08\x01"), ErrMalformed},
		{"item longer than list", protoRep, unknown("v1", "PodList", "\x12\x05ab"), ErrMalformed},
		{"item of 2^63 bytes", protoRep, unknown("v1", "PodList", "\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), ErrMalformed},
		{"varint of 11 bytes", protoRep, unknown("v1", "PodList", "\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"), ErrMalformed},
		{"list ends in tag", protoRep, unknown("v1", "PodList", field(1, "")+"\x92"), ErrMalformed},
		{"list ends in length", protoRep, unknown("v1", "PodList", field(1, "")+"\x12"), ErrMalformed},
		{"large length", protoRep, "k8s\x00\x0a\xff\xff\xff\x7f", ErrTooLarge},
		{"protobuf item too large", protoRep, unknown("v1", "PodList", field(2, strings.Repeat("x", testMaxBytes+1))), ErrTooLarge},
		{"compressed", protoRep, "k8s\x00" + field(1, field(1, "v1")+field(2, "PodList")) + field(2, "") + field(3, "gzip"), ErrMalformed},
	} {
		for name, chunks := range chunkings([]byte(tc.in)) {
			if len(tc.in) > testMaxBytes && name != "whole" && name != "randomly" {
				continue
			}
			t.Run(tc.name+"/"+name, func(t *testing.T) {
				if _, err := decodeList(tc.rep, chunks); !errors.Is(err, tc.want) {
					t.Errorf("ListDecoder error = %v, want %v", err, tc.want)
				}
			})
		}
	}
}

func TestListDecoderTakes(t *testing.T) {
	for _, tc := range []struct {
		name, in string
		items    []string
		want     List
	}{
		{
			"white space", " {\n\t\"kind\" : \"PodList\" ,\r\n \"apiVersion\": \"v1\", \"metadata\" : { \"resourceVersion\" : \"5\" } , \"items\" : [ { } , { \"a\" : [ 1 , -2.5e+3 ] } ] } \n",
			[]string{`{}`, `{ "a" : [ 1 , -2.5e+3 ] }`},
			List{Shape: Shape{APIVersion: "v1", Kind: "Pod", ListKind: "PodList"}, ResourceVersion: "5", Items: 2},
		},
		{
			"metadata last", `{"kind":"PodList","apiVersion":"v1","items":[{}],"metadata":{"resourceVersion":"5"}}`,
			[]string{`{}`}, List{Shape: Shape{APIVersion: "v1", Kind: "Pod", ListKind: "PodList"}, ResourceVersion: "5", Items: 1},
		},
		{
			"null items", `{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"5"},"items":null}`,
			nil, List{Shape: Shape{APIVersion: "v1", Kind: "Pod", ListKind: "PodList"}, ResourceVersion: "5"},
		},
		{
			"other members", `{"apiVersion":"g/v1","a":12,"b":[{}],"items":[],"kind":"Xs","metadata":null,"z":-0}`,
			nil, List{Shape: Shape{APIVersion: "g/v1", Kind: "Xs", ListKind: "Xs", Unstructured: true}},
		},
		{
			"list kind of its own", `{"apiVersion":"g/v1","items":[{"a":1,"apiVersion":"g/v1","kind":"Mouse"}],"kind":"Mice","metadata":{"resourceVersion":"7"}}`,
			[]string{`{"a":1,"apiVersion":"g/v1","kind":"Mouse"}`},
			List{Shape: Shape{APIVersion: "g/v1", Kind: "Mouse", ListKind: "Mice", Unstructured: true}, ResourceVersion: "7", Items: 1},
		},
		{
			"escapes", `{"kin\u0064":"Pod\u004cist","apiVersion":"v1","metadata":{"resourceVersion":"\u0035"},"items":[]}`,
			nil, List{Shape: Shape{APIVersion: "v1", Kind: "Pod", ListKind: "PodList"}, ResourceVersion: "5"},
		},
	} {
		for name, chunks := range chunkings([]byte(tc.in)) {
			t.Run(tc.name+"/"+name, func(t *testing.T) {
				got, err := decodeList(Representation{}, chunks)
				if err != nil {
					t.Fatalf("ListDecoder error: %v", err)
				}
				if got.List != tc.want || fmt.Sprint(got.Items) != fmt.Sprint(tc.items) {
					t.Errorf("ListDecoder = %+v, want %+v %q", got, tc.want, tc.items)
				}
			})
		}
	}
}

func TestListDecoderKeepsError(t *testing.T) {
	stop := errors.New("stop")
	d := NewListDecoder(Representation{}, testMaxBytes, func(Shape, []byte) error { return stop })
	in := []byte(`{"kind":"PodList","apiVersion":"v1","items":[{},{}]}`)
	n, err := d.Write(in)
	if !errors.Is(err, stop) || n >= len(in) {
		t.Errorf("Write() = %d, %v, want fewer than %d, %v", n, err, len(in), stop)
	}
	if _, err := d.Write([]byte(" ")); !errors.Is(err, stop) {
		t.Errorf("second Write() error = %v, want %v", err, stop)
	}
	if _, err := d.Close(); !errors.Is(err, stop) {
		t.Errorf("Close() error = %v, want %v", err, stop)
	}
}

// TestListDecoderMemory holds the decoder to one item.
func TestListDecoderMemory(t *testing.T) {
	const items = 2000
	item := `{"a":"` + strings.Repeat("x", 1000) + `"}`
	in := `{"kind":"PodList","apiVersion":"v1","items":[` + item + strings.Repeat(","+item, items-1) + `]}`
	d := NewListDecoder(Representation{}, 1<<20, func(Shape, []byte) error { return nil })
	for chunk := range bytes.Lines([]byte(strings.ReplaceAll(in, "x\"}", "x\"\n}"))) {
		if _, err := d.Write(chunk); err != nil {
			t.Fatal(err)
		}
		if cap(d.buf) > 4*len(item) {
			t.Fatalf("decoder holds %d bytes, want at most a few times %d", cap(d.buf), len(item))
		}
	}
	if list, err := d.Close(); err != nil || list.Items != items {
		t.Errorf("Close() = %v, %v, want %d items", list, err, items)
	}
}

func TestDecodeObjectRefuses(t *testing.T) {
	for _, tc := range []struct {
		name string
		rep  Representation
		in   string
	}{
		{"empty", Representation{}, ``},
		{"truncated", Representation{}, `{"kind":"Pod","apiVersion":"v1","metadata":{`},
		{"no kind", Representation{}, `{"apiVersion":"v1"}`},
		{"no apiVersion", Representation{}, `{"kind":"Pod"}`},
		{"kind twice", Representation{}, `{"kind":"Pod","apiVersion":"v1","kind":"Node"}`},
		{"kind twice, null", Representation{}, `{"kind":"Pod","apiVersion":"v1","kind":null}`},
		{"two objects", Representation{}, `{"kind":"Pod","apiVersion":"v1"}{}`},
		{"kind a number", Representation{}, `{"kind":1,"apiVersion":"v1"}`},
		{"control character", Representation{}, "{\"kind\":\"P\x01d\",\"apiVersion\":\"v1\"}"},
		{"bad escape", Representation{}, `{"kind":"P\xd","apiVersion":"v1"}`},
		{"whole in place of partial", Representation{Partial: "v1"}, `{"kind":"Pod","apiVersion":"v1"}`},
		{"partial in place of whole", Representation{}, `{"kind":"PartialObjectMetadata","apiVersion":"meta.k8s.io/v1"}`},
		{"protobuf, JSON", Representation{Protobuf: true}, `{"kind":"Pod","apiVersion":"v1"}`},
		{"protobuf, no type", Representation{Protobuf: true}, "k8s\x00" + field(2, "")},
		{"protobuf, truncated", Representation{Protobuf: true}, unknown("v1", "Pod", "abc")[:17]},
		{"protobuf, raw twice", Representation{Protobuf: true}, unknown("v1", "Pod", "abc") + field(2, "x")},
		{"protobuf, group", Representation{Protobuf: true}, unknown("v1", "Pod", "abc") + "\x2b"},
		{"protobuf, whole in place of partial", Representation{Protobuf: true, Partial: "v1"}, unknown("v1", "Pod", "")},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if shape, bare, err := DecodeObject(tc.rep, []byte(tc.in)); !errors.Is(err, ErrMalformed) {
				t.Errorf("DecodeObject(%q) = %v, %q, %v, want ErrMalformed", tc.in, shape, bare, err)
			}
		})
	}
}

func TestDecodeObjectWithWhiteSpace(t *testing.T) {
	const in = " {\n  \"kind\": \"Pod\",\n  \"apiVersion\": \"v1\",\n  \"metadata\": { }\n}\n"
	shape, bare, err := DecodeObject(Representation{}, []byte(in))
	if want := "{\"metadata\": { }\n}"; err != nil || string(bare) != want || shape.Unstructured {
		t.Errorf("DecodeObject() = %v, %q, %v, want %q", shape, bare, err, want)
	}
	if got := shape.AppendObject(nil, bare); !json.Valid(got) || len(got) != shape.ObjectLen(len(bare)) {
		t.Errorf("AppendObject() = %q, want JSON of %d bytes", got, shape.ObjectLen(len(bare)))
	}
	shape, bare, err = DecodeObject(Representation{}, []byte(`{"kind":"Pod", "apiVersion":"v1" }`))
	if err != nil || string(bare) != "{}" {
		t.Errorf("DecodeObject() = %q, %v, want {}", bare, err)
	}
	if got, want := string(shape.AppendObject(nil, bare)), `{"kind":"Pod","apiVersion":"v1"}`+"\n"; got != want {
		t.Errorf("AppendObject() = %q, want %q", got, want)
	}
}

// protoFrame is a length-prefixed watch event.
func protoFrame(event string) string {
	return string(binary.BigEndian.AppendUint32(nil, uint32(len(event)))) + event
}

func TestFrameReaderErrors(t *testing.T) {
	protoRep := Representation{Protobuf: true}
	event := field(1, "ADDED") + field(2, field(1, "object"))
	for _, tc := range []struct {
		name   string
		rep    Representation
		in     string
		frames int
		want   error
	}{
		{"empty", Representation{}, "", 0, io.EOF},
		{"white space", Representation{}, " \n\n", 0, io.EOF},
		{"no newline", Representation{}, `{"type":"ADDED","object":{}}`, 1, io.EOF},
		{"no newline between", Representation{}, `{"type":"ADDED","object":{}}{"object":{"a":{}},"type":"BOOKMARK"}`, 2, io.EOF},
		{"cut", Representation{}, `{"type":"ADDED","object":{}}` + "\n" + `{"type":"ADDED","object":{}`, 1, io.ErrUnexpectedEOF},
		{"unknown type", Representation{}, `{"type":"CHANGED","object":{}}`, 0, ErrMalformed},
		{"no type", Representation{}, `{"object":{}}`, 0, ErrMalformed},
		{"no object", Representation{}, `{"type":"ADDED"}`, 0, ErrMalformed},
		{"null object", Representation{}, `{"type":"ADDED","object":null}`, 0, ErrMalformed},
		{"type twice", Representation{}, `{"type":"ADDED","object":{},"type":"DELETED"}`, 0, ErrMalformed},
		{"object twice", Representation{}, `{"type":"ADDED","object":{},"object":{}}`, 0, ErrMalformed},
		{"status in place of a frame", Representation{}, `{"kind":"Status","apiVersion":"v1"}`, 0, ErrMalformed},
		{"garbage", Representation{}, "{]", 0, ErrMalformed},
		{"not an object", Representation{}, "12 ", 0, ErrMalformed},
		{"too deep", Representation{}, `{"type":"ADDED","object":` + nested(maxJSONDepth) + `}`, 0, ErrMalformed},
		{"too large", Representation{}, `{"type":"ADDED","object":"` + strings.Repeat("x", testMaxBytes), 0, ErrTooLarge},

		{"protobuf empty", protoRep, "", 0, io.EOF},
		{"protobuf one", protoRep, protoFrame(event), 1, io.EOF},
		{"protobuf order", protoRep, protoFrame(field(2, field(1, "o")) + field(1, "DELETED") + field(9, "")), 1, io.EOF},
		{"cut in prefix", protoRep, protoFrame(event) + "\x00\x00", 1, io.ErrUnexpectedEOF},
		{"cut behind prefix", protoRep, "\x00\x00\x00\x01", 0, io.ErrUnexpectedEOF},
		{"cut in frame", protoRep, protoFrame(event)[:10], 0, io.ErrUnexpectedEOF},
		{"protobuf too large", protoRep, "\xff\xff\xff\xff", 0, ErrTooLarge},
		{"large length and nothing behind", protoRep, "\x00\x0f\xff\xff", 0, io.ErrUnexpectedEOF},
		{"empty frame", protoRep, "\x00\x00\x00\x00", 0, ErrMalformed},
		{"protobuf unknown type", protoRep, protoFrame(field(1, "ADD") + field(2, field(1, "o"))), 0, ErrMalformed},
		{"protobuf no object", protoRep, protoFrame(field(1, "ADDED")), 0, ErrMalformed},
		{"protobuf object twice", protoRep, protoFrame(event + field(2, "")), 0, ErrMalformed},
		{"protobuf varint in place of object", protoRep, protoFrame(field(1, "ADDED") + "\x10\x01"), 0, ErrMalformed},
	} {
		t.Run(tc.name, func(t *testing.T) {
			for _, r := range []io.Reader{strings.NewReader(tc.in), iotest.HalfReader(strings.NewReader(tc.in)), iotest.DataErrReader(strings.NewReader(tc.in))} {
				reader := NewFrameReader(r, tc.rep, testMaxBytes)
				for range tc.frames {
					if _, err := reader.Next(); err != nil {
						t.Fatalf("Next() error: %v", err)
					}
				}
				for range 2 {
					if _, err := reader.Next(); !errors.Is(err, tc.want) {
						t.Errorf("Next() error = %v, want %v", err, tc.want)
					}
				}
			}
		})
	}
}

func TestFrameReaderReadError(t *testing.T) {
	broken := errors.New("connection reset")
	for _, rep := range []Representation{{}, {Protobuf: true}} {
		in := Shape{Representation: rep, APIVersion: "v1", Kind: "Pod"}.AppendBookmark(nil, "1", false)
		reader := NewFrameReader(io.MultiReader(bytes.NewReader(in), iotest.ErrReader(broken)), rep, testMaxBytes)
		if _, err := reader.Next(); err != nil {
			t.Fatalf("%s: Next() error: %v", rep, err)
		}
		if _, err := reader.Next(); !errors.Is(err, broken) {
			t.Errorf("%s: Next() error = %v, want %v", rep, err, broken)
		}
	}
}

// TestFrameReaderDoesNotWait checks that a frame is returned when its last byte has
// come, and that the reader's buffer does not stay large.
func TestFrameReaderDoesNotWait(t *testing.T) {
	r, w := io.Pipe()
	defer r.Close()
	reader := NewFrameReader(r, Representation{}, 1<<22)
	big := `{"type":"ADDED","object":{"a":"` + strings.Repeat("x", 1<<20) + `"}}`
	for _, frame := range []string{`{"type":"ADDED","object":{}}`, big, `{"type":"DELETED","object":{"b":1}}`} {
		go func() { _, _ = io.WriteString(w, frame) }()
		if got, err := reader.Next(); err != nil || len(got.Object) < 2 {
			t.Fatalf("Next() = %v, %v", got.Type, err)
		}
	}
	if len(reader.buf) > frameKeepBytes {
		t.Errorf("reader holds %d bytes, want at most %d", len(reader.buf), frameKeepBytes)
	}
}

// TestBookmark decodes bookmarks as client-go does.
func TestBookmark(t *testing.T) {
	for _, c := range wireCases() {
		for _, end := range []bool{false, true} {
			wire := c.shape.AppendBookmark(nil, "77", end)
			frame, err := NewFrameReader(bytes.NewReader(wire), c.shape.Representation, testMaxBytes).Next()
			if err != nil || frame.Type != watch.Bookmark {
				t.Fatalf("%s: Next() = %s, %v, want a bookmark", c, frame.Type, err)
			}
			shape, bare, err := DecodeObject(c.shape.Representation, frame.Object)
			if err != nil || shape != c.shape {
				t.Fatalf("%s: DecodeObject() = %v, %v, want %v", c, shape, err, c.shape)
			}
			if meta, err := ReadMeta(c.shape.Representation, bare); err != nil || meta != (Meta{ResourceVersion: "77"}) {
				t.Errorf("%s: ReadMeta() = %v, %v, want resourceVersion 77", c, meta, err)
			}
			value, found, err := ReadAnnotation(c.shape.Representation, bare, metav1.InitialEventsAnnotationKey)
			if err != nil || found != end || end && value != "true" {
				t.Errorf("%s: ReadAnnotation() = %q, %v, %v, want %v", c, value, found, err, end)
			}
			if c.shape.Partial == "" && !c.shape.Unstructured {
				if _, _, err := serverCodecs.UniversalDeserializer().Decode(frame.Object, nil, nil); err != nil {
					t.Errorf("%s: decode bookmark: %v", c, err)
				}
			}
		}
	}
}
