// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package seal

import (
	"bytes"
	"encoding/base64"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func line(b byte) string {
	return base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{b}, keyBytes)) + "\n"
}

func write(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func mustNew(t *testing.T, file string) *Sealer {
	t.Helper()
	s, err := New(file)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSealed(t *testing.T) {
	s := mustNew(t, write(t, line(1)))
	clear := []byte("the value of a Secret")
	b, err := s.Seal(s.Current(), clear, "here")
	if err != nil {
		t.Fatal(err)
	}
	if len(b) != len(clear)+Overhead {
		t.Errorf("Seal made %d bytes of %d, want %d", len(b), len(clear), len(clear)+Overhead)
	}
	again, err := s.Seal(s.Current(), clear, "here")
	if err != nil || bytes.Equal(b, again) {
		t.Errorf("Seal twice = the same bytes, %v", err)
	}
	if got, err := s.Open(s.Current(), b, "here"); err != nil || !bytes.Equal(got, clear) {
		t.Errorf("Open = %q, %v, want %q", got, err, clear)
	}
	if _, err := s.Open(s.Current(), b, "there"); !errors.Is(err, ErrBroken) {
		t.Errorf("Open in another place: %v, want ErrBroken", err)
	}
	for i := range b {
		changed := bytes.Clone(b)
		changed[i] ^= 1
		if _, err := s.Open(s.Current(), changed, "here"); !errors.Is(err, ErrBroken) {
			t.Errorf("Open with bit %d flipped: %v, want ErrBroken", i*8, err)
		}
	}
	if _, err := s.Open("", clear, "here"); !errors.Is(err, ErrUnknownKey) {
		t.Errorf("Open in clear: %v, want ErrUnknownKey", err)
	}
}

// A new key is put above the old one; when all is sealed anew, the old one goes.
func TestKeysRotate(t *testing.T) {
	before := mustNew(t, write(t, line(1)))
	b, err := before.Seal(before.Current(), []byte("x"), "p")
	if err != nil {
		t.Fatal(err)
	}
	both := mustNew(t, write(t, "# 2026\n"+line(2)+"\n"+line(1)))
	if both.Current() == before.Current() || !both.Knows(before.Current()) {
		t.Errorf("Current() = %s, want another one than %s, which is known: %v", both.Current(), before.Current(), both.Knows(before.Current()))
	}
	if got, err := both.Open(before.Current(), b, "p"); err != nil || string(got) != "x" {
		t.Errorf("Open with both keys = %q, %v", got, err)
	}
	after := mustNew(t, write(t, line(2)))
	if _, err := after.Open(before.Current(), b, "p"); !errors.Is(err, ErrUnknownKey) || after.Knows(before.Current()) {
		t.Errorf("Open without the old key: %v, want ErrUnknownKey", err)
	}
	if after.Current() != both.Current() {
		t.Errorf("Current() = %s, want %s", after.Current(), both.Current())
	}
}

func TestKeyFileIsMade(t *testing.T) {
	file := filepath.Join(t.TempDir(), "sub", "key")
	first, second := mustNew(t, file), mustNew(t, file)
	if first.Current() != second.Current() {
		t.Errorf("the key of a second start is %s, want %s", second.Current(), first.Current())
	}
	info, err := os.Stat(file)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v, want 0600", info.Mode(), err)
	}
	if names, _ := os.ReadDir(filepath.Dir(file)); len(names) != 1 {
		t.Errorf("%d files are left in the folder, want the key alone", len(names))
	}
}

// What is wrong with a key file is told, and edgehub goes on with another key.
func TestKeyFileThatCannotBeUsed(t *testing.T) {
	for _, tc := range []struct{ name, text, want string }{
		{"empty", "", "holds no key"},
		{"comments alone", "# none\n\n", "holds no key"},
		{"short", "# first\nc2hvcnQ=\n", "line 2: want 32 bytes"},
		{"not base64", line(1) + "%%%\n", "line 2: want 32 bytes"},
		{"large", strings.Repeat("#", maxFileBytes+1), "more than 16384 bytes"},
		{"too many", strings.Repeat(line(1), maxKeys+1), "65 keys; at most 64"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			file := write(t, tc.text)
			s, err := New(file)
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), file) {
				t.Errorf("New: %v, want the file and %q", err, tc.want)
			}
			b, err := s.Seal(s.Current(), []byte("x"), "p")
			if err != nil {
				t.Fatal(err)
			}
			if got, err := s.Open(s.Current(), b, "p"); err != nil || string(got) != "x" {
				t.Errorf("Open = %q, %v", got, err)
			}
			if text, _ := os.ReadFile(file); string(text) != tc.text {
				t.Errorf("the file was changed to %q", text)
			}
			if other, _ := New(file); other.Current() == s.Current() {
				t.Error("two starts have the same key in memory")
			}
		})
	}
	t.Run("a folder", func(t *testing.T) {
		if _, err := New(t.TempDir()); err == nil {
			t.Error("New of a folder: no error")
		}
	})
}
