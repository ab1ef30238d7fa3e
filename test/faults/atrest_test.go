// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/edgehub/edgehub/test/rig"
)

// searchDisk looks for secrets and tokens in all that the hub has written: its
// data and its log.
func (c *cast) searchDisk() {
	values := map[string]string{}
	for i, v := range c.secrets {
		values[fmt.Sprint("secret ", i)] = v
	}
	for name, token := range c.tokens {
		values["token of "+name] = token
		if parts := strings.Split(token, "."); len(parts) == 3 {
			for i, part := range []string{"header", "claims", "signature"} {
				values[part+" of the token of "+name] = parts[i]
			}
		}
	}
	found, err := rig.Search(filepath.Dir(c.Hub.DataDir()), values)
	c.Must(err)
	for _, f := range found {
		c.T.Error(f)
	}
	c.Must(filepath.WalkDir(c.Hub.DataDir(), func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil && info.Mode().Perm()&0o077 != 0 && filepath.Base(path) != "ca.crt" && filepath.Base(path) != "pki" {
			c.T.Errorf("%s has mode %v", path, info.Mode().Perm())
		}
		return err
	}))
	if journal := filepath.Join(c.Hub.DataDir(), "journal"); !holds(journal, []byte(`"of":"b"`)) {
		c.T.Errorf("%s does not hold ConfigMaps in clear: the search cannot be right", journal)
	}
	c.T.Logf("searched for %d values", len(values))
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
