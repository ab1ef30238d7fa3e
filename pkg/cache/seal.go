// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/aes"
)

// keyBytes is the size of the key file's secret: 256 bits.
const keyBytes = 32

var errSealed = errors.New("sealed bytes do not open")

// A sealer encrypts what must not lie on disk in clear. Each piece is bound to
// its place: moved to another one, it does not open.
type sealer struct{ t value.Transformer }

// newSealer uses the key in file, base64 in one line, and makes one at the first
// start. A key beside the data protects copies of the data folder, no more.
func newSealer(file string) (*sealer, error) {
	key, err := readKey(file)
	if errors.Is(err, fs.ErrNotExist) {
		key, err = makeKey(file)
	}
	if err != nil {
		return nil, fmt.Errorf("encryption key file %s: %w", file, err)
	}
	t, err := aes.NewHKDFExtendedNonceGCMTransformer(key)
	if err != nil {
		return nil, fmt.Errorf("encryption key file %s: %w", file, err)
	}
	return &sealer{t: t}, nil
}

func readKey(file string) ([]byte, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(string(text)))
	if err != nil || len(key) != keyBytes {
		return nil, fmt.Errorf("want %d bytes in base64 on one line", keyBytes)
	}
	return key, nil
}

// makeKey writes a new key. It is linked into place, so that a key that is there
// is whole, and never replaces another.
func makeKey(file string) ([]byte, error) {
	key := make([]byte, keyBytes)
	rand.Read(key)
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
	if err := os.Link(f.Name(), file); err != nil {
		return nil, err
	}
	return key, nil
}

func (s *sealer) seal(b []byte, place string) ([]byte, error) {
	return s.t.TransformToStorage(sealContext(), b, value.DefaultContext(place))
}

func (s *sealer) open(b []byte, place string) ([]byte, error) {
	clear, _, err := s.t.TransformFromStorage(sealContext(), b, value.DefaultContext(place))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errSealed, err)
	}
	return clear, nil
}

// sealContext is what the transformer's interface asks for; this one, with a
// local key, does not use it.
func sealContext() context.Context {
	return context.TODO() //nolint:forbidigo // nothing waits here: see above
}
