// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package cache

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/edgehub/edgehub/pkg/cache/journal/memfs"
)

// A vault is a hub's disk and key file over several starts.
type vault struct {
	t      *testing.T
	fs     *memfs.FS
	file   string
	server *fakeServer
	all    bool // SealAll
}

const (
	vaultSecrets    = "/api/v1/namespaces/a/secrets"
	vaultConfigMaps = "/api/v1/namespaces/a/configmaps"
	secretText      = "correct-horse-battery-staple"
	mapText         = "nothing-to-hide-in-this-one"
	tokenText       = "a-token-that-kubelet-was-given"
)

func newVault(t *testing.T) *vault {
	t.Helper()
	v := &vault{t: t, fs: memfs.New(), file: filepath.Join(t.TempDir(), "key"), server: newFakeServer()}
	v.server.put("secrets/a/s", secretText)
	v.server.put("configmaps/a/c", mapText)
	return v
}

// keys writes the key file, each key 32 times a byte.
func (v *vault) keys(bytesOf ...byte) {
	var text strings.Builder
	for _, b := range bytesOf {
		text.WriteString(base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{b}, 32)) + "\n")
	}
	if err := os.WriteFile(v.file, []byte(text.String()), 0o600); err != nil {
		v.t.Fatal(err)
	}
}

// start is after a crash, if there was a start before.
func (v *vault) start() *hub {
	v.t.Helper()
	v.fs = v.fs.Kill()
	h := coldHub(v.t, v.fs, v.server, v.file)
	v.t.Cleanup(h.stop)
	h.cfg.SealAll = v.all
	h.loadAll(v.t.Context())
	return h
}

// fill has everything recorded that can be.
func (v *vault) fill(h *hub) {
	v.t.Helper()
	for _, path := range []string{vaultSecrets, vaultSecrets + "/s", vaultConfigMaps, vaultConfigMaps + "/c"} {
		h.body(alice, path)
	}
	h.body(alice, "/version")
	h.PutResponse(alice, "tokenrequest", "k", Response{ContentType: "text/plain", Body: []byte(tokenText), Time: time.Now()})
	v.flush(h)
}

func (v *vault) flush(h *hub) {
	v.t.Helper()
	if err := h.flushAll(everything); err != nil {
		v.t.Fatal(err)
	}
}

// shown is what is replayed.
func (v *vault) shown(h *hub) (found []string) {
	v.server.setDown(true)
	defer v.server.setDown(false)
	for name, path := range map[string]string{"secrets": vaultSecrets, "secret": vaultSecrets + "/s", "configmaps": vaultConfigMaps, "configmap": vaultConfigMaps + "/c", "version": "/version"} {
		if resp, err := h.do(v.t.Context(), alice, path); err == nil {
			if resp.StatusCode == http.StatusOK {
				found = append(found, name)
			}
			resp.Body.Close()
		}
	}
	if r, ok := h.Response(alice, "tokenrequest", "k"); ok && string(r.Body) == tokenText {
		found = append(found, "token")
	}
	slices.Sort(found)
	return found
}

// inClear are the texts that lie on disk as they are.
func (v *vault) inClear() (found []string) {
	for name, text := range map[string]string{"secret": secretText, "configmap": mapText, "token": tokenText, "version": `{"major":"1"}`} {
		for _, f := range v.fs.Files() {
			if bytes.Contains(v.fs.ReadFile(f), []byte(text)) {
				found = append(found, name)
				break
			}
		}
	}
	slices.Sort(found)
	return found
}

func (v *vault) want(what string, got, want []string) {
	v.t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		v.t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

var (
	vaultAll   = []string{"configmap", "configmaps", "secret", "secrets", "token", "version"}
	vaultClear = []string{"configmap", "configmaps", "version"}
	vaultOpen  = []string{"configmap", "version"}
)

// A new key above the old one: everything is there all the time, and once it is
// written anew the old key is not needed.
func TestEncryptionKeyRotates(t *testing.T) {
	v := newVault(t)
	v.keys(1)
	h := v.start()
	v.fill(h)
	h.stop()
	v.keys(2, 1)
	h = v.start()
	if got := h.logsToReseal(); got != 2 {
		t.Errorf("logsToReseal() = %d, want 2: the Secrets and the token", got)
	}
	v.want("with both keys", v.shown(h), vaultAll)
	fault := func(op memfs.Op) error {
		if op.Name == "sync" {
			return syscall.ENOSPC
		}
		return nil
	}
	v.fs.SetFault(fault)
	v.server.put("secrets/a/s", secretText) // at another resourceVersion
	h.body(alice, vaultSecrets)
	if err := h.flushAll(everything); !errors.Is(err, syscall.ENOSPC) || h.logsToReseal() != 2 {
		t.Fatalf("flush on a full disk: %v, %d logs to be written, want 2", err, h.logsToReseal())
	}
	v.want("before it could be written", v.shown(h), vaultAll)
	v.fs.SetFault(nil)
	v.flush(h)
	if got := h.logsToReseal(); got != 2 {
		t.Errorf("logsToReseal() = %d right after a rewrite that failed, want 2: there is no second one at once", got)
	}
	h.now = func() time.Time { return time.Now().Add(2 * rewriteRetry) }
	v.flush(h)
	if got := h.logsToReseal(); got != 0 {
		t.Errorf("logsToReseal() = %d after a flush, want 0", got)
	}
	v.want("written anew", v.shown(h), vaultAll)
	h.stop()
	v.want("in clear", v.inClear(), vaultOpen)
	v.keys(2)
	h = v.start()
	v.want("with the new key", v.shown(h), vaultAll)
	h.stop()
}

// A key that is lost or another one: what is sealed is fetched again, all else is
// there, and nothing fails.
func TestLostEncryptionKey(t *testing.T) {
	v := newVault(t)
	v.keys(1)
	h := v.start()
	v.fill(h)
	h.stop()
	v.keys(3)
	h = v.start()
	v.want("with another key", v.shown(h), vaultClear)
	v.flush(h)
	v.fill(h)
	v.want("fetched again", v.shown(h), vaultAll)
	h.stop()
	h = v.start()
	v.want("after another start", v.shown(h), vaultAll)
	h.stop()
}

// SealAll may be turned on and off; the next flush writes what is there anew.
func TestSealAll(t *testing.T) {
	v := newVault(t)
	v.keys(1)
	h := v.start()
	v.fill(h)
	h.stop()
	v.want("in clear", v.inClear(), vaultOpen)
	for _, all := range []bool{true, false} {
		v.all = all
		h = v.start()
		v.want("before it is written anew", v.shown(h), vaultAll)
		v.flush(h)
		v.want("written anew", v.shown(h), vaultAll)
		h.stop()
		if all {
			v.want("in clear with SealAll", v.inClear(), nil)
		} else {
			v.want("in clear without SealAll", v.inClear(), vaultOpen)
		}
		h = v.start()
		v.want("after a start", v.shown(h), vaultAll)
		h.stop()
	}
}

// What must be sealed is not taken in clear: somebody else has put it there.
func TestClearTextIsNoSecret(t *testing.T) {
	v := newVault(t)
	v.keys(1)
	h := v.start()
	for _, n := range []logName{{User: alice.GetName(), Identity: identityOf(alice, nil), Class: "tokenrequest"}, {User: alice.GetName(), Identity: identityOf(alice, nil), Version: "v1", Resource: "secrets"}} {
		l := h.logOf(n)
		l.seal, l.rewriteAfter = "", h.now().Add(time.Hour) // as a forger would write it
	}
	v.fill(h)
	v.want("in clear", v.inClear(), []string{"configmap", "secret", "token", "version"})
	h.stop()
	h = v.start()
	v.want("after a start", v.shown(h), vaultClear)
	v.flush(h)
	h.stop()
	v.want("in clear, later", v.inClear(), vaultOpen)
}

// A log that cannot be written anew for want of room is appended to with the old key (ADR 11).
func TestRotationOnANearlyFullDiskStillAppends(t *testing.T) {
	v := newVault(t)
	v.keys(1)
	for i := range 300 {
		v.server.put(fmt.Sprintf("secrets/a/big%03d", i), strings.Repeat("x", 10<<10))
	}
	h := v.start()
	v.fill(h)
	h.stop()
	v.keys(2, 1)
	h = v.start()
	// There is room for some hundred kilobytes, not for a second copy of 3 MB. Each try gets it back.
	writes := 0
	v.fs.SetFault(func(op memfs.Op) error {
		if op.Name == "write" {
			if writes++; writes > 20 {
				return syscall.ENOSPC
			}
		}
		return nil
	})
	h.body(alice, vaultSecrets) // nothing new
	v.server.put("secrets/a/new", secretText)
	h.body(alice, vaultSecrets)
	for range 10 {
		writes = 0
		if h.flushAll(everything) == nil {
			break
		}
	}
	v.fs.SetFault(nil)
	h.stop()
	h = v.start() // after a crash
	v.server.setDown(true)
	if body := h.body(alice, vaultSecrets); !strings.Contains(body, `"new"`) {
		t.Error("after ten flushes and a crash a new Secret is not on disk: nothing is appended while the log cannot be written anew")
	}
	h.stop()
}

// A verdict that cannot be read just now, for want of file descriptors, is not forgotten for ever.
func TestTransientReadErrorForgetsNoRecord(t *testing.T) {
	v := newVault(t)
	v.keys(1)
	h := v.start()
	refused := Response{ContentType: "application/json", Body: []byte{1}, Time: time.Now()}
	h.PutResponse(nodeUser, "verdict", "k", refused)
	v.flush(h)
	h.stop()
	h = v.start()
	v.fs.SetFault(func(op memfs.Op) error {
		if op.Name == "open" {
			return syscall.EMFILE
		}
		return nil
	})
	if _, ok := h.Response(nodeUser, "verdict", "k"); ok {
		t.Skip("file was open")
	}
	v.fs.SetFault(nil)
	if _, ok := h.Response(nodeUser, "verdict", "k"); !ok {
		t.Error("the refusal of a token is gone for good after one EMFILE")
	}
	h.stop()
}

// A key that is away for one start (a medium that was mounted late) costs that start, not all that it sealed.
func TestKeyThatComesBack(t *testing.T) {
	v := newVault(t)
	v.keys(1)
	h := v.start()
	v.fill(h)
	h.stop()
	v.keys(3) // as seal.New makes one when the file is not there, or Ephemeral
	h = v.start()
	v.server.setDown(true) // nothing can be fetched again
	v.flush(h)
	h.stop()
	v.keys(1)
	h = v.start()
	v.want("when the key is back", v.shown(h), vaultAll)
	h.stop()
	v.keys(3)
	h = v.start()
	h.replaceForeign() // with a link
	v.flush(h)
	if got := h.logsToReseal(); got != 0 {
		t.Errorf("logsToReseal() = %d, want 0: it can be fetched again", got)
	}
	h.stop()
}

// Before the logs are read, as right after the restart that the rotation begins with, nothing is said to be done.
func TestLogsToResealBeforeTheyAreRead(t *testing.T) {
	v := newVault(t)
	v.keys(1)
	h := v.start()
	v.fill(h)
	h.stop()
	v.keys(2, 1)
	h = coldHub(t, v.fs.Kill(), v.server, v.file)
	if got := h.logsToReseal(); got == 0 {
		t.Error("logsToReseal() = 0 and two logs on disk need the old key")
	}
	h.stop()
}

// What was forgotten while a log could not be written anew stays forgotten: whoever has
// lost the right to it must not see it after a crash.
func TestForgottenWhileThereIsNoRoom(t *testing.T) {
	v := newVault(t)
	v.keys(1)
	h := v.start()
	h.body(alice, vaultSecrets+"/s")
	v.flush(h)
	h.stop()
	v.keys(2, 1)
	h = v.start()
	v.fs.SetFault(func(op memfs.Op) error {
		if op.Name == "sync" {
			return syscall.ENOSPC
		}
		return nil
	})
	v.server.refuse = func(*http.Request) int { return http.StatusForbidden }
	resp, err := h.do(t.Context(), alice, vaultSecrets+"/s")
	if err != nil || resp.StatusCode != http.StatusForbidden {
		t.Fatalf("%v, %v, want 403", resp, err)
	}
	resp.Body.Close()
	v.server.refuse = nil
	if err := h.flushAll(everything); err == nil {
		t.Fatal("the flush has not failed")
	}
	v.fs.SetFault(nil)
	v.flush(h) // appended, not written anew
	if got := h.logsToReseal(); got == 0 {
		t.Fatal("the log was written anew: this shows nothing")
	}
	h.stop()
	h = v.start()
	v.want("after a crash", v.shown(h), nil)
	h.stop()
}
