// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package seal encrypts what must not lie on disk in clear: Secrets, tokens,
// verdicts, and all that is recorded if the operator wants so. pkg/cache and
// pkg/outbox use it, through small interfaces of their own.
//
// A key on the same disk as the data protects copies of the data folder, and
// nothing against who can read the disk. systemd-creds or a TPM keeps it elsewhere.
package seal

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/aes"
)

var (
	// ErrUnknownKey means that nobody here has the key.
	ErrUnknownKey = errors.New("sealed with an unknown key")
	// ErrBroken means that sealed bytes were changed, or moved from their place.
	ErrBroken = errors.New("sealed bytes do not open")
)

const (
	// keyBytes is the size of a key: 256 bits.
	keyBytes = 32
	// Overhead is by how much sealed bytes are longer than those in clear: key
	// derivation, nonce, tag.
	Overhead = 32 + 12 + 16
	// maxFileBytes bounds a key file: some hundred keys.
	maxFileBytes = 16 << 10
	maxKeys      = 64
)

// A Sealer encrypts and authenticates pieces of data, each bound to its place:
// moved to another one, it does not open. Safe for concurrent use.
type Sealer struct {
	current string
	byID    map[string]value.Transformer
}

// New returns a Sealer of the keys in file: 32 bytes in base64 on each line, blank
// lines and lines that begin with # apart. The first seals, all of them open; so a
// key is changed by putting a new one above it. A file that is missing is made,
// with a key of its own and mode 0600.
//
// A Sealer is returned in any case. If there is an error as well, it says why the
// file cannot be used, and the Sealer has a key that lives in memory only: what it
// seals is lost with the process, and what was sealed before does not open.
func New(file string) (*Sealer, error) {
	keys, err := readKeys(file)
	if errors.Is(err, fs.ErrNotExist) {
		var key []byte
		key, err = makeKey(file)
		keys = [][]byte{key}
	}
	if err != nil {
		err = fmt.Errorf("encryption key file %s: %w", file, err)
		return Ephemeral(), err
	}
	return newSealer(keys), nil
}

func newSealer(keys [][]byte) *Sealer {
	s := &Sealer{byID: map[string]value.Transformer{}}
	for _, key := range keys {
		t, terr := aes.NewHKDFExtendedNonceGCMTransformer(key)
		if terr != nil {
			panic(terr) // of a key of the wrong size
		}
		id := idOf(key)
		s.byID[id] = t
		if s.current == "" {
			s.current = id
		}
	}
	return s
}

// Ephemeral returns a Sealer with a key that lives in memory only.
func Ephemeral() *Sealer { return newSealer([][]byte{newKey()}) }

// Current names the key that seals. The name tells nothing about the key.
func (s *Sealer) Current() string { return s.current }

// Knows reports whether what was sealed with the key of that name can be opened.
func (s *Sealer) Knows(id string) bool { return s.byID[id] != nil }

// Seal encrypts b with the key of a name, for place.
func (s *Sealer) Seal(id string, b []byte, place string) ([]byte, error) {
	t := s.byID[id]
	if t == nil {
		return nil, ErrUnknownKey
	}
	return t.TransformToStorage(sealContext(), b, value.DefaultContext(place))
}

// Open decrypts what Seal has made with the key of that name, for the same place.
func (s *Sealer) Open(id string, b []byte, place string) ([]byte, error) {
	t := s.byID[id]
	if t == nil {
		return nil, ErrUnknownKey
	}
	clear, _, err := t.TransformFromStorage(sealContext(), b, value.DefaultContext(place))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrBroken, err)
	}
	return clear, nil
}

// sealContext is what the transformer's interface asks for; this one, with a
// local key, does not use it.
func sealContext() context.Context {
	return context.TODO() //nolint:forbidigo // nothing waits here: see above
}

// idOf is a hash of the key behind a prefix, so that it is no other hash of it.
func idOf(key []byte) string {
	sum := sha256.Sum256(append([]byte("edgehub key id\x00"), key...))
	return hex.EncodeToString(sum[:4])
}

func readKeys(file string) ([][]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxFileBytes+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxFileBytes {
		return nil, fmt.Errorf("more than %d bytes", maxFileBytes)
	}
	var keys [][]byte
	n := 0
	for line := range strings.Lines(string(text)) {
		n++
		if line = strings.TrimSpace(line); line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		key, err := base64.StdEncoding.DecodeString(line)
		if err != nil || len(key) != keyBytes {
			return nil, fmt.Errorf("line %d: want %d bytes in base64", n, keyBytes)
		}
		keys = append(keys, key)
	}
	switch {
	case len(keys) == 0:
		return nil, fmt.Errorf("it holds no key: want %d bytes in base64 on a line", keyBytes)
	case len(keys) > maxKeys:
		return nil, fmt.Errorf("%d keys; at most %d", len(keys), maxKeys)
	}
	return keys, nil
}

func newKey() []byte {
	key := make([]byte, keyBytes)
	rand.Read(key)
	return key
}

// makeKey writes a new key. It is linked into place, so that a key that is there
// is whole, and never replaces another.
func makeKey(file string) ([]byte, error) {
	key := newKey()
	dir := filepath.Dir(file)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.CreateTemp(dir, ".encryption-key-*") // mode 0600
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = fmt.Fprintln(f, base64.StdEncoding.EncodeToString(key))
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return nil, err
	}
	if err := os.Link(f.Name(), file); errors.Is(err, fs.ErrExist) {
		return nil, err
	} else if err != nil { // a file system without links, such as a stick's
		if err := os.Rename(f.Name(), file); err != nil {
			return nil, err
		}
	}
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	return key, errors.Join(d.Sync(), d.Close())
}
