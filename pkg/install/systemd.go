// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/coreos/go-systemd/v22/dbus"
	godbus "github.com/godbus/dbus/v5"
)

const unitName = "edgehub.service"

// placedFile returns a file's content, nil if there is none.
func (i *installer) placedFile(file string) ([]byte, error) {
	b, err := i.host.read(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return b, err
}

// A unit is the hub as a service of systemd's. The program has its hash in its name, so
// that two versions lie beside each other.
type unit struct {
	i *installer
}

var _ placement = unit{}

func (u unit) file() string { return filepath.Join(u.i.o.UnitDir, unitName) }

// placed is not what is in the unit's file if the program that it names is gone: it would
// not start after a reboot.
func (u unit) placed() ([]byte, error) {
	b, err := u.i.placedFile(u.file())
	if err != nil || b == nil {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		command, ok := strings.CutPrefix(line, "ExecStart=")
		if program, _, _ := strings.Cut(command, " "); ok && !strings.HasPrefix(program, `"`) && !u.i.host.exists(program) {
			return []byte{}, nil
		}
	}
	return b, nil
}

// program is where the program goes on the host.
func (u unit) program() (string, error) {
	if u.i.programHash == "" {
		f, err := os.Open(u.i.executable())
		if err != nil {
			return "", err
		}
		defer f.Close()
		h := sha256.New()
		if _, err := io.Copy(h, f); err != nil {
			return "", err
		}
		u.i.programHash = hex.EncodeToString(h.Sum(nil)[:8])
	}
	return filepath.Join(u.i.o.BinDir, "edgehub-"+u.i.programHash), nil
}

// unitHead tells an installer's unit.
const unitHead = "# Written by edgehub install; changes are undone."

// unitFormat keeps the hub from all but what it needs; it is to start without a network,
// and before kubelet, which asks it.
const unitFormat = unitHead + `
[Unit]
Description=edgehub, the Kubernetes API on this node
Documentation=https://github.com/edgehub/edgehub
After=network.target
Before=kubelet.service
StartLimitIntervalSec=0

[Service]
ExecStart=%s
Environment=%s=%s
Restart=always
RestartSec=1
TimeoutStopSec=20
OOMScoreAdjust=-999
UMask=0077
NoNewPrivileges=yes
CapabilityBoundingSet=%s
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
ProtectControlGroups=yes
PrivateTmp=yes
ReadWritePaths=%s
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
LockPersonality=yes

[Install]
WantedBy=multi-user.target
`

func (u unit) render(spec hubSpec, hash string) ([]byte, error) {
	program, err := u.program()
	if err != nil {
		return nil, err
	}
	words := []string{quoteWord(program)}
	for _, a := range spec.args() {
		words = append(words, quoteWord(a))
	}
	var capabilities []string
	if spec.needsNetAdmin() {
		capabilities = append(capabilities, "CAP_NET_ADMIN")
	}
	if spec.needsLowPort() {
		capabilities = append(capabilities, "CAP_NET_BIND_SERVICE")
	}
	writable := []string{quotePath(spec.dataDir)}
	if file, ok := hubFlagValue(spec.flags, "encryption-key-file"); ok {
		writable = append(writable, quotePath(filepath.Dir(file)))
	}
	return fmt.Appendf(nil, unitFormat, strings.Join(words, " \\\n    "), placedVariable, hash, strings.Join(capabilities, " "), strings.Join(writable, " ")), nil
}

// quoteWord makes one word of a command line in a unit: neither a specifier, nor a
// variable, nor an end.
func quoteWord(s string) string {
	s = strings.NewReplacer(`\`, `\\`, `"`, `\"`, `%`, `%%`, `$`, `$$`).Replace(s)
	if s == "" || strings.ContainsAny(s, " '\";\\") {
		return `"` + s + `"`
	}
	return s
}

// quotePath is quoteWord for lists of paths, which know no variables.
func quotePath(s string) string { return strings.ReplaceAll(quoteWord(s), "$$", "$") }

// programs are those that a unit or two of ours may run.
func (u unit) programs() ([]string, error) {
	dir, err := u.i.host.resolve(u.i.o.BinDir)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", u.i.o.BinDir, withoutPath(err))
	}
	var found []string
	for _, e := range entries {
		hash, ours := strings.CutPrefix(strings.TrimPrefix(e.Name(), "."), "edgehub-")
		hash, _, _ = strings.Cut(hash, ".")
		if _, err := hex.DecodeString(hash); ours && err == nil && len(hash) == 16 {
			found = append(found, filepath.Join(u.i.o.BinDir, e.Name()))
		}
	}
	return found, nil
}

func (u unit) place(ctx context.Context, content []byte) error {
	program, err := u.program()
	if err != nil {
		return err
	}
	// An older version runs the program that is there for it.
	if bytes.Contains(content, []byte("ExecStart="+quoteWord(program)+" ")) && !u.i.host.exists(program) {
		err := u.i.step("Copy the program to "+program, func() error { return u.i.host.copyProgram(u.i.executable(), program) })
		if err != nil {
			return err
		}
	}
	before, err := u.placed()
	if err != nil {
		return err
	}
	if !bytes.Equal(before, content) {
		if err := u.i.step("Place the unit: "+u.file(), func() error { return u.i.host.replace(u.file(), content, 0o644) }); err != nil {
			return err
		}
	}
	return u.i.step("Start it by systemd: "+unitName, func() error {
		return u.i.bySystemd(ctx, func(ctx context.Context, c *dbus.Conn) error {
			if err := c.ReloadContext(ctx); err != nil {
				return fmt.Errorf("daemon-reload: %w", err)
			}
			if _, _, err := c.EnableUnitFilesContext(ctx, []string{unitName}, false, true); err != nil {
				return fmt.Errorf("enable %s: %w", unitName, err)
			}
			return job(ctx, c, dbusRestart, unitName) // it may be an older one that runs
		})
	})
}

func (u unit) remove(ctx context.Context) error {
	if there, err := u.placed(); err != nil {
		return err
	} else if there != nil {
		err := u.i.step("Stop it by systemd: "+unitName, func() error {
			return u.i.bySystemd(ctx, func(ctx context.Context, c *dbus.Conn) error {
				if err := job(ctx, c, dbusStop, unitName); err != nil {
					return err
				}
				_, err := c.DisableUnitFilesContext(ctx, []string{unitName}, false)
				return err
			})
		})
		if err != nil {
			return err
		}
		err = u.i.step("Remove the unit: "+u.file(), func() error {
			if err := u.i.host.remove(u.file()); err != nil {
				return err
			}
			return u.i.bySystemd(ctx, func(ctx context.Context, c *dbus.Conn) error { return c.ReloadContext(ctx) })
		})
		if err != nil {
			return err
		}
	}
	programs, err := u.programs()
	if err != nil {
		return err
	}
	for _, p := range programs {
		if err := u.i.step("Remove the program: "+p, func() error { return u.i.host.remove(p) }); err != nil {
			return err
		}
	}
	return nil
}

// prune removes programs.
func (u unit) prune(kept [][]byte) error {
	programs, err := u.programs()
	if err != nil {
		return err
	}
	for _, p := range programs {
		used := false
		for _, content := range kept {
			used = used || bytes.Contains(content, []byte("ExecStart="+quoteWord(p)+" "))
		}
		if used {
			continue
		}
		if err := u.i.step("Remove the program: "+p, func() error { return u.i.host.remove(p) }); err != nil {
			return err
		}
	}
	return nil
}

// What is asked of systemd.
const (
	dbusRestart = "restart"
	dbusStop    = "stop"
)

// bySystemd calls do with a connection to the host's systemd, for as long as one thing may
// take.
func (i *installer) bySystemd(ctx context.Context, do func(context.Context, *dbus.Conn) error) error {
	ctx, cancel := context.WithTimeout(ctx, i.o.ReadyTimeout)
	defer cancel()
	socket, err := i.host.resolve(i.o.SystemBusSocket)
	if err != nil {
		return fmt.Errorf("systemd: %w", err)
	}
	conn, err := dbus.NewConnection(func() (*godbus.Conn, error) {
		c, err := godbus.Dial("unix:path="+godbus.EscapeBusAddressValue(socket), godbus.WithContext(ctx))
		if err != nil {
			return nil, err
		}
		if err = c.Auth([]godbus.Auth{godbus.AuthExternal(strconv.Itoa(os.Getuid()))}); err == nil {
			err = c.Hello()
		}
		if err != nil {
			return nil, errors.Join(err, c.Close())
		}
		return c, nil
	})
	if err != nil {
		return fmt.Errorf("systemd, by the bus %s: %w", i.o.SystemBusSocket, err)
	}
	defer conn.Close()
	if err := do(ctx, conn); err != nil {
		return fmt.Errorf("systemd: %w", err)
	}
	return nil
}

// job waits until systemd has done it.
func job(ctx context.Context, c *dbus.Conn, verb, unit string) error {
	ended := make(chan string, 1)
	var err error
	switch verb {
	case dbusRestart:
		_, err = c.RestartUnitContext(ctx, unit, "replace", ended)
	case dbusStop:
		_, err = c.StopUnitContext(ctx, unit, "replace", ended)
	}
	if err != nil {
		if e := (godbus.Error{}); verb == dbusStop && errors.As(err, &e) && e.Name == "org.freedesktop.systemd1.NoSuchUnit" {
			return nil
		}
		return fmt.Errorf("%s %s: %w", verb, unit, err)
	}
	select {
	case result := <-ended:
		if result != "done" {
			return fmt.Errorf("%s %s: the job ended as %q", verb, unit, result)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s %s: %w", verb, unit, ctx.Err())
	}
}
