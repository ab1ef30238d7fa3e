// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

const candidateTimeout = 60 * time.Second

// executable is the program that is run and copied.
func (i *installer) executable() string {
	if i.o.Executable != "" {
		return i.o.Executable
	}
	return "/proc/self/exe"
}

// candidate runs the program as a hub beside whatever there is: on other ports, with a data
// directory that is thrown away, with the node's credential. It must get ready and ask the
// API server for the node's own Node.
func (i *installer) candidate(ctx context.Context, n node) (err error) {
	ctx, cancel := context.WithTimeout(ctx, min(candidateTimeout, i.o.ReadyTimeout))
	defer cancel()
	dir := i.inState(candidateDir)
	// The last one may have been killed.
	if err := errors.Join(i.host.removeAll(dir), i.host.mkdir(dir, 0o700)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, i.host.removeAll(dir)) }()
	listen, metrics, err := freeAddresses()
	if err != nil {
		return err
	}
	args, data, err := i.candidateArgs(n, listen, metrics)
	if err != nil {
		return err
	}
	said := &tail{}
	cmd := exec.CommandContext(ctx, i.executable(), args...)
	cmd.Stdout, cmd.Stderr = said, said
	cmd.Env = append(os.Environ(), placedVariable+"=candidate")
	// It must not outlive this process and keep the data directory.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 5 * time.Second
	ended, err := startLocked(cmd)
	if err != nil {
		return fmt.Errorf("start the candidate: %w", err)
	}
	err = poll(ctx, candidateTimeout, func(ctx context.Context) error {
		select {
		case <-ended:
			cancel()
			return errors.New("it ended")
		default:
		}
		if _, err := scrape(ctx, "http://"+metrics); err != nil {
			return err
		}
		return i.askCandidate(ctx, n, "https://"+listen, data)
	})
	cancel()
	<-ended
	if err != nil {
		return fmt.Errorf("the candidate does not work: %w; its last words:\n%s", err, said)
	}
	return nil
}

// startLocked starts cmd on a thread that lives as long as it: the kernel ends it when its
// parent thread ends, not the process.
func startLocked(cmd *exec.Cmd) (ended <-chan struct{}, err error) {
	started, done := make(chan error), make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked: the thread ends with this
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // that it ended is all there is to know
		}
	}()
	return done, <-started
}

// candidateArgs are the hub's flags with paths as they are here, and nothing that others
// would notice: no address for pods, no request for a certificate, no key of its own.
func (i *installer) candidateArgs(n node, listen, metrics string) (args []string, data string, err error) {
	here := func(path string) string {
		real, e := i.host.resolve(path)
		err = errors.Join(err, e)
		return real
	}
	spec := hubSpec{node: n, servers: i.o.ServerURLs}
	spec.node.caFile, spec.node.certFile, spec.node.keyFile = here(n.caFile), here(n.certFile), here(n.keyFile)
	data = here(i.inState(candidateDir, "data"))
	spec.dataDir = data
	for _, f := range i.o.HubFlags {
		switch name, value, _ := strings.Cut(f, "="); {
		case name == "listen-address", name == "metrics-listen-address", name == "link-local-address", name == "link-local-interface",
			name == "serving-certificate", name == "encryption-key-file":
		case fileFlags[name]:
			spec.flags = append(spec.flags, name+"="+here(value))
		default:
			spec.flags = append(spec.flags, f)
		}
	}
	spec.flags = append(spec.flags, "listen-address="+listen, "metrics-listen-address="+metrics)
	return spec.args(), data, err
}

// askCandidate wants the node's own Node of the API server: there is no record yet.
func (i *installer) askCandidate(ctx context.Context, n node, url, data string) error {
	pair, _, err := i.credential(n)
	if err != nil {
		return err
	}
	authorities, err := os.ReadFile(filepath.Join(data, "pki", "ca.crt"))
	if err != nil {
		return err
	}
	s, err := newServer(url, authorities, pair)
	if err != nil {
		return err
	}
	_, err = s.getNode(ctx, n.name)
	return err
}

// freeAddresses returns two that nobody listens on at the moment.
func freeAddresses() (a, b string, err error) {
	first, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", "", err
	}
	defer first.Close()
	second, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", "", err
	}
	defer second.Close()
	return first.Addr().String(), second.Addr().String(), nil
}

const maxTailBytes = 4 << 10

// A tail keeps the end of what is written to it.
type tail struct {
	mu sync.Mutex
	b  []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	if over := len(t.b) - maxTailBytes; over > 0 {
		t.b = append(t.b[:0], t.b[over:]...)
	}
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(t.b))
}
