// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package faults does to the real program, between a real API server and real
// clients, what happens to edge nodes: it is killed, its link dies without a word,
// its disk is full, its configuration is wrong, and somebody tries to read what is
// not theirs.
package faults

import (
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/edgehub/edgehub/test/controlplane"
	"github.com/edgehub/edgehub/test/rig"
)

const operator = "faults-operator" // a static user who may do everything

// newRig starts all but the hub, with the operator as one more user.
func newRig(t *testing.T, users []controlplane.StaticUser, args ...string) *rig.Rig {
	t.Helper()
	return rig.New(t, append(users, controlplane.StaticUser{Name: operator, Groups: []string{"system:masters"}}), args...)
}

// fingerprint returns the hash of every file below dir, by its path.
func fingerprint(dir string) (map[string]string, error) {
	sums := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		sum := sha256.Sum256(b)
		sums[path] = hex.EncodeToString(sum[:])
		return err
	})
	return sums, err
}
