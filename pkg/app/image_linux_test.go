// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"os"
	"strconv"
	"strings"
	"testing"
)

// fileKB is how much of files is resident in this process.
func fileKB(t *testing.T) int {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(status)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "RssFile:" {
			n, err := strconv.Atoi(f[1])
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Skip("this kernel does not tell RssFile")
	return 0
}

func TestImageIsUnmapped(t *testing.T) {
	before := fileKB(t)
	unmapImage()
	if after := fileKB(t); after > before*3/4 {
		t.Errorf("%d KB of files are resident after unmapImage(), were %d", after, before)
	}
}
