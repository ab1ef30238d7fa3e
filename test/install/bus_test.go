// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/godbus/dbus/v5"

	"github.com/edgehub/edgehub/test/process"
)

const busConfig = `<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN" "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig>
  <type>system</type>
  <listen>unix:path=%s</listen>
  <auth>EXTERNAL</auth>
  <policy context="default">
    <allow user="*"/><allow own="*"/><allow send_type="method_call"/><allow send_destination="*" eavesdrop="true"/><allow receive_sender="*"/>
  </policy>
</busconfig>
`

// newBus runs a D-Bus as a system has one, at this socket.
func newBus(t *testing.T, socket string) {
	t.Helper()
	program, err := exec.LookPath("dbus-daemon")
	if err != nil {
		t.Skip("SKIPPED, NOT TESTED: systemd is asked by D-Bus, which needs dbus-daemon; run test/install-containerd.sh")
	}
	dir := t.TempDir()
	config := filepath.Join(dir, "bus.conf")
	if err := errors.Join(os.MkdirAll(filepath.Dir(socket), 0o755), os.WriteFile(config, fmt.Appendf(nil, busConfig, socket), 0o600)); err != nil {
		t.Fatal(err)
	}
	process.Run(t, process.New(process.Command{
		Path: program, Args: []string{"--nofork", "--nopidfile", "--config-file=" + config}, Dir: dir,
		Ready: func(context.Context) error {
			c, err := net.Dial("unix", socket)
			if err == nil {
				c.Close()
			}
			return err
		},
	}))
}

// A systemd is a stub of the part of it that is asked: it answers on a real bus.
type systemd struct {
	conn *dbus.Conn
	// do does what is asked of a unit: start, restart, stop, reload. An error is a job that
	// failed.
	do func(verb, unit string) error

	mu    sync.Mutex
	jobs  int
	calls []string
}

const (
	systemdName  = "org.freedesktop.systemd1"
	systemdPath  = "/org/freedesktop/systemd1"
	managerIface = systemdName + ".Manager"
)

func newSystemd(t *testing.T, socket string, do func(verb, unit string) error) *systemd {
	t.Helper()
	newBus(t, socket)
	conn, err := dbus.Connect("unix:path=" + socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	s := &systemd{conn: conn, do: do}
	err = errors.Join(conn.Export(s, systemdPath, managerIface),
		conn.ExportSubtree(unitProperties{}, systemdPath+"/unit", "org.freedesktop.DBus.Properties"))
	if err != nil {
		t.Fatal(err)
	}
	if r, err := conn.RequestName(systemdName, dbus.NameFlagDoNotQueue); err != nil || r != dbus.RequestNameReplyPrimaryOwner {
		t.Fatalf("RequestName() = %v, %v", r, err)
	}
	return s
}

// unitProperties says of every unit but one that it is there.
type unitProperties struct{}

// Get is a method on the bus.
func (unitProperties) Get(m dbus.Message, _, property string) (dbus.Variant, *dbus.Error) {
	path, _ := m.Headers[dbus.FieldPath].Value().(dbus.ObjectPath)
	switch {
	case property != "LoadState":
		return dbus.Variant{}, dbus.NewError("org.freedesktop.DBus.Error.UnknownProperty", nil)
	case strings.Contains(string(path), "missing"):
		return dbus.MakeVariant("not-found"), nil
	}
	return dbus.MakeVariant("loaded"), nil
}

func (s *systemd) called(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, what)
}

// job does it, and tells of its end as systemd does, after the answer.
func (s *systemd) job(verb, unit string) (dbus.ObjectPath, *dbus.Error) {
	s.mu.Lock()
	s.jobs++
	n := uint32(s.jobs)
	s.mu.Unlock()
	s.called(verb + " " + unit)
	path := dbus.ObjectPath(fmt.Sprintf("%s/job/%d", systemdPath, n))
	go func() {
		result := "done"
		if err := s.do(verb, unit); err != nil {
			result = "failed"
		}
		_ = s.conn.Emit(systemdPath, managerIface+".JobRemoved", n, path, unit, result)
	}()
	return path, nil
}

// What follows are methods on the bus.

func (s *systemd) RestartUnit(unit, _ string) (dbus.ObjectPath, *dbus.Error) {
	return s.job("restart", unit)
}

func (s *systemd) StopUnit(unit, _ string) (dbus.ObjectPath, *dbus.Error) { return s.job("stop", unit) }

func (s *systemd) Reload() *dbus.Error {
	s.called("reload")
	return nil
}

type unitChange struct{ Type, File, Destination string }

func (s *systemd) EnableUnitFiles(files []string, _, _ bool) (bool, []unitChange, *dbus.Error) {
	s.called("enable " + strings.Join(files, " "))
	return true, nil, nil
}

func (s *systemd) DisableUnitFiles(files []string, _ bool) ([]unitChange, *dbus.Error) {
	s.called("disable " + strings.Join(files, " "))
	return nil, nil
}
