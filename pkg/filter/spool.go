// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package filter

import (
	"bytes"
	"fmt"
	"io"
	"os"
)

const (
	// spoolMemoryBytes is how much of a list is gathered in memory, before the rest goes
	// to a file.
	spoolMemoryBytes = 256 << 10
	spoolBufferBytes = 32 << 10
)

// A spool holds bytes until all of them are known: the first in memory, the rest in a
// file whose name is gone as soon as it is there, and which is gone before the kernel
// finds time to write it to the disk. Where there can be no file, memory has to do.
type spool struct {
	dir     string // "": in memory
	metrics *metrics

	mem  []byte
	file *os.File // nil: nothing is in it
	from io.Reader
}

func (s *spool) write(b []byte) error {
	s.mem = append(s.mem, b...)
	if s.dir == "" || len(s.mem) < spoolMemoryBytes {
		return nil
	}
	if s.file == nil {
		f, err := os.CreateTemp(s.dir, "list-*")
		if err == nil {
			if err = os.Remove(f.Name()); err != nil {
				f.Close()
			}
		}
		if err != nil {
			s.dir = "" // memory has to do
			return nil
		}
		s.file = f
	}
	n, err := s.file.Write(s.mem)
	s.metrics.spooled.Add(float64(n))
	if s.mem = s.mem[:copy(s.mem, s.mem[n:])]; err != nil {
		s.dir = "" // what is in the file is in it, and the rest stays here
	}
	return nil
}

// rewind begins with reading.
func (s *spool) rewind() error {
	s.from = bytes.NewReader(s.mem)
	if s.file == nil {
		return nil
	}
	if _, err := s.file.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("gathered list: %w", err)
	}
	s.from = io.MultiReader(s.file, s.from)
	return nil
}

// read fills b.
func (s *spool) read(b []byte) error {
	if _, err := io.ReadFull(s.from, b); err != nil {
		return fmt.Errorf("gathered list: %w", err)
	}
	return nil
}

func (s *spool) close() error {
	if s.file == nil {
		return nil
	}
	return s.file.Close()
}
