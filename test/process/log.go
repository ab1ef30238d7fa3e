// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package process

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// What LogTail shows.
const (
	tailLines = 8
	tailBytes = 16 << 10
	lineBytes = 200
)

// Log returns the path of the log file, which holds standard output and standard
// error of all starts.
func (p *Process) Log() string {
	return filepath.Join(p.command.Dir, p.command.Name+".log")
}

// LogTail returns the last lines of the log, under a line with the file's path,
// for a message to a person.
func (p *Process) LogTail() string {
	tail, err := readTail(p.Log())
	if err != nil {
		return fmt.Sprintf("--- log of %s: %v", p.command.Name, err)
	}
	return fmt.Sprintf("--- end of %s\n%s", p.Log(), tail)
}

func readTail(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.NewSectionReader(f, max(0, st.Size()-tailBytes), tailBytes))
	if err != nil {
		return nil, err
	}
	lines := bytes.Split(bytes.TrimRight(b, "\n"), []byte("\n"))
	lines = lines[max(0, len(lines)-tailLines):]
	for i, l := range lines {
		if len(l) > lineBytes {
			lines[i] = append(l[:lineBytes:lineBytes], " ..."...)
		}
	}
	return bytes.Join(lines, []byte("\n")), nil
}
