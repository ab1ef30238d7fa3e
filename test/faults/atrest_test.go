// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// disguises returns the forms in which a value may be found: as it is, in hex, and
// in base64, by itself or within something longer.
func disguises(value string) []string {
	forms := []string{value, hex.EncodeToString([]byte(value))}
	for shift := range 3 {
		// What does not depend on the neighbours: without the first and the
		// last group.
		for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			s := enc.EncodeToString(append(make([]byte, shift), value...))
			forms = append(forms, s[4:len(s)-4])
		}
	}
	return slices.Compact(forms)
}

// searchDisk looks for secrets and tokens in all that the hub has written: its
// data and its log.
func (c *cast) searchDisk() {
	needles := map[string]string{}
	for _, v := range c.secrets {
		needles[v] = "secret " + v
	}
	for name, token := range c.tokens {
		needles[token] = "token of " + name
		if parts := strings.Split(token, "."); len(parts) == 3 {
			for i, part := range []string{"header", "claims", "signature"} {
				needles[parts[i]] = part + " of the token of " + name
			}
		}
	}
	var files, size int
	err := filepath.WalkDir(filepath.Dir(c.Hub.DataDir()), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if info, err := d.Info(); err != nil {
			return err
		} else if mode := info.Mode().Perm(); strings.HasPrefix(path, c.Hub.DataDir()) && mode&0o077 != 0 && filepath.Base(path) != "ca.crt" && filepath.Base(path) != "pki" {
			c.T.Errorf("%s has mode %v", path, mode)
		}
		if d.IsDir() {
			return nil
		}
		b, err := os.ReadFile(path)
		files, size = files+1, size+len(b)
		for value, what := range needles {
			for _, form := range disguises(value) {
				if bytes.Contains(b, []byte(form)) {
					c.T.Errorf("%s is in %s as %.60s", what, path, form)
				}
			}
		}
		return err
	})
	c.Must(err)
	if journal := filepath.Join(c.Hub.DataDir(), "journal"); !holds(journal, []byte(`"of":"b"`)) {
		c.T.Errorf("%s does not hold ConfigMaps in clear: the search cannot be right", journal)
	}
	c.T.Logf("%d files, %d bytes searched for %d values", files, size, len(needles))
}

// holds says whether a file below dir holds the bytes.
func holds(dir string, b []byte) (found bool) {
	_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			content, readErr := os.ReadFile(path)
			found, err = found || bytes.Contains(content, b), readErr
		}
		return err
	})
	return found
}
