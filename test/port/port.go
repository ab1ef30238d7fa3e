// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package port hands out TCP ports to the servers of a test. A port of the
// kernel's choice (":0") does not do for a server that is stopped and started
// again on the same port: meanwhile any outgoing connection may take it.
package port

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
)

// The ports below the NodePort range, which itself lies below Linux's
// ephemeral ports (32768 and up).
const lowest, highest = 11000, 29999

// held keeps the lock files open: the locks end with this process.
var (
	mu   sync.Mutex
	held []*os.File
)

// Free returns a TCP port that nothing listens on, on any address, and that
// belongs to this process until it ends: other test processes on this machine
// of the same user that call Free get other ports. It is safe for concurrent use.
func Free() (int, error) {
	mu.Lock()
	defer mu.Unlock()
	dir := filepath.Join(os.TempDir(), fmt.Sprintf("edgehub-test-ports-%d", os.Getuid()))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return 0, fmt.Errorf("lock files of ports: %w", err)
	}
	var last error
	for range 200 {
		p := lowest + rand.IntN(highest-lowest+1)
		f, err := take(dir, p)
		if err != nil {
			last = err
			continue
		}
		held = append(held, f)
		return p, nil
	}
	return 0, fmt.Errorf("no free port among 200 tried: %w", last)
}

// take locks the port's file and tries the port itself.
func take(dir string, p int) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, strconv.Itoa(p)), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("port %d belongs to another test: %w", p, err), f.Close())
	}
	l, err := net.Listen("tcp", ":"+strconv.Itoa(p))
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if err := l.Close(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
