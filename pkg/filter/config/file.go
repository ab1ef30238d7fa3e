// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
)

// A polled file is read again and again. Methods must not run concurrently.
type polled struct {
	path        string
	taken, seen [sha256.Size]byte // contents or error
}

// load reads the file as it is.
func (f *polled) load() ([]byte, error) {
	b, err := readFile(f.path)
	f.seen = digest(b, err)
	f.taken = f.seen
	return b, err
}

// poll reads the file, and reports false unless it holds something other than was taken,
// and did so at the last poll, too: a file that is being written is not taken. Contents
// decide, not names or times: some replace a symbolic link, others write in place.
func (f *polled) poll() (b []byte, changed bool, err error) {
	b, err = readFile(f.path)
	before := f.seen
	f.seen = digest(b, err)
	if f.seen != before || f.seen == f.taken {
		return nil, false, nil
	}
	f.taken = f.seen
	return b, true, err
}

func digest(b []byte, err error) [sha256.Size]byte {
	if err != nil {
		return sha256.Sum256([]byte("error " + err.Error()))
	}
	sum := sha256.Sum256(b)
	return sha256.Sum256(sum[:])
}

// readFile reads up to a byte more than a document may have.
func readFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a pipe would wait for its writer
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s: is not a file", path)
	}
	return io.ReadAll(io.LimitReader(f, maxBytes+1))
}

// parseFile is Parse for what comes from a file, where a text without an end may be one
// that was cut short.
func parseFile(name string, b []byte, k Known) (*Configuration, []string, error) {
	if n := len(b); n > 0 && n <= maxBytes && b[n-1] != '\n' {
		return nil, nil, fmt.Errorf("%s:%d: does not end in a newline, and may have been cut short", name, lineOf(b, n))
	}
	return Parse(name, b, k)
}

const (
	lastGoodFile = "filters-last-good.yaml"
	lastGoodHead = "# edgehub: the last good configuration of filters, from "
)

// lastGood is a document as it is kept on disk: behind a line that says where it is from.
func lastGood(source, name string, doc []byte) []byte {
	b := fmt.Appendf(nil, "%s%s %q\n", lastGoodHead, source, name)
	b = append(b, bytes.TrimPrefix(doc, []byte("\ufeff"))...) // a mark that may stand at the beginning only
	if !bytes.HasSuffix(b, []byte("\n")) {
		b = append(b, '\n')
	}
	return b
}

// isFrom reports whether a document on disk came from a source.
func isFrom(b []byte, source, name string) bool {
	line, _, _ := strings.Cut(string(b), "\n")
	return line == fmt.Sprintf("%s%s %q", lastGoodHead, source, name)
}
