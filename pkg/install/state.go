// Copyright The edgehub Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// A state is what cannot be seen by looking at the node. It is written before what it tells
// of is done, so that who comes after a crash knows what may have happened.
type state struct {
	// Mode is that of what is on the node.
	Mode string `json:"mode,omitempty"`
	// Good is the hash of the version that has proved itself, Previous the one before it, and
	// Placing the one that has not yet. Failed has not, and is not tried again.
	Good     string `json:"good,omitempty"`
	Previous string `json:"previous,omitempty"`
	Placing  string `json:"placing,omitempty"`
	Failed   string `json:"failed,omitempty"`
	Why      string `json:"why,omitempty"` // Failed has failed
	// At is where the hub is that kubelet was pointed at, Written the hash of the kubeconfig
	// for that.
	At      hubAt  `json:"at,omitzero"`
	Written string `json:"written,omitempty"`
	// Paths are those of install, for uninstall and rollback.
	Paths paths `json:"paths,omitzero"`
	// Pointed says that kubelet may be using the hub until it is restarted, Through that it
	// was seen to.
	Pointed bool `json:"pointed,omitempty"`
	Through bool `json:"through,omitempty"`
	// FellBack says that kubelet was pointed at the API server since the hub was silent.
	FellBack bool `json:"fellBack,omitempty"`
}

// clear forgets an install of which nothing is left but what not to try again.
func (s *state) clear() {
	if s.Good == "" && s.Placing == "" && !s.Pointed {
		*s = state{Failed: s.Failed, Why: s.Why}
	}
}

// A hubAt is where a version of the hub is found.
type hubAt struct {
	URL     string `json:"url"`
	Metrics string `json:"metrics"` // URL
	DataDir string `json:"dataDir"`
	// ByCSR: its certificate comes from the cluster's signer, in time.
	ByCSR bool `json:"byCSR,omitempty"`
}

// paths are what an install was told of the host.
type paths struct {
	KubeletKubeconfig string `json:"kubeletKubeconfig"`
	KubeletUnit       string `json:"kubeletUnit"`
	StaticPodDir      string `json:"staticPodDir"`
	UnitDir           string `json:"unitDir"`
	BinDir            string `json:"binDir"`
}

func (p paths) String() string {
	return strings.Join([]string{p.KubeletKubeconfig, p.KubeletUnit, p.StaticPodDir, p.UnitDir, p.BinDir}, " ")
}

// Names in the state directory.
const (
	stateFile      = "state.json"
	lockFile       = "lock"
	backupFile     = "kubelet.conf" // kubelet's kubeconfig as it was
	versionsDir    = "versions"     // manifests or units by hash
	credentialsDir = "credentials"  // what kubelet's kubeconfig had in it
	candidateDir   = "candidate"
)

// ErrBusy means that another installer is at work on this node.
var ErrBusy = errors.New("another edgehub install, uninstall or rollback is at work on this node")

// lock takes the node for this process; the kernel gives it back however this one ends.
func (i *installer) lock() (unlock func(), err error) {
	if i.o.DryRun {
		return func() {}, nil
	}
	if err := i.host.mkdir(i.o.StateDir, 0o700); err != nil {
		return nil, err
	}
	real, err := i.host.resolve(i.inState(lockFile))
	if err != nil {
		return nil, err
	}
	for {
		f, err := os.OpenFile(real, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", i.inState(lockFile), withoutPath(err))
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
			f.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				err = ErrBusy
			}
			return nil, fmt.Errorf("%s: %w", i.inState(lockFile), err)
		}
		// An uninstall removes the file: what is locked must be what the next one finds.
		mine, err := f.Stat()
		there, err2 := os.Lstat(real)
		if err == nil && err2 == nil && os.SameFile(mine, there) {
			return func() {
				// By word: a child between fork and exec has the file, too.
				_ = unix.Flock(int(f.Fd()), unix.LOCK_UN)
				f.Close()
			}, nil
		}
		f.Close()
		if err := i.host.mkdir(i.o.StateDir, 0o700); err != nil {
			return nil, err
		}
	}
}

func (i *installer) inState(names ...string) string {
	return filepath.Join(append([]string{i.o.StateDir}, names...)...)
}

// load reads the state; none is the zero one.
func (i *installer) load() error {
	i.state = state{}
	b, err := i.host.read(i.inState(stateFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(b, &i.state)
	}
	if err != nil {
		return fmt.Errorf("what an earlier install has left: %s: %w", i.inState(stateFile), err)
	}
	return nil
}

// save is a step of its own, taken only if something has changed.
func (i *installer) save(change func(*state)) error {
	before := i.state
	change(&i.state)
	if i.state == before || i.o.DryRun {
		return nil
	}
	b, err := json.MarshalIndent(i.state, "", "  ")
	if err != nil {
		return err
	}
	i.progress("Remember where this is: " + i.inState(stateFile))
	if err := i.host.replace(i.inState(stateFile), append(b, '\n'), 0o600); err != nil {
		i.state = before
		return err
	}
	return nil
}
