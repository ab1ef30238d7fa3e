// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
)

// Disguises returns the forms in which a value of more than 8 bytes may be found: as
// it is, in hex, and in base64, by itself or within something longer.
func Disguises(value string) []string {
	forms := []string{value, hex.EncodeToString([]byte(value))}
	for shift := range 3 {
		// What does not depend on the neighbours: without the first and the last
		// group.
		for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
			s := enc.EncodeToString(append(make([]byte, shift), value...))
			forms = append(forms, s[4:len(s)-4])
		}
	}
	return slices.Compact(forms)
}

// Search looks for values, in all their disguises, in every file at or below root,
// and returns a line for each that it finds. values are by what they are called.
func Search(root string, values map[string]string) (found []string, err error) {
	forms := map[string][]string{}
	for what, value := range values {
		forms[what] = Disguises(value)
	}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		content, err := os.ReadFile(path)
		for what := range forms {
			for _, form := range forms[what] {
				if bytes.Contains(content, []byte(form)) {
					found = append(found, fmt.Sprintf("%s is in %s as %.40s", what, path, form))
					break
				}
			}
		}
		return err
	})
	slices.Sort(found)
	return found, err
}
