// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package filtertest holds filters to their goldens, which are their documentation: what
// goes in, and what comes out of it. Tests of filters call it.
//
// A folder has, for each case, <case>.in.json, one object as a GET answers it (kind and
// apiVersion come first), and one file that says what becomes of it: <case>.out.json for
// the changed object, <case>.keep or <case>.drop, both empty, or <case>.err with the text
// of the error. With -update these are written anew.
package filtertest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/edgehub/edgehub/pkg/codec"
	"github.com/edgehub/edgehub/pkg/filter"
)

var update = flag.Bool("update", false, "write the goldens of filters anew")

// The extensions of goldens.
const (
	inExt   = ".in.json"
	outExt  = ".out.json"
	keepExt = ".keep"
	dropExt = ".drop"
	errExt  = ".err"
)

// Run judges every case of a folder by f, in JSON and in protobuf. Besides the golden it
// checks what is true of every filter: it says Change if and only if it has changed
// something, both encodings come to the same, and what it has let pass it lets pass again
// as it is.
func Run(t *testing.T, dir string, f filter.Filter) {
	t.Helper()
	inputs, err := filepath.Glob(filepath.Join(dir, "*"+inExt))
	if err != nil || len(inputs) == 0 {
		t.Fatalf("no case in %s: %v", dir, err)
	}
	for _, input := range inputs {
		stem := strings.TrimSuffix(input, inExt)
		t.Run(filepath.Base(stem), func(t *testing.T) {
			text, err := os.ReadFile(input)
			if err != nil {
				t.Fatal(err)
			}
			got, err := judge(t.Context(), f, text)
			if err != nil {
				t.Fatal(err)
			}
			if *update {
				if err := got.write(stem); err != nil {
					t.Fatal(err)
				}
			}
			want, err := read(stem)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s; -update writes it anew (-want +got):\n%s", stem, diff)
			}
		})
	}
}

// A golden is what becomes of an object: the extension of the file, and what is in it.
type golden struct{ Ext, Text string }

func read(stem string) (golden, error) {
	var found []golden
	for _, ext := range []string{outExt, keepExt, dropExt, errExt} {
		b, err := os.ReadFile(stem + ext)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return golden{}, err
		}
		found = append(found, golden{ext, string(b)})
	}
	if len(found) != 1 {
		return golden{}, fmt.Errorf("%s: %d goldens, want 1; -update writes it", stem, len(found))
	}
	return found[0], nil
}

func (g golden) write(stem string) error {
	for _, ext := range []string{outExt, keepExt, dropExt, errExt} {
		if err := os.Remove(stem + ext); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return os.WriteFile(stem+g.Ext, []byte(g.Text), 0o644)
}

// judge returns what f makes of an object, and an error if it is not what filters may do.
func judge(ctx context.Context, f filter.Filter, text []byte) (golden, error) {
	var compact bytes.Buffer
	if err := json.Compact(&compact, text); err != nil {
		return golden{}, err
	}
	shape, bare, err := codec.DecodeObject(codec.Representation{}, compact.Bytes())
	if err != nil {
		return golden{}, err
	}
	got, err := apply(ctx, f, shape, bare)
	if err != nil {
		return golden{}, fmt.Errorf("json: %w", err)
	}
	if err := sameInProtobuf(ctx, f, shape, bare, got); err != nil {
		return golden{}, fmt.Errorf("protobuf: %w", err)
	}
	switch {
	case got.err != nil:
		return golden{errExt, got.err.Error() + "\n"}, nil
	case got.verdict == filter.Drop:
		return golden{Ext: dropExt}, nil
	case got.verdict == filter.Keep:
		return golden{Ext: keepExt}, nil
	}
	var out bytes.Buffer
	err = json.Indent(&out, shape.AppendObject(nil, got.bare), "", "  ")
	return golden{outExt, out.String()}, err
}

// A result is what Apply returned, and the object after it.
type result struct {
	verdict filter.Verdict
	bare    []byte // as it would be sent
	err     error
}

func (r result) String() string {
	if r.err != nil {
		return "error: " + r.err.Error()
	}
	return r.verdict.String()
}

// apply filters an object, and what came of it once more, and returns what the first time
// came to.
func apply(ctx context.Context, f filter.Filter, shape codec.Shape, bare []byte) (result, error) {
	got, err := applyOnce(ctx, f, shape, bare)
	if err != nil || got.err != nil || got.verdict == filter.Drop {
		return got, err
	}
	if changed := !bytes.Equal(got.bare, bare); changed != (got.verdict == filter.Change) {
		return got, fmt.Errorf("%s said %s; something changed: %t", f.Name(), got.verdict, changed)
	}
	again, err := applyOnce(ctx, f, shape, got.bare)
	if err == nil && (again.err != nil || again.verdict != filter.Keep) {
		err = fmt.Errorf("%s said %s to what it had let pass, want keep", f.Name(), again)
	}
	return got, err
}

func applyOnce(ctx context.Context, f filter.Filter, shape codec.Shape, bare []byte) (r result, err error) {
	o := filter.NewObject(shape, bare)
	r.verdict, r.err = f.Apply(ctx, o)
	if r.err == nil && r.verdict != filter.Drop {
		r.bare, err = o.Encode()
	}
	return r, err
}

// sameInProtobuf compares what becomes of the object in protobuf with what became of it in
// JSON. Kinds that have no protobuf are passed over.
func sameInProtobuf(ctx context.Context, f filter.Filter, shape codec.Shape, bare []byte, want result) error {
	typed, err := filter.NewObject(shape, bare).Decode()
	if err != nil {
		return err
	}
	message, ok := typed.(interface{ Marshal() ([]byte, error) })
	if !ok {
		return nil
	}
	wire, err := message.Marshal()
	if err != nil {
		return err
	}
	proto := shape
	proto.Protobuf = true
	got, err := apply(ctx, f, proto, wire)
	if err != nil {
		return err
	}
	if got.String() != want.String() {
		return fmt.Errorf("%s said %s, and in JSON %s", f.Name(), got, want)
	}
	if got.bare == nil {
		return nil
	}
	a, b, err := decodeBoth(shape, want.bare, proto, got.bare)
	if diff := cmp.Diff(a, b, cmpopts.EquateEmpty()); err == nil && diff != "" {
		err = fmt.Errorf("%s made another object of it (-json +protobuf):\n%s", f.Name(), diff)
	}
	return err
}

func decodeBoth(a codec.Shape, bareA []byte, b codec.Shape, bareB []byte) (x, y runtime.Object, err error) {
	if x, err = filter.NewObject(a, bareA).Decode(); err != nil {
		return nil, nil, err
	}
	y, err = filter.NewObject(b, bareB).Decode()
	return x, y, err
}
