// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

// Package process runs real programs for tests: it starts, stops, kills and
// restarts them, keeps what they say in a log file, and shows the end of it when
// something that a test waits for does not happen.
package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// ErrRunning is returned by Start of a process that runs already.
var ErrRunning = errors.New("process runs already")

// A Command says what to run, and when it is ready.
type Command struct {
	Name string   // in errors; the log is NAME.log. Default: base name of Path
	Path string   // the program
	Args []string // without the program's name
	Env  []string // KEY=VALUE, added to this process's environment
	Dir  string   // folder of the log file; it must exist

	// Ready is polled by Start until it returns nil. nil: ready once started.
	Ready        func(ctx context.Context) error
	ReadyTimeout time.Duration // default 60 s
	StopTimeout  time.Duration // from SIGTERM to SIGKILL in Stop, default 30 s
}

// A Process is a program that can be started, ended and started again with the
// same arguments. It leads a process group of its own, and the kernel kills it
// when the test process ends, however that ends. All methods are safe for
// concurrent use.
type Process struct {
	command Command

	mu   sync.Mutex // guards all below
	cmd  *exec.Cmd
	done chan struct{} // closed once the program has ended
	exit error         // how it ended, valid when done is closed
}

// New returns a process that is not started yet.
func New(c Command) *Process {
	if c.Name == "" {
		c.Name = filepath.Base(c.Path)
	}
	if c.ReadyTimeout == 0 {
		c.ReadyTimeout = 60 * time.Second
	}
	if c.StopTimeout == 0 {
		c.StopTimeout = 30 * time.Second
	}
	done := make(chan struct{})
	close(done)
	return &Process{command: c, done: done, exit: errors.New("not started")}
}

// Start runs the program and waits until it is ready. When that fails the
// program has been killed, and the error tells what was waited for, what was
// seen last, and the end of the log. ctx limits the waiting, not the program's
// life.
func (p *Process) Start(ctx context.Context) error {
	if err := p.start(); err != nil {
		return fmt.Errorf("start %s: %w", p.command.Name, err)
	}
	if p.command.Ready == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.command.ReadyTimeout)
	defer cancel()
	if err := p.Wait(ctx, "is ready", p.command.Ready); err != nil {
		return errors.Join(err, p.Kill())
	}
	return nil
}

func (p *Process) start() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running() {
		return ErrRunning
	}
	log, err := os.OpenFile(p.Log(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.command.Path, p.command.Args...)
	cmd.Env = append(os.Environ(), p.command.Env...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := onForker(cmd.Start); err != nil {
		return err
	}
	done := make(chan struct{})
	p.cmd, p.done = cmd, done
	go func() {
		err := cmd.Wait()
		if err == nil {
			err = errors.New("exit status 0")
		}
		// Its children; at once, while the group's number is still its own.
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		p.mu.Lock()
		p.exit = err
		p.mu.Unlock()
		close(done)
	}()
	return nil
}

// Wait polls condition until it returns nil. what completes the sentence
// "NAME ...", such as "is ready". It fails when ctx ends or the program does; the
// error wraps the condition's last one and shows the end of the log.
func (p *Process) Wait(ctx context.Context, what string, condition func(ctx context.Context) error) error {
	done := p.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	stop := make(chan struct{})
	defer close(stop)
	defer cancel(nil)
	go func() {
		select {
		case <-done:
			cancel(fmt.Errorf("it ended: %w", p.Exit()))
		case <-stop:
		}
	}()
	if err := Poll(ctx, p.command.Name+" "+what, condition); err != nil {
		return fmt.Errorf("%w\n%s", err, p.LogTail())
	}
	return nil
}

// Stop sends SIGTERM and waits until the program has ended. A program that is
// still there after the stop timeout is killed, which is an error. Stop of a
// program that does not run does nothing.
func (p *Process) Stop() error {
	done := p.Done()
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	t := time.NewTimer(p.command.StopTimeout)
	defer t.Stop()
	select {
	case <-done:
		return nil
	case <-t.C:
		return errors.Join(fmt.Errorf("%s did not end within %v of SIGTERM\n%s",
			p.command.Name, p.command.StopTimeout, p.LogTail()), p.Kill())
	}
}

// Kill sends SIGKILL to the whole process group and waits until the program has
// ended. Kill of a program that does not run does nothing.
func (p *Process) Kill() error {
	done, err := p.killGroup()
	if err != nil {
		return fmt.Errorf("kill %s: %w", p.command.Name, err)
	}
	<-done
	return nil
}

func (p *Process) killGroup() (done <-chan struct{}, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running() {
		err = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL)
	}
	if errors.Is(err, syscall.ESRCH) {
		err = nil
	}
	return p.done, err
}

// Close is Kill: tests keep nothing that an orderly end would save.
func (p *Process) Close() error { return p.Kill() }

// Freeze stops the program where it is, as a host that hangs would, and returns
// when none of its threads runs any more. Thaw lets it go on.
func (p *Process) Freeze(ctx context.Context) error {
	if err := p.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	pid := p.PID()
	return p.Wait(ctx, "is frozen", func(context.Context) error { return allStopped(pid) })
}

// allStopped returns nil if all threads of a process are stopped by a signal.
func allStopped(pid int) error {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return err
	}
	for _, t := range threads {
		b, err := os.ReadFile(t)
		if err != nil {
			return err
		}
		if _, state, ok := bytes.Cut(b, []byte(") ")); !ok || state[0] != 'T' {
			return fmt.Errorf("thread %s runs", t)
		}
	}
	return nil
}

// Thaw lets a frozen program go on.
func (p *Process) Thaw() error { return p.Signal(syscall.SIGCONT) }

// Signal sends s to the program alone. A program that does not run gets nothing.
func (p *Process) Signal(s syscall.Signal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.running() {
		return nil
	}
	if err := p.cmd.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal %v to %s: %w", s, p.command.Name, err)
	}
	return nil
}

// running is for callers that hold mu.
func (p *Process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Running says whether the program runs.
func (p *Process) Running() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.running()
}

// Done returns a channel that is closed when the program, as started last, has
// ended.
func (p *Process) Done() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.done
}

// Exit says how the program ended; it is only valid once Done is closed. It is
// an error also for exit status 0: servers are not meant to end by themselves.
func (p *Process) Exit() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.exit
}

// PID returns the program's process ID, 0 if it does not run.
func (p *Process) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.running() {
		return 0
	}
	return p.cmd.Process.Pid
}
