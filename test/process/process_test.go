// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package process_test

import (
	"bufio"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/edgehub/edgehub/test/process"
)

// asParent makes the test binary start a child and wait to be killed.
const asParent = "EDGEHUB_TEST_AS_PARENT"

func TestMain(m *testing.M) {
	if dir := os.Getenv(asParent); dir != "" {
		p := process.New(process.Command{Path: "sleep", Args: []string{"600"}, Dir: dir})
		if err := p.Start(context.Background()); err != nil {
			panic(err)
		}
		os.Stdout.WriteString(strconv.Itoa(p.PID()) + "\n")
		select {}
	}
	os.Exit(m.Run())
}

func sh(t *testing.T, script string) process.Command {
	t.Helper()
	return process.Command{Name: "script", Path: "/bin/sh", Args: []string{"-c", script}, Dir: t.TempDir()}
}

func fileExists(path string) func(context.Context) error {
	return func(context.Context) error {
		_, err := os.Stat(path)
		return err
	}
}

func TestStartWaitsUntilReady(t *testing.T) {
	c := sh(t, "echo up; touch $F; exec sleep 600")
	file := filepath.Join(c.Dir, "ready")
	c.Env = []string{"F=" + file}
	c.Ready = fileExists(file)
	p := process.New(c)
	process.Run(t, p)
	if err := p.Start(t.Context()); !errors.Is(err, process.ErrRunning) {
		t.Errorf("second Start() = %v, want ErrRunning", err)
	}
	if err := p.Stop(); err != nil {
		t.Errorf("Stop() = %v, want nil", err)
	}
	if p.Running() {
		t.Error("Running() after Stop = true, want false")
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if err := p.Start(t.Context()); err != nil {
		t.Errorf("Start() after Stop = %v, want nil", err)
	}
	if got := strings.Count(p.LogTail(), "up"); got != 2 {
		t.Errorf("LogTail() = %q, want the lines of both starts", p.LogTail())
	}
}

func TestStartTellsWhyNot(t *testing.T) {
	errClosed := errors.New("door is closed")
	tests := []struct {
		name, script string
		want         []string
	}{
		{"ends at once", "echo no such flag; exit 3", []string{"script is ready", "exit status 3", "door is closed", "no such flag"}},
		{"ends well", "echo bye; exit 0", []string{"it ended", "exit status 0", "bye"}},
		{"never ready", "echo here I am; sleep 600", []string{"script is ready", "deadline exceeded", "door is closed", "here I am"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := sh(t, tt.script)
			c.ReadyTimeout = 500 * time.Millisecond
			c.Ready = func(context.Context) error { return errClosed }
			p := process.New(c)
			err := p.Start(t.Context())
			if !errors.Is(err, errClosed) {
				t.Fatalf("Start() = %v, want the condition's error", err)
			}
			for _, w := range tt.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("Start() = %q, want %q in it", err, w)
				}
			}
			if p.Running() {
				t.Error("Running() after a failed Start = true, want false")
			}
		})
	}
}

func TestKillEndsTheWholeGroup(t *testing.T) {
	c := sh(t, "sleep 600 & echo $! >$F.tmp; mv $F.tmp $F; wait")
	file := filepath.Join(c.Dir, "child")
	c.Env = []string{"F=" + file}
	c.Ready = fileExists(file)
	p := process.New(c)
	process.Run(t, p)
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Kill(); err != nil {
		t.Fatalf("Kill() = %v, want nil", err)
	}
	waitGone(t, child)
}

func TestStopKillsWhatIgnoresIt(t *testing.T) {
	c := sh(t, "trap '' TERM; touch $F; while :; do sleep 1; done")
	file := filepath.Join(c.Dir, "ready")
	c.Env = []string{"F=" + file}
	c.Ready = fileExists(file)
	c.StopTimeout = 200 * time.Millisecond
	p := process.New(c)
	process.Run(t, p)
	if err := p.Stop(); err == nil || !strings.Contains(err.Error(), "did not end within 200ms") {
		t.Errorf("Stop() = %v, want that it did not end", err)
	}
	if p.Running() {
		t.Error("Running() after Stop = true, want false")
	}
}

func TestFreeze(t *testing.T) {
	c := sh(t, "i=0; while :; do i=$((i+1)); echo $i >$F; done")
	file := filepath.Join(c.Dir, "count")
	c.Env = []string{"F=" + file}
	c.Ready = fileExists(file)
	p := process.New(c)
	process.Run(t, p)
	content := func() string {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if err := p.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	frozen := content()
	for range 100 {
		if got := content(); got != frozen {
			t.Fatalf("a frozen process went on from %q to %q", frozen, got)
		}
	}
	if err := p.Thaw(); err != nil {
		t.Fatal(err)
	}
	if err := process.Poll(t.Context(), "it goes on", process.Until(func() bool { return content() != frozen })); err != nil {
		t.Error(err)
	}
}

// A test process that is killed leaves nothing behind.
func TestChildrenDieWithTheTest(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	parent := exec.Command(self)
	parent.Env = append(os.Environ(), asParent+"="+t.TempDir())
	out, err := parent.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Start(); err != nil {
		t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil {
		t.Fatal(err)
	}
	if err := parent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = parent.Wait() // killed
	waitGone(t, child)
}

// waitGone waits until the process is no more, or only a zombie that somebody
// else has to collect.
func waitGone(t *testing.T, pid int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	err := process.Poll(ctx, "process "+strconv.Itoa(pid)+" has ended", func(context.Context) error {
		if err := syscall.Kill(pid, 0); err != nil {
			return nil
		}
		b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		if err != nil || strings.Contains(string(b), ") Z ") {
			return nil
		}
		return errors.New("it runs")
	})
	if err != nil {
		t.Error(err)
	}
}
